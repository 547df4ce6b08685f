"""torch.compile, with backends that are quick to start."""

import pytest
import torch
from torch import nn

import consequent
from models.expected import check_same, expected_backward, half_squares, twin_of

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(12, 3)).double()


def check_two_steps(model, plain_model, optimizer, twin):
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        half_squares(model(x)).backward()
        optimizer.step()
        plain.zero_grad()
        expected_backward(twin, lambda m: half_squares(m(x)), 5)
        plain.step()
    check_same(plain_model, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attached_before_compiling(backend):
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CSGD(model, lr=0.1)
    check_two_steps(torch.compile(model, backend=backend), model, optimizer, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attached_to_the_compiled_model_before_its_first_call(backend):
    model = make_model()
    twin = twin_of(model)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, compiled)
    assert list(correction.corrected) == ["0", "3"]
    check_two_steps(compiled, model, optimizer, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_place(backend):
    model = make_model()
    twin = twin_of(model)
    optimizer = consequent.CSGD(model, lr=0.1)
    model.compile(backend=backend)
    check_two_steps(model, model, optimizer, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer_inside_of_the_model(backend):
    model = make_model()
    twin = twin_of(model)
    model[3] = torch.compile(model[3], backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    assert list(correction.corrected) == ["0", "3"]
    check_two_steps(model, nn.Sequential(*model[:3], model[3]._orig_mod), optimizer, twin)


@pytest.mark.parametrize("to_compiled", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attached_after_the_first_call(backend, to_compiled):
    model = make_model()
    twin = twin_of(model)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(5, 2, 4, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, compiled if to_compiled else model)
    check_two_steps(compiled, model, optimizer, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_model_of_the_same_classes_compiled_before_and_after(backend):
    for attached in (False, True, False, True):
        model = make_model()
        twin = twin_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attached:
            consequent.attach(optimizer, model)
            check_two_steps(torch.compile(model, backend=backend), model, optimizer, twin)
            continue
        x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
        half_squares(torch.compile(model, backend=backend)(x)).backward()
        optimizer.step()
        half_squares(twin(x)).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        check_same(model, twin, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_detached_from_a_compiled_model_is_plain_again(backend):
    model = make_model()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    half_squares(compiled(x)).backward()
    correction.detach()
    optimizer.zero_grad()
    half_squares(compiled(x)).backward()
    optimizer.step()
    half_squares(twin(x)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    check_same(model, twin, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_whole_step_that_is_compiled(at):
    losses = []
    for compiles in (True, False):
        torch.manual_seed(0)
        x, y = torch.randn(16, 6), torch.randn(16, 3)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        consequent.attach(optimizer, model, at=at, loss_reduction="mse")

        def step(model=model, optimizer=optimizer, x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step = torch.compile(step, backend="eager") if compiles else step
        losses.append([step().item() for _ in range(3)])
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0][2] < losses[0][0]
