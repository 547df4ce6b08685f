# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
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
import triton
import triton.language as tl
from torch import Tensor

from consequent.engines.gpu.kernels.counting import BOUNDED, FALLEN_BACK, RESCUED, count, count_step
from consequent.engines.gpu.kernels.launch import launch
from consequent.engines.gpu.kernels.table import (
    device_guard,
    device_table,
    float_pair,
    floats_at,
    high_float,
    high_int,
    int_pair,
    is_finite,
    low_float,
    low_int,
    shortening,
)
from consequent.maths.triangular_products import by_lower, by_transposed

__all__ = ["FeatureLayer", "KeptLayers", "PreparedFeatures", "prepare_features", "write_features"]

PRECISION = "tf32x3"  # of matrix products: about that of float32; "ieee" is float32 itself, without tensor cores

_FIELDS = tl.constexpr(9)  # entries of the table per layer
_MOST_PROGRAMS = 1024  # per layer; each then takes several tiles
_PARTS = tl.constexpr(1024)  # of a sum, as many as there are programs at most
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
        return self.scratch[sum(self.entries) :].view(len(self.layers), _PARTS.value)

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
        counts: int64 of six elements that are added to, :data:`consequent.reports.counters.NAMES`. Layers whose
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
    floats = sum([outputs * size for outputs, size in shapes]) + len(layers) * _PARTS.value
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


@triton.jit
def _layer_at(entry):
    """A layer's outputs, features, these with the bias, the bias's address or 0, taps, and steps to tap and channel."""
    shape, strides, bias_address = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 1)
    features = high_int(shape)
    size = features + (bias_address != 0).to(tl.int32)
    channel_stride = low_int(tl.load(entry + 7))
    return low_int(shape), features, size, bias_address, low_int(strides), high_int(strides), channel_stride


@triton.jit
def _places(f, taps, tap_stride, channel_stride):
    return f // taps * channel_stride + f % taps * tap_stride


@triton.jit(do_not_specialize=["table", "scratch", "bad", "entries"])
def _first_product(
    table,
    scratch,
    bad,
    entries: tl.int64,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some tiles of ``Y = G Wᵀ``: ``Y[o, i] = Σ_{j ≤ i} G[o, j] W[i, j]``."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, features, size, bias_address, taps, tap_stride, channel_stride = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    tiles_across = tl.cdiv(size, BLOCK_F)
    gradient, bias_grad = floats_at(tl.load(entry)), floats_at(bias_address)
    factor, status = floats_at(tl.load(entry + 2)), floats_at(tl.load(entry + 3))
    product = scratch + tl.load(entry + 4)
    ok = tl.load(status + 2) != 0
    energy = 0.0
    for tile in range(program, tiles_down * tiles_across, tl.num_programs(1)):
        first = (tiles_across - 1 - tile // tiles_down) * BLOCK_F  # the tiles with most to sum up begin
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        i = first + tl.arange(0, BLOCK_F)
        row = gradient + o[:, None].to(tl.int64) * features
        factor_row = factor + i[None, :].to(tl.int64) * size
        Y = tl.zeros((BLOCK_F, BLOCK_O), tl.float32)  # transposed, and faster so: warps share the rows of a product
        stop = tl.where(ok, tl.minimum(first + BLOCK_F, features), 0)
        for start in range(0, stop, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)
            g_mask = (o < outputs)[:, None] & (j < features)[None, :]
            g = tl.load(row + _places(j, taps, tap_stride, channel_stride)[None, :], g_mask, other=0.0)
            w_mask = (j[:, None] <= i[None, :]) & (i < size)[None, :] & (j < features)[:, None]
            w = tl.load(factor_row + j[:, None], w_mask, other=0.0)
            Y = tl.dot(tl.trans(w), tl.trans(g), Y, input_precision=PRECISION)
        Y = tl.trans(Y)
        # The bias is the last feature, and the triangle has it contribute to the last column alone.
        bias = tl.load(bias_grad + o, o < tl.where(bias_address != 0, outputs, 0), other=0.0)
        corner = tl.load(factor + i.to(tl.int64) * size + features, (i == features) & (i < size), other=0.0)
        Y += bias[:, None] * tl.where(ok, corner, 0.0)[None, :]
        mask = (o < outputs)[:, None] & (i < size)[None, :]
        tl.store(product + o[:, None].to(tl.int64) * size + i[None, :], Y, mask)
        energy += tl.sum(tl.sum(Y * Y, 1), 0)

        place = row + _places(i, taps, tap_stride, channel_stride)[None, :]
        own = tl.load(place, (o < outputs)[:, None] & (i < features)[None, :], other=0.0)
        finite = is_finite(own) & is_finite(Y)  # a bias that is not has left its mark on Y, by 0 · inf = NaN
        if (tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0) | (is_finite(tl.load(status)) == 0):
            tl.store(bad, 1)
    tl.store(scratch + entries + layer * _PARTS + program, energy)


@triton.jit(do_not_specialize=["table", "scratch", "bad"])
def _gather(table, scratch, bad, BLOCK_O: tl.constexpr, BLOCK_F: tl.constexpr):
    """Some tiles of G, the bias its last column, put where a product can be made of them."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, features, size, bias_address, taps, tap_stride, channel_stride = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    gradient, bias_grad = floats_at(tl.load(entry)), floats_at(bias_address)
    gathered = scratch + tl.load(entry + 4)
    for tile in range(program, tiles_down * tl.cdiv(size, BLOCK_F), tl.num_programs(1)):
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        j = tile // tiles_down * BLOCK_F + tl.arange(0, BLOCK_F)
        place = gradient + o[:, None].to(tl.int64) * features + _places(j, taps, tap_stride, channel_stride)[None, :]
        G = tl.load(place, (o < outputs)[:, None] & (j < features)[None, :], other=0.0)
        bias = tl.load(bias_grad + o, o < tl.where(bias_address != 0, outputs, 0), other=0.0)
        G = tl.where((j == features)[None, :], bias[:, None], G)
        mask = (o < outputs)[:, None] & (j < size)[None, :]
        tl.store(gathered + o[:, None].to(tl.int64) * size + j[None, :], G, mask)
        finite = is_finite(G) | (mask == 0)
        if (tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0) | (is_finite(tl.load(floats_at(tl.load(entry + 3)))) == 0):
            tl.store(bad, 1)


@triton.jit(do_not_specialize=["table", "scratch", "gathered", "bad", "entries"])
def _energies(table, scratch, gathered, bad, entries: tl.int64, BLOCK_O: tl.constexpr, BLOCK_F: tl.constexpr):
    """Some tiles' part of ``⟨U, G⟩``, with U in the scratch."""
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, _, size, _, _, _, _ = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    first = tl.load(entry + 4)
    energy = 0.0
    for tile in range(program, tiles_down * tl.cdiv(size, BLOCK_F), tl.num_programs(1)):
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        j = tile // tiles_down * BLOCK_F + tl.arange(0, BLOCK_F)
        mask = (o < outputs)[:, None] & (j < size)[None, :]
        place = first + o[:, None].to(tl.int64) * size + j[None, :]
        U = tl.load(scratch + place, mask, other=0.0)
        energy += tl.sum(tl.sum(U * tl.load(gathered + place, mask, other=0.0), 1), 0)
        if tl.min(tl.min(is_finite(U).to(tl.int32), 1), 0) == 0:
            tl.store(bad, 1)
    tl.store(scratch + entries + layer * _PARTS + program, energy)


@triton.jit(do_not_specialize=["table", "scratch", "bad", "counts", "entries", "parts", "steps", "skips"])
def _second_product(
    table,
    scratch,
    bad,
    counts,
    entries: tl.int64,
    parts: tl.int32,
    steps: tl.int32,
    skips: tl.int32,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MULTIPLIES: tl.constexpr,
):
    """Some tiles of ``s Y W``: ``Σ_{i ≥ j} Y[o, i] W[i, j]``, written in the place of ``G[o, j]``.

    Unless it multiplies, the product is in the scratch already.
    """
    layer, program = tl.program_id(0), tl.program_id(1)
    entry = table + layer * _FIELDS
    outputs, features, size, bias_address, taps, tap_stride, channel_stride = _layer_at(entry)
    tiles_down = tl.cdiv(outputs, BLOCK_O)
    tiles_across = tl.cdiv(size, BLOCK_F)
    gradient, bias_grad = floats_at(tl.load(entry)), floats_at(bias_address)
    factor, status = floats_at(tl.load(entry + 2)), floats_at(tl.load(entry + 3))
    product = scratch + tl.load(entry + 4)
    scale = low_float(tl.load(entry + 8))
    ok, is_bad = tl.load(status + 2) != 0, tl.load(bad) != 0
    if (program == 0) & (layer == 0):
        count_step(counts, steps, skips, is_bad)
    part = tl.arange(0, _PARTS)
    energy = tl.sum(tl.load(scratch + entries + layer * _PARTS + part, part < parts, other=0.0), 0)
    limit = high_float(tl.load(entry + 8))
    allowed = limit * limit * (tl.load(status) * (outputs.to(tl.float32) / size.to(tl.float32)))
    shorter = shortening(energy, allowed)
    if (program == 0) & (is_bad == 0):
        count(counts, RESCUED, ok & (tl.load(status + 3) > 0))
        count(counts, FALLEN_BACK, ok == 0)
        count(counts, BOUNDED, ok & (shorter < 1))
    for tile in range(program, tiles_down * tiles_across, tl.num_programs(1)):
        first = tile // tiles_down * BLOCK_F  # the tiles with most to sum up begin
        o = tile % tiles_down * BLOCK_O + tl.arange(0, BLOCK_O)
        j = first + tl.arange(0, BLOCK_F)
        row = product + o[:, None].to(tl.int64) * size
        if MULTIPLIES:
            U = tl.zeros((BLOCK_O, BLOCK_F), tl.float32)
            for start in range(first, tl.where(ok & (is_bad == 0), size, 0), BLOCK_K):
                i = start + tl.arange(0, BLOCK_K)
                y = tl.load(row + i[None, :], (o < outputs)[:, None] & (i < size)[None, :], other=0.0)
                w_mask = (j[None, :] <= i[:, None]) & (i < size)[:, None]
                w = tl.load(factor + i[:, None].to(tl.int64) * size + j[None, :], w_mask, other=0.0)
                U = tl.dot(y, w, U, input_precision=PRECISION)
        else:
            there = (o < outputs)[:, None] & (j < tl.where(is_bad, 0, size))[None, :]
            U = tl.load(row + j[None, :], there, other=0.0)
        U = U * (scale * shorter)

        weight_mask = (o < outputs)[:, None] & (j < features)[None, :]
        bias_mask = (o < outputs)[:, None] & ((j == features) & (j < size))[None, :]
        place = gradient + o[:, None].to(tl.int64) * features
        place += _places(j, taps, tap_stride, channel_stride)[None, :]
        bias_place = bias_grad + o[:, None] + (j * 0)[None, :]
        if (ok == 0) & (is_bad == 0):
            G = tl.load(place, weight_mask, other=0.0) + tl.load(bias_place, bias_mask, other=0.0)
            trace = tl.load(status)
            U = G * tl.where(is_finite(trace), scale / (trace + tl.load(status + 1)), float("nan"))
        tl.store(place, U, weight_mask)
        tl.store(bias_place, U, bias_mask)
