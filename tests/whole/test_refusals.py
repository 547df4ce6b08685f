"""``WholeNetwork``: bad residuals, samples and arguments get errors that say what to do, and parameters stay."""

import copy
import math

import pytest
import torch
from residual_cases import CASES, batched_burgers, fit, laplacian, perceptron, vector
from torch import nn
from torch.func import hessian, jacfwd
from torch.utils.checkpoint import checkpoint

from consequent import ConsequentWarning, WholeNetwork

X = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("residual", "batch", "message"),
    [
        (lambda m, x: m(x).log() * math.nan, (X,), "not finite for 4 of 4 samples, first for sample 0"),
        (lambda m, x: x.sum(), (X,), "depends on no parameter that is trained"),
        (lambda m, x: m(x.detach()).detach(), (X,), "depends on no parameter that is trained"),
        (fit, (X, X[:2]), r"a row for each sample, got \[\[4, 2\], \[2, 2\]\]"),
        (fit, (X[:0],), "a row for each sample"),
        (fit, (torch.tensor(1.0),), "a row for each sample"),
        (fit, ([1.0, 2.0],), r"a row for each sample, got \['list'\]"),
        (fit, ((X, X),), r"got \['tuple'\]: step\(x, y\), step\(\*batch\), or"),
        (lambda m, x: torch.dropout(m(x), 0.5, True), (X,), r"For dropout and BatchNorm, call model.eval"),
    ],
)
def test_bad_residuals_and_samples(residual, batch, message):
    model = perceptron(2, 3, 1)
    before = vector(model)
    with pytest.raises(ValueError, match=message):
        WholeNetwork(model, residual).step(*batch)
    assert torch.equal(vector(model), before)


def test_a_residual_of_a_batch_is_told_to_say_so():
    for residual in (lambda m, x: m(x)[:, 0], batched_burgers):
        with pytest.raises(ValueError, match=r"(?s)for 4 samples \(\[2\] torch.float32\): .* pass batched=True"):
            WholeNetwork(perceptron(2, 3, 1), residual).step(X)


def test_the_hint_of_a_batch_is_another():
    for residual in (lambda m, x: torch.autograd.grad(m(x).sum(), x)[0], lambda m, x: laplacian(m, x)):
        with pytest.raises(ValueError, match=r"(?s)for 4 samples .*\nFor torch.autograd.grad, let x = x.clone"):
            WholeNetwork(perceptron(2, 3, 1), residual, batched=True).step(X)


def test_a_coefficient_of_a_batch():
    """What the error advises."""
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"u": perceptron(2, 3, 1), "c": nn.Linear(1, 1, bias=False)}).double(), torch.randn(9, 2)
    other, x = copy.deepcopy(model), x.double()
    WholeNetwork(model, lambda m, x: m.c(torch.ones_like(m.u(x))) * m.u(x) - 1, batched=True, damping=0.1).step(x)
    WholeNetwork(other, lambda m, x: m.c.weight[0] * m.u(x) - 1, damping=0.1).step(x)
    torch.testing.assert_close(vector(model), vector(other))


def test_a_parameter_that_is_not_the_models_is_refused():
    other = nn.Parameter(torch.tensor(0.5))
    for batched in (False, True):
        solver = WholeNetwork(perceptron(2, 3, 1), lambda m, x: other * m(x), batched=batched)
        remedy = "only linear layers are trained" if batched else "It must be an nn.Parameter of the model"
        with pytest.raises(ValueError, match=rf"uses a tensor of shape \[\] that requires .* {remedy}"):
            solver.step(X)
    solver = WholeNetwork(perceptron(2, 3, 1), lambda m, x: other.detach() * m(x) + x.sum())
    solver.step(X)


def test_nan_at_a_sample_is_named():
    model, x = perceptron(2, 3, 1), torch.randn(5, 2)
    x[3] = math.inf
    with pytest.raises(ValueError, match=r"residual 'a' is not finite for 1 of 5 samples, first for sample 3"):
        WholeNetwork(model, {"a": lambda m, x: m(x) + x.sum()}).step(a=x)
    x = torch.randn(3000, 2)
    x[2500] = math.nan
    with pytest.raises(ValueError, match=r"not finite for 1 of 3000 samples, first for sample 2500"):
        WholeNetwork(perceptron(2, 40, 1), fit, memory=4e6).step(x)  # in parts


def test_a_derivative_that_is_not_finite():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match="or of their derivatives by the parameters, are not finite"):
        WholeNetwork(model, lambda m, x: m(x).abs().sqrt() + 1).step(torch.ones(3, 1))


def test_other_types_and_overflow():
    with pytest.raises(ValueError, match=r"is of torch.float64, and parameters are of torch.float32: convert the samp"):
        WholeNetwork(perceptron(2, 3, 1), lambda m, x, y: m(x) - y).step(X, torch.ones(4, 1).double())
    with pytest.raises(ValueError, match=r"squares of the residuals.*are not finite"):
        WholeNetwork(perceptron(2, 3, 1), lambda m, x: m(x) - 1e20).step(X)


def test_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = torch.randn(6, 2)
    with pytest.raises(ValueError, match=r"BatchNorm.*model\.eval\(\)"):
        WholeNetwork(model, fit).step(x)
    with pytest.raises(ValueError, match=r"BatchNorm.*model\.eval\(\)"):
        WholeNetwork(model, lambda m, x: m(x), batched=True).step(x)
    WholeNetwork(model.eval(), lambda m, x: m(x[None])[0]).step(x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"damping": 0}, ValueError, "damping must be finite and > 0"),
        ({"memory": -1}, ValueError, "memory must be finite and > 0"),
        ({"weights": 2.0}, ValueError, "a dict of numbers by the names of terms"),
        ({"weights": {"a": 1}}, ValueError, r"none: residual is one function, and no dict; got \{'a': 1\}"),
        ({"residual": {"a": fit}, "weights": {"b": 1}}, ValueError, r"by the names of terms, \['a'\]; got \{'b': 1\}"),
        ({"residual": {}}, TypeError, "a function, or a dict of functions"),
        ({"residual": {"a": fit}, "weights": {"a": 0}}, ValueError, "the weight of 'a' must be"),
        ({"model": 3}, TypeError, "expected a torch.nn.Module, got int"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        WholeNetwork(**{"model": nn.Linear(2, 1), "residual": fit, **arguments})


def test_a_graph_needs_a_gpu():
    solver = WholeNetwork(perceptron(2, 3, 1), fit, cuda_graph=True)
    with pytest.raises(ValueError, match=r"cuda_graph=True is for parameters on a GPU, and they are torch.float32 on"):
        solver.step(torch.ones(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_that_are_rounding_are_no_mixture(dtype):
    """A periodic condition on a periodic network, and targets that are met."""
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = perceptron(2, 20, 20, 1).to(dtype), torch.randn(40, 2, dtype=dtype)

        def periodic(model, x):
            return model((2 * torch.pi * (x + 1)).sin()) - model((2 * torch.pi * x).sin())

        WholeNetwork(model, periodic).step(x)  # does not raise
        assert WholeNetwork(model, lambda model, x, y: model(x) - y).step(x, model(x).detach()) < 1e-6


def test_a_tensor_that_would_not_be_trained_is_refused():
    unknown = torch.tensor(1.0, requires_grad=True)
    for batched in (False, True):
        with pytest.raises(ValueError, match=r"uses a tensor of shape \[\] that requires gradients"):
            WholeNetwork(perceptron(2, 3, 1), lambda m, x: unknown * m(x), batched=batched).step(X)


@pytest.mark.parametrize("residual", [lambda m, x: m(x - x[:1]), lambda m, x: m(x) * (-x[:, :1].cumsum(0)).exp()])
def test_mixtures_that_spare_the_first_sample_are_refused(residual):
    with pytest.raises(ValueError, match="Does it mix samples"):
        WholeNetwork(perceptron(2, 3, 1).double(), residual, batched=True).step(torch.randn(9, 2).double())


def test_control_flow_by_a_parameter_is_explained():
    def residual(model, x):
        return model(x) if model.coefficient > 0 else -model(x)

    with pytest.raises(ValueError, match=r"(?s)the residual cannot be computed.*no `if` and no float"):
        WholeNetwork(CASES["a coefficient"][0](), residual).step(X)


def test_bad_steps():
    solver = WholeNetwork(perceptron(2, 3, 1), {"a": fit, "b": fit})
    with pytest.raises(TypeError, match=r"step\(a=…, b=…\) is wanted; got 1 samples without a name, and"):
        solver.step(X)
    with pytest.raises(ValueError, match=r"residual 'a' takes tensors .* got \['float'\]"):
        solver.step(a=3.0, b=X)
    with pytest.raises(TypeError, match="returned a tuple"):
        WholeNetwork(perceptron(2, 3, 1), lambda m, x: (m(x), x)).step(X)
    model = perceptron(2, 3, 1)
    model[0].double()
    with pytest.raises(ValueError, match=r"one type.*\['torch.float32 on cpu', 'torch.float64 on cpu'\]"):
        WholeNetwork(model, fit).step(X)
    with pytest.raises(ValueError, match=r"float32 or float64.*the model has none that requires gradients"):
        WholeNetwork(nn.Linear(2, 1).requires_grad_(False), fit).step(X)


def test_other_parameters_and_states_of_other_optimisers():
    model, other = perceptron(2, 3, 1), nn.Linear(2, 1)
    solver = WholeNetwork(model, fit)
    solver.add_param_group({"params": other.parameters()})
    with pytest.raises(ValueError, match=r"trains the parameters of its model, in one group: put others into"):
        solver.step(X)
    solver = WholeNetwork(model, fit)
    solver.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(ValueError, match=r"load what state_dict\(\) of a WholeNetwork gave"):
        solver.step(X)


# ---- what a newcomer and a sceptic found ------------------------------------------------------------------------


def test_a_forgotten_create_graph_is_refused():
    def residual(model, x, **options):
        x = x.clone().requires_grad_()
        u = model(x)
        return u + torch.autograd.grad(u.sum(), x, **options)[0][:, :1]  # u alone has a graph

    for options in ({}, {"retain_graph": True}):
        with pytest.raises(ValueError, match="must have create_graph=True, or its results would not be trained"):
            WholeNetwork(perceptron(2, 3, 1), lambda m, x, its=options: residual(m, x, **its), batched=True).step(X)
    WholeNetwork(perceptron(2, 3, 1), lambda m, x: residual(m, x, create_graph=True), batched=True).step(X)


def test_targets_of_all_samples_in_each_residual_are_told():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    with pytest.warns(ConsequentWarning, match=r"of one sample has 20 numbers, as many .* pass them: step\(x, y\)"):
        WholeNetwork(perceptron(2, 3, 1), lambda m, x: m(x) - y).step(x)


def test_an_equation_without_second_derivatives_is_told():
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    solver = WholeNetwork(model, {"equation": lambda m, x: hessian(lambda x: m(x).sum())(x).trace() - 1, "edge": fit})
    with pytest.warns(ConsequentWarning, match="no parameter changes residual 'equation' of 4 samples .* ReLU"):
        solver.step(equation=X, edge=X)


@pytest.mark.parametrize("sample", [nn.Parameter(torch.ones(4, 1)), torch.ones(4, 1).requires_grad_()])
def test_samples_that_would_not_be_trained_are_refused(sample):
    for batched in (False, True):
        solver = WholeNetwork(perceptron(3, 3, 1), lambda m, x, z: m(torch.cat([x, z], -1)), batched=batched)
        if batched and not isinstance(sample, nn.Parameter):
            solver.step(X, sample)  # for derivatives by it
            continue
        with pytest.raises(ValueError, match=r"samples that require gradients.* make them parameters of the model"):
            solver.step(X, sample)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3).requires_grad_(False)])
def test_batch_norm_in_eval_mode_wants_a_batch(layer):
    model = nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 1)).eval()
    with pytest.raises(ValueError, match=r"as BatchNorm, gets x\[None\].*pass batched=True\.$"):
        WholeNetwork(model, lambda m, x: m(x)).step(X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "residual",
    [
        lambda m, x: m(x / x.abs().max()) - x[:, :1],
        lambda m, x: m(x) - 0.02 * m(x).mean(),
        lambda m, x: m(x) - (x - x.mean()).sum(1, keepdim=True) / 10,
        lambda m, x: (x[:, :1] - x[:, :1].mean()) * (m(x) - x[:, 1:]),  # the first samples of a grid have one time
    ],
)
def test_small_mixtures_are_refused(residual, dtype):
    torch.manual_seed(0)
    model, x = perceptron(2, 50, 50, 1).to(dtype), torch.cartesian_prod(*2 * [torch.linspace(0, 1, 12)]).to(dtype)
    with pytest.raises(ValueError, match="Does it mix samples"):
        WholeNetwork(model, residual, batched=True).step(x)


@pytest.mark.parametrize("sizes", [(16, 10), (10, 16), (8, 8), (100, 8), (3, 3)])
@pytest.mark.parametrize("place", [0, 1])
def test_mixtures_of_one_coordinate_of_a_grid_are_refused(sizes, place):
    """The samples that are looked at must not all lie in one row or column."""
    model, x = perceptron(2, 5, 1).double(), torch.cartesian_prod(*(torch.linspace(0, 1, n) for n in sizes)).double()

    def residual(model, x):
        return model(x) + x[:, [place]] - x[:, [place]].mean()

    with pytest.raises(ValueError, match="Does it mix samples"):
        WholeNetwork(model, residual, batched=True).step(x)


def test_reentrant_checkpoints_are_refused():
    model = perceptron(2, 3, 1)
    before = vector(model)

    def residual(model, x):
        return model[2](checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=True))

    with pytest.raises(ValueError, match="the residual has a reentrant checkpoint, whose parameters would not be"):
        WholeNetwork(model, residual, batched=True).step(X)
    assert torch.equal(vector(model), before)


class Implicit(nn.Module):
    """With a solve whose second forward derivatives are wrong under vmap in torch 2.13."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 6), nn.Linear(6, 1)
        self.matrix = nn.Parameter(torch.randn(6, 6) / 10)

    def forward(self, x):
        return self.last(torch.linalg.solve(torch.eye(6).to(x) + self.matrix, self.first(x).tanh()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_derivatives_of_torch_do_not_pass(dtype):
    def residual(model, x):
        return jacfwd(jacfwd(lambda x: model(x).sum()))(x).trace()

    for seed in range(6):
        torch.manual_seed(seed)
        model, x = Implicit().to(dtype), torch.randn(60, 2, dtype=dtype)
        before, wanted = vector(model), torch.stack([residual(model, one) for one in x]).square().mean()
        try:
            assert WholeNetwork(model, residual).step(x) == pytest.approx(float(wanted), rel=1e-3)
        except ValueError:
            assert torch.equal(vector(model), before)
