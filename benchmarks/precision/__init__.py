"""The error of the update when Gram matrices are computed in float32, TF32 or bfloat16, as training goes on.

PYTHONPATH=src python -m benchmarks.precision --iterations 400 --data data    # results/precision-cpu.json
"""
