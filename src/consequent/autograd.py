"""What autograd is doing at this moment: the few questions that only its engine can answer.

PyTorch asks itself these questions through private names (``torch.utils.checkpoint``, ``torch.autograd.graph`` and FSDP
use the same ones). They are gathered here so that a new torch release needs one file checked.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import Node


def backward_pass_id() -> int:
    """A number for the running backward pass; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def graph_is_retained() -> bool:
    """Whether the running backward pass keeps its graph for another one (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_accumulate(leaf: Tensor | Node) -> bool:
    """Whether the running backward pass, whose graph the leaf is in, is going to add to ``leaf.grad``.

    False in ``torch.autograd.grad``, which may run through a layer and leave its ``.grad`` alone.

    Args:
        leaf: a parameter, or its :func:`accumulator`.
    """
    tensor = leaf if isinstance(leaf, Tensor) else leaf.variable  # type: ignore[attr-defined]
    if not tensor.requires_grad:
        return False  # it was frozen since the forward pass: its node runs, and adds nothing
    node = accumulator(leaf) if isinstance(leaf, Tensor) else leaf
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad asks for this very leaf: it is returned, not accumulated
        return False


def accumulator(leaf: Tensor) -> Node:
    """The node that adds to ``leaf.grad``: ``torch.autograd.graph.get_gradient_edge(leaf).node`` in half the time."""
    with torch.enable_grad():
        view = leaf.expand_as(leaf)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def accumulator_beside(output: Tensor, leaf: Tensor) -> Node | None:
    """The node that adds to ``leaf.grad``, if the operation that made the output took the leaf as it is.

    In a third of the time of :func:`accumulator`; an operation in between (autocast, a transposition) hides it.
    """
    operation = output.grad_fn
    for node, _ in () if operation is None else operation.next_functions:
        if getattr(node, "variable", None) is leaf:
            return node
    return None


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the running backward pass has written all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def answers_at_once(place: Tensor | torch.device) -> bool:
    """Whether looking at numbers there makes nobody wait: true on the CPU, not on a GPU in full flight."""
    device = place if isinstance(place, torch.device) else place.device
    return device.type == "cpu"


def graph_is_being_captured() -> bool:
    """Whether what is launched now is not run but recorded in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def transforms_are_active() -> bool:
    """Whether ``torch.func`` (vmap, grad, …) is rewriting the operations now."""
    return bool(torch._C._are_functorch_transforms_active())


class Kept:
    """A tensor put by for the backward pass, as autograd puts its own by.

    A plain reference would hold the tensor in spite of activation checkpointing or ``save_on_cpu``. Where there is
    something of the kind, it is saved through autograd, and recomputed or brought back like every other activation. If
    it was overwritten in between that can be told.

    Attributes:
        stays: whether it is the forward pass's own tensor that comes back, neither a recomputed nor a restored one.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self.stays = backward_pass_id() == -1 and not _saved_tensors_are_hooked()
        if self.stays:
            self._saved, self._version = tensor, tensor._version
        else:
            # A product with nothing: it costs no work, and its backward node has to save the tensor.
            self._saved = _nothing(tensor.ndim, tensor.dtype, tensor.device) * tensor

    @property
    def is_overwritten(self) -> bool:
        """Whether somebody has written to the tensor since; one saved through autograd raises by itself."""
        return self.stays and self._saved._version != self._version

    def get(self) -> Tensor:
        """The tensor, unless it :attr:`is_overwritten`; once per backward pass."""
        if self.stays:
            return self._saved
        tensor = self._saved.grad_fn._saved_other  # type: ignore[union-attr]
        assert isinstance(tensor, Tensor)
        return tensor


def _saved_tensors_are_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@lru_cache(maxsize=64)
def _nothing(ndim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A leaf without elements that broadcasts with a tensor of so many dimensions."""
    return torch.empty((0, *[1] * ndim), dtype=dtype, device=device, requires_grad=True)
