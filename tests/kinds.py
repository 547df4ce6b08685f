"""The optimisers that the tests walk over, and how each is trained beside its plain twin."""

from dataclasses import dataclass, field

import reference
import torch
from models.expected import expected_backward, half_squares
from torch import nn

import consequent

LR = 0.02


@dataclass(frozen=True)
class Kind:
    """How to make an optimiser, and the plain torch one it should agree with."""

    plain: type
    ready: type | None = None  # None: consequent.attach
    options: dict = field(default_factory=dict)

    def make(self, model, params=None, *, lr=LR, **options):
        options = {**self.options, "lr": lr, **options}
        if self.ready is not None:
            return self.ready(model, params, **options)
        names = ("damping", "relative_damping", "loss_reduction")
        own = {name: options.pop(name) for name in names if name in options}
        optimizer = self.plain(model.parameters() if params is None else params, **options)
        consequent.attach(optimizer, model, **own)
        return optimizer

    def make_plain(self, model, params=None, *, lr=LR, **options):
        return self.plain(model.parameters() if params is None else params, **{**self.options, "lr": lr, **options})


KINDS = {
    "CSGD": Kind(torch.optim.SGD, consequent.CSGD),
    "C-Momentum": Kind(torch.optim.SGD, consequent.CSGD, {"momentum": 0.9}),
    "C-Nesterov": Kind(torch.optim.SGD, consequent.CSGD, {"momentum": 0.9, "nesterov": True}),
    "CAdam": Kind(torch.optim.Adam, consequent.CAdam),
    "CAdamW": Kind(torch.optim.AdamW, consequent.CAdamW, {"betas": (0.8, 0.99)}),
    "CRMSprop": Kind(torch.optim.RMSprop, consequent.CRMSprop, {"centered": True}),
    "SGD": Kind(torch.optim.SGD, options={"momentum": 0.9, "dampening": 0.1}),
    "Adam": Kind(torch.optim.Adam, options={"amsgrad": True}),
    "AdamW": Kind(torch.optim.AdamW),
    "RMSprop": Kind(torch.optim.RMSprop, options={"momentum": 0.5}),
    "Adagrad": Kind(torch.optim.Adagrad),
    "NAdam": Kind(torch.optim.NAdam),
}
READY = [name for name, kind in KINDS.items() if kind.ready is not None]
ATTACHED = [name for name in KINDS if name not in READY]

generator = torch.Generator().manual_seed(3)
# Few samples are solved on the sample side, many on the feature side.
BATCHES = [torch.randn(n, 6, dtype=torch.float64, generator=generator) for n in (4, 9, 3, 12, 1, 5)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def train(model, optimizer, batches=BATCHES[:3], after_step=lambda: None):
    for x in batches:
        optimizer.zero_grad()
        half_squares(model(x)).backward()
        optimizer.step()
        after_step()


def default_damping(optimizer):
    """What is taken where users name none."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return reference.DEFAULT_DAMPING if is_sgd else reference.DEFAULT_DAMPING_OF_OTHERS


def train_expected(twin, optimizer, batches=BATCHES[:3], after_step=lambda: None, damping=None):
    """The damping of a parameter group counts here as there; None: the default of the optimiser."""
    damping = default_damping(optimizer) if damping is None else damping

    def damping_of(parameter):
        for group in optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                if group.get("relative_damping") is not None:
                    return "relative", group["relative_damping"]
                return group["damping"] if group.get("damping") is not None else damping
        raise AssertionError("a parameter in no group")

    for x in batches:
        optimizer.zero_grad()
        expected_backward(twin, lambda m, x=x: half_squares(m(x)), len(x), damping_of)
        optimizer.step()
        after_step()


def is_of_torch(module):
    """Whether its class is the one of that name in torch, and no subclass of it."""
    return type(module) is getattr(nn, type(module).__name__)


def hooks_on(model, optimizer=None):
    """All that is put on a model and its optimiser: hooks, and layers' classes that were exchanged."""
    found = [m for m in model.modules() if type(m).__module__.startswith("torch.nn") and not is_of_torch(m)]
    found += [name for m in model.modules() for name in vars(m) if "consequent" in name]
    found += [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]
    if optimizer is not None:
        found += [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return found
