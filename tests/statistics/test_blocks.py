"""``largest_block=``: each block of features by itself, for an m-th of the wanted change, against a naive solve.

The rows are written down by the naive reference; cuts, λ and blocks are worked out here by hand.
"""

import copy

import pytest
import reference
import torch
from torch import nn

import consequent
from consequent.layers import kind_of
from consequent.statistics.blocks import cuts_of

FRACTION = 0.25


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + seed))


def naive(X, dZ, blocks, damping):
    """[outputs, columns]: 1/m · G_J (X_Jᵀ X_J + λ_J)⁻¹ of rows X, for lists of columns."""
    gradient = torch.full((dZ.shape[1], X.shape[1]), torch.nan, dtype=torch.float64)
    for columns in blocks:
        part = X[:, columns]
        name, value = damping
        level = value * part.square().sum() / min(part.shape) if name == "relative_damping" else value
        matrix = part.T @ part + level * torch.eye(len(columns), dtype=torch.float64)
        gradient[:, columns] = torch.linalg.solve(matrix, part.T @ dZ).T / len(blocks)
    return gradient


def with_ones(X):
    return torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)


def corrected(model, *passes, at="step", **options):
    """Backward passes with given output gradients, then a step that changes nothing but the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, loss_reduction="sum", at=at, **options)
    for inputs, output_grad in passes:
        (model(inputs) * output_grad).sum().backward()
    optimizer.step()
    return correction


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


DAMPINGS = [("relative_damping", FRACTION), ("damping", 0.3)]
AT = ["step", "backward"]


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("damping", DAMPINGS, ids=lambda damping: damping[0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("samples", [6, 9, 30])  # fewer than features as well, if more than a block
def test_linear(samples, bias, damping, at):
    model = nn.Linear(11, 2, bias=bias).double()
    x, dZ = normal(samples, 11) + 1, normal(samples, 2)
    correction = corrected(model, (x, dZ), at=at, largest_block=4, **dict([damping]))
    blocks = [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11] if bias else [7, 8, 9, 10]]  # the bias goes with the last
    expected = naive(with_ones(x) if bias else x, dZ, blocks, damping)
    torch.testing.assert_close(model.weight.grad, expected[:, :11])
    if bias:
        torch.testing.assert_close(model.bias.grad, expected[:, 11])
    assert "largest_block=4" in repr(correction)
    assert "solved on the feature side, in blocks" in repr(correction)


CONVOLUTIONS = {
    "padded": (lambda: nn.Conv2d(5, 3, 3, padding=1), (3, 5, 4, 4)),
    "strided": (lambda: nn.Conv2d(5, 3, 3, stride=2), (3, 5, 9, 9)),
    "grouped": (lambda: nn.Conv2d(10, 4, 3, padding=1, groups=2), (3, 10, 4, 4)),
    "one dimension": (lambda: nn.Conv1d(5, 3, 9, padding=4, bias=False), (4, 5, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(5, 3, 3, padding=1), (3, 5, 4, 4)),
}


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_taps_of_a_channel_stay_together(name, at):
    """Nine taps a channel: blocks of at most 20 features are two channels."""
    build, shape = CONVOLUTIONS[name]
    model = build().double()
    x = normal(*shape)
    dZ = normal(*model(x).shape)
    damping = ("relative_damping", FRACTION)
    corrected(model, (x, dZ), at=at, largest_block=20, **dict([damping]))
    operation = kind_of(model).of(model)
    outputs = operation.output_rows(dZ)
    found = operation.weight_matrix(model.weight.grad)
    for group, X in enumerate(reference.input_rows(model, x)):
        X = torch.tensor(X, dtype=torch.float64)
        X = X if model.bias is None else with_ones(X)
        columns = list(range(X.shape[1]))
        expected = naive(X, outputs[group], [columns[:9], columns[9:27], columns[27:]], damping)
        torch.testing.assert_close(found[group], expected[:, :45])
        if model.bias is not None:
            bias = model.bias.grad.view(operation.groups, -1)[group]
            torch.testing.assert_close(bias, expected[:, 45])


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize(("largest_block", "samples"), [(11, 30), (12, 30), (10, 10), (10, 3)])
def test_narrow_layers_and_few_rows_stay_bit_for_bit(largest_block, samples, at):
    """No more than B features, or no more than B rows: the exact form."""
    model = nn.Linear(11, 2)
    other = copy.deepcopy(model)
    passes = [(normal(samples, 11).float(), normal(samples, 2).float())]
    corrected(model, *passes, at=at, largest_block=largest_block)
    corrected(other, *passes, at=at)
    for found, expected in zip(gradients(model), gradients(other), strict=True):
        assert torch.equal(found, expected)


def test_micro_batches_add_up():
    """Few rows at first, then more than a block has features: as one batch."""
    x, dZ = normal(15, 11), normal(15, 2)
    models = [nn.Linear(11, 2).double()]
    models.append(copy.deepcopy(models[0]))
    corrected(models[0], (x, dZ), largest_block=4)
    corrected(models[1], *zip(x.split(3), dZ.split(3), strict=True), largest_block=4)
    for one, other in zip(*map(gradients, models), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("at", AT)
def test_two_layers_with_one_weight(at):
    """Each with a bias of its own, both of which go with the last block."""
    first, second = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
    second.weight = first.weight

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            return torch.cat([self.first(x), self.second(-x.flip(1))])

    model = Both()
    x, dZ = normal(8, 6), normal(16, 2)
    corrected(model, (x, dZ), at=at, largest_block=3, damping=0.3)
    X = torch.cat([x, -x.flip(1)])
    ones = torch.tensor([[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 8, dtype=torch.float64)
    expected = naive(torch.cat([X, ones], 1), dZ, [[0, 1, 2], [3, 4, 5, 6, 7]], ("damping", 0.3))
    torch.testing.assert_close(first.weight.grad, expected[:, :6])
    torch.testing.assert_close(first.bias.grad, expected[:, 6])
    torch.testing.assert_close(second.bias.grad, expected[:, 7])


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_is_left_out(frozen, at):
    model = nn.Linear(6, 2).double()
    getattr(model, frozen).requires_grad_(False)
    x, dZ = normal(20, 6), normal(20, 2)
    corrected(model, (x, dZ), at=at, largest_block=3, damping=0.3)
    if frozen == "bias":
        torch.testing.assert_close(model.weight.grad, naive(x, dZ, [[0, 1, 2], [3, 4, 5]], ("damping", 0.3)))
    else:
        torch.testing.assert_close(model.bias.grad, dZ.sum(0) / 20.3)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_a_gradient_that_was_taken_away(missing):
    model = nn.Linear(6, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, damping=0.3, loss_reduction="sum", largest_block=3)
    x, dZ = normal(20, 6), normal(20, 2)
    (model(x) * dZ).sum().backward()
    getattr(model, missing).grad = None
    optimizer.step()
    if missing == "bias":
        torch.testing.assert_close(model.weight.grad, naive(x, dZ, [[0, 1, 2], [3, 4, 5]], ("damping", 0.3)))
    else:
        torch.testing.assert_close(model.bias.grad, dZ.sum(0) / 20.3)


def test_a_clipped_gradient_is_taken_as_it_is():
    model = nn.Linear(6, 2).double()
    other = copy.deepcopy(model)
    x, dZ = normal(20, 6), normal(20, 2)
    corrected(other, (x, dZ), largest_block=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, loss_reduction="sum", largest_block=3)
    (model(x) * dZ).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    for found, expected in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(found, expected * (1e-3 / norm), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("largest_block", [1, 2, 5, 10])
def test_it_never_overshoots(largest_block, bias):
    """Whatever is wanted of the outputs: what is made of it is between nothing and all, also of features all alike."""
    alike = normal(40, 1) + 0.01 * normal(40, 20)
    model = nn.Linear(20, 40, bias=bias).double()
    corrected(model, (alike, torch.eye(40, dtype=torch.float64)), largest_block=largest_block, damping=1e-6)
    made = alike @ model.weight.grad.T + (model.bias.grad if bias else 0)  # from each wanted change, a column
    eigenvalues = torch.linalg.eigvals(made).real
    assert eigenvalues.max() < 1 + 1e-6
    assert eigenvalues.min() > -1e-6
    assert eigenvalues.max() > 0.9  # and one m-th of that would be needlessly short


@pytest.mark.parametrize("at", AT)
def test_without_damping_each_block_has_its_pseudo_inverse(at):
    model = nn.Linear(6, 2, bias=False).double()
    x, dZ = normal(20, 6), normal(20, 2)
    x[:, 1] = x[:, 0]
    corrected(model, (x, dZ), at=at, largest_block=3, damping=0.0)
    expected = torch.cat([torch.linalg.pinv(part) @ dZ for part in x.split(3, dim=1)]).T / 2
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.parametrize("at", AT)
def test_nan_is_met(at):
    model = nn.Linear(6, 2)
    x, dZ = normal(20, 6).float(), normal(20, 2).float()
    x[3, 4] = torch.nan
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    correction = consequent.attach(optimizer, model, largest_block=3, at=at)
    (model(x) * dZ).sum().backward()
    if at == "backward":
        assert model.weight.grad.isnan().all()
        assert model.bias.grad.isnan().all()
        return
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step()
    assert correction.counters.skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- the cuts -------------------------------------------------------------------------------------------------------


def test_cuts_are_as_equal_as_they_can_be():
    operation = kind_of(nn.Linear(1, 1)).of(nn.Linear(10, 1))
    assert cuts_of(operation, 10, 100, 4) == ((0, 3), (3, 6), (6, 10))
    assert cuts_of(operation, 10, 100, 5) == ((0, 5), (5, 10))
    assert cuts_of(operation, 10, 100, 9) == ((0, 5), (5, 10))
    assert cuts_of(operation, 10, 100, 1) == tuple((place, place + 1) for place in range(10))
    for largest_block, rows in ((10, 100), (9, 9), (None, 100)):
        assert cuts_of(operation, 10, rows, largest_block) == ()
    assert cuts_of(operation, 0, 100, 4) == ()  # only the bias is trained


def test_a_single_channel_is_not_cut():
    layer = nn.Conv2d(1, 2, 5)
    assert cuts_of(kind_of(layer).of(layer), 25, 1000, 4) == ()


# ---- the option -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest_block", [0, -1, 2.0, "2048", True])
def test_what_is_no_number_of_features_is_refused(largest_block):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="largest_block must be a whole number"):
        consequent.attach(optimizer, model, largest_block=largest_block)
    optimizer.param_groups[0]["largest_block"] = largest_block
    with pytest.raises(ValueError, match=r"largest_block \(in a parameter group\) must be"):
        consequent.attach(optimizer, model)


@pytest.mark.parametrize("at", AT)
def test_a_group_has_its_own(at):
    models = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    x, dZ = normal(20, 6), normal(20, 2)
    groups = [{"params": models[0][0].parameters()}, {"params": models[0][1].parameters(), "largest_block": None}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    consequent.attach(optimizer, models[0], loss_reduction="sum", largest_block=3, at=at)
    (models[0](x) * dZ).sum().backward()
    optimizer.step()
    corrected(models[1], (x, dZ), at=at, largest_block=3)
    corrected(models[2], (x, dZ), at=at)
    assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)
    assert torch.equal(models[0][1].weight.grad, models[2][1].weight.grad)
    assert not torch.allclose(models[1][1].weight.grad, models[2][1].weight.grad)


@pytest.mark.parametrize("name", ["CSGD", "CAdam", "CAdamW", "CRMSprop"])
def test_ready_made_optimisers_take_it(name):
    optimizer = getattr(consequent, name)(nn.Linear(4, 1), largest_block=2)
    assert optimizer.correction.largest_block == 2
    assert optimizer.correction.state_dict()["largest_block"] == 2


def test_it_is_saved_and_may_be_set():
    model = nn.Linear(4, 1)
    correction = consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert correction.largest_block is None
    correction.largest_block = 64
    other = consequent.Consequentialism(nn.Linear(4, 1))
    other.load_state_dict(correction.state_dict())
    assert other.largest_block == 64
    older = correction.state_dict()
    del older["largest_block"]
    other.largest_block = 32
    other.load_state_dict(older)
    assert other.largest_block == 32
    with pytest.raises(ValueError, match="whole number"):
        correction.largest_block = 0


def test_averages_have_no_blocks():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="blocks are not averaged"):
        consequent.attach(optimizer, model, largest_block=2, averaging=0.9)
    optimizer.param_groups[0]["largest_block"] = 2
    with pytest.raises(ValueError, match="blocks are not averaged"):
        consequent.attach(optimizer, model, refresh=10)
    del optimizer.param_groups[0]["largest_block"]
    consequent.attach(optimizer, model, refresh=10)
    optimizer.param_groups[0]["largest_block"] = 2
    with pytest.raises(ValueError, match="blocks are not averaged"):
        model(torch.ones(9, 4)).sum().backward()


def test_blocks_cannot_be_differentiated_in_turn():
    model = nn.Linear(6, 2)
    consequent.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1), model, largest_block=3, at="backward")
    with pytest.raises(RuntimeError, match=r"largest_block=3.*create_graph=True"):
        model(torch.ones(20, 6)).sum().backward(create_graph=True)
    assert optimizer is not None


def test_foresight_sees_them():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, largest_block=3, foresight=True)
    model(normal(20, 6)).square().sum().backward()
    optimizer.step()
    assert len(correction.foresight()) == 2
