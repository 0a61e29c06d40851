"""Random bits as a function of a seed and an element's place (``lpq.formats.random_bits``) in Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(16)


@triton.jit
def random_bytes(seed, row, group, direction, HIGH: tl.constexpr, GROUPS: tl.constexpr):
    """A random byte for each element of a tile of an operand, from one call of Philox for 16 of them."""
    zero = tl.zeros((HIGH, GROUPS), tl.int32)
    c0 = zero + (group + tl.arange(0, GROUPS)[None, :]).to(tl.int32)
    c1 = zero + (row + tl.arange(0, HIGH)[:, None]).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), c0, c1, zero + direction, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (HIGH, GROUPS * 4, 1))
    shifts = (tl.arange(0, 4)[None, None, :] * 8).to(tl.uint32)
    return tl.reshape((words >> shifts).to(tl.uint8), (HIGH, GROUPS * WIDTH))
