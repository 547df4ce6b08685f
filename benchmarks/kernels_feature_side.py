"""The kernels of the feature side on a CUDA device: errors against float64, and times, beside plain torch.

python benchmarks/kernels_feature_side.py          # two tables
python benchmarks/kernels_feature_side.py sweep    # other tilings of the same kernels, the fastest first

Times are medians in microseconds: "cold" by ``triton.testing.do_bench`` (the cache is emptied before every call),
"graph" in a CUDA graph (no launches to wait for), "host" what a call takes of the host. TFLOP/s count what the result
needs (half of a symmetric product, whatever the method), GB/s the inputs and the result, both by the time in a graph.
Kernels are compiled by several processes at once, before anything is measured.
"""

import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor, nn

from consequent.kernels import factor, lags, moment
from consequent.moments import second_moment

BATCH = 128
SHAPES = [(3, 32, 1), (16, 32, 1), (16, 32, 2), (32, 16, 1), (32, 16, 2), (64, 8, 1)]  # channels, height, stride
SIZES = [28, 65, 145, 289, 577, 1024]
COMPILERS = min(14, os.cpu_count() or 1)
STREAMS = 6

Job = tuple[str, Callable[[], Any]]


def images(channels: int, height: int, layout: str) -> Tensor:
    torch.manual_seed(channels)
    inputs = torch.randn(BATCH, channels, height, height, device="cuda").relu_()
    return inputs.to(memory_format=torch.channels_last) if layout == "channels_last" else inputs


def moment_jobs(inputs: Tensor, stride: int) -> list[Job]:
    """All ways to the second moment of a 3 × 3 convolution of these inputs."""
    steps, ones = (stride, stride), (1, 1)
    convolution = nn.Conv2d(inputs.shape[1], 1, 3, stride, 1)

    def direct(precision: moment.Precision) -> Callable[[], Tensor]:
        return lambda: moment.patch_moment(inputs, (3, 3), steps, ones, ones, ones=True, precision=precision)

    def lagged(precision: moment.Precision) -> Callable[[], Tensor]:
        return lambda: lags.lag_moment(inputs, ones=True, precision=precision)

    fast_layout = inputs.stride(1) == 1
    precisions: tuple[moment.Precision, ...] = ("tf32", "tf32x3", "bf16") if fast_layout else ("tf32",)
    jobs: list[Job] = [(f"patch_moment {precision}", direct(precision)) for precision in precisions]
    if lags.suits_lags((3, 3), steps, ones, ones) and inputs.shape[1] >= 8:
        jobs += [(f"lag_moment {precision}", lagged(precision)) for precision in precisions]
    jobs.append(("torch im2col tf32", lambda: second_moment(convolution, inputs, ones=True)[0]))
    return jobs


def every_moment() -> list[tuple[str, Tensor, int, list[Job]]]:
    cases = []
    for (channels, height, stride), layout in itertools.product(SHAPES, ("channels_last", "contiguous")):
        inputs = images(channels, height, layout)
        cases.append((f"{channels}ch {height}² /{stride} {layout}", inputs, stride, moment_jobs(inputs, stride)))
    return cases


def damped_moment(size: int) -> Tensor:
    torch.manual_seed(size)
    rows = torch.randn(4 * size, size, device="cuda").relu_()
    return rows.T @ rows


def torch_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`inverse_factor` does, in torch."""
    unit = torch.eye(len(matrix), device="cuda")
    lower, info = torch.linalg.cholesky_ex(matrix + 0.03 * unit)
    return torch.linalg.solve_triangular(lower, unit, upper=False), info


def cold(function: Callable[[], Any]) -> float:
    return 1e3 * float(triton.testing.do_bench(function, warmup=5, rep=20, return_mode="median"))


def in_graph(function: Callable[[], Any]) -> float:
    return 1e3 * float(triton.testing.do_bench_cudagraph(function, rep=10, return_mode="median"))


def on_host(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def on_streams(function: Callable[[], Any]) -> float:
    """The time for several at once, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # about a millisecond for the host to queue all of them
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for stream in streams:
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                function()
            torch.cuda.current_stream().wait_stream(stream)
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times[2:])


def moment_table() -> None:
    print(f"\nSecond moments of 3×3 convolutions, padding 1, batch {BATCH}")
    print(f"{'case':32} {'method':22} {'error':>8} {'cold':>7} {'graph':>7} {'host':>6} {'TFLOP/s':>8} {'GB/s':>6}")
    for name, inputs, stride, jobs in every_moment():
        layer = nn.Conv2d(inputs.shape[1], 1, 3, stride, 1)
        exact = second_moment(layer, inputs.double(), ones=True)[0]
        for method, function in jobs:
            error = ((function() - exact).abs().max() / exact.abs().max()).item()
            times = cold(function), in_graph(function), on_host(function)
            rows = BATCH * (inputs.shape[2] // stride) ** 2
            flops, moved = exact.shape[0] ** 2 * rows, 4 * (inputs.numel() + exact.numel())
            rates = f"{flops / times[1] / 1e6:8.1f} {moved / times[1] / 1e3:6.0f}"
            print(f"{name:32} {method:22} {error:8.1e} {times[0]:7.1f} {times[1]:7.1f} {times[2]:6.1f} {rates}")


def factor_table() -> None:
    print(f"\nInverse Cholesky factors; the last column: {STREAMS} at once on as many streams")
    titles = f"{'error':>8} {'cold':>8} {'graph':>8} {'host':>6} {'GFLOP/s':>8} {'GB/s':>6} {'streams':>8}"
    print(f"{'size':>5} {'method':16} {titles}")
    for size in SIZES:
        matrix = damped_moment(size)
        exact = matrix.double() + 0.03 * torch.eye(size, device="cuda", dtype=torch.float64)
        for method, function in (
            ("inverse_factor", lambda matrix=matrix: factor.inverse_factor(matrix, 0.03)),
            ("torch", lambda matrix=matrix: torch_factor(matrix)),
        ):
            W = function()[0].double()
            unit = W @ exact @ W.T - torch.eye(size, device="cuda", dtype=torch.float64)
            error = torch.linalg.matrix_norm(unit, 2).item()
            graph = in_graph(function) if method == "inverse_factor" else float("nan")  # torch's may refuse
            times = cold(function), graph, on_host(function)
            best = times[0] if method == "torch" else graph
            rates = f"{2 * size**3 / 3 / best / 1e3:8.1f} {8 * size**2 / best / 1e3:6.1f}"
            timing = f"{times[0]:8.1f} {times[1]:8.1f} {times[2]:6.1f} {rates} {on_streams(function):8.1f}"
            print(f"{size:5} {method:16} {error:8.1e} {timing}")


def with_plan(module: Any, plan: Any, function: Callable[[], Any]) -> Callable[[], Any]:
    """The same call with another tiling."""

    def call() -> Any:
        before, module.tiling = module.tiling, lambda *_: plan
        forget = getattr(getattr(module, "_cut", None), "cache_clear", lambda: None)
        forget()
        try:
            return function()
        finally:
            module.tiling = before
            forget()

    return call


def sweep_cases() -> list[tuple[str, list[Job]]]:
    """For each kernel and shape, the tilings to try."""
    cases: list[tuple[str, list[Job]]] = []
    for (channels, height, stride), layout in itertools.product(SHAPES, ("channels_last", "contiguous")):
        inputs = images(channels, height, layout)
        jobs = dict(moment_jobs(inputs, stride))
        lagged = "lag_moment tf32" in jobs
        method, module = ("lag_moment tf32", lags) if lagged else ("patch_moment tf32", moment)
        base = lags.tiling(channels, layout == "channels_last") if lagged else moment.tiling(9 * channels + 1)
        changes: list[dict[str, int]] = [{}]
        changes += [{"programs": programs} for programs in (1, 2, 4, 6)]
        changes += [{"stages": stages} for stages in (1, 2, 4)]
        changes += [{"depth": depth} for depth in (16, 32, 64, 128)]
        changes += [{"warps": warps} for warps in (4, 8)]
        changes += (
            [{"lagged": 64}, {"lagged": 256, "warps": 8}] if lagged else [{"block": 64}, {"block": 128, "warps": 8}]
        )
        plans = {dataclasses.replace(base, **change): None for change in changes}
        tried = [(str(plan), with_plan(module, plan, jobs[method])) for plan in plans]
        cases.append((f"{channels}ch {height}² /{stride} {layout}, {method}", tried))
    for size in (28, 145, 577):
        matrix = damped_moment(size)
        shapes = [(32, 4, 3), (32, 4, 1), (64, 4, 3), (64, 8, 3), (128, 8, 3), (128, 8, 2), (128, 8, 1), (128, 4, 2)]
        plans = [factor.Tiling(*shape) for shape in shapes]
        call = lambda matrix=matrix: factor.inverse_factor(matrix, 0.03)  # noqa: E731
        cases.append((f"inverse_factor {size}", [(str(plan), with_plan(factor, plan, call)) for plan in plans]))
    return cases


def sweep_table() -> None:
    for name, jobs in sweep_cases():
        print(f"\n{name}")
        found = []
        for plan, function in jobs:
            try:
                found.append((in_graph(function), plan))
            except Exception as error:  # a tiling that does not fit into the multiprocessor
                print(f"   failed: {plan}: {type(error).__name__}")
        for taken, plan in sorted(found)[:5]:
            print(f"{taken:9.1f}  {plan}")
        print(f"{found[0][0]:9.1f}  {found[0][1]}  (as it is)" if found else "   none")


def all_jobs(mode: str) -> list[Job]:
    if mode == "sweep":
        return [job for _, jobs in sweep_cases() for job in jobs]
    jobs = [job for _, _, _, some in every_moment() for job in some]
    return jobs + [("", lambda s=size: factor.inverse_factor(damped_moment(s), 0.03)) for size in (28, 577)]


def compile_share(mode: str, share: int) -> None:
    for _, function in all_jobs(mode)[share::COMPILERS]:
        try:
            function()
        except Exception as error:
            print(f"not compiled: {error!r}"[:300])


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else "tables"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    if mode.startswith("compile:"):
        _, for_mode, share = mode.split(":")
        compile_share(for_mode, int(share))
        return
    start = time.perf_counter()
    commands = [[sys.executable, __file__, f"compile:{mode}:{share}"] for share in range(COMPILERS)]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}; compiled in {time.perf_counter() - start:.0f} s")
    if mode == "sweep":
        sweep_table()
    else:
        moment_table()
        factor_table()
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
