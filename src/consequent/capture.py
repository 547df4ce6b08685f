"""What the hooks see: each layer's inputs in the forward pass, its output gradients in the backward pass.

A forward hook sees a layer's input and puts a hook on its *output tensor*, which sees ``ΔZ``. (A module's full backward
hook fails with in-place activations, and a forward hook alone fires twice under activation checkpointing.)

What was seen must describe the gradient that is in ``.grad`` when the optimiser steps, and nothing else. So a use of a
layer is recorded only if that backward pass adds to ``.grad``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from consequent import layers
from consequent.autograd import (
    Kept,
    after_backward,
    backward_pass_id,
    gradient_accumulator,
    transforms_are_active,
    will_accumulate,
)
from consequent.layers import Layer
from consequent.record import Entry, Record, Use


class Capture:
    """The hooks on a model, and the records they fill."""

    def __init__(
        self,
        model: nn.Module,
        named_layers: Mapping[str, Layer],
        *,
        wants: Callable[[Tensor], bool],
        reducible: Callable[[Tensor], bool],
        keep_rows: bool,
        before_entry: Callable[[], None],
    ) -> None:
        self.model = model
        self.records: dict[Tensor, Record] = {}
        self.wants = wants  # is this parameter to be corrected?
        self.reducible = reducible  # may a second moment stand for the inputs of this weight?
        self.keep_rows = keep_rows
        self.misbehaving: dict[str, str] = {}  # layers whose forward is not what their class says
        self.before_entry = before_entry  # called when samples are about to enter the model
        self.is_installed = True
        self.layers: dict[str, Layer] = {}
        self.names: dict[nn.Module, str] = {}
        self._containers: set[nn.Module] = set()
        self._open_entries: list[tuple[nn.Module, Entry | None]] = []
        self._running: dict[int, list[Record]] = {}  # backward passes under way, and the records they fill
        self._handles: list[RemovableHandle] = []
        self.extend(named_layers)

    def extend(self, named_layers: Mapping[str, Layer]) -> None:
        """Hook into the layers that are not hooked yet, and forget those that are gone."""
        hooked = set(self.layers.values())
        for name, layer in named_layers.items():
            if layer not in hooked:
                hook = LayerHook(self, layer, name)
                self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        self.layers = dict(named_layers)
        self.names = {layer: name for name, layer in named_layers.items()}
        for container in _containers(self.model, set(named_layers.values())) - self._containers:
            enter, leave = EntryHook(self._enter), EntryHook(self._leave)
            self._handles.append(container.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(container.register_forward_hook(leave, with_kwargs=True, always_call=True))
            self._containers.add(container)

    def remove(self) -> None:
        """Take all hooks off the model and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.records.clear()
        self.is_installed = False

    def clear(self) -> None:
        """Forget what was captured."""
        for record in self.records.values():
            record.clear()

    def filled_records(self) -> list[Record]:
        """Records of weights that took part in the gradients now in ``.grad``."""
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
        entry = self._open_entries[0][1] if self._open_entries else None
        if entry is None:
            if not self._open_entries:
                self._prepare_for_entry()
            return Entry(layer, inputs.shape[0] if layers.is_batched(layer, inputs) else 1, inputs.ndim)
        if not layers.is_batched(layer, inputs) and inputs.ndim == entry.ndim:
            entry.samples = 1  # one sample without a leading dimension entered the model
        return entry

    def _prepare_for_entry(self) -> None:
        if backward_pass_id() == -1:
            self._running.clear()  # left over from a backward pass that raised
        self.before_entry()

    def output_grad_arrived(self, use: Use, output_grad: Tensor) -> None:
        """Backward reached the layer's output: ΔZ is known."""
        record = self.records.get(use.weight)
        if record is None:
            record = self.records[use.weight] = Record(use.weight)
        now = backward_pass_id()
        if now not in self._running:
            self._running[now] = []
            after_backward(lambda: self._mark_gradients(now))
        if record.backward_pass != now:
            # A pass may run inside another (reentrant checkpointing): the outer one's uses are not in .grad yet.
            if record.backward_pass not in self._running:
                record.begin_backward_pass(use.key.grad)
            record.backward_pass = now
            self._running[now].append(record)
        reducible = self.reducible(use.key)
        record.add(use, output_grad.detach(), reducible=reducible, keep_rows=self.keep_rows)

    def _mark_gradients(self, backward_pass: int) -> None:
        for record in self._running.pop(backward_pass, []):
            if not record.is_empty:
                record.mark_accumulated()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open_entries and self._open_entries[0][0] is module:
            self._open_entries = []  # an interrupted call (Ctrl-C) never left
        entry = None
        if not self._open_entries:
            self._prepare_for_entry()
            tensor = first_tensor((args, kwargs))
            entry = None if tensor is None else Entry(module, tensor.shape[0], tensor.ndim)
        self._open_entries.append((module, entry))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._open_entries:
            if self._open_entries.pop()[0] is module:
                break


def _inert_hook(*_: Any) -> None:
    """What a copied or unpickled model has in place of a hook: the copy must not feed the original's correction."""


class _Uncopyable:
    """A hook that stays behind when its model is copied or pickled."""

    def __reduce__(self) -> Any:
        return _make_inert_hook, ()


def _make_inert_hook() -> Callable[..., None]:
    return _inert_hook


class EntryHook(_Uncopyable):
    """A hook on a module that contains layers."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Pass the call on."""
        self.function(*args)


class LayerHook(_Uncopyable):
    """The forward hook on one layer."""

    def __init__(self, capture: Capture, layer: Layer, name: str) -> None:
        self.capture = capture
        self.layer = layer
        self.name = name
        self.is_checked = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The layer was called."""
        if module is not self.layer or self.name in self.capture.misbehaving:
            return  # (a replica of nn.DataParallel is not the layer)
        if transforms_are_active() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        inputs = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(inputs, Tensor):
            return
        if not self.is_checked and not self._behaves(inputs, output):
            return
        weight, bias = _trainable(self.layer, "weight"), _trainable(self.layer, "bias")
        if weight is not None and not self.capture.wants(weight):
            weight = None
        if bias is not None and not self.capture.wants(bias):
            bias = None
        if weight is None and bias is None:
            return
        if inputs.dtype != output.dtype:
            inputs = inputs.to(output.dtype)  # autocast did the same: this is what met the weight
        use = Use(
            layer=self.layer,
            weight=self.layer.weight,
            bias=bias,
            trains_weight=weight is not None,
            entry=self.capture.entry_for(self.layer, inputs),
            rows=layers.count_rows(self.layer, output),
            kept_inputs=None if weight is None else Kept(inputs),
        )
        accumulator = gradient_accumulator(use.key)
        capture = self.capture

        def output_grad_arrived(grad: Tensor) -> None:
            if will_accumulate(accumulator):
                capture.output_grad_arrived(use, grad)

        output.register_hook(output_grad_arrived)

    def _behaves(self, inputs: Tensor, output: Tensor) -> bool:
        """Compare the first output with what the layer's class computes; subclasses may compute anything."""
        with torch.no_grad():
            few = layers.as_batch(self.layer, inputs)[:2]
            weight, bias = self.layer.weight.detach(), self.layer.bias
            expected = layers.apply(self.layer, few, weight, None if bias is None else bias.detach())
            actual = layers.as_batch(self.layer, output)[:2]
            if expected.numel() == 0:
                return True
            if expected.shape != actual.shape:
                difference, scale = torch.tensor(1.0), torch.tensor(1.0)
            else:
                difference, scale = (expected - actual).abs().max(), expected.abs().max()
            if not (difference.isfinite() and scale.isfinite()):
                return True  # says nothing; look again at the next batch
            tolerance = {torch.float64: 1e-9, torch.float32: 2e-3}.get(output.dtype, 5e-2)
        self.is_checked = True
        if difference > tolerance * scale:
            kind = next(t.__name__ for t in layers.LAYER_TYPES if isinstance(self.layer, t))
            self.capture.misbehaving[self.name] = f"its forward does not compute what nn.{kind} computes"
            return False
        return True


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


def readable_name(name: str) -> str:
    """A module's name without what ``torch.compile`` and data-parallel wrappers put before it."""
    return re.sub(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _trainable(layer: Layer, name: str) -> Tensor | None:
    parameter = getattr(layer, name)
    return parameter if isinstance(parameter, nn.Parameter) and parameter.requires_grad else None


def _containers(model: nn.Module, inner: set[Layer]) -> set[nn.Module]:
    return {m for m in model.modules() if m not in inner and any(child in inner for child in m.modules())}
