"""A GPU that is not here: Triton compiles for it, torch takes the CPU's tensors for its, and nothing is launched.

So the library's own code launches every kernel, with the arguments that it gives it on a GPU. What comes out is what
happened to be in memory. For scripts of their own: it cannot be undone, and Triton decides when it is imported whether
to interpret.
"""

from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from consequent.engines.gpu import kernels

DEVICE = torch.device("cuda", 0)
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have, by compute capability
MAKERS = ("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "ones", "tensor", "zeros")
MULTIPROCESSORS = {80: 108, 90: 132}


class Driver:
    """What Triton asks of its driver to compile, to load and to launch a kernel; loads and launches nothing.

    A kernel that needs more shared memory than there is fails all the same: Triton compares.
    """

    def __init__(self, capability):
        self._capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


class Stream:
    """A stream on which nothing happens, or an event there."""

    device, device_index, cuda_stream = DEVICE, 0, 0

    def __init__(self, *arguments, **options):
        pass

    def _nothing(self, *arguments):
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def query(self):
        return True

    def record_event(self):
        return Stream()


def _made_here(make):
    """A function of torch that makes a tensor: what is to be made on a device, or in pinned memory, is made here."""

    @wraps(make)
    def made(*args, device=None, pin_memory=False, **options):
        return make(*["cpu" if one == DEVICE else one for one in args], **options)

    return made


def pretend(capability):
    """From now on there seems to be a GPU of this compute capability (90: H100), and all tensors seem to be there."""
    driver.set_active(Driver(capability))
    kernels.run_on = lambda device: True
    for name, found in (("device", DEVICE), ("is_cuda", True), ("is_cpu", False)):
        setattr(torch.Tensor, name, property(lambda self, found=found: found))
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.get_device = lambda self: 0
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS[capability], total_memory=80 * 2**30)
    stand_ins = {
        "Stream": Stream,
        "Event": Stream,
        "current_device": lambda: 0,
        "current_stream": Stream,
        "device": nullcontext,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "set_stream": lambda stream: None,
        "stream": nullcontext,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch._C._cuda_getCurrentStream = lambda device: (0, 0, 1)
    torch._C._cuda_setStream = lambda **stream: None
    for name in MAKERS:
        setattr(torch, name, _made_here(getattr(torch, name)))
    torch.Tensor.to = _made_here(torch.Tensor.to)
