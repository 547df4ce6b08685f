"""Own inputs on several ranks: each corrects with its own, and the wrapper averages the corrections."""

import copy

import pytest
import torch
import torch.distributed as dist

import consequent
from ranks.training import (
    SHARDED,
    UNEQUAL,
    accumulating,
    assert_all_ranks,
    batch,
    equal_shares,
    gradients,
    losses,
    made,
    spread,
    whole,
)

STEPS, RATE = 3, 1.0


def train(network, how, sizes, attached="outside", micro_batches=1):
    """The gradients after the backward pass of each step, and the last parameters."""
    model, shape = made(network)
    if attached == "before":
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        consequent.attach(optimizer, model)
        wrapped = spread(model, how)
    else:
        wrapped = spread(model, how)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        consequent.attach(optimizer, model if attached == "inside" else wrapped)
    seen = []
    for step in range(STEPS):
        pieces = batch(shape, step).split(sizes)[dist.get_rank()].chunk(micro_batches)
        optimizer.zero_grad()
        for piece in pieces:
            with accumulating(wrapped, piece is pieces[-1]):
                (losses(wrapped(piece)).mean() / len(pieces)).backward()
        seen += gradients(model.parameters())
        optimizer.step()
    return seen + [whole(p) for p in model.parameters()]


def train_by_one_process(network, sizes, micro_batches=1):
    """The same, each rank's share being corrected alone, on a copy of the model."""
    model, shape = made(network)
    seen = []
    for step in range(STEPS):
        corrections = []
        for share in batch(shape, step).split(sizes):
            alone = copy.deepcopy(model)
            optimizer = torch.optim.SGD(alone.parameters(), RATE)
            consequent.attach(optimizer, alone)
            for piece in share.chunk(micro_batches):
                (losses(alone(piece)).mean() / micro_batches).backward()
            corrections.append(gradients(alone.parameters()))
        means = [sum(of_one) / len(sizes) for of_one in zip(*corrections, strict=True)]
        seen += means
        with torch.no_grad():
            for p, mean in zip(model.parameters(), means, strict=True):
                p -= RATE * mean
    return seen + [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("how", ["ddp", *SHARDED])
@pytest.mark.parametrize("network", ["perceptron", "all_kinds"])
def test_the_mean_of_the_ranks_corrections(ranks, network, how):
    sizes = UNEQUAL[ranks.size]
    assert_all_ranks(ranks.run(train, network, how, sizes), train_by_one_process(network, sizes))


@pytest.mark.parametrize("how", ["ddp", *SHARDED])
def test_micro_batches(ranks, how):
    sizes = equal_shares(ranks)
    results = ranks.run(train, "all_kinds", how, sizes, "outside", 2)
    assert_all_ranks(results, train_by_one_process("all_kinds", sizes, 2))


@pytest.mark.parametrize("attached", ["before", "inside"])
def test_attached_to_the_model_in_ddp(ranks, attached):
    sizes = equal_shares(ranks)
    results = ranks.run(train, "perceptron", "ddp", sizes, attached)
    assert_all_ranks(results, train_by_one_process("perceptron", sizes))


def test_compiled(ranks):
    sizes = equal_shares(ranks)
    assert_all_ranks(ranks.run(train, "all_kinds", "compiled ddp", sizes), train_by_one_process("all_kinds", sizes))
