import os
from importlib.util import find_spec

# Some virtual machines announce the AMX instructions and then refuse them; oneDNN's bfloat16 products would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Doctests import every module, and the kernels need Triton, which is not made for every platform.
collect_ignore_glob = [] if find_spec("triton") else ["src/consequent/kernels/*"]
