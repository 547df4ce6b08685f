"""The kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="triton is not installed")


def printed_by(script, *arguments):
    """Runs the script, with Triton's compiler in the place of its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_was_rehearsed_is_not_compiled_again():
    rehearsed, for_launches = json.loads(printed_by("rehearse_kernels.py"))
    assert rehearsed == ["_add_splits", "_multiply_strips"]
    assert for_launches == ["_multiply_strips"], "of half precision, which nobody rehearsed"


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability):
    compiled = set(printed_by("compile_kernels.py", str(capability)).split()[1::2])
    assert {"_gram", "_factor", "_solve", "_look", "_write", "_first_product", "_second_product", "_gather"} <= compiled
    assert {"_factorise", "_turn_around", "_multiply_rows", "_multiply_groups", "_put_lags"} <= compiled
    assert {"_multiply_strips", "_add_splits", "_pad", "_count_factors", "write_96"} <= compiled
