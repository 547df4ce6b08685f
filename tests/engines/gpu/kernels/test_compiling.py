"""The kernels compile for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = set(done.stdout.split()[1::2])
    assert {"_gram", "_factor", "_solve", "_look", "_write", "_first_product", "_second_product", "_gather"} <= compiled
    assert {"_factorise", "_turn_around", "_multiply_rows", "_multiply_groups", "_put_lags"} <= compiled
    assert {"_multiply_strips", "_add_splits", "write_96"} <= compiled
