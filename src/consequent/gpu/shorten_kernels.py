# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two launches of :mod:`consequent.gpu.shorten`: squared lengths, then what is too long is shortened."""

import triton
import triton.language as tl


@triton.jit
def _block(addresses, sizes, blocks, BLOCK: tl.constexpr):
    tensor, start = tl.load(blocks + 3 * tl.program_id(0)), tl.load(blocks + 3 * tl.program_id(0) + 1)
    pointer = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32))
    place = start + tl.arange(0, BLOCK)
    return pointer + place, place < tl.load(sizes + tensor)


@triton.jit
def squares(addresses, sizes, blocks, out, BLOCK: tl.constexpr):
    """The squared length of a block."""
    pointers, mask = _block(addresses, sizes, blocks, BLOCK)
    values = tl.load(pointers, mask=mask, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(values * values, 0))


@triton.jit(do_not_specialize=["rate", "limit"])
def shorten(addresses, sizes, blocks, ranges, squares, told, shares, rate, limit, BLOCK: tl.constexpr):
    """A block of a layer's gradient, shortened if the layer's outputs would change too much."""
    layer = tl.load(blocks + 3 * tl.program_id(0) + 2)
    first, count = tl.load(ranges + 2 * layer), tl.load(ranges + 2 * layer + 1)
    length = tl.zeros((128,), tl.float32)
    for start in range(0, count, 128):
        block = start + tl.arange(0, 128)
        length += tl.load(squares + first + block, mask=block < count, other=0.0)
    change = tl.maximum(tl.load(told + 3 * layer + 1) / tl.load(told + 3 * layer), 0.0)
    change = rate * tl.load(shares + layer) * tl.sqrt(tl.sum(length, 0) * change)
    if change > limit:
        pointers, mask = _block(addresses, sizes, blocks, BLOCK)
        values = tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, values * tl.where(change < float("inf"), limit / change, 0.0), mask=mask)
