"""Whether a loss is something else than a mean over samples, by the nodes of its graph."""

import math
from collections.abc import Iterator

from torch.autograd.graph import Node

from consequent.capture.loss_nodes import (
    MEAN,
    NODES,
    SAME_ELEMENTS,
    SUM,
    inputs_of,
    is_nll,
    nodes_between,
    operation_of,
    reduced_shape,
    reduction_of,
    started_passes,
)
from consequent.capture.loss_paths import path_to, undivided, without_scale
from consequent.capture.torch_internals import elements_made_by

# Of F.mse_loss and others; where outputs have several numbers a sample, their mean is over more than samples.
_OF_ELEMENTS = {"MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}

# Of layers, and of matrices: what comes out has another number of elements than what went in.
_PRODUCTS = {"Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Convolution", "Linear", "Mv"}


def is_sum(outputs: Node, *, scaled: bool = False) -> bool:
    """Whether the running backward pass is that of a loss which is a sum over samples, and is divided by nothing.

    Args:
        outputs: the node that made the model's outputs.
        scaled: it is a multiple of one instead, as a scaler returns it.
    """
    for loss in _losses(scaled=scaled):
        for node in undivided(loss):
            if reduction_of(node) == SUM or operation_of(node) == "Sum":
                path = path_to(outputs, node)
                if path is not None and path.meets_targets:
                    return True
    return False


def is_mean_over_elements(outputs: Node, elements: int) -> bool:
    """Whether it is that of a loss which is a mean over all elements of these outputs.

    Of torch's own losses that is seen where they were handed the outputs as they are, or in another shape or type; of
    means by hand where nothing multiplies them.

    Args:
        outputs: the node that made them.
        elements: how many there are.
    """
    of_torch = any(
        operation_of(node) in _OF_ELEMENTS
        and reduction_of(node) == MEAN
        and any(_are_of(outputs, before) for before in inputs_of(node))
        for started in started_passes()
        for node in nodes_between(started.loss, outputs)
    )
    return of_torch or any(_is_mean_by_hand(outputs, elements, node) for loss in _losses() for node in undivided(loss))


def is_behind_products(outputs: Node, elements: int) -> bool:
    """Whether it is that of a loss to which these outputs come only by products, as those of another network.

    Where it is known to be a mean over as many numbers as there are outputs, it does not matter.

    Args:
        outputs: the node that made them.
        elements: how many there are.
    """
    return any(_is_behind_products(outputs, elements, started.loss) for started in started_passes())


def _is_behind_products(outputs: Node, elements: int, loss: Node) -> bool:
    seen, waiting, meets_product = {loss}, [loss], False
    compared: set[int | None] = set()
    while waiting:
        node = waiting.pop()
        if node is outputs or len(seen) > NODES:
            return False
        if operation_of(node) in _PRODUCTS:
            meets_product = True
            continue
        compared |= _elements_of_a_mean(node)
        for before in inputs_of(node):
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return meets_product and compared != {elements}


def _elements_of_a_mean(node: Node) -> set[int | None]:
    """Over how many numbers this node takes a mean, if it does."""
    if type(node).__name__ == "MeanBackward0":
        return {math.prod(reduced_shape(node))}
    if operation_of(node) in _OF_ELEMENTS and reduction_of(node) == MEAN:
        return {elements_made_by(before) for before in inputs_of(node) if before is not None}
    return set()


def is_mean_over_labels(outputs: Node) -> bool:
    """Whether it is that of a cross-entropy which is a mean over labels: those that it does not ignore."""
    return any(
        is_nll(node) and reduction_of(node) == MEAN and path_to(outputs, node) is not None
        for started in started_passes()
        for node in nodes_between(started.loss, outputs)
    )


def picked_numbers(outputs: Node) -> int | None:
    """Of how many numbers a mean by hand was taken, where an index or a mask has picked them."""
    for started in started_passes():
        for node in nodes_between(started.loss, outputs):
            if type(node).__name__ == "MeanBackward0":
                path = path_to(outputs, node)
                if path is not None and path.selects:
                    return math.prod(reduced_shape(node))
    return None


def _losses(*, scaled: bool = False) -> Iterator[Node]:
    """What the backward passes under way began with, or what that is a multiple of."""
    for started in started_passes():
        loss = without_scale(started.loss) if scaled else started.loss
        if loss is not None and not started.with_gradient:
            yield loss


def _is_mean_by_hand(outputs: Node, elements: int, node: Node) -> bool:
    if type(node).__name__ != "MeanBackward0" or math.prod(reduced_shape(node)) != elements:
        return False
    path = path_to(outputs, node)
    return path is not None and path.meets_targets


def _are_of(outputs: Node, node: Node | None) -> bool:
    """Whether this node hands on the elements of the outputs."""
    while node is not None and node is not outputs and operation_of(node) in SAME_ELEMENTS:
        node = inputs_of(node)[0]
    return node is outputs
