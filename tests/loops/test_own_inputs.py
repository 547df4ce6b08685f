"""Each mini-batch's own inputs, in the loops that people write: the rows of the design's table, one by one."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from expected import check_same_grads, grads_of, own_inputs_grads
from loops.networks import RHO, Recurring, attached, batch, half_squares, loss_of, network, one_pass
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent


def expected(model, samples=12, seed=0):
    return own_inputs_grads(model, lambda m: one_pass(m, samples, seed), RHO, samples)


def added(*grads):
    return {name: sum(one[name] for one in grads) for name in grads[0]}


def test_one_pass():
    model, _ = attached(network())
    one_pass(model)
    check_same_grads(grads_of(model), expected(model))


def test_micro_batches_are_corrected_by_themselves_and_add_up():
    model, _ = attached(network())
    for number in range(3):
        one_pass(model, samples=4 + number, seed=number)
    check_same_grads(grads_of(model), added(*(expected(model, 4 + number, number) for number in range(3))))


def test_scaling_and_unscaling():
    model, optimizer = attached(network(torch.float32))
    reference, _ = attached(network(torch.float32))
    one_pass(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batch(dtype=torch.float32)
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    check_same_grads(grads_of(model), grads_of(reference), rtol=1e-5)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler.step(optimizer)
    reference_optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_clipping_logging_and_hooks_see_an_ordinary_gradient():
    model, _ = attached(network())
    wanted, seen = expected(model), {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
        p.register_hook(lambda grad: 2 * grad if grad.ndim == 1 else None)  # biases: twice
    one_pass(model)
    doubled = {name: 2 * grad if grad.ndim == 1 else grad for name, grad in wanted.items()}
    check_same_grads(seen, doubled)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm == pytest.approx(sum(float(grad.square().sum()) for grad in doubled.values()) ** 0.5)
    check_same_grads(grads_of(model), {name: grad * (1e-3 / float(norm)) for name, grad in doubled.items()}, rtol=1e-5)


def test_noise_in_a_gradient_is_noise_and_nothing_else():
    """It cut updates 18-fold in the second edition, which looked for edits."""
    model, optimizer = attached(network())
    one_pass(model)
    before = grads_of(model)
    model[5].weight.grad.add_(1e-5 * torch.randn_like(model[5].weight))
    noisy = grads_of(model)
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for p, old, (name, grad) in zip(model.parameters(), weights, noisy.items(), strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * grad)
        torch.testing.assert_close(grad, before[name], rtol=1e-2, atol=1e-4)


def test_a_read_only_hook_and_a_penalty_change_nothing_else():
    model, _ = attached(network())
    wanted = expected(model)
    seen = []
    model[5].weight.register_hook(lambda grad: seen.append(grad.norm()))
    x, y = batch()
    (loss_of(model, x, y) + 0.01 * model[5].weight.square().sum()).backward()
    wanted["5.weight"] = wanted["5.weight"] + 0.02 * model[5].weight.detach()
    check_same_grads(grads_of(model), wanted)
    assert len(seen) == 1


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": False}], ids=str)
def test_fused_and_foreach_optimisers(options):
    model, plain = copy.deepcopy(network()), copy.deepcopy(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    consequent.attach(optimizer, model, relative_damping=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(3):
        wanted = expected(plain, seed=step)
        for name, p in plain.named_parameters():
            p.grad = wanted[name].clone()
        reference.step()
        optimizer.zero_grad()
        one_pass(model, seed=step)
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("where", ["input", "loss"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_come_out_as_autograd_has_them(where, value):
    model, optimizer = attached(network(torch.float32))
    plain = network(torch.float32)
    x, y = batch(dtype=torch.float32)
    if where == "input":
        x[3, 0, 2, 2] = value
    for one in (model, plain):
        (loss_of(one, x, y) * (value if where == "loss" else 1)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.isfinite().all() == q.grad.isfinite().all()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    model, _ = attached(network())
    x, y = batch()
    hidden = checkpoint(model[:4], x.requires_grad_(), use_reentrant=use_reentrant)
    F.cross_entropy(model[4:](hidden), y).backward()
    check_same_grads(grads_of(model), expected(model))


def test_the_same_graph_twice():
    model, _ = attached(network())
    x, y = batch()
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    check_same_grads(grads_of(model), expected(model))
    model.zero_grad()
    loss.backward()
    check_same_grads(grads_of(model), expected(model))


def test_sharpness_aware_minimisation():
    """Climb along the corrected gradient, take the gradient there, go back: two ordinary passes."""
    model, _ = attached(network())
    one_pass(model)
    first = grads_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * p.grad)
    wanted = expected(model, seed=1)
    model.zero_grad()
    one_pass(model, seed=1)
    check_same_grads(grads_of(model), wanted)
    assert any(not torch.allclose(first[name], grad) for name, grad in wanted.items())


class Residual(nn.Module):
    """With operations in place on the layers' outputs, or the same without."""

    def __init__(self, in_place):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.in_place = in_place

    def forward(self, x):
        if not self.in_place:
            h = self.a(x).relu()
            return self.c((self.b(h) + h) * 0.5)
        h = self.a(x).relu_()
        g = self.b(h)
        g += h
        return self.c(g.mul_(0.5))


@pytest.mark.parametrize("shape", [(5, 6), (5, 3, 6), (6,)], ids=str)
def test_in_place_operations_on_outputs(shape):
    torch.manual_seed(0)
    plain, x = Residual(in_place=False).double(), torch.randn(*shape, dtype=torch.float64)
    model, _ = attached(Residual(in_place=True).double())
    model.load_state_dict(plain.state_dict())
    samples = shape[0]  # the leading dimension, of one sample without a batch, too

    def run(one):
        one(x).square().sum().div(2 * samples).backward()

    run(model)
    check_same_grads(grads_of(model), own_inputs_grads(plain, run, RHO, samples))


def test_autograd_grad():
    model, _ = attached(network())
    x, y = batch()
    x.requires_grad_()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss_of(model, x, y), parameters)
    check_same_grads(dict(zip(names, found, strict=True)), expected(model))
    (to_inputs,) = torch.autograd.grad(loss_of(model, x, y), x)
    (plain,) = torch.autograd.grad(loss_of(network(), x, y), x)
    torch.testing.assert_close(to_inputs, plain)
    assert all(p.grad is None for p in model.parameters())
    (alone,) = torch.autograd.grad(loss_of(model, x, y), [model[5].weight])  # its bias is trained all the same
    torch.testing.assert_close(alone, found[names.index("5.weight")])


def test_a_gradient_that_is_differentiated_stays_plain_in_that_graph():
    def penalised(one):
        x, y = batch()
        x.requires_grad_()
        loss = loss_of(one, x, y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()

    model, _ = attached(network())
    plain = network()
    with pytest.warns(consequent.ConsequentWarning, match="differentiated"):
        penalised(model)
    penalised(plain)
    check_same_grads(grads_of(model), grads_of(plain))
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_pass(model)  # the next graph is corrected again
    check_same_grads(grads_of(model), expected(model))


def test_backward_of_the_gradients_own_norm():
    model, _ = attached(network())
    plain = network()
    for one in (model, plain):
        x, y = batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", consequent.ConsequentWarning)
            grads = torch.autograd.grad(loss_of(one, x, y), list(one.parameters()), create_graph=True)
            sum(grad.square().sum() for grad in grads).backward()
    check_same_grads(grads_of(model), grads_of(plain))


def test_a_layer_that_is_called_several_times():
    torch.manual_seed(0)
    plain, x = Recurring(3).double(), torch.randn(7, 4, dtype=torch.float64)
    model, _ = attached(plain)
    wanted = own_inputs_grads(plain, lambda m: half_squares(m, x), RHO, 7)
    for shared in ("first", "second"):
        wanted[f"{shared}.bias"] = wanted[f"{shared}.bias"] / 2
    watched_first = own_inputs_grads(plain, lambda m: half_squares(m, x), RHO, 7, layers=["first"])
    watched_second = own_inputs_grads(plain, lambda m: half_squares(m, x), RHO, 7, layers=["second"])
    wanted["first.weight"] = (watched_first["first.weight"] + wanted["second.weight"]) / 2
    del wanted["second.weight"], watched_second
    half_squares(model, x)
    check_same_grads(grads_of(model), wanted)


def test_parts_that_are_called_by_themselves_count_their_own_samples():
    model, _ = attached(network())
    x, y = batch()
    F.cross_entropy(model[4:](model[:4](x)), y).backward()
    check_same_grads(grads_of(model), expected(model))


def test_samples_are_those_that_enter_the_model():
    """Not the rows of a layer that sees windows of them, nor the leading dimension of a token sequence."""

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, scale, *, x):  # a number comes first
            windows = x.view(-1, 4) * scale
            return self.head(torch.tanh(self.inside(windows))).view(len(x), -1)

    torch.manual_seed(0)
    plain, x = Windows().double(), torch.randn(5, 12, dtype=torch.float64)
    model, _ = attached(plain)

    def run(one):
        (one(torch.tensor(0.5), x=x).square().sum() / 2 / 5).backward()

    run(model)
    check_same_grads(grads_of(model), own_inputs_grads(plain, run, RHO, 5))


def test_whoever_applies_the_gradients():
    """Several optimisers, and one that comes later."""
    model = network()
    body, head = torch.optim.SGD(model[:5].parameters(), lr=0.1), torch.optim.Adam(model[5:].parameters(), lr=0.1)
    consequent.attach([body, head], model, relative_damping=0.1)
    one_pass(model)
    check_same_grads(grads_of(model), expected(model))
    later = torch.optim.SGD(model.parameters(), lr=1e-3)
    before, grads = [p.detach().clone() for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    later.step()
    for p, old, grad in zip(model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(p.detach(), old - 1e-3 * grad)


def test_a_closure():
    model, optimizer = attached(network(), lr=1e-3)
    plain = copy.deepcopy(model)
    wanted = expected(model)

    def closure():
        optimizer.zero_grad()
        x, y = batch()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert float(loss.detach()) > 0
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 1e-3 * wanted[name])
