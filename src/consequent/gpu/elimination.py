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
def _invert_16(block):
    """The inverse of 16 rows, one after the other, and the smallest pivot."""
    rows = tl.arange(0, 16)
    smallest = 1.0
    for j in range(16):
        row = tl.sum(tl.where(rows[:, None] == j, block, 0.0), 0)
        column = tl.sum(tl.where(rows[None, :] == j, block, 0.0), 1)
        pivot = tl.sum(tl.where(rows == j, row, 0.0), 0)
        smallest = least(smallest, pivot)
        row = tl.where(rows == j, pivot + 1.0, row)
        column = tl.where(rows == j, pivot - 1.0, column) / pivot
        block -= column[:, None] * row[None, :]
    return block, smallest


@triton.jit
def inverse(matrix, SIZE: tl.constexpr):
    """The inverse of ``SIZE`` rows, 16 at a time, and the smallest pivot; SIZE is a multiple of 16."""
    within, here = tl.arange(0, SIZE), tl.arange(0, 16)
    smallest = 1.0
    for first in range(0, SIZE, 16):
        chosen = tl.where(within[None, :] == first + here[:, None], 1.0, 0.0)  # E
        rows = tl.dot(chosen, matrix, input_precision="tf32x3")
        columns = tl.dot(matrix, tl.trans(chosen), input_precision="tf32x3")
        pivot, found = _invert_16(tl.dot(rows, tl.trans(chosen), input_precision="tf32x3"))
        smallest = least(smallest, found)
        columns = tl.dot(columns - tl.trans(chosen), pivot, input_precision="tf32x3")
        matrix -= tl.dot(columns, rows + chosen, input_precision="tf32x3")
    return matrix, smallest
