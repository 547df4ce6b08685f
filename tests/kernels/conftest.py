import os
import sys

import torch

if not torch.cuda.is_available():
    # Kernels then run on CPU tensors, in Triton's interpreter, if it was told so before it was imported. It has been
    # imported by now: the filters for warnings have pytest import the library, and that torch.compiler.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]
