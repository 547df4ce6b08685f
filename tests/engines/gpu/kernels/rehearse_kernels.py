"""Rehearses kernels for a GPU that is not here, then looks whether Triton would compile one of them again.

A script of its own, see :mod:`no_gpu`. Prints what is compiled, first by the rehearsal and then for the launches
themselves, as JSON.
"""

import json
import tempfile

import no_gpu
import torch
import triton

from consequent.engines.gpu.kernels import launch as launching
from consequent.engines.gpu.kernels import moment

POINT = (1, 1), (1, 1), (0, 0), (1, 1)  # a convolution of single pixels


def main():
    compiled = []
    no_gpu.pretend(90)
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    images = torch.ones(200, 40, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        launching.rehearse(lambda: moment.patch_moment(images, *POINT, ones=True))
        for under_way in launching._being_compiled.values():
            under_way.result()
        rehearsed = sorted(compiled)
        compiled.clear()
        moment.patch_moment(images, *POINT, ones=True)
        moment.patch_moment(images.half(), *POINT, ones=True)  # of another type
    print(json.dumps([rehearsed, compiled]))


if __name__ == "__main__":
    main()
