"""The layer's product as a node of autograd's graph, in which its inputs and its output gradients are seen.

What is captured inside of the operation cannot be lost or seen twice, whatever is done to the layer's outputs later
(in-place operations), however its inputs were saved (checkpointing, ``save_on_cpu``), and however often the graph is
run through. A :class:`Listener` hears of each run, and may replace the gradient of the weight.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from consequent.capture.torch_internals import is_returned, will_run
from consequent.capture.uncompiled import leave_uncompiled
from consequent.capture.use import Use
from consequent.layers import Operation


class Listener(Protocol):
    """Who is told when a backward pass goes through a product."""

    replaces_gradients: bool  # the plain gradient of the weight is not computed: somebody else hands one in

    def product_reached(self, use: Use, inputs: Tensor | None, output_grad: Tensor, node: Node) -> None:
        """ΔZ is known, and the pass adds to the gradient of the weight or the bias.

        Args:
            use: the call.
            inputs: X, canonical; None where only the bias is trained.
            output_grad: ΔZ, in the shape of the canonical outputs.
            node: of the weight in the graph; that of the bias where only it is trained.
        """

    def transpose_reached(self, use: Use, output_grad: Tensor, weight_grad: Tensor, node: Node) -> None:
        """The pass goes through ``Wᵀ ΔZ``, by which an earlier pass computed an input gradient.

        Args:
            use: the call whose backward pass it was.
            output_grad: its ΔZ.
            weight_grad: the gradient that the weight gets from there.
            node: of the weight in the graph.
        """

    def gradient_returned(self, use: Use, parameter: Tensor, gradient: Tensor, node: Node | None) -> None:
        """A product hands on a gradient of its weight or its bias.

        Args:
            use: the call.
            parameter: the weight or the bias, as the optimiser holds it.
            gradient: in the parameter's shape.
            node: to which it goes in the graph: the accumulator of the parameter's ``.grad``, usually.
        """

    def before_product(self, use: Use, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the product is computed with in place of the layer's weight W and bias.

        Args:
            use: the call, of which the product is not computed yet.
            weight: the layer's.
            bias: likewise, if it has one.
        """

    def after_product(self, use: Use, outputs: Tensor) -> None:
        """The product was computed, and is a node of the graph."""


class Call:
    """One call of a layer: what was done, and who is told of its backward passes."""

    __slots__ = ("operation", "uses")

    def __init__(self, operation: Operation, uses: list[tuple[Listener, Use]]) -> None:
        self.operation = operation
        self.uses = uses

    @property
    def replaces_gradients(self) -> bool:
        """Whether a listener hands in the weight's gradient."""
        return any(listener.replaces_gradients for listener, _ in self.uses)


class Product(torch.autograd.Function):
    """``Z = W X`` (plus the bias) on canonical tensors."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Compute the outputs; autocast has been applied to the inputs, and is applied to the weight here."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        cast, ctx.uncast = weight, None
        if weight.dtype != inputs.dtype and inputs.is_floating_point() and call.operation.follows_autocast:
            cast, ctx.uncast = weight.to(inputs.dtype), weight
            bias = None if bias is None else bias.to(inputs.dtype)
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        keeps_inputs = needs_weight or (needs_inputs and not call.operation.is_dense)
        ctx.save_for_backward(inputs if keeps_inputs else None, cast if needs_inputs else None)
        ctx.dtype = weight.dtype
        outputs = call.operation.apply(inputs, cast, bias)
        for _, use in call.uses:
            use.address = -1 if inputs.is_sparse else inputs.data_ptr()
        return outputs

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None) -> Any:
        """Compute the gradients, and tell the listeners."""
        if output_grad is None:
            return None, None, None, None
        call: Call = ctx.call
        inputs, weight = _saved(ctx, call)
        needs_inputs, needs_weight, needs_bias, _ = ctx.needs_input_grad
        nodes = [node for node, _ in ctx.next_functions]
        is_differentiable = torch.is_grad_enabled()
        runs = [False, needs_weight and will_run(nodes[1]), needs_bias and will_run(nodes[2])]
        wants_weight = needs_weight and (runs[1] or is_returned(nodes[1]))
        wants_bias = needs_bias and (runs[2] or is_returned(nodes[2]))
        if call.replaces_gradients:
            wants_weight = wants_bias = False
        input_grad = weight_grad = bias_grad = None
        if needs_inputs and is_differentiable:
            own = weight if ctx.uncast is None else ctx.uncast
            input_grad = Transpose.apply(output_grad, own, inputs, call, nodes[1])  # type: ignore[no-untyped-call]
        elif needs_inputs and wants_weight:
            input_grad, weight_grad, bias_grad = call.operation.gradients(
                output_grad, inputs, weight, with_bias=wants_bias
            )
        elif needs_inputs:
            input_grad = call.operation.input_gradient(output_grad, weight, inputs)
        for listener, use in call.uses:
            key = 1 if use.trains_weight and runs[1] else 2
            if runs[key]:
                listener.product_reached(use, inputs if use.trains_weight else None, output_grad, nodes[key])
        if wants_weight:
            if weight_grad is None:
                weight_grad = call.operation.weight_gradient(inputs, output_grad)
            if weight_grad.dtype != ctx.dtype:
                weight_grad = weight_grad.to(ctx.dtype)
        if wants_bias:
            if bias_grad is None:
                bias_grad = call.operation.bias_gradient(output_grad)
            if bias_grad.dtype != ctx.dtype:
                bias_grad = bias_grad.to(ctx.dtype)
        for listener, use in call.uses:
            if weight_grad is not None and use.trains_weight and runs[1]:
                listener.gradient_returned(use, use.weight, weight_grad, nodes[1])
            if bias_grad is not None and use.bias is not None and runs[2]:
                listener.gradient_returned(use, use.bias, bias_grad, nodes[2])
        return input_grad, weight_grad, bias_grad, None


class UncompiledProduct(Product):
    """The same for layers that are called from compiled code, where the backward pass may be compiled, too."""

    backward = staticmethod(Product.backward)


leave_uncompiled(__name__, "backward", of_class="UncompiledProduct")


class Transpose(torch.autograd.Function):
    """``Wᵀ ΔZ``, the gradient of a product's inputs, where that is differentiated in turn (``create_graph=True``)."""

    @staticmethod
    def forward(ctx: Any, output_grad: Tensor, weight: Tensor, inputs: Tensor, call: Call, node: Node | None) -> Tensor:
        """Compute the input gradient."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.node = call, node
        ctx.save_for_backward(output_grad, weight)
        return call.operation.input_gradient(output_grad, weight.to(output_grad.dtype), inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """With γ, the gradient of the input gradient: ``Wγ`` and ``ΔZ γᵀ``."""
        if grad is None:
            return None, None, None, None, None
        call: Call = ctx.call
        output_grad, weight = ctx.saved_tensors
        needs_output_grad, needs_weight = ctx.needs_input_grad[:2]
        weight_grad = None
        if needs_weight:
            weight_grad = call.operation.weight_gradient(grad, output_grad).to(weight.dtype)
            if will_run(ctx.node):
                for listener, use in call.uses:
                    if use.trains_weight:
                        listener.transpose_reached(use, output_grad, weight_grad, ctx.node)
                        if not listener.replaces_gradients:
                            listener.gradient_returned(use, use.weight, weight_grad, ctx.node)
        grad_of_output_grad = call.operation.apply(grad, weight.to(grad.dtype), None) if needs_output_grad else None
        return grad_of_output_grad, weight_grad, None, None, None


def _saved(ctx: Any, call: Call) -> tuple[Tensor, Tensor]:
    try:
        inputs, weight = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"the inputs or the weight of {call.uses[0][1].layer} have been modified by an inplace operation since it "
            "was called, and the correction needs them as they were; change a clone of them instead"
        ) from error
    return inputs, weight
