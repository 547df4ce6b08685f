"""The feature side of all layers of a step, in two launches and a table (and two more for large layers).

``G (S + λI)⁻¹ = (G Wᵀ) W`` with ``W = L⁻¹`` and ``S + λI = L Lᵀ``: the second moment of every layer was factorised when
its inputs were known, and what is left are two products with a lower triangular matrix. Products with one triangular
factor are as accurate as triangular solves, and all of their tiles can run at once.

Large products are left to cuBLAS, one by one. Then the first launch gathers their gradients, and the second puts the
products in their place. So are products with inverses that are kept for several steps, layers of one shape together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.engines.gpu.kernels.features_programs import PARTS, _energies, _first_product, _gather, _second_product
from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.table import device_guard, device_table, float_pair, int_pair
from consequent.maths.triangular_products import by_lower, by_transposed

__all__ = ["FeatureLayer", "KeptLayers", "PreparedFeatures", "prepare_features", "write_features"]

PRECISION = "tf32x3"  # of matrix products: about that of float32; "ieee" is float32 itself, without tensor cores

_MOST_PROGRAMS = 1024  # per layer; each then takes several tiles
_LARGE_FROM = 1 << 20  # entries of a gradient, from which on there are tiles enough to fill a GPU with large ones
_MOST_MULTIPLICATIONS = 1 << 28  # of a layer and a product: larger ones gain nothing from going together


class Tiling(NamedTuple):
    """How a product is cut up."""

    outputs: int
    features: int
    summed: int  # features summed over at once
    stages: int  # of loads under way

    def programs(self, shapes: Sequence[tuple[int, int]]) -> int:
        """One per tile of the largest layer, if they are not too many."""
        tiles = (-(-outputs // self.outputs) * -(-size // self.features) for outputs, size in shapes)
        return min(max(tiles), _MOST_PROGRAMS)


# For the first product and for the second. Small layers are a matter of latency: many programs, few steps in each.
_SMALL = Tiling(16, 64, 64, 1), Tiling(16, 32, 64, 1)
_LARGE = Tiling(64, 64, 32, 4), Tiling(64, 64, 32, 4)
_COPIES = Tiling(16, 128, 1, 1)  # nothing is summed


class FeatureLayer(NamedTuple):
    """One layer with its factorised second moment; float32, ``weight_grad`` and ``bias_grad`` are replaced."""

    weight_grad: Tensor  # G: [O, D] or [O, C, *taps], contiguous or channels last
    bias_grad: Tensor | None  # [O], contiguous; the last column of G
    inverse_factor: Tensor  # W: [1, D, D], or [1, D + 1, D + 1] with a bias; contiguous, zero above the diagonal
    status: Tensor  # float32 [1, 4]: trace of S, λ, whether there is a factor, how many of its pivots were raised
    scale: float  # s, what the loss was divided by
    limit: float = math.inf  # of the change of the outputs, see consequent.maths.bound, s left out


class KeptLayers(NamedTuple):
    """Layers of one shape whose moments were inverted before."""

    layers: list[FeatureLayer]  # with ``(S + λI)⁻¹`` itself instead of its factor
    inverses: Tensor  # all of these, [layers, D, D]


@dataclass
class PreparedFeatures:
    """What :func:`write_features` needs; keeps alive what the tables point to."""

    small: "_Multiplied | None"
    large: "_Multiplied | None"
    kept: "_Multiplied | None"
    bad: Tensor


@dataclass
class _Multiplied:
    """Layers and, in the scratch, the first product of small ones or the last one of others."""

    layers: Sequence[FeatureLayer]
    shapes: list[tuple[int, int]]
    table: Tensor
    scratch: Tensor  # and behind the products, for each layer, the parts of ⟨U, G⟩ = ‖Y‖²
    parts: int = 1  # how many there are

    @property
    def energies(self) -> Tensor:
        """``[layers, programs]``, of which the first parts are used."""
        return self.scratch[sum(self.entries) :].view(len(self.layers), PARTS.value)

    @property
    def entries(self) -> list[int]:
        """How many each layer has in the scratch."""
        return [outputs * size for outputs, size in self.shapes]

    def launch(
        self,
        kernel: Any,
        tiling: Tiling,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        scratch: Tensor | None = None,
    ) -> None:
        """Launch as many programs for each layer as its tiles keep busy."""
        grid = (len(self.layers), tiling.programs(self.shapes), 1)
        scratch = self.scratch if scratch is None else scratch
        launch(kernel, grid, (self.table, scratch, *arguments), constants, num_stages=tiling.stages)


def prepare_features(layers: Sequence[FeatureLayer], bad: Tensor, kept: Sequence[KeptLayers] = ()) -> PreparedFeatures:
    """``Y = G Wᵀ`` for all layers, and the last product for some; their gradients are read and not yet written.

    Args:
        layers: all on one device.
        bad: int32 of one element; becomes 1 if a layer's gradient, trace or product is not finite.
        kept: further layers, whose moments were inverted before.
    """
    small = [layer for layer in layers if not _is_large(layer)]
    large = [layer for layer in layers if _is_large(layer)]
    with device_guard(bad.device):
        return PreparedFeatures(
            _prepare_small(small, bad) if small else None,
            _prepare_large(large, bad) if large else None,
            _prepare_kept(kept, bad) if kept else None,
            bad,
        )


def write_features(
    prepared: PreparedFeatures, counts: Tensor, *, steps: int = 0, skips: int = 0, zeroes_bad: bool = True
) -> None:
    """Write ``s Y W`` into the gradients of all layers, or zeros into all of them if ``bad`` is set by now.

    Args:
        prepared: by :func:`prepare_features`.
        counts: int64, the first six of :data:`consequent.reports.counters.NAMES`, added to. Layers whose
            factor has raised pivots, and layers without a factor, which get ``s G / (trace + λ)``, are counted.
        steps: added to the first count.
        skips: added to the second one if ``bad`` is set.
        zeroes_bad: otherwise what is not finite leaves its mark on the gradient of its layer.
    """
    bad = prepared.bad if zeroes_bad else torch.zeros_like(prepared.bad)
    with device_guard(bad.device):
        small = prepared.small, _tilings_of(prepared.small)[1]
        for multiplied, tiling in (small, (prepared.large, _COPIES), (prepared.kept, _COPIES)):
            if multiplied is not None:
                arguments = (bad, counts, sum(multiplied.entries), multiplied.parts, steps, skips)
                constants = (*tiling[:3], PRECISION, multiplied is prepared.small)
                multiplied.launch(_second_product, tiling, arguments, constants)
                steps = skips = 0


def _is_large(layer: FeatureLayer) -> bool:
    return layer.weight_grad.shape[0] * layer.inverse_factor.shape[-1] ** 2 > _MOST_MULTIPLICATIONS


def _tilings_of(multiplied: _Multiplied | None) -> tuple[Tiling, Tiling]:
    """Of the first and the second product of small layers."""
    return _LARGE if multiplied is not None and max(multiplied.entries) >= _LARGE_FROM else _SMALL


def _prepare_small(layers: Sequence[FeatureLayer], bad: Tensor) -> _Multiplied:
    prepared = _with_scratch(layers, bad.device, "small features")
    tiling, _ = _tilings_of(prepared)
    prepared.launch(_first_product, tiling, (bad, sum(prepared.entries)), (*tiling[:3], PRECISION))
    prepared.parts = tiling.programs(prepared.shapes)
    return prepared


def _prepare_large(layers: Sequence[FeatureLayer], bad: Tensor) -> _Multiplied:
    prepared = _with_scratch(layers, bad.device, "large features")
    prepared.launch(_gather, _COPIES, (bad,), _COPIES[:2])
    largest = []
    products = prepared.scratch[: sum(prepared.entries)].split(prepared.entries)
    for layer, shape, part, energy in zip(layers, prepared.shapes, products, prepared.energies, strict=True):
        matrix = part.view(1, *shape)
        product = by_transposed(matrix, layer.inverse_factor)
        by_lower(product, layer.inverse_factor, out=matrix)
        largest.append(torch.linalg.vector_norm(product, math.inf))  # NaN where there is one
        energy[0] = torch.linalg.vector_norm(product).square()
    has_factor = torch.cat([layer.status[:, 2] for layer in layers]) != 0
    bad.bitwise_or_((~torch.where(has_factor, torch.stack(largest), 0).isfinite()).any())
    return prepared


def _prepare_kept(groups: Sequence[KeptLayers], bad: Tensor) -> _Multiplied:
    layers = [layer for group in groups for layer in group.layers]
    prepared = _with_scratch(layers, bad.device, "kept features")
    gathered = torch.empty(sum(prepared.entries), dtype=torch.float32, device=bad.device)
    prepared.launch(_gather, _COPIES, (bad,), _COPIES[:2], gathered)
    start = 0
    for kept, inverses in groups:
        shape = len(kept), kept[0].weight_grad.shape[0], inverses.shape[-1]
        here = slice(start, start + math.prod(shape))
        torch.bmm(gathered[here].view(shape), inverses, out=prepared.scratch[here].view(shape))
        start = here.stop
    prepared.launch(_energies, _COPIES, (gathered, bad, sum(prepared.entries)), _COPIES[:2])
    prepared.parts = _COPIES.programs(prepared.shapes)
    return prepared


def _with_scratch(layers: Sequence[FeatureLayer], device: torch.device, key: str) -> _Multiplied:
    values, shapes = _table_of(layers)
    floats = sum([outputs * size for outputs, size in shapes]) + len(layers) * PARTS.value
    scratch = torch.empty(floats, dtype=torch.float32, device=device)
    return _Multiplied(layers, shapes, device_table(values, device, key=key), scratch)


def _table_of(layers: Sequence[FeatureLayer]) -> tuple[list[int], list[tuple[int, int]]]:
    """The table, and the shapes of all products."""
    values: list[int] = []
    shapes: list[tuple[int, int]] = []
    end = 0
    for layer in layers:
        grad, bias_grad, factor, status, scale, limit = layer
        outputs, size = grad.shape[0], factor.shape[-1]
        features = size if bias_grad is None else size - 1
        _check(layer, outputs, features)
        taps, tap_stride, channel_stride = _steps(grad)
        values += (
            grad.data_ptr(),
            0 if bias_grad is None else bias_grad.data_ptr(),
            factor.data_ptr(),
            status.data_ptr(),
            end,
            int_pair(outputs, features),
            int_pair(taps, tap_stride),
            int_pair(channel_stride, 0),
            float_pair(scale, limit),
        )
        shapes.append((outputs, size))
        end += outputs * size
    return values, shapes


def _check(layer: FeatureLayer, outputs: int, features: int) -> None:
    factor, bias_grad = layer.inverse_factor, layer.bias_grad
    if factor.ndim != 3 or factor.shape[0] != 1 or factor.shape[1] != factor.shape[2] or not factor.is_contiguous():
        raise ValueError(f"inverse_factor must be one square matrix and contiguous, got {list(factor.shape)}")
    if outputs * features != layer.weight_grad.numel():
        raise ValueError(
            f"an inverse_factor of {list(factor.shape)} does not fit weight_grad {list(layer.weight_grad.shape)} "
            f"with{'out' if bias_grad is None else ''} a bias"
        )
    if bias_grad is not None and (bias_grad.shape != (outputs,) or not bias_grad.is_contiguous()):
        raise ValueError(f"bias_grad must be contiguous [{outputs}], got {list(bias_grad.shape)}")
    for tensor in layer[:4]:
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"the tensors of a layer must be float32, got {tensor.dtype}")


def _steps(grad: Tensor) -> tuple[int, int, int]:
    """How many taps there are per channel, and the steps in memory from tap to tap and from channel to channel.

    Feature ``f`` of output ``o`` is at ``o · features + f // taps · channel step + f % taps · tap step``.
    """
    if grad.is_contiguous():
        return 1, 0, 1
    if grad.ndim == 4 and grad.is_contiguous(memory_format=torch.channels_last):
        return grad.shape[2] * grad.shape[3], grad.shape[1], 1
    raise ValueError(f"weight_grad must be contiguous or channels last, got strides {list(grad.stride())}")
