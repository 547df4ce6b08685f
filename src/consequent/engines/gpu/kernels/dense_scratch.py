# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Where the partial sums of a dense layer lie in scratch."""

import triton
import triton.language as tl

PARTS = tl.constexpr(12)  # into which the columns of X are cut
MOST_SOLVERS = tl.constexpr(32)  # programs that share the outputs of a layer
PROBES = tl.constexpr(4)
MOST_SHARES = tl.constexpr(512)  # of one gradient
# Trace, λ, whether K could be factorised, c, whether the gradient was edited, by what the bound shortens it, how many
# pivots were raised.
STATUS = tl.constexpr(16)


def floats_of_section(block_rows: int) -> int:
    """Floats of scratch per layer, the solution aside; as the functions below have it."""
    square, probes = block_rows * block_rows, block_rows * PROBES.value
    floats: int = PARTS.value * (square + probes) + square + block_rows
    floats += MOST_SOLVERS.value * (probes + 1) + MOST_SHARES.value * (PROBES.value + 1) + STATUS.value
    return floats


@triton.jit
def section_of(scratch, layer, BLOCK_N: tl.constexpr):
    """Where a layer's scratch begins: first the parts of the Gram matrix."""
    SUMS: tl.constexpr = PARTS * (BLOCK_N * BLOCK_N + BLOCK_N * PROBES)
    FACTOR: tl.constexpr = BLOCK_N * BLOCK_N + BLOCK_N
    FOUND: tl.constexpr = MOST_SOLVERS * BLOCK_N * PROBES + MOST_SHARES * PROBES
    return scratch + layer.to(tl.int64) * (SUMS + FACTOR + FOUND + STATUS + MOST_SOLVERS + MOST_SHARES)


@triton.jit
def right_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``X v``."""
    return section + PARTS * BLOCK_N * BLOCK_N


@triton.jit
def factor_at(section, BLOCK_N: tl.constexpr):
    """V, row after row, then the pivots."""
    return right_at(section, BLOCK_N) + PARTS * BLOCK_N * PROBES


@triton.jit
def left_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``ΔZ u``."""
    return factor_at(section, BLOCK_N) + BLOCK_N * BLOCK_N + BLOCK_N


@triton.jit
def found_at(section, BLOCK_N: tl.constexpr):
    """The shares of ``u G v``."""
    return left_at(section, BLOCK_N) + MOST_SOLVERS * BLOCK_N * PROBES


@triton.jit
def status_at(section, BLOCK_N: tl.constexpr):
    """What is known of the layer."""
    return found_at(section, BLOCK_N) + MOST_SHARES * PROBES


@triton.jit
def energies_at(section, BLOCK_N: tl.constexpr):
    """The parts of ``⟨U, G⟩``."""
    return status_at(section, BLOCK_N) + STATUS


@triton.jit
def squares_at(section, BLOCK_N: tl.constexpr):
    """The shares of ``‖G‖²``."""
    return energies_at(section, BLOCK_N) + MOST_SOLVERS
