"""``WholeNetwork`` on a GPU: the CPU's steps, by launches and by CUDA graphs."""

import copy
import io

import pytest
import torch
from residual_cases import CASES, batched_burgers, burgers, fit, laplacian, made, perceptron, vector
from torch import nn

from consequent import WholeNetwork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("samples", [5, 60])
def test_the_step_is_that_of_a_cpu(name, samples):
    model, residual, x = made(name, samples)
    other = copy.deepcopy(model).cuda()
    loss = WholeNetwork(model, residual, damping=50.0).step(x)
    assert WholeNetwork(other, residual, damping=50.0).step(x.cuda()) == pytest.approx(loss)
    torch.testing.assert_close(vector(other).cpu(), vector(model), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [300, 3000])  # several tiles; fewer and more than parameters
def test_many_samples(samples, dtype):
    torch.manual_seed(0)
    model, x = perceptron(2, 30, 30, 1).to(dtype), torch.randn(samples, 2, dtype=dtype)
    other = copy.deepcopy(model).cuda()
    for one, its in ((model, x), (other, x.cuda())):
        solver = WholeNetwork(one, laplacian, damping=1.0)
        for _ in range(2):
            solver.step(its)
    digits = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(vector(other).cpu(), vector(model), **digits)


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - {"shared, tied, normed"}), "batched"])
@pytest.mark.parametrize("samples", [5, 60])
def test_graphs_do_the_same_as_launches(name, samples):
    batched = name == "batched"
    model, residual, x = made("Burgers" if batched else name, samples)
    residual = batched_burgers if batched else residual
    ends = []
    for graph in (False, True):
        one, losses = copy.deepcopy(model).cuda(), []
        solver = WholeNetwork(one, residual, damping=1e-6, batched=batched, cuda_graph=graph)
        for step in range(5):
            losses.append(solver.step((1 + step / 10) * x.cuda()))
        ends.append((losses, solver.last.tries, vector(one)))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(ends[0][2], ends[1][2], rtol=1e-5, atol=1e-7)
    assert ends[0][1] == ends[1][1]


def test_a_step_of_a_graph_is_taken_back():
    model, x = nn.Linear(1, 1, bias=False).double().cuda(), torch.ones(1, 1).double().cuda()
    nn.init.zeros_(model.weight)
    target = torch.tensor(1e4).double().cuda()
    solver = WholeNetwork(model, lambda model, x: model(x).exp() - target, damping=1e-9, cuda_graph=True)
    solver.step(x)  # at first it overflows
    assert solver.last.tries > 1
    assert solver.last.new_loss < solver.last.loss
    nn.init.constant_(model.weight, 9.0)  # of the user's own
    assert solver.step(x) == pytest.approx((8103.083927575384 - 1e4) ** 2)


def test_graphs_of_terms_follow_shapes_and_modes():
    model, _, x = made("Laplacian", 20)
    model, x, calls = model.cuda(), x.cuda(), []

    def edge(model, x, u):
        calls.append(1)
        return model(x) - u

    solver = WholeNetwork(model, {"interior": laplacian, "edge": edge}, weights={"edge": 9.0}, cuda_graph=True)
    other = copy.deepcopy(model)
    plain = WholeNetwork(other, {"interior": laplacian, "edge": edge}, weights={"edge": 9.0})
    for number in (20, 20, 10, 10):
        its = {"interior": x[:number], "edge": (x[:4], x[:4, :1])}
        assert solver.step(**its) == pytest.approx(plain.step(**its), rel=1e-6)
    count = len(calls)
    solver.step(**its)
    assert len(calls) == count  # Python runs no more
    model.eval()
    solver.step(**its)
    assert len(calls) > count


def test_graphs_follow_names_and_weights():
    model, _, x = made("Laplacian", 20)
    terms, y = {"a": laplacian, "b": lambda model, x: model(x) - 1}, torch.randn(20, 2).double().cuda()
    model, x = model.cuda(), x.cuda()
    other = copy.deepcopy(model)
    solver, plain = WholeNetwork(model, terms, cuda_graph=True), WholeNetwork(other, terms)
    for its in ({"a": x, "b": y}, {"b": y, "a": x}, {"a": x, "b": y}):
        assert solver.step(**its) == pytest.approx(plain.step(**its), rel=1e-6)
        solver.weights["b"] = plain.weights["b"] = 3.0


@pytest.mark.parametrize("graph", [False, True])
def test_resuming_to_the_bit(graph):
    model, _, x = made("Laplacian", 20)
    model, x = model.cuda(), x.cuda()
    solver = WholeNetwork(model, laplacian, cuda_graph=graph)
    for _ in range(3):
        solver.step(x)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "solver": solver.state_dict()}, file)
    for _ in range(3):
        solver.step(x)
    file.seek(0)
    state, other = torch.load(file, weights_only=True), made("Laplacian")[0].cuda()
    other.load_state_dict(state["model"])
    again = WholeNetwork(other, laplacian, cuda_graph=graph)
    again.load_state_dict(state["solver"])
    for _ in range(3):
        again.step(x)
    assert torch.equal(vector(model), vector(other))
    copied = copy.deepcopy(solver)
    assert copied.step(x) == solver.step(x)


def test_what_a_graph_cannot_hold_is_said():
    model, residual, x = made("shared, tied, normed")  # the derivative of prod() waits for the GPU
    model, x = model.cuda(), x.cuda()
    before = vector(model)
    with pytest.raises(RuntimeError, match=r"(?s)a CUDA graph of the residuals cannot be made: .* as item\(\), "):
        WholeNetwork(model, residual, cuda_graph=True).step(x)
    assert torch.equal(vector(model), before)
    assert WholeNetwork(model, residual).step(x) > 0


def test_nan_in_a_graph_is_named():
    model, x = made("Burgers")[0].cuda(), torch.randn(9, 2).double().cuda()
    solver = WholeNetwork(model, burgers, cuda_graph=True)
    solver.step(x)
    before = vector(model)
    x[3] = torch.nan
    with pytest.raises(ValueError, match="1 of 9 samples, first for sample 3"):
        solver.step(x)
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize("residual", [fit, laplacian])
@pytest.mark.parametrize("samples", [1000, 20_000])
def test_memory_is_kept_to(residual, samples):
    torch.manual_seed(0)
    model, x = perceptron(2, 48, 48, 1).double().cuda(), torch.randn(samples, 2).double().cuda()
    plenty = WholeNetwork(copy.deepcopy(model), residual)
    plenty.step(x)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plenty.step(x)
    whole = torch.cuda.max_memory_allocated() - before
    with pytest.raises(MemoryError):
        WholeNetwork(model, residual, memory=1e6).step(x)
    allowed = 0.6 * whole
    torch.cuda.reset_peak_memory_stats()
    try:
        WholeNetwork(model, residual, memory=allowed).step(x)
    except MemoryError:
        return  # the system alone takes more
    assert torch.cuda.max_memory_allocated() - before < 1.3 * allowed
