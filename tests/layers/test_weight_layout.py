"""Which weights have a row of numbers for each output, as the GPU's kernels take it for granted."""

import pytest
import torch
from torch import nn

from consequent.capture.records import Record
from consequent.capture.use import Entry, Use
from consequent.engines.gpu.by_kernels import grads_of_one_layer
from consequent.layers import kind_of
from consequent.statistics.rows import Rows

LAYERS = {
    "linear": nn.Linear(4, 4),
    "convolution": nn.Conv2d(4, 4, 3),
    "in one dimension": nn.Conv1d(4, 4, 3),
    "transposed": nn.ConvTranspose2d(4, 4, 3),
    "transposed, in one dimension": nn.ConvTranspose1d(4, 4, 1),
    "transposed, in three dimensions": nn.ConvTranspose3d(4, 4, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_outputs(name):
    layer = LAYERS[name]
    operation = kind_of(layer).of(layer)
    weight = layer.weight.detach()
    is_so = torch.equal(operation.weight_matrix(weight)[0], weight.flatten(1))
    assert operation.has_rows_of_outputs == is_so == (not name.startswith("transposed"))


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_take_no_others(name):
    """As many channels as outputs: nothing in the shapes tells them apart."""
    layer = LAYERS[name]
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    operation = kind_of(layer).of(layer)
    use = Use(layer, operation, layer.weight, layer.bias, True, Entry(layer, 2, 0), 8, torch.float32)
    record = Record(layer.weight, Rows.of(use))
    assert (grads_of_one_layer(record) is not None) == operation.has_rows_of_outputs
