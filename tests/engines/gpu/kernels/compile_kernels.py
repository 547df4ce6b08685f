"""Trains networks on a GPU that is not here, so that every kernel is compiled as the library launches it.

What Triton's interpreter takes, its compiler need not take. A script of its own, see :mod:`no_gpu`. Prints as JSON
which kernels there are, in which files some are made at run time, and how often each was compiled.

    python compile_kernels.py CAPABILITY [more]
"""

import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import no_gpu
import torch
import triton
from torch import nn

import consequent
from consequent.engines.gpu.kernels import launch as launching


def dense(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def convolutional(*channels, strided=8):
    """Convolutions that keep the image's size, and a last one that does not."""
    kept = [nn.Conv2d(before, after, 3, 1, 1) for before, after in pairwise(channels)]
    return nn.Sequential(*kept, nn.Conv2d(channels[-1], strided, 3, 2, 1))


CHANNELS_LAST = {"memory_format": torch.channels_last}

# What is trained, the shape of its inputs, and what else is special. These launch every kernel.
NETWORKS = {
    "20 rows": (lambda: dense(97, 65, 41), (20, 97), {}),
    "100 rows": (lambda: dense(200, 160, 140), (100, 200), {}),
    "200 rows": (lambda: dense(300, 260, 10), (200, 300), {}),
    "features": (lambda: dense(60, 50, 40), (500, 60), {}),
    "large features": (lambda: nn.Linear(600, 800), (640, 600), {}),
    "kept inverses": (lambda: dense(60, 50, 40), (20, 60), {"averaging": 0.9}),
    "16 channels": (lambda: convolutional(3, 16, 16), (16, 3, 16, 16), CHANNELS_LAST),
    "32 channels": (lambda: convolutional(32, 32), (64, 32, 8, 8), CHANNELS_LAST),
}

# The dense kernel is another one for up to 16, 32, 64 and 128 rows, and where four floats are moved at a time; those of
# convolutions are others for other numbers of channels, types, and orders in memory.
MORE_NETWORKS = {
    "8 rows": (lambda: dense(96, 64, 40), (8, 96), {}),
    "64 rows": (lambda: dense(96, 68, 40), (64, 96), {}),
    "64 rows, not by four": (lambda: dense(97, 67, 41), (64, 97), {}),
    "1100 rows": (lambda: nn.Linear(1200, 10), (1100, 1200), {}),
    "wide features": (lambda: nn.Linear(250, 4200), (300, 250), {}),
    "4096 rows": (lambda: dense(20, 140, 10), (4096, 20), {}),
    "64 channels": (lambda: convolutional(64, 64), (64, 64, 8, 8), CHANNELS_LAST),
    "channels first": (lambda: convolutional(3, 16, 32), (64, 3, 16, 16), {}),
    "bfloat16": (lambda: convolutional(4, 16), (64, 4, 8, 8), CHANNELS_LAST | {"dtype": torch.bfloat16}),
    "float16": (lambda: convolutional(4, 16), (64, 4, 8, 8), {"dtype": torch.float16}),
    "few positions": (lambda: convolutional(4, 4), (5, 4, 7, 7), {}),
}


def train(make_model, shape, at, *, dtype=torch.float32, memory_format=torch.preserve_format, **options):
    """Three steps, the last one as in a CUDA graph, if that can be."""
    model = make_model().to(dtype=dtype, memory_format=memory_format)
    inputs = torch.rand(shape).to(dtype=dtype, memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at=at, **options)
    for is_captured in (False, False, not options):
        torch.cuda.is_current_stream_capturing = lambda is_captured=is_captured: is_captured
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.is_current_stream_capturing = lambda: False
    correction.detach()


def modules_with_kernels():
    """All files of the library that have any, imported."""
    root = Path(consequent.__file__).parent
    files = sorted(file for file in root.rglob("*.py") if "triton.jit" in file.read_text(encoding="utf-8"))
    return {
        file: import_module(".".join(["consequent", *file.relative_to(root).with_suffix("").parts])) for file in files
    }


def entry_points(modules):
    """The kernels that are launched: those that no other one calls."""
    found = {one for module in modules for one in vars(module).values() if isinstance(one, triton.JITFunction)}
    called = {id(one.fn.__globals__.get(name)) for one in found for name in one.fn.__code__.co_names}
    return sorted(name_of(one) for one in found if id(one) not in called)


def name_of(kernel):
    return f"{kernel.fn.__module__.rsplit('.', 1)[-1]}.{kernel.fn.__name__}"


def main(capability, more=""):
    warnings.simplefilter("ignore")  # what comes out of steps is no number
    no_gpu.pretend(int(capability))
    launching.rehearse = lambda work: None  # what is compiled is compiled for a launch
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # sums over many rows are rounded then
    compiled = []
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(name_of(src.fn))
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for make_model, shape, special in (NETWORKS | (MORE_NETWORKS if more else {})).values():
            for at in ("step",) if "averaging" in special else ("step", "backward"):
                train(make_model, shape, at, **special)
    modules = modules_with_kernels()
    made_later = [file.name for file in modules if re.search(r"(?<!@)triton\.jit\(", file.read_text(encoding="utf-8"))]
    found = {"kernels": entry_points(modules.values()), "made_later": made_later, "compiled": Counter(compiled)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
