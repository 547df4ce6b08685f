"""Compares what first steps launch with what was foreseen when their layers were called, without a GPU.

A script of its own, see :mod:`no_gpu`; compiles nothing. Prints as JSON, by network, the names of the kernels that were
launched, and of those that nothing had foreseen.
"""

import json
import warnings

import no_gpu
import triton
from compile_kernels import MORE_NETWORKS, NETWORKS, train

from consequent.engines.gpu import compiled_ahead
from consequent.engines.gpu.kernels import launch as launching


def names(places):
    return sorted({place[0].__name__ for place in places})


def main():
    warnings.simplefilter("ignore")  # what comes out of steps is no number
    no_gpu.pretend(90)
    triton.knobs.runtime.jit_cache_hook = lambda **_: True  # it is not compiled
    found = {}
    for name, (make_model, shape, special) in (NETWORKS | MORE_NETWORKS).items():
        if "averaging" in special:
            continue  # what averages launch is compiled when it is launched
        foreseen = set()
        launching._compile_aside = lambda place, *rest, foreseen=foreseen: foreseen.add(place)
        launching._compiled.clear()
        compiled_ahead._foreseen.clear()
        train(make_model, shape, "step", **special)
        launched = set(launching._compiled)
        found[name] = {"launched": names(launched), "unforeseen": names(launched - foreseen)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
