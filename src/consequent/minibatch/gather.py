"""The layers of a backward pass, corrected together: what a GPU is asked for does not grow with their number.

One node of autograd lies behind all parameters. The layers' products use what comes out of it in their place, and hand
in the systems that they ask to be solved. The node's backward pass comes after theirs, solves all systems of one shape
at once, and hands the gradients on. It is ordinary autograd: hooks, DDP and accumulation see what they should.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.gpu import samples
from consequent.layers import Linear, Operation
from consequent.maths.bound import relative_change
from consequent.maths.damping import Damping
from consequent.maths.ridge import Update
from consequent.minibatch.systems import System, together


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
    def is_for_kernels(self) -> bool:
        """Whether it is solved together with others of any shape."""
        system, operation = self.system, self.operation
        if not system.by_samples or not isinstance(operation, Linear) or not operation.has_rows_of_outputs:
            return False
        return samples.accepts(system.left[0], system.right[0], self.damping, ones=system.ones)

    @property
    def key(self) -> Any:
        """What calls have in common that are solved together."""
        if self.is_for_kernels:
            return self.damping, self.measured, self.system.left.device
        return self.operation.groups, *self.system.shape, self.damping, self.scale, self.measured


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
        self.reached: dict[Any, Reached] = {}
        of_layers = (one for layer in layers for one in layer)
        self.parameters = list({id(one): one for one in of_layers if one is not None and one.requires_grad}.values())
        found = _Gather.apply(self, probe, *self.parameters)  # type: ignore[no-untyped-call]
        self.aliases = {id(one): alias for one, alias in zip(self.parameters, found, strict=True)}

    def solved(self) -> tuple[dict[int, Tensor], Tensor | None]:
        """The gradients of the parameters, by their ids, and what there is to tell."""
        reached, self.reached = list(self.reached.values()), {}
        alike: dict[Any, list[Reached]] = {}
        for one in reached:
            alike.setdefault(one.key, []).append(one)
        found: dict[int, Tensor] = {}
        told = []
        for calls in alike.values():
            weights, biases, of_calls = _by_kernels(calls) if calls[0].is_for_kernels else _together(calls)
            told.append(of_calls)
            for call, weight, bias in zip(calls, weights, biases, strict=True):
                layer = self.layers[call.place]
                _add(found, layer.weight, call.operation.shaped_like_weight(weight))
                _add(found, layer.bias, bias)
        if not told:
            return found, None
        places = tuple([call.place for calls in alike.values() for call in calls])
        rows = torch.cat(told)
        if places == tuple(range(len(self.layers))):
            return found, rows
        return found, rows.new_zeros(len(self.layers), 3).index_add_(0, index_of(places, rows.device), rows)


def _add(found: dict[int, Tensor], parameter: Tensor | None, gradient: Tensor | None) -> None:
    if parameter is None or gradient is None:
        return
    gradient = gradient.reshape(parameter.shape).to(parameter.dtype)
    known = found.get(id(parameter))
    found[id(parameter)] = gradient if known is None else known + gradient


def _by_kernels(calls: Sequence[Reached]) -> samples.Updates:
    systems = [(one.system.left[0], one.system.right[0], one.system.ones, one.scale) for one in calls]
    return samples.update_all([samples.Call(*one) for one in systems], calls[0].damping, measured=calls[0].measured)


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


@lru_cache(maxsize=64)
def index_of(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Places as a tensor: they are the same at most steps."""
    return torch.tensor(places, device=device)


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
