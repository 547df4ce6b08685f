"""All layers of a step by the kernels together, against the same step layer by layer."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import consequent
from consequent.engines.inverse_factor import InverseFactor
from consequent.maths.damping import Damping
from consequent.reports.counters import NAMES
from consequent.statistics.kept_inverses import Kept, invert
from consequent.statistics.moment import Factor, Moment

pytest.importorskip("triton")

from consequent.engines.engine import Work
from consequent.engines.gpu.by_kernels import FusedStep
from consequent.engines.gpu.kernels.factor import inverse_factor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * 16, 20),
        nn.ReLU(),
        nn.Linear(20, 20, bias=False),
        nn.Linear(20, 4),
    ).to(DEVICE)


def backward(model, optimizer, bad=None):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 2, 4, 4, generator=generator).to(DEVICE)
    if bad is not None:
        inputs[0, 0, 0, 0] = bad
    optimizer.zero_grad()
    model(inputs).square().mean().backward()


def attached(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, **options)
    backward(model, optimizer)
    optimizer.step()  # looks at every layer
    return optimizer, correction


def as_factor(moment, damping, factor):
    """As another rank would send it."""
    return Factor(moment.uses, moment.features, moment.biases, moment.rows, inverse=factor)


def as_kept(moment, damping, factor):
    """As an average would be kept, for a step with twice the rows: their moment is halved, and grows back."""
    level = damping.level(moment.rows, moment.columns)
    if not damping.relative:
        level = replace(level, value=level.value / 2)
    inverses = invert(torch.stack([moment.matrix / 2, moment.matrix / 2]), level)
    return Kept(moment.uses, moment.features, moment.biases, moment.rows, inverses, place=1, growth=2.0)


def corrected_together(model, damping, *, change=None, bad=None, becomes=None):
    """The gradients that the kernels make, the counts, and whether NaN or inf was met."""
    name = "relative_damping" if damping.relative else "damping"
    optimizer, correction = attached(model, **{name: damping.value})
    backward(model, optimizer, bad)
    if change is not None:
        change(model)
    fused = FusedStep(model[0].weight.device)
    records = correction._parts.corrector.filled_records()
    for record in records:
        moment = record.statistic
        if isinstance(moment, Moment):
            factor = moment.factor
            if factor is None:
                level = damping.level(record.rows, record.columns)
                inverse, status = inverse_factor(moment.matrix, level.value, of_trace=level.of_trace)
                factor = damping, InverseFactor(inverse, status)
            record.statistic = becomes(moment, damping, factor) if becomes else replace(moment, factor=factor)
        assert fused.take(Work(record, damping, may_wait=False, scale=8.0))
    assert sorted(fused.sides.values()) == ["features", "samples", "samples", "samples"]
    counts = torch.zeros(len(NAMES), dtype=torch.int64, device=DEVICE)
    fused.prepare()
    is_bad = bool(fused.is_bad)
    fused.write(counts, counts_step=True, counts_skip=True)
    return {name: p.grad.clone() for name, p in model.named_parameters()}, counts.tolist(), is_bad


def corrected_one_by_one(model, damping, change=None):
    name = "relative_damping" if damping.relative else "damping"
    optimizer, correction = attached(model, **{name: damping.value}, check=True)
    backward(model, optimizer)
    if change is not None:
        change(model)
    correction.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("becomes", [None, as_factor, as_kept])
@pytest.mark.parametrize("change", [None, clipped])
@pytest.mark.parametrize("damping", [Damping(0.1), Damping(0.05, relative=True)], ids=str)
def test_kernels_do_what_the_plain_form_does(damping, change, becomes):
    model = network()
    expected = corrected_one_by_one(copy.deepcopy(model), damping, change)
    actual, counts, is_bad = corrected_together(model, damping, change=change, becomes=becomes)
    assert not is_bad
    assert counts == [1, 0, 0, 0, 0, 0, 0]
    for name, gradient in expected.items():
        # The first layer's inputs are rounded to TF32 on a GPU.
        tolerance = 1e-3 if name.startswith("0.") and DEVICE.type == "cuda" else 2e-5
        assert (actual[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_written_but_zeros_where_a_batch_is_not_finite(bad):
    gradients, counts, is_bad = corrected_together(network(), Damping(0.1), bad=bad)
    assert is_bad
    assert counts == [1, 1, 0, 0, 0, 0, 0]
    assert all(not gradient.any() for gradient in gradients.values())


def test_an_edited_gradient_is_shortened_and_counted():
    def edited(model):
        model[3].weight.grad += torch.linspace(-1, 1, 48, device=DEVICE)

    _, counts, is_bad = corrected_together(network(), Damping(0.1), change=edited)
    assert not is_bad
    assert counts == [1, 0, 0, 0, 1, 0, 0]


def test_what_kernels_do_not_take():
    model = network()
    optimizer, correction = attached(model, damping=0.1)
    backward(model, optimizer)
    conv, first, *_ = sorted(correction._parts.corrector.filled_records(), key=lambda record: -record.weight.ndim)
    fused = FusedStep(model[0].weight.device)
    assert not fused.take(Work(first, Damping(0.0), may_wait=False, scale=8.0))  # the pseudo-inverse
    factor = Damping(0.3), InverseFactor(torch.eye(19, device=DEVICE)[None], torch.ones(1, 4, device=DEVICE))
    conv.statistic = replace(conv.statistic, factor=factor)
    assert not fused.take(Work(conv, Damping(0.1), may_wait=False, scale=8.0))  # λ was changed since
    first.weight.grad = None
    assert not fused.take(Work(first, Damping(0.1), may_wait=False, scale=8.0))
    assert not fused.sides


def test_a_weight_that_lies_the_other_way_round_is_left_to_the_plain_path():
    """The kernels write rows of outputs; the Conv1D of transformers has rows of features."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(conv1d(3, 40)).to(DEVICE)  # fewer samples than features
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 40, device=DEVICE)).square().mean().backward()
        if step == 0:
            optimizer.step()  # looks at every layer
    (record,) = correction._parts.corrector.filled_records()

    assert not FusedStep(DEVICE).take(Work(record, Damping(0.01), may_wait=False, scale=8.0))
