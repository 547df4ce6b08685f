"""Factorisations shared out over ranks: the same results, counts and refusals as where every rank repeats them."""

import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loop.expected import assert_close, build, corrected, gradients, loss_on, mean_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from consequent.ranks import factor_exchange, traffic
from consequent.ranks.traffic import LayerTraffic, Traffic
from ranks import test_ddp as ddp_tests
from ranks import test_faults as faults_tests
from ranks import test_fsdp as fsdp_tests
from ranks import test_layers as layers_tests
from ranks.cases import CASES, by_one_process
from ranks.sharing import busily, shared

DTYPES = [torch.float32, torch.float64]
KINDS = [("tall", 32), ("conv", 8)]


def results_of(answers, fewest):
    """The ranks' results, once it is clear that matrices were shared out, and alike on all ranks."""
    owners = [found for _, found in answers]
    assert all(found == owners[0] for found in owners)
    assert len(owners[0]) >= fewest
    assert len(set(owners[0])) >= min(fewest, len(answers)), "several owners"
    return [result for result, _ in answers]


def start(kind, **options):
    """As in the tests of faults, with samples enough that moments are sent."""
    model, x, t = build(kind, batch=32)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1))
    correction = consequent.attach(optimizer, ddp, damping=0.1, **options)
    return ddp, ddp_tests.share(x), ddp_tests.share(t), optimizer, correction


# ---- as one process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [shared, busily])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "samples"), KINDS)
def test_ddp(two, kind, samples, dtype, how):
    results = results_of(two.run(how, ddp_tests.step, kind, samples, dtype), 2)
    ddp_tests.check(results, kind, samples, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "samples"), [("tall", 32), ("conv", 8)])
def test_ddp_with_four_ranks(four, kind, samples, dtype):
    results = results_of(four.run(shared, ddp_tests.step, kind, samples, dtype), 2)
    ddp_tests.check(results, kind, samples, dtype)


def test_micro_batches(two):
    results = results_of(two.run(shared, ddp_tests.step, "conv", 8, torch.float64, "ddp", 2), 2)
    ddp_tests.check(results, "conv", 8, torch.float64)


def test_no_damping_is_not_shared_out(two):
    answers = two.run(shared, ddp_tests.step, "conv", 4, torch.float64, "ddp", 1, None, None, 0.0)
    assert all(not owners for _, owners in answers)
    ddp_tests.check([result for result, _ in answers], "conv", 4, torch.float64, 0.0)


@pytest.mark.parametrize("how", [shared, busily])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "samples"), KINDS)
def test_fsdp(two, kind, samples, dtype, how):
    results = results_of(two.run(how, fsdp_tests.step, kind, samples, dtype, "layers"), 2)
    fsdp_tests.check(results, kind, samples, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharding", ["layers", "hybrid"])
def test_fsdp_with_four_ranks(four, sharding, dtype):
    """Three outputs for four ranks: one has no rows of the last layer, but may be its owner."""
    results = results_of(four.run(shared, fsdp_tests.step, "conv", 8, dtype, sharding), 2)
    fsdp_tests.check(results, "conv", 8, dtype)


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_layers(two, name):
    if name == "transposed weights":
        pytest.importorskip("transformers")
    expected = by_one_process(name, 2)
    for (grads, _), _ in two.run(shared, layers_tests.step, name):
        assert_close(grads, expected, 1e-9)


@pytest.mark.parametrize("name", ["images", "convolution in groups, many rows", "called twice, many rows"])
def test_all_kinds_of_sharded_layers(two, name):
    expected = by_one_process(name, 2)
    for grads in results_of(two.run(shared, fsdp_tests.case, name), 1):
        assert_close({name: grads[name] for name in expected}, expected, 1e-9)


def take_two_steps(ddp, optimizer, x, t, ranks):
    """Each rank with its share; moments are shared out in the second."""
    if ranks > 1:
        x, t = ddp_tests.share(x), ddp_tests.share(t)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(ddp(x), t).backward()
        optimizer.step()


def relative():
    model, x, t = build("conv", batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ddp = DDP(model) if ranks > 1 else model
    consequent.attach(optimizer, ddp, relative_damping=0.01)
    take_two_steps(ddp, optimizer, x, t, ranks)
    return gradients(model)


def test_a_relative_damping(two):
    """λ is of the rows and the trace of all ranks."""
    expected = relative()
    for grads in results_of(two.run(shared, relative), 2):
        assert_close(grads, expected, 1e-9)


@pytest.mark.parametrize("sizes", [[3, 1], [1, 7]])
def test_uneven_batches(two, sizes):
    results = results_of(two.run(shared, ddp_tests.step, "conv", sum(sizes), torch.float64, "ddp", 1, None, sizes), 2)
    model, x, t = build("conv", batch=sum(sizes))
    losses = [loss_on(*part, weight=0.5) for part in zip(x.split(sizes), t.split(sizes), strict=True)]
    expected = corrected(model, *losses, samples=sum(sizes))
    for grads, _, _ in results:
        assert_close(grads, expected, 1e-9)


def several_parcels(*args):
    with mock.patch.object(traffic, "BUCKET", 1):
        return ddp_tests.step(*args)


@pytest.mark.parametrize("how", [shared, busily])
def test_an_owner_of_more_than_fits_a_bucket(two, how):
    """Three matrices for two ranks, each in a parcel of its own."""
    results = results_of(two.run(how, several_parcels, "conv", 8, torch.float64), 3)
    ddp_tests.check(results, "conv", 8, torch.float64)


def in_a_group_of_two():
    """Ranks 1 and 3 of four train together; in their group they are 0 and 1."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    model, x, t = build("conv", batch=8)
    ddp = DDP(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, ddp, damping=0.1)
    x, t = (tensor.chunk(2)[dist.get_rank(group)] for tensor in (x, t))
    for _ in range(2):
        faults_tests.train(ddp, x, t, optimizer)
    return gradients(model)


def test_ranks_of_a_group_have_other_numbers(four):
    model, x, t = build("conv", batch=8)
    expected = corrected(model, loss_on(x, t), samples=8, damping=0.1)
    answers = four.run(shared, in_a_group_of_two)
    for grads in results_of([answers[1], answers[3]], 2):
        assert_close(grads, expected, 1e-9)


def clipped():
    """By value: no multiple of what the inputs explain any more, which the feature side need not know."""
    ddp, x, t, optimizer, correction = start("conv", lr=0.0)
    faults_tests.train(ddp, x, t, optimizer)
    optimizer.zero_grad()
    mean_loss(ddp(x), t).backward()
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
    final = gradients(ddp.module)
    optimizer.step()
    return gradients(ddp.module), final, correction.counters.edited


def test_edited_gradients(two):
    model, x, t = build("conv", batch=32)
    for grads, final, edited in results_of(two.run(shared, clipped), 2):
        assert_close(grads, corrected(model, loss_on(x, t), samples=32, damping=0.1, final=final), 1e-9)
        assert edited == 0  # looked at once, in the first step


def without_a_gradient():
    """A bias whose gradient somebody threw away on one rank."""
    ddp, x, t, optimizer, correction = start("tall", lr=0.0)
    for step in range(2):
        optimizer.zero_grad()
        mean_loss(ddp(x), t).backward()
        if step == 1 and dist.get_rank() == 1:
            ddp.module[0].bias.grad = None
        optimizer.step()
    return [layer.owner for layer in correction.communication().layers]


def test_a_rank_that_solves_with_a_part_of_the_moment_needs_it(two):
    for owners, _ in two.run(shared, without_a_gradient):
        assert owners[0] is None
        assert owners[1] is not None


# ---- trouble --------------------------------------------------------------------------------------------------------


def dependent(ranks=1):
    """Equal features, of which float32 loses λ: the gradient after a second step, and the counters."""
    x = torch.tensor([[2.0**13, 2.0**13], [-(2.0**13), -(2.0**13)]]).repeat(8, 1)  # 16 rows: the pivot is 0 exactly
    t = torch.linspace(-1, 1, 32).view(16, 2)
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DDP(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, damping=1e-3)
    take_two_steps(ddp, optimizer, x, t, ranks)
    return model.weight.grad.clone(), correction.counters


def test_a_factorisation_that_only_works_in_float64(two):
    expected, counters = dependent()
    assert counters.rescued == 2
    for grad, found in results_of(two.run(shared, dependent, 2), 1):
        assert found == counters
        assert torch.allclose(grad, expected, rtol=1e-4)


def fails_altogether():
    """No matrix of 7 × 7 can be factorised from the second step on."""
    ddp, x, t, optimizer, correction = start("tall", lr=0.0)
    faults_tests.train(ddp, x, t, optimizer)
    cholesky = torch.linalg.cholesky_ex

    def broken(matrix):
        factor, info = cholesky(matrix)
        return (factor * float("nan"), torch.ones_like(info)) if matrix.shape[-1] == 7 else (factor, info)

    error = torch.linalg.LinAlgError("on purpose")
    with (
        mock.patch.object(torch.linalg, "cholesky_ex", broken),
        mock.patch.object(torch.linalg, "eigh", side_effect=error),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        faults_tests.train(ddp, x, t, optimizer)
    return gradients(ddp.module), correction.counters, [str(one.message) for one in caught]


@pytest.mark.parametrize("how", [shared, busily])
def test_a_factorisation_that_fails_altogether(two, how):
    model, x, t = build("tall", batch=32)
    expected = corrected(model, loss_on(x, t), samples=32, damping=0.1, shortened=["2"])
    for grads, counters, messages in results_of(two.run(how, fails_altogether), 2):
        assert_close(grads, expected, 1e-9)
        assert (counters.rescued, counters.fallen_back, counters.skipped) == (0, 1, 0)
        if how is shared:
            assert sum("could not be factorised" in message for message in messages) == 1


def fails_with_check():
    ddp, x, t, optimizer, _ = start("tall", lr=0.0, check=True)
    faults_tests.train(ddp, x, t, optimizer)
    error = torch.linalg.LinAlgError("on purpose")
    with (
        mock.patch.object(factor_exchange, "quick_cholesky", return_value=None),
        mock.patch.object(torch.linalg, "cholesky_ex", lambda m: (m, torch.ones(len(m), dtype=torch.int32))),
        mock.patch.object(torch.linalg, "eigh", side_effect=error),
    ):
        faults_tests.train(ddp, x, t, optimizer)


def test_all_ranks_raise_together(two):
    errors = two.errors(shared, fails_with_check)
    assert all("LinAlgError: layer '0': the Gram matrix plus damping could not be" in error for error in errors), errors


def beyond_float32():
    """One feature, whose square is infinite: a pivot that Cholesky finds nothing wrong with."""
    model = nn.Linear(1, 2, bias=False)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, ddp, damping=0.1)
    x = torch.linspace(-1, 2, 8).unsqueeze(1)
    before = []
    for scale in (1.0, 2.0**70):
        before.append(model.weight.detach().clone())
        optimizer.zero_grad()
        (ddp(scale * x).sum() / scale).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", consequent.ConsequentWarning)
            optimizer.step()
    return correction.counters.skipped, torch.equal(model.weight, before[-1])


@pytest.mark.parametrize("how", [shared, busily])
def test_inputs_whose_squares_are_infinite(two, how):
    for skipped, same in results_of(two.run(how, beyond_float32), 1):
        assert skipped == 1
        assert same


@pytest.mark.parametrize("where", ["inputs", "gradient"])
def test_all_ranks_skip_a_step_together(two, where):
    for skipped, messages in results_of(two.run(shared, faults_tests.nan_on_one_rank, "conv", where), 2):
        assert skipped == 1
        assert any("step was skipped" in message for message in messages)


def nan_on_a_busy_device():
    ddp, x, t, optimizer, correction = start("conv")
    faults_tests.train(ddp, x, t, optimizer)
    before = faults_tests.weights(ddp)
    faults_tests.train(ddp, x * (float("nan") if dist.get_rank() == 1 else 1.0), t, optimizer)
    same = all(torch.equal(before[name], tensor) for name, tensor in faults_tests.weights(ddp).items())
    return same, correction.counters.skipped


def test_all_busy_ranks_skip_a_step_together(two):
    for same, skipped in results_of(two.run(busily, nan_on_a_busy_device), 2):
        assert same
        assert skipped == 1


def owner_dies():
    ddp, x, t, optimizer, _ = start("tall")
    faults_tests.train(ddp, x, t, optimizer)
    if dist.get_rank() == 1:
        with mock.patch.object(factor_exchange, "quick_cholesky", side_effect=lambda *_, **__: os._exit(1)):
            faults_tests.train(ddp, x, t, optimizer)
    faults_tests.train(ddp, x, t, optimizer)


def test_an_owner_that_dies(two):
    mine, theirs = two.errors(shared, owner_dies)
    assert theirs == "the process ended"
    assert "Error" in mine  # torch's own
    assert "onnection" in mine or "imed out" in mine


# ---- the choice -----------------------------------------------------------------------------------------------------


def train_by_the_model(size, rows):
    """Four equal layers, by the cost model's own choice."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(4)]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, damping=0.1)
    tables = []
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(ddp(torch.randn(rows, size)), torch.zeros(rows, size)).backward()
        optimizer.step()
        tables.append(str(correction.communication()))
    return tables, [layer.owner for layer in correction.communication().layers]


def test_large_matrices_are_shared_out_and_small_ones_are_not(four):
    for tables, owners in four.run(train_by_the_model, 1024, 600, timeout=120):
        assert sorted(owners) == [0, 1, 2, 3]
        assert all("every rank" not in table for table in tables)
    for tables, owners in four.run(train_by_the_model, 30, 60):
        assert owners == [None] * 4
        assert "ms with factorisations shared out" in tables[1]


def test_the_table():
    traffic = Traffic(4)
    traffic.begin_step()
    traffic.add_summed_at_one(1_600_000)
    traffic.add_from_one(1_000_000)
    traffic.layers.append(LayerTraffic("layer '0'", "features", 5000, "moment", {"moment": 900}, owner=2))
    traffic.layers.append(LayerTraffic("layer '1'", "samples", 20, "rows", {"rows": 80}))
    traffic.seconds = {"shared": 0.0123, "repeated": 0.045}
    assert str(traffic).splitlines() == [
        "4 ranks; each sent 2.25 MB for the last step; moments by estimate: 12.3 ms with factorisations shared out, "
        "45 ms with all repeated",
        "layer      side           rows  sends          bytes  factorised by  instead of",
        "layer '0'  features      5,000  moment         900 B  rank 2",
        "layer '1'  samples          20  rows            80 B  every rank",
    ]
