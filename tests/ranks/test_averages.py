"""Averages on several ranks: they come to what one process makes of all samples."""

import copy
import io
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import consequent
from ranks.training import (
    SAMPLES,
    SHARDED,
    UNEQUAL,
    accumulating,
    assert_all_ranks,
    assert_close,
    batch,
    equal_shares,
    gradients,
    losses,
    made,
    on_cpus,
    spread,
    whole,
)

STEPS = 6  # three periods: inputs are looked at in every second step
SCALE = 8
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.3, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


class Run(NamedTuple):
    how: str
    shape: tuple[int, ...]  # of a sample
    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    correction: consequent.Correction


def set_up(network, how, optimizer="SGD", attached="outside", **options):
    model, shape = made(network)
    options = {"averaging": 0.9, "refresh": 2, **options}
    if attached == "before":
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        correction = consequent.attach(optimizer, model, **options)
        wrapped = spread(model, how)
    else:
        wrapped = spread(model, how)
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        correction = consequent.attach(optimizer, model if attached == "inside" else wrapped, **options)
    return Run(how, shape, model, wrapped, optimizer, correction)


def train(run, sizes, steps=range(STEPS), micro_batches=1, clipped=False):
    """The gradients that the optimiser gets in each step, and the last parameters.

    Alone, a process goes through the shares of all ranks, as micro-batches.
    """
    is_alone, seen = run.how == "alone", []
    ranks = 1 if is_alone else len(sizes)
    for step in steps:
        shares = batch(run.shape, step).split(sizes)
        shares = shares if is_alone else [shares[dist.get_rank()]]
        pieces = [piece for share in shares for piece in share.chunk(micro_batches)]
        run.optimizer.zero_grad()
        for piece in pieces:
            with accumulating(run.wrapped, piece is pieces[-1]):
                loss = losses(run.wrapped(piece)).sum() * ranks / SAMPLES  # the ranks' mean is that of all samples
                (SCALE * loss).backward()
        for p in run.model.parameters():
            p.grad /= SCALE
        if clipped:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        seen += gradients(run.model.parameters())
    return seen + [whole(p) for p in run.model.parameters()]


def trained(network, how, sizes, *args, **options):
    run = set_up(network, how, *args)
    assert not run.correction.own_inputs
    return train(run, sizes, **options)


def alone(network, optimizer="SGD", **options):
    """One process with the whole batch."""
    return train(set_up(network, "alone", optimizer), [SAMPLES], **options)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("network", ["perceptron", "all_kinds"])
def test_ddp(ranks, network, optimizer):
    results = ranks.run(trained, network, "ddp", UNEQUAL[ranks.size], optimizer)
    assert_all_ranks(results, alone(network, optimizer))


@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("network", ["perceptron", "convolutions"])
def test_sharded(ranks, network, optimizer, how):
    results = ranks.run(trained, network, how, UNEQUAL[ranks.size], optimizer)
    assert_all_ranks(results, alone(network, optimizer))


@pytest.mark.parametrize("network", ["perceptron", "convolutions", "all_kinds"])
def test_these_steps_are_bounded(network):
    """Otherwise the tests above would not see whether the bound is that of one process."""
    bounded, unbounded = (train(set_up(network, "alone", bound=bound), [SAMPLES]) for bound in (0.2, None))
    assert (bounded[-1] - unbounded[-1]).norm() > 1e-3 * unbounded[-1].norm()


@pytest.mark.parametrize("how", ["ddp", *SHARDED])
def test_clipped_gradients_of_micro_batches(ranks, how):
    options = {"micro_batches": 2, "clipped": True}
    results = ranks.run(trained, "convolutions", how, equal_shares(ranks), options=options)
    assert_all_ranks(results, alone("convolutions", clipped=True), 1e-5)  # torch 2.8 clips shards in float32


@pytest.mark.parametrize("attached", ["before", "inside"])
def test_attached_to_the_model_in_ddp(ranks, attached):
    results = ranks.run(trained, "perceptron", "ddp", equal_shares(ranks), "SGD", attached)
    assert_all_ranks(results, alone("perceptron"))


def test_a_rank_that_does_not_call_a_layer(ranks):
    sizes = UNEQUAL[ranks.size]
    expected = train(set_up("sometimes", "alone"), sizes)
    assert_all_ranks(ranks.run(trained, "sometimes", "ddp", sizes), expected)


def resumed(network, how, sizes, at):
    """Saved after so many steps, and loaded into a new run."""
    run = set_up(network, how)
    seen = train(run, sizes, range(at))[: at * len(run.optimizer.param_groups[0]["params"])]
    file = io.BytesIO()
    torch.save(run.correction.state_dict(), file)
    file.seek(0)
    new = set_up(network, how)
    new.model.load_state_dict(run.model.state_dict())
    new.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    new.correction.load_state_dict(torch.load(file, weights_only=True))
    return seen + train(new, sizes, range(at, STEPS))


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("how", ["ddp", *SHARDED])
def test_resumed(ranks, how, at):
    """Before a look, and between two: all goes on as without a break."""
    sizes = equal_shares(ranks)
    assert_all_ranks(ranks.run(resumed, "convolutions", how, sizes, at), alone("convolutions"))


def first_gradients(network, how, sizes):
    """After the backward pass, by the names of layers that have own inputs."""
    run = set_up(network, how)
    losses(run.wrapped(batch(run.shape, 0).split(sizes)[dist.get_rank()])).mean().backward()
    return {name: gradients(run.correction.corrected[name].parameters()) for name in run.correction.own_inputs}


@on_cpus
def test_shards_that_are_no_whole_rows(ranks):
    """A grouped and a transposed convolution keep own inputs where they are sharded."""
    sizes = equal_shares(ranks)
    model, shape = made("all_kinds")
    corrections = []
    for share in batch(shape, 0).split(sizes):
        one = copy.deepcopy(model)
        consequent.attach(torch.optim.SGD(one.parameters(), 0.1), one)
        losses(one(share)).mean().backward()
        corrections.append({"2": gradients(one[2].parameters()), "4": gradients(one[4].parameters())})
    for result in ranks.run(first_gradients, "all_kinds", "layer by layer", sizes):
        assert list(result) == ["2", "4"]
        for name, found in result.items():
            expected = zip(*(correction[name] for correction in corrections), strict=True)
            assert_close(found, [sum(of_one) / len(sizes) for of_one in expected])


def sharded_after_attach(network, sizes):
    run = set_up(network, "whole model", attached="before")
    with pytest.raises(RuntimeError, match=r"layer '0'.*fully_shard\(\) first"):
        train(run, sizes)


@on_cpus
def test_sharded_after_attach(ranks):
    ranks.run(sharded_after_attach, "perceptron", equal_shares(ranks))
