"""One weight after the other, in plain torch: the definition that all other engines are tested against."""

from collections.abc import Sequence

from consequent.engines.engine import Work, WritesOneByOne
from consequent.statistics.solution import Solution


class Plain(WritesOneByOne):
    """Takes everything."""

    def solve(self, works: Sequence[Work]) -> list[Solution]:
        """A solution for each work."""
        solutions = []
        for record, damping, may_wait, scale, _ in works:
            solution = record.captured.solve(record, damping, may_wait=may_wait)
            solution.scale = scale
            solutions.append(solution)
        return solutions
