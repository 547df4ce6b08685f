"""The layer's product as a node of autograd's graph, in which its inputs and its output gradients are seen.

What is captured inside of the operation cannot be lost or seen twice, whatever is done to the layer's outputs later
(in-place operations), however its inputs were saved (checkpointing, ``save_on_cpu``), and however often the graph is
run through. A :class:`Listener` hears of each run, and may replace the gradient of the weight.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from consequent.capture.torch_internals import apply_of, is_returned, will_run
from consequent.capture.uncompiled import leave_uncompiled
from consequent.capture.use import JointUse, Use
from consequent.layers import Operation


class Listener(Protocol):
    """Who is told when a backward pass goes through a product."""

    # Otherwise plain gradients are computed, and their listener is not asked before and after the product.
    replaces_gradients: bool

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

    def before_product(
        self, use: Use, weight: Tensor, bias: Tensor | None, *, is_compiled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What the product is computed with in place of the layer's weight W and bias.

        Args:
            use: the call, of which the product is not computed yet.
            weight: the layer's.
            bias: likewise, if it has one.
            is_compiled: whether the layer is called from compiled code.
        """

    def after_product(self, use: Use, outputs: Tensor) -> None:
        """The product was computed, and is a node of the graph."""

    def before_joint(self, use: JointUse, parameters: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """What a unit of several parameters is computed with in place of them.

        Args:
            use: the call, of which nothing is computed yet.
            parameters: the unit's; None where they are not corrected.
        """

    def joint_left_plain(self, use: Use) -> None:
        """A unit that was to be corrected is not, from now on."""


class Call:
    """One call of a layer: what was done, and who is told of its backward passes.

    Args:
        operation: what was done.
        uses: who is told, and of which use.
        dtype: of the weight.
    """

    __slots__ = ("dtype", "operation", "uncast", "uses")

    def __init__(self, operation: Operation, uses: list[tuple[Listener, Use]], dtype: torch.dtype) -> None:
        self.operation = operation
        self.uses = uses
        self.dtype = dtype
        self.uncast: Tensor | None = None  # the weight, where autocast was applied to it


class Product(torch.autograd.Function):
    """``Z = W X`` (plus the bias) on canonical tensors."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Compute the outputs; autocast has been applied to the inputs, and is applied to the weight here."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        operation = call.operation
        if call.dtype is not inputs.dtype and inputs.is_floating_point() and operation.follows_autocast:
            call.uncast, weight = weight, weight.to(inputs.dtype)
            bias = None if bias is None else bias.to(inputs.dtype)
        needs_inputs, needs_weight, _, _ = ctx.needs_input_grad
        keeps_inputs = needs_weight or (needs_inputs and not operation.is_dense)
        ctx.save_for_backward(inputs if keeps_inputs else None, weight if needs_inputs else None)
        outputs = operation.apply(inputs, weight, bias)
        address = -1 if inputs.is_sparse else inputs.data_ptr()
        for _, use in call.uses:
            use.address = address
        return outputs

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None) -> Any:
        """Compute the gradients, and tell the listeners."""
        if output_grad is None:
            return None, None, None, None
        call: Call = ctx.call
        operation, uses = call.operation, call.uses
        try:
            inputs, weight = ctx.saved_tensors
        except RuntimeError as error:
            _explain(error, call)
            raise
        needs_inputs, needs_weight, needs_bias, _ = ctx.needs_input_grad
        nodes = ctx.next_functions  # of tensors: a layer without a bias has none for it
        weight_node: Any = nodes[1][0] if needs_weight else None
        bias_node: Any = nodes[2][0] if needs_bias else None
        weight_runs = needs_weight and will_run(weight_node)
        bias_runs = needs_bias and will_run(bias_node)
        wants_weight = weight_runs or (needs_weight and is_returned(weight_node))
        wants_bias = bias_runs or (needs_bias and is_returned(bias_node))
        for listener, _ in uses:
            if listener.replaces_gradients:
                wants_weight = wants_bias = False
        input_grad = weight_grad = bias_grad = None
        if needs_inputs:
            if torch.is_grad_enabled():
                own = weight if call.uncast is None else call.uncast
                input_grad = Transpose.apply(output_grad, own, inputs, call, weight_node)  # type: ignore[no-untyped-call]
            elif weight_runs and not wants_weight and uses[0][1].gains_from_plain_grads:
                use = uses[0][1]
                input_grad, plain, plain_bias = operation.gradients(output_grad, inputs, weight, use.bias is not None)
                use.plain_grads = plain, plain_bias
            elif wants_weight:
                input_grad, weight_grad, bias_grad = operation.gradients(output_grad, inputs, weight, wants_bias)
            else:
                input_grad = operation.input_gradient(output_grad, weight, inputs)
        for listener, use in uses:
            if use.trains_weight and weight_runs:
                listener.product_reached(use, inputs, output_grad, weight_node)
            elif bias_runs:
                listener.product_reached(use, inputs if use.trains_weight else None, output_grad, bias_node)
        if wants_weight:
            if weight_grad is None:
                weight_grad = operation.weight_gradient(inputs, output_grad)
            if weight_grad.dtype is not call.dtype:
                weight_grad = weight_grad.to(call.dtype)
        if wants_bias:
            if bias_grad is None:
                bias_grad = operation.bias_gradient(output_grad)
            if bias_grad.dtype is not call.dtype:
                bias_grad = bias_grad.to(call.dtype)
        for listener, use in uses:
            if weight_runs and weight_grad is not None and use.trains_weight:
                listener.gradient_returned(use, use.weight, weight_grad, weight_node)
            if bias_runs and bias_grad is not None and use.bias is not None:
                listener.gradient_returned(use, use.bias, bias_grad, bias_node)
        return input_grad, weight_grad, bias_grad, None


class UncompiledProduct(Product):
    """The same for layers that are called from compiled code, where the backward pass may be compiled, too."""

    backward = staticmethod(Product.backward)


leave_uncompiled(__name__, "backward", of_class="UncompiledProduct")

Apply = Callable[[Tensor, Tensor, Tensor | None, Call], Tensor]

apply_product: Apply = apply_of(Product)
apply_uncompiled_product: Apply = apply_of(UncompiledProduct)


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


def _explain(error: RuntimeError, call: Call) -> None:
    """Say in our words why what was saved is not there any more, if that is why."""
    if "modified by an inplace operation" in str(error):
        raise RuntimeError(
            f"the inputs or the weight of {call.uses[0][1].layer} have been modified by an inplace operation since it "
            "was called, and the correction needs them as they were; change a clone of them instead"
        ) from error
