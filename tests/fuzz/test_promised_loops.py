"""Random training loops with `promise=`: every step promises what it may, or is the one without it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import consequent


class Net(nn.Module):
    """Layers that are corrected, a norm and a bare parameter, which are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, inputs):
        return self.layers(inputs * self.scale)

    def parts(self):
        return {"first": self.layers[0], "norm": self.layers[1], "last": self.layers[3], "scale": self.scale}


def losses(data):
    inputs, targets = data
    half = len(inputs) // 2
    return {
        "all": lambda model: mse_loss(model(inputs), targets),
        "half": lambda model: mse_loss(model(inputs[:half]), targets[:half]) / 2,
        "of the norm": lambda model: 3 * (model.layers[1].weight - 0.5).square().sum(),
        "of the scale": lambda model: (model.scale + 1).square().sum(),
        "penalty": lambda model: 0.1 * sum(p.square().sum() for p in model.parameters()),
    }


def of_parts(model, names):
    parts = [model.parts()[name] for name in names]
    return [p for part in parts for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())]


LOSSES = ("all", "half", "of the norm", "of the scale", "penalty")
PARTS = ("first", "norm", "last", "scale")
SOME = st.sets(st.sampled_from(PARTS), min_size=1)
STEP = st.fixed_dictionaries(
    {
        "losses": st.lists(st.sampled_from(LOSSES), min_size=1, max_size=3),
        "as one": st.booleans(),  # one backward pass for all of them
        "thrown away": st.booleans(),  # one before, whose gradients are zeroed
        "set to none": st.booleans(),
        "trained": SOME,
        "clipped": st.one_of(st.none(), SOME),
        "scale": st.sampled_from((1.0, 1024.0)),
        "rates": st.lists(st.sampled_from((0.0, 1e-3, 1.0, 100.0)), min_size=4, max_size=4),
    }
)


def prepared(model, optimizer, of, step):
    """Everything up to the step; the losses' sum, or None where nothing is trained by it."""
    trained = of_parts(model, step["trained"])
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is one for one in trained))
    for group, rate in zip(optimizer.param_groups, step["rates"], strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=step["set to none"])
    of["all"](model)  # by which it is noticed what is trained
    if step["thrown away"]:
        loss = 7 * of["all"](model)
        if loss.requires_grad:
            loss.backward()
        optimizer.zero_grad(set_to_none=step["set to none"])
    values = [of[name](model) for name in step["losses"]]
    values = [value for value in values if value.requires_grad]
    if not values:
        return None
    for value in [sum(values)] if step["as one"] else values:
        (step["scale"] * value).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= step["scale"]
    if step["clipped"] is not None:
        nn.utils.clip_grad_norm_(of_parts(model, step["clipped"]), 0.01)
    return sum(value.item() for value in values)


def attached(model, promise):
    optimizer = torch.optim.SGD([{"params": of_parts(model, [name])} for name in PARTS], lr=1.0)
    return optimizer, consequent.attach(optimizer, model, promise=promise, bound=None, loss_reduction="mse")


@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=4), st.sampled_from((0.3, 1.0)))
def test_a_step_promises_what_it_may_or_is_the_one_without(steps, fraction):
    generator = torch.Generator().manual_seed(1)
    of = losses([torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (4, 3)])
    model, free = Net(), Net()
    optimizer, correction = attached(model, fraction)
    unlimited, _ = attached(free, None)
    for step in steps:
        before, counted = copy.deepcopy(model), correction.counters.promised
        free.load_state_dict(model.state_dict())
        total = prepared(model, optimizer, of, step)
        prepared(free, unlimited, of, step)
        if total is None:
            continue
        optimizer.step()
        unlimited.step()
        trained = of_parts(before.requires_grad_(True), step["trained"])
        gradients = torch.autograd.grad(sum(of[name](before) for name in step["losses"]), trained, allow_unused=True)

        def promised(after, gradients=gradients, trained=trained, names=step["trained"]):
            pairs = zip(gradients, of_parts(after, names), trained, strict=True)
            return -sum((g * (new - old)).sum().item() for g, new, old in pairs if g is not None)

        wanted, allowed = promised(free), fraction * total
        assert promised(model) == pytest.approx(min(wanted, allowed), rel=1e-6, abs=1e-12)
        assert correction.counters.promised == counted + (wanted > allowed * (1 + 1e-9))
        if wanted < allowed:
            for one, another in zip(model.parameters(), free.parameters(), strict=True):
                assert torch.equal(one, another)
