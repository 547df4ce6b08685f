"""One kind of fault: how often it was tried, and how often nothing was lost and nothing was silently wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Trial:
    """One kind of fault."""

    fault: str
    expected: str  # what should happen
    tried: int = 0
    as_expected: int = 0
    surprises: list[str] = field(default_factory=list)
    not_tried: str = ""  # why, if it was not tried at all

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Counts an attempt; an AssertionError or any other exception inside is a surprise."""
        self.tried += 1
        try:
            yield
        except Exception as error:
            self.surprises.append(f"{what}: {type(error).__name__}: {error}")
        else:
            self.as_expected += 1


def require(condition: object, otherwise: str) -> None:
    """Raises AssertionError unless the condition holds, also where assertions are switched off."""
    if not condition:
        raise AssertionError(otherwise)
