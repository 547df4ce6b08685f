"""What a corrected step may cost: the one table of measurements and of what is wanted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from consequent_lab.models import LanguageModel, mlp, resnet20, resnet50
from consequent_lab.workloads import Work

Wanted = Mapping[str, float | None]  # the most that each way may cost, in plain steps; None: whatever it costs

PLAIN, BATCH_NORM = "plain", "with BatchNorm"
# Ways of taking a step, and what `attach` is told where it is corrected.
WAYS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    BATCH_NORM: None,
    "own inputs": {"averaging": 0},
    "averages 10": {"averaging": 0.95, "refresh": 10},
    "averages 30": {"averaging": 0.95, "refresh": 30},
    "cheaper": {"averaging": "auto", "refresh": 10},  # of the two, layer by layer
}

NAMES = ("mlp-32", "mlp-128", "mlp-2048", "resnet20", "resnet50", "gpt2")
OF_MLP: Wanted = {"averages 10": 1.2, "averages 30": 1.1}
# CUDA graphs come last: a capture that fails may leave the process in a state that slows the others.
GPU: dict[str, dict[str, Wanted]] = {
    "eager": {
        "mlp-32": {"own inputs": 1.4, **OF_MLP},
        "mlp-128": {"own inputs": 1.5, **OF_MLP},
        "mlp-512": {"own inputs": 1.8},
        "mlp-2048": OF_MLP,
        "resnet20": {BATCH_NORM: None, "own inputs": 1.9, "averages 10": 1.2, "averages 30": 1.12},
        "resnet50": {"averages 10": 1.2, "averages 30": 1.08},
        "gpt2": {"averages 10": 1.12, "averages 30": 1.05},
    },
    "peak memory": {"resnet20": {"own inputs": 1.15}, "gpt2": {"averages 10": 1.15}},
    "compiled": {name: {"averages 10": 1.25, "averages 30": 1.15} for name in NAMES},
    "reduce-overhead": {f"mlp-{batch}": {"own inputs": most} for batch, most in ((32, 1.05), (128, 1.15), (512, 1.8))},
    "CUDA graph": {
        **{f"mlp-{batch}": {"own inputs": most} for batch, most in ((32, 0.9), (128, 1.3), (512, 2.2))},
        "resnet20": {"own inputs": 1.2},
    },
}
CPU: dict[str, dict[str, Wanted]] = {
    "eager": {
        **{name: {"own inputs": 1.15, "cheaper": 1.15} for name in ("mlp-32", "mlp-128")},
        "resnet20": {"own inputs": 1.9, "averages 10": 1.15, "cheaper": 1.15},
        **{name: {"own inputs": None, "averages 10": None, "cheaper": 1.3} for name in ("small-mlp", "small-cnn")},
    }
}
FIRST_STEP = {"cold": 6.0, "warm": 1.0}  # seconds more than a plain one, by what the compilers' caches are


@dataclass(frozen=True)
class Match:
    """Steps that are timed in turns: plain ones and corrected ones, with the most that those may cost."""

    name: str
    work: Work
    mode: str
    wanted: Wanted
    point: Mapping[str, Any] = field(default_factory=dict)  # of the figure: its sizes, and which of them is varied

    @property
    def period(self) -> int:
        """After how many steps all has been done that is done now and then."""
        return max(int((WAYS[way] or {}).get("refresh", 1)) for way in self.wanted)

    def work_of(self, way: str) -> Work:
        """Returns the work; with BatchNorm it is another network's."""
        return replace(self.work, model=partial(resnet20, True)) if way == BATCH_NORM else self.work


def matches(device: str, *, quick: bool = False) -> list[Match]:
    """Returns all matches on a device, or quick ones, of tiny networks."""
    known = works(quick=quick)
    return [
        Match(f"{name}-{mode.replace(' ', '-').lower()}", known[name], mode, its)
        for mode, wanted in (GPU if device == "cuda" else CPU).items()
        for name, its in wanted.items()
    ]


def scaling(device: str, *, quick: bool = False) -> list[Match]:
    """Returns the points of the figure: perceptrons of which width, depth and batch vary, one at a time."""
    gpu = device == "cuda"
    axes: dict[str, tuple[int, ...]] = {
        "width": (64, 256, 512, 1024, 4096) if gpu else (64, 128, 256, 512, 1024),
        "depth": (2, 4, 8, 16, 32),
        "batch": (8, 32, 128, 1024, 8192) if gpu else (8, 32, 128, 512, 1024),
    }
    middle = {"width": 512 if gpu else 256, "depth": 4, "batch": 128}
    if quick:
        axes, middle = dict.fromkeys(axes, (2, 4)), dict.fromkeys(axes, 4)
    wanted = dict.fromkeys(way for way in ("own inputs", "averages 10", "cheaper") if not (gpu and way == "cheaper"))
    points = [(axis, {**middle, axis: value}) for axis, values in axes.items() for value in values]
    return [
        Match(f"scaling-{axis}-{its[axis]}", _perceptron(**its), "eager", wanted, point={"axis": axis, **its})
        for axis, its in points
    ]


def works(*, quick: bool = False) -> dict[str, Work]:
    """Returns what is learnt, by name; quick: by tiny networks, or from little."""
    images, large, text = ((2, 16), (2, 64), (2, 64)) if quick else ((128, 32), (64, 224), (8, 1024))
    layers, width, heads, context, words = (2, 64, 4, 64, 256) if quick else (12, 768, 12, 1024, 50257)
    return {
        **{f"mlp-{n}": _perceptron(64, 2, n) if quick else _perceptron(800, 8, n, 3072) for n in (32, 128, 512, 2048)},
        "small-mlp": _perceptron(256, 3, 128),
        "small-cnn": _images("CNN 8-16", _small_network, 32, 16),
        "resnet20": _images("ResNet-20", partial(resnet20, False), *images, optimizer="nesterov"),
        "resnet50": _images("ResNet-50, bfloat16", resnet50, *large, optimizer="nesterov", classes=1000, autocast=True),
        "gpt2": Work(
            f"GPT-2 small, bfloat16, {text[0]}×{text[1]} tokens",
            partial(LanguageModel, layers, width, heads, context, words),
            *(text, words, "adamw", ("head",)),
            tokens=True,
            autocast=True,
        ),
    }


def _perceptron(width: int, depth: int, batch: int, inputs: int | None = None) -> Work:
    inputs = inputs or width
    title = f"MLP {inputs}-{depth}×{width}-10, batch {batch}"
    return Work(title, partial(mlp, inputs, (width,) * depth, 10), (batch, inputs))


def _images(name: str, model: Callable[[], nn.Module], batch: int, pixels: int, **options: Any) -> Work:
    return Work(f"{name}, {batch} images of {pixels}²", model, (batch, 3, pixels, pixels), **options)


def _small_network() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, 10))
