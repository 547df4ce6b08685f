"""A step promises no more than the loss has (`promise=`): the weights' change, against what is computed by hand."""

import copy
import gc
import itertools
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import consequent
from consequent.engines import promising, step


@pytest.fixture(autouse=True, params=["looked at", "not waited for"])
def device(request, monkeypatch):
    """The numbers may be looked at, or are on a device that must not be waited for."""
    if request.param == "not waited for":
        for module in (step, promising):
            monkeypatch.setattr(module, "answers_at_once", lambda place: False)
    return request.param


HIGH = 50.0  # a learning rate at which every step promises too much


def network(*widths, seed=0):
    torch.manual_seed(seed)
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.SiLU())]
    return nn.Sequential(*layers[:-1]).double()


def data(samples=9, inputs=5, outputs=3):
    return torch.randn(samples, inputs).double(), torch.randn(samples, outputs).double()


def stepped(model, backward, lr=HIGH, momentum=0.0, before_step=lambda model: None, **options):
    """The model and its correction after one step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    correction = consequent.attach(optimizer, model, **{"promise": 1.0, "bound": None} | options)
    backward(model)
    before_step(model)
    optimizer.step()
    return model, correction


def promised(before, after, loss):
    """What the step from one model to the other takes off the loss, to first order."""
    gradients = torch.autograd.grad(loss(before), list(before.parameters()))
    changes = [new - old for new, old in zip(after.parameters(), before.parameters(), strict=True)]
    return -sum((gradient * change).sum() for gradient, change in zip(gradients, changes, strict=True)).item()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 8), min_size=3, max_size=5),
    st.floats(0.1, 3),
    st.sampled_from([0, 0.9]),
)
def test_a_step_promises_the_fraction_and_no_more(samples, widths, fraction, momentum):
    model = network(*widths)
    inputs, targets = data(samples, widths[0], widths[-1])

    def loss(model):
        return mse_loss(model(inputs), targets)

    after, correction = stepped(
        model, lambda one: loss(one).backward(), 1e6, momentum, promise=fraction, loss_reduction="mse"
    )
    assert correction.counters.promised == 1
    in_the_long_run = promised(model, after, loss) / (1 - momentum)  # of which a step with momentum is a part
    assert in_the_long_run == pytest.approx(fraction * loss(model).item(), rel=1e-6)


def test_all_layers_are_shortened_alike_and_in_their_direction():
    model = network(5, 7, 7, 3)
    inputs, targets = data()

    def backward(model):
        mse_loss(model(inputs), targets).backward()

    limited, _ = stepped(model, backward, loss_reduction="mse")
    free, _ = stepped(model, backward, loss_reduction="mse", promise=None)
    ratios = (weights(limited) - weights(model)) / (weights(free) - weights(model))
    assert 0 < ratios[0] < 0.5
    torch.testing.assert_close(ratios, ratios[0].expand_as(ratios), rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_last", [True, False])
def test_one_layer_alone_promises_no_more_either(is_last):
    model = network(5, 3) if is_last else network(5, 4, 3)
    inputs, targets = data(samples=4)
    if not is_last:
        model[2].requires_grad_(False)

    def loss(model):
        return mse_loss(model(inputs), targets)

    after, correction = stepped(model, lambda one: loss(one).backward(), loss_reduction="mse")
    model.requires_grad_(True)
    assert promised(model, after, loss) == pytest.approx(loss(model).item(), rel=1e-6)
    assert correction.counters.promised == 1


# ---- parameters that are not corrected ------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A network of which numbers are trained besides that belong to no layer that is corrected."""

    def __init__(self, size=1.0):
        super().__init__()
        self.layers = network(5, 7, 3)
        self.scale = nn.Parameter(torch.full((5,), 1 / size).double())
        self._size = size

    def forward(self, inputs):
        return self.layers(inputs * self.scale * self._size)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3])  # the larger, the more the scale promises
@pytest.mark.parametrize("factor", [1.0, 0.01])  # of the gradients before the step, as clipping has it
def test_what_is_not_corrected_promises_too(size, factor):
    model = Scaled(size)
    inputs, targets = data()

    def loss(model):
        return mse_loss(model(inputs), targets)

    def backward(model):
        loss(model).backward()
        for parameter in model.parameters():
            parameter.grad *= factor

    def promises(after):
        gradients = torch.autograd.grad(loss(model), list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        sums = {True: 0.0, False: 0.0}
        for name, gradient, new, old in zip(names, gradients, after.parameters(), model.parameters(), strict=True):
            sums[name == "scale"] -= (gradient * (new - old)).sum().item()
        return sums[False], sums[True]

    options = {"loss_reduction": "mse", "lr": 30.0 / factor}
    limited, correction = stepped(model, backward, **options)
    free, _ = stepped(model, backward, promise=None, **options)
    allowed, now, wanted = loss(model).item(), promises(limited), promises(free)
    assert sum(wanted) > allowed
    assert correction.counters.promised == 1
    assert sum(now) == pytest.approx(allowed, rel=1e-6)
    for mine, own, others in zip(now, wanted, reversed(wanted), strict=True):
        assert mine == pytest.approx(min(own, max(allowed / 2, allowed - others)), rel=1e-6)


@pytest.mark.parametrize("make", [lambda: network(5, 7, 3), Scaled])
def test_a_step_that_promises_less_is_the_same_bit_for_bit(make):
    model = make()
    inputs, targets = data()

    def backward(model):
        mse_loss(model(inputs), targets).backward()

    limited, correction = stepped(model, backward, lr=1e-4, loss_reduction="mse")
    free, _ = stepped(model, backward, lr=1e-4, loss_reduction="mse", promise=None)
    assert torch.equal(weights(limited), weights(free))
    assert correction.counters.promised == 0


def side(model):
    return 50 * (model.scale - 3).square().sum()  # comes to no layer


def all_at_once(model, loss, scale):
    (scale * (loss(model) + side(model))).backward()


def side_first(model, loss, scale):
    for part in (side, loss):
        (scale * part(model)).backward()


def side_last(model, loss, scale):
    for part in (loss, side):
        (scale * part(model)).backward()


def side_last_after_one_that_was_thrown_away(model, loss, scale):
    (scale * side(model)).backward()
    model.zero_grad()
    side_last(model, loss, scale)


def side_last_after_zeros(model, loss, scale):
    (scale * side(model)).backward()
    model.zero_grad(set_to_none=False)
    side_last(model, loss, scale)


@pytest.mark.parametrize("scale", [1.0, 1024.0])  # as a scaler has it
@pytest.mark.parametrize(
    "backward", [side_first, side_last, side_last_after_one_that_was_thrown_away, side_last_after_zeros]
)
def test_a_pass_that_comes_to_no_layer_counts(backward, scale):
    model = Scaled()
    inputs, targets = data()

    def loss(model):
        return mse_loss(model(inputs), targets)

    def unscaled(model):
        for parameter in model.parameters():
            parameter.grad /= scale

    expected, _ = stepped(model, lambda one: all_at_once(one, loss, 1.0), loss_reduction="mse")
    after, correction = stepped(
        model, lambda one: backward(one, loss, scale), before_step=unscaled, loss_reduction="mse"
    )
    assert correction.counters.promised == 1
    torch.testing.assert_close(weights(after) - weights(model), weights(expected) - weights(model), rtol=1e-9, atol=0)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_step_without_anything_to_correct_promises_no_more_either(is_frozen):
    model = Scaled()
    inputs, targets = data()

    def loss(model):
        return mse_loss(model(inputs), targets) if is_frozen else side(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    correction = consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    model.layers.requires_grad_(not is_frozen)
    for counted in (2, 3):
        optimizer.zero_grad()
        before = copy.deepcopy(model)
        if not is_frozen:
            model(inputs)
        loss(model).backward()
        optimizer.step()
        (gradient,) = torch.autograd.grad(loss(before), before.scale)
        promise = -(gradient * (model.scale - before.scale)).sum().item()
        assert promise == pytest.approx(loss(before).item(), rel=1e-6)
        assert correction.counters.promised == counted


def test_a_pass_that_left_nothing_to_this_optimiser_does_not_count():
    """Of two networks in one module, each with an optimiser: one's losses go through the other."""
    one, other = network(5, 7, 5), network(5, 7, 3)
    inputs, targets = data()

    def changed(model_of):
        first, second = copy.deepcopy(one), copy.deepcopy(other)
        both = nn.ModuleList([first, second])
        optimizers = [torch.optim.SGD(part.parameters(), lr=HIGH) for part in both]
        for optimizer, part in zip(optimizers, both, strict=True):
            consequent.attach(optimizer, model_of(both, part), promise=1.0, bound=None, loss_reduction="mse")
        before = weights(second)
        (10 * mse_loss(second(first(inputs)), targets)).backward()  # for the first one alone
        optimizers[1].zero_grad()
        mse_loss(second(first(inputs).detach()), targets).backward()
        optimizers[1].step()
        return weights(second) - before

    torch.testing.assert_close(changed(lambda both, part: both), changed(lambda both, part: part), rtol=1e-9, atol=0)


def test_a_loss_of_zero_that_has_a_gradient_is_told_of(device):
    model = network(5, 7, 3)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            (loss - loss.detach()).backward()
            optimizer.step()

    before = weights(model)
    steps(9)
    looks = device == "looked at"
    with (
        pytest.warns(consequent.ConsequentWarning, match="zero in the last 10 of them.*nothing is being trained")
        if looks
        else nullcontext()
    ):
        steps(1)
    steps(1)
    assert torch.equal(weights(model), before)


def test_correcting_by_hand_is_refused():
    model = network(5, 7, 3)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=HIGH)
    correction = consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")
    mse_loss(model(inputs), targets).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"promise=1 is kept in optimizer\.step\(\).*leave correction\.step\(\) out"):
        correction.step()
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
    optimizer.step()
    assert correction.counters.promised == 1


def test_what_was_given_to_backward_is_not_kept_alive():
    model = network(5, 7, 3)
    inputs, _ = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, promise=1.0, loss_reduction=9.0)
    outputs = model(inputs).square()
    gradient = torch.ones_like(outputs)
    outputs.backward(gradient)
    optimizer.step()
    kept = weakref.ref(gradient)
    del gradient
    assert kept() is None


# ---- the same loss, said otherwise ------------------------------------------------------------------------------


def halves(model, inputs, targets):
    for part in (slice(None, 4), slice(4, None)):
        (mse_loss(model(inputs[part]), targets[part], reduction="sum") / targets.numel()).backward()


def thrown_away(model, inputs, targets):
    (7 * mse_loss(model(2 * inputs), targets)).backward()
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()


def zeroed_in_place(model, inputs, targets):
    (7 * mse_loss(model(2 * inputs), targets)).backward()
    model.zero_grad(set_to_none=False)
    mse_loss(model(inputs), targets).backward()


def with_gradient(model, inputs, targets):
    mse_loss(model(inputs), targets, reduction="none").mean(0).backward(torch.full((3,), 1 / 3).double())


def two_losses(model, inputs, targets):
    squares = (model(inputs) - targets).square() / targets.numel()
    torch.autograd.backward([squares[:, :1].sum(), squares[:, 1:].sum()])


def one_after_the_other(model, inputs, targets):
    squares = (model(inputs) - targets).square() / targets.numel()
    squares[:, :1].sum().backward(retain_graph=True)
    squares[:, 1:].sum().backward()


def recomputed_in_a_pass_of_its_own(model, inputs, targets):
    hidden = checkpoint(model[:2], inputs.requires_grad_(), use_reentrant=True)
    mse_loss(checkpoint(model[2:], hidden, use_reentrant=True), targets).backward()


def recomputed(model, inputs, targets):
    mse_loss(checkpoint(model, inputs, use_reentrant=False), targets).backward()


@pytest.mark.parametrize(
    "backward",
    [
        halves,
        thrown_away,
        zeroed_in_place,
        with_gradient,
        two_losses,
        one_after_the_other,
        recomputed,
        recomputed_in_a_pass_of_its_own,
    ],
)
def test_the_same_loss_said_otherwise_is_the_same_step(backward):
    model = network(5, 7, 6, 3)
    inputs, targets = data()
    divisor = targets.numel() / 2
    expected, _ = stepped(model, lambda one: mse_loss(one(inputs), targets).backward(), loss_reduction=divisor)
    found, correction = stepped(model, lambda one: backward(one, inputs.clone(), targets), loss_reduction=divisor)
    assert correction.counters.promised == 1
    torch.testing.assert_close(weights(found), weights(expected))


@pytest.mark.parametrize("factor", [1024.0, 0.01])
def test_a_scaled_loss_is_the_same_step(factor):
    model = network(5, 7, 3)
    inputs, targets = data()

    def unscale(model):
        for parameter in model.parameters():
            parameter.grad.div_(factor)

    expected, _ = stepped(model, lambda one: mse_loss(one(inputs), targets).backward(), loss_reduction="mse")
    found, correction = stepped(
        model,
        lambda one: (factor * mse_loss(one(inputs), targets)).backward(),
        before_step=unscale,
        loss_reduction="mse",
    )
    assert correction.counters.promised == 1
    torch.testing.assert_close(weights(found), weights(expected))


def test_a_clipped_gradient_promises_as_much_as_it_is_applied():
    model = network(5, 7, 3)
    inputs, targets = data()

    def loss(model):
        return mse_loss(model(inputs), targets)

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    clipped, correction = stepped(
        model, lambda one: loss(one).backward(), lr=1e5, before_step=clip, loss_reduction="mse"
    )
    assert correction.counters.promised == 1
    assert promised(model, clipped, loss) == pytest.approx(loss(model).item())
    _, correction = stepped(model, lambda one: loss(one).backward(), lr=1e-3, before_step=clip, loss_reduction="mse")
    assert correction.counters.promised == 0


def test_a_scalers_step_is_limited_by_the_loss_itself():
    model = network(5, 7, 3).float()
    inputs, targets = (tensor.float() for tensor in data())
    expected, _ = stepped(model, lambda one: mse_loss(one(inputs), targets).backward(), loss_reduction="mse")
    optimizer = torch.optim.SGD(model.parameters(), lr=HIGH)
    correction = consequent.attach(optimizer, model, promise=1.0, bound=None, loss_reduction="mse")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mse_loss(model(inputs), targets)).backward()
    scaler.step(optimizer)
    assert correction.counters.promised == 1
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-4, atol=1e-5)


def test_a_closures_loss_is_seen():
    model = network(5, 7, 3)
    inputs, targets = data()
    expected, _ = stepped(model, lambda one: mse_loss(one(inputs), targets).backward(), loss_reduction="mse")
    optimizer = torch.optim.SGD(model.parameters(), lr=HIGH)
    consequent.attach(optimizer, model, promise=1.0, bound=None, loss_reduction="mse")

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(weights(model), weights(expected))


def test_what_is_noted_of_losses_does_not_grow():
    model = network(5, 7, 3)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")
    losses = correction._parts.corrector.losses
    for _ in range(20):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        assert len(losses._of) <= 2
    optimizer.step()


def penalty(model):
    return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def penalty_behind(model, inputs, targets):
    mse_loss(model(inputs), targets).backward()
    penalty(model).backward()


def penalty_before(model, inputs, targets):
    penalty(model).backward()
    mse_loss(model(inputs), targets).backward()


def penalty_besides(model, inputs, targets):
    (mse_loss(model(inputs), targets) + penalty(model)).backward()


@pytest.mark.parametrize("backward", [penalty_behind, penalty_before, penalty_besides])
def test_a_penalty_is_a_part_of_the_loss(backward):
    model = network(5, 7, 3)
    inputs, targets = data()

    def loss(model):
        return mse_loss(model(inputs), targets) + penalty(model)

    after, _ = stepped(model, lambda one: backward(one, inputs, targets), loss_reduction="mse")
    assert promised(model, after, loss) == pytest.approx(loss(model).item())


class Recomputed(torch.autograd.Function):
    """Calls the layers in its forward pass, and a backward() of its own in its backward pass."""

    @staticmethod
    def forward(ctx, inputs, layers):
        with torch.enable_grad():
            ctx.inputs = inputs.detach().requires_grad_()
            ctx.outputs = layers(ctx.inputs)
        return ctx.outputs.detach()

    @staticmethod
    def backward(ctx, grad):
        torch.autograd.backward(ctx.outputs, grad)
        return ctx.inputs.grad, None


def nested(model, inputs):
    def outer(hidden):
        return model[4:](checkpoint(model[2:4], model[:2](hidden), use_reentrant=True))

    return checkpoint(outer, inputs.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize(
    "call", [nested, lambda model, inputs: model[2:](Recomputed.apply(inputs.requires_grad_(), model[:2]))]
)
def test_one_backward_inside_of_another_has_no_loss_of_its_own(call):
    model = network(5, 7, 6, 3)
    inputs, targets = data()
    after, _ = stepped(model, lambda one: mse_loss(call(one, inputs.clone()), targets).backward(), loss_reduction=13.5)
    loss = mse_loss(model(inputs), targets).item()
    assert promised(model, after, lambda one: mse_loss(one(inputs), targets)) == pytest.approx(loss)


class Tables(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Embedding(20, 3, sparse=sparse).double() for _ in range(2))

    def forward(self, places):
        return self.first(places).mean(1) * self.second(places).mean(1)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_promise_too(sparse):
    model, places = Tables(sparse), torch.randint(20, (9, 4))
    targets = torch.randn(9, 3).double()
    after, correction = stepped(
        model, lambda one: mse_loss(one(places), targets).backward(), loss_reduction="mse", include=[nn.Embedding]
    )
    dense = Tables(sparse=False)
    loss = mse_loss(dense(places), targets).item()
    assert correction.counters.promised == 1
    assert promised(dense, after, lambda one: mse_loss(one(places), targets)) == pytest.approx(loss)


@pytest.mark.parametrize(("factor", "lr"), [(1.0, 500.0), (4096.0, 5.0)])
def test_half_precision_neither_overflows_nor_vanishes(factor, lr):
    torch.manual_seed(0)
    inputs, labels = (0.05 * torch.randn(64, 64)).half(), torch.randint(0, 10, (64,))
    model = network(64, 64, 64, 10).half()
    after, correction = stepped(
        model, lambda one: (factor * cross_entropy(one(inputs), labels)).backward(), lr=lr, loss_reduction=64.0
    )
    assert correction.counters.promised == 1
    before, after, inputs = copy.deepcopy(model).double(), after.double(), inputs.double()
    loss = factor * cross_entropy(before(inputs), labels).item()
    found = promised(before, after, lambda one: factor * cross_entropy(one(inputs), labels))
    assert found == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_the_first_step_of_momentum_is_not_dampened(dampening):
    model = network(5, 7, 3)
    before = copy.deepcopy(model)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=HIGH, momentum=0.9, dampening=dampening)
    consequent.attach(optimizer, model, promise=1.0, bound=None, loss_reduction="mse")
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    loss = mse_loss(before(inputs), targets).item()
    found = promised(before, model, lambda one: mse_loss(one(inputs), targets)) / (1 - 0.9)
    assert found == pytest.approx(loss)


def test_no_graph_is_kept_alive():
    model = network(5, 7, 3)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        kept = weakref.ref(loss)
        del loss
        assert kept() is None
    finally:
        gc.enable()


def test_a_run_can_be_repeated_bit_for_bit():
    """Numbers of passes go on counting from run to run, and losses are added up in the same order all the same."""
    ends = set()
    for _ in range(12):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=HIGH)
        consequent.attach(optimizer, model, promise=1.0)
        for _ in range(5):
            optimizer.zero_grad()
            for size in (3, 5, 7, 11, 13):
                labels = torch.randint(0, 5, (size,))
                (cross_entropy(model(torch.randn(size, 20)), labels) * size / 39).backward()
            optimizer.step()
        ends.add(weights(model).numpy().tobytes())
    assert len(ends) == 1


# ---- learning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1.0, 10.0, 100.0])
def test_too_high_a_rate_learns(lr):
    torch.manual_seed(0)
    inputs = torch.randn(200, 6)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    losses = {}
    for promise in (1.0, None):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        consequent.attach(optimizer, model, promise=promise)
        for _ in range(60):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        losses[promise] = loss.item()
    assert losses[1.0] < 0.3
    if lr >= 10:
        assert losses[1.0] < losses[None] / 3


def test_foresight_is_of_the_step_that_is_taken():
    model = network(5, 7, 3)
    inputs, targets = data()
    _, correction = stepped(
        model, lambda one: mse_loss(one(inputs), targets).backward(), loss_reduction="mse", foresight=True
    )
    assert correction.counters.promised == 1
    for layer in correction.foresight().values():
        assert layer.ratio < 0.1
        assert layer.cosine == pytest.approx(layer.corrected_cosine)


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_negative_loss_is_refused_and_nothing_changes(scale):
    model = network(5, 7, 3)
    inputs, _ = data()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, promise=0.5)
    (scale * (model(inputs).square().mean() - 100)).backward()
    for parameter in model.parameters():
        parameter.grad /= scale  # as a scaler does before the step
    with pytest.raises(ValueError, match=r"promise=0.5 is for losses that are never below zero, and this one is -9\d"):
        optimizer.step()
    assert torch.equal(weights(model), before)


def by_the_engine(loss):
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def by_its_edge(loss):
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))


@pytest.mark.parametrize("backward", [by_the_engine, by_its_edge])
def test_a_loss_that_is_not_seen_is_refused(backward):
    model = network(5, 7, 3)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")
    backward(mse_loss(model(inputs), targets))
    with pytest.raises(RuntimeError, match="asks how large the loss is, and it was not seen"):
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("is_dead", [False, True])
def test_a_loss_below_zero_by_rounding_is_none(scale, is_dead):
    model = Scaled()
    inputs, targets = data()
    if is_dead:  # the gradient of the scale is zero, and says nothing of a scaler
        inputs = torch.zeros_like(inputs)

    def backward(model):
        loss = mse_loss(model(inputs), targets)
        (scale * (loss - loss.item() - 1e-5)).backward()
        for parameter in model.parameters():
            parameter.grad /= scale  # as a scaler does before the step

    after, correction = stepped(model, backward, loss_reduction="mse")
    assert torch.equal(weights(after), weights(model))
    assert correction.counters.promised == 1


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_step_of_a_loss_that_is_not_finite_is_skipped(what, device):
    model = network(5, 7, 3)
    inputs, targets = data()
    warns = pytest.warns(consequent.ConsequentWarning, match="NaN or inf in .* the loss .*The step was skipped")
    with warns if device == "looked at" else nullcontext():
        after, correction = stepped(
            model, lambda one: (mse_loss(one(inputs), targets) + what).backward(), loss_reduction="mse"
        )
    assert torch.equal(weights(after), weights(model))
    assert correction.counters.skipped == 1


@pytest.mark.parametrize("promise", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_what_is_no_fraction_is_refused(promise):
    model = network(5, 7, 3)
    with pytest.raises((ValueError, TypeError), match="promise"):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, promise=promise)


def test_where_it_would_do_nothing_it_is_refused():
    model = network(5, 7, 3)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"promise=1\.0 would do nothing under Adam"):
        consequent.attach(adam, model, promise=1.0)
    with pytest.raises(ValueError, match=r'promise=1\.0 would do nothing with at="backward"'):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, promise=1.0, at="backward")
    correction = consequent.attach(adam, model)
    with pytest.raises(ValueError, match="promise=2 would do nothing under Adam"):
        correction.promise = 2


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"maximize": True}])
def test_a_step_that_never_ends_or_goes_up_is_refused(options):
    model = network(5, 7, 3)
    inputs, targets = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    consequent.attach(optimizer, model, promise=1.0, loss_reduction="mse")
    mse_loss(model(inputs), targets).backward()
    with pytest.raises(RuntimeError, match="asks how far the optimiser's step goes"):
        optimizer.step()


# ---- what is kept and told --------------------------------------------------------------------------------------


def test_it_is_kept_in_states_and_pickles_and_can_be_set():
    model = network(5, 7, 3)
    optimizer = consequent.CSGD(model, lr=HIGH, promise=0.5, bound=None, loss_reduction="mse")
    other = consequent.CSGD(network(5, 7, 3), lr=HIGH, bound=None, loss_reduction="mse")
    other.correction.load_state_dict(optimizer.correction.state_dict())
    assert other.correction.promise == 0.5
    inputs, targets = data()
    for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), other):
        model = one.correction.model
        before = copy.deepcopy(model)
        mse_loss(model(inputs), targets).backward()
        one.step()
        loss = mse_loss(before(inputs), targets).item()
        assert promised(before, model, lambda one: mse_loss(one(inputs), targets)) == pytest.approx(0.5 * loss)
    other.correction.promise = None
    state = other.correction.state_dict()
    del state["promise"]  # as earlier versions have it
    optimizer.correction.load_state_dict(state)
    assert optimizer.correction.promise == 0.5


def test_printing_tells_of_it():
    model = network(5, 7, 3)
    inputs, targets = data()
    _, correction = stepped(model, lambda one: mse_loss(one(inputs), targets).backward(), loss_reduction="mse")
    text = repr(correction)
    assert "promise=1)" in text
    assert "promise: one step takes at most 1 of the loss away, to first order" in text
    assert "promised 1" in text
