"""Modules of several products that stay plain, and what is refused of them."""

import pytest
import torch
from models.expected import check_same_grads
from recurrent_training import Model, attached, made, normal, split, squares
from torch import nn

import consequent

AT = ["step", "backward"]


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


def test_two_corrections_of_one_layer_are_refused():
    model, _ = made(nn.RNN)
    first, second = split(model)
    consequent.attach(first, model)
    with pytest.raises(RuntimeError, match=r"layer 'recurrent'.*lie in two optimisers.*attach\(\["):
        consequent.attach(second, model)


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
