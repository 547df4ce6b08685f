"""What must be said before anything is imported, for all tests."""

import os
import sys
from importlib.util import find_spec

import pytest
import torch

# Some virtual machines announce the AMX instructions and then refuse them; oneDNN's bfloat16 products would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Doctests import every module, also those that need a package which is not there (Triton is not made for every
# platform).
NEEDS = {"triton": "engines/gpu/kernels/*"}
NEEDS |= {name: f"integrations/{name}.py" for name in ("lightning", "transformers", "sklearn")}
collect_ignore_glob = [f"src/consequent/{files}" for name, files in NEEDS.items() if not find_spec(name)]

if not torch.cuda.is_available():
    # Kernels then run on CPU tensors, in Triton's interpreter, if it was told so before it was imported. It may have
    # been imported by now, by one of pytest's plugins.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]

import exact  # noqa: E402  (the library must not be imported before)


@pytest.fixture
def bounded(monkeypatch):
    """The bound as users have it; for other tests ``exact`` has turned it off."""
    monkeypatch.setattr("consequent.engines.step.Rewriter._limit", exact.LIMIT)
