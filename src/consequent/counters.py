"""Counts of what is not an ordinary step."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass
class Counters:
    """What happened so far. Whatever is not an ordinary step is counted here, and warned of once.

    Attributes:
        steps: corrected steps, skipped ones included.
        skipped: steps not taken because NaN or inf was met (on a GPU, unless ``check=True``, gradients were zeroed).
        rescued: factorisations that failed, or lost nearly all digits, in float32 and were repeated in float64.
        fallen_back: factorisations that failed there too; the layer got a shortened plain gradient.
        edited: gradients that were no longer ``ΔZ Xᵀ`` at the step. They are corrected as they are (on the sample side
            through a float64 solve, on a GPU that is not waited for they are only shortened); the feature side, where
            nothing depends on it, looks once per layer.
    """

    steps: int = 0
    skipped: int = 0
    rescued: int = 0
    fallen_back: int = 0
    edited: int = 0


class Tally:
    """Counts on the host, and on devices that must not be waited for."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._waiting: list[tuple[str, Tensor]] = []

    def add(self, name: str, count: int | Tensor = 1) -> None:
        """Count something. A tensor is looked at later."""
        if not isinstance(count, Tensor):
            setattr(self._counters, name, getattr(self._counters, name) + count)
            return
        for place, (waiting_name, waiting) in enumerate(self._waiting):
            if waiting_name == name and waiting.device == count.device:
                self._waiting[place] = (name, waiting + count)
                return
        self._waiting.append((name, count))

    def read(self) -> Counters:
        """All counts; waits for the devices."""
        waiting, self._waiting = self._waiting, []
        for name, count in waiting:
            self.add(name, int(count))
        return replace(self._counters)

    def restore(self, counters: Counters) -> None:
        """Start again from saved counts."""
        self._counters, self._waiting = counters, []
