"""``WholeNetwork``: its step by the formula, oracles, taking back, resuming, limits."""

import copy
import io
import math
import pickle

import curvlinops
import pytest
import torch
from residual_cases import CASES, fit, laplacian, made, naive_jacobian, perceptron, vector
from scipy.optimize import least_squares
from sklearn.linear_model import Ridge
from torch import nn
from torch.func import hessian

import consequent
from consequent import WholeNetwork
from consequent.whole import network
from consequent.whole.jacobian import Jacobian
from consequent.whole.residuals import Residual


def naive_step(model, residual, batch, damping):
    """``−Jᵀ(JJᵀ + λI)⁻¹(r + r''/2)``, with r'' by finite differences in float64."""
    values, J = naive_jacobian(model, residual, *batch)
    scale = len(values) ** -0.5
    r, J = scale * values, scale * J
    parameters = [p for p in model.parameters() if p.requires_grad]

    def solve(right):
        return -J.T @ torch.linalg.solve(J @ J.T + damping * torch.eye(len(r), dtype=r.dtype), right)

    def after(change, length):
        moved = copy.deepcopy(model)
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(moved.parameters()) + length * change, moved.parameters()
        )
        return scale * naive_jacobian(moved, residual, *batch)[0]

    change, length = solve(r), 0.1
    bend = 2 / length**2 * (after(change, length) - r - length * J @ change)
    assert len(parameters) == len(list(model.parameters()))
    return change + solve(bend) / 2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("samples", [5, 60])  # fewer residuals than parameters, and more
def test_the_step_is_the_formula(name, samples):
    model, residual, x = made(name, samples)
    before, wanted = vector(model), naive_step(model, residual, [x], damping=50.0)
    solver = WholeNetwork(model, residual, damping=50.0)
    loss = solver.step(x)
    assert solver.last.tries == 1
    torch.testing.assert_close(vector(model) - before, wanted, rtol=1e-6, atol=1e-9)
    assert loss == solver.last.loss > solver.last.new_loss
    found = naive_jacobian(model, residual, x)[0].square().mean()
    assert solver.last.new_loss == pytest.approx(float(found))


def test_terms_have_weights():
    model, _, x = made("Laplacian")
    targets = torch.randn(4, 1).double()
    other = copy.deepcopy(model)
    terms = {"interior": laplacian, "edge": lambda model, x, u: model(x) - u}
    solver = WholeNetwork(model, terms, weights={"edge": 10.0}, damping=3.0)
    loss = solver.step(interior=x, edge=(x[:4], targets))
    by_hand = torch.vmap(lambda x: laplacian(other, x))(x).square().mean()
    assert loss == pytest.approx(float((by_hand + 10 * (other(x[:4]) - targets).square().mean()).detach()))

    def all_of_them(model, x, u, is_edge):  # the same as one residual
        edge = (model(x) - u).squeeze() * (10 * 13 / 4) ** 0.5
        return torch.where(is_edge, edge, laplacian(model, x) * (13 / 9) ** 0.5)

    one = WholeNetwork(other, all_of_them, damping=3.0)
    u = torch.cat([torch.zeros(9, 1).double(), targets])
    assert one.step(torch.cat([x, x[:4]]), u, torch.arange(13) >= 9) == pytest.approx(loss)
    torch.testing.assert_close(vector(model), vector(other))


# ---- oracles ----------------------------------------------------------------------------------------------------


def test_ridge_regression():
    """A linear network's first step is ridge regression, from zero."""
    for samples in (6, 40):
        x, y = torch.randn(samples, 10).double(), torch.randn(samples, 2).double()
        model = nn.Linear(10, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        WholeNetwork(model, lambda model, x, y: model(x) - y, damping=0.3).step(x, y)
        ridge = Ridge(alpha=0.3 * 2 * samples, fit_intercept=False).fit(x, y)
        torch.testing.assert_close(model.weight.detach(), torch.as_tensor(ridge.coef_))


def test_gauss_newton_matrix_of_curvlinops():
    model, x, y = perceptron(2, 6, 3).double(), torch.randn(90, 2).double(), torch.randn(90, 3).double()
    parameters = dict(model.named_parameters())
    operator = curvlinops.GGNLinearOperator(
        model, nn.MSELoss(), list(parameters.values()), [(x, y)], check_deterministic=False
    )
    matrix = operator @ torch.eye(sum(p.numel() for p in parameters.values())).double()
    rows = Residual("", lambda model, x, y: model(x) - y, model, False).rows([x, y], 1 / 90)
    found = Jacobian(rows, {name: p.numel() for name, p in parameters.items()}).smaller_system()
    torch.testing.assert_close(2 * found.tril(), matrix.tril())


def test_scipy_finds_the_same_minimum():
    x = torch.linspace(0, 3, 40).double()
    y = 2 * torch.exp(-1.5 * x) + 0.01 * torch.randn(40, generator=torch.Generator().manual_seed(0)).double()

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.ones(2).double())

        def forward(self, x):
            return self.theta[0] * torch.exp(-self.theta[1] * x)

    model = Decay()
    solver = WholeNetwork(model, lambda model, x, y: model(x) - y)
    for _ in range(20):
        solver.step(x, y)
    wanted = least_squares(lambda t: (t[0] * torch.exp(-t[1] * x) - y).numpy(), [1, 1], method="lm", xtol=1e-12)
    torch.testing.assert_close(model.theta.detach(), torch.as_tensor(wanted.x), rtol=1e-6, atol=0)


# ---- what it is for ---------------------------------------------------------------------------------------------


def test_a_linear_network_lands_on_its_targets():
    model, x, y = nn.Linear(9, 2).double(), torch.randn(5, 9).double(), torch.randn(5, 2).double()
    WholeNetwork(model, lambda model, x, y: model(x) - y, damping=1e-12).step(x, y)
    torch.testing.assert_close(model(x), y)


def test_an_equation_is_solved():
    torch.manual_seed(0)
    model, x = perceptron(1, 16, 16, 1).double(), torch.linspace(0, 1, 60).double()[:, None]

    def interior(model, x):
        return torch.func.hessian(lambda x: model(x).squeeze())(x).squeeze() + torch.pi**2 * (torch.pi * x).sin()

    solver = WholeNetwork(model, {"interior": interior, "ends": lambda model, x: model(x)}, weights={"ends": 10.0})
    for _ in range(40):
        solver.step(interior=x, ends=x[[0, -1]])
    assert float((model(x) - (torch.pi * x).sin()).detach().norm() / (torch.pi * x).sin().norm()) < 1e-5


def test_float32_learns_as_well():
    torch.manual_seed(0)
    model, x = perceptron(1, 20, 1), torch.linspace(-2, 2, 40)[:, None]
    solver = WholeNetwork(model, lambda model, x, y: model(x) - y)
    for _ in range(40):
        solver.step(x, x.sin())
    assert solver.last.new_loss < 1e-8


# ---- taking back, resuming --------------------------------------------------------------------------------------


def test_a_step_that_fails_is_taken_back():
    """A residual with a slope, and a wall on both sides: no step can decrease the loss."""
    model = nn.Linear(1, 1, bias=False).double()
    before = vector(model)

    def wall(model, x):
        moved = model(x) - before[0]
        return 1 + 1e-3 * moved + 1e3 * (moved != 0)

    solver = WholeNetwork(model, wall, damping=1e-3)
    assert solver.step(torch.ones(1, 1).double()) == solver.last.new_loss
    assert solver.last.tries > 1
    assert torch.equal(vector(model), before)


def test_damping_follows():
    model, x = nn.Linear(1, 1, bias=False).double(), torch.ones(1, 1).double()
    nn.init.zeros_(model.weight)
    solver = WholeNetwork(model, lambda model, x: model(x).exp() - 1e4, damping=1e-9)  # at first it overflows
    solver.step(x)
    assert solver.last.tries > 1
    assert solver.param_groups[0]["damping"] > 1e-9
    model, residual, x = made("Laplacian", 30)
    solver = WholeNetwork(model, residual, damping=1e6)
    solver.step(x)
    assert solver.param_groups[0]["damping"] == pytest.approx(1e6 / 3)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_a_try_leaves_the_parameters(error):
    model, _, x = made("Laplacian")
    before, calls = vector(model), []

    def residual(model, x):
        calls.append(1)
        if len(calls) > 6:
            raise error
        return laplacian(model, x)

    solver = WholeNetwork(model, residual)

    def train():
        nonlocal before
        for _ in range(9):
            before = vector(model)
            solver.step(x)

    with pytest.raises(error):
        train()
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resuming_to_the_bit(dtype):
    model, _, x = made("Laplacian", 20)
    model, x = model.to(dtype), x.to(dtype)
    solver = WholeNetwork(model, laplacian)
    for _ in range(3):
        solver.step(x)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "solver": solver.state_dict()}, file)
    for _ in range(3):
        solver.step(x)
    file.seek(0)
    state, other = torch.load(file, weights_only=True), made("Laplacian")[0].to(dtype)
    other.load_state_dict(state["model"])
    again = WholeNetwork(other, laplacian)
    again.load_state_dict(state["solver"])
    for _ in range(3):
        again.step(x)
    assert torch.equal(vector(model), vector(other))
    assert again.param_groups[0] == solver.param_groups[0] | {"params": again.param_groups[0]["params"]}


# ---- memory, what it shows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [12, 80])
def test_little_memory_gives_the_same_step(samples):
    model, residual, x = made("Laplacian", samples)
    other = copy.deepcopy(model)
    side = min(samples, sum(p.numel() for p in model.parameters()))
    solver = WholeNetwork(model, residual, damping=1.0)
    solver.step(x)
    sample = next(iter(solver._known.values()))
    small = WholeNetwork(
        other, residual, damping=1.0, memory=32 * side**2 + samples * sample.kept + 2 * sample.computed
    )
    calls = []
    rows = small.residuals[""].rows
    small.residuals[""].rows = lambda batch, weight: calls.append(len(batch[0])) or rows(batch, weight)
    small.step(x)
    assert len(calls) > 2
    torch.testing.assert_close(vector(model), vector(other))


def test_too_little_memory_is_said_before():
    model, residual, x = made("Laplacian", 300)
    before = vector(model)
    with pytest.raises(MemoryError, match=r"300 residuals and 59 parameters takes 0\.00\d+ GB, and 1e-06 GB are there"):
        WholeNetwork(model, residual, memory=1e3).step(x)
    assert torch.equal(vector(model), before)


def test_what_it_prints(capsys):
    model, residual, x = made("Laplacian")
    solver = WholeNetwork(model, residual, progress=2)
    assert repr(solver).splitlines() == [
        "WholeNetwork of 59 parameters in 6 tensors",
        "  one residual (weight 1)",
        "  0 steps",
    ]
    for _ in range(4):
        solver.step(x)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["step 2: ", "step 4: "]
    assert "predicted), damping" in lines[0]
    assert lines[1].removeprefix("step 4: ") in repr(solver)


def test_it_is_an_optimizer_with_hooks():
    model, residual, x = made("Laplacian")
    solver, seen = WholeNetwork(model, residual), []
    assert isinstance(solver, torch.optim.Optimizer)
    solver.register_step_post_hook(lambda *_: seen.append(1))
    solver.step(x)
    assert seen == [1]
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_is_in_the_model_twice():
    torch.manual_seed(0)
    layer = nn.Linear(2, 2).double()
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(2, 1).double())
    x = torch.randn(40, 2).double()
    values, J = naive_jacobian(copy.deepcopy(model), fit, x)  # it leaves no parameters
    for batched, residual in ((False, fit), (True, lambda m, x: m(x) - x.sum(1).sin()[:, None])):
        solver = WholeNetwork(copy.deepcopy(model), residual, batched=batched, damping=1e-3)
        rows = solver.residuals[""].rows([x], 1.0)
        jacobian = Jacobian(rows, {name: p.numel() for name, p in model.named_parameters()})
        torch.testing.assert_close(jacobian.transposed_times(values), J.T @ values)
        solver.step(x)
        assert all(isinstance(p, nn.Parameter) for m in solver.model.modules() for p in m._parameters.values())


def test_too_high_a_damping_comes_down():
    torch.manual_seed(0)
    model, x = perceptron(1, 20, 1), torch.linspace(-2, 2, 40)[:, None]
    solver = WholeNetwork(model, lambda model, x, y: model(x) - y, damping=1e8)
    for _ in range(60):
        solver.step(x, x.sin())
    assert solver.last.new_loss < 1e-4


def test_other_numbers_from_samples_of_the_same_shape():
    numbers = [1]
    model, x = perceptron(2, 3, 1).double(), torch.ones(4, 2).double()
    solver = WholeNetwork(model, lambda m, x: m(x).expand(numbers[0]))
    solver.step(x)
    numbers[0] = 3
    wanted = float(model(x).square().mean())
    assert solver.step(x) == pytest.approx(wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda solver: pickle.loads(pickle.dumps(solver))])
def test_copies_go_on_by_themselves(copied):
    model, _, x = made("Laplacian")
    solver = WholeNetwork(model, laplacian)
    solver.step(x)
    other, before = copied(solver), vector(model)
    losses = [other.step(x) for _ in range(2)]
    assert torch.equal(vector(model), before)
    assert losses == [solver.step(x) for _ in range(2)]


@pytest.mark.parametrize("residual", ["integral", "convolution"])
def test_memory_is_kept_to(residual):
    """Measured as the size of the largest piece: what is computed for a sample is far larger than what is kept."""
    nodes = torch.linspace(0, 1, 200)[:, None]
    cases = {
        "integral": (perceptron(1, 32, 1), lambda m, x: m(x) - m(x * nodes).mean(0), torch.rand(500, 1)),
        "convolution": (nn.Conv2d(1, 8, 3), lambda m, x: m(x).tanh().mean((1, 2)), torch.rand(300, 1, 32, 32)),
    }
    model, function, x = cases[residual]
    solver, sizes = WholeNetwork(model, function, memory=2e7), []
    rows = solver.residuals[""].rows
    solver.residuals[""].rows = lambda batch, weight: sizes.append(len(batch[0])) or rows(batch, weight)
    solver.step(x)
    results = 4 * {"integral": 2 * 200 * 33, "convolution": 2 * 8 * 30 * 30}[residual]  # bytes: products, tanh
    assert 8 < max(sizes[1:]) < 2e7 / results / 2


def test_a_compiled_model_is_no_obstacle():
    model, residual, x = made("Laplacian")
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    assert WholeNetwork(compiled, residual).step(x) == WholeNetwork(model, residual).step(x)
    torch.testing.assert_close(vector(model), vector(compiled))


def test_compiled_layers_are_no_obstacle():
    model, residual, x = made("Laplacian")
    inside, later = nn.Sequential(torch.compile(copy.deepcopy(model), backend="eager")), copy.deepcopy(model)
    solvers = [WholeNetwork(one, residual) for one in (model, inside, later)]
    solvers[2].step(x)
    later.load_state_dict(model.state_dict())
    later.compile(backend="eager")  # in place, after a step
    solvers[2].load_state_dict(solvers[0].state_dict())
    assert len({solver.step(x) for solver in solvers}) == 1
    torch.testing.assert_close(vector(inside), vector(model))
    torch.testing.assert_close(vector(later), vector(model))


def test_a_corrected_model_is_no_obstacle():
    model, residual, x = made("Laplacian")
    other = copy.deepcopy(model)
    consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert WholeNetwork(model, residual).step(x) == WholeNetwork(other, residual).step(x)
    torch.testing.assert_close(vector(model), vector(other))


def test_a_machine_that_does_not_tell_its_memory(monkeypatch):
    monkeypatch.setattr(network, "_memory_of", lambda device: math.inf)
    model, residual, x = made("Laplacian")
    assert WholeNetwork(model, residual).step(x) > 0


@pytest.mark.parametrize("seed", [9, 15])
def test_a_first_step_does_not_saturate_a_deep_network(seed):
    """With steps that keep a thousandth of their prediction these two stay where they began for ever."""
    torch.manual_seed(seed)
    x, model = torch.rand(150, 2).double(), perceptron(2, 50, 50, 50, 50, 1).double()

    def poisson(model, x):
        return hessian(lambda x: model(x).squeeze())(x).trace() + 2 * torch.pi**2 * (torch.pi * x).sin().prod()

    solver = WholeNetwork(model, poisson)
    losses = [solver.step(x) for _ in range(9)]
    assert losses[-1] < 0.1 * losses[0]


def test_autocast_around_a_step_changes_nothing():
    model, residual, x = made("Laplacian")
    model, x = model.float(), x.float()
    other = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = WholeNetwork(model, residual).step(x)
    assert loss == WholeNetwork(other, residual).step(x)
    torch.testing.assert_close(vector(model), vector(other))
