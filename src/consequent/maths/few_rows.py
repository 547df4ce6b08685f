r"""The formula from the plain gradient alone, where there are fewer rows than columns.

``G = ΔZᵀX`` lies in the span of the rows of X. Rounding takes it out of there, and ``G (XᵀX + λI)⁻¹`` divides what is
outside by λ alone, by which it may become larger than everything else. So it is brought back into the span first,

    ``G (XᵀX + λI)⁻¹ = (G Xᵀ) (X Xᵀ)⁺ (X Xᵀ + λI)⁻¹ X``

in float64, of which the matrices are no larger than there are rows. What is outside changes no output. It is rounding,
or was added to the gradient since (decay, noise), and is added again, shortened until it cannot overshoot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from consequent.maths.damping import Level
from consequent.maths.ridge import add_to_diagonal

# Directions in which the rows are so much shorter than G was rounded by, in units of eps, are not the rows' any more.
_ROUNDINGS = 32


class InSpan(NamedTuple):
    """What :func:`solve_in_span` found.

    Attributes:
        gradient: ``[out_features, columns]``, float64.
        trace: of ``X Xᵀ``.
        outside: how much of G is outside of the span, in units of the sizes that were added up for it; 0 where that may
            be rounding: what was added up for G may have been larger, and have cancelled.
    """

    gradient: Tensor
    trace: Tensor
    outside: Tensor


def solve_in_span(rows: Tensor, gradient: Tensor, level: Level) -> InSpan:
    """``G (XᵀX + λI)⁻¹`` for what of G is in the span of the rows, ``G / (trace + λ)`` for the rest.

    λ = 0 is the pseudo-inverse.

    Does not look at the numbers: NaN or inf, and nothing else, gives NaN.

    Args:
        rows: X, ``[rows, columns]``.
        gradient: G, ``[out_features, columns]``.
        level: λ.
    """
    X, G = rows.double(), gradient.double()
    gram = X @ X.mT
    trace = gram.diagonal().sum()
    of_gradient = _ROUNDINGS * torch.finfo(gradient.dtype).eps
    of_gram = len(gram) * torch.finfo(gram.dtype).eps
    rounding = max(of_gradient**2, of_gram)
    factor, least = _factor(gram, rounding)
    explained = torch.cholesky_solve((G @ X.mT).mT, factor).mT
    rest = G - explained @ X
    sizes = explained.norm() * X.norm() + G.norm()
    outside = torch.where(sizes > 0, (rest.norm() / sizes - rounding**0.5).clamp(min=0), 0)
    if of_gradient**2 < of_gram:  # squares have lost half of the digits that G has: once more, unless it was edited
        Q = torch.linalg.solve_triangular(factor, X, upper=False)  # its rows are nearly orthonormal
        coefficients = torch.cholesky_solve((G @ Q.mT).mT, _factor(Q @ Q.mT, of_gram)[0]).mT
        exactly = torch.linalg.solve_triangular(factor, coefficients, upper=False, left=False)
        # Rows may be so nearly parallel that their squares explain less than they do.
        is_all = (G - exactly @ X).norm() <= of_gradient * (exactly.norm() * X.norm() + G.norm())
        outside = torch.where(is_all, 0, outside)
        explained = torch.where(outside > 0, explained, exactly)
        rest = G - explained @ X
    damped = torch.maximum(level.at(trace), least)
    factor, _ = torch.linalg.cholesky_ex(add_to_diagonal(gram, damped[None, None]))
    new = torch.cholesky_solve(explained.mT, factor).mT @ X
    return InSpan(new + rest / (trace + damped), trace, outside)


def _factor(gram: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of a Gram matrix, and what was added to its diagonal: the rounding of its trace."""
    trace = gram.diagonal().sum()
    added = torch.where(trace > 0, rounding * trace, 1)
    return torch.linalg.cholesky_ex(add_to_diagonal(gram, added[None, None]))[0], added
