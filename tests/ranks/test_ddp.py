"""DistributedDataParallel: r ranks give the update of one process with all samples."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from loop.expected import DAMPING, assert_close, build, corrected, gradients, loss_on, mean_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}

# kind of model, samples in all. "wide": fewer samples than features everywhere; "tall", "conv": more rows on each rank;
# wide with 12 samples: some layers have more rows than features only if all ranks are counted.
SIZES = [("wide", 4), ("wide", 16), ("tall", 16), ("conv", 8)]


def build_for(kind, samples, dtype):
    model, x, t = build(kind, batch=samples, dtype=dtype)
    return model, x, t


def share(tensor, sizes=None):
    """This rank's samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return tensor.chunk(size)[rank] if sizes is None else tensor.split(sizes)[rank]


def step(kind, samples, dtype, attached="ddp", micro_batches=1, options=None, sizes=None, damping=DAMPING):
    """The gradients that a rank's optimiser got, the sides, and the bytes."""
    model, x, t = build_for(kind, samples, dtype)
    correction = optimizer = None

    def attach(to):
        nonlocal correction, optimizer
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        correction = consequent.attach(optimizer, to, damping=damping)

    if attached == "before":
        attach(model)
    ddp = DDP(model, **(options or {}))
    if attached != "before":
        attach(ddp if attached == "ddp" else model)
    x, t = share(x, sizes), share(t, sizes)
    for _ in range(3):  # static_graph takes notes in the first, choices are made by the last
        optimizer.zero_grad()
        pieces = list(zip(x.chunk(micro_batches), t.chunk(micro_batches), strict=True))
        for place, (inputs, targets) in enumerate(pieces):
            with nullcontext() if place == len(pieces) - 1 else ddp.no_sync():
                (mean_loss(ddp(inputs), targets) / micro_batches).backward()
        optimizer.step()
    assert correction.counters.edited == 0
    return gradients(model), dict(correction._rewriter.sides), correction.samples


def check(results, kind, samples, dtype, damping=DAMPING):
    model, x, t = build_for(kind, samples, torch.float64)
    expected = corrected(model, loss_on(x, t), samples=samples, damping=damping)
    for grads, _, counted in results:
        assert counted == samples
        assert_close(grads, expected, TOLERANCE[dtype])
    for name, tensor in results[0][0].items():
        assert all(torch.equal(tensor, grads[name]) for grads, _, _ in results), "replicas would drift apart"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "samples"), SIZES)
def test_as_one_process(two, kind, samples, dtype):
    results = two.run(step, kind, samples, dtype)
    check(results, kind, samples, dtype)
    sides = set(results[0][1].values())
    assert sides == {("wide", 4): {"samples"}, ("wide", 16): {"samples", "features"}}.get((kind, samples), {"features"})


@pytest.mark.parametrize(("kind", "samples"), SIZES)
def test_four_ranks(four, kind, samples):
    check(four.run(step, kind, samples, torch.float64), kind, samples, torch.float64)


@pytest.mark.parametrize("attached", ["before", "module"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_attached_before_or_after_wrapping(two, kind, attached):
    check(two.run(step, kind, 4, torch.float64, attached), kind, 4, torch.float64)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_micro_batches_without_sync(two, kind):
    check(two.run(step, kind, 8, torch.float64, "ddp", 2), kind, 8, torch.float64)


@pytest.mark.parametrize("kind", ["wide", "conv"])
@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_options_of_the_wrapper(two, kind, options):
    check(two.run(step, kind, 4, torch.float64, "ddp", 1, options), kind, 4, torch.float64)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_no_damping(two, kind):
    check(two.run(step, kind, 4, torch.float64, "ddp", 1, None, None, 0.0), kind, 4, torch.float64, 0.0)


def step_of_two_optimizers(kind, samples):
    """Weights in one and biases in the other, micro-batches, and a scaler that unscales one after the other."""
    model, x, t = build_for(kind, samples, torch.float64)
    ddp = DDP(model)
    parts = [[p for p in model.parameters() if (p.ndim == 1) == is_bias] for is_bias in (False, True)]
    optimizers = [torch.optim.SGD(part, lr=0.0) for part in parts]
    correction = consequent.attach(optimizers, ddp, damping=DAMPING)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, t = share(x), share(t)
    for _ in range(2):
        model.zero_grad()
        with ddp.no_sync():
            scaler.scale(mean_loss(ddp(x[:1]), t[:1]) / len(x)).backward()
        scaler.scale(mean_loss(ddp(x[1:]), t[1:]) * (len(x) - 1) / len(x)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert correction.counters.edited == 0
    assert correction.counters.steps == 2
    return gradients(model), dict(correction._rewriter.sides), correction.samples


@pytest.mark.parametrize(("kind", "samples"), SIZES)
def test_two_optimizers_that_share_layers(two, kind, samples):
    check(two.run(step_of_two_optimizers, kind, samples), kind, samples, torch.float64)


# ---- uneven batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3, 1], [1, 7], [10, 2]])
@pytest.mark.parametrize("kind", ["wide", "tall", "conv"])
def test_uneven_batches(two, kind, sizes):
    """What one process makes of the same loss: the mean of the ranks' means."""
    results = two.run(step, kind, sum(sizes), torch.float64, "ddp", 1, None, sizes)
    model, x, t = build_for(kind, sum(sizes), torch.float64)
    losses = [loss_on(*part, weight=0.5) for part in zip(x.split(sizes), t.split(sizes), strict=True)]
    expected = corrected(model, *losses, samples=sum(sizes))
    for grads, _, counted in results:
        assert counted == sum(sizes)
        assert_close(grads, expected, 1e-9)


# ---- other losses, edited gradients -----------------------------------------------------------------------------


def sum_loss(kind):
    model, x, t = build_for(kind, 4, torch.float64)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, ddp, damping=DAMPING, loss_reduction="sum")
    (0.5 * (ddp(share(x)) - share(t)).square().sum()).backward()
    optimizer.step()
    return gradients(model)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_a_loss_that_is_summed(two, kind):
    """The wrapper averages, so half of the sum is what there is to correct."""
    model, x, t = build_for(kind, 4, torch.float64)
    expected = corrected(model, loss_on(x, t, weight=4 / 2), samples=1)
    for grads in two.run(sum_loss, kind):
        assert_close(grads, expected, 1e-9)


def ignored_targets(uncalled_on=None):
    """Each rank has targets of its own that do not count."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, DDP(model), damping=DAMPING, loss_reduction=criterion)
    targets = torch.tensor([0, 2, 1, 1]) if dist.get_rank() == 0 else torch.tensor([1, -100, 2, -100])
    used = torch.nn.CrossEntropyLoss() if dist.get_rank() == uncalled_on else criterion
    used(correction.model(torch.randn(4, 6).double()), targets).backward()
    optimizer.step()
    return correction._rewriter.divisor, correction.samples, gradients(model)


def test_what_was_seen_of_the_loss_adds_up(two):
    (first, samples, grads), (second, _, others) = two.run(ignored_targets)
    assert first == second == 4 + 2
    assert samples == 8
    assert_close(grads, others, 1e-12)


def test_a_criterion_that_one_rank_does_not_call(two):
    one, other = two.errors(ignored_targets, 1)
    assert "on another rank, what the loss was divided by is not known" in one
    assert "CrossEntropyLoss() was not called" in other


def clipped(kind, how):
    model, x, t = build_for(kind, 4, torch.float64)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, damping=DAMPING)
    mean_loss(ddp(share(x)), share(t)).backward()
    if how == "norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    else:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    final = gradients(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", consequent.ConsequentWarning)
        optimizer.step()
    return gradients(model), final, correction.counters.edited


@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_clipped_gradients(two, kind, how):
    model, x, t = build_for(kind, 4, torch.float64)
    for grads, final, edited in two.run(clipped, kind, how):
        assert_close(grads, corrected(model, loss_on(x, t), samples=4, final=final), 1e-6 if how == "value" else 1e-7)
        assert (edited > 0) == (how == "value" and kind == "wide")  # the feature side solves with any gradient


def in_half_precision(kind):
    model, x, t = build_for(kind, 4, torch.float32)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, damping=DAMPING)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(ddp(share(x)), share(t))
    loss.backward()
    optimizer.step()
    return gradients(model), [layer.bytes for layer in correction.communication().layers]


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_autocast(two, kind):
    """As one process in the same precision, whose gradients are summed in another order."""
    model, x, t = build_for(kind, 4, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, damping=DAMPING)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(model(x), t)
    loss.backward()
    optimizer.step()
    expected = gradients(model)
    for grads, sizes in two.run(in_half_precision, kind):
        assert_close(grads, expected, 0.1)  # sums of numbers with 8 bits
        if kind == "wide":  # two samples of two bytes: 20 + 16, 16 + 14, 14 + 3 numbers
            assert [size["rows"] for size in sizes] == [2 * 2 * n for n in (36, 30, 17)]
