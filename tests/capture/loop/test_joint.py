"""Units of several parameters in real training loops: recurrent layers, whose gradients are solved for as they are."""

import copy
import gc
import io
import pickle

import pytest
import torch
from models.expected import check_same_grads
from recurrent_reference import Loops
from recurrent_training import DAMPING, Expected, Model, attached, made, normal, squares
from torch import nn
from torch.utils.checkpoint import checkpoint

AT = ["step", "backward"]


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


@pytest.mark.parametrize("how", ["None", "zeros", "data"])
def test_zeroed_gradients_are_forgotten(how):
    """Also where no trace is left, as by ``p.grad.data.zero_()`` in older scripts."""
    model, twin = made()
    optimizer, _ = attached(model)
    squares(model(normal(5, 4, 3, seed=1))).sum().backward()
    if how == "data":
        for parameter in model.parameters():
            parameter.grad.data.zero_()
    else:
        optimizer.zero_grad(set_to_none=how == "None")
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
