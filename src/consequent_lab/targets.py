"""What a consequentialist step may cost: the one table of measurements and targets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from consequent_lab.models import LanguageModel, mlp, residual_net, resnet20, resnet50
from consequent_lab.workloads import Entrant, Task, adamw, damped, damped_language_model, nesterov, sgd


@dataclass(frozen=True)
class Comparison:
    """A quotient of two entrants and the most it should be, if anything was promised."""

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

    @property
    def mode(self) -> str:
        """How steps are taken."""
        return "CUDA graph" if self.graph else "eager"


@dataclass(frozen=True)
class Sizes:
    """How large the networks and batches are."""

    perceptron: Task
    hidden: tuple[int, ...]
    residual: Task
    residual_model: Callable[[bool], nn.Module]  # with BatchNorm?
    imagenet: Task
    language: Task
    language_model: Callable[[], nn.Module]


FULL = Sizes(
    perceptron=Task("MLP 3072-8×800-10, batch 32", (32, 3072)),
    hidden=(800,) * 8,
    residual=Task("ResNet-20, batch 128", (128, 3, 32, 32), channels_last=True),
    residual_model=resnet20,
    imagenet=Task("ResNet-50, 64 images of 224², bfloat16", (64, 3, 224, 224), 1000, channels_last=True, autocast=True),
    language=Task("GPT-2 small, 8×1024 tokens, bfloat16", (8, 1024), 50257, tokens=True, autocast=True),
    language_model=LanguageModel,
)
QUICK = Sizes(
    perceptron=Task("MLP 64-2×64-10, batch 16", (16, 64)),
    hidden=(64, 64),
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
    return _on_cuda(sizes) if device == "cuda" else _on_cpu(sizes)


def _on_cpu(sizes: Sizes) -> tuple[Match, ...]:
    return (
        Match("mlp", sizes.perceptron, _perceptrons(sizes), (Comparison("C-SGD", "SGD", 1.25),)),
        Match(
            "resnet20",
            sizes.residual,
            (
                Entrant("SGD", partial(sizes.residual_model, False), sgd),
                Entrant("C-SGD", partial(sizes.residual_model, False), sgd, damped(0.03)),
            ),
            (Comparison("C-SGD", "SGD", 2.0),),
        ),
    )


def _on_cuda(sizes: Sizes) -> tuple[Match, ...]:
    with_norm, without, ours = "Nesterov + BN", "Nesterov", "C-Nesterov"
    residual = (
        Entrant(with_norm, partial(sizes.residual_model, True), nesterov),
        Entrant(without, partial(sizes.residual_model, False), nesterov),
        Entrant(ours, partial(sizes.residual_model, False), nesterov, damped(0.03)),
    )
    imagenet = (
        Entrant(without, resnet50, nesterov),
        Entrant(ours, resnet50, nesterov, damped(0.03)),
    )
    tokens = sizes.language.shape[1]
    language = (
        Entrant("AdamW", sizes.language_model, adamw),
        Entrant("C-AdamW", sizes.language_model, adamw, damped_language_model(0.03, tokens)),
    )
    eager = (
        Match(
            "resnet20",
            sizes.residual,
            residual,
            (
                Comparison(ours, with_norm, 1.2),
                Comparison(ours, without),
                Comparison(ours, without, 1.2, quantity="memory"),
                Comparison(ours, with_norm, quantity="memory"),
            ),
        ),
        Match("mlp", sizes.perceptron, _perceptrons(sizes), (Comparison("C-SGD", "SGD"),)),
        Match(
            "resnet50",
            sizes.imagenet,
            imagenet,
            (Comparison(ours, without, 1.5), Comparison(ours, without, quantity="memory")),
        ),
        Match(
            "gpt2",
            sizes.language,
            language,
            (Comparison("C-AdamW", "AdamW", 1.5), Comparison("C-AdamW", "AdamW", quantity="memory")),
        ),
    )
    graphs = (
        Match(
            "resnet20-graph",
            sizes.residual,
            residual,
            (Comparison(ours, with_norm, 1.0), Comparison(ours, without, 1.25)),
            graph=True,
        ),
        Match("mlp-graph", sizes.perceptron, _perceptrons(sizes), (Comparison("C-SGD", "SGD", 1.15),), graph=True),
        Match("resnet50-graph", sizes.imagenet, imagenet, (Comparison(ours, without),), graph=True),
        Match("gpt2-graph", sizes.language, language, (Comparison("C-AdamW", "AdamW"),), graph=True),
    )
    return eager + graphs


def _perceptrons(sizes: Sizes) -> tuple[Entrant, Entrant]:
    model = partial(mlp, sizes.perceptron.shape[1], sizes.hidden, 10)
    return Entrant("SGD", model, sgd), Entrant("C-SGD", model, sgd, damped(0.01))
