"""The hooks: each layer's inputs are seen in the forward pass, its output gradients in the backward pass.

A forward hook sees a layer's input and puts a hook on its *output tensor*, which sees ``ΔZ``. (A module's full backward
hook fails with in-place activations, and a forward hook alone fires twice under activation checkpointing.)

What was seen must describe the gradient that is in ``.grad`` when the optimiser steps, and nothing else. So a use of a
layer is passed on only if that backward pass adds to ``.grad``.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from consequent import layers
from consequent.autograd import (
    Kept,
    graph_is_being_captured,
    transforms_are_active,
    will_accumulate,
)
from consequent.errors import CAPTURED_TOO_EARLY
from consequent.layer_parameters import LayerParameters
from consequent.layers import Layer
from consequent.record import Use
from consequent.streams import event_in_graph

if TYPE_CHECKING:
    from consequent.capture import Capture


def _call(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    function(*args)


# Keeps torch.compile out of a hook: it breaks the graph there and goes on behind it.
_call_uncompiled = torch.compiler.disable(
    _call, reason="consequent watches this layer: compile without fullgraph=True, or exclude the layer"
)


def _inert_hook(*_: Any) -> None:
    """What a copied or unpickled model has in place of a hook: the copy must not feed the original's correction."""


class _Uncopyable:
    """A hook that stays behind when its model is copied or pickled."""

    def __reduce__(self) -> Any:
        return _make_inert_hook, ()


def _make_inert_hook() -> Callable[..., None]:
    return _inert_hook


def forget_compiled_code() -> None:
    """After new hooks: let ``torch.compile`` start anew.

    It does not look whether a module has hooks now: code that it made for this model, or for another one of the same
    classes, would go on without them.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def drop_inert_hooks(module: nn.Module) -> None:
    """Copies of copies would gather them."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook is _inert_hook]:
            hooks.pop(key)


class EntryHook(_Uncopyable):
    """A hook on a module that contains layers."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Pass the call on."""
        if torch.compiler.is_compiling():
            _call_uncompiled(self.function, args)
        else:
            self.function(*args)


class LayerHook(_Uncopyable):
    """The forward hook on one layer."""

    def __init__(self, capture: "Capture", layer: Layer) -> None:
        self.capture = capture
        self.layer = layer
        self.is_checked = False
        self._parameters: LayerParameters | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The layer was called."""
        if torch.compiler.is_compiling():
            _call_uncompiled(self._called, (module, args, kwargs, output))
        else:
            self._called(module, args, kwargs, output)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is not self.layer or module in self.capture.misbehaving:
            return  # (a replica of nn.DataParallel is not the layer)
        if transforms_are_active() or not isinstance(output, Tensor):
            return
        if not output.requires_grad:
            self.capture.note_call_without_graph(self.layer)
            return
        inputs = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(inputs, Tensor):
            return
        reason = self._why_not(inputs, output)
        if reason is not None:
            self.capture.misbehaving[module] = reason
            return
        parameters = self._parameters
        if parameters is None or not parameters.is_current(self.layer, self.capture):
            parameters = LayerParameters.of(self.layer, self.capture)
            self._parameters = parameters if parameters.may_be_kept else None
        if parameters.weight is None and parameters.bias is None:
            return
        if inputs.dtype != output.dtype:
            inputs = inputs.to(output.dtype)  # autocast did the same: this is what met the weight
        use = Use(
            layer=self.layer,
            weight=parameters.held_weight,
            bias=parameters.held_bias,
            trains_weight=parameters.weight is not None,
            entry=self.capture.entry_for(self.layer, inputs),
            rows=output.numel() // parameters.outputs,
            features=parameters.features,
            dtype=output.dtype,
            kept_inputs=None if parameters.weight is None else Kept(inputs),
            inputs_there=event_in_graph(),
        )
        leaves = parameters.leaves(output)
        capture = self.capture

        def output_grad_arrived(grad: Tensor) -> None:
            for leaf in leaves:
                if will_accumulate(leaf):
                    capture.output_grad_arrived(use, grad)
                    return

        output.register_hook(output_grad_arrived)

    def _why_not(self, inputs: Tensor, output: Tensor) -> str | None:
        """Why the layer is not the matrix product that its class promises, if it is not."""
        if "weight" not in self.layer._parameters or ("bias" not in self.layer._parameters):
            return "it was parametrised or pruned after attaching"
        if self.is_checked or self._behaves(inputs, output):
            return None
        kind = layers.kind_of(self.layer)
        assert kind is not None
        return f"its forward does not compute what {'nn.' * (kind in layers.LAYER_TYPES)}{kind.__name__} computes"

    def _behaves(self, inputs: Tensor, output: Tensor) -> bool:
        """Compare the first output with what the layer's class computes; subclasses may compute anything."""
        if graph_is_being_captured():
            raise RuntimeError(CAPTURED_TOO_EARLY)
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
            if not (difference.isfinite() and scale.isfinite()) or (scale == 0 and difference == 0):
                return True  # says nothing; look again at the next batch
            tolerance = {torch.float64: 1e-9, torch.float32: 2e-3}.get(output.dtype, 5e-2)
        self.is_checked = True
        return bool(difference <= tolerance * scale)
