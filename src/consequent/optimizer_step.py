"""What happens at the steps of one optimiser: averages are multiplied into ``.grad``, and the bound is held."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from consequent.averages.average import AveragedLayer
from consequent.averages.ranks import ranks
from consequent.averages.step import Averages
from consequent.gpu import shorten
from consequent.gpu.launch import index_of, on_device
from consequent.maths.bound import rate_in_the_long_run, shortening
from consequent.maths.precision import may_sync
from consequent.minibatch.own_inputs import OwnInputs, told_of
from consequent.minibatch.product import CHANGE, FAILED, PASSES


class OptimizerStep:
    """The layers of one optimiser, and its steps.

    Args:
        optimizer: the optimiser.
        averages: its averaged layers.
        own_inputs: its layers with own inputs, and those that nobody holds yet.
        bound: β; None: no bound.
        layers: all corrected layers of the model. If only one of them has a gradient, it is not bounded.
        adopt: gives an averaged layer own inputs instead.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        averages: Averages,
        own_inputs: Sequence[OwnInputs],
        bound: float | None,
        layers: Sequence[nn.Module],
        adopt: Callable[[AveragedLayer], OwnInputs],
    ) -> None:
        self.averages = averages
        self._own_inputs = [own for own in own_inputs if own.weight_owner is own]
        self._bound = bound if isinstance(optimizer, SGD) else None
        self._layers: list[Any] = list(layers)
        self._handles: list[Any] = []
        self._under_way: list[Tensor | None] | None = None  # the gradients of the step under way
        self._rates: Rates | None = None
        self._failed = torch.zeros(())
        self._adopt = adopt
        for own in own_inputs:
            own.measured = own.measured or self._bound is not None
        if averages.layers or (self._bound is not None and own_inputs):
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    @property
    def holds_bound(self) -> bool:
        """Whether any layer is bounded. Of own inputs, each of several ranks would find another bound."""
        return self._bound is not None and (bool(self.averages.layers) or _is_alone())

    def give_own_inputs(self) -> None:
        """To the layers for which averages have turned out to cost more."""
        for layer in self.averages.take_narrow():
            own = self._adopt(layer)
            own.measured = self._bound is not None
            self._own_inputs.append(own)

    @property
    def failed(self) -> int:
        """How many factorisations failed up to the last step."""
        return round(float(self._failed)) + int(self.averages.failed)

    def remove(self) -> None:
        """Leave the optimiser and the layers alone."""
        self.averages.stop_observing()
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Correct now, or after each call of the closure that computes the gradients.

        A ``step`` that calls the one of its base class comes here twice, with the same gradients. A step that raised
        is never told to be over; the gradients of the next one are others.
        """
        gradients = self._gradients()
        known, self._under_way = self._under_way, gradients
        if known is not None and all(one is other for one, other in zip(known, gradients, strict=True)):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._correct(optimizer)
            return None

        def corrected() -> Any:
            try:
                loss = closure()
            except BaseException:
                self._under_way = None
                raise
            self._correct(optimizer)
            self._under_way = self._gradients()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": corrected}
        return (args[0], corrected, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._under_way = None

    def _gradients(self) -> list[Tensor | None]:
        return [layer.weight.grad for layer in self._layers]

    @torch.no_grad()
    def _correct(self, optimizer: Any) -> None:
        rates = self._rates = Rates(optimizer, self._rates)
        weights = [layer.weight for layer in self._layers]
        moving = {id(weight) for weight in weights if weight.grad is not None and weight.requires_grad}
        bound = self._bound if len(moving) > 1 else None
        if self.averages.layers:
            self.averages.before_step(bound, rates.of)
        alike: dict[torch.device, list[OwnInputs]] = {}
        for own in self._own_inputs:
            if id(own.module.weight) in rates.groups:
                alike.setdefault(own.module.weight.device, []).append(own)
        for layers in alike.values():
            told = told_of(layers)
            if told is not None:
                self._failed = self._failed.to(told.device) + told[:, FAILED].sum()
                if bound is not None and _is_alone():
                    _shorten(layers, told, rates, bound)
        if self.averages.layers:
            self.give_own_inputs()


class Rates:
    """How far a step of SGD moves its parameters along their gradients, in the long run.

    Args:
        optimizer: the optimiser.
        last: those of the last step.

    Attributes:
        sizes: of the parameter groups,
        groups: and which of them each parameter is in, by its id.
    """

    def __init__(self, optimizer: Any, last: "Rates | None" = None) -> None:
        self.sizes = [(id(group), len(group["params"])) for group in optimizer.param_groups]
        self.groups: dict[int, Any] = {} if last is None else last.groups
        if last is None or last.sizes != self.sizes:
            self.groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._states, self._known = optimizer.state, dict[int, Any]()
        scale = getattr(optimizer, "grad_scale", None)  # a GradScaler's, by which fused optimisers divide themselves
        self._scale = 1 if scale is None else scale

    def of(self, parameters: Sequence[Tensor]) -> Any:
        """The highest of these parameters' rates; 0 if the optimiser holds none of them."""
        highest: Any = 0.0
        for parameter in parameters:
            rate = self._of(parameter)
            if isinstance(rate, Tensor) or isinstance(highest, Tensor):  # which the host does not look at
                pair = [torch.as_tensor(one, device=parameter.device) for one in (rate, highest)]
                highest = torch.maximum(*pair)
            elif rate > highest:
                highest = rate
        return highest / self._scale

    def _of(self, parameter: Tensor) -> Any:
        group = self.groups.get(id(parameter))
        if group is None:
            return 0.0
        if group.get("dampening"):  # of which a parameter's first gradient is free
            is_first = self._states.get(parameter, {}).get("momentum_buffer") is None
            return rate_in_the_long_run(group, is_first=is_first)
        known = self._known.get(id(group))
        if known is None:
            known = self._known[id(group)] = rate_in_the_long_run(group)
        return known


def _is_alone() -> bool:
    """Whether this process trains by itself."""
    return not (dist.is_available() and dist.is_initialized() and ranks() > 1)


def _shorten(layers: Sequence[OwnInputs], told: Tensor, rates: Rates, bound: float) -> None:
    """Shorten the gradients of layers with own inputs whose outputs would change too much.

    Args:
        layers: on one device.
        told: what their passes have told.
        rates: of the optimiser.
        bound: β.
    """
    trained = [[p for p in layer.parameters if p.grad is not None] for layer in layers]
    of_layers = [[p.grad for p in its] for its in trained]
    gradients = [gradient for its in of_layers for gradient in its]
    if not gradients:
        return
    of_rates = [rates.of(its) for its in trained]
    if shorten.accepts(of_layers) and not any(isinstance(rate, Tensor) for rate in of_rates):
        shorten.shorten_all(of_layers, of_rates, told.contiguous(), bound)
        return
    index = index_of(tuple([place for place, its in enumerate(trained) for _ in its]), told.device)
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    squares = norms.new_zeros(len(layers)).index_add_(0, index, norms.square())
    factors = shortening(bound, _squares(of_rates, told.device) * squares * told[:, CHANGE] / told[:, PASSES])
    if not may_sync(factors):
        for gradient, factor in zip(gradients, factors[index].unbind(), strict=True):
            gradient.mul_(factor)
        return
    for its, factor in zip(of_layers, factors.tolist(), strict=True):
        for gradient in its if factor < 1 else ():
            gradient.mul_(factor)


def _squares(rates: Sequence[Any], device: torch.device) -> Any:
    """Of learning rates, as one number if they are alike."""
    if any(isinstance(rate, Tensor) for rate in rates):
        return torch.stack([torch.as_tensor(rate, dtype=torch.float32, device=device) for rate in rates]) ** 2
    if all(rate == rates[0] for rate in rates):
        return rates[0] ** 2
    return on_device(rates, torch.float32, device) ** 2
