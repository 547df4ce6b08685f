"""Who takes part: how each optimiser is made from its settings, and what a search may change in them.

Every contestant has a learning rate over two and a half decades and at most one further knob, each on a logarithmic
scale; in tasks judged by test data all have weight decay as well, the same for all, beside what they do: the fraction
that a step at the peak takes off a weight. The first trial of everybody is the setting that one would start with.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent_lab.optimizers import Optimizers, plain_optimizer
from consequent_lab.race.kronecker import FOOF, KFAC
from consequent_lab.race.task import Task

Settings = dict[str, float]

RMSPROP = 3  # what Shampoo's package calls it


@dataclass(frozen=True)
class Knob:
    """A setting that is searched on a logarithmic scale, and where one would start."""

    name: str
    low: float
    high: float
    start: float

    def starting_at(self, start: float) -> "Knob":
        """Returns it with another start; the range moves along where that lies outside.

        >>> Knob("lr", 0.01, 1.0, 0.1).starting_at(0.3)
        Knob(name='lr', low=0.01, high=1.0, start=0.3)
        >>> Knob("lr", 0.01, 1.0, 0.1).starting_at(2.0)
        Knob(name='lr', low=0.2, high=20.0, start=2.0)
        """
        moved = 1.0 if self.low <= start <= self.high else start / self.start
        return Knob(self.name, moved * self.low, moved * self.high, start)


Plain = Callable[[nn.Module, Settings, bool], list[Optimizer]]  # the last one: capturable in a CUDA graph


@dataclass(frozen=True)
class Contestant:
    """An optimiser of the race, or several that are corrected jointly.

    Settings with the names of dampings are the correction's.
    """

    name: str
    plain: Plain
    knobs: tuple[Knob, ...]  # what is searched, the learning rate first
    correction: dict[str, Any] | None = None  # options of `consequent.attach`; None is the plain one
    decay: Knob = field(default_factory=lambda: Knob("decay", 3e-6, 3e-2, 5e-5))  # where weight decay is searched
    graphs: bool = True  # whether its step can be captured in a CUDA graph; others decide or count on the host
    variant: str = ""  # of the task's model, "" or "BN"

    def space(self, task: Task) -> tuple[Knob, ...]:
        """Returns the knobs of a search, with the starts that a task has for it."""
        starts = task.starts.get(self.name, {})
        knobs = (*self.knobs, self.decay) if task.searches_decay else self.knobs
        return tuple(knob.starting_at(starts.get(knob.name, knob.start)) for knob in knobs)

    def make(self, model: nn.Module, settings: Settings, task: Task, capturable: bool) -> Optimizers:
        """Returns its optimisers over a model."""
        optimizers = Optimizers(model, self.plain(model, settings, capturable), settings.get("decay", 0.0))
        if self.correction is not None:
            dampings = {name: settings[name] for name in ("damping", "relative_damping") if name in settings}
            optimizers.attach(loss_reduction=task.loss_reduction, **dampings, **self.correction)
        return optimizers


def lr(start: float) -> Knob:
    """Returns a learning rate with a range of two and a half decades around where one would start."""
    return Knob("lr", start * 10**-1.25, start * 10**1.25, start)


# ---- plain ones --------------------------------------------------------------------------------------------------


def torchs(name: str, **options: Any) -> Plain:
    """Returns what makes one of torch's optimisers, as `plain_optimizer` calls it, with further options of its own."""

    def make(model: nn.Module, settings: Settings, capturable: bool) -> list[Optimizer]:
        decay = 0.01 if name == "adamw" and "decay" not in settings else 0.0  # torch's own
        return [plain_optimizer(name, model.parameters(), settings["lr"], decay, capturable=capturable, **options)]

    return make


class FlatMuon(Optimizer):
    """Torch's Muon, which takes matrices alone, over kernels of convolutions as matrices `[outputs, all the rest]`.

    A kernel is handed to it as a flat view of the same memory; this one holds the kernels themselves, so that they can
    be corrected.
    """

    def __init__(self, weights: Iterable[Tensor], lr: float, **options: Any) -> None:
        super().__init__(weights, {"lr": lr})
        kernels = self.param_groups[0]["params"]
        self._pairs = [(kernel, nn.Parameter(kernel.detach().flatten(1))) for kernel in kernels]
        for kernel, matrix in self._pairs:
            if kernel.data_ptr() != matrix.data_ptr():
                raise ValueError(f"a kernel of shape {list(kernel.shape)} is not contiguous: Muon needs it as a matrix")
        self._muon = torch.optim.Muon([matrix for _, matrix in self._pairs], lr=lr, **options)

    def step(self, closure: Any = None) -> Any:
        """Takes a step with the gradients that the kernels have."""
        for kernel, matrix in self._pairs:
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
        self._muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        return self._muon.step(closure)


def muon(model: nn.Module, settings: Settings, capturable: bool) -> list[Optimizer]:
    """Returns torch's Muon for the weights of hidden layers, convolutions flattened, and AdamW for all others.

    The others: first and last layer (embeddings instead of the first where there are any), biases and norms.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    known = set(weights if embeddings else weights[1:]) - {weights[-1]} - embeddings
    hidden = [weight for weight in weights if weight in known]
    others = [parameter for parameter in model.parameters() if parameter not in known]
    rest = plain_optimizer("adamw", others, settings["other_lr"], capturable=capturable)
    kind = torch.optim.Muon if all(weight.ndim == 2 for weight in hidden) else FlatMuon
    return [kind(hidden, lr=settings["lr"], weight_decay=0.0), rest]


def soap(model: nn.Module, settings: Settings, capturable: bool) -> list[Optimizer]:
    """Returns SOAP as its package has it, a side of more than 2,048 left as it is."""
    from pytorch_optimizer import SOAP

    return [
        SOAP(
            list(model.parameters()),
            lr=settings["lr"],
            betas=(0.95, 0.95),
            weight_decay=0.0,
            precondition_frequency=10,
            max_precondition_dim=2048,
        )
    ]


def shampoo(model: nn.Module, settings: Settings, capturable: bool) -> list[Optimizer]:
    """Returns Shampoo in blocks of 512, its steps as long as RMSProp's, its roots computed every 10 steps as SOAP's."""
    from pytorch_optimizer import ScalableShampoo

    return [
        ScalableShampoo(
            list(model.parameters()),
            lr=settings["lr"],
            betas=(0.9, 0.95),
            moving_average_for_momentum=True,
            start_preconditioning_step=10,
            preconditioning_compute_steps=10,
            graft_type=RMSPROP,
        )
    ]


def kfac(model: nn.Module, settings: Settings, capturable: bool) -> list[Optimizer]:
    """Returns K-FAC."""
    return [KFAC(model, settings["lr"], settings["damping"])]


def foof(model: nn.Module, settings: Settings, capturable: bool, *, sparing: bool = False) -> list[Optimizer]:
    """Returns FOOF, or the one that inverts at every tenth step from the first on."""
    return [FOOF(model, settings["lr"], settings["damping"], sparing=sparing)]


# ---- all of them -------------------------------------------------------------------------------------------------

OTHER_LR = Knob("other_lr", 3e-5, 1e-2, 3e-4)  # of AdamW beside Muon
SHORT_MEMORY = (0.9, 0.95)  # of gradients and of squares: steps follow gradients that shrink within tens of steps
OWN_INPUTS = {"averaging": 0.0}
AVERAGES = {"averaging": 0.95, "refresh": 10}
RELATIVE_DAMPING = Knob("relative_damping", 0.01, 1.0, 0.1)

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("SGD", torchs("sgd"), (lr(0.05),)),
        Contestant("Nesterov", torchs("nesterov"), (lr(0.01),)),
        Contestant("Adam", torchs("adam"), (lr(3e-4),)),
        Contestant("AdamW", torchs("adamw"), (lr(3e-4),)),
        Contestant("Muon", muon, (lr(2e-3), OTHER_LR)),
        Contestant("SOAP", soap, (lr(1e-3),), graphs=False),
        Contestant("Shampoo", shampoo, (lr(3e-4),), graphs=False),
        Contestant("K-FAC", kfac, (lr(3e-4), Knob("damping", 1e-4, 1e-1, 3e-3)), graphs=False),
        Contestant("FOOF", foof, (lr(0.03), Knob("damping", 0.03, 30.0, 1.0)), graphs=False),
        Contestant(
            "FOOF-sparing",
            partial(foof, sparing=True),
            (lr(0.01), Knob("damping", 3e-3, 3.0, 0.05)),
            graphs=False,
        ),
        Contestant("C-SGD", torchs("sgd"), (lr(0.1), RELATIVE_DAMPING), correction=OWN_INPUTS),
        Contestant("C-Nesterov", torchs("nesterov"), (lr(0.01), RELATIVE_DAMPING), correction=OWN_INPUTS),
        Contestant("C-Adam", torchs("adam"), (lr(3e-4), RELATIVE_DAMPING), correction=OWN_INPUTS),
        Contestant("C-AdamW", torchs("adamw"), (lr(3e-4), RELATIVE_DAMPING), correction=OWN_INPUTS),
        Contestant("Adam-0.95", torchs("adam", betas=SHORT_MEMORY), (lr(1e-3),)),
        Contestant(
            "C-Adam-0.95", torchs("adam", betas=SHORT_MEMORY), (lr(1e-3), RELATIVE_DAMPING), correction=OWN_INPUTS
        ),
        Contestant(
            "C-Nesterov-averaged",  # FOOF, but for the bound and how the damping is said
            torchs("nesterov"),
            (lr(0.01), RELATIVE_DAMPING),
            correction=AVERAGES,
            graphs=False,
        ),
        Contestant("C-Adam-averaged", torchs("adam"), (lr(3e-4), RELATIVE_DAMPING), correction=AVERAGES, graphs=False),
        Contestant("C-Muon", muon, (lr(2e-3), OTHER_LR), correction=OWN_INPUTS | {"relative_damping": 0.1}),
        Contestant("Nesterov-BN", torchs("nesterov"), (lr(0.1),), variant="BN"),
        Contestant("AdamW-BN", torchs("adamw"), (lr(1e-3),), variant="BN"),
        Contestant("Muon-BN", muon, (lr(0.02), Knob("other_lr", 3e-5, 1e-2, 1e-3)), variant="BN"),
    )
}


def contestant_named(name: str) -> Contestant:
    """Returns a contestant; its name may be written in small letters."""
    for known in CONTESTANTS.values():
        if known.name.lower() == name.lower():
            return known
    raise ValueError(f"there is no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
