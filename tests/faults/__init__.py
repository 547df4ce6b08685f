"""Breaks things on purpose and counts what becomes of training runs: `PYTHONPATH=../src python -m faults` in tests/."""
