"""How long a step takes, at the sizes that docs/whole-network.md names."""

import json
import os
import pathlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian

import consequent
from benchmarks.residuals.problems import fit, perceptron, value_of


def equation(model: nn.Module, x: Tensor) -> Tensor:
    return hessian(value_of(model))(x).trace() + 2 * torch.pi**2 * (torch.pi * x).sin().prod()


SIZES: dict[str, tuple[tuple[int, ...], Callable[..., Tensor], int]] = {
    "equation": ((2, 48, 48, 48, 1), equation, 1000),
    "regression": ((8, 384, 384, 384, 1), fit, 2048),
}
SIZES_OF_GPU = {
    "equation": SIZES["equation"],
    "wide equation": ((2, 384, 384, 384, 1), equation, 8192),
    "wide regression": ((8, 384, 384, 384, 1), fit, 8192),
}


def times(path: pathlib.Path, device: str, steps: int = 15) -> None:
    """Medians of steps, on two threads or on a GPU, with and without CUDA graphs."""
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    machine = {"cores": os.cpu_count()} if device == "cpu" else {"gpu": torch.cuda.get_device_name()}
    found: dict[str, Any] = machine | {"torch": torch.__version__}
    for name, (widths, residual, samples) in (SIZES if device == "cpu" else SIZES_OF_GPU).items():
        for graph in (False, True)[: 1 if device == "cpu" else 2]:
            torch.manual_seed(0)
            model, x = perceptron(*widths).to(device), torch.rand(samples, widths[0]).to(device)
            batch = (x,) if "equation" in name else (x, x.sum(1, keepdim=True).sin())
            solver, seconds = consequent.WholeNetwork(model, residual, cuda_graph=graph), []
            for _ in range(steps):
                start = time.perf_counter()
                solver.step(*batch)  # it waits for its result
                seconds.append(time.perf_counter() - start)
            size = sum(p.numel() for p in model.parameters())
            key = name + ", CUDA graph" * graph
            found[key] = {"samples": samples, "parameters": size, "seconds": round(median(seconds), 4)}
            if device != "cpu":
                found[key] |= {
                    "first": round(seconds[0], 2),
                    "peak GB": round(torch.cuda.max_memory_reserved() / 1e9, 2),
                }
                solver = None  # its graphs hold memory
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
