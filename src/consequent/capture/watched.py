"""Layers that are watched: their class is exchanged for a subclass whose ``forward`` goes through our product.

``fully_shard`` and ``torch.nn.utils.parametrize`` exchange classes, too. ``isinstance`` holds, the name stays, a copy
or a pickle of a watched layer is a plain one, and ``torch.compile``, which looks at classes, compiles anew.

A subclass of a layer with a ``forward`` of its own keeps it: the calls of torch in it are looked at, and where it
multiplies with the layer's weight, that goes through our product; with ``at="backward"`` also where it multiplies with
what it has made of that weight.
"""

import copyreg
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from consequent.capture.joint import JointWatch
from consequent.capture.product import Apply, Call, Listener, apply_product, apply_uncompiled_product
from consequent.capture.torch_internals import (
    autocast_dtype,
    autocast_is_on,
    is_made_of,
    transforms_are_active,
    unwrapped_if_left,
)
from consequent.capture.uncompiled import leave_uncompiled
from consequent.capture.use import Use
from consequent.layers import JOINTS, Operation, class_of, joint_of, kind_of
from consequent.layers.operation import Canonical
from consequent.ranks.sharded_tensors import is_sharded

if TYPE_CHECKING:
    from consequent.capture.capture import Capture

_KEY = "_consequent_watch"  # in a watched layer's __dict__
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # the watched class of each class
_WATCHED: set[type[nn.Module]] = set()

Forward = Callable[..., Any]

_USUAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STRIDED, _FLOAT64 = torch.strided, torch.float64


def watch(layer: nn.Module, capture: "Capture") -> None:
    """Let the capture see all calls of the layer from now on."""
    new = _watch_of(layer, (capture,))  # now, or later, an optimiser may be collected that watched the layer, too
    known: Watch | JointWatch | None = vars(layer).get(_KEY)
    if known is not None and known.layer is layer:
        new.captures = (*known.captures, capture)
    vars(layer)[_KEY] = new
    if not any(cls in _WATCHED for cls in type(layer).__mro__):
        layer.__class__ = _watched_class(type(layer))


def unwatch(layer: nn.Module, capture: "Capture") -> None:
    """The capture sees no more of the layer."""
    known: Watch | JointWatch | None = vars(layer).get(_KEY)
    if known is None:
        return
    left = tuple(other for other in known.captures if other is not capture)
    if left:
        vars(layer)[_KEY] = _watch_of(layer, left)
        return
    del vars(layer)[_KEY]
    if type(layer) in _WATCHED:  # otherwise somebody has exchanged it in turn; without the key it is a plain layer
        layer.__class__ = type(layer).__mro__[1]


def _watch_of(layer: nn.Module, captures: "tuple[Capture, ...]") -> "Watch | JointWatch":
    return Watch(layer, captures) if joint_of(layer) is None else JointWatch(layer, captures)


def _watched_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _CLASSES:
        return _CLASSES[cls]
    plain = cls.forward
    is_joint = any(issubclass(cls, kind.module_types) for kind in JOINTS)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler must not look into what watches the layer
            return _uncompiled(self, plain, args, kwargs)
        watch: Watch | None = self.__dict__.get(_KEY)
        if watch is None or watch.layer is not self:  # let go of, or a replica of nn.DataParallel
            return plain(self, *args, **kwargs)
        return watch.called(plain, args, kwargs)

    @functools.wraps(plain)
    def joint_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _uncompiled(self, plain, args, kwargs)  # code of its own, which the compiler may give up

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        """A copy, or a pickle, is of the original class and not watched."""
        reduced: Any = cls.__reduce_ex__(self, protocol)
        function, arguments, state, *rest = reduced
        state = {name: value for name, value in state.items() if name != _KEY}
        if type(self) is watched and function is copyreg.__newobj__:  # type: ignore[attr-defined]
            function, arguments = object.__new__, (cls,)
        return (function, arguments, state, *rest)

    forward = joint_forward if is_joint else forward
    members = {"forward": forward, "__reduce_ex__": reduce_ex, "__module__": cls.__module__, "__doc__": cls.__doc__}
    watched = type(cls.__name__, (cls,), members)
    watched.__qualname__ = cls.__qualname__
    _CLASSES[cls] = watched
    _WATCHED.add(watched)
    return watched


def _uncompiled(layer: nn.Module, plain: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    watch: Watch | JointWatch | None = layer.__dict__.get(_KEY)
    if watch is None or watch.layer is not layer:
        return plain(layer, *args, **kwargs)
    return watch.called(plain, args, kwargs, apply_uncompiled_product)


leave_uncompiled(
    __name__,
    "_uncompiled",
    reason="consequent watches this layer: compile without fullgraph=True, or exclude the layer",
)


class Watch:
    """Who watches a layer, and what its calls become."""

    __slots__ = ("_is_own", "_operation", "captures", "layer")

    def __init__(self, layer: nn.Module, captures: "tuple[Capture, ...]") -> None:
        self.layer = layer
        self.captures = captures
        kind = kind_of(layer)
        assert kind is not None
        self._operation: Operation = kind.of(layer)
        self._is_own = not _has_forward_of(layer, class_of(layer))

    def called(
        self, plain: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], apply: Apply = apply_product
    ) -> Any:
        """What the layer computes, with the graph's node a product of ours if somebody wants to know of it.

        Args:
            plain: the ``forward`` of its class.
            args: of the call.
            kwargs: likewise.
            apply: the product.
        """
        layer = self.layer
        if transforms_are_active():
            return plain(layer, *args, **kwargs)
        if not torch.is_grad_enabled():
            for capture in self.captures:
                capture.entries.called_without_graph()
            return plain(layer, *args, **kwargs)
        parameters = layer._parameters
        if "weight" not in parameters or ("bias" not in parameters and hasattr(layer, "bias")):
            for capture in self.captures:
                capture.misbehaving[layer] = "it was parametrised or pruned after attaching"
            return plain(layer, *args, **kwargs)
        operation = self._operation
        if not operation.is_current(layer):
            operation = self._operation = type(operation).of(layer)
        if self._is_own:
            with _Looking(self, apply) as looking:
                outputs = plain(layer, *args, **kwargs)
            if not looking.saw_product:
                for capture in self.captures:
                    capture.misbehaving[layer] = "its forward does not multiply inputs with its weight as it is"
            return outputs
        is_usual = len(args) == 1 and not kwargs and not operation.is_sparse
        inputs = args[0] if is_usual else operation.inputs_in(args, kwargs)
        canonical = operation.canonical(inputs) if _is_ordinary(inputs, operation) else None
        if canonical is not None:
            outputs = self.product(canonical, inputs, parameters["weight"], parameters.get("bias"), apply)
            if outputs is not None:
                return outputs
        outputs = plain(layer, *args, **kwargs)
        if canonical is None:  # and torch knows what to do with it
            for capture in self.captures:
                capture.misbehaving[layer] = "it was called with sparse, nested or further inputs"
        return outputs

    def product(self, canonical: Canonical, given: Tensor, weight: Any, bias: Any, apply: Apply) -> Tensor | None:
        """The layer's outputs, by a product of ours; None where nobody wants that."""
        operation, inputs, samples, output_shape = canonical
        operation = operation.canonical_form
        cast = autocast_dtype(inputs.device) if autocast_is_on() and operation.follows_autocast else None
        if cast is not None and inputs.is_floating_point() and inputs.dtype is not _FLOAT64:
            inputs = inputs.to(cast)
        elif inputs.dtype is not weight.dtype and inputs.is_floating_point():
            return None  # torch has its own words for this
        dtype = weight.dtype if cast is None else cast
        uses: list[tuple[Listener, Use]] = []
        has_bias = bias is not None
        for capture in self.captures:
            use = capture.use_of(self.layer, operation, given, samples, output_shape, dtype, has_bias)
            if use is not None:
                uses.append((capture.listener, use))
        if not uses:
            return None
        if operation.is_sparse:
            operation.prepare(weight, inputs)
        for listener, use in uses:
            if listener.replaces_gradients:
                is_compiled = apply is apply_uncompiled_product
                weight, bias = listener.before_product(use, weight, bias, is_compiled=is_compiled)
        outputs: Tensor = apply(unwrapped_if_left(inputs), weight, bias, Call(operation, uses, weight.dtype))
        if outputs.requires_grad:
            rows = operation.rows(outputs)
            for listener, use in uses:
                use.rows = rows
                if use.entry.module is self.layer:
                    use.entry.output_shape = tuple(outputs.shape) if output_shape is None else output_shape
                if listener.replaces_gradients:
                    listener.after_product(use, outputs)
        return outputs if output_shape is None else outputs.view(output_shape)


class _Looking(TorchFunctionMode):
    """Inside of a layer's own ``forward``: a product with its weight becomes ours."""

    def __init__(self, watch: Watch, apply: Apply) -> None:
        super().__init__()
        self._apply = apply
        self._watch = watch
        self.saw_product = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = self._watch.layer
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        own = layer._parameters.get("weight")
        if weight is not own and not self._takes_computed(func, args, kwargs, weight, own):
            return func(*args, **kwargs)
        inputs = args[0] if args else kwargs.get("input")
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        canonical = None
        if _is_ordinary(inputs, self._watch._operation) and (bias is None or bias is layer._parameters.get("bias")):
            canonical = self._watch._operation.product_called(func, args, kwargs)
        self.saw_product |= canonical is not None
        outputs = None if canonical is None else self._watch.product(canonical, inputs, weight, bias, self._apply)
        return func(*args, **kwargs) if outputs is None else outputs

    def _takes_computed(self, func: Any, args: Any, kwargs: Any, weight: Any, own: Tensor | None) -> bool:
        """Whether it is a product with a weight that was made of the layer's own (standardised, say).

        That one's gradient is corrected where autograd computes it, and goes on to the layer's own weight through all
        that was done to it. At the step there is no gradient of it any more.
        """
        if not isinstance(weight, Tensor) or own is None or weight.shape != own.shape or weight.grad_fn is None:
            return False
        if not all(capture.listener.replaces_gradients for capture in self._watch.captures):
            return False
        inputs = args[0] if args else kwargs.get("input")
        if not isinstance(inputs, Tensor) or self._watch._operation.product_called(func, args, kwargs) is None:
            return False
        return is_made_of(weight, own)


def _has_forward_of(layer: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a layer's ``forward`` is that of the class, which may be watched."""
    if "forward" in vars(layer):
        return False
    found: Any = type(layer).forward
    return getattr(found, "__wrapped__", found) is cls.forward


def _is_ordinary(inputs: Any, operation: Operation) -> bool:
    """Whether it is a tensor that our product can compute with; torch itself takes others, too."""
    if type(inputs) is Tensor and inputs.dtype in _USUAL and inputs.layout is _STRIDED and not inputs.is_nested:
        return True
    if not isinstance(inputs, Tensor) or inputs.layout not in (torch.strided, torch.sparse_coo) or inputs.is_nested:
        return False
    if inputs.is_sparse and not operation.is_sparse:
        return False
    return not inputs.is_complex() and not inputs.is_quantized and not is_sharded(inputs)
