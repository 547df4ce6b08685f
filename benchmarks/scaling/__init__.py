"""How the cost of a step grows with batch, width, channels, image and depth.

PYTHONPATH=src python -m benchmarks.scaling --device cuda    # bench-scaling.json and its picture
PYTHONPATH=src python -m benchmarks.scaling --draw results/scaling-h200.json    # docs/scaling-h200.png, moved there
PYTHONPATH=src python -m benchmarks.scaling --table results/scaling-h200.json    # the table of docs/speed.md
"""
