"""Matrices of one shape are summed up, averaged and inverted together, as many as a little memory has room for.

For a small layer the host takes longer than the device: each of these is a dozen calls, which layers alike share.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

AT_ONCE = 8192**2  # entries of matrices that go together, at most

T = TypeVar("T")


def together(items: Iterable[T], kind: Callable[[T], Hashable], entries: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in lists, each of one kind.

    Args:
        items: in any order, which is kept within a list.
        kind: what the items of a list have in common.
        entries: of an item's matrix.
    """
    kinds: dict[Hashable, list[T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    for alike in kinds.values():
        most = max(1, AT_ONCE // max(1, entries(alike[0])))
        for start in range(0, len(alike), most):
            yield alike[start : start + most]
