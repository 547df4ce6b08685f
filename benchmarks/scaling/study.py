"""How the cost grows: the same step at sizes that double, and the exponents that come out.

A time that grows as a power of the size is a straight line in a log–log plot. Its slope is fitted over the largest
sizes, as far down as the time grows at all: where fixed costs hide everything else a curve is flat, and has no power.
It is compared with the slope of the operation counts over the same sizes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.scaling.operations import correction_operations
from consequent_lab.models import mlp, residual_net
from consequent_lab.timing import Plan, Quartiles, Timings, describe_error, measure, release_memory
from consequent_lab.workloads import Entrant, Task, TrainingStep

PLAIN, OURS, BACKWARD = "SGD", "C-SGD", "C-SGD, at backward"
QUANTITIES = ("plain", "ours", "backward", "correction")

LEAST_GROWTH = 1.3  # for a size that doubles; less is flat
LEAST_IN_ALL = 2.0  # over all of the sizes that a power is fitted to,
FEWEST_FITTED = 3  # and so many of them


@dataclass(frozen=True)
class Sweep:
    """A size that doubles from point to point while all else stays."""

    name: str
    title: str
    axis: str
    sizes: tuple[int, ...]
    setup: Callable[[int], tuple[Task, Callable[[], nn.Module]]]
    prediction: str  # for the largest sizes, in words


@dataclass(frozen=True)
class Limits:
    """How long a study may take."""

    rounds: int
    point_seconds: float
    sweep_seconds: float


@dataclass(frozen=True)
class Point:
    """Milliseconds at one size."""

    size: int
    plain: Quartiles
    ours: Quartiles  # corrected at the step
    correction: Quartiles  # the difference of the better one of ours and the plain one, round by round
    operations: float  # of the correction, on paper
    backward: Quartiles | None = None  # corrected in the backward pass


@dataclass
class Curve:
    """All points of a sweep, and why there are no more."""

    sweep: Sweep
    points: list[Point] = field(default_factory=list)
    stopped: str = "largest size reached"

    @property
    def sizes(self) -> list[int]:
        """The sizes measured."""
        return [point.size for point in self.points]

    def medians(self, quantity: str) -> list[float]:
        """Returns the median milliseconds of one of QUANTITIES at every size; NaN where it was not measured."""
        found = [getattr(point, quantity) for point in self.points]
        return [math.nan if one is None else one.median for one in found]

    def exponent(self, quantity: str) -> float:
        """Returns the measured exponent; NaN if the time does not grow."""
        return fit_exponent(self.sizes, self.medians(quantity))

    def fitted(self, quantity: str) -> slice:
        """Returns which points that is fitted to."""
        return growing(self.sizes, self.medians(quantity))

    @property
    def predicted(self) -> float:
        """The exponent of the operation counts over the sizes at which the correction's time grows; else over all."""
        part, counts = self.fitted("correction"), [point.operations for point in self.points]
        sizes = self.sizes
        return slope(sizes[part], counts[part]) if len(sizes[part]) > 1 else slope(sizes, counts)

    def record(self) -> dict[str, Any]:
        """Returns the curve for a JSON file."""
        return {
            "name": self.sweep.name,
            "title": self.sweep.title,
            "axis": self.sweep.axis,
            "prediction": self.sweep.prediction,
            "predicted_exponent": self.predicted,
            "exponents": {quantity: self.exponent(quantity) for quantity in QUANTITIES},
            "fitted_sizes": {quantity: self.sizes[self.fitted(quantity)] for quantity in QUANTITIES},
            "stopped": self.stopped,
            "points": [asdict(point) for point in self.points],
        }


def recorded_curves(record: dict[str, Any]) -> list[Curve]:
    """Returns the curves of a JSON file that this study has written, perhaps on another machine."""
    known = {sweep.name: sweep for sweep in sweeps(record["device"]["type"], quick=record["quick"])}
    curves = []
    for curve in record["curves"]:
        points = [
            Point(**point | {name: Quartiles(**point[name]) for name in QUANTITIES if point.get(name)})
            for point in curve["points"]
        ]
        curves.append(Curve(known[curve["name"]], points, curve["stopped"]))
    return curves


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of log(value) over log(size) where the values grow; NaN if they do not.

    >>> round(fit_exponent([1, 2, 4, 8, 16], [9.0, 9.0, 16.0, 64.0, 256.0]), 1)
    1.6
    >>> fit_exponent([1, 2, 4, 8, 16], [9.0, 9.1, 8.9, 9.0, 9.5])
    nan
    """
    part = growing(sizes, values)
    return slope(sizes[part], values[part])


def growing(sizes: Sequence[float], values: Sequence[float]) -> slice:
    """Returns the largest sizes, as far down as the values grow; none if that is too little to fit a power to.

    >>> sizes = [1, 2, 4, 8, 16]
    >>> sizes[growing(sizes, [9.0, 9.0, 16.0, 64.0, 256.0])], sizes[growing(sizes, [9.0, 9.0, 9.0, 9.0, 20.0])]
    ([2, 4, 8, 16], [])
    """
    first = len(sizes) - 1
    while first > 0 and _grows(sizes[first - 1 : first + 1], values[first - 1 : first + 1]):
        first -= 1
    if len(sizes) - first < FEWEST_FITTED or values[-1] < LEAST_IN_ALL * values[first]:
        first = len(sizes)
    return slice(first, None)


def _grows(sizes: Sequence[float], values: Sequence[float]) -> bool:
    before, after = values
    return before > 0 and after / before >= LEAST_GROWTH ** math.log2(sizes[1] / sizes[0])


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the least-squares slope of log(value) over log(size); NaN for less than two."""
    if len(sizes) < 2:
        return math.nan
    return float(np.polyfit(np.log(np.array(sizes, float)), np.log(np.array(values, float)), 1)[0])


def sweeps(device: str, *, quick: bool = False) -> tuple[Sweep, ...]:
    """Returns what is varied, and how far at most."""
    scale = 0 if quick else 2 if device == "cuda" else 1
    batch, width = (16, 64, 128)[scale], (128, 512, 1024)[scale]
    images, channels, side = (4, 16, 64)[scale], (8, 16, 32)[scale], (8, 16, 16)[scale]
    wide = f"Residual net, {channels} channels"

    def perceptron(batch: int, width: int) -> tuple[Task, Callable[[], nn.Module]]:
        return Task("", (batch, width)), partial(mlp, width, (width,) * 4, 10)

    def residual(
        images: int = images, channels: int = channels, side: int = side, blocks: int = 2
    ) -> tuple[Task, Callable[[], nn.Module]]:
        task = Task("", (images, 3, side, side), channels_last=True)
        return task, partial(residual_net, (channels,), blocks)

    return (
        Sweep(
            "mlp-batch",
            f"MLP of 5 layers of {width}",
            "samples in a batch",
            _doubling(16, (64, 8192, 65536)[scale]),
            lambda size: perceptron(size, width),
            "1: beyond as many samples as inputs only the D×D Gram matrix grows, N·D²",
        ),
        Sweep(
            "mlp-width",
            f"MLP of 5 layers, batch {batch}",
            "width",
            _doubling(64, (256, 4096, 16384)[scale]),
            lambda size: perceptron(batch, size),
            "2: the final product N·O·D; the N×N Gram matrix costs only N²·D",
        ),
        Sweep(
            "conv-batch",
            f"{wide}, {side}² pixels",
            "images in a batch",
            _doubling(2, (16, 2048, 4096)[scale]),
            lambda size: residual(images=size),
            "1: the Gram matrix, (9C)² per pixel",
        ),
        Sweep(
            "conv-channels",
            f"Residual net, {images} images of {side}²",
            "channels",
            _doubling(4, (16, 256, 1024)[scale]),
            lambda size: residual(channels=size),
            "3: Cholesky and solve, (9C)³, once 9C nears the number of pixels; 2 before, the Gram matrix",
        ),
        Sweep(
            "conv-side",
            f"{wide}, {images} images",
            "image side",
            _doubling(4, (16, 256, 512)[scale]),
            lambda size: residual(side=size),
            "2: the Gram matrix, (9C)² per pixel",
        ),
        Sweep(
            "conv-depth",
            f"{wide}, {images} images of {side}²",
            "residual blocks",
            _doubling(1, (4, 64, 64)[scale]),
            lambda size: residual(blocks=size),
            "1: every layer on its own",
        ),
    )


def limits(rounds: int, *, quick: bool) -> Limits:
    """Returns how long the study may take."""
    return Limits(rounds, *((3, 15) if quick else (5, 30)))


def run_sweep(sweep: Sweep, device: str, limit: Limits) -> Curve:
    """Measures from the smallest size up, until time or memory runs out."""
    curve = Curve(sweep)
    end = time.perf_counter() + limit.sweep_seconds
    for size in sweep.sizes:
        expected = _expected_seconds([max(_lows(point)) for point in curve.points], limit.rounds)
        if expected > limit.point_seconds or time.perf_counter() + expected > end:
            curve.stopped = f"{size} would take too long"
            break
        task, model = sweep.setup(size)
        timings = _time(task, model, device, limit)
        if timings.errors:
            curve.stopped = f"{size} failed: {'; '.join(timings.errors.values())}"
            break
        with torch.device("meta"):
            operations = correction_operations(task, model())
        plain, ours, backward = (Quartiles.of(timings.milliseconds[name]) for name in (PLAIN, OURS, BACKWARD))
        better = OURS if ours.median <= backward.median else BACKWARD
        curve.points.append(Point(size, plain, ours, timings.difference(better, PLAIN), operations, backward))
    return curve


def _lows(point: Point) -> list[float]:
    return [one.low for one in (point.ours, point.backward) if one is not None]


def _time(task: Task, model: Callable[[], nn.Module], device: str, limit: Limits) -> Timings:
    entrants = (
        Entrant(PLAIN, model, "sgd"),
        Entrant(OURS, model, "sgd", {}),
        Entrant(BACKWARD, model, "sgd", {"at": "backward"}),
    )
    plan = Plan(limit.rounds, limit.point_seconds, sample_seconds=0.005, warm_up=2)
    try:
        with torch.device(device):  # where large models are initialised much faster
            steps = {entrant.name: TrainingStep(task, entrant, device) for entrant in entrants}
        return measure(steps, device, plan)
    except Exception as error:
        return Timings(errors={OURS: describe_error(error)})
    finally:
        steps = {}
        release_memory()


def _expected_seconds(milliseconds: list[float], rounds: int) -> float:
    """Returns how long the next point may take if growth goes on; 0 if nothing is known."""
    if len(milliseconds) < 2:
        return 0.0
    growth = min(8.0, max(1.0, milliseconds[-1] / milliseconds[-2]))  # 8: the cube; more is noise
    return 1.5e-3 * milliseconds[-1] * growth * (rounds + 4)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """Returns first, 2·first, 4·first, … up to last, which is one of them."""
    return tuple(first << power for power in range((last // first).bit_length()))
