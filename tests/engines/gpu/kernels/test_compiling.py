"""Which kernels are compiled, and when, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

DENSE = {"_gram": 1, "_factor": 1, "_solve": 1, "_look": 1, "_write": 1}
FEATURES = {"_factorise": 1, "_first_product": 1, "_second_product": 1}
LAGS = {"_multiply": 3, "_put_lags": 4}
EXPECTED = {
    "ResNet-20": FEATURES | LAGS | {"_turn_around": 2, "_multiply_strips": 1, "_add_splits": 1, "_pad": 1},
    "ResNet-20, channels first": FEATURES
    | LAGS
    | {"_turn_around": 3, "_multiply_strips": 1, "_add_splits": 1, "_pad": 1},
    "MLP 3072-8×800-10, batch 32": DENSE,
    "MLP 256-5×256-10, batch 16384": FEATURES | {"_pad": 1},
}


def printed_by(script, *arguments):
    """Runs the script, with Triton's compiler in the place of its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_what_was_rehearsed_is_not_compiled_again():
    rehearsed, for_launches = json.loads(printed_by("rehearse_kernels.py"))
    assert rehearsed == ["_add_splits", "_multiply_strips"]
    assert for_launches == ["_multiply_strips"], "of half precision, which nobody rehearsed"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["90"], id="sm_90"),
        pytest.param(["90", "more"], id="sm_90, more shapes", marks=pytest.mark.slow),
        pytest.param(["80", "more"], id="sm_80, more shapes", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_as_it_is_launched(arguments):
    found = json.loads(printed_by("compile_kernels.py", *arguments))
    assert found["made_later"] == ["table.py"], "a kernel that is made at run time is not seen here: let it be compiled"
    made_later = {name for name in found["compiled"] if name.startswith("table.write_")}
    assert made_later
    assert set(found["compiled"]) - made_later == set(found["kernels"]), "one that nothing launches, or not here"


def test_what_is_compiled_for_known_networks():
    assert json.loads(printed_by("count_compilations.py")) == EXPECTED, "each compilation takes a second or several"


def test_all_that_first_steps_launch_was_foreseen():
    found = json.loads(printed_by("foresee_kernels.py"))
    assert all(network["launched"] for network in found.values())
    unforeseen = {name: network["unforeseen"] for name, network in found.items() if network["unforeseen"]}
    assert unforeseen == {}
