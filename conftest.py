"""What must be said before anything is imported, for all tests."""

import os

# Some virtual machines announce the AMX instructions and then refuse them; oneDNN's bfloat16 products would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
