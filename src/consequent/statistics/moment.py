"""The second moment of a weight's inputs, ``X Xᵀ`` in the paper: what the feature side solves with."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.capture.use import Use
from consequent.engines.inverse_factor import InverseFactor, inverse_factor
from consequent.maths.damping import Damping
from consequent.maths.ridge import damped_solve_or_fall_back, quick_solve


class Solved(NamedTuple):
    """``G (XXᵀ + λI)⁻¹``.

    Attributes:
        gradient: ``[groups, out_features, columns]``.
        finite: whether no NaN or inf was met: a bool, or a tensor on a device that is not waited for.
        rescued: matrices that needed float64, or more damping.
        fallen_back: matrices that could not be factorised even so.
    """

    gradient: Tensor
    finite: bool | Tensor
    rescued: int | Tensor = 0
    fallen_back: int | Tensor = 0


def columns_of(use: Use, features: int, biases: Sequence[Tensor]) -> list[int]:
    """The columns of the input matrix that a use fills: the features, and the 1 of its own bias."""
    columns = list(range(features))
    if use.bias is not None:
        columns += [features + place for place, bias in enumerate(biases) if bias is use.bias]
    return columns


def moment_of(uses: Sequence[Use], features: int, biases: Sequence[Tensor], moment: Tensor | None = None) -> Tensor:
    """The second moment of all uses' rows, ``[groups, D + biases, D + biases]``, in float32 or better.

    Args:
        uses: calls of layers with one weight.
        features: D; 0 where only biases are trained.
        biases: a last column of each, which is 1 in the rows of its own uses.
        moment: of other uses, which is added to (and may be overwritten).
    """
    size = features + len(biases)
    if moment is not None and moment.shape[-1] < size:  # a bias met for the first time
        grow = size - moment.shape[-1]
        moment = torch.nn.functional.pad(moment, (0, grow, 0, grow))
    for use in uses:
        columns = columns_of(use, features, biases)
        part = _moment_of_one(use)
        if len(columns) == size:
            moment = part if moment is None else moment.add_(part)
            continue
        if moment is None:
            moment = part.new_zeros(len(part), size, size)
        index = torch.tensor(columns, device=part.device)
        moment[:, index[:, None], index] += part
    assert moment is not None
    return moment


def _moment_of_one(use: Use) -> Tensor:
    if use.inputs is not None:
        return use.operation.second_moment(use.inputs, ones=use.bias is not None)
    assert use.bias is not None  # which alone is trained
    dtype = torch.promote_types(use.dtype, torch.float32)
    return torch.full((use.operation.groups, 1, 1), float(use.rows), dtype=dtype, device=use.bias.device)


def solve_with_moment(
    moment: Tensor,
    gradient: Tensor,
    rows: int,
    damping: Damping,
    *,
    may_wait: bool,
    factor: InverseFactor | None = None,
) -> Solved:
    """The definition: ``G (XXᵀ + λI)⁻¹``, for any gradient G, scaled, clipped or averaged as it may be.

    The moment may be overwritten.

    Args:
        moment: ``[groups, D, D]``.
        gradient: ``[groups, out_features, D]``.
        rows: of the inputs.
        damping: λ; 0 is the pseudo-inverse.
        may_wait: whether the host may wait for the device to look at a result.
        factor: of the damped moment, where it was made before; used where the host does not look.
    """
    trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
    finite = (trace.sum() + gradient.sum()).isfinite()
    if may_wait and not finite:
        return Solved(gradient, False)
    level = damping.level(rows, moment.shape[-1])
    if damping.value == 0:
        pseudo_inverse = torch.linalg.pinv(moment.double(), hermitian=True)
        return Solved((gradient.double() @ pseudo_inverse).to(gradient.dtype), finite)
    if not may_wait:
        solution, rescued, fallen_back = (factor or inverse_factor(moment, level)).solve(gradient.mT)
        return Solved(solution.mT, finite & solution.sum().isfinite(), rescued, fallen_back)
    added = level(moment)
    quick = quick_solve(moment, gradient.mT, added, with_digits=False)
    if quick is not None:
        return Solved(quick.mT, math.isfinite(quick.sum().item()))
    moment.diagonal(dim1=-2, dim2=-1).sub_(added[..., 0] if isinstance(added, Tensor) else added)
    careful = damped_solve_or_fall_back(moment, gradient.mT, added)
    is_finite = bool(finite & careful.solution.sum().isfinite())
    return Solved(careful.solution.mT, is_finite, careful.rescued, careful.fallen_back)
