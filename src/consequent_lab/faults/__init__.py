"""Faults tried on purpose, and what became of them."""
