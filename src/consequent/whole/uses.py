"""Every use of a weight while residuals are computed: what a residual's gradient by that weight is made of.

A residual uses the weight of a linear layer in ``x Wᵀ``. Its derivatives use it again: in ``x' Wᵀ`` where tangents x'
go forward, in ``g W`` where gradients g go back. Each use adds an outer product of two vectors to the residual's
gradient by W. One backward pass brings these vectors for all samples; the gradients themselves need not be formed.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

_numbers = count()


class Noted(NamedTuple):
    """One use: what the weight was multiplied by, and the product's gradients for each component of the residuals."""

    inputs: Tensor
    output_grads: dict[int, Tensor]
    transposed: bool


class Weight:
    """The weight of a linear layer, its uses by their number, and the component that is differentiated now, if any."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.detach()
        self.uses: dict[int, Noted] = {}
        self.component: int | None = None


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
        ctx.number = next(_numbers)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, anchor)
        ctx.save_for_forward(values, anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compute the gradient of the inputs, which is another use. Note this one if residuals are differentiated."""
        (inputs, anchor), weight, grad = ctx.saved_tensors, ctx.weight, grads[0]
        if grad is None:
            return None, None, None, None
        if weight.component is not None:  # detached: with the graph it would hold itself, and never be freed
            noted = weight.uses.setdefault(ctx.number, Noted(inputs.detach(), {}, ctx.transposed))
            noted.output_grads[weight.component] = grad
        return use(grad, anchor, weight, not ctx.transposed) if ctx.needs_input_grad[0] else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Compute the tangent of the product, which is another use."""
        anchor = ctx.saved_tensors[1]
        return None if tangents[0] is None else use(tangents[0], anchor, ctx.weight, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
        """The same for a batch. The outermost ``vmap`` is that over samples, so theirs becomes the first dimension."""
        inputs, anchor, weight, transposed = operands
        rows = inputs.expand(info.batch_size, *inputs.shape) if in_dims[0] is None else inputs.movedim(in_dims[0], 0)
        return use(rows, anchor, weight, transposed), 0


def use(inputs: Tensor, anchor: Tensor, weight: Weight, transposed: bool) -> Tensor:
    """The product."""
    product: Tensor = Use.apply(inputs, anchor, weight, transposed)  # type: ignore[no-untyped-call]
    return product


class Linears(TorchFunctionMode):
    """While it is active, linear layers multiply by :func:`use`.

    Args:
        weights: those that are trained, by the identity of the tensors that stand for them.
        anchor: of the samples.
        biases: of each sample, by the identity of the tensors that stand for them; others are added as they are.
    """

    def __init__(self, weights: Mapping[int, Weight], anchor: Tensor, biases: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.weights, self.anchor, self.biases = weights, anchor, biases

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call any function of torch."""
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {}) if func is F.linear else {}
        weight, bias = self.weights.get(id(given.get("weight"))), given.get("bias")
        if weight is None:
            return func(*args, **(kwargs or {}))
        if self.anchor.ndim and len(given["input"]) != len(self.anchor):
            raise ValueError(
                f"a layer was called with {len(given['input'])} rows for {len(self.anchor)} samples; with batched=True "
                "the first dimension of its inputs must be theirs"
            )
        outputs = use(given["input"], self.anchor, weight, False)
        if id(bias) in self.biases:
            bias = self.biases[id(bias)]
            bias = bias.view(len(bias), *(1,) * (outputs.ndim - 2), -1)
        return outputs if bias is None else outputs + bias
