"""What must be said before anything is imported, for all tests."""

import os
import sys
from importlib.util import find_spec

import torch

# Some virtual machines announce the AMX instructions and then refuse them; oneDNN's bfloat16 products would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Doctests import every module, and the kernels need Triton, which is not made for every platform.
collect_ignore_glob = [] if find_spec("triton") else ["src/consequent/kernels/*"]

if not torch.cuda.is_available():
    # Kernels then run on CPU tensors, in Triton's interpreter, if it was told so before it was imported. It has been
    # imported by now: the filters for warnings have pytest import the library, and that torch.compiler.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]
