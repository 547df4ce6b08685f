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


def times(path: pathlib.Path, steps: int = 15) -> None:
    """Medians of steps, on two threads."""
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__}
    for name, (widths, residual, samples) in SIZES.items():
        torch.manual_seed(0)
        model, x = perceptron(*widths), torch.rand(samples, widths[0])
        batch = (x,) if name == "equation" else (x, x.sum(1, keepdim=True).sin())
        solver, seconds = consequent.WholeNetwork(model, residual), []
        for _ in range(steps):
            start = time.perf_counter()
            solver.step(*batch)
            seconds.append(time.perf_counter() - start)
        size = sum(p.numel() for p in model.parameters())
        found[name] = {"samples": samples, "parameters": size, "seconds": round(median(seconds), 3)}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
