"""From what was compared to a verdict."""

from collections.abc import Iterable

from consequent_lab.paper.findings import Verdict


def all_of(checks: Iterable[bool | None]) -> Verdict:
    """Returns the verdict on a statement with several parts; None is a part that was not measured.

    A statement of which a part was not measured holds in part at most.

    >>> all_of([True, True]), all_of([True, False]), all_of([False]), all_of([True, None]), all_of([None])
    ('holds', 'holds in part', 'does not hold', 'holds in part', 'not measured')
    """
    parts = list(checks)
    measured = [part for part in parts if part is not None]
    if not measured:
        return "not measured"
    if not any(measured):
        return "does not hold"
    return "holds" if all(measured) and len(measured) == len(parts) else "holds in part"
