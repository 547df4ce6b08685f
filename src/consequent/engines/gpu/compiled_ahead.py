"""The kernels that a layer's correction needs are compiled from its first call on, beside the forward pass.

Compiling is what the first step of a new program waits for, unless Triton finds everything in its cache. By the first
backward pass all layers have been called, and all of their kernels are being compiled at the same time.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from consequent.capture.torch_internals import graph_is_being_captured
from consequent.engines.gpu import kernels
from consequent.engines.gpu.kernels.choice import are_rounded, patch_moment_by_kernel, patch_moments_by_kernel
from consequent.layers import Operation
from consequent.layers.convolution import Convolution
from consequent.layers.linear import Linear
from consequent.maths.precision import in_full_precision

__all__ = ["compile_ahead"]


def compile_ahead(operation: Operation, inputs: Tensor, dtype: torch.dtype, *, has_bias: bool) -> None:
    """Have the kernels compiled that the correction of such a call will launch; neither waits nor launches anything.

    What is not foreseen here, that of averages among it, is compiled when it is launched.

    Args:
        operation: what the layer does.
        inputs: canonical or not.
        dtype: in which the product is computed.
        has_bias: whether a bias is corrected, too.
    """
    if not kernels.run_on(inputs.device) or graph_is_being_captured() or operation.groups > 1 or operation.is_sparse:
        return
    canonical = operation.canonical(inputs)
    if canonical is None or canonical.inputs.numel() == 0:
        return
    kind = (canonical.operation, canonical.inputs.shape, canonical.inputs.stride(), dtype, has_bias, inputs.device)
    if kind in _foreseen:
        return
    _foreseen.add(kind)
    from consequent.engines.gpu.kernels.launch import rehearse

    with suppress(torch.OutOfMemoryError):
        rehearse(partial(_correct, *kind))


_foreseen: set[tuple[Any, ...]] = set()


@torch.no_grad()
@in_full_precision
def _correct(
    operation: Operation,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device,
) -> None:
    """All that is launched for one layer."""
    inputs = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    rows, columns = inputs.numel() // operation.inputs_per_row, operation.features + has_bias
    if rows < columns:
        if operation.is_dense and inputs.dtype == torch.float32:
            _on_samples(operation, inputs, has_bias)
    elif _moment(operation, inputs, has_bias):
        _on_features(operation, has_bias, device)


def _moment(operation: Operation, inputs: Tensor, ones: bool) -> bool:
    """Whether there is a kernel for it."""
    if isinstance(operation, Linear):
        if inputs.dtype == torch.float32:
            from consequent.engines.gpu.kernels.padded_rows import padded_rows

            padded_rows([inputs], ones=ones, rounded=are_rounded(inputs))
        return True
    if not isinstance(operation, Convolution):
        return False
    if patch_moments_by_kernel(operation, [inputs], ones=ones) is not None:
        return True
    return patch_moment_by_kernel(operation, inputs, ones=ones) is not None


def _on_features(operation: Operation, has_bias: bool, device: torch.device) -> None:
    from consequent.engines.gpu.kernels.factor import inverse_factor
    from consequent.engines.gpu.kernels.features import FeatureLayer, prepare_features, write_features

    inverse_factor(torch.empty(1, 2, 2, device=device), 1.0)  # one kernel for all sizes
    outputs, features = operation.outputs, operation.features
    weight_grad = torch.empty(outputs, features, device=device)
    bias_grad = torch.empty(outputs, device=device) if has_bias else None
    inverse = torch.empty(1, features + has_bias, features + has_bias, device=device)
    layer = FeatureLayer(weight_grad, bias_grad, inverse, torch.empty(1, 4, device=device), 1.0)
    prepared = prepare_features([layer], torch.zeros(1, dtype=torch.int32, device=device))
    write_features(prepared, torch.zeros(6, dtype=torch.int64, device=device))


def _on_samples(operation: Operation, inputs: Tensor, has_bias: bool) -> None:
    from consequent.engines.gpu.kernels.dense import MOST_ROWS, DenseLayer, DenseStep

    rows, outputs, device = len(inputs), operation.outputs, inputs.device
    if rows > MOST_ROWS:
        from consequent.engines.gpu.kernels.factor import inverse_factor
        from consequent.engines.gpu.kernels.padded_rows import padded_rows

        padded_rows([inputs], ones=has_bias)
        inverse_factor(torch.empty(1, 2, 2, device=device), 1.0)
        return
    output_grads = torch.empty(rows, outputs, device=device)
    weight_grad = torch.empty(outputs, operation.features, device=device)
    bias_grad = torch.empty(outputs, device=device) if has_bias else None
    layer = DenseLayer(inputs.contiguous(), output_grads, weight_grad, bias_grad, 1.0, False, 1.0, 1.0)
    step = DenseStep([layer], torch.zeros(2, dtype=torch.int32, device=device))
    step.factorise()
    step.solve()
    step.look()
    step.write(torch.zeros(6, dtype=torch.int64, device=device))
