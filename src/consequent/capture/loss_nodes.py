"""The nodes of autograd's graph between a loss and the model's outputs, while its backward pass runs.

Tensors that nodes had saved are gone by then; numbers, as of a reduction or a shape, are still there.
"""

import re
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from consequent.capture.torch_internals import innermost_frames

# Operations that only change the shape or the type.
SAME_ELEMENTS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy"}
NODES = 200  # to be looked at, from the loss on

# torch's numbers for reductions
NONE, MEAN, SUM = 0, 1, 2


class Started(NamedTuple):
    """What a backward pass began with.

    Attributes:
        loss: its node.
        with_gradient: whether a gradient of it was given: ``loss.backward(gradient)``.
    """

    loss: Node
    with_gradient: bool


class BackwardCall(NamedTuple):
    """What a call of backward() was given.

    Attributes:
        losses: what it is for.
        gradients: of these, where some were given.
        mark: an object that is this call's alone; None where it only hands over to another (of a tensor's subclass).
    """

    losses: list[Any]
    gradients: list[Any] | None
    mark: Any


def started_passes() -> list[Started]:
    """What the calls of backward() under way began with; on a GPU these are of another thread."""
    calls = [call for innermost in innermost_frames().values() for call in _calls_around(innermost)]
    nodes = [(getattr(loss, "grad_fn", None), call.gradients is not None) for call in calls for loss in call.losses]
    return [Started(node, with_gradient) for node, with_gradient in nodes if node is not None]


def outermost_backward(thread: int) -> BackwardCall | None:
    """The call of backward() that a thread is in; one inside of another (reentrant checkpointing) is a part of that."""
    innermost = sys._getframe() if thread == threading.get_ident() else innermost_frames().get(thread)
    calls = [] if innermost is None else _calls_around(innermost)
    del innermost  # which may be that of this function
    return next((call for call in reversed(calls) if call.mark is not None), None)


def _calls_around(innermost: FrameType) -> list[BackwardCall]:
    """The calls of backward() that a thread is in, the innermost first.

    No frame is held in the end: it would keep itself alive, and the graph with it.
    """
    found: list[BackwardCall] = []
    frame: FrameType | None = innermost
    del innermost
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.autograd":
            variables = frame.f_locals
            gradients = _listed(variables["grad_tensors"]) if variables.get("grad_tensors") is not None else None
            losses = _listed(variables.get("tensors", ()))
            found.append(BackwardCall(losses, gradients, variables.get("grad_tensors_")))
        frame = frame.f_back
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple | list) else [given]


def nodes_between(loss: Node, outputs: Node) -> Iterator[Node]:
    """The nodes nearest to the loss, breadth first, and none behind the outputs."""
    seen, waiting = {loss, outputs}, [loss]
    while waiting and len(seen) < NODES:
        node = waiting.pop(0)
        yield node
        for before in inputs_of(node):
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


def inputs_of(node: Node) -> list[Node | None]:
    """The nodes that made what this one was computed from; None where autograd does not know it: targets, numbers."""
    return [before for before, _ in node.next_functions]


def operation_of(node: Node) -> str:
    """What a node is the gradient of, as ``"NllLoss"``."""
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def reduction_of(node: Node) -> int | None:
    """How a node of one of torch's own losses reduces: :data:`NONE`, :data:`MEAN` or :data:`SUM`. None of others."""
    operation = operation_of(node)
    if not ("Loss" in operation or operation.startswith("BinaryCrossEntropy")):
        return None
    reduction: int | None = getattr(node, "_saved_reduction", None)
    return reduction


def is_nll(node: Node) -> bool:
    """Whether it is the loss of classes, of cross-entropies, too."""
    return operation_of(node).startswith("NllLoss")


def reduced_shape(node: Node) -> tuple[int, ...]:
    """Of what a sum or mean by hand was taken."""
    shape: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
    return tuple(shape)
