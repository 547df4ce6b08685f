r"""Residual problems by the clock: ``WholeNetwork`` beside what people use today, with equal seconds for all.

Fixed before any run: everybody has the same network, first weights and samples with the same seed, float64, one thread,
and the same processor seconds (``--seconds``, 10) for each run. Each rival has four trials with seed 1000, and its best
setting by the error at the end goes into five finals with seeds 0 to 4; ours has no setting and no trial. The measure
is the relative error on held-out points when the time is over. "Ahead" is ahead in all pairs of seeds.

On a GPU the same for the five equations, by the wall clock, four seconds for each run, with rivals that were among the
best on the CPU; all are in CUDA graphs but SOAP's own arithmetic, which cannot be:

    python -m benchmarks.residuals run --device cuda --seconds 4 --results results/residuals-gpu.jsonl \
        --problems poisson-2d poisson-5d heat burgers helmholtz --contestants WholeNetwork L-BFGS Adam SOAP

How many of many samples a step should take (20 seconds; Adam has eight trials; all of ours are shown):

    python -m benchmarks.residuals batches results/residuals-batches.jsonl

Poisson's equation in five dimensions with new samples at each step, for those whose steps can have them:

    python -m benchmarks.residuals run --problems "poisson-5d, new samples" \
        --results results/residuals-new-samples.jsonl \
        --contestants WholeNetwork Adam SOAP Muon torch-levenberg-marquardt

On a CPU:

    python -m benchmarks.residuals run --problems poisson-2d heat    # adds lines to results/residuals.jsonl
    python -m benchmarks.residuals table                             # prints the table
    python -m benchmarks.residuals figure docs/residuals.svg
    python -m benchmarks.residuals one-step docs/whole-network.svg
    python -m benchmarks.residuals times results/residuals-times.json    # of steps, on two threads
    python -m benchmarks.residuals times results/residuals-times-gpu.json --device cuda

``torch-levenberg-marquardt`` (1.2.3) is installed without its dependencies: ``pip install --no-deps …``.
"""
