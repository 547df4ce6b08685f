"""What the hooks bring in: a record for every weight, and the count of samples that entered the model."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from consequent import layers
from consequent.ahead import Ahead
from consequent.autograd import after_backward, backward_pass_id
from consequent.dtensor import is_sharded
from consequent.hooks import EntryHook, LayerHook, drop_inert_hooks, forget_compiled_code
from consequent.layers import Layer
from consequent.record import Entry, Record, Use
from consequent.settings import Damping

# Calls without a graph that may still be recomputed; a model that never is must not gather them.
MOST_CALLS_BEFORE_BACKWARD = 4096


class Capture:
    """The hooks on a model, and the records they fill."""

    def __init__(
        self,
        model: nn.Module,
        named_layers: Mapping[str, Layer],
        *,
        wants: Callable[[Tensor], bool],
        damping_of: Callable[[Tensor], Damping],
        keep_rows: bool,
        before_entry: Callable[[], None],
    ) -> None:
        self.model = model
        self.records: dict[Tensor, Record] = {}
        self.wants = wants  # is this parameter to be corrected?
        self.damping_of = damping_of
        self.keep_rows = keep_rows
        self.misbehaving: dict[nn.Module, str] = {}  # layers whose forward is not what their class says
        self.before_entry = before_entry  # called when samples are about to enter the model
        self.is_installed = True
        self.layers: dict[str, Layer] = {}
        self.names: dict[nn.Module, str] = {}
        self.parameters_seen = object()  # another one when layers or optimiser may hold other parameters
        self.is_shared_out = False  # with other ranks, whose inputs are still to come at the step
        self._sharded: dict[Layer, tuple[Tensor, Tensor | None]] = {}  # what the optimiser holds of sharded layers
        self._containers: set[nn.Module] = set()
        self._open_entries: list[tuple[nn.Module, Entry | None]] = []
        self._without_graph: dict[Layer, deque[Entry]] = {}
        self._ahead = Ahead()
        self._running: dict[int, list[Record]] = {}  # backward passes under way, and the records they fill
        self._handles: list[RemovableHandle] = []
        self.extend(named_layers)

    def extend(self, named_layers: Mapping[str, Layer]) -> None:
        """Hook into the layers that are not hooked yet, and forget those that are gone."""
        self.notice_parameters(named_layers)
        hooks_before = len(self._handles)
        for layer in set(named_layers.values()) - set(self.layers.values()):
            drop_inert_hooks(layer)
            hook = LayerHook(self, layer)
            # The hook of fully_shard takes the whole weight away again: be there before it.
            first = layer in self._sharded
            self._handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=first))
        self.layers = dict(named_layers)
        weights = {self.parameters_of(layer)[0] for layer in self.layers.values()}
        self.records = {weight: record for weight, record in self.records.items() if weight in weights}
        self.names = {layer: name for name, layer in named_layers.items()}
        self.misbehaving = {layer: reason for layer, reason in self.misbehaving.items() if layer in self.names}
        for container in _containers(self.model, set(named_layers.values())) - self._containers:
            drop_inert_hooks(container)
            enter, leave = EntryHook(self._enter), EntryHook(self._leave)
            self._handles.append(container.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(container.register_forward_hook(leave, with_kwargs=True, always_call=True))
            self._containers.add(container)
        if len(self._handles) > hooks_before:
            forget_compiled_code()

    def notice_parameters(self, named_layers: Mapping[str, Layer]) -> None:
        """Layers or optimiser may hold other ones than before.

        Sharded ones are remembered: during a forward pass others stand in their place.
        """
        self.parameters_seen = object()
        for layer in named_layers.values():
            if is_sharded(layer.weight):
                self._sharded[layer] = layer.weight, layer.bias

    def parameters_of(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        """The layer's weight and bias as the optimiser holds them."""
        return self._sharded.get(layer) or (layer.weight, layer.bias)

    def share_out(self) -> None:
        """From now on other ranks' inputs join in at the step."""
        self.is_shared_out = True
        self._ahead.factorises = False

    def remove(self) -> None:
        """Take all hooks off the model and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.records.clear()
        self._ahead = Ahead()  # recordings hold memory
        self.is_installed = False

    def clear(self) -> None:
        """Forget what was captured."""
        self._without_graph.clear()
        self._ahead.forget()
        for record in self.records.values():
            record.clear()
        if len(self.records) > len(self.layers):  # of weights that stood in for a layer's own (functional_call)
            held = {self.parameters_of(layer)[0] for layer in self.layers.values()}
            self.records = {weight: record for weight, record in self.records.items() if weight in held}

    def filled_records(self) -> list[Record]:
        """Records of weights that took part in the gradients now in ``.grad``."""
        self._ahead.join()  # if the backward pass raised
        for record in self.records.values():
            if not record.is_empty and record.grad is None:
                record.clear()  # zero_grad since
        return [record for record in self.records.values() if not record.is_empty]

    def samples(self) -> int:
        """Samples that entered the model for the gradients now in ``.grad``: N in the paper.

        Calls of the whole model add up. Where only parts of it were called (``model.encode``, ``model.decode``) the
        same samples pass through several of them: then the part that saw most samples counts.
        """
        entries = {entry for record in self.records.values() for entry in record.entries}
        by_module: dict[nn.Module, int] = {}
        for entry in entries:
            by_module[entry.module] = by_module.get(entry.module, 0) + entry.samples
        return by_module.get(self.model, max(by_module.values(), default=0))

    def entry_for(self, layer: Layer, inputs: Tensor) -> Entry:
        """The entry of samples during which the layer is called."""
        recomputed = self._entry_recomputed(layer)
        entry = recomputed or (self._open_entries[0][1] if self._open_entries else None)
        if entry is None:
            if not self._open_entries:
                self._prepare_for_entry()
            return Entry(layer, inputs.shape[0] if layers.is_batched(layer, inputs) else 1, inputs.numel())
        if not layers.is_batched(layer, inputs) and inputs.numel() == entry.elements:
            entry.samples = 1  # one sample without a leading dimension entered the model
        return entry

    def note_call_without_graph(self, layer: Layer) -> None:
        """Reentrant checkpointing calls a layer without a graph, and again in the backward pass, outside of the model.

        The second call belongs to the entry of the first.
        """
        entry = self._open_entries[0][1] if self._open_entries else None
        if entry is not None and entry.builds_graph and not torch.is_grad_enabled():  # otherwise an evaluation
            self._without_graph.setdefault(layer, deque(maxlen=MOST_CALLS_BEFORE_BACKWARD)).append(entry)

    def _entry_recomputed(self, layer: Layer) -> Entry | None:
        entries = self._without_graph.get(layer)
        if not entries or backward_pass_id() == -1:
            return None
        return entries.pop() if len(entries) > 1 else entries[0]  # the backward pass goes through the calls in reverse

    def _prepare_for_entry(self) -> None:
        if backward_pass_id() == -1:
            self._running.clear()  # left over from a backward pass that raised
            self._ahead.forget()
        self.before_entry()

    def output_grad_arrived(self, use: Use, output_grad: Tensor) -> None:
        """Backward reached the layer's output: ΔZ is known."""
        record = self.records.get(use.weight)
        if record is None:
            record = self.records[use.weight] = Record(use.weight)
        now = backward_pass_id()
        if now not in self._running:
            self._running[now] = []
            after_backward(lambda: self._backward_pass_ended(now))
        if record.backward_pass != now:
            # A pass may run inside another (reentrant checkpointing): the outer one's uses are not in .grad yet.
            if record.backward_pass not in self._running:
                record.begin_backward_pass(use.key.grad)
            record.backward_pass = now
            self._running[now].append(record)
        if not record.is_empty:
            self._ahead.join_on(output_grad.device)  # an earlier use may be waiting to be reduced, or being reduced
        record.add(use, output_grad.detach())
        damping = self.damping_of(use.key)
        if not record.uses or record.rows < record.columns or damping.value == 0 or record.keeps_inputs:
            return
        if not self.keep_rows and self._ahead.takes(record):
            self._ahead.add(record, damping)
        else:
            record.reduce(keep_rows=self.keep_rows)

    def _backward_pass_ended(self, backward_pass: int) -> None:
        if self.is_shared_out:  # wrappers reduce the gradients in callbacks of their own: be behind them
            after_backward(lambda: self._mark_gradients(backward_pass))
        else:
            self._mark_gradients(backward_pass)

    def _mark_gradients(self, backward_pass: int) -> None:
        self._ahead.join()
        for record in self._running.pop(backward_pass, []):
            if not record.is_empty:
                record.mark_accumulated()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open_entries and self._open_entries[0][0] is module:
            self._open_entries = []  # an interrupted call (Ctrl-C) never left
        entry = None
        if not self._open_entries:
            self._prepare_for_entry()
            tensor = first_tensor((args, kwargs))
            entry = None if tensor is None else Entry(module, tensor.shape[0], tensor.numel())
        self._open_entries.append((module, entry))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._open_entries:
            if self._open_entries.pop()[0] is module:
                break


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


def _containers(model: nn.Module, inner: set[Layer]) -> set[nn.Module]:
    return {m for m in model.modules() if m not in inner and any(child in inner for child in m.modules())}
