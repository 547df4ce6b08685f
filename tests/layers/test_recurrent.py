"""Recurrent layers and cells against loops over time."""

import copy
import random

import pytest
import reference
import torch
from models.expected import check_same_grads
from recurrent_reference import Loops
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import consequent

AT = ["step", "backward"]
KINDS = {
    "lstm": lambda *sizes, **options: nn.LSTM(*sizes, **options),
    "gru": lambda *sizes, **options: nn.GRU(*sizes, **options),
    "rnn": lambda *sizes, **options: nn.RNN(*sizes, **options),
    "rnn-relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "rnn-relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}
OPTIONS = {
    "one": {},
    "no-bias": {"bias": False},
    "stacked": {"num_layers": 2},
    "both-ways": {"bidirectional": True},
    "both-ways-stacked-no-bias": {"num_layers": 3, "bidirectional": True, "bias": False},
    "batch-first": {"batch_first": True, "num_layers": 2, "bidirectional": True},
}
# Fewer rows than columns, more than some parts have, more than any has.
SHAPES = {"few-rows": (2, 1), "some-rows": (3, 2), "many-rows": (7, 4)}
DAMPINGS = {"absolute": 0.03, "relative": ("relative", 0.2)}


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weighted(outputs):
    """A loss whose gradient differs for every output."""
    return sum(
        (0.5 * (out - torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).square()).sum()
        for out in outputs
    )


def attached(module, at, damping, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"loss_reduction": "sum", **reference.damping_options(damping), **options}
    correction = consequent.attach(optimizer, module, at=at, **options)
    vars(module)["kept"] = optimizer
    return correction


def twins(make, seed=0):
    torch.manual_seed(seed)
    module = make().double()
    return module, copy.deepcopy(module)


def samples_of(x, module):
    """``[time, in]`` each."""
    return list((x if getattr(module, "batch_first", False) else x.transpose(0, 1)).unbind(0))


def check(module, twin, loops, damping, correction, scale=1.0):
    correction.step()
    loops.correct(damping, scale)
    check_same_grads(module, twin)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("damping", DAMPINGS.values(), ids=DAMPINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind, options, shape, damping, at):
    module, twin = twins(lambda: KINDS[kind](3, 4, **options))
    x = normal(*shape, 3)
    if options.get("batch_first"):
        x = x.transpose(0, 1)
    correction = attached(module, at, damping)
    assert list(correction.corrected) == [""]
    outputs = samples_of(module(x)[0], module)
    weighted(outputs).backward()
    loops = Loops(twin)
    expected = loops(samples_of(x, twin))
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
    weighted(expected).backward()
    check(module, twin, loops, damping, correction)


@pytest.mark.parametrize("seed", range(40))
def test_layers_at_random(seed):
    """All options at once, sizes and lengths at random, in both modes."""
    choice = random.Random(seed)
    kind, size = choice.choice(list(KINDS)), choice.randint(2, 5)
    options = {"num_layers": choice.randint(1, 3)}
    options |= {name: choice.random() < 0.5 for name in ("bidirectional", "bias", "batch_first")}
    if kind == "lstm" and choice.random() < 0.5:
        options["proj_size"] = choice.randint(1, size - 1)
    width, damping = choice.randint(1, 5), choice.choice([1e-4, 0.03, 2.0, ("relative", 0.1)])
    lengths = [choice.randint(1, 6) for _ in range(choice.randint(1, 5))]
    is_packed = choice.random() < 0.5
    if not is_packed:
        lengths = [lengths[0]] * len(lengths)
    samples = [normal(length, width, seed=number) for number, length in enumerate(lengths)]
    module, twin = twins(lambda: KINDS[kind](width, size, **options), seed)
    correction = attached(module, choice.choice(AT), damping)
    if is_packed:
        padded, _ = pad_packed_sequence(module(pack_sequence(samples, enforce_sorted=False))[0])
        outputs = [padded[:length, number] for number, length in enumerate(lengths)]
    else:
        outputs = samples_of(module(torch.stack(samples, 0 if options["batch_first"] else 1))[0], module)
    weighted(outputs).backward()
    loops = Loops(twin)
    weighted(loops(samples)).backward()
    check(module, twin, loops, damping, correction)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_over_time(kind, bias, steps, at):
    """Each call is a use; together they are what a layer is in one call."""
    module, twin = twins(lambda: CELLS[kind](3, 4, bias=bias))
    x = normal(steps, 3, 3)
    correction = attached(module, at, 0.03)
    state, outputs = None, []
    for time in range(steps):
        state = module(x[time], state)
        outputs.append(state[0] if kind == "lstm" else state)
    outputs = list(torch.stack(outputs, dim=1).unbind(0))
    weighted(outputs).backward()
    loops = Loops(twin)
    expected = loops(list(x.unbind(1)))
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
    weighted(expected).backward()
    check(module, twin, loops, 0.03, correction)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", KINDS)
def test_states_to_begin_with(kind, at):
    module, twin = twins(lambda: KINDS[kind](3, 4, num_layers=2, bidirectional=True))
    x, h, c = normal(5, 2, 3), normal(4, 2, 4, seed=1), normal(4, 2, 4, seed=2)
    mine, theirs = h.clone().requires_grad_(), h.clone().requires_grad_()
    correction = attached(module, at, 0.03)
    outputs, last = module(x, (mine, c) if kind == "lstm" else mine)
    ends = last if kind == "lstm" else (last,)
    assert all(end.shape == h.shape for end in ends)
    outputs = samples_of(outputs, module)
    weighted(outputs).backward()
    loops = Loops(twin)
    weighted(loops(samples_of(x, twin), (theirs, c if kind == "lstm" else None))).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    check(module, twin, loops, 0.03, correction)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_without_a_batch(kind, at):
    module, twin = twins(lambda: KINDS[kind](3, 4, batch_first=True, num_layers=2))
    x = normal(9, 3)
    correction = attached(module, at, 0.03, loss_reduction="mean")
    outputs = module(x)[0]
    weighted([outputs]).backward()
    loops = Loops(twin)
    weighted(loops([x])).backward()
    check(module, twin, loops, 0.03, correction)
    assert correction.samples == 1


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("lengths", [(5, 3, 3, 1), (2, 4, 1, 4), (3,)], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["one"], OPTIONS["both-ways"], OPTIONS["both-ways-stacked-no-bias"]])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind, options, lengths, at):
    module, twin = twins(lambda: KINDS[kind](3, 4, **options))
    samples = [normal(length, 3, seed=number) for number, length in enumerate(lengths)]
    correction = attached(module, at, 0.03, loss_reduction="mean")
    packed, _ = module(pack_sequence(samples, enforce_sorted=False))
    padded, _ = pad_packed_sequence(packed)
    outputs = [padded[:length, number] for number, length in enumerate(lengths)]
    (weighted(outputs) / len(lengths)).backward()
    loops = Loops(twin)
    expected = loops(samples)
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
    (weighted(expected) / len(lengths)).backward()
    check(module, twin, loops, 0.03, correction, scale=len(lengths))
    assert correction.samples == len(lengths)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_projected_hidden_states(options, at):
    """The projection itself keeps its plain gradient."""
    module, twin = twins(lambda: nn.LSTM(3, 5, proj_size=2, **options))
    x = normal(6, 4, 3)
    correction = attached(module, at, 0.03)
    outputs = samples_of(module(x)[0], module)
    weighted(outputs).backward()
    loops = Loops(twin)
    expected = loops(samples_of(x, twin))
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
    weighted(expected).backward()
    check(module, twin, loops, 0.03, correction)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers(kind, at):
    """The same numbers are drawn as by the stack in one call, and in evaluation none are."""
    module, twin = twins(lambda: KINDS[kind](3, 4, num_layers=3, bidirectional=True, dropout=0.4))
    x = normal(5, 2, 3)
    torch.manual_seed(5)
    plain = module(x)[0]
    torch.manual_seed(5)
    masks = [torch.dropout(torch.ones(5, 2, 8, dtype=torch.float64), 0.4, True) for _ in range(2)]
    correction = attached(module, at, 0.03)
    torch.manual_seed(5)
    watched = module(x)[0]
    assert torch.equal(watched, plain)
    weighted(samples_of(watched, module)).backward()
    loops = Loops(twin)
    expected = loops(samples_of(x, twin), masks=[[mask[:, sample] for mask in masks] for sample in range(2)])
    weighted(expected).backward()
    check(module, twin, loops, 0.03, correction)
    assert torch.equal(module.eval()(x)[0], twin.eval()(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_outputs_are_those_of_torch(kind, options, dtype):
    module = KINDS[kind](3, 4, **options).to(dtype)
    twin = copy.deepcopy(module)
    attached(module, "step", 0.03)
    x = normal(5, 2, 3).to(dtype)
    mine, theirs = module(x), twin(x)
    for a, b in zip([mine[0], *_tensors(mine[1])], [theirs[0], *_tensors(theirs[1])], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=1e-7)


def _tensors(state):
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_twice_in_a_pass(kind, at):
    module, twin = twins(lambda: KINDS[kind](4, 4, num_layers=2))
    x = normal(3, 2, 4)
    correction = attached(module, at, 0.03)
    weighted(samples_of(module(module(x)[0])[0], module)).backward()
    loops = Loops(twin)
    weighted(loops(loops(samples_of(x, twin)))).backward()
    check(module, twin, loops, 0.03, correction)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3), (5, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_are_one_batch(kind, sizes):
    module, twin = twins(lambda: KINDS[kind](3, 4))
    x = normal(4, sum(sizes), 3)
    correction = attached(module, "step", 0.03)
    for part in x.split(sizes, dim=1):
        weighted(samples_of(module(part)[0], module)).backward()
    loops = Loops(twin)
    for part in x.split(sizes, dim=1):
        weighted(loops(samples_of(part, twin))).backward()
    check(module, twin, loops, 0.03, correction)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("shape", [(2, 1), (7, 4)], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_damping(kind, shape, at):
    module, twin = twins(lambda: KINDS[kind](3, 4))
    x = normal(*shape, 3)
    correction = attached(module, at, 0.0)
    weighted(samples_of(module(x)[0], module)).backward()
    loops = Loops(twin)
    weighted(loops(samples_of(x, twin))).backward()
    check(module, twin, loops, 0.0, correction)


FROZEN = [("weight_ih_l0",), ("weight_hh_l0",), ("bias_ih_l0",), ("weight_ih_l0", "weight_hh_l0"), ("bias_hh_l0",)]


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("names", FROZEN, ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_take_no_part(kind, names, at):
    """Their columns are left out of the solve; a bias that is alone moves by all of what the sum should."""
    module, twin = twins(lambda: KINDS[kind](3, 4))
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    x = normal(6, 3, 3)
    correction = attached(module, at, 0.03)
    weighted(samples_of(module(x)[0], module)).backward()
    correction.step()
    loops = Loops(twin)
    weighted(loops(samples_of(x, twin))).backward()
    unit = loops.units[0][0]
    plain = {name: p.grad.clone() for name, p in twin.named_parameters()}
    rows = {"ih": torch.stack([x for x, _, _ in unit.seen]), "hh": torch.stack([h for _, h, _ in unit.seen])}
    ones = torch.ones(len(unit.seen), 1, dtype=torch.float64)
    size = plain["weight_ih_l0"].shape[0]
    parts = [(slice(0, size), ("ih", "hh"))]
    if kind == "gru":
        parts = [(slice(0, 8), ("ih", "hh")), (slice(8, 12), ("ih",)), (slice(8, 12), ("hh",))]
    for outputs, ends in parts:
        weights = [f"weight_{end}_l0" for end in ends if f"weight_{end}_l0" not in names]
        biases = [f"bias_{end}_l0" for end in ends if f"bias_{end}_l0" not in names]
        columns = [rows[name.split("_")[1]] for name in weights] + ([ones] if biases else [])
        gradients = [plain[name][outputs] for name in weights] + [plain[b][outputs, None] for b in biases[:1]]
        if not columns:
            continue
        X, G = torch.cat(columns, 1), torch.cat(gradients, 1)
        new = torch.linalg.solve(X.T @ X + 0.03 * torch.eye(X.shape[1], dtype=X.dtype), G.T).T
        for name in weights:
            width = plain[name].shape[1]
            torch.testing.assert_close(module.get_parameter(name).grad[outputs], new[:, :width])
            new = new[:, width:]
        for name in biases:
            torch.testing.assert_close(module.get_parameter(name).grad[outputs], new[:, 0] / len(biases))
    assert all(module.get_parameter(name).grad is None for name in names)


@pytest.mark.parametrize("damping", [1e-6, 1e-2, ("relative", 0.1)], ids=str)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_in_single_precision(kind, at, damping):
    """The rounding of the plain gradient is not divided by λ."""
    module, twin = twins(lambda: KINDS[kind](20, 16))
    module.float()
    x = normal(3, 2, 20)
    correction = attached(module, at, damping)
    weighted(samples_of(module(x.float())[0], module)).backward()
    correction.step()
    loops = Loops(twin)
    weighted(loops(samples_of(x, twin))).backward()
    loops.correct(damping)
    for name, parameter in module.named_parameters():
        expected = reference.to_numpy(twin.get_parameter(name).grad)
        assert reference.relative_error(reference.to_numpy(parameter.grad), expected) < 1e-4, name
