"""Importing the package costs little beyond importing torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import consequent

SCRIPT = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import consequent
seconds = time.perf_counter() - start
print(seconds)
print(*sorted({name for name in sys.modules if name not in before and not name.startswith("consequent")}))
"""


def imported(cache: Path) -> tuple[float, list[str]]:
    """How many seconds the import took after torch's own, and which modules of others came along."""
    environment = dict(os.environ, PYTHONPATH=str(Path(consequent.__file__).parents[1]), PYTHONPYCACHEPREFIX=str(cache))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    seconds, others = done.stdout.split("\n")[:2]
    return float(seconds), others.split()


@pytest.mark.slow
def test_the_import_is_cheap_and_brings_nothing_along(tmp_path):
    imported(tmp_path)  # compiles to bytecode, as an installation does
    found = [imported(tmp_path) for _ in range(2)]
    for heavy in ("torch._dynamo", "torch.distributed.tensor", "triton", "sympy", "numpy"):
        assert not any(name == heavy or name.startswith(heavy + ".") for name in found[0][1]), heavy
    assert min(seconds for seconds, _ in found) < 0.5  # 0.04 on an idle machine; what it must not bring takes 1
