"""What ``damping=`` and ``relative_damping=`` mean, and what happens without either or with both.

λ is worked out here by torch and by hand: what the inputs' matrix is, is written down for each layer.
"""

import copy

import kinds
import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from kinds import KINDS, LR, READY, hooks_on, make_model, train, train_expected
from models.expected import check_same, twin_of
from torch import nn
from torch.optim import SGD, Adam, RMSprop

import consequent
from consequent.maths.damping import DEFAULT, DEFAULT_OF_OTHERS
from consequent.options.parameter_groups import default_damping

FRACTION = 0.25


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def with_ones(X):
    return torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)


def solved(X, dZ, fraction=FRACTION):
    """[outputs, columns], with λ = ρ · trace(X Xᵀ) / min(N, D)."""
    level = fraction * X.square().sum() / min(X.shape)
    return torch.linalg.solve(X.T @ X + level * torch.eye(X.shape[1], dtype=X.dtype), X.T @ dZ).T


def corrected(model, *passes, **options):
    """Backward passes with given output gradients, then a step that changes nothing but the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, relative_damping=FRACTION, loss_reduction="sum", **options)
    for inputs, output_grad in passes:
        (model(inputs) * output_grad).sum().backward()
    optimizer.step()


# ---- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("samples", [1, 4, 6, 7, 30])
def test_linear(samples, bias, at):
    model = nn.Linear(6, 2, bias=bias).double()
    x, dZ = 3 * normal(samples, 6), normal(samples, 2)
    corrected(model, (x, dZ), at=at)
    expected = solved(with_ones(x) if bias else x, dZ)
    torch.testing.assert_close(model.weight.grad, expected[:, :6])
    if bias:
        torch.testing.assert_close(model.bias.grad, expected[:, 6])


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("size", [3, 7], ids=["few rows", "many rows"])
def test_every_group_of_a_convolution_has_its_own(size, at):
    """The second group's inputs are a thousand times larger: a common λ would be seen."""
    model = nn.Conv2d(4, 6, 3, groups=2).double()
    x = normal(2, 4, size, size)
    x[:, 2:] *= 1e3
    dZ = normal(2, 6, size - 2, size - 2)
    corrected(model, (x, dZ), at=at)
    for group in range(2):
        X = with_ones(F.unfold(x[:, 2 * group : 2 * group + 2], 3).mT.reshape(-1, 18))
        rows = dZ[:, 3 * group : 3 * group + 3].permute(0, 2, 3, 1).reshape(-1, 3)
        expected = solved(X, rows)
        place = slice(3 * group, 3 * group + 3)
        torch.testing.assert_close(model.weight.grad[place].flatten(1), expected[:, :18])
        torch.testing.assert_close(model.bias.grad[place], expected[:, 18])


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("channels", [2, 12], ids=["many rows", "few rows"])
def test_transposed_convolution(channels, at):
    """Every pixel of a window of its own (stride = kernel): a row per output position, of the pixel that reaches it."""
    model = nn.ConvTranspose1d(channels, 2, 3, stride=3).double()
    x, dZ = normal(2, channels, 4), normal(2, 2, 12)
    corrected(model, (x, dZ), at=at)
    X = torch.zeros(2, 12, channels, 3, dtype=torch.float64)
    for position in range(12):
        X[:, position, :, position % 3] = x[:, :, position // 3]
    expected = solved(with_ones(X.reshape(24, -1)), dZ.mT.reshape(24, 2))
    torch.testing.assert_close(model.weight.grad, expected[:, :-1].reshape(2, channels, 3).transpose(0, 1))
    torch.testing.assert_close(model.bias.grad, expected[:, -1])


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("indices", [[1, 2, 2], [0, 1, 2, 2, 3, 3, 3, 4, 1, 0]], ids=["few rows", "many rows"])
def test_embedding(indices, at):
    """One-hot rows: their trace is N, and ``λ = ρ N / min(N, D)``."""
    model = nn.Embedding(5, 3, dtype=torch.float64)
    indices = torch.tensor(indices)
    dZ = normal(len(indices), 3)
    corrected(model, (indices, dZ), include=[nn.Embedding], at=at)
    torch.testing.assert_close(model.weight.grad, solved(F.one_hot(indices, 5).double(), dZ).T)


def test_several_uses_count_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2).double()

        def forward(self, x):
            return torch.cat([self.layer(x[:3]), self.layer(x[3:])])

    for at in ("step", "backward"):
        model = Twice()
        x, dZ = normal(8, 6), normal(8, 2)
        corrected(model, (x, dZ), at=at)
        torch.testing.assert_close(model.layer.weight.grad, solved(with_ones(x), dZ)[:, :6])


def test_micro_batches_count_together_at_the_step_and_by_themselves_in_the_backward_pass():
    x, dZ = normal(11, 6), normal(11, 2)
    parts = list(zip(x.split([2, 9]), dZ.split([2, 9]), strict=True))
    model = nn.Linear(6, 2).double()
    corrected(model, *parts)
    torch.testing.assert_close(model.weight.grad, solved(with_ones(x), dZ)[:, :6])
    model = nn.Linear(6, 2).double()
    corrected(model, *parts, at="backward")
    alone = sum(solved(with_ones(rows), grads) for rows, grads in parts)
    torch.testing.assert_close(model.weight.grad, alone[:, :6])


def test_several_dense_layers_at_once():
    """Layers with as many samples are solved for together on a CPU, and have a λ each."""
    model = nn.Sequential(*[nn.Linear(size, size + 3, bias=False).double() for size in (7, 10, 13)])
    x, dZ = 10 * normal(5, 7), normal(5, 16)
    inputs = [x, model[0](x).detach(), model[:2](x).detach()]
    grads = [dZ @ model[2].weight.detach() @ model[1].weight.detach(), dZ @ model[2].weight.detach(), dZ]
    corrected(model, (x, dZ))
    for layer, X, wanted in zip(model, inputs, grads, strict=True):
        torch.testing.assert_close(layer.weight.grad, solved(X, wanted))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("samples", [3, 20])
def test_the_size_of_the_inputs_does_not_matter(samples, scale):
    """Outputs move as far, whatever unit the inputs are in."""
    x, dZ = normal(samples, 6), normal(samples, 2)
    moves = []
    for inputs in (x, scale * x):
        model = nn.Linear(6, 2, bias=False).double()
        corrected(model, (inputs, dZ))
        moves.append(inputs @ model.weight.grad.T)
    torch.testing.assert_close(*moves)


def test_the_number_of_rows_does_not_matter_where_there_are_more_than_columns():
    x, dZ = normal(20, 6), normal(20, 2)
    grads = []
    for times in (1, 5):
        model = nn.Linear(6, 2).double()
        corrected(model, (x.repeat(times, 1), dZ.repeat(times, 1)))
        grads.append(model.weight.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("bags", [[0, 2], [0, 2, 4, 5]])
def test_an_edited_gradient_of_bags_is_shortened_by_the_trace_and_what_is_added_to_it(bags):
    """An index that is twice in a bag counts as 2, whose square is 4."""
    model = nn.EmbeddingBag(9, 3, mode="sum", dtype=torch.float64)
    offsets = torch.tensor(bags)
    indices = torch.tensor([1, 1, 2, 8, 4, 5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, relative_damping=FRACTION, loss_reduction="sum", include=[nn.EmbeddingBag])
    (model(indices, offsets) * normal(len(bags), 3)).sum().backward()
    model.weight.grad[1, 0] += 1.0
    edited = model.weight.grad.clone()
    with pytest.warns(consequent.ConsequentWarning):
        optimizer.step()
    X = torch.zeros(len(bags), 9, dtype=torch.float64)
    for bag, (first, last) in enumerate(zip(bags, [*bags[1:], len(indices)], strict=True)):
        for index in indices[first:last]:
            X[bag, index] += 1
    trace = X.square().sum()
    torch.testing.assert_close(model.weight.grad, edited / (trace + FRACTION * trace / min(X.shape)))


# ---- the default ----------------------------------------------------------------------------------------------------


def test_the_tests_default_is_the_librarys():
    weight = nn.Parameter(torch.ones(1))
    for optimizer, default in ((SGD([weight], lr=0.1), DEFAULT), (Adam([weight]), DEFAULT_OF_OTHERS)):
        assert ("relative", default.value) == kinds.default_damping(optimizer)
        assert default.relative
        assert default_damping(optimizer) == default
    assert default_damping(None) == DEFAULT


@pytest.mark.parametrize("name", KINDS)
def test_neither_is_the_default(name):
    model = make_model()
    twin = twin_of(model)
    train(model, KINDS[name].make(model))
    train_expected(twin, KINDS[name].make_plain(twin))
    check_same(model, twin)


def test_the_default_is_that_of_the_optimiser_that_steps():
    """Also where several are attached together, and where a correction is made before its optimiser."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    correction = consequent.Consequentialism(model)
    assert correction.relative_damping == DEFAULT.value
    first, second = SGD(model[0].parameters(), lr=0.1), Adam(model[1].parameters())
    correction.attach([first, second])
    of = [correction._groups.damping_of(layer.weight) for layer in model]
    assert of == [DEFAULT, DEFAULT_OF_OTHERS]
    assert "relative_damping=0.1 and relative_damping=1" in repr(correction)
    correction.relative_damping = 0.3
    assert {correction._groups.damping_of(layer.weight).value for layer in model} == {0.3}


def rows_of(correction):
    """What is printed of each corrected layer."""
    lines = repr(correction).splitlines()[2 : 2 + len(correction.corrected)]
    return dict(line.split(maxsplit=1) for line in lines)


def test_of_several_dampings_it_is_printed_which_layer_has_which():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 2), "rnn": nn.GRU(3, 4, num_layers=2)})
    model["b"].weight.requires_grad_(False)  # its bias's damping counts
    inner = [parameter for name, parameter in model["rnn"].named_parameters() if name.endswith("l0")]
    outer = [parameter for name, parameter in model["rnn"].named_parameters() if name.endswith("l1")]
    first = SGD([{"params": model["a"].parameters()}, {"params": inner, "damping": 0.4}], lr=0.1)
    second = Adam([model["b"].bias, *outer])
    correction = consequent.attach([first, second], model)
    rows = rows_of(correction)
    assert rows["a"].endswith(", relative_damping=0.1")
    assert rows["b"].endswith(": the weight is frozen, relative_damping=1")
    assert rows["rnn"].endswith(", damping=0.4 and relative_damping=1")
    first.param_groups[0]["damping"] = -1
    assert "unusable" in repr(correction)
    first.param_groups[0]["damping"] = second.param_groups[0]["damping"] = 0.4
    assert "Consequentialism(damping=0.4, " in repr(correction)
    assert not any("damping" in row for row in rows_of(correction).values())


@pytest.mark.parametrize("make", [RMSprop, torch.optim.NAdam, torch.optim.Adagrad])
def test_all_but_sgd_have_the_other_default(make):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    assert consequent.attach(optimizer, model).relative_damping == DEFAULT_OF_OTHERS.value


def test_none_is_not_given():
    fraction = reference.DEFAULT_DAMPING[1]
    for options, damping, relative in (
        ({"damping": None, "relative_damping": None}, None, fraction),
        ({"damping": 0.3, "relative_damping": None}, 0.3, None),
        ({"damping": None, "relative_damping": 0.3}, None, 0.3),
    ):
        correction = consequent.Consequentialism(nn.Linear(3, 2), **options)
        assert (correction.damping, correction.relative_damping) == (damping, relative)


# ---- both -----------------------------------------------------------------------------------------------------------

BOTH = {"damping": 0.2, "relative_damping": 0.3}
NAMES_BOTH = r"damping=0\.2 and relative_damping=0\.3"


def test_both_are_refused_by_attach():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match=f"{NAMES_BOTH}: give one"):
        consequent.attach(optimizer, model, **BOTH)
    with pytest.raises(ValueError, match=f"{NAMES_BOTH}: give one"):
        consequent.Consequentialism(model, **BOTH)
    assert hooks_on(model, optimizer) == []


@pytest.mark.parametrize("name", READY)
def test_both_are_refused_by_ready_made_optimisers(name):
    model = make_model()
    with pytest.raises(ValueError, match=f"{NAMES_BOTH}: give one"):
        KINDS[name].make(model, **BOTH)
    assert hooks_on(model) == []


@pytest.mark.parametrize("name", ["CSGD", "SGD"])
def test_both_are_refused_in_a_parameter_group(name):
    model = make_model()
    with pytest.raises(ValueError, match=rf"{NAMES_BOTH} \(in a parameter group\): give one"):
        KINDS[name].make(model, [{"params": model.parameters(), **BOTH}])
    assert hooks_on(model) == []


@pytest.mark.parametrize("name", ["CSGD", "SGD"])
def test_both_in_a_parameter_group_are_refused_in_the_next_iteration_if_they_come_later(name):
    model = make_model()
    optimizer = KINDS[name].make(model, [{"params": list(model.parameters()), "damping": 0.2}])
    optimizer.param_groups[0]["relative_damping"] = 0.3
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=NAMES_BOTH):
        train(model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# ---- parameter groups, and changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [0.2, ("relative", 0.2)], ids=str)
@pytest.mark.parametrize("own", [0.5, ("relative", 0.5)], ids=str)
@pytest.mark.parametrize("name", ["CSGD", "SGD"])
def test_a_group_may_have_its_own_of_either_kind(name, own, default):
    model = make_model()
    twin = twin_of(model)

    def groups(network):
        head = {"params": list(network[2:].parameters()), **reference.damping_options(own)}
        return [{"params": list(network[0].parameters())}, head]

    train(model, KINDS[name].make(model, groups(model), **reference.damping_options(default)))
    train_expected(twin, KINDS[name].make_plain(twin, groups(twin)), damping=default)
    check_same(model, twin)


def set_damping(correction, damping):
    for option, value in reference.damping_options(damping).items():
        setattr(correction, option, value)


@pytest.mark.parametrize("ready", [True, False], ids=["CSGD", "attach"])
def test_setting_one_replaces_the_other(ready):
    """Groups with a damping of their own keep it."""
    model = make_model()
    twin = twin_of(model)

    def groups(network):
        return [
            {"params": list(network[0].parameters())},
            {"params": list(network[2:].parameters()), "damping": 0.5},
        ]

    plain = torch.optim.SGD(groups(twin), lr=LR)
    if ready:
        optimizer = consequent.CSGD(model, groups(model), lr=LR)
        correction = optimizer.correction
    else:
        optimizer = torch.optim.SGD(groups(model), lr=LR)
        correction = consequent.attach(optimizer, model)
    assert (correction.damping, correction.relative_damping) == (None, reference.DEFAULT_DAMPING[1])
    for damping in (0.3, ("relative", 0.4), ("relative", 0.7), 2.0):
        set_damping(correction, damping)
        shown = reference.damping_options(damping)
        assert (correction.damping, correction.relative_damping) == (
            shown.get("damping"),
            shown.get("relative_damping"),
        )
        train(model, optimizer)
        train_expected(twin, plain, damping=damping)
        check_same(model, twin)


@pytest.mark.parametrize("option", ["damping", "relative_damping"])
@pytest.mark.parametrize(("value", "error"), [(-1.0, ValueError), ("0.1", TypeError), (None, TypeError)])
def test_setting_what_is_no_damping_changes_nothing(option, value, error):
    correction = consequent.Consequentialism(nn.Linear(3, 2), damping=0.3)
    with pytest.raises(error, match=option):
        setattr(correction, option, value)
    assert (correction.damping, correction.relative_damping) == (0.3, None)


# ---- state dicts ----------------------------------------------------------------------------------------------------

OLD = {"loss_reduction": "mean", "counters": {"steps": 7, "skipped": 0, "rescued": 0, "fallen_back": 0, "edited": 0}}


@pytest.mark.parametrize("damping", [0.3, ("relative", 0.3)], ids=str)
def test_a_state_dict_takes_either_to_a_correction_with_the_other(damping):
    saved = consequent.Consequentialism(nn.Linear(3, 2), **reference.damping_options(damping)).state_dict()
    for other in (5.0, ("relative", 5.0)):
        correction = consequent.Consequentialism(nn.Linear(3, 2), **reference.damping_options(other))
        with pytest.warns(consequent.ConsequentWarning, match="takes the place of"):
            correction.load_state_dict(saved)
        assert correction.state_dict() == saved


def test_an_old_state_with_an_absolute_damping_stays_absolute(recwarn):
    model = make_model()
    twin = twin_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model)
    correction.load_state_dict({**OLD, "damping": 0.3, "relative_damping": None})
    assert (correction.damping, correction.relative_damping, correction.counters.steps) == (0.3, None, 7)
    assert len(recwarn) == 0
    train(model, optimizer)
    train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR), damping=0.3)
    check_same(model, twin)


def test_an_old_state_with_a_relative_damping_warns_and_is_taken():
    """In the first version it stood beside an absolute one, which did not count."""
    correction = consequent.Consequentialism(nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=r"relative_damping=0\.2 was meant as a fraction of the inputs' mean squared"):
        correction.load_state_dict({**OLD, "damping": 0.01, "relative_damping": 0.2})
    assert (correction.damping, correction.relative_damping, correction.counters.steps) == (None, 0.2, 7)


def test_a_state_with_both_or_an_old_one_with_neither_is_refused():
    correction = consequent.Consequentialism(nn.Linear(3, 2), damping=0.3)
    before = correction.state_dict()
    for other, message in ((BOTH, NAMES_BOTH), ({"version": 2, "damping": None}, "has neither")):
        with pytest.raises(ValueError, match=message):
            correction.load_state_dict({**before, **other})
        assert correction.state_dict() == before
    correction.load_state_dict({**before, "damping": None})  # the default, which leaves what was chosen
    assert correction.state_dict() == before


@pytest.mark.parametrize("damping", [0.3, ("relative", 0.3)], ids=str)
def test_a_ready_made_optimisers_state_takes_either_to_one_with_the_other(damping):
    saved = consequent.CSGD(make_model(), lr=LR, **reference.damping_options(damping)).state_dict()
    for other in (5.0, ("relative", 5.0)):
        model = make_model()
        twin = twin_of(model)
        optimizer = consequent.CSGD(model, lr=LR, **reference.damping_options(other))
        optimizer.load_state_dict(copy.deepcopy(saved))
        train(model, optimizer)
        train_expected(twin, torch.optim.SGD(twin.parameters(), lr=LR), damping=damping)
        check_same(model, twin)
