"""Factorising ahead: on a GPU, second moments and their factors are computed beside the rest of the backward pass.

What a layer's factorisation needs, its inputs, is known when the backward pass reaches the layer; the gradient that it
is applied to is final only at the step. In between, backpropagation through the layers before it keeps the GPU partly
busy at best, and a factorisation needs one of its hundred multiprocessors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from consequent import kernels
from consequent.settings import Damping

STREAMS = 16  # factorisations that run side by side


@dataclass
class Factor:
    """``W = L⁻¹`` of a moment ``S + λI = L Lᵀ``."""

    inverse: Tensor  # [D, D], lower triangular
    status: Tensor  # [4]: trace of S, λ, whether it could be factorised, smallest pivot over largest entry
    damping: Damping  # that was in force


def factorise(moment: Tensor, damping: Damping, rows: int) -> Factor | None:
    """The factor of a moment ``[1, D, D]``, by a kernel that is not waited for; None where there is none for it."""
    if not kernels.run_on(moment.device) or moment.dtype != torch.float32 or len(moment) != 1:
        return None
    from consequent.kernels.factor import LARGEST, inverse_factor

    if not 0 < moment.shape[-1] <= LARGEST:
        return None
    inverse, status = inverse_factor(moment[0], damping.value, rows=rows if damping.relative else None)
    return Factor(inverse, status, damping)


class SideStreams:
    """Streams beside the one that the backward pass runs on, used in turn."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._busy: dict[torch.device, set[torch.cuda.Stream]] = {}
        self._turn = 0

    @contextmanager
    def beside(self, *inputs: Tensor) -> Iterator[None]:
        """Run what follows beside the current stream, after all that is there already.

        Args:
            inputs: tensors that are read, all on one GPU. Their memory is not used again before that is over.
        """
        device = inputs[0].device
        if device not in self._streams:
            self._streams[device] = [torch.cuda.Stream(device) for _ in range(STREAMS)]
        self._turn = (self._turn + 1) % STREAMS
        stream = self._streams[device][self._turn]
        stream.wait_stream(torch.cuda.current_stream(device))
        self._busy.setdefault(device, set()).add(stream)
        with torch.cuda.stream(stream):
            yield
        for tensor in inputs:
            tensor.record_stream(stream)

    def join(self) -> None:
        """Let the current stream wait for all that was started; the host does not wait."""
        for device, streams in self._busy.items():
            current = torch.cuda.current_stream(device)
            for stream in streams:
                current.wait_stream(stream)
        self._busy.clear()
