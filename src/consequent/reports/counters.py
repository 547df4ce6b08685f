"""Counts of what is not an ordinary step."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass
class Counters:
    """What happened so far. Whatever is not an ordinary step is counted here, and warned of once.

    Attributes:
        steps: corrected steps, skipped ones included; with ``at="backward"`` backward passes.
        skipped: steps not taken because NaN or inf was met (on a GPU, unless ``check=True``, gradients were zeroed).
        rescued: factorisations that failed, or lost nearly all digits, in float32. They were repeated in float64; where
            the rows are gone, and on a GPU that is not waited for, features that the others determine, up to float32's
            rounding, got more damping instead.
        fallen_back: factorisations that failed even so; the layer got a shortened plain gradient.
        edited: gradients on the sample side that were no multiple of ``ΔZ Xᵀ`` any more at the step. They were used as
            they are, shortened until they cannot overshoot. The feature side takes any gradient, and does not look.
        bounded: gradients of layers that were shortened, as they would have changed the outputs by more than ``bound``.
        promised: steps that were shortened, as they promised more than the fraction ``promise`` of the loss.
    """

    steps: int = 0
    skipped: int = 0
    rescued: int = 0
    fallen_back: int = 0
    edited: int = 0
    bounded: int = 0
    promised: int = 0


NAMES = tuple(field.name for field in fields(Counters))


class Tally:
    """Counts on the host, and on devices that must not be waited for.

    A device's counts are one tensor that stays where it is: a captured CUDA graph goes on counting in it.
    """

    def __init__(self) -> None:
        self._counters = Counters()
        self._on_device: dict[torch.device, Tensor] = {}

    def add(self, name: str, count: int | Tensor = 1) -> None:
        """Count something. A tensor is looked at later."""
        if isinstance(count, Tensor):
            self.on_device(count.device)[NAMES.index(name)].add_(count.squeeze())
        elif count:
            setattr(self._counters, name, getattr(self._counters, name) + count)

    def on_device(self, device: torch.device) -> Tensor:
        """The counts on a device: int64, an element for each of :data:`NAMES`."""
        if device not in self._on_device:
            self._on_device[device] = torch.zeros(len(NAMES), dtype=torch.int64, device=device)
        return self._on_device[device]

    def read(self) -> Counters:
        """All counts; waits for the devices."""
        counts = {name: getattr(self._counters, name) for name in NAMES}
        for on_device in self._on_device.values():
            for name, count in zip(NAMES, on_device.tolist(), strict=True):
                counts[name] += count
        return Counters(**counts)

    def restore(self, counters: Counters) -> None:
        """Start again from saved counts."""
        self._counters = replace(counters)
        for on_device in self._on_device.values():
            on_device.zero_()
