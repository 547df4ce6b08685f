"""All kinds of layers, and of differences between ranks."""

import pytest
import torch
import torch.distributed as dist
from loop.expected import assert_close, gradients, mean_loss
from reference import damping_options
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from ranks.cases import CASES, DAMPING, build, by_one_process


def step(name, damping=DAMPING):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, calls, targets = build(name, ranks)
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, **damping_options(damping))
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(ddp(*calls[rank]), targets[rank]).backward()
        optimizer.step()
    assert (correction.counters.edited, correction.counters.skipped) == (0, 0)
    return gradients(model), {layer.name: layer for layer in correction.communication().layers}


@pytest.mark.parametrize("name", CASES)
def test_as_one_process(two, name):
    if name == "transposed weights":
        pytest.importorskip("transformers")
    expected = by_one_process(name, 2)
    for grads, _ in two.run(step, name):
        assert_close(grads, expected, 1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name != "transposed weights"])
def test_relative_damping_as_one_process(two, name):
    """λ is a fraction of what the inputs of all ranks come to."""
    expected = by_one_process(name, 2, ("relative", 0.1))
    for grads, _ in two.run(step, name, ("relative", 0.1)):
        assert_close(grads, expected, 1e-9)


@pytest.mark.parametrize("name", ["two biases, one rank has one", "images of several sizes, few rows", "only a bias"])
def test_four_ranks(four, name):
    expected = by_one_process(name, 4)
    for grads, _ in four.run(step, name):
        assert_close(grads, expected, 1e-9)


def test_what_is_sent_is_the_least(two):
    (_, layers), _ = two.run(step, "images that cost less than their moment")
    chosen = [(layer.choice, layer.bytes) for layer in layers.values()]
    assert [choice for choice, _ in chosen] == ["inputs", "inputs"]
    assert all(sizes["inputs"] < sizes["moment"] for _, sizes in chosen)
    (_, layers), _ = two.run(step, "images")
    assert all(layer.choice == min(layer.bytes, key=layer.bytes.get) for layer in layers.values())
    assert {layer.choice for layer in layers.values()} == {"moment"}
