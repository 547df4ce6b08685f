"""Against implementations nobody here wrote: scikit-learn's ridge regression, ISAAC, and curvlinops' KFAC."""

import curvlinops
import isaac
import numpy as np
import pytest
import reference
import torch
from cases import DAMPINGS, DTYPES, check_error, normal, second_moment, skip_if_silent
from sklearn.linear_model import Ridge
from torch import nn

import consequent


def correct(model, x, loss_of, **options):
    """Backward pass and correction; the gradients are in the model."""
    correction = consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    loss_of(model(x)).backward()
    correction.detach()
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("samples", "features"), [(6, 15), (15, 6), (1, 8), (8, 8)])
def test_linear_is_ridge_regression_of_sklearn(samples, features, bias, damping, dtype):
    """With a bias: ridge regression on a column of ones, which is penalised like every other (no ``fit_intercept``)."""
    torch.manual_seed(samples)
    x, output_grads = normal(samples, features).to(dtype), normal(samples, 3).to(dtype)
    layer = nn.Linear(features, 3, bias=bias, dtype=dtype)
    correct(layer, x, lambda z: (z * output_grads).sum(), damping=damping, loss_reduction="sum")
    X, dZ = x.double().numpy(), output_grads.double().numpy()
    actual = layer.weight.grad
    if bias:
        X = np.concatenate([X, np.ones((samples, 1))], axis=1)
        actual = torch.cat([actual, layer.bias.grad[:, None]], dim=1)
    expected = Ridge(alpha=damping, fit_intercept=False).fit(X, dZ).coef_
    skip_if_silent(check_error(actual, expected, reference.condition_number(X, damping), dtype))


@pytest.mark.parametrize("la", [1e-3, 1e-1, 10.0])
@pytest.mark.parametrize(("samples", "features"), [(6, 15), (15, 6), (8, 8)])
def test_linear_is_isaac(samples, features, la):
    """ISAAC's weight gradient of a mean loss is λ × ours with λ = N·la; it leaves the bias plain."""
    torch.manual_seed(samples)
    x, targets = normal(samples, features), torch.arange(samples) % 4
    theirs = isaac.Linear(features, 4, la=la, inv_type="inverse").double()
    nn.functional.cross_entropy(theirs(x), targets).backward()

    damping = samples * la
    kappa = reference.condition_number(x, damping)
    for loss_reduction, factor in (("sum", damping), ("mean", la)):  # "mean" multiplies by N once more
        ours = nn.Linear(features, 4, dtype=torch.float64)
        ours.load_state_dict(theirs.state_dict())
        ours.bias.requires_grad_(False)  # which leaves the column of ones out, as ISAAC does
        correct(
            ours,
            x,
            lambda z: nn.functional.cross_entropy(z, targets),
            damping=damping,
            loss_reduction=loss_reduction,
        )
        # ISAAC's own subtraction I − aaᵀ(…)/la cancels for small la where N < D: allow its rounding errors beside ours.
        kappa_isaac = 1 + (np.linalg.norm(x.numpy(), 2) ** 2 / damping if samples < features else 0)
        assert check_error(factor * ours.weight.grad, theirs.weight.grad.numpy(), kappa * kappa_isaac, torch.float64)

    plain = nn.Linear(features, 4, dtype=torch.float64)
    plain.load_state_dict(theirs.state_dict())
    nn.functional.cross_entropy(plain(x), targets).backward()
    torch.testing.assert_close(theirs.bias.grad.flatten(), plain.bias.grad)


def test_isaac_in_a_network():
    """Both leave what flows back alone, so whole networks agree."""
    torch.manual_seed(0)
    x, targets, la = normal(5, 9), torch.arange(5) % 3, 0.1
    theirs = nn.Sequential(isaac.Linear(9, 7, la=la), nn.Tanh(), isaac.Linear(7, 3, la=la)).double()
    ours = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    ours.load_state_dict(theirs.state_dict())
    for layer in (ours[0], ours[2]):
        layer.bias.requires_grad_(False)
    nn.functional.cross_entropy(theirs(x), targets).backward()
    correct(ours, x, lambda z: nn.functional.cross_entropy(z, targets), damping=5 * la)
    for i in (0, 2):
        torch.testing.assert_close(la * ours[i].weight.grad, theirs[i].weight.grad, rtol=1e-10, atol=1e-14)


def curvlinops_moments(model, x, names, with_bias):
    """The un-centred covariances of the layers' inputs, which curvlinops divides by N·positions; features as in
    ``weight.flatten(1)``, the constant 1 last.
    """
    targets = torch.zeros_like(model(x))
    kfac = curvlinops.KFACLinearOperator(
        model,
        nn.MSELoss(reduction="sum"),
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        [(x, targets)],
        fisher_type="forward-only",
        separate_weight_and_bias=not with_bias,
        check_deterministic=False,
    )
    kfac.compute_kronecker_factors()
    return [kfac.state_dict()["input_covariances"][name] for name in names]


def check_moments(layer, x, covariance, with_bias):
    """The covariance of curvlinops against the reference's rows and against the library, both un-normalised."""
    (rows,) = reference.input_rows(layer, x)
    X = np.concatenate([rows, np.ones((len(rows), 1))], axis=1) if with_bias else rows
    theirs = (covariance * len(rows)).numpy()
    assert reference.relative_error(X.T @ X, theirs) <= 1e-14
    (ours,) = second_moment(layer, x, ones=with_bias)
    assert reference.relative_error(reference.to_numpy(ours), theirs) <= 1e-14


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(7, 5), (3, 5), (4, 3, 5)], ids=str)
def test_second_moments_of_linear_layers_are_those_of_curvlinops(shape, with_bias):
    torch.manual_seed(0)
    x = normal(*shape)
    model = nn.Sequential(nn.Linear(5, 4, bias=with_bias), nn.ReLU(), nn.Linear(4, 2, bias=with_bias)).double()
    first, second = curvlinops_moments(model, x, ["0", "2"], with_bias)
    check_moments(model[0], x, first, with_bias)
    check_moments(model[2], model[:2](x), second, with_bias)


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": (1, 3), "padding": (0, 2)},
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 3, "stride": (2, 3), "padding": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 3, "dilation": 2},
        {"kernel_size": 3, "dilation": (1, 2), "padding": (2, 1)},
        {"kernel_size": (2, 3), "stride": (1, 2), "dilation": (3, 1), "padding": (3, 2)},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 3, "padding": "valid"},
        {"kernel_size": 5, "padding": 2},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_second_moments_of_convolutions_are_those_of_curvlinops(options, with_bias):
    torch.manual_seed(0)
    x = normal(3, 2, 7, 6)
    model = nn.Sequential(nn.Conv2d(2, 3, bias=with_bias, **options), nn.Flatten()).double()
    (covariance,) = curvlinops_moments(model, x, ["0"], with_bias)
    check_moments(model[0], x, covariance, with_bias)
