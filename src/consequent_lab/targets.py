"""What a consequentialist step may cost: the one table of measurements and targets."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from consequent_lab.models import LanguageModel, mlp, residual_net, resnet20, resnet50
from consequent_lab.workloads import Entrant, Task

PERIOD = 10  # of averages: inputs are looked at in one step of ten

# Ways to be corrected: what the entrant's name ends in, and what `attach` is told.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("", {"averaging": 0}),
    "averages": (", averages", {"averaging": 0.9, "refresh": PERIOD}),
}


@dataclass(frozen=True)
class Comparison:
    """The quotient of an entrant and another one, and the most that it should be, if there is a target."""

    ours: str
    baseline: str
    target: float | None = None
    quantity: str = "time"  # or "memory"


@dataclass(frozen=True)
class Match:
    """Entrants that are timed in turns on one task."""

    name: str
    task: Task
    entrants: tuple[Entrant, ...]
    comparisons: tuple[Comparison, ...]
    graph: bool = False  # each step is replayed as a CUDA graph
    period: int = 1  # samples are of whole multiples of so many steps, where these differ

    @property
    def mode(self) -> str:
        """How steps are taken."""
        return "CUDA graph" if self.graph else "eager"


@dataclass(frozen=True)
class Case:
    """A network that learns a task with one of torch's optimisers, and the most that its C- versions may cost."""

    name: str
    task: Task
    model: Callable[[], nn.Module]
    family: str  # the optimiser's name,
    optimizer: str  # and as `plain_optimizer` calls it
    eager: float | None  # with own inputs
    graph: float | None = None  # the same in CUDA graphs
    averages: float | None = None  # by averages
    memory: dict[str, float | None] = field(default_factory=dict)  # peaks with own inputs, by baseline
    options: dict[str, Any] = field(default_factory=dict)  # of the correction
    rival: Entrant | None = None  # another one to be compared with, beside that optimiser
    rival_eager: float | None = None
    rival_graph: float | None = None

    def match(self, *, graph: bool = False) -> Match:
        """Returns the optimiser against its C- versions with the default damping.

        CUDA graphs cannot look at inputs now and then, as averages do, and their memory is not counted.
        """
        ours = {
            way: Entrant(f"C-{self.family}{ending}", self.model, self.optimizer, settings | self.options, way)
            for way, (ending, settings) in WAYS.items()
            if not (graph and way == "averages")
        }
        own, entrants = ours["own"].name, (Entrant(self.family, self.model, self.optimizer), *ours.values())
        comparisons = [Comparison(own, self.family, self.graph if graph else self.eager)]
        if not graph:
            comparisons += [Comparison(own, other, most, "memory") for other, most in self.memory.items()]
            comparisons.append(Comparison(ours["averages"].name, self.family, self.averages))
        if self.rival is not None:
            entrants = (self.rival, *entrants)
            comparisons.insert(0, Comparison(own, self.rival.name, self.rival_graph if graph else self.rival_eager))
        name, period = (f"{self.name}-graph", 1) if graph else (self.name, PERIOD)
        return Match(name, self.task, entrants, tuple(comparisons), graph, period)


def matches(device: str, *, quick: bool = False) -> tuple[Match, ...]:
    """Returns all matches on a device, or quick ones, of tiny networks.

    Those with CUDA graphs come last: a capture that fails may leave the process in a state that slows the others.
    """
    residual, *others = _cases(quick)
    if device == "cuda":
        return tuple(case.match(graph=graph) for graph in (False, True) for case in (residual, *others))
    plain = Case(residual.name, residual.task, residual.model, "SGD", "sgd", 1.6)
    return replace(others[0], eager=1.2).match(), plain.match()


def _cases(quick: bool) -> list[Case]:
    """Returns what is measured on a GPU: ResNet-20, perceptrons, ResNet-50 and GPT-2; the first two on CPUs, too."""
    residual = Task("ResNet-20, batch 128", (128, 3, 32, 32), channels_last=True)
    residual_model: Callable[[bool], nn.Module] = resnet20
    imagenet = Task(
        "ResNet-50, 64 images of 224², bfloat16", (64, 3, 224, 224), 1000, channels_last=True, autocast=True
    )
    language = Task("GPT-2 small, 8×1024 tokens, bfloat16", (8, 1024), 50257, tokens=True, autocast=True)
    language_model: Callable[[], nn.Module] = LanguageModel
    perceptrons = [
        _perceptron("mlp", 32, 3072, (800,) * 8, 1.3, 1.10),
        _perceptron("mlp-128", 128, 3072, (800,) * 8, 1.5, 1.25),
        _perceptron("mlp-512", 512, 3072, (800,) * 8, 1.7, 1.6),
        _perceptron("mlp-2048", 2048, 3072, (800,) * 8, 2.0, 2.0),
        _perceptron("mlp-256-wide", 256, 256, (256,) * 5, 1.5, 1.3),
        _perceptron("mlp-256-wide-16384", 16384, 256, (256,) * 5, 1.5, 1.5),
        _perceptron("mlp-1024-wide", 1024, 1024, (1024,) * 5, 2.0, 2.0),
    ]
    if quick:
        residual = replace(residual, title="ResNet-8, batch 8, 16² pixels", shape=(8, 3, 16, 16))
        residual_model = partial(residual_net, (4, 8, 16), 1)
        imagenet = replace(imagenet, title="ResNet-50, 2 images of 64², bfloat16", shape=(2, 3, 64, 64))
        language = replace(language, title="GPT of 2 layers, 2×64 tokens, bfloat16", shape=(2, 64), classes=256)
        language_model = partial(LanguageModel, layers=2, width=64, heads=4, context=64, vocabulary=256)
        perceptrons = [
            _perceptron("mlp", 16, 64, (64, 64), 1.3, 1.10),
            _perceptron("mlp-128", 128, 64, (64, 64), 1.5, 1.25),
        ]
    plain, normalised, tokens = "Nesterov", "Nesterov + BN", language.shape[1]
    return [
        Case(
            *("resnet20", residual, partial(residual_model, False), plain, "nesterov", None, 1.12, 1.25),
            memory={plain: 1.2, normalised: None},
            rival=Entrant(normalised, partial(residual_model, True), "nesterov"),
            rival_eager=1.15,
            rival_graph=1.0,
        ),
        *perceptrons,
        Case("resnet50", imagenet, resnet50, plain, "nesterov", 1.5, 1.5, 1.15, {plain: None}),
        Case(
            *("gpt2", language, language_model, "AdamW", "adamw", 1.4, 1.3, 1.15),
            memory={"AdamW": None},
            options={"loss_reduction": lambda sequences: sequences * tokens},
        ),
    ]


def _perceptron(name: str, batch: int, inputs: int, hidden: tuple[int, ...], eager: float, graph: float) -> Case:
    task = Task(f"MLP {inputs}-{len(hidden)}×{hidden[0]}-10, batch {batch}", (batch, inputs))
    return Case(name, task, partial(mlp, inputs, hidden, 10), "SGD", "sgd", eager, graph)
