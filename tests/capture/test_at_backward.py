"""``at="backward"``: after ``backward()`` the consequentialist gradient of that very pass is in ``.grad``."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from cases import CASES, Around, called, check_error, included, random_like
from cases import build as build_case
from kinds import BATCHES, READY, hooks_on, make_model, train
from kinds import KINDS as OPTIMIZERS
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    after_sgd,
    assert_close,
    assert_same,
    assert_stepped,
    build,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    observe,
    twin,
    weights,
)
from models.expected import check_same, check_same_grads, expected_backward, half_squares, twin_of
from ranks.cases import Repeated, TwoBiases
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import consequent
import consequent.correction
from consequent import NonFiniteError

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def start(kind, at="backward", dtype=torch.float64, batch=None, optimizer=torch.optim.SGD, **options):
    """(model, inputs, targets, optimiser, its correction)."""
    model, x, t = build(kind, dtype=dtype, batch=batch)
    optimizer = optimizer(model.parameters(), lr=LR)
    return model, x, t, optimizer, consequent.attach(optimizer, model, damping=DAMPING, at=at, **options)


def added(*dictionaries):
    """The sum of several dictionaries of gradients."""
    return {name: sum(d[name] for d in dictionaries) for name in dictionaries[0]}


def check_joint(model, compute_loss, divisor, **options):
    """One backward pass, against all uses of each weight solved together; returns the correction."""
    plain = twin_of(model)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward", **options)
    compute_loss(model).backward()
    expected_backward(plain, compute_loss, divisor, DAMPING)
    check_same_grads(model, plain)
    assert correction.counters.steps == 1
    return correction


@pytest.fixture
def solves(monkeypatch):
    """The weights' layers that were solved for, one after the other."""
    found, solve = [], consequent.correction.corrected_in_backward

    def counted(gathered, *args, **kwargs):
        found.append(gathered.products[0].use.layer)
        return solve(gathered, *args, **kwargs)

    monkeypatch.setattr(consequent.correction, "corrected_in_backward", counted)
    return found


# ---- one pass a step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_there_after_backward(kind, dtype):
    model, x, t, *_kept, correction = start(kind, dtype=dtype)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)), TOLERANCE[dtype])
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    assert correction.samples == len(x)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch", [1, None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_is_what_the_step_would_make_of_it(kind, batch, dtype):
    found = []
    for at in ("backward", "step"):
        model, x, t, optimizer, _ = start(kind, at, dtype, batch)
        before = weights(model)
        mean_loss(model(x), t).backward()
        optimizer.step()
        assert_stepped(model, before, gradients(model), tolerance=1e-3)
        found.append(gradients(model))
    assert_close(*found, TOLERANCE[dtype])


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"relative_damping": 0.2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_other_dampings(kind, options):
    found = []
    for at in ("backward", "step"):
        model, x, t = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        consequent.attach(optimizer, model, at=at, **options)
        mean_loss(model(x), t).backward()
        optimizer.step()
        found.append(gradients(model))
    assert_close(*found, 1e-7)
    if options == {"damping": 0.0}:
        model, x, t = build(kind)
        assert_close(found[0], corrected(model, loss_on(x, t), samples=len(x), damping=0.0), 1e-7)


@pytest.mark.parametrize(
    ("loss_reduction", "divisor"),
    [("sum", 1), (7.0, 7), (lambda samples: 3 * samples, 15)],
    ids=["sum", "number", "callable"],
)
def test_the_divisor_of_the_loss(loss_reduction, divisor):
    model, x, t, *_kept = start("wide", loss_reduction=loss_reduction)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=divisor))


def test_dampings_of_groups_and_changes_of_the_damping():
    model, x, t = build("wide")
    groups = [{"params": model[0].parameters(), "damping": 3.0}, {"params": [*model[2:].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    for damping in (DAMPING, 7.0):
        correction.damping = damping
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        default = corrected(model, loss_on(x, t), samples=len(x), damping=damping)
        own = corrected(model, loss_on(x, t), samples=len(x), damping=3.0)
        assert_close(gradients(model), {name: (own if name[0] == "0" else default)[name] for name in default})


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_leave_the_solve(kind, frozen):
    model, x, t = build(kind)
    getattr(model[0], frozen).requires_grad_(False)
    getattr(model[-1], frozen).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    assert f"0.{frozen}" not in expected
    assert_close(gradients(model), expected)


def test_frozen_and_thawed_again():
    model, x, t, optimizer, _ = start("wide")
    for trained in (False, True, False):
        model[2].weight.requires_grad_(trained)
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_input_gradients_stay_plain(kind, requires_grad):
    """ΔZ of the layers below is what backpropagation says: also where inputs have a gradient of their own."""
    model, x, t, *_kept = start(kind)
    x.requires_grad_(requires_grad)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x.detach(), t), samples=len(x)))
    if requires_grad:
        plain = x.detach().clone().requires_grad_()
        mean_loss(twin(model)(plain), t).backward()
        torch.testing.assert_close(x.grad, plain.grad)


def test_a_layer_as_the_model_and_its_output_as_the_root():
    torch.manual_seed(0)
    layer, x, output_grad = nn.Linear(6, 3).double(), torch.randn(4, 6).double(), torch.randn(4, 3).double()
    correction = consequent.Consequentialism(layer, damping=DAMPING, at="backward")
    layer(x).backward(output_grad)
    (expected,) = reference.corrected_matrices(layer, x, output_grad, DAMPING)
    (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
    np.testing.assert_allclose(actual, 4 * expected, rtol=1e-10)
    assert correction.samples == 4


def test_one_sample_without_a_batch_dimension():
    model, x, t, *_kept, correction = start("wide")
    (0.5 * (model(x[0]) - t[0]).square().sum()).backward()
    assert_close(gradients(model), corrected(model, loss_on(x[:1], t[:1]), samples=1))
    assert correction.samples == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_samples_give_no_gradient(kind):
    model, x, t, *_kept, correction = start(kind)
    mean_loss(model(x[:0]), t[:0]).backward()
    assert_same(gradients(model), {name: torch.zeros_like(p) for name, p in model.named_parameters()})
    assert correction.samples == 0


def test_parameters_that_are_not_corrected_stay_plain():
    model = make_model()
    optimizer = torch.optim.SGD([*model[:3].parameters()], lr=LR)  # not the last layer
    consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    x, plain = BATCHES[0], twin_of(model)
    half_squares(model(x)).backward()
    half_squares(plain(x)).backward()
    for name in ("2.weight", "2.bias", "3.weight", "3.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad)
    assert not torch.allclose(model[0].weight.grad, plain[0].weight.grad)


# ---- optimisers -----------------------------------------------------------------------------------------------------


def made(name, model, at="backward"):
    kind = OPTIMIZERS[name]
    if name in READY:
        return kind.make(model, at=at)
    optimizer = kind.make_plain(model)
    consequent.attach(optimizer, model, damping=0.01, at=at)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_with_the_step(name):
    found = []
    for at in ("backward", "step"):
        model = make_model()
        train(model, made(name, model, at), BATCHES)
        found.append(model)
    check_same(*found, rtol=1e-6)
    plain = make_model()
    train(plain, OPTIMIZERS[name].make_plain(plain), BATCHES)
    assert not torch.allclose(plain[0].weight, found[0][0].weight)


@pytest.mark.parametrize("name", READY)
def test_ready_made_ones_are_torchs_and_their_state_can_be_loaded(name):
    model = make_model()
    optimizer = made(name, model)
    assert isinstance(optimizer, OPTIMIZERS[name].plain)
    assert optimizer.correction.at == "backward"
    train(model, optimizer, BATCHES[:3])
    again = make_model()
    again.load_state_dict(model.state_dict())
    loaded = made(name, again)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded.correction.load_state_dict(optimizer.correction.state_dict())
    for pair in ((model, optimizer), (again, loaded)):
        train(*pair, BATCHES[3:])
    assert_same(weights(again), weights(model))
    assert loaded.correction.counters == optimizer.correction.counters
    assert loaded.correction.counters.steps == len(BATCHES)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", READY)
def test_a_copy_of_the_pair_goes_on_by_itself(name, how):
    model = make_model()
    optimizer = made(name, model)
    train(model, optimizer, BATCHES[:2])
    half_squares(model(BATCHES[2]))  # a forward pass, whose backward pass never comes, is not copied
    again, copied = how((model, optimizer))
    assert copied.correction.at == "backward"
    assert copied.correction.model is again
    before = weights(model)
    train(again, copied, BATCHES[2:])
    assert_same(weights(model), before)
    train(model, optimizer, BATCHES[2:])
    assert_same(weights(again), weights(model))


# ---- what is one pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3, 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_their_own_corrections(kind, sizes):
    model, x, t, *_kept, correction = start(kind, batch=sum(sizes))
    pieces = list(zip(x.split(sizes), t.split(sizes), strict=True))
    parts = []
    for inputs, targets in pieces:
        (mean_loss(model(inputs), targets) / len(sizes)).backward()
        loss = loss_on(inputs, targets, 1 / len(sizes))
        parts.append(corrected(model, loss, samples=len(inputs)))
        assert correction.samples == len(inputs)
    assert_close(gradients(model), added(*parts))
    assert correction.counters.steps == len(sizes)
    together = corrected(model, *[loss_on(*p, 1 / len(sizes)) for p in pieces], samples=len(x))
    assert (gradients(model)["0.weight"] - together["0.weight"]).norm() > 1e-3 * together["0.weight"].norm()


def test_two_forward_passes_and_then_their_backward_passes():
    model, x, t, *_kept = start("wide", batch=8)
    losses = [mean_loss(model(x[i : i + 4]), t[i : i + 4]) for i in (0, 4)]
    parts = [corrected(model, loss_on(x[i : i + 4], t[i : i + 4]), samples=4) for i in (0, 4)]
    losses[1].backward()
    assert_close(gradients(model), parts[1])
    losses[0].backward()
    assert_close(gradients(model), added(*parts))


def test_zero_grad_forgets_a_pass_and_none_of_it_is_in_the_next():
    model, x, t, optimizer, _ = start("wide", batch=8)
    for set_to_none in (True, False):
        mean_loss(model(x[:5]), t[:5]).backward()
        optimizer.zero_grad(set_to_none)
        mean_loss(model(x[5:]), t[5:]).backward()
        assert_close(gradients(model), corrected(model, loss_on(x[5:], t[5:]), samples=3))
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_real_and_fake_samples_are_solved_for_together(kind):
    """``D(real) + D(fake)`` in one pass: 2n rows, and N = n."""
    model, x, t, *_kept, correction = start(kind, batch=8)
    (mean_loss(model(x[:4]), t[:4]) + mean_loss(model(x[4:]), t[4:])).backward()
    expected = corrected(model, loss_on(x[:4], t[:4]), loss_on(x[4:], t[4:]), samples=4)
    assert_close(gradients(model), expected)
    assert (correction.samples, correction.counters.steps) == (4, 1)


@pytest.mark.parametrize("batch", [2, 12])
def test_a_layer_called_twice_is_solved_once(batch, solves):
    torch.manual_seed(0)
    model, x = Repeated().double(), torch.randn(batch, 6).double()
    check_joint(model, lambda m: half_squares(m(x)), batch)
    assert sorted(solves, key=id) == sorted([model.first, model.layer], key=id)


class Tied(nn.Module):
    """Several layers with one weight; some of them have a bias of their own."""

    def __init__(self, biases):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=bias) for bias in biases)
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x, count=None):
        for layer in self.layers[:count]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize(
    "biases",
    [(False, False), (True, True), (True, False, True), (False, True)],
    ids=lambda b: "".join("-b"[i] for i in b),
)
def test_layers_with_one_weight_are_solved_together(biases, batch, solves):
    torch.manual_seed(0)
    model, x = Tied(biases).double(), torch.randn(batch, 7).double()
    check_joint(model, lambda m: half_squares(m(x)), batch)
    assert len(solves) == 1


@pytest.mark.parametrize("order", ["both", "reversed", "one"])
def test_a_bias_that_is_not_used_has_no_gradient(order):
    torch.manual_seed(0)
    model, x = TwoBiases().double(), torch.randn(3, 7).double()
    check_joint(model, lambda m: half_squares(m(x, order)), 3)
    assert (model.other.bias.grad is None) == (order == "one")


def test_a_bias_that_two_layers_share_with_their_weight():
    torch.manual_seed(0)
    model, x = Tied((True, True)).double(), torch.randn(3, 7).double()
    model.layers[1].bias = model.layers[0].bias
    check_joint(model, lambda m: half_squares(m(x)), 3)


def test_a_use_that_the_loss_does_not_depend_on():
    model, x, t, *_kept = start("wide", batch=8)
    model(x[:4])
    unused = model(x[4:])
    mean_loss(model(x[:4]), t[:4]).backward()
    assert_close(gradients(model), corrected(model, loss_on(x[:4], t[:4]), samples=4))
    assert unused.requires_grad


def test_a_layer_that_the_loss_does_not_depend_on_has_no_gradient():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    x = torch.randn(4, 5).double()
    used, _ = [layer(x) for layer in model]
    half_squares(used).backward()
    assert (model[0].weight.grad is None, model[1].weight.grad is None) == (False, True)


def test_a_model_that_is_called_in_parts():
    model, x, t, *_kept, correction = start("wide")
    hidden = model[1](model[0](x))
    mean_loss(model[2:](hidden), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    assert (correction.samples, correction.counters.steps) == (len(x), 1)


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
def test_several_roots_have_one_number_of_samples(sizes):
    """N is the same for all layers of a pass: the largest, whichever root the engine takes first."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    xs = [torch.randn(size, 6).double() for size in sizes]
    grads = [torch.randn(size, 3).double() for size in sizes]
    torch.autograd.backward([layer(x) for layer, x in zip(model, xs, strict=True)], grads)
    for layer, x, grad in zip(model, xs, grads, strict=True):
        (expected,) = reference.corrected_matrices(layer, x, grad, DAMPING)
        (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
        np.testing.assert_allclose(actual, 8 * expected, rtol=1e-10)


def test_a_generators_step_through_the_discriminator():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8)), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))]
    generator, discriminator = (net.double() for net in nets)
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR) for net in (generator, discriminator)]
    for optimizer, net in zip(optimizers, (generator, discriminator), strict=True):
        consequent.attach(optimizer, net, damping=DAMPING, at="backward")
    noise = torch.randn(4, 6).double()
    loss_of = lambda g, d: F.softplus(-d(g(noise))).mean()  # noqa: E731
    loss_of(generator, discriminator).backward()
    assert_close(
        {name: p.grad for name, p in generator.named_parameters()},
        corrected(generator, lambda g: loss_of(g, twin(discriminator)), samples=4),
    )
    with torch.no_grad():
        fake = generator(noise)
    discriminator.zero_grad()
    F.softplus(discriminator(fake)).mean().backward()
    expected = corrected(discriminator, lambda d: F.softplus(d(fake)).mean(), samples=4)
    assert_close(gradients(discriminator), expected)


def test_retained_graphs_give_the_gradient_again():
    model, x, t, *_kept, correction = start("wide")
    loss = mean_loss(model(x), t)
    once = corrected(model, loss_on(x, t), samples=len(x))
    loss.backward(retain_graph=True)
    assert_close(gradients(model), once)
    loss.backward()
    assert_close(gradients(model), added(once, once))
    assert (correction.counters.steps, correction.samples) == (2, len(x))


def test_two_losses_of_one_graph_are_two_passes():
    model, x, t, *_kept = start("wide")
    outputs = model(x)
    mean_loss(outputs, t).backward(retain_graph=True)
    outputs.square().mean().backward()
    other = corrected(model, lambda m: m(x).square().mean(), samples=len(x))
    assert_close(gradients(model), added(corrected(model, loss_on(x, t), samples=len(x)), other))


def test_a_forward_pass_between_the_passes_of_a_retained_graph():
    model, x, t, *_kept = start("wide")
    loss = mean_loss(model(x), t)
    loss.backward(retain_graph=True)
    mean_loss(model(x), t).backward()
    loss.backward()
    once = corrected(model, loss_on(x, t), samples=len(x))
    assert_close(gradients(model), added(once, once, once))


def test_sharpness_aware_minimisation():
    """The first pass gives the way up, by its consequentialist gradient; the second one gives the step."""
    model, x, t, optimizer, _ = start("wide")
    before = weights(model)
    mean_loss(model(x), t).backward()
    first = corrected(model, loss_on(x, t), samples=len(x))
    up = {name: 0.3 * p.grad / p.grad.norm() for name, p in model.named_parameters()}
    assert_close(up, {name: 0.3 * grad / grad.norm() for name, grad in first.items()})
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(up[name])
    optimizer.zero_grad()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    mean_loss(model(x), t).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(up[name])
    optimizer.step()
    assert_stepped(model, before, expected)


def test_a_closure():
    model, x, t, optimizer, correction = start("wide")
    before = weights(model)

    def closure():
        optimizer.zero_grad()
        loss = mean_loss(model(x), t)
        loss.backward()
        return loss

    expected = corrected(model, loss_on(x, t), samples=len(x))
    loss = loss_on(x, t)(twin(model)).item()
    assert optimizer.step(closure).item() == pytest.approx(loss)
    assert_stepped(model, before, expected)
    assert correction.counters.steps == 1


# ---- what the gradient can be used for ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_clips_what_is_applied(kind):
    model, x, t, optimizer, _ = start(kind)
    before = weights(model)
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01).item() == pytest.approx(norm.item(), rel=1e-7)
    optimizer.step()
    assert_stepped(
        model, before, {name: grad * 0.01 / (norm + 1e-6) for name, grad in expected.items()}, tolerance=1e-7
    )


def test_clipping_by_value_is_no_trouble():
    model, x, t, optimizer, correction = start("wide")
    mean_loss(model(x), t).backward()
    expected = {name: g.clamp(-0.05, 0.05) for name, g in corrected(model, loss_on(x, t), samples=len(x)).items()}
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    before = weights(model)
    optimizer.step()
    assert_stepped(model, before, expected)
    assert correction.counters.edited == 0


def test_hooks_on_parameters_see_it():
    model, x, t, *_kept = start("wide")
    seen, accumulated = {}, {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: seen.setdefault(name, grad.clone()) * 2)
        p.register_post_accumulate_grad_hook(lambda p, name=name: accumulated.update({name: p.grad.clone()}))
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    twice = {name: 2 * grad for name, grad in expected.items()}
    assert_close(seen, expected)
    assert_close(accumulated, twice)
    assert_close(gradients(model), twice)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_in_the_backward_pass(kind):
    """``torch``'s recipe: each parameter is stepped, and its gradient thrown away, as soon as it is there."""
    model, x, t = build(kind)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    optimizers = {p: torch.optim.SGD([p], lr=LR) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        before, expected = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        mean_loss(model(x), t).backward()
        assert_stepped(model, before, expected)
        assert gradients(model) == {}


def test_a_step_by_hand_is_nothing():
    model, x, t, optimizer, correction = start("wide")
    correction.step()  # nothing is there, and nothing is asked for
    mean_loss(model(x), t).backward()
    before, now = gradients(model), weights(model)
    correction.step()
    correction.step()
    assert_same(gradients(model), before)
    optimizer.step()
    assert_stepped(model, now, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_in_the_loss_stays_plain(kind):
    model, x, t, *_kept, correction = start(kind)
    (mean_loss(model(x), t) + 0.3 * sum(p.square().sum() for p in model.parameters())).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    penalty = {name: 0.6 * p.detach() for name, p in model.named_parameters()}
    assert_close(gradients(model), added(expected, penalty))
    assert correction.counters.edited == 0


def test_a_penalty_on_a_weight_by_itself():
    """A pass that goes through no product."""
    model, x, *_kept = start("wide")
    model(x)
    model[0].weight.square().sum().backward()
    assert_same(gradients(model), {"0.weight": 2 * model[0].weight.detach()})


# ---- mixed precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_losses_give_unscaled_gradients(kind):
    model, x, t, optimizer, _ = start(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights(model)
    scaler.scale(mean_loss(model(x), t)).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    assert_close(gradients(model), {name: 1024 * grad for name, grad in expected.items()})
    scaler.unscale_(optimizer)
    assert_close(gradients(model), expected)
    scaler.step(optimizer)
    scaler.update()
    assert_stepped(model, before, expected)
    assert scaler.get_scale() == 1024


@pytest.mark.parametrize("where", ["inputs", "loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scaler_sees_an_overflow_and_skips_the_step(kind, where):
    model, x, t, optimizer, correction = start(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights(model)
    bad = x.clone()
    if where == "inputs":
        bad[0] = torch.inf
    loss = mean_loss(model(bad), t) * (torch.inf if where == "loss" else 1)
    scaler.scale(loss).backward()
    assert not any(p.grad.isfinite().any() for p in model.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert_same(weights(model), before)
    assert scaler.get_scale() == 512
    optimizer.zero_grad()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    scaler.scale(mean_loss(model(x), t)).backward()
    scaler.step(optimizer)
    assert_stepped(model, before, expected)
    assert correction.counters.skipped == 0


def observed(model, compute_loss):
    """{name of a layer: (X, ΔZ)} as matrices of rows: what it was really called with, in float64."""
    inputs, grads = {}, {}

    def note(name, layer):
        def hook(_, args, output):
            # autocast rounds the inputs to the dtype that the product is computed in
            inputs[name] = layer, args[0].detach().to(output.dtype)
            output.register_hook(lambda grad: grads.__setitem__(name, grad.clone()))

        return layer.register_forward_hook(hook)

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    handles = [note(name, layer) for name, layer in layers.items()]
    compute_loss(model).backward()
    for handle in handles:
        handle.remove()
    return {
        name: (reference.design_matrices(layer, x)[0], reference.output_rows(layer, grads[name])[0])
        for name, (layer, x) in inputs.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_solves_in_float32(kind):
    """From what was rounded to bfloat16, the inputs and ΔZ, to gradients that are not.

    By samples: far below bfloat16's 1/256. By features ``ΔZXᵀ`` is rounded to bfloat16 first, as autocast has it, and
    the solve makes more of that (κ is about 200 here).
    """
    model, x, t, *_kept = start(kind, dtype=torch.float32)

    def compute_loss(m):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = m(x)
        assert outputs.dtype == torch.bfloat16
        return mean_loss(outputs.float(), t)

    for name, (X, dZ) in observed(model, compute_loss).items():
        layer = model.get_submodule(name)
        assert (layer.weight.grad.dtype, layer.bias.grad.dtype) == (torch.float32, torch.float32)
        expected = len(x) * reference.consequential_gradient(X, dZ, DAMPING)
        grads = layer.weight.grad.numpy(), layer.bias.grad.numpy()
        (actual,) = reference.gradient_matrices(layer, *grads)
        assert reference.relative_error(actual, expected) < (3e-5 if len(X) < X.shape[1] else 2**-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bfloat16(kind):
    model, x, t, *_kept = start(kind, dtype=torch.bfloat16)
    for name, (X, dZ) in observed(model, lambda m: mean_loss(m(x).float(), t.float())).items():
        layer = model.get_submodule(name)
        assert (layer.weight.grad.dtype, layer.bias.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        expected = len(x) * reference.consequential_gradient(X, dZ, DAMPING)
        (actual,) = reference.gradient_matrices(
            layer, layer.weight.grad.float().numpy(), layer.bias.grad.float().numpy()
        )
        assert reference.relative_error(actual, expected) < (2**-8 if len(X) < X.shape[1] else 2**-4)


# ---- NaN and inf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [DAMPING, 0.0, "relative"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_inputs_give_gradients_of_nothing_but_nan(kind, bad, damping):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {"relative_damping": 0.1} if damping == "relative" else {"damping": damping}
    correction = consequent.attach(optimizer, model, at="backward", **options)
    x.view(-1)[3] = bad
    mean_loss(model(x), t).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    assert all(p.isnan().all() for p in model.parameters())  # nobody kept the step from being taken
    assert correction.counters.skipped == 0


@pytest.mark.parametrize("batch", [2, 30])
def test_a_bad_layer_leaves_the_others_alone(batch):
    """NaN in the inputs of one of two branches, in a sample that has no part in the loss."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"good": nn.Linear(8, 3), "bad": nn.Linear(8, 3)}).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    x = torch.randn(batch, 8).double()
    spoilt = x.clone()
    spoilt[0, 0] = torch.nan
    used = torch.arange(batch)[:, None] > 0
    outputs = torch.where(used, model["bad"](spoilt), 0) + model["good"](x)
    half_squares(outputs).backward()
    assert model["bad"].weight.grad.isnan().all()
    assert model["bad"].bias.grad.isnan().all()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model["good"].parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_check_raises_and_names_the_layer(kind):
    model, x, t, optimizer, correction = start(kind, check=True)
    before = weights(model)
    last = {"wide": "4", "conv": "4", "tall": "2"}[kind]
    with pytest.raises(NonFiniteError, match=f"layer '{last}'"):
        (mean_loss(model(x), t) * torch.nan).backward()
    assert_same(weights(model), before)
    optimizer.zero_grad()
    mean_loss(model(x), t).backward()  # and the next pass is an ordinary one
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    optimizer.zero_grad()
    correction.check = False
    (mean_loss(model(x), t) * torch.nan).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())


def test_check_raises_in_differentiable_passes_too():
    model, x, t, *_kept = start("wide", check=True)
    loss = mean_loss(model(x), t) * torch.nan
    with pytest.raises(NonFiniteError, match="layer '4'"):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_inputs_in_differentiable_passes(kind):
    model, x, t, *_kept = start(kind)
    x.view(-1)[3] = torch.nan
    grads = torch.autograd.grad(mean_loss(model(x), t), [*model.parameters()], create_graph=True)
    assert all(grad.isnan().all() for grad in grads)


# ---- torch.autograd.grad --------------------------------------------------------------------------------------------


def test_gradients_of_inputs_cost_no_solve(solves):
    model, x, t, *_kept, correction = start("wide")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(model(x), t), x)
    (expected,) = torch.autograd.grad(mean_loss(twin(model)(x), t), x)
    torch.testing.assert_close(grad, expected)
    mean_loss(model(x), t).backward(inputs=[x])
    torch.testing.assert_close(x.grad, expected)
    assert solves == []
    assert gradients(model) == {}
    assert correction.counters.steps == 0


def test_an_adversarial_batch_is_no_part_of_the_pass():
    model, x, t, *_kept = start("wide")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(model(x), t), x)
    moved = (x + 0.1 * grad.sign()).detach()
    mean_loss(model(moved), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(moved, t), samples=len(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_weights_are_corrected_and_returned(kind):
    model, x, t, *_kept, correction = start(kind)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(mean_loss(model(x), t), parameters)
    assert_close(dict(zip(names, found, strict=True)), corrected(model, loss_on(x, t), samples=len(x)))
    assert gradients(model) == {}
    assert (correction.samples, correction.counters.steps) == (len(x), 1)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_gradients_is_the_part_of_all(kind, name, solves):
    model, x, t, *_kept = start(kind)
    expected = corrected(model, loss_on(x, t), samples=len(x))[f"0.{name}"]
    (found,) = torch.autograd.grad(mean_loss(model(x), t), getattr(model[0], name))
    assert_close({"": found}, {"": expected})
    mean_loss(model(x), t).backward(inputs=[getattr(model[0], name)])
    assert_close(gradients(model), {f"0.{name}": expected})
    assert solves == [model[0], model[0]]


def test_gradients_of_inputs_and_weights_at_once():
    model, x, t, *_kept = start("wide")
    x.requires_grad_()
    grad, weight_grad = torch.autograd.grad(mean_loss(model(x), t), [x, model[2].weight])
    (expected,) = torch.autograd.grad(mean_loss(twin(model)(x), t), x)
    torch.testing.assert_close(grad, expected)
    whole = corrected(model, loss_on(x.detach(), t), samples=len(x))
    assert_close({"": weight_grad}, {"": whole["2.weight"]})


def pure_gradients(parameters, x, t, damping=DAMPING):
    """The corrected gradients of Linear, tanh, Linear as a function of its parameters, and what it went through."""
    w1, b1, w2, b2 = parameters
    ones = x.new_ones(len(x), 1)
    z1 = x @ w1.T + b1
    h = torch.tanh(z1)
    z2 = h @ w2.T + b2
    d2 = (z2 - t) / len(x)
    d1 = (d2 @ w2) * (1 - h**2)
    g1 = len(x) * consequent.consequential_gradient(torch.cat([x, ones], 1), d1, damping)
    g2 = len(x) * consequent.consequential_gradient(torch.cat([h, ones], 1), d2, damping)
    return g1[:, :-1], g1[:, -1], g2[:, :-1], g2[:, -1]


def two_layers(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], 2)).double()
    return model, torch.randn(4, sizes[0]).double(), torch.randn(4, 2).double()


SIDES = [(7, 6), (2, 2)]  # four samples: by samples, by features


@pytest.mark.parametrize("sizes", SIDES)
def test_the_corrected_step_can_be_differentiated(sizes):
    """MAML: how the loss after a corrected step depends on its learning rate, its inputs and its targets."""
    model, x, t = two_layers(sizes)
    x2, t2 = torch.randn_like(x), torch.randn_like(t)
    parameters, lr = [*model.parameters()], torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    t.requires_grad_()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")

    def after_step(grads):
        w1, b1, w2, b2 = (p.detach() - lr * g for p, g in zip(parameters, grads, strict=True))
        return mean_loss(torch.tanh(x2 @ w1.T + b1) @ w2.T + b2, t2)

    grads = torch.autograd.grad(mean_loss(model(x), t), parameters, create_graph=True)
    pure = pure_gradients([p.detach() for p in parameters], x, t)
    for grad, expected in zip(grads, pure, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    found = torch.autograd.grad(after_step(grads), [lr, x, t])
    expected = torch.autograd.grad(after_step(pure), [lr, x, t])
    for actual, wanted in zip(found, expected, strict=True):
        assert wanted.norm() > 1e-6
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-11)
    assert gradients(model) == {}


@pytest.mark.parametrize("features", [7, 2])
def test_the_weights_before_a_differentiable_step(features):
    """They act in the step's end directly, which is plain, and in the inner loss by a product, which is corrected."""
    torch.manual_seed(0)
    layer, x, t = (
        nn.Linear(features, 2, bias=False).double(),
        torch.randn(4, features).double(),
        torch.randn(4, 2).double(),
    )
    x2, t2 = torch.randn_like(x), torch.randn_like(t)
    consequent.Consequentialism(layer, damping=DAMPING, at="backward")
    (inner,) = torch.autograd.grad(mean_loss(torch.tanh(layer(x)), t), layer.weight, create_graph=True)
    mean_loss(x2 @ (layer.weight - 0.3 * inner).T, t2).backward()

    weight = layer.weight.detach().clone().requires_grad_()
    z = (x @ weight.detach().T).requires_grad_()
    (dz,) = torch.autograd.grad(mean_loss(torch.tanh(z), t), z, create_graph=True)
    pure = len(x) * consequent.consequential_gradient(x, dz, DAMPING)
    directly, through_product = torch.autograd.grad(mean_loss(x2 @ (weight - 0.3 * pure).T, t2), [weight, z])
    expected = directly + len(x) * consequent.consequential_gradient(x, through_product, DAMPING)
    torch.testing.assert_close(inner, pure)
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_differentiable_gradients_are_the_others(kind):
    model, x, t, *_kept = start(kind)
    parameters = [*model.parameters()]
    plain = torch.autograd.grad(mean_loss(model(x), t), parameters)
    found = torch.autograd.grad(mean_loss(model(x), t), parameters, create_graph=True)
    for grad, expected in zip(found, plain, strict=True):
        assert grad.requires_grad
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("damping", [0.0, "relative"])
@pytest.mark.parametrize("kind", KINDS)
def test_differentiable_gradients_with_other_dampings(kind, damping):
    model, x, t = build(kind)
    options = {"relative_damping": 0.1} if damping == "relative" else {"damping": damping}
    consequent.Consequentialism(model, at="backward", **options)
    parameters = [*model.parameters()]
    plain = torch.autograd.grad(mean_loss(model(x), t), parameters)
    found = torch.autograd.grad(mean_loss(model(x), t), parameters, create_graph=True)
    for grad, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)


# ---- graphs that are made otherwise ---------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two segments that are recomputed, between two layers that are not."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.one, self.two, self.last = (nn.Linear(9, 9) for _ in range(4))
        self.use_reentrant = use_reentrant

    def segment(self, function, x):
        if self.use_reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.segment(lambda x: torch.tanh(self.one(x)), x)
        x = self.segment(lambda x: torch.tanh(self.two(x)), x)
        return self.last(x)


@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, batch):
    torch.manual_seed(0)
    model, x, t = Checkpointed(use_reentrant).double(), torch.randn(batch, 9).double(), torch.randn(batch, 9).double()
    plain = Checkpointed(None).double()
    plain.load_state_dict(model.state_dict())
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(plain, loss_on(x, t), samples=batch))
    assert correction.samples == batch


class CheckpointedTwice(nn.Module):
    """One layer in two segments."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.layer = nn.Linear(9, 9), nn.Linear(9, 9)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=self.use_reentrant)
        return x


def test_a_layer_in_two_segments_is_solved_once_without_reentrance():
    torch.manual_seed(0)
    model, x = CheckpointedTwice(False).double(), torch.randn(3, 9).double()
    check_joint(model, lambda m: half_squares(m(x)), 3)


def test_with_reentrance_every_segment_is_a_pass_of_its_own():
    """A reentrant checkpoint runs a backward pass inside of the pass: what it recomputes is solved by itself.

    So the uses of one weight in two segments are not solved together, but their corrections added up.
    """
    torch.manual_seed(0)
    model, x = CheckpointedTwice(True).double(), torch.randn(3, 9).double()
    plain = twin_of(model)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    half_squares(model(x)).backward()
    h1 = torch.tanh(plain.first(x))
    z1 = plain.layer(h1)
    h2 = torch.tanh(z1)
    z2 = plain.layer(h2)
    d1, d2 = torch.autograd.grad(half_squares(torch.tanh(z2)), [z1, z2])
    matrix = sum(reference.corrected_matrices(plain.layer, h, d, DAMPING)[0] for h, d in ((h1, d1), (h2, d2)))
    (actual,) = reference.gradient_matrices(plain.layer, model.layer.weight.grad.numpy(), model.layer.bias.grad.numpy())
    np.testing.assert_allclose(actual, 3 * matrix, rtol=1e-9)


def test_reentrant_segments_are_counted_once_each():
    torch.manual_seed(0)
    model, x = Checkpointed(True).double(), torch.randn(3, 9).double()
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    half_squares(model(x)).backward()
    assert correction.counters.steps == 3  # the pass itself, and the two inside of it


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_saved_elsewhere(kind):
    model, x, t, *_kept = start(kind)
    with torch.autograd.graph.save_on_cpu():
        loss = mean_loss(model(x), t)
    loss.backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_activations_in_place(kind):
    model, x, t = build(kind, inplace=True)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend, when):
    model, x, t = build("wide")
    plain_grads = torch.autograd.grad(mean_loss(model(x), t), [*model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach = lambda to: consequent.attach(optimizer, to, damping=DAMPING, at="backward")  # noqa: E731
    correction = attach(model) if when == "before" else None
    compiled = torch.compile(model, backend=backend)
    if when == "after a call":
        mean_loss(compiled(x), t).backward()
    if correction is None:
        correction = attach(compiled)
    expected = corrected(model, loss_on(x, t), samples=len(x))
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(compiled(x), t).backward()
        optimizer.step()
        assert_close(gradients(model), expected)
    correction.detach()
    optimizer.zero_grad()
    mean_loss(compiled(x), t).backward()
    assert_close(gradients(model), dict(zip(dict(model.named_parameters()), plain_grads, strict=True)))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_backward_pass_of_a_step():
    """The loss is compiled along with the model: the layers are not."""
    model, x, t, *_kept, correction = start("conv")

    @torch.compile(backend="aot_eager")
    def loss_of(x, t):
        return mean_loss(model(x), t)

    for _ in range(2):
        model.zero_grad()
        loss_of(x, t).backward()
        assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    assert correction.counters.steps == 2


def test_transforms_leave_layers_plain():
    model, x, t, optimizer, correction = start("wide")
    plain = twin(model)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(model, values, x, t):
        return mean_loss(torch.func.functional_call(model, values, (x,)), t)

    for net in (model, plain):
        net.zero_grad()
    found, expected = (torch.func.grad(lambda v, net=net: loss_of(net, v, x, t))(values) for net in (model, plain))
    assert_close(found, expected, 1e-12)
    per_sample = [
        torch.func.vmap(torch.func.grad(lambda v, a, b, net=net: loss_of(net, v, a[None], b[None])), (None, 0, 0))
        for net in (model, plain)
    ]
    assert_close(*(f(values, x, t) for f in per_sample), 1e-12)
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(*(mode(net)(x) for net in (model, plain)))
    torch.testing.assert_close(*(torch.func.jvp(net, (x,), (x,)) for net in (model, plain)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        torch.testing.assert_close(
            *(torch.autograd.forward_ad.unpack_dual(net(dual)).tangent for net in (model, plain))
        )
    assert gradients(model) == {}
    assert correction.counters.steps == 0
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    optimizer.step()


def test_functional_calls_with_other_weights_are_plain():
    model, x, t, *_kept = start("wide")
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    mean_loss(torch.func.functional_call(model, values, (x,)), t).backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close({name: value.grad for name, value in values.items()}, expected)
    assert gradients(model) == {}


def test_a_gradient_penalty_is_what_the_step_makes_of_it():
    """The weight acts in ``Wᵀ ΔZ`` as well: that part is shortened and not solved for."""
    found = []
    for at in ("backward", "step"):
        model, x, _, optimizer, _ = start("wide", at)
        x.requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        ((grad.norm(dim=1) - 1).square().mean() + mean_loss(model(x), torch.zeros(len(x), 3))).backward()
        optimizer.step()
        found.append(gradients(model))
    assert all(grad.isfinite().all() for grad in found[0].values())
    assert_close(*found, 1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_is_the_same_where_it_is_differentiated_again(kind):
    model, x, t, *_kept = start(kind)
    x.requires_grad_()
    parameters, found = [*model.parameters()], []
    for create_graph in (True, False):
        (grad,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        loss = (grad.flatten(1).norm(dim=1) - 1).square().mean() + mean_loss(model(x), t)
        found.append(torch.autograd.grad(loss, parameters, create_graph=create_graph))
    for differentiable, plain in zip(*found, strict=True):
        torch.testing.assert_close(differentiable.detach(), plain, rtol=1e-7, atol=1e-10)


# ---- attaching and detaching ----------------------------------------------------------------------------------------


def test_foresight_is_refused():
    model, _, _ = build("wide")
    with pytest.raises(ValueError, match=r'foresight=True .* needs at="step"'):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=LR), model, at="backward", foresight=True)
    assert hooks_on(model) == []
    with pytest.raises(ValueError, match="foresight"):
        consequent.CSGD(model, at="backward", foresight=True)


def test_a_time_that_is_none_is_refused():
    model, _, _ = build("wide")
    with pytest.raises(ValueError, match="'forward'"):
        consequent.attach(torch.optim.SGD(model.parameters(), lr=LR), model, at="forward")


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("modes", [("backward", "backward"), ("backward", "step"), ("step", "backward")])
def test_a_second_correction_of_the_same_layers_is_refused(modes, same):
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    other = optimizer if same else torch.optim.Adam(model.parameters())
    first = consequent.attach(optimizer, model, damping=DAMPING, at=modes[0])
    with pytest.raises(RuntimeError, match="corrected twice"):
        consequent.attach(other, model, damping=DAMPING, at=modes[1])
    mean_loss(model(x), t).backward()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_close(gradients(model), expected)
    first.detach()
    consequent.attach(other, model, damping=DAMPING, at=modes[1])


@pytest.mark.parametrize("modes", [("backward", "backward"), ("backward", "step"), ("step", "backward")])
def test_corrections_of_different_layers_stand_side_by_side(modes):
    model, x, t = build("wide")
    for part, at in zip(("0", "2"), modes, strict=True):
        optimizer = torch.optim.SGD(model.get_submodule(part).parameters(), lr=0.0)
        consequent.attach(optimizer, model, damping=DAMPING, at=at, include=[part])
        mean_loss(model(x), t).backward()
        optimizer.step()
        expected = corrected(model, loss_on(x, t), samples=len(x))
        found = gradients(model)
        names = [f"{part}.weight", f"{part}.bias"]
        assert_close({name: found[name] for name in names}, {name: expected[name] for name in names})
        model.zero_grad()


def test_weights_and_biases_of_two_optimizers_are_solved_for_apart():
    found = []
    for at in ("backward", "step"):
        model, x, t = build("wide")
        optimizers = [
            torch.optim.SGD([p for n, p in model.named_parameters() if kind in n], lr=0.0)
            for kind in ("weight", "bias")
        ]
        for optimizer in optimizers:
            consequent.attach(optimizer, model, damping=DAMPING, at=at)
        mean_loss(model(x), t).backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(gradients(model))
    assert_close(*found)
    together = corrected(model, loss_on(x, t), samples=len(x))
    assert not torch.allclose(found[0]["0.weight"], together["0.weight"])
    biases = {name: p for name, p in model.named_parameters() if "bias" in name}
    alone = corrected(model, loss_on(x, t), samples=len(x), only=biases)
    assert_close({name: found[0][name] for name in biases}, {name: alone[name] for name in biases})


def test_detached_models_are_plain():
    model, x, t, optimizer, correction = start("wide")
    mean_loss(model(x), t).backward()
    correction.detach()
    assert hooks_on(model, optimizer) == []
    optimizer.zero_grad()
    mean_loss(model(x), t).backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close(gradients(model), expected)
    again = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    optimizer.zero_grad()
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    assert again.counters.steps == 1


def test_a_graph_from_before_attaching_stays_plain():
    model, x, t = build("wide")
    loss = mean_loss(model(x), t)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    loss.backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close(gradients(model), expected)


def test_a_graph_from_before_detaching_still_has_gradients():
    model, x, t, *_kept, correction = start("wide")
    loss = mean_loss(model(x), t)
    correction.detach()
    loss.backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


def test_a_thrown_away_optimizer_leaves_a_plain_model():
    model, x, t, optimizer, correction = start("wide")
    del optimizer, correction
    gc.collect()
    mean_loss(model(x), t).backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close(gradients(model), expected)


def test_weights_loaded_or_replaced_between_steps():
    model, x, t, optimizer, _ = start("wide")
    mean_loss(model(x), t).backward()
    optimizer.zero_grad()
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    optimizer.zero_grad()
    model[2] = nn.Linear(16, 14).double()
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


# ---- reports --------------------------------------------------------------------------------------------------------


def test_counters_count_passes():
    model, x, t, optimizer, correction = start("wide")
    assert (correction.counters.steps, correction.samples) == (0, None)
    with torch.no_grad():
        model(x)
    model(x)
    assert correction.counters.steps == 0
    for passes in (1, 2, 3):
        mean_loss(model(x), t).backward()
        assert correction.counters.steps == passes
    optimizer.step()
    assert correction.counters == type(correction.counters)(steps=3)


def test_printing_shows_sides_and_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    assert repr(correction).count("side chosen at the first step") == 2
    half_squares(model(torch.randn(6, 20))).backward()
    shown = repr(correction)
    assert "Linear, 21 input columns, solved on the sample side" in shown
    assert "Linear, 4 input columns, solved on the feature side, 4 × 4" in shown
    assert "samples at the last step: 6; its loss was taken for a sum divided by 6" in shown
    assert "counters: steps 1," in shown


def test_failed_factorisations_are_counted():
    """Samples on one line, λ below the rounding errors of their float32 Gram matrix."""
    torch.manual_seed(0)
    layer, x, output_grad = nn.Linear(100, 2), 10 * torch.randn(32, 1) @ torch.randn(1, 100), torch.randn(32, 2)
    correction = consequent.Consequentialism(layer, damping=1e-3, loss_reduction="sum", at="backward")
    layer(x).backward(output_grad)
    assert (correction.counters.rescued, correction.counters.fallen_back) == (1, 0)
    (expected,) = reference.corrected_matrices(layer, x, output_grad, 1e-3)
    (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
    assert reference.relative_error(actual, expected) <= 1e-4


# ---- memory ---------------------------------------------------------------------------------------------------------


def tensors_alive():
    gc.collect()
    return sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_go_with_the_graph(kind, with_backward):
    """Nothing of ours keeps the graph, or the memory that it saved: not even until the garbage is collected."""
    model, x, t, *_kept = start(kind)
    seen = []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
    gc.disable()
    try:
        outputs = model(x)
        loss = mean_loss(outputs, t)
        node = weakref.ref(outputs.grad_fn)
        assert not seen[0].expired()  # the graph saved it
        if with_backward:
            loss.backward()
            assert seen[0].expired()  # although the graph is still there
        assert node() is not None
        del outputs, loss
        assert (seen[0].expired(), node()) == (True, None)
    finally:
        gc.enable()


def passed(loss):
    """Whether the backward pass did not raise; nothing of an error is kept, which would keep the graph."""
    try:
        loss.backward()
    except NonFiniteError:
        return False
    return True


@pytest.mark.parametrize("how", ["nothing", "inputs", "backward", "raises"])
def test_memory_does_not_grow(how):
    model, x, t, optimizer, correction = start("wide", check=True)
    x.requires_grad_()
    counts = []
    for iteration in range(50):
        loss = mean_loss(model(x), t) * (torch.nan if how == "raises" else 1)
        if how == "inputs":
            torch.autograd.grad(loss, x)
        elif how != "nothing":
            assert passed(loss) == (how == "backward")
        del loss
        if how == "backward":
            optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        if iteration % 24 == 1:
            counts.append(tensors_alive())
    assert len(set(counts)) == 1, counts
    # an engine that was stopped keeps what it had still to do, and with it the graph, until it runs again
    assert len(correction._capture.listener._open) <= (2 if how == "raises" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_raised_is_forgotten_by_the_next(kind):
    model, x, t, *_kept = start(kind, check=True)
    seen = []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
    assert not passed(mean_loss(model(x), t) * torch.nan)
    assert passed(mean_loss(model(x), t))
    gc.collect()
    assert [ref.expired() for ref in seen] == [True, True]


def test_a_pass_that_raised_is_no_part_of_the_next():
    """It stops between the two uses of a layer: only one of them was reached."""
    torch.manual_seed(0)
    model, x = Repeated().double(), torch.randn(3, 6).double()
    plain = twin_of(model)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")

    def stop(_):
        raise KeyboardInterrupt

    hidden = torch.tanh(model.layer(torch.tanh(model.first(x))))
    hidden.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        half_squares(model.layer(hidden)).backward()
    assert all(p.grad is None for p in model.first.parameters())
    model.zero_grad()
    half_squares(model(x)).backward()
    expected_backward(plain, lambda m: half_squares(m(x)), 3, DAMPING)
    check_same_grads(model, plain)


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_the_correction_goes_with_the_model(attached, with_backward):
    """Also if a forward pass came last: a gate and its node, which is in C++, refer to each other."""
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    if attached:
        correction.attach(optimizer)
    loss = mean_loss(model(x), t)
    if with_backward:
        loss.backward()
    kept = [weakref.ref(thing) for thing in (model, optimizer, correction, loss)]
    del model, optimizer, correction, loss
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_more_forward_passes_than_are_remembered():
    model, x, t, *_kept, correction = start("tall", batch=300)
    sum(mean_loss(model(x[i : i + 1]), t[i : i + 1]) for i in range(300)).backward()
    expected = corrected(model, *[loss_on(x[i : i + 1], t[i : i + 1]) for i in range(300)], samples=1)
    assert_close(gradients(model), expected, 1e-8)
    assert correction.samples == 1


# ---- further kinds of layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layer(name, dtype, create_graph):
    module, x = build_case(name, dtype)
    correction = consequent.Consequentialism(
        Around(module), damping=DAMPING, loss_reduction="sum", at="backward", **included(module)
    )
    output = called(correction.model, x)
    output_grad = random_like(output, name)
    parameters = [p for p in (module.weight, reference.bias_of(module)) if p is not None]
    grads = torch.autograd.grad(output, parameters, output_grad, create_graph=create_graph)
    assert all(grad.dtype == dtype and grad.shape == p.shape for grad, p in zip(grads, parameters, strict=True))
    assert grads[0].is_sparse == getattr(module, "sparse", False)
    actual = reference.gradient_matrices(module, *(*map(reference.to_numpy, grads), None)[:2])
    designs, rows = reference.design_matrices(module, x), reference.output_rows(module, output_grad)
    for matrix, X, dZ in zip(actual, designs, rows, strict=True):
        expected = reference.consequential_gradient(X, dZ, DAMPING)
        assert check_error(matrix, expected, reference.condition_number(X, DAMPING), dtype)


def table_gradient(X, dZ, damping=DAMPING):
    """[features, outputs]."""
    return torch.from_numpy(reference.consequential_gradient(X, dZ, damping)).T


def one_hot(indices, size, padding_idx=None):
    rows = np.zeros((indices.numel(), size))
    for row, index in enumerate(indices.flatten().tolist()):
        rows[row, index] = index != padding_idx
    return rows


@pytest.mark.parametrize("batch", [1, 5])
def test_transposed_convolutions(batch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(2, 4, 2, groups=2, bias=False),
    ).double()
    x = torch.randn(batch, 3, 3, 4).double()
    plain = twin_of(model)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    assert list(correction.corrected) == ["0", "2"]
    half_squares(model(x)).backward()
    hidden = plain[0](x)
    outputs = plain[2](torch.tanh(hidden))
    grads = torch.autograd.grad(half_squares(outputs), [hidden, outputs])
    for layer, mine, inputs, grad in zip(
        (plain[0], plain[2]), (model[0], model[2]), (x, torch.tanh(hidden)), grads, strict=True
    ):
        weight_grad, bias_grad = reference.corrected_gradients(layer, inputs, grad, DAMPING)
        np.testing.assert_allclose(mine.weight.grad.numpy(), batch * weight_grad, rtol=1e-8, atol=1e-11)
        if layer.bias is not None:
            np.testing.assert_allclose(mine.bias.grad.numpy(), batch * bias_grad, rtol=1e-8, atol=1e-11)


class Words(nn.Module):
    """A table, looked at twice, under a layer."""

    def __init__(self, sparse=False, padding_idx=None):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=sparse, padding_idx=padding_idx)
        self.layer = nn.Linear(4, 3)

    def forward(self, words, more=None):
        hidden = self.table(words)
        if more is not None:
            hidden = hidden + 2 * self.table(more)
        return self.layer(hidden.mean(1))


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_by_include(sparse, twice, padding_idx):
    torch.manual_seed(0)
    model = Words(sparse, padding_idx).double()
    words = torch.tensor([[1, 2, 2], [5, 1, 1], [7, 2, 5], [1, 1, 1]])
    more = words.flip(0).roll(1, 1) if twice else None
    plain = twin_of(model)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["table", "layer"])
    half_squares(model(words, more)).backward()
    looked_up = [plain.table(words), *([plain.table(more)] if twice else [])]
    outputs = plain.layer((looked_up[0] + (2 * looked_up[1] if twice else 0)).mean(1))
    grads = torch.autograd.grad(half_squares(outputs), looked_up)
    X = np.concatenate([one_hot(w, 9, padding_idx) for w in ([words, more] if twice else [words])])
    dZ = np.concatenate([grad.reshape(-1, 4).numpy() for grad in grads])
    grad = model.table.weight.grad
    assert grad.is_sparse == sparse
    torch.testing.assert_close(grad.to_dense() if sparse else grad, 4 * table_gradient(X, dZ), rtol=1e-6, atol=1e-9)
    assert (correction.samples, correction.counters.steps) == (4, 1)
    assert sorted(correction.corrected) == ["layer", "table"]


def test_embeddings_stay_plain_unless_they_are_included():
    torch.manual_seed(0)
    model, words = Words().double(), torch.tensor([[1, 2, 2], [5, 1, 1]])
    plain = twin_of(model)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    for net in (model, plain):
        half_squares(net(words)).backward()
    torch.testing.assert_close(model.table.weight.grad, plain.table.weight.grad)
    assert not torch.allclose(model.layer.weight.grad, plain.layer.weight.grad)


BAGS = {
    "sum": ({"mode": "sum"}, False),
    "mean": ({"mode": "mean"}, False),
    "mean, padding": ({"mode": "mean", "padding_idx": 2}, False),
    "sum, weights": ({"mode": "sum"}, True),
    "sum, sparse": ({"mode": "sum", "sparse": True}, False),
    "mean, sparse, padding": ({"mode": "mean", "sparse": True, "padding_idx": 2}, False),
}


@pytest.mark.parametrize("damping", [DAMPING, 0.0])
@pytest.mark.parametrize("bags", [3, 30])
@pytest.mark.parametrize("name", BAGS)
def test_bags_of_embeddings_by_include(name, bags, damping):
    settings, is_weighted = BAGS[name]
    torch.manual_seed(0)
    layer, indices = nn.EmbeddingBag(9, 4, **settings).double(), torch.randint(0, 9, (bags, 3))
    factors = torch.randn(bags, 3).double() if is_weighted else None
    consequent.Consequentialism(layer, damping=damping, at="backward", include=[nn.EmbeddingBag])
    outputs = layer(indices, per_sample_weights=factors)
    output_grad = torch.randn_like(outputs)
    outputs.backward(output_grad)
    X = np.zeros((bags, 9))
    for bag, row in enumerate(indices.tolist()):
        kept = [place for place, index in enumerate(row) if index != layer.padding_idx]
        for place in kept:
            weight = factors[bag, place].item() if is_weighted else 1.0
            X[bag, row[place]] += weight / len(kept) if layer.mode == "mean" else weight
    grad = layer.weight.grad
    assert grad.is_sparse == layer.sparse
    expected = bags * table_gradient(X, output_grad.numpy(), damping)
    torch.testing.assert_close(grad.to_dense() if layer.sparse else grad, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_bad_numbers_in_tables(cls, sparse):
    """All that there is of the gradient is NaN: of a sparse one, the rows that were looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(cls(9, 4, sparse=sparse)).double()
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["0"])
    indices = torch.tensor([[1, 2], [4, 5], [7, 1]])
    outputs = model(indices)
    output_grad = torch.ones_like(outputs)
    output_grad.view(-1)[0] = torch.inf
    outputs.backward(output_grad)
    grad = model[0].weight.grad
    assert (grad.coalesce().values() if sparse else grad).isnan().all()
    model.zero_grad()
    correction.check = True
    with pytest.raises(NonFiniteError, match="layer '0'"):
        model(indices).backward(output_grad)


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_differentiable_gradients_of_tables(cls):
    torch.manual_seed(0)
    model = nn.Sequential(cls(9, 4)).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["0"])
    indices = torch.tensor([[1, 2], [4, 5], [7, 1]])
    plain, found = (
        torch.autograd.grad(half_squares(torch.tanh(model(indices))), model[0].weight, create_graph=create_graph)[0]
        for create_graph in (False, True)
    )
    assert found.requires_grad
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    "context", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["plain", "autocast"]
)
def test_tables_with_a_layer_above_train(context):
    """Three steps by Adam on a sparse table's dense twin and on the table itself go the same way as at the step."""
    found = []
    for at in ("backward", "step"):
        torch.manual_seed(0)
        model, words = Words(), torch.tensor([[1, 2, 2], [5, 1, 1]])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        consequent.attach(optimizer, model, damping=DAMPING, at=at, include=["table", "layer"])
        for _ in range(3):
            optimizer.zero_grad()
            with context():
                outputs = model(words)
            half_squares(outputs.float()).backward()
            optimizer.step()
        found.append(weights(model))
    assert_close(*found, 1e-4)


def test_two_steps_go_where_they_should():
    model, x, t, optimizer, _ = start("wide")
    for _ in range(2):
        expected = after_sgd(weights(model), corrected(model, loss_on(x, t), samples=len(x)))
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        optimizer.step()
        assert_close(weights(model), expected)
