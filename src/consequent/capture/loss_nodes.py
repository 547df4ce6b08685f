"""Whether a model's outputs went straight into a loss of torch's own that is a mean over all of their elements."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.autograd.graph import Node

# Of F.mse_loss and others; where outputs have several numbers a sample, their mean is over more than samples. A mean by
# hand is not among them, nor is F.l1_loss, which torch computes as one.
LOSSES = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
SAME_ELEMENTS = (  # of operations that only change the shape or the type
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward", "UnsqueezeBackward0",
    "ToCopyBackward0",
)  # fmt: skip
MEAN = 1  # torch's number for reduction="mean"
NODES = 200  # to be looked at, from the loss on


def are_averaged(outputs: Node) -> bool:
    """Whether the running backward pass is that of a loss which is a mean over all elements of these outputs.

    Only where the loss was handed the outputs as they are, or in another shape or type, is it seen.

    Args:
        outputs: the node that made them.
    """
    return any(
        _name(node).startswith(LOSSES)
        and getattr(node, "_saved_reduction", None) == MEAN
        and any(_are_of(outputs, before) for before, _ in node.next_functions)
        for loss in _losses_of_running_passes()
        for node in _nodes_between(loss, outputs)
    )


def _losses_of_running_passes() -> list[Node]:
    """The nodes that the calls of backward() under way began with; on a GPU these are of another thread."""
    return [node for innermost in sys._current_frames().values() for node in _losses_around(innermost)]


def _losses_around(innermost: FrameType) -> list[Node]:
    """The same for one thread. No frame is held in the end: it would keep itself alive, and the graph with it."""
    found: list[Node] = []
    frame: FrameType | None = innermost
    del innermost
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.autograd":
            tensors: Any = frame.f_locals.get("tensors", ())
            started = tensors if isinstance(tensors, tuple | list) else [tensors]
            found += [tensor.grad_fn for tensor in started if tensor.grad_fn is not None]
        frame = frame.f_back
    return found


def _nodes_between(loss: Node, outputs: Node) -> Iterator[Node]:
    """The nodes nearest to the loss, breadth first, and none behind the outputs."""
    seen, waiting = {loss, outputs}, [loss]
    while waiting and len(seen) < NODES:
        node = waiting.pop(0)
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


def _are_of(outputs: Node, node: Node | None) -> bool:
    """Whether this node hands on the elements of the outputs."""
    while node is not None and node is not outputs and _name(node).startswith(SAME_ELEMENTS):
        node = node.next_functions[0][0]
    return node is outputs


def _name(node: Node) -> str:
    return type(node).__name__
