"""The library imports torch alone: no trainer comes along with it."""

import subprocess
import sys

TRAINERS = ["lightning", "transformers", "accelerate", "sklearn"]


def test_importing_consequent_imports_no_trainer():
    code = f"import sys, consequent; print([name for name in {TRAINERS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
