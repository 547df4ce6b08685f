"""What a consequentialist step may cost: the one table of measurements and targets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from consequent_lab.models import LanguageModel, mlp, residual_net, resnet20, resnet50
from consequent_lab.workloads import Entrant, MakeOptimizer, Task, adamw, corrected, nesterov, sgd

PERIOD = 10  # of refresh: the matrices of nine steps in ten are those of the tenth

# Ways to be corrected: what `attach` is told, and what the entrant's name ends in.
STEP: dict[str, Any] = {}
BACKWARD: dict[str, Any] = {"at": "backward"}
REFRESH: dict[str, Any] = {"averaging": 0.9, "refresh": PERIOD}
SUFFIXES = {"step": "", "backward": ", at backward", "refresh": f", refresh {PERIOD}"}
OPTIONS = {"step": STEP, "backward": BACKWARD, "refresh": REFRESH}


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
    task: Task
    hidden: tuple[int, ...]
    eager: float
    graph: float


@dataclass(frozen=True)
class Sizes:
    """How large the networks and batches are."""

    perceptrons: tuple[Perceptron, ...]  # the first is also for CPUs
    residual: Task
    residual_model: Callable[[bool], nn.Module]  # with BatchNorm?
    imagenet: Task
    language: Task
    language_model: Callable[[], nn.Module]


def _perceptron(name: str, batch: int, inputs: int, hidden: tuple[int, ...], eager: float, graph: float) -> Perceptron:
    title = f"MLP {inputs}-{len(hidden)}×{hidden[0]}-10, batch {batch}"
    return Perceptron(name, Task(title, (batch, inputs)), hidden, eager, graph)


FULL = Sizes(
    perceptrons=(
        _perceptron("mlp", 32, 3072, (800,) * 8, 1.3, 1.10),
        _perceptron("mlp-128", 128, 3072, (800,) * 8, 1.5, 1.25),
        _perceptron("mlp-512", 512, 3072, (800,) * 8, 1.7, 1.6),
        _perceptron("mlp-2048", 2048, 3072, (800,) * 8, 2.0, 2.0),
        _perceptron("mlp-256-wide", 256, 256, (256,) * 5, 1.5, 1.3),
        _perceptron("mlp-256-wide-16384", 16384, 256, (256,) * 5, 1.5, 1.5),
        _perceptron("mlp-1024-wide", 1024, 1024, (1024,) * 5, 2.0, 2.0),
    ),
    residual=Task("ResNet-20, batch 128", (128, 3, 32, 32), channels_last=True),
    residual_model=resnet20,
    imagenet=Task("ResNet-50, 64 images of 224², bfloat16", (64, 3, 224, 224), 1000, channels_last=True, autocast=True),
    language=Task("GPT-2 small, 8×1024 tokens, bfloat16", (8, 1024), 50257, tokens=True, autocast=True),
    language_model=LanguageModel,
)
QUICK = Sizes(
    perceptrons=(
        _perceptron("mlp", 16, 64, (64, 64), 1.3, 1.10),
        _perceptron("mlp-128", 128, 64, (64, 64), 1.5, 1.25),
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
    if device != "cuda":
        return _on_cpu(sizes)
    return (*_on_cuda(sizes, graph=False), *_on_cuda(sizes, graph=True))


def _on_cpu(sizes: Sizes) -> tuple[Match, ...]:
    first, model = sizes.perceptrons[0], partial(sizes.residual_model, False)
    ours = _corrected("SGD", model, sgd, ("step", "backward"))
    return (
        Match(first.name, first.task, _perceptrons(first), (Comparison(_names("SGD"), "SGD", 1.2),)),
        Match(
            "resnet20",
            sizes.residual,
            (Entrant("SGD", model, sgd), *ours),
            (Comparison(_names("SGD"), "SGD", 1.6),),
        ),
    )


def _on_cuda(sizes: Sizes, *, graph: bool) -> tuple[Match, ...]:
    dense = []
    for one in sizes.perceptrons:
        comparison = Comparison(_names("SGD"), "SGD", one.graph if graph else one.eager)
        dense.append(Match(one.name, one.task, _perceptrons(one), (comparison,)))
    found = (_residual(sizes, graph=graph), *dense, _imagenet(sizes, graph=graph), _language(sizes, graph=graph))
    return tuple(replace(one, name=f"{one.name}-graph", graph=True) for one in found) if graph else found


def _residual(sizes: Sizes, *, graph: bool) -> Match:
    with_norm, without = "Nesterov + BN", "Nesterov"
    both, model = _names(without), partial(sizes.residual_model, False)
    times = Comparison(both, with_norm, 1.0 if graph else 1.15), Comparison(both, without, 1.12 if graph else None)
    memory = Comparison(both[:1], without, 1.2, "memory"), Comparison(both[:1], with_norm, quantity="memory")
    plain = Entrant(with_norm, partial(sizes.residual_model, True), nesterov), Entrant(without, model, nesterov)
    return _with_refresh(
        Match("resnet20", sizes.residual, plain, times if graph else times + memory),
        *(without, model, nesterov, {}, None if graph else 1.25),
    )


def _imagenet(sizes: Sizes, *, graph: bool) -> Match:
    both = _names("Nesterov")
    memory = () if graph else (Comparison(both[:1], "Nesterov", quantity="memory"),)
    plain = (Entrant("Nesterov", resnet50, nesterov),)
    match = Match("resnet50", sizes.imagenet, plain, (Comparison(both, "Nesterov", 1.5), *memory))
    return _with_refresh(match, "Nesterov", resnet50, nesterov, {}, None if graph else 1.15)


def _language(sizes: Sizes, *, graph: bool) -> Match:
    both, tokens = _names("AdamW"), sizes.language.shape[1]
    memory = () if graph else (Comparison(both[:1], "AdamW", quantity="memory"),)
    plain = (Entrant("AdamW", sizes.language_model, adamw),)
    times = Comparison(both, "AdamW", 1.3 if graph else 1.4)
    # The head stays plain: it shares its weight with the embedding, whose gradient no matrix product explains.
    options = {"loss_reduction": lambda sequences: sequences * tokens, "exclude": "head"}
    match = Match("gpt2", sizes.language, plain, (times, *memory))
    return _with_refresh(match, "AdamW", sizes.language_model, adamw, options, None if graph else 1.15)


def _with_refresh(
    match: Match,
    family: str,
    model: Callable[[], nn.Module],
    optimizer: MakeOptimizer,
    options: dict[str, Any],
    target: float | None,
) -> Match:
    """The match with our entrants, also the one that refreshes now and then, unless that has no target.

    CUDA graphs refuse that one.
    """
    both = _corrected(family, model, optimizer, ("step", "backward"), options)
    if target is None:
        return replace(match, entrants=(*match.entrants, *both))
    (refreshed,) = _corrected(family, model, optimizer, ("refresh",), options)
    comparison = Comparison((refreshed.name,), family, target)
    return replace(
        match,
        entrants=(*match.entrants, *both, refreshed),
        comparisons=(*match.comparisons, comparison),
        period=PERIOD,
    )


def _perceptrons(one: Perceptron) -> tuple[Entrant, ...]:
    model = partial(mlp, one.task.shape[1], one.hidden, 10)
    return Entrant("SGD", model, sgd), *_corrected("SGD", model, sgd, ("step", "backward"))


def _corrected(
    family: str,
    model: Callable[[], nn.Module],
    optimizer: MakeOptimizer,
    ways: Sequence[str],
    options: dict[str, Any] | None = None,
) -> tuple[Entrant, ...]:
    """The consequentialist versions of an optimiser, with the default damping."""
    return tuple(
        Entrant(f"C-{family}{SUFFIXES[way]}", model, optimizer, corrected(**OPTIONS[way], **(options or {})), way)
        for way in ways
    )


def _names(family: str) -> tuple[str, ...]:
    """Of the entrants that are corrected in every step; the better one counts."""
    return f"C-{family}{SUFFIXES['step']}", f"C-{family}{SUFFIXES['backward']}"
