"""What every rank has, at the beginning of a step: the ranks agree on layers and settings, and tell their rows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.maths.damping import Damping
from consequent.ranks.announcements import (
    IDLE,
    MISBEHAVES,
    MOMENT,
    NOTHING,
    ROWS,
    Block,
    Header,
    News,
    blocks_of,
    difference,
    key_of,
)
from consequent.ranks.process_group import Ranks
from consequent.reports.reports import shown
from consequent.statistics.averages import Idle
from consequent.statistics.moment import Moment


class Opening:
    """What the ranks tell each other first.

    Args:
        capture: this rank's layers.
        corrector: its records.
        ranks: all ranks.
        damping_of: λ for a parameter.
        settings: what all ranks must agree on besides the layers, as text by name.

    Attributes:
        headers: what each rank has, after :meth:`open`.
    """

    def __init__(
        self,
        capture: Capture,
        corrector: StepCorrector,
        ranks: Ranks,
        damping_of: Callable[[Tensor], Damping],
        settings: Callable[[], dict[str, str]],
    ) -> None:
        self.headers: list[Header] = []
        self._ranks = ranks
        self._capture = capture
        self._corrector = corrector
        self._damping_of = damping_of
        self._settings = settings
        self._agreed: int | None = None  # digest of what all ranks are attached to
        self._length = 0  # of the last header
        self._shapes: dict[int, tuple[Block, ...]] = {}  # that were told, by key

    def open(self, failure: Exception | None) -> bool:
        """Tell the other ranks what was captured here, and hear from them.

        Args:
            failure: why this rank cannot take part, if it cannot.

        Returns:
            whether any rank has captured anything.
        """
        self._ranks.traffic.begin_step()
        digest, described = self._digest()
        if self._agreed is None:
            self._agree(digest, described, failure)
        header = self._header(digest, failure)
        numbers = header.numbers()
        if digest != self._agreed:  # of another length, perhaps: what the others expect is enough to say so
            numbers = (numbers + [0] * self._length)[: self._length]
        self._length = len(numbers)
        self.headers = [Header.read(theirs) for theirs in self._ranks.gather_numbers(numbers)]
        self._raise_failures(failure)
        if any(theirs.digest != self._agreed for theirs in self.headers):  # somebody's layers or settings changed
            self._agreed = None
            return self.open(None)
        self._learn_shapes(header)
        return any(news.form in (MOMENT, ROWS, IDLE) for theirs in self.headers for news in theirs.layers)

    @property
    def samples(self) -> int:
        """Samples that entered the model on all ranks together."""
        return sum(header.samples for header in self.headers)

    def blocks(self, news: News) -> list[Block]:
        """Those of which a rank has told."""
        if not news.has_rows:
            return []
        blocks = list(self._shapes[news.shapes])
        if len(blocks) == 1:  # how many is not in the key: it may change at every step
            blocks = [blocks[0]._replace(samples=blocks[0].shape.samples(news.rows))]
        return blocks

    def _digest(self) -> tuple[int, dict[str, str]]:
        described = self._settings()
        for name, layer in self._capture.layers.items():
            weight, bias = self._capture.parameters_of(layer)
            trained = [
                f"{kind} {list(p.shape)}"
                for kind, p in (("weight", weight), ("bias", bias))
                if p is not None and self.is_trained(p)
            ]
            damping = self._damping_of(weight if weight.requires_grad or bias is None else bias)
            described[shown(name)] = f"{type(layer).__name__} ({', '.join(trained) or 'not trained'}), {damping}"
        return key_of(tuple(described.items())), described

    def is_trained(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is corrected."""
        return parameter.requires_grad and self._capture.wants(parameter)

    def _agree(self, digest: int, described: dict[str, str], failure: Exception | None) -> None:
        """All ranks must be attached to the same layers with the same settings; otherwise all of them raise."""
        answers = self._ranks.gather_numbers([digest, int(failure is not None)])
        if len({theirs for theirs, _ in answers}) > 1:
            everyones: list[dict[str, str]] = self._ranks.gather_objects(described)
            raise RuntimeError("the ranks disagree on what is corrected, and how: " + difference(everyones))
        self._agreed = digest
        self.headers = [Header(theirs, 0, failed, []) for theirs, failed in answers]
        self._raise_failures(failure)

    def _raise_failures(self, mine: Exception | None) -> None:
        if mine is not None:
            raise mine
        failed = [rank for rank, header in enumerate(self.headers) if header.failed]
        if failed:
            raise RuntimeError(f"rank {failed[0]} cannot correct this step, so no rank does; its own error says why")

    def _header(self, digest: int, failure: Exception | None) -> Header:
        count = len(self._capture.layers)
        if failure is not None:
            return Header(digest, 0, 1, [News(NOTHING, 0, 0, 0)] * count)
        news = []
        for layer in self._capture.layers.values():
            parameters = self._capture.parameters_of(layer)
            record = self._corrector.records.get(parameters[0])
            partial = int(any(p.grad is None for p in parameters if p is not None and self.is_trained(p)))
            if layer in self._capture.misbehaving:
                news.append(News(MISBEHAVES, 0, 0, 0))
                continue
            uses = [] if record is None else [use for use in record.uses if use.layer is layer]
            if record is None or not uses:
                news.append(News(NOTHING, 0, 0, 0, partial))
                continue
            rows, others = sum(use.rows for use in uses), int(bool(record.beside))
            if isinstance(record.statistic, Idle):
                news.append(News(IDLE, rows, 0, others, partial))
            elif isinstance(record.statistic, Moment):
                news.append(News(MOMENT, rows, 0, others, partial))
            else:
                news.append(News(ROWS, rows, key_of(blocks_of(uses)), others, partial))
        return Header(digest, self._capture.entries.count(self._corrector.passes()), 0, news)

    def _learn_shapes(self, mine: Header) -> None:
        """Ask for shapes that somebody has for the first time; everyone then knows the same ones."""
        keys = {news.shapes for header in self.headers for news in header.layers if news.has_rows}
        if keys <= self._shapes.keys():
            return
        told: dict[int, Any] = {}
        for layer, news in zip(self._capture.layers.values(), mine.layers, strict=True):
            if news.has_rows and news.shapes not in self._shapes:
                record = self._corrector.records[self._capture.parameters_of(layer)[0]]
                told[news.shapes] = blocks_of([use for use in record.uses if use.layer is layer])
        for theirs in self._ranks.gather_objects(told):
            self._shapes |= theirs
