"""What the paper says of the adaptive filters it starts from: LMS depends on the inputs' strength, NLMS does not.

Two kinds of samples come in turn, strong and weak ones, on features of their own. Late in the stream an outlier comes:
a very strong input whose target is off by 1. Exact and quick.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from consequent.filters import FilterResult, lms, nlms
from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Series, Statement, Table
from consequent_lab.paper.statements import Outcome, judged

NAME = "filters"
SAMPLES = 1200
STRONG, WEAK = 2.0, 0.3  # norms of the inputs
OUTLIER_AT, OUTLIER_NORM, OUTLIER_ERROR = 1000, 10.0, 1.0
LMS_STEP, NLMS_STEP = 0.2, 0.2  # LMS is stable for the strong inputs below 2 / 2² = 0.5
LEARNT = 0.1  # of the first distance
WEIGHTS = (1.0, -1.0, 1.0, -1.0)  # the first two are seen by strong inputs alone, the others by weak ones


@dataclass(frozen=True)
class Stream:
    """Samples and what a filter made of them."""

    result: FilterResult

    def distance(self, part: slice) -> list[float]:
        """Returns the distance of some weights from the right ones before each sample, as a fraction of the first."""
        gap = (self.result.weights[:, part] - torch.tensor(WEIGHTS, dtype=torch.float64)[part]).norm(dim=1)
        values: list[float] = (gap / gap[0]).tolist()
        return values

    def learnt_after(self, part: slice) -> int | None:
        """Returns the samples until these weights are within a tenth of their first distance, or None."""
        return next((t for t, gap in enumerate(self.distance(part)) if gap <= LEARNT), None)

    @property
    def jump(self) -> float:
        """How far the outlier moves the weights, in lengths of the right weights."""
        change = self.result.weights[OUTLIER_AT + 1] - self.result.weights[OUTLIER_AT]
        return float(change.norm() / torch.tensor(WEIGHTS).norm())


STRONG_WEIGHTS, WEAK_WEIGHTS = slice(0, 2), slice(2, 4)


def samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    inputs = torch.zeros(SAMPLES, 4, dtype=torch.float64)
    inputs[0::2, STRONG_WEIGHTS] = STRONG * directions[0::2]
    inputs[1::2, WEAK_WEIGHTS] = WEAK * directions[1::2]
    inputs[OUTLIER_AT] *= OUTLIER_NORM / inputs[OUTLIER_AT].norm()
    targets = inputs @ torch.tensor(WEIGHTS, dtype=torch.float64)
    targets[OUTLIER_AT] += OUTLIER_ERROR
    return inputs, targets


def finding(*runs: Path) -> Finding:
    """Computes the experiment; needs no runs."""
    inputs, targets = samples()
    streams = {
        "LMS": Stream(lms(inputs, targets, LMS_STEP)),
        "NLMS": Stream(nlms(inputs, targets, NLMS_STEP)),
    }
    return Finding(
        name=NAME,
        title="Adaptive filters: LMS and NLMS",
        summary=f"Strong inputs (norm {STRONG:g}) and weak ones (norm {WEAK:g}) come in turn; sample {OUTLIER_AT} is "
        f"an outlier of norm {OUTLIER_NORM:g} whose target is off by {OUTLIER_ERROR:g}.",
        figures=[_figure(streams)],
        statements=statements(streams),
        tables=[_table(streams)],
    )


def statements(streams: dict[str, Stream]) -> list[Statement]:
    """Returns the paper's statements on LMS and NLMS."""
    learnt = {
        name: (stream.learnt_after(STRONG_WEIGHTS), stream.learnt_after(WEAK_WEIGHTS))
        for name, stream in streams.items()
    }
    (lms_strong, lms_weak), (nlms_strong, nlms_weak) = learnt["LMS"], learnt["NLMS"]
    lms_jump, nlms_jump = streams["LMS"].jump, streams["NLMS"].jump
    outcomes = {
        "strong_inputs_are_learnt_first": Outcome(
            f"LMS {_shown(lms_strong)} for the strong inputs' weights and {_shown(lms_weak)} for the weak ones'; NLMS "
            f"{_shown(nlms_strong)} and {_shown(nlms_weak)}.",
            [_ratio(lms_strong, lms_weak) > 3, 1 / 1.5 < _ratio(nlms_strong, nlms_weak) < 1.5],
        ),
        "outliers_confuse": Outcome(f"LMS {lms_jump:.2g}, NLMS {nlms_jump:.2g}.", [lms_jump > 0.5, nlms_jump < 0.05]),
    }
    return judged(NAME, "toy", outcomes, globals())


def _ratio(strong: int | None, weak: int | None) -> float:
    return (SAMPLES if weak is None else weak) / max(1, SAMPLES if strong is None else strong)


def _shown(count: int | None) -> str:
    return f"more than {SAMPLES}" if count is None else str(count)


def _figure(streams: dict[str, Stream]) -> Figure:
    places = [float(t) for t in range(0, SAMPLES + 1, 2)]
    panels = [
        Panel(
            title=name,
            series=[
                Series(label, {"sample": places, "distance": stream.distance(part)[::2]})
                for label, part in (
                    ("weights of strong inputs", STRONG_WEIGHTS),
                    ("weights of weak inputs", WEAK_WEIGHTS),
                )
            ],
            x=[Axis("sample", "samples seen")],
            y=[Axis("distance", "distance from the right weights ÷ the first distance", log=True)],
        )
        for name, stream in streams.items()
    ]
    return Figure(
        name=NAME,
        title="Strong and weak inputs, and an outlier",
        caption=f"Step sizes: LMS {LMS_STEP:g}, NLMS {NLMS_STEP:g}. The outlier is sample {OUTLIER_AT}.",
        panels=panels,
    )


def _table(streams: dict[str, Stream]) -> Table:
    rows = []
    for name, stream in streams.items():
        counts = [stream.learnt_after(part) for part in (STRONG_WEIGHTS, WEAK_WEIGHTS)]
        rows.append([name, *(None if count is None else float(count) for count in counts), stream.jump])
    columns = ["filter", "samples: strong inputs' weights", "samples: weak inputs' weights", "jump at the outlier"]
    return Table("LMS and NLMS", columns, rows)
