"""Counts what is compiled when the layers of some networks are first called on a GPU, without one; compiles nothing.

A script of its own, since Triton decides when it is imported whether to interpret. Prints the counts as JSON, by
network and kernel.
"""

import json
from collections import Counter

import torch
from compile_kernels import source_of

import consequent
from consequent.engines.gpu import compiled_ahead, kernels
from consequent.engines.gpu.kernels import (
    dense,
    factor,
    features,
    lag_products,
    lag_sums,
    lag_turn,
    moment,
    padded_rows,
)
from consequent_lab.models import mlp, resnet20

NETWORKS = {
    "ResNet-20": (lambda: resnet20(batch_norm=False), (128, 3, 32, 32), torch.channels_last),
    "ResNet-20, channels first": (lambda: resnet20(batch_norm=False), (128, 3, 32, 32), torch.contiguous_format),
    "MLP 3072-8×800-10, batch 32": (lambda: mlp(3072, (800,) * 8, 10), (32, 3072), None),
    "MLP 256-5×256-10, batch 16384": (lambda: mlp(256, (256,) * 5, 10), (16384, 256), None),
}


def count(make_model, shape, memory_format):
    seen = {}
    compiled_ahead._foreseen.clear()

    def launch(kernel, grid, arguments, constants=(), **options):
        source = source_of(kernel, arguments, constants)
        specialised = (*source.signature.items(), *source.constants.items(), *source.attrs, *options.items())
        seen[str((kernel.fn.__name__, *specialised))] = kernel.fn.__name__

    for module in (dense, features, factor, lag_turn, lag_products, lag_sums, moment, padded_rows):
        module.launch = launch
    model, inputs = make_model(), torch.zeros(shape)
    if memory_format is not None:
        model, inputs = (one.to(memory_format=memory_format) for one in (model, inputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    model(inputs)
    correction.detach()
    return Counter(seen.values())


def main():
    kernels.run_on = lambda device: True
    factor.plan_team = lambda matrices: factor.Team(2)
    lag_sums.INTERPRETED_PART = lag_sums.PART
    print(json.dumps({name: count(*network) for name, network in NETWORKS.items()}))


if __name__ == "__main__":
    main()
