"""Parameters of each sample's own, and every use of a weight: what a residual's gradient by that weight is made of.

A residual uses the weight of a linear layer in ``x Wᵀ``. Its derivatives use it again: in ``x' Wᵀ`` where tangents x'
go forward, in ``g W`` where gradients g go back. Each use adds an outer product of two vectors to the residual's
gradient by W. One backward pass brings these vectors for all samples; the gradients themselves need not be formed.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Weight:
    """The weight of a linear layer. While residuals are differentiated, its uses are listed: their x and g."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.detach()
        self.uses: list[tuple[Tensor, Tensor]] | None = None


class Use(torch.autograd.Function):
    """``x Wᵀ``, or ``x W``, for each sample and for each direction in which a sample's values are derived.

    The anchor is a zero for each sample. With it a vector that is the same for all samples becomes one for each, and
    the backward pass comes to all uses.
    """

    @staticmethod
    def forward(inputs: Tensor, anchor: Tensor, weight: Weight, transposed: bool) -> Tensor:
        """Compute the product."""
        return inputs @ (weight.matrix if transposed else weight.matrix.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Keep what the derivatives need."""
        values, anchor, ctx.weight, ctx.transposed = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, anchor)
        ctx.save_for_forward(values, anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Compute the gradient of the inputs, which is another use. Note this one if residuals are differentiated."""
        (inputs, anchor), weight = ctx.saved_tensors, ctx.weight
        if grad is not None and weight.uses is not None:
            pair = [rows.detach().reshape(len(rows), -1, rows.shape[-1]) for rows in (inputs, grad)]
            weight.uses.append((pair[1], pair[0]) if ctx.transposed else (pair[0], pair[1]))
        is_wanted = grad is not None and ctx.needs_input_grad[0]
        return use(grad, anchor, weight, not ctx.transposed) if is_wanted else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> Any:
        """Compute the tangent of the product, which is another use."""
        return None if tangent is None else use(tangent, ctx.saved_tensors[1], ctx.weight, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: Any, inputs: Tensor, *others: Any) -> Any:
        """The same for a batch. The dimension of samples stays the first: that of the outermost ``vmap``, or ours."""
        place, source = others[0].ndim if in_dims[1] is None else 0, in_dims[0]
        rows = inputs.expand(info.batch_size, *inputs.shape) if source is None else inputs.movedim(source, place)
        return use(rows, *others), place


def use(inputs: Any, anchor: Tensor, weight: Weight, transposed: bool) -> Any:
    """The product."""
    return Use.apply(inputs, anchor, weight, transposed)  # type: ignore[no-untyped-call]


class ParametersOfEachSample(TorchFunctionMode):
    """While it is active, each sample has parameters of its own, and linear layers multiply by :func:`use`.

    Args:
        weights: of linear layers, by the identity of the parameter.
        each: what stands for a parameter, by its identity: under ``vmap`` a sample's own, otherwise a row for each.
        anchor: a number under ``vmap``, otherwise a vector. Without ``vmap``, only linear layers have parameters.
    """

    def __init__(self, weights: dict[int, Weight], each: dict[int, Tensor], anchor: Tensor) -> None:
        super().__init__()
        self.weights, self.each, self.anchor = weights, each, anchor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call any function of torch."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.autograd.grad and self.anchor.ndim and not kwargs["create_graph"]:
            raise ValueError("torch.autograd.grad must have create_graph=True, or its results would not be trained")
        return func(*self._own(args), **self._own(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002
        known, batched = self.weights.get(id(weight)), self.anchor.ndim
        own: Any = self.each.get(id(bias), bias)
        if batched and len(input) != len(self.anchor) and (known or own is not bias):
            raise ValueError(
                f"a layer was called with {len(input)} rows for {len(self.anchor)} samples; with batched=True the "
                "first dimension of its inputs must be theirs"
            )
        inputs = self._own(input)
        outputs = F.linear(inputs, self._own(weight)) if known is None else use(inputs, self.anchor, known, False)
        if own is not bias and batched:
            own = own.view(len(own), *(1,) * (outputs.ndim - 2), -1)
        return outputs if own is None else outputs + own

    def _own(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return given if self.anchor.ndim else self.each.get(id(given), given)
        if isinstance(given, dict):
            return {name: self._own(one) for name, one in given.items()}
        return type(given)(map(self._own, given)) if type(given) in (list, tuple) else given
