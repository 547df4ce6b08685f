"""A number on its way from a device."""

import torch
from torch import Tensor


class Arriving:
    """Whoever waits for it does not wait for what the device is given to do after.

    Args:
        number: on a GPU, or where it can be read at once.
    """

    def __init__(self, number: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        if not number.is_cuda:
            self._number = number.clone()
            return
        self._number = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record(torch.cuda.current_stream(number.device))

    @property
    def is_there(self) -> bool:
        """Whether nobody would have to wait."""
        return self._arrival is None or self._arrival.query()

    def __float__(self) -> float:
        if self._arrival is not None:
            self._arrival.synchronize()
        return float(self._number)
