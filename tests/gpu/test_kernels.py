"""The kernels without a GPU: in Triton's interpreter, which has to be chosen before anything is imported."""

import os
import pathlib
import re
import subprocess
import sys

import pytest


def passed_in_interpreter(which):
    pytest.importorskip("triton", reason="Triton is not installed, whose kernels these are")
    file = pathlib.Path(__file__).with_name("in_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout
    return int(re.search(r"(\d+) passed", ended.stdout)[1])


def test_kernels_do_what_their_plain_lines_do():
    assert passed_in_interpreter("not training") >= 14


@pytest.mark.slow
def test_training_by_kernels():
    assert passed_in_interpreter("training") >= 12
