"""Ranks that disagree, fail, get bad numbers or die: all of them hear of it, and none hangs."""

import copy
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loop.expected import build, mean_loss, weights
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from consequent_lab.rank_group import RankGroup, RankGroupFolder
from consequent_lab.runs import RunFolder
from ranks.test_ddp import share


def start(kind="wide", damping=0.1, lr=0.1, **options):
    model, x, t = build(kind, batch=8)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    correction = consequent.attach(optimizer, ddp, damping=damping, **options)
    return ddp, share(x), share(t), optimizer, correction


def train(ddp, x, t, optimizer):
    optimizer.zero_grad()
    mean_loss(ddp(x), t).backward()
    optimizer.step()


# ---- bad numbers ----------------------------------------------------------------------------------------------------


def nan_on_one_rank(kind, where):
    ddp, x, t, optimizer, correction = start(kind)
    train(ddp, x, t, optimizer)
    before = weights(ddp)
    bad = torch.full_like(x, float("nan")) if dist.get_rank() == 1 and where == "inputs" else x
    optimizer.zero_grad()
    mean_loss(ddp(bad), t).backward()
    if dist.get_rank() == 1 and where == "gradient":  # nobody else knows
        next(ddp.parameters()).grad[0, 0] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(ddp).items())
    train(ddp, x, t, optimizer)
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights(ddp).items())
    return correction.counters.skipped, [str(one.message) for one in caught]


@pytest.mark.parametrize("where", ["inputs", "gradient"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_all_ranks_skip_a_step_together(two, kind, where):
    for skipped, messages in two.run(nan_on_one_rank, kind, where):
        assert skipped == 1
        assert any("step was skipped" in message for message in messages)


def nan_with_check():
    ddp, x, t, optimizer, _ = start(check=True)
    train(ddp, x.nan_to_num(nan=0.0) * (float("nan") if dist.get_rank() == 0 else 1.0), t, optimizer)


def test_all_ranks_raise_together(two):
    errors = two.errors(nan_with_check)
    assert all("NonFiniteError: NaN or inf" in error for error in errors), errors


# ---- disagreement ---------------------------------------------------------------------------------------------------


def other_settings(rank, options, later):
    ddp, x, t, optimizer, correction = start()
    correction.detach()
    mine = options if dist.get_rank() == rank else {}
    correction = consequent.attach(optimizer, ddp, **({"damping": 0.1} | ({} if later else mine)))
    if later:
        train(ddp, x, t, optimizer)
        for name, value in mine.items():
            setattr(correction, name, value)
    train(ddp, x, t, optimizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"damping": 0.2}, "damping=0.1 on rank 0; Linear (weight [16, 20], bias [16]), damping=0.2 on rank 1"),
        ({"exclude": "2"}, "layer '2': Linear (weight [14, 16], bias [14]), damping=0.1 on rank 0; not corrected on"),
        ({"loss_reduction": "sum"}, "loss_reduction: 'mean' on rank 0; 'sum' on rank 1"),
    ],
)
def test_disagreement_is_named_on_every_rank(two, options, words):
    errors = two.errors(other_settings, 1, options, False)
    assert all("RuntimeError: the ranks disagree" in error and words in error for error in errors), errors


def test_disagreement_that_comes_later(two):
    errors = two.errors(other_settings, 1, {"damping": 0.2}, True)
    assert all("the ranks disagree" in error and "damping=0.2 on rank 1" in error for error in errors), errors


def more_layers_later():
    model, x, t = build("wide", batch=8)
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    consequent.attach(optimizer, ddp, damping=0.1)
    train(ddp, share(x), share(t), optimizer)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": list(model[2].parameters())})
    train(ddp, share(x), share(t), optimizer)


def test_a_group_that_one_rank_adds(two):
    errors = two.errors(more_layers_later)
    assert all("the ranks disagree" in error and "layer '2': Linear (not trained)" in error for error in errors), errors


def overwritten_inputs():
    ddp, x, t, optimizer, _ = start()
    mean_loss(ddp(x), t).backward()
    if dist.get_rank() == 1:
        x.zero_()
    optimizer.step()


def test_inputs_that_one_rank_overwrites(two):
    theirs, mine = two.errors(overwritten_inputs)
    assert "were overwritten between backward() and step()" in mine
    assert "rank 1 cannot correct this step" in theirs


def all_change_together():
    ddp, x, t, optimizer, correction = start()
    train(ddp, x, t, optimizer)
    correction.damping = 0.3
    train(ddp, x, t, optimizer)
    correction.damping = 0.1
    train(ddp, x, t, optimizer)
    return correction.counters.steps


def test_settings_may_change_on_all_ranks(two):
    assert two.run(all_change_together) == [3, 3]


# ---- failures -------------------------------------------------------------------------------------------------------


def correct_twice_on_one_rank():
    ddp, x, t, optimizer, _ = start()
    train(ddp, x, t, optimizer)
    if dist.get_rank() != 0:
        optimizer.zero_grad()
    mean_loss(ddp(x), t).backward()
    optimizer.step()


def test_an_error_of_one_rank_reaches_all(two):
    mine, theirs = two.errors(correct_twice_on_one_rank)
    assert "had been corrected already" in mine
    assert "rank 0 cannot correct this step" in theirs


def die():
    ddp, x, t, optimizer, _ = start()
    train(ddp, x, t, optimizer)
    optimizer.zero_grad()
    mean_loss(ddp(x), t).backward()
    if dist.get_rank() == 1:
        os._exit(1)
    optimizer.step()


def test_a_rank_that_dies(two):
    mine, theirs = two.errors(die)
    assert theirs == "the process ended"
    assert "Error" in mine  # torch's own
    assert "onnection" in mine or "imed out" in mine


def die_at_the_end(path):
    def die(*_):
        os._exit(1)

    folder = RankGroupFolder(path, RankGroup())
    with mock.patch.object(RunFolder, "finish", die):  # which the first rank alone calls
        folder.finish({"outcome": "finished"})


def test_no_rank_ends_well_if_the_first_dies_before_it_has_said_that_the_run_is_done(two, tmp_path):
    theirs, mine = two.errors(die_at_the_end, tmp_path)
    assert theirs == "the process ended"
    assert mine is not None
    assert "onnection" in mine


# ---- which ranks ----------------------------------------------------------------------------------------------------


def by_hand(given):
    """Gradients averaged without a wrapper."""
    model, x, t = build("wide", batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = {"process_group": dist.group.WORLD} if given == "group" else {"across_ranks": False} if given else {}
    correction = consequent.attach(optimizer, model, damping=0.1, **group)
    mean_loss(model(share(x)), share(t)).backward()
    if given == "group":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    return weights(model), correction.samples


def one_process(rows=slice(None)):
    model, x, t = build("wide", batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, damping=0.1)
    mean_loss(model(x[rows]), t[rows]).backward()
    optimizer.step()
    return weights(model)


def test_a_process_group_that_is_given(two):
    expected = one_process()
    for found, samples in two.run(by_hand, "group"):
        assert samples == 8
        assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-10) for name in expected)


def test_alone_among_others(two):
    results = two.run(by_hand, "local")
    for rows, (found, samples) in zip((slice(4), slice(4, 8)), results, strict=True):
        expected = one_process(rows)
        assert samples == 4
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def average_of_own_corrections():
    model, x, t = build("wide", batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, damping=0.1, across_ranks=False)
    mean_loss(model(share(x)), share(t)).backward()
    correction.step()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return weights(model)


def test_the_average_of_own_corrections(two):
    """Another algorithm, as the documentation describes it."""
    parts = [one_process(slice(4)), one_process(slice(4, 8))]
    for found in two.run(average_of_own_corrections):
        for name, tensor in found.items():
            assert torch.allclose(tensor, (parts[0][name] + parts[1][name]) / 2, rtol=0, atol=1e-12)


def wrapped_but_alone():
    ddp, x, t, optimizer, _ = start(across_ranks=False)
    train(ddp, x, t, optimizer)


def test_replicas_must_not_drift_apart(two):
    assert all("the ranks' weights would drift apart" in error for error in two.errors(wrapped_but_alone))


def test_unconnected_ranks_are_warned_of(two):
    errors = two.errors(by_hand, None)
    assert all("ConsequentWarning: 2 ranks are running" in error for error in errors), errors


def foresight():
    ddp, x, t, optimizer, _ = start(foresight=True)
    train(ddp, x, t, optimizer)


def test_foresight_is_for_one_process(two):
    assert all("foresight=True looks at the samples of one process" in error for error in two.errors(foresight))


def in_blocks(by_group):
    ddp, x, t, optimizer, _ = start(**({} if by_group else {"largest_block": 2}))
    for group in optimizer.param_groups if by_group else ():
        group["largest_block"] = 2
    train(ddp, x, t, optimizer)


@pytest.mark.parametrize("by_group", [False, True])
def test_blocks_are_for_one_process(two, by_group):
    assert all("blocks are not exchanged between ranks" in error for error in two.errors(in_blocks, by_group))


def copied():
    """A copy of an attached model is plain."""
    ddp, x, t, optimizer, _ = start()
    train(ddp, x, t, optimizer)
    twin = copy.deepcopy(ddp.module)
    mean_loss(twin(x), t).backward()
    return True


def test_a_copy(two):
    assert two.run(copied) == [True, True]


def test_a_group_that_is_none():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"process_group must be a torch.distributed.ProcessGroup, got 'world'"):
        consequent.Consequentialism(model, process_group="world")
