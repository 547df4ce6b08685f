# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The inverse of a small symmetric positive definite matrix with ones on its diagonal, by Gauss–Jordan elimination.

Eliminating the rows J, with P what is on the diagonal there, takes ``(C − Eᵀ) P⁻¹ (R + E)`` off the matrix: C are its
columns J, R its rows J, and E those of the identity. This leaves the rows ``P⁻¹ R``, the columns ``−C P⁻¹`` and the
block ``P⁻¹``, as elimination wants it, without a special case.
"""

import triton
import triton.language as tl


@triton.jit
def least(one, other):
    """The smaller of two; NaN if one of them is."""
    smaller = tl.where(one < other, one, other)
    return tl.where(one == one, smaller, one)


@triton.jit
def inverse(matrix, SIZE: tl.constexpr):
    """The inverse of an even number of rows, two at a time, and the smallest pivot.

    What takes time is to tell every thread of a row; for two it takes hardly longer than for one.
    """
    here = tl.arange(0, SIZE)
    smallest = 1.0
    for j in range(0, SIZE, 2):
        row_1 = tl.sum(tl.where(here[:, None] == j, matrix, 0.0), 0)
        row_2 = tl.sum(tl.where(here[:, None] == j + 1, matrix, 0.0), 0)
        column_1 = tl.sum(tl.where(here[None, :] == j, matrix, 0.0), 1)
        column_2 = tl.sum(tl.where(here[None, :] == j + 1, matrix, 0.0), 1)
        pivot = tl.sum(tl.where(here == j, row_1, 0.0), 0)
        beside = tl.sum(tl.where(here == j + 1, row_1, 0.0), 0)
        second = tl.sum(tl.where(here == j + 1, row_2, 0.0), 0)
        left = second - beside * (beside / pivot)  # of the second pivot once the first is eliminated
        smallest = least(smallest, least(pivot, left))
        inverse_22 = 1.0 / left
        inverse_12 = -(beside / pivot) * inverse_22
        inverse_11 = 1.0 / pivot - (beside / pivot) * inverse_12
        row_1 += tl.where(here == j, 1.0, 0.0)
        row_2 += tl.where(here == j + 1, 1.0, 0.0)
        column_1 -= tl.where(here == j, 1.0, 0.0)
        column_2 -= tl.where(here == j + 1, 1.0, 0.0)
        matrix -= (column_1 * inverse_11 + column_2 * inverse_12)[:, None] * row_1[None, :]
        matrix -= (column_1 * inverse_12 + column_2 * inverse_22)[:, None] * row_2[None, :]
    return matrix, smallest
