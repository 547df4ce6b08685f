"""Units of several parameters in real training loops: recurrent layers, whose gradients are solved for as they are."""

import copy
import gc
import io
import pickle

import pytest
import reference
import torch
from models.expected import check_same_grads
from recurrent_reference import Loops
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent

AT = ["step", "backward"]
DAMPING = ("relative", 0.2)


class Model(nn.Module):
    def __init__(self, kind=nn.GRU, **options):
        super().__init__()
        self.recurrent = kind(3, 4, batch_first=True, **options)
        self.readout = nn.Linear(4, 2)

    def forward(self, x):
        return self.readout(self.recurrent(x)[0])


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(outputs):
    return 0.5 * (outputs - torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)).square()


def made(kind=nn.GRU, **options):
    torch.manual_seed(0)
    model = Model(kind, **options).double()
    return model, copy.deepcopy(model)


def attached(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"relative_damping": DAMPING[1], "loss_reduction": "sum", **options}
    return optimizer, consequent.attach(optimizer, model, **options)


class Expected:
    """The twin's backward passes, and what is to become of its gradients."""

    def __init__(self, twin):
        self.twin, self.loops, self.calls = twin, Loops(twin.recurrent), []

    def __call__(self, x):
        hidden = torch.stack(self.loops(list(x.unbind(0))))
        zero = torch.zeros(*hidden.shape[:-1], 2, dtype=hidden.dtype, requires_grad=True)
        self.calls.append((hidden.detach(), zero))
        return self.twin.readout(hidden) + zero

    def correct(self, damping=DAMPING, scale=1.0):
        self.loops.correct(damping, scale)
        X = torch.cat([hidden.flatten(0, 1) for hidden, _ in self.calls])
        X = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
        dZ = torch.cat([zero.grad.flatten(0, 1) for _, zero in self.calls])
        new = torch.as_tensor(reference.consequential_gradient(X.numpy(), dZ.numpy(), damping)) * scale
        self.twin.readout.weight.grad, self.twin.readout.bias.grad = new[:, :-1], new[:, -1]


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_training_over_steps(kind, at):
    model, twin = made(kind)
    optimizer, correction = attached(model, at=at, loss_reduction="mean")
    reference_optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    for number, (samples, length) in enumerate([(4, 5), (1, 2), (3, 6)]):
        x = normal(samples, length, 3, seed=number)
        optimizer.zero_grad()
        (squares(model(x)).sum() / samples).backward()
        optimizer.step()
        expected = Expected(twin)
        reference_optimizer.zero_grad()
        (squares(expected(x)).sum() / samples).backward()
        expected.correct(scale=samples)
        check_same_grads(model, twin)
        reference_optimizer.step()
    assert correction.samples == 3
    assert correction.plain == {}
    assert "recurrent  " in repr(correction)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
def test_zeroed_gradients_are_forgotten(to_none):
    model, twin = made()
    optimizer, _ = attached(model)
    squares(model(normal(5, 4, 3, seed=1))).sum().backward()
    optimizer.zero_grad(set_to_none=to_none)
    squares(model(normal(5, 4, 3))).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(normal(5, 4, 3))).sum().backward()
    expected.correct()
    check_same_grads(model, twin)


def test_a_forward_pass_without_a_backward_pass_does_not_count():
    model, twin = made()
    optimizer, _ = attached(model)
    model(normal(5, 4, 3, seed=1))
    squares(model(normal(5, 4, 3))).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(normal(5, 4, 3))).sum().backward()
    expected.correct()
    check_same_grads(model, twin)


def test_a_graph_that_is_run_through_twice_has_its_inputs_once():
    model, twin = made()
    optimizer, _ = attached(model)
    x = normal(5, 4, 3)
    loss = squares(model(x)).sum()
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    optimizer.step()
    expected = Expected(twin)
    (3 * squares(expected(x)).sum()).backward()
    expected.correct()
    check_same_grads(model, twin)


@pytest.mark.parametrize("factor", [0.01, 65536.0])
def test_scaled_gradients_are_solved_for_scaled(factor):
    model, twin = made()
    optimizer, _ = attached(model)
    x = normal(5, 4, 3)
    squares(model(x)).sum().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct(scale=factor)
    check_same_grads(model, twin)


@pytest.mark.parametrize("samples", [1, 5])
def test_groups_that_are_scaled_apart_are_solved_for_together(samples):
    model, twin = made(nn.LSTM)
    groups = [[p for p in model.parameters() if p.ndim == dims] for dims in (2, 1)]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.05)
    correction = consequent.attach(optimizer, model, relative_damping=DAMPING[1], loss_reduction="sum")
    x = normal(samples, 4, 3)
    squares(model(x)).sum().backward()
    for group, factor in zip(groups, (0.5, 0.01), strict=True):
        for parameter in group:
            parameter.grad.mul_(factor)
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    for parameter in twin.parameters():
        parameter.grad *= 0.5 if parameter.ndim == 2 else 0.01
    check_same_grads(model, twin)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_penalty_on_the_weights_stays_as_it_is(kind, at):
    model, twin = made(kind)
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3)

    def penalty(m):
        return sum((number + 1) * p.square().sum() for number, p in enumerate(m.recurrent.parameters()))

    (squares(model(x)).sum() + penalty(model)).backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    for number, parameter in enumerate(twin.recurrent.parameters()):
        parameter.grad += 2 * (number + 1) * parameter.detach()
    check_same_grads(model, twin)


def test_an_edited_gradient_is_solved_for_like_any_other():
    model, twin = made(nn.RNN)
    optimizer, _ = attached(model, relative_damping=None, damping=0.03)
    x = normal(5, 4, 3)
    squares(model(x)).sum().backward()
    torch.nn.utils.clip_grad_value_(model.recurrent.parameters(), 1.0)
    grads = {name: p.grad.clone() for name, p in model.recurrent.named_parameters()}
    assert any((grad.abs() == 1).any() for grad in grads.values())
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    X = torch.stack([torch.cat([x, h, x.new_ones(1)]) for x, h, _ in expected.loops.units[0][0].seen])
    bias = (grads["bias_ih_l0"] + grads["bias_hh_l0"])[:, None] / 2
    G = torch.cat([grads["weight_ih_l0"], grads["weight_hh_l0"], bias], dim=1)
    new = torch.linalg.solve(X.T @ X + 0.03 * torch.eye(8, dtype=X.dtype), G.T).T
    torch.testing.assert_close(model.recurrent.weight_ih_l0.grad, new[:, :3])
    torch.testing.assert_close(model.recurrent.weight_hh_l0.grad, new[:, 3:7])
    torch.testing.assert_close(model.recurrent.bias_ih_l0.grad, new[:, 7] / 2)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointing(reentrant, at):
    model, twin = made()
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3).requires_grad_()
    outputs = model.readout(checkpoint(lambda x: model.recurrent(x)[0], x, use_reentrant=reentrant))
    squares(outputs).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x.detach())).sum().backward()
    expected.correct()
    check_same_grads(model, twin)


@pytest.mark.parametrize("at", AT)
def test_outputs_may_be_written_to(at):
    """As long as torch itself can do without what was in them."""
    model, twin = made()
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3)
    squares(model.readout(model.recurrent(x)[0].mul_(2))).sum().backward()
    optimizer.step()
    loops = Loops(twin.recurrent)
    squares(twin.readout(2 * torch.stack(loops(list(x.unbind(0)))))).sum().backward()
    loops.correct(DAMPING)
    check_same_grads(model.recurrent, twin.recurrent)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("how", ["of-inputs", "of-weights"])
def test_a_gradient_that_is_differentiated_in_turn_leaves_the_layer_plain(how, at):
    model, twin = made(nn.RNN)
    optimizer, correction = attached(model, at=at)
    losses = []
    for m in (model, twin):
        x = normal(5, 4, 3).requires_grad_()
        loss = squares(m.recurrent(x)[0]).sum()
        source = x if how == "of-inputs" else m.recurrent.weight_hh_l0
        (grad,) = torch.autograd.grad(loss, source, create_graph=True)
        losses.append(loss + grad.square().sum())
    losses[0].backward()
    losses[1].backward()
    if at == "step":
        squares(model.readout(normal(5, 4))).sum().backward()
        with pytest.warns(consequent.ConsequentWarning, match="create_graph=True"):
            optimizer.step()
    check_same_grads(model.recurrent, twin.recurrent)
    assert "create_graph" in correction.plain["recurrent"]


def test_that_nothing_is_left_to_correct_is_said_with_its_cause():
    model, _ = made(nn.RNN)
    _kept, correction = attached(model, include="recurrent")
    x = normal(5, 4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(model.recurrent(x)[0].square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"every layer keeps its plain gradient: layer 'recurrent', .*create_graph"):
        correction.step()


@pytest.mark.parametrize("at", AT)
def test_autograd_grad_returns_the_plain_gradient(at):
    model, twin = made()
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3)
    mine = torch.autograd.grad(squares(model(x)).sum(), model.recurrent.weight_hh_l0, retain_graph=False)
    theirs = torch.autograd.grad(squares(twin(x)).sum(), twin.recurrent.weight_hh_l0)
    if at == "step":
        torch.testing.assert_close(mine, theirs)
    squares(model(x)).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    check_same_grads(model, twin)


def test_copies_and_pickles_are_plain_and_detaching_gives_the_class_back():
    model, _ = made(nn.LSTM)
    _, correction = attached(model)
    assert isinstance(model.recurrent, nn.LSTM)
    assert type(model.recurrent) is not nn.LSTM
    for copied in (copy.deepcopy(model.recurrent), pickle.loads(pickle.dumps(model.recurrent))):
        assert type(copied) is nn.LSTM
        assert torch.equal(copied(normal(2, 3, 3))[0], model.recurrent(normal(2, 3, 3))[0])
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    correction.detach()
    assert type(model.recurrent) is nn.LSTM


def test_evaluation_leaves_no_trace():
    model, _ = made()
    optimizer, _ = attached(model)
    with torch.no_grad():
        model(normal(2, 3, 3))
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("at", AT)
def test_in_half_precision_by_autocast(at):
    model, twin = made(nn.GRU)
    model, twin = model.float(), twin.double()
    optimizer, _ = attached(model, at=at)
    x = normal(5, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x.float())
    squares(outputs.float()).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - twin.get_parameter(name).grad).norm() / twin.get_parameter(name).grad.norm()
        assert error < 0.1, name


def test_nan_skips_the_step():
    model, _ = made()
    optimizer, correction = attached(model)
    before = copy.deepcopy(model.state_dict())
    x = normal(5, 4, 3)
    x[0, 0, 0] = torch.nan
    squares(model(x)).sum().backward()
    with pytest.warns(consequent.ConsequentWarning, match="NaN"):
        optimizer.step()
    assert correction.counters.skipped == 1
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.usefixtures("bounded")
def test_the_bound_shortens_a_unit_as_a_whole(kind):
    model, twin = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    correction = consequent.attach(optimizer, model, relative_damping=DAMPING[1], loss_reduction="sum")
    x = normal(5, 4, 3)
    squares(model(x)).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    ratios = [
        (p.grad / twin.recurrent.get_parameter(name).grad).flatten() for name, p in model.recurrent.named_parameters()
    ]
    ratios = torch.cat(ratios)
    assert correction.counters.bounded == 2
    assert ratios.max() < 0.5
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-5, atol=0)


def test_averages_leave_units_to_each_steps_own_moments():
    model, twin = made()
    optimizer, _ = attached(model, averaging=0.9, refresh=3, include=[nn.GRU])
    for seed in range(3):
        x = normal(5, 4, 3, seed=seed)
        optimizer.zero_grad()
        squares(model(x)).sum().backward()
        optimizer.step()
        twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            its.add_(mine.grad, alpha=0.05)  # as it was before the last step
    twin.zero_grad()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.loops.correct(DAMPING)
    check_same_grads(model.recurrent, twin.recurrent)


def test_weights_that_are_computed_stay_plain():
    model, _ = made(nn.LSTM)
    torch.nn.utils.parametrizations.weight_norm(model.recurrent, "weight_hh_l0")
    _, correction = attached(model)
    assert correction.plain["recurrent"] == (
        "its weight_hh_l0 is not a parameter of its own (parametrised, weight-normalised or pruned)"
    )


def test_shared_parameters_stay_plain():
    model, _ = made(nn.LSTM)
    model.other = nn.LSTM(3, 4)
    model.other.weight_hh_l0 = model.recurrent.weight_hh_l0
    _, correction = attached(model)
    assert correction.plain["recurrent"] == "its parameters are shared with 'other'"
    assert correction.plain["other"] == "its parameters are shared with 'recurrent'"


def test_excluded_and_included():
    model, _ = made()
    assert "recurrent" in attached(model, exclude=nn.GRU)[1].plain
    model, _ = made()
    assert list(attached(model, include="recurrent")[1].corrected) == ["recurrent"]


@pytest.mark.parametrize("at", AT)
def test_a_forward_of_its_own_around_that_of_torch(at):
    class Doubled(nn.GRU):
        def forward(self, x):
            outputs, state = super().forward(2 * x)
            return outputs, state

    torch.manual_seed(0)
    model = Model(Doubled).double()
    twin = copy.deepcopy(model)
    optimizer, correction = attached(model, at=at)
    x = normal(5, 4, 3)
    squares(model.recurrent(x)[0]).sum().backward()
    correction.step()
    loops = Loops(twin.recurrent)
    squares(torch.stack(loops(list((2 * x).unbind(0))))).sum().backward()
    loops.correct(DAMPING)
    check_same_grads(model.recurrent, twin.recurrent)
    assert optimizer is not None


def test_a_forward_that_computes_otherwise_is_listed():
    class Own(nn.RNN):
        def forward(self, x):
            return torch.tanh(x @ self.weight_ih_l0.T), None

    torch.manual_seed(0)
    model = Model(Own).double()
    optimizer, correction = attached(model)
    squares(model(normal(5, 4, 3))).sum().backward()
    with pytest.warns(consequent.ConsequentWarning, match="does not use its weights as they are"):
        optimizer.step()
    assert list(correction.corrected) == ["readout"]


def test_compiled_models_break_their_graph_at_the_layer():
    model, twin = made()
    optimizer, _ = attached(model)
    compiled = torch.compile(model, backend="eager")
    x = normal(5, 4, 3)
    squares(compiled(x)).sum().backward()
    optimizer.step()
    expected = Expected(twin)
    squares(expected(x)).sum().backward()
    expected.correct()
    check_same_grads(model, twin)


def split(model):
    weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    return [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("at", AT)
def test_weights_and_biases_in_two_optimisers(at, kind):
    model, twin = made(kind)
    optimizers, (optimizer, correction) = split(model), attached(twin, at=at)
    together = consequent.attach(optimizers, model, at=at, relative_damping=DAMPING[1], loss_reduction="sum")
    x = normal(5, 4, 3)
    for net, one in ((model, together), (twin, correction)):
        squares(net(x)).sum().backward()
        if at == "step":
            one.step()
    check_same_grads(model, twin)
    del optimizer


def test_biases_of_another_scale():
    """One of two optimisers clips its gradients before the step: its part of the new ones is clipped as much."""
    model, twin = made(nn.LSTM)
    optimizers, (optimizer, correction) = split(model), attached(twin)
    consequent.attach(optimizers, model, relative_damping=DAMPING[1], loss_reduction="sum", bound=None)
    x, biases = normal(5, 4, 3), [[p for p in net.parameters() if p.ndim == 1] for net in (model, twin)]
    squares(model(x)).sum().backward()
    squares(twin(x)).sum().backward()
    for bias in biases[0]:
        bias.grad *= 0.25
    correction.step()
    for bias in biases[1]:
        bias.grad *= 0.25
    for one in optimizers:
        one.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
    del optimizer


def test_two_corrections_of_one_layer_are_refused():
    model, _ = made(nn.RNN)
    first, second = split(model)
    consequent.attach(first, model)
    with pytest.raises(RuntimeError, match=r"layer 'recurrent'.*lie in two optimisers.*attach\(\["):
        consequent.attach(second, model)


@pytest.mark.parametrize("at", AT)
def test_samples_are_counted_where_they_are(at):
    """Of time-major sequences that enter the model, the layer knows which dimension is the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 4)).double()
    optimizer, correction = attached(model, at=at, loss_reduction="mean")
    squares(model(normal(9, 4, 3))[0]).sum().backward()
    optimizer.step()
    assert correction.samples == 4


def test_foresight_passes_by():
    model, _ = made()
    optimizer, correction = attached(model, foresight=True)
    squares(model(normal(5, 4, 3))).sum().backward()
    optimizer.step()
    assert list(correction.foresight()) == ["readout"]


def test_a_step_without_new_gradients_takes_the_corrected_ones_again():
    model, _ = made(nn.LSTM)
    optimizer, _ = attached(model)
    squares(model(normal(5, 4, 3))).sum().backward()
    optimizer.step()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, grads, [p.grad for p in model.parameters()]))


def test_a_gradient_on_top_of_a_corrected_one_is_refused():
    model, _ = made(nn.LSTM)
    optimizer, _ = attached(model, include=nn.LSTM)
    squares(model(normal(5, 4, 3))).sum().backward()
    optimizer.step()
    squares(model(normal(5, 4, 3))).sum().backward()
    with pytest.raises(RuntimeError, match="added to a gradient that had been corrected already"):
        optimizer.step()


def test_gradients_of_before_attaching_are_refused():
    model, _ = made(nn.LSTM)
    squares(model(normal(5, 4, 3))).sum().backward()
    optimizer, _ = attached(model, include=nn.LSTM)
    with pytest.raises(RuntimeError, match="no forward and backward pass through the attached model was seen"):
        optimizer.step()


def test_twice_the_same_correction_is_refused():
    model, _ = made(nn.LSTM)
    optimizer, _ = attached(model)
    with pytest.raises(RuntimeError, match="attached to these layers already"):
        consequent.attach(optimizer, model)


@pytest.mark.parametrize("at", AT)
def test_nothing_is_left_behind(at):
    """Neither by steps nor by forward passes without a backward pass, without Python's garbage collector."""
    model, _ = made(nn.LSTM, num_layers=2, bidirectional=False)
    optimizer, _ = attached(model, at=at)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(4):
            optimizer.zero_grad()
            squares(model(normal(5, 4, 3).requires_grad_())).sum().backward()
            optimizer.step()
            model(normal(5, 4, 3))
            counts.append(sum(type(found) is torch.Tensor for found in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] == counts[1]


def tied(model, one, other):
    setattr(model, one, getattr(model, other))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: tied(nn.LSTM(4, 4, 2), "weight_ih_l1", "weight_ih_l0"),
        lambda: tied(nn.RNN(4, 4), "weight_hh_l0", "weight_ih_l0"),
        lambda: tied(nn.RNN(4, 4), "bias_hh_l0", "bias_ih_l0"),
        lambda: tied(nn.MultiheadAttention(4, 1, kdim=4, vdim=5), "k_proj_weight", "q_proj_weight"),
    ],
    ids=["weights of two layers", "weights of one", "biases", "query and key"],
)
def test_modules_with_a_parameter_twice_are_plain(make):
    model = nn.ModuleList([make(), nn.Linear(4, 4)])
    correction = consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert list(correction.corrected) == ["1"]
    assert "one and the same" in correction.plain["0"]


@pytest.mark.parametrize("at", AT)
def test_layers_that_are_the_same_throughout_are_corrected(at):
    """Two uses of one unit."""
    model = Model(nn.RNN, num_layers=1).double()
    twice = nn.RNN(4, 4, 2, batch_first=True).double()
    for name in [name for name, _ in twice.named_parameters()]:
        if name.endswith("l1"):
            setattr(twice, name, getattr(twice, name[:-1] + "0"))
    model.recurrent = twice
    optimizer, correction = attached(model, at=at)
    squares(model(normal(5, 6, 4))).sum().backward()
    optimizer.step()
    assert "recurrent" in correction.corrected


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_what_few_rows_do_not_explain_is_shortened_counted_and_told_of(kind):
    torch.manual_seed(0)
    model = (nn.LSTM(64, 8, batch_first=True) if kind is nn.LSTM else nn.MultiheadAttention(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    x = normal(3, 1, 64)
    (model(x)[0] if kind is nn.LSTM else model(x, x, x)[0]).sum().backward()
    weight = model.weight_ih_l0 if kind is nn.LSTM else model.in_proj_weight
    outside = torch.eye(64, dtype=x.dtype) - torch.linalg.pinv(x[:, 0]) @ x[:, 0]
    edit = normal(*weight.shape, seed=1) @ outside
    weight.grad += edit
    with pytest.warns(consequent.ConsequentWarning, match="not the one its inputs explain"):
        correction.step()
    assert correction.counters.edited == 1
    left = weight.grad @ outside
    cosine = (left * edit).sum() / (left.norm() * edit.norm())
    assert cosine > 0.999
    assert 0 < left.norm() < 0.2 * edit.norm()


def test_gradients_that_are_differentiated_in_turn_are_told_of_in_the_backward_pass_too():
    model, _ = made(nn.GRU)
    optimizer, _ = attached(model, at="backward")
    loss = squares(model(normal(5, 4, 3).requires_grad_())).sum()
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)[0].sum().backward()
    with pytest.warns(consequent.ConsequentWarning, match="differentiated in turn"):
        optimizer.step()


def test_what_is_missing_of_a_module_is_named():
    model, _ = made(nn.RNN)
    held = [p for name, p in model.named_parameters() if "_ih" in name or "readout" in name]
    optimizer = torch.optim.SGD(held, lr=0.1)
    consequent.attach(optimizer, model)
    squares(model(normal(5, 4, 3))).sum().backward()
    wanted = "holds its weight_ih_l0 and bias_ih_l0 and not its weight_hh_l0 and bias_hh_l0"
    with pytest.warns(consequent.ConsequentWarning, match=wanted):
        optimizer.step()
