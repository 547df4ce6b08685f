"""One weight after the other, in plain torch: the definition that all other engines are tested against."""

from collections.abc import Sequence

from consequent.engines.engine import Work
from consequent.statistics.solution import Solution


class Plain:
    """Takes everything."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """A solution for each work."""
        return [record.captured.solve(record, damping, may_wait=may_wait) for record, damping, may_wait in works]
