"""``Z = W X`` as an autograd function whose backward pass hands on the corrected gradient: the paper's Algorithm 3.

The function is pure. So whatever autograd and its users do with gradients (accumulation, checkpointing, scaling,
clipping, DDP, compilation) they do with this one as well. What else there is to tell of a pass leaves it as the
gradient of a further input, the probe.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from consequent.layers import Operation
from consequent.maths.bound import relative_change
from consequent.maths.damping import Damping
from consequent.maths.precision import may_sync
from consequent.maths.ridge import Update
from consequent.minibatch.gather import Way
from consequent.minibatch.systems import system_of
from consequent.minibatch.warning import ConsequentWarning

# What the probe's gradient tells: passes, how much they change the outputs (maths.bound), failed factorisations.
PASSES, CHANGE, FAILED = range(3)


class Product(torch.autograd.Function):
    """``Z = W X`` (plus the bias), whose backward pass hands on ``c ΔZ (XᵀX + λI)⁻¹ Xᵀ`` as the gradient of W."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probe: Tensor | None,
        operation: Operation,
        way: Way,
    ) -> Tensor:
        """Compute the outputs.

        Args:
            ctx: autograd's.
            inputs: X, in the form that the operation takes.
            weight: W.
            bias: of the layer, if it has one.
            probe: a leaf, whose gradient tells of the pass; None: the gathering tells.
            operation: how they are multiplied.
            way: how it is corrected.
        """
        ctx.save_for_backward(inputs, weight if ctx.needs_input_grad[0] else None)
        ctx.operation, ctx.way = operation, way
        ctx.ones, ctx.dtype = ctx.needs_input_grad[2], weight.dtype
        ctx.is_differentiated = False
        return operation.apply(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> Any:
        """Compute the gradients: that of the inputs as ever, those of weight and bias corrected."""
        device = output_grad.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return _gradients(ctx, output_grad)
        return _gradients(ctx, output_grad)


def _gradients(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs, weight = ctx.saved_tensors
    operation, way = ctx.operation, ctx.way
    input_grad = weight_grad = bias_grad = probe_grad = None
    if weight is not None:
        input_grad = operation.input_gradient(output_grad, weight.to(output_grad.dtype), inputs)
    if ctx.is_differentiated or torch.is_grad_enabled():  # create_graph=True, or was so in an earlier pass
        _warn_of_differentiation(ctx)
        weight_grad = operation.weight_gradient(inputs, output_grad).to(ctx.dtype)
        bias_grad = operation.bias_gradient(output_grad).to(ctx.dtype) if ctx.ones else None
    elif not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):  # the pass goes elsewhere
        pass
    elif way.gathering is not None:
        way.gathering.reach(ctx, operation, inputs, output_grad, ctx.ones, way)
    else:
        update = corrected_update(operation, inputs, output_grad, way.damping, ones=ctx.ones, measured=way.measured)
        weight_grad = operation.shaped_like_weight(update.weight * way.scale).to(ctx.dtype)
        bias_grad = None if update.bias is None else (update.bias * way.scale).flatten().to(ctx.dtype)
        probe_grad = told_by(update, operation, ones=ctx.ones)
    return input_grad, weight_grad, bias_grad, probe_grad, None, None


def corrected_update(
    operation: Operation, inputs: Tensor, output_grad: Tensor, damping: Damping, *, ones: bool, measured: bool = False
) -> Update:
    """``ΔZ (XᵀX + λI)⁻¹ Xᵀ``, by the smaller of the two systems; in float64 where float32 has too few digits for it.

    Args:
        operation: the product.
        inputs: X, in the form that it takes.
        output_grad: ΔZ, likewise.
        damping: λ.
        ones: whether a bias is trained.
        measured: whether the change that it makes is asked for.
    """
    update = system_of(operation, inputs, output_grad, ones=ones).solved(damping, measured=measured)
    if inputs.dtype.itemsize < 8 and may_sync(inputs) and update.failed:
        inputs, output_grad = inputs.double(), output_grad.double()
        return system_of(operation, inputs, output_grad, ones=ones).solved(damping, measured=measured)
    return update


def told_by(update: Update, operation: Operation, *, ones: bool) -> Tensor | None:
    """What a probe's gradient tells of one pass; None if there is nothing to tell."""
    if update.change is None and not isinstance(update.failed, Tensor) and update.failed == 0:
        return None
    change = torch.zeros((), device=update.weight.device)
    if update.change is not None:
        columns = operation.features + ones
        energy, size, trace = update.change.sum(1)
        change = relative_change(energy, size, trace, columns, operation.outputs // operation.groups).float()
    failed = torch.as_tensor(update.failed, dtype=change.dtype, device=change.device)
    tells = change.isfinite() & (change > 0)  # a pass of NaN or of zeros tells nothing, also of later ones
    return torch.stack((tells.float(), torch.where(tells, change, 0), failed))


def _warn_of_differentiation(ctx: Any) -> None:
    if not ctx.is_differentiated and ctx.way.calls is not None:
        warnings.warn(
            "gradients are differentiated (create_graph=True): the layers they went through keep their plain gradient "
            "in that graph, since the correction is not differentiated",
            ConsequentWarning,
            stacklevel=2,
        )
    ctx.is_differentiated = True
