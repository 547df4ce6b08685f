"""How many samples the loss was averaged over: N in the paper, one number for all layers."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from consequent.capture.loss_watch import LossWatch
from consequent.capture.torch_internals import (
    PYTHON_NODE,
    backward_pass_id,
    nodes_being_made,
    running_node,
    transforms_are_active,
    unwrapped_if_left,
)
from consequent.capture.use import Entry


class _UnderWay(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Entry | None]] = []


class Entries:
    """The outermost calls of a model and its parts.

    Args:
        model: the whole model.
        before_entry: called when samples are about to enter it.
    """

    def __init__(self, model: nn.Module, before_entry: Callable[[], None]) -> None:
        self._model = model
        self._before_entry = before_entry
        self._under_way = _UnderWay()
        self._checkpointed: weakref.WeakKeyDictionary[Any, Entry] = weakref.WeakKeyDictionary()
        self.latest: Entry | None = None  # that builds a graph
        self.loss_watch: LossWatch | None = None  # until the first step: who looks at what it is

    @property
    def _open(self) -> list[tuple[nn.Module, Entry | None]]:
        """The calls that this thread is in, the outermost first."""
        return self._under_way.calls

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module that contains layers is called."""
        if self._open and self._open[0][0] is module and not _calls_itself(module):
            self._open.clear()  # an interrupted call (Ctrl-C) never left
        entry = None
        if not self._open:
            self._before_entry()
            tensor = first_tensor((args, kwargs))
            entry = None if tensor is None else _entry_of(module, tensor)
            if entry is not None and entry.builds_graph:
                self.latest = entry
        self._open.append((module, entry))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The call is over."""
        while self._open:
            left, entry = self._open.pop()
            if left is module:
                outputs = None if entry is None else outputs_in(output)
                if entry is not None and outputs is not None:
                    entry.output_shape = _shape(outputs)
                    if self.loss_watch is not None and outputs.requires_grad:
                        self.loss_watch.look_at(entry, outputs)
                break

    def entry_for(self, layer: nn.Module, inputs: Tensor, samples: int, is_batched: bool) -> Entry:
        """The entry of samples during which the layer is called.

        Args:
            layer: the layer.
            inputs: its inputs.
            samples: how many these have.
            is_batched: whether they have a leading dimension of samples.
        """
        entry = self._entry_recomputed() if self._checkpointed else None
        if entry is None and self._open:
            entry = self._open[0][1]
        if entry is None:
            if not self._open:
                self._before_entry()
            self.latest = Entry(layer, samples, inputs.numel())
            return self.latest
        if not is_batched and inputs.numel() == entry.elements and _is_data(inputs, entry):
            entry.samples = max(samples, 1)  # they are in no leading dimension of what entered the model
            entry.is_counted_by_layer = True
        return entry

    def called_without_graph(self) -> None:
        """A layer is called where no graph is built: reentrant checkpointing will call it again, outside of the model.

        The second call belongs to the entry of the first, which is known by the node that recomputes it.
        """
        entry = self._entry_recomputed() if self._checkpointed else None  # one segment inside of another
        if entry is None and self._open:
            entry = self._open[0][1]
        if entry is not None and entry.builds_graph:  # otherwise an evaluation
            for node in nodes_being_made():
                self._checkpointed[node] = entry

    def _entry_recomputed(self) -> Entry | None:
        node = running_node() if backward_pass_id() != -1 else None
        return self._checkpointed.get(node) if isinstance(node, PYTHON_NODE) else None

    def count(self, groups: Iterable[Iterable[Entry]]) -> int:
        """The samples of several backward passes, each with the entries that took part in it.

        Entries of one pass are taken for the same samples, seen several times (``D(real)`` and ``D(fake)``, a siamese
        network, a part that is called in a loop): the largest counts, and calls of the whole model go before calls of
        parts. Passes that share an entry (``retain_graph``) are one. What is left are micro-batches, and adds up.
        """
        return sum(max(entry.samples for entry in group) for group in self.joined_passes(groups))

    def joined_passes(self, groups: Iterable[Iterable[Entry]]) -> list[set[Entry]]:
        """The same passes, one for all that share an entry; where the whole model was called, without calls of parts.

        Args:
            groups: for each backward pass the entries that took part in it.
        """
        return [{e for e in group if e.module is self._model} or group for group in joined(groups)]


def joined(groups: Iterable[Iterable[Entry]]) -> list[set[Entry]]:
    """The groups, those with a common member put together.

    Example:
        >>> sorted(map(sorted, joined([[1, 2], [3], [2, 4]])))
        [[1, 2, 4], [3]]
    """
    found: list[set[Entry]] = []
    for group in groups:
        new = set(group)
        if not new:
            continue
        apart = [other for other in found if not other & new]
        found = [*apart, new.union(*(other for other in found if other & new))]
    return found


def address_of(tensor: Tensor) -> int:
    """Of the memory that the tensor, or what it is a view of, lies in; -1 if it has none of its own."""
    if transforms_are_active() or tensor.layout is not torch.strided or tensor.is_nested:
        return -1
    return unwrapped_if_left(tensor).untyped_storage().data_ptr()


def _entry_of(module: nn.Module, tensor: Tensor) -> Entry:
    """The samples that enter a module by this tensor."""
    return Entry(
        module,
        tensor.size(0),
        tensor.numel(),
        address_of(tensor),
        input_shape=_shape(tensor),
    )


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    return None if tensor.is_nested else tuple(tensor.shape)


def _is_data(inputs: Tensor, entry: Entry) -> bool:
    """Whether a layer's inputs may be what entered the model, and are not learned: a vector may be just as long."""
    if isinstance(inputs, nn.Parameter):
        return False
    return not inputs.requires_grad or address_of(inputs) == entry.address


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a leading dimension in nested arguments."""
    if isinstance(value, Tensor):
        return value if value.ndim > 0 else None
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    return next((tensor for item in inside if (tensor := first_tensor(item)) is not None), None)


def outputs_in(value: Any) -> Tensor | None:
    """What of a model's outputs goes to the loss: what it calls its logits, or the first tensor."""
    logits = value.get("logits") if isinstance(value, Mapping) else None
    return first_tensor(value) if logits is None else first_tensor(logits)


def _calls_itself(module: nn.Module) -> bool:
    """Whether another call of the module is under way around the one that has just begun."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > 1
