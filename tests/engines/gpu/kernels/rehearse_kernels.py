"""Rehearses kernels for a GPU that is not here, then looks whether Triton would compile one of them again.

A script of its own, since Triton decides when it is imported whether to interpret. Prints what is compiled, first by
the rehearsal and then for the launches themselves, as JSON.
"""

import json
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from consequent.engines.gpu.kernels import launch as launching
from consequent.engines.gpu.kernels import moment


class NoGPU:
    """What Triton asks its driver before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


POINT = (1, 1), (1, 1), (0, 0), (1, 1)  # a convolution of single pixels


def compile_for_launch(kernel, grid, arguments, constants=(), **options):
    """Takes the place of `launch`: what Triton does with the arguments themselves, short of launching."""
    kernel.run(*arguments, *constants, grid=grid, warmup=True, **options)


def main():
    compiled = []
    driver.set_active(NoGPU())
    torch.cuda.device = lambda device: torch.no_grad()
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    images = torch.ones(200, 40, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        launching.rehearse(lambda: moment.patch_moment(images, *POINT, ones=True))
        for under_way in launching._being_compiled.values():
            under_way.result()
        rehearsed = sorted(compiled)
        compiled.clear()
        moment.launch = compile_for_launch
        moment.patch_moment(images, *POINT, ones=True)
        moment.patch_moment(images.half(), *POINT, ones=True)  # of another type
    print(json.dumps([rehearsed, compiled]))


if __name__ == "__main__":
    main()
