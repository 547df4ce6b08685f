"""The layers of a backward pass, corrected together: what a GPU is asked for does not grow with their number.

One node of autograd lies behind all parameters. The layers' products use what comes out of it in their place, and hand
in the systems that they ask to be solved. The node's backward pass comes after theirs, solves all systems of one shape
at once, and hands the gradients on. It is ordinary autograd: hooks, DDP and accumulation see what they should.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.gpu import samples
from consequent.gpu.launch import index_of
from consequent.layers import Linear, Operation
from consequent.maths.bound import relative_change
from consequent.maths.damping import Damping
from consequent.maths.ridge import Update
from consequent.minibatch.systems import System, system_of, together
from consequent.minibatch.wide import Wide, solve_wide, wide_call


class Calls:
    """The calls of a weight in one forward pass; how many they are is known when the pass is over."""

    def __init__(self, number: int = 0) -> None:
        self.number = number


class Way(NamedTuple):
    """How a call of a layer is corrected.

    Attributes:
        damping: λ.
        divisor: c, what the loss is divided by.
        calls: of the weight in this forward pass, by which the correction is divided; None: it is already.
        measured: whether it is to be told how much a pass changes the outputs.
        gathering: which corrects the layers of a pass together; None: this one is corrected for itself.
        place: of the layer in there.
    """

    damping: Damping
    divisor: float
    calls: Calls | None
    measured: bool
    gathering: "Gathering | None" = None
    place: int = 0

    @property
    def scale(self) -> Any:
        """``c / k``."""
        return self.divisor if self.calls is None else self.divisor / self.calls.number


class Reached(NamedTuple):
    """A call of a layer that a backward pass has reached.

    Attributes:
        place: of the layer.
        operation: the product.
        system: which it asks to be solved.
        damping: λ.
        scale: by which the solution is multiplied.
        measured: whether it is to be told how much the outputs change.
    """

    place: int
    operation: Operation
    system: System
    damping: Damping
    scale: float
    measured: bool

    @property
    def key(self) -> Any:
        """What calls have in common that are solved together."""
        return self.operation.groups, *self.system.shape, self.damping, self.scale, self.measured


class _Dense(NamedTuple):
    """A call that is solved with others of any shape."""

    place: int
    call: samples.Call
    damping: Damping
    measured: bool

    @property
    def key(self) -> Any:
        """What calls have in common that are solved together."""
        return self.damping, self.measured


class Gathered(NamedTuple):
    """A layer whose calls are gathered."""

    weight: Tensor
    bias: Tensor | None


class Gathering:
    """One forward pass, and what its backward passes reach.

    Args:
        layers: whose weights are trained, or whose biases are.
        probe: a leaf, ``[layers, 3]``, whose gradient tells of backward passes (:mod:`consequent.minibatch.product`).

    Attributes:
        aliases: of the parameters, by their ids. The gradients of these come from here.
        reached: calls of layers, each by its node.
    """

    def __init__(self, layers: Sequence[Gathered], probe: Tensor) -> None:
        self.layers = layers
        self.reached: dict[Any, Any] = {}
        of_layers = (one for layer in layers for one in layer)
        self.parameters = list({id(one): one for one in of_layers if one is not None and one.requires_grad}.values())
        found = _Gather.apply(self, probe, *self.parameters)  # type: ignore[no-untyped-call]
        self.aliases = {id(one): alias for one, alias in zip(self.parameters, found, strict=True)}

    def reach(self, node: Any, operation: Operation, inputs: Tensor, output_grad: Tensor, ones: bool, way: Way) -> None:
        """A backward pass has reached a call.

        Args:
            node: of the call.
            operation: the product.
            inputs: X, in the form that it takes.
            output_grad: ΔZ, likewise.
            ones: whether a bias is trained.
            way: how the call is corrected.
        """
        is_dense = isinstance(operation, Linear) and operation.has_rows_of_outputs
        is_large = is_dense and way.damping.is_large(len(inputs), operation.features + ones, inputs.dtype)
        if is_large and samples.accepts(inputs, output_grad, ones=ones):
            call = samples.Call(inputs, output_grad, ones, way.scale)
            self.reached[node] = _Dense(way.place, call, way.damping, way.measured)
        elif (wide := wide_call(operation, inputs, output_grad, ones=ones)) is not None:
            self.reached[node] = Wide(way.place, *wide, way.damping, way.scale, way.measured)
        else:
            system = system_of(operation, inputs, output_grad, ones=ones)
            self.reached[node] = Reached(way.place, operation, system, way.damping, way.scale, way.measured)

    def solved(self) -> tuple[dict[int, Tensor], Tensor | None]:
        """The gradients of the parameters, by their ids, and what there is to tell."""
        reached, self.reached = list(self.reached.values()), {}
        found: dict[int, Tensor] = {}
        told: list[Tensor] = []
        places: list[int] = []
        for calls in _alike(reached).values():
            of_system = isinstance(calls[0], Reached)
            weights, biases, of_calls = _SOLVE[type(calls[0])](calls)
            told.append(of_calls)
            places += [call.place for call in calls]
            for call, weight, bias in zip(calls, weights, biases, strict=True):
                layer = self.layers[call.place]
                _add(found, layer.weight, call.operation.shaped_like_weight(weight) if of_system else weight)
                _add(found, layer.bias, bias)
        if not told:
            return found, None
        rows = torch.cat(told) if len(told) > 1 else told[0]
        if places == list(range(len(self.layers))):
            return found, rows
        return found, rows.new_zeros(len(self.layers), 3).index_add_(0, index_of(tuple(places), rows.device), rows)


def _add(found: dict[int, Tensor], parameter: Tensor | None, gradient: Tensor | None) -> None:
    if parameter is None or gradient is None:
        return
    if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
        gradient = gradient.reshape(parameter.shape).to(parameter.dtype)
    known = found.get(id(parameter))
    found[id(parameter)] = gradient if known is None else known + gradient


def _alike(reached: Sequence[Any]) -> dict[Any, list[Any]]:
    alike: dict[Any, list[Any]] = {}
    for one in reached:
        alike.setdefault((type(one), one.key), []).append(one)
    return alike


def _by_kernels(calls: Sequence[_Dense]) -> samples.Updates:
    return samples.update_all([one.call for one in calls], calls[0].damping.value, measured=calls[0].measured)


def _together(calls: Sequence[Reached]) -> samples.Updates:
    """By batched calls of torch."""
    update = together([call.system for call in calls]).solved(calls[0].damping, measured=calls[0].measured)
    weights = (update.weight * calls[0].scale).chunk(len(calls))
    biases = [None] * len(calls) if update.bias is None else (update.bias * calls[0].scale).chunk(len(calls))
    return samples.Updates(list(weights), list(biases), _told(calls, update))


def _told(calls: Sequence[Reached], update: Update) -> Tensor:
    """Of each call: 1 if it can be told how much the outputs change, that, and how many factorisations failed."""
    system = calls[0].system
    told = update.weight.new_zeros(len(calls), 3, dtype=torch.float32)
    if update.change is not None:
        energy, size, trace = update.change.view(3, len(calls), -1).sum(-1)
        columns, outputs = system.left.shape[2], system.right.shape[2 if system.by_samples else 1]
        change = relative_change(energy, size, trace, columns + (system.ones and system.by_samples), outputs)
        tells = change.isfinite() & (change > 0)
        told[:, 0], told[:, 1] = tells, torch.where(tells, change, 0)
    if isinstance(update.failed, Tensor) or update.failed:
        told[0, 2] = update.failed
    return told


_SOLVE: dict[type, Callable[[Any], samples.Updates]] = {_Dense: _by_kernels, Wide: solve_wide, Reached: _together}


class _Gather(torch.autograd.Function):
    """Hands all parameters on. Its backward pass comes after those of the products that use them."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, probe: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Compute the aliases."""
        ctx.gathering = gathering
        ctx.set_materialize_grads(False)
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the gradients of the calls that were reached, and add those that come as gradients of the aliases."""
        with torch.no_grad():
            device = ctx.gathering.parameters[0].device.type
            with torch.autocast(device, enabled=False):
                found, told = ctx.gathering.solved()
        own = [found.get(id(parameter)) for parameter in ctx.gathering.parameters]
        pairs = zip(own, gradients, strict=True)
        return None, told, *(one if other is None else other if one is None else one + other for one, other in pairs)
