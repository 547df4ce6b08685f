"""How a loss was made of the model's outputs: what reduces them to one number, and what comes before and after it."""

from collections.abc import Iterator
from typing import NamedTuple

from torch.autograd.graph import Node

from consequent.capture.loss_nodes import NODES, NONE, SAME_ELEMENTS, inputs_of, operation_of, reduction_of

# What may come after a reduction without dividing it; terms of a loss may be added up.
_AFTER = SAME_ELEMENTS | {"Neg", "Clone", "Alias", "Add", "Sub"}
# What may come before it, and leaves numbers of samples apart from those of others and as large as they are.
_BEFORE = SAME_ELEMENTS | {
    "Abs", "Add", "Clamp", "ClampMax", "ClampMin", "Clone", "Exp", "Gather", "Index", "IndexSelect", "Log", "Log1P",
    "LogSigmoid", "LogSoftmax", "MaskedFill", "Neg", "Permute", "Pow", "Relu", "Rsub", "Select", "Sigmoid", "Slice",
    "Softmax", "Softplus", "Sqrt", "Sub", "T", "Tanh", "Transpose", "Where",
}  # fmt: skip
_SELECT = {"Index", "IndexSelect"}
_HALF = 0.5  # torch multiplies by 1 − ε where it smooths labels


class Path(NamedTuple):
    """The way from something to the outputs.

    Attributes:
        meets_targets: whether targets come in: something that autograd does not know is subtracted, or chooses.
        selects: whether some elements are picked by an index or a mask.
    """

    meets_targets: bool = False
    selects: bool = False


def undivided(loss: Node) -> Iterator[Node]:
    """The terms that a loss adds up, as far as nothing multiplies or divides them.

    Args:
        loss: the node that made it.
    """
    waiting, looked_at = [(loss, 1.0)], 0
    while waiting and looked_at < NODES:
        node, factor = waiting.pop(0)
        looked_at += 1
        operation = operation_of(node)
        number = getattr(node, "_saved_other", None) if type(node).__name__ == "MulBackward1" else None
        if isinstance(number, int | float):  # of torch's own, label smoothing; users' products are with tensors
            operation, factor = "Add", factor * abs(number)
        if operation in _AFTER:
            waiting += [(before, factor) for before in inputs_of(node) if before is not None]
        elif factor >= _HALF:
            yield node


def without_scale(loss: Node) -> Node | None:
    """What a loss is a multiple of, as a scaler returns it: something that autograd does not know comes second."""
    inputs = inputs_of(loss)
    return inputs[0] if operation_of(loss) == "Mul" and len(inputs) == 2 and inputs[1] is None else None


def path_to(outputs: Node, reduction: Node) -> Path | None:
    """The way from a reduction to the outputs, if there is one on which each sample stays what it is.

    Args:
        outputs: the node that made them.
        reduction: a loss of torch's own, a sum or a mean.
    """
    begin = Path(meets_targets=reduction_of(reduction) is not None)
    waiting = [(before, begin) for before in inputs_of(reduction) if before is not None]
    looked_at = 0
    found: list[Path] = []
    while waiting and looked_at < NODES:
        node, path = waiting.pop()
        looked_at += 1
        if node is outputs:
            found.append(path)
        elif _keeps_samples(node):
            inputs, targets = _without_targets(node)
            path = Path(path.meets_targets or targets, path.selects or operation_of(node) in _SELECT)
            waiting += [(before, path) for before in inputs]
    return next((path for path in found if path.meets_targets), found[0] if found else None)


def _keeps_samples(node: Node) -> bool:
    """Whether it is none that could divide by their number, or mix them."""
    operation, inputs = operation_of(node), inputs_of(node)
    if operation == "Mul":  # with what autograd does not know: probabilities of classes do not divide, weights may
        of_softmax = [before is not None and operation_of(before) == "LogSoftmax" for before in inputs]
        return any(of_softmax) or not _has_unknown_factor(node)
    return operation in _BEFORE or type(node).__name__ == "SumBackward1" or reduction_of(node) == NONE


def _has_unknown_factor(product: Node) -> bool:
    """Whether there is one in a product, however it is nested, that autograd does not know."""
    waiting: list[Node | None] = [product]
    seen: set[Node | None] = set()
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        if node is None or operation_of(node) == "Div":
            return True
        if operation_of(node) == "Mul" and node not in seen:
            waiting += inputs_of(node)
        seen.add(node)
    return bool(waiting)


def _without_targets(node: Node) -> tuple[list[Node], bool]:
    """What it was computed from, and whether targets were among that."""
    operation, inputs = operation_of(node), inputs_of(node)
    targets = operation in {*_SELECT, "Gather"} or reduction_of(node) == NONE
    targets |= operation in ("Sub", "Mul") and None in inputs
    if operation == "Sub":
        subtracted = inputs[-1]
        if subtracted is not None and operation_of(subtracted) == "Mul" and inputs_of(subtracted)[0] is None:
            # target * something, as in the divergence of Kullback and Leibler and in Poisson's loss
            inputs, targets = [*inputs[:-1], *inputs_of(subtracted)], True
    return [before for before in inputs if before is not None], targets
