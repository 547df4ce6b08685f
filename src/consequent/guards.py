"""Refusing what would be silently wrong: gradients that no backward pass explains, or that were corrected before."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from consequent.capture import Capture
from consequent.record import Record


def refuse_corrected_before(records: Iterable[Record], capture: Capture, others: Iterable[Capture]) -> None:
    """Raise if a gradient is, or contains, one that a correction has rewritten already."""
    others = list(others)
    for record in records:
        name = capture.names[record.layer]
        if record.accumulated_on_corrected:
            raise RuntimeError(
                f"layer {name!r}: this backward pass was added to a gradient that had been corrected already. "
                "Call optimizer.zero_grad() between a step and the next backward pass."
            )
        if any(record.weight in other.records and other.records[record.weight].left_untouched() for other in others):
            raise RuntimeError(
                f"layer {name!r}: its gradient was corrected just now by another Consequentialism on the same model, "
                "and would be corrected twice. Keep one of them and detach() the other."
            )


def refuse_uncaptured(capture: Capture, owns: Callable[[Tensor], bool]) -> None:
    """Raise if there are gradients although no backward pass was seen, unless they were corrected before."""
    for name, layer in capture.layers.items():
        if name in capture.misbehaving:
            continue
        record = capture.records.get(layer.weight)
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is None or not owns(parameter):
                continue
            if record is None or not record.was_corrected(parameter):
                raise RuntimeError(
                    f"layer {name!r} has a gradient, but no forward and backward pass through the attached model was "
                    "seen for it. Was the model compiled and called before attaching (attach first), is it a copy of "
                    "the attached model, or was .grad set by hand (use consequential_gradient, or detach)?"
                )


def uncaptured_layers(records: Iterable[Record], capture: Capture, owns: Callable[[Tensor], bool]) -> Iterator[str]:
    """Names of layers that got a gradient in a way their hooks never saw."""
    seen = {record.weight for record in records}
    for name, layer in capture.layers.items():
        weight = layer.weight
        if weight not in seen and name not in capture.misbehaving and weight.grad is not None and owns(weight):
            yield name
