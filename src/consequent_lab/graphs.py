"""A whole training step as one CUDA graph: the host hands over one launch instead of hundreds.

The recipe is PyTorch's own: a few steps on a side stream, so that everything made at first use exists; then zero_grad,
forward, backward and step are captured once and replayed. What is captured is fixed: shapes, learning rates given as
numbers, and the addresses of the input buffers, into which every new batch is copied.
"""

import gc
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consequent_lab.optimizers import Optimizers

WARM_UP_STEPS = 5  # PyTorch asks for at least 3 eager steps


class GraphedStep:
    """A training step that is replayed: call it with a batch, get the loss.

    Making it trains for `warm_up` eager steps on the batch given here, whose shapes all later ones have. The loss is
    computed from the model and the tensors of a batch. An optimiser with a step count (Adam, AdamW, RMSprop, …) needs
    `capturable=True`.

    Raises:
        ValueError: if a tensor is not on a CUDA device, or a step-counting optimiser is not capturable.
        RuntimeError: from the capture, if something in the step needs the host.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Optimizers,
        compute_loss: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        warm_up: int = WARM_UP_STEPS,
    ) -> None:
        _check(model, optimizer, batch)
        buffers = self._buffers = tuple(tensor.clone() for tensor in batch)  # keeps the memory format

        def step() -> Tensor:  # which does not hold this object, so that its memory is given back when it is dropped
            optimizer.zero_grad(set_to_none=True)  # the gradients then live in the graph's own memory
            loss = compute_loss(model, *buffers)
            loss.backward()
            optimizer.step()
            return loss.detach()

        self._step = step  # holds the model and the optimiser, whose memory the graph writes to
        self._graph: torch.cuda.CUDAGraph | None = None
        step_aside(step, warm_up)
        self.capture()

    def capture(self) -> None:
        """Captures the step, or captures it anew: what was a plain number in it, such as a learning rate, has changed.

        Not by torch.cuda.graph(), which collects garbage and gives the memory back each time: that costs more than all
        else where a step is captured often. The new graph has the memory of the old one.
        """
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._graph is None else self._graph.pool()
        collects = gc.isenabled()
        gc.disable()  # what is collected may be of CUDA, and must not be destroyed meanwhile
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool)
                try:
                    self._loss = self._step()
                except BaseException:
                    with suppress(RuntimeError):  # it says once more that the capture failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own stream behind
            if collects:
                gc.enable()
        self._graph = graph

    def __call__(self, *batch: Tensor) -> Tensor:
        """Trains on a batch, or again on the last one; the loss is overwritten by the next call."""
        if batch and len(batch) != len(self._buffers):
            raise ValueError(f"the step was captured with {len(self._buffers)} tensors per batch, got {len(batch)}")
        for buffer, tensor in zip(self._buffers, batch, strict=False):
            if buffer.shape != tensor.shape:
                raise ValueError(
                    f"the step was captured for a batch of shape {list(buffer.shape)}, got {list(tensor.shape)}; "
                    "drop the last incomplete batch (drop_last=True)"
                )
            buffer.copy_(tensor, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._loss


def step_aside(step: Callable[[], object], times: int = 1) -> None:
    """Takes steps on a stream of their own, as those before a capture need it."""
    before, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(before)
    with torch.cuda.stream(aside):
        for _ in range(times):
            step()
    before.wait_stream(aside)


def _check(model: nn.Module, optimizer: Optimizer | Optimizers, batch: tuple[Tensor, ...]) -> None:
    tensors = {"the model": next(model.parameters()), **{f"batch[{place}]": t for place, t in enumerate(batch)}}
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            raise ValueError(
                f"a CUDA graph needs everything on a CUDA device, but {name} is on {tensor.device}; move it with "
                '.to("cuda"), or take eager steps'
            )
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise ValueError(f"{type(optimizer).__name__} counts its steps on the host; make it with capturable=True")
