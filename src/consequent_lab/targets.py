"""What a consequentialist step may cost: the one table of measurements and targets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from consequent_lab.models import LanguageModel, mlp, residual_net, resnet20, resnet50
from consequent_lab.workloads import Entrant, Task

PERIOD = 10  # of refresh: the matrices of nine steps in ten are those of the tenth

# Ways to be corrected: what the entrant's name ends in, and what `attach` is told.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("", {}),
    "backward": (", at backward", {"at": "backward"}),
    "refresh": (f", refresh {PERIOD}", {"averaging": 0.9, "refresh": PERIOD}),
}


@dataclass(frozen=True)
class Comparison:
    """Quotients of some entrants and another one, and the most that the best of them should be, if that is promised."""

    ours: tuple[str, ...]
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
class Perceptron:
    """A multi-layer perceptron on a batch, and what it may cost on a GPU, eager and in a CUDA graph."""

    name: str
    batch: int
    inputs: int
    hidden: tuple[int, ...]
    eager: float
    graph: float

    @property
    def task(self) -> Task:
        """The batch."""
        title = f"MLP {self.inputs}-{len(self.hidden)}×{self.hidden[0]}-10, batch {self.batch}"
        return Task(title, (self.batch, self.inputs))

    def model(self) -> nn.Module:
        """Returns the network."""
        return mlp(self.inputs, self.hidden, 10)


@dataclass(frozen=True)
class Sizes:
    """How large the networks and batches are."""

    perceptrons: tuple[Perceptron, ...]  # the first is also for CPUs
    residual: Task
    residual_model: Callable[[bool], nn.Module]  # with BatchNorm?
    imagenet: Task
    language: Task
    language_model: Callable[[], nn.Module]


FULL = Sizes(
    perceptrons=(
        Perceptron("mlp", 32, 3072, (800,) * 8, 1.3, 1.10),
        Perceptron("mlp-128", 128, 3072, (800,) * 8, 1.5, 1.25),
        Perceptron("mlp-512", 512, 3072, (800,) * 8, 1.7, 1.6),
        Perceptron("mlp-2048", 2048, 3072, (800,) * 8, 2.0, 2.0),
        Perceptron("mlp-256-wide", 256, 256, (256,) * 5, 1.5, 1.3),
        Perceptron("mlp-256-wide-16384", 16384, 256, (256,) * 5, 1.5, 1.5),
        Perceptron("mlp-1024-wide", 1024, 1024, (1024,) * 5, 2.0, 2.0),
    ),
    residual=Task("ResNet-20, batch 128", (128, 3, 32, 32), channels_last=True),
    residual_model=resnet20,
    imagenet=Task("ResNet-50, 64 images of 224², bfloat16", (64, 3, 224, 224), 1000, channels_last=True, autocast=True),
    language=Task("GPT-2 small, 8×1024 tokens, bfloat16", (8, 1024), 50257, tokens=True, autocast=True),
    language_model=LanguageModel,
)
QUICK = Sizes(
    perceptrons=(
        Perceptron("mlp", 16, 64, (64, 64), 1.3, 1.10),
        Perceptron("mlp-128", 128, 64, (64, 64), 1.5, 1.25),
    ),
    residual=Task("ResNet-8, batch 8, 16² pixels", (8, 3, 16, 16), channels_last=True),
    residual_model=lambda batch_norm: residual_net((4, 8, 16), 1, batch_norm),
    imagenet=replace(FULL.imagenet, title="ResNet-50, 2 images of 64², bfloat16", shape=(2, 3, 64, 64)),
    language=replace(FULL.language, title="GPT of 2 layers, 2×64 tokens, bfloat16", shape=(2, 64), classes=256),
    language_model=partial(LanguageModel, layers=2, width=64, heads=4, context=64, vocabulary=256),
)


def matches(device: str, sizes: Sizes = FULL) -> tuple[Match, ...]:
    """Returns all matches on a device.

    Those with CUDA graphs come last: a capture that fails may leave the process in a state that slows the others.
    """
    if device == "cuda":
        return (*_on_cuda(sizes, graph=False), *_on_cuda(sizes, graph=True))
    first = sizes.perceptrons[0]
    return (
        _match(first.name, first.task, "SGD", first.model, "sgd", 1.2),
        _match("resnet20", sizes.residual, "SGD", partial(sizes.residual_model, False), "sgd", 1.6),
    )


def _on_cuda(sizes: Sizes, *, graph: bool) -> tuple[Match, ...]:
    """CUDA graphs refuse what refreshes now and then, and their memory is not counted."""
    plain, normalised = "Nesterov", "Nesterov + BN"
    model, tokens = partial(sizes.residual_model, False), sizes.language.shape[1]
    residual = _match(
        *("resnet20", sizes.residual, plain, model, "nesterov", 1.12 if graph else None),
        memory={} if graph else {plain: 1.2, normalised: None},
        refresh=None if graph else 1.25,
    )
    against_norm = Comparison(residual.comparisons[0].ours, normalised, 1.0 if graph else 1.15)
    residual = replace(
        residual,
        entrants=(Entrant(normalised, partial(sizes.residual_model, True), "nesterov"), *residual.entrants),
        comparisons=(against_norm, *residual.comparisons),
    )
    found = (
        residual,
        *(_match(p.name, p.task, "SGD", p.model, "sgd", p.graph if graph else p.eager) for p in sizes.perceptrons),
        _match(
            *("resnet50", sizes.imagenet, plain, resnet50, "nesterov", 1.5),
            memory={} if graph else {plain: None},
            refresh=None if graph else 1.15,
        ),
        _match(
            *("gpt2", sizes.language, "AdamW", sizes.language_model, "adamw", 1.3 if graph else 1.4),
            memory={} if graph else {"AdamW": None},
            refresh=None if graph else 1.15,
            # The head stays plain: it shares its weight with the embedding, whose gradient no matrix product explains.
            options={"loss_reduction": lambda sequences: sequences * tokens, "exclude": "head"},
        ),
    )
    return tuple(replace(one, name=f"{one.name}-graph", graph=True) for one in found) if graph else found


def _match(
    name: str,
    task: Task,
    family: str,
    model: Callable[[], nn.Module],
    optimizer: str,
    target: float | None,
    *,
    memory: dict[str, float | None] | None = None,
    refresh: float | None = None,
    options: dict[str, Any] | None = None,
) -> Match:
    """An optimiser, by its name here and as torch has it, against its C- versions with the default damping.

    The target is that of the better one of those that are corrected in every step, `memory` has those of peak memory,
    by baseline. Without a target of its own there is none that refreshes now and then.
    """
    ways = WAYS if refresh is not None else ("step", "backward")
    ours = [Entrant(f"C-{family}{WAYS[way][0]}", model, optimizer, WAYS[way][1] | (options or {}), way) for way in ways]
    names = tuple(entrant.name for entrant in ours)
    comparisons = [Comparison(names[:2], family, target)]
    comparisons += [Comparison(names[:1], baseline, most, "memory") for baseline, most in (memory or {}).items()]
    comparisons += [Comparison(names[2:], family, refresh)] if refresh is not None else []
    period = 1 if refresh is None else PERIOD
    return Match(name, task, (Entrant(family, model, optimizer), *ours), tuple(comparisons), period=period)
