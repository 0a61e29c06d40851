"""Rotations of the contraction: a format returns one as a value, and the core applies it and undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpq.formats.blocks import pad_blocks
from lpq.formats.random_bits import signs_of

WORD = 32
"""How many signs are kept in one number."""
TURN = "turn"
"""The buffer that has the number by which the rotation of an operand was drawn."""
NEAR = 1e-6
"""By how much an entry of a matrix may be off, as one that was rounded to fp32 is."""


@dataclass(frozen=True)
class Rotation:
    """An orthonormal transform of each block of n columns: ``y = x · diag(signs) · H / √n``, with the Hadamard matrix H
    of order n in Sylvester's order, or ``y = x · matrix``.

    Two rotations are equal if their matrices are, whichever way they were given. The product of two matrices with equal
    rotations equals the product of the matrices themselves. For two that are ``drawn`` this holds in a pass of a layer:
    the seeds of its tensors have their lower half, the *turn*, in common. Its methods take the turn.
    """

    signs: tuple[int, ...] | None = None
    """1 or -1 for each column of a block, a power of two of them."""
    matrix: tuple[tuple[float, ...], ...] | None = None
    """The rows of an orthonormal matrix of any order; None: ``signs`` give it. Lists and tensors do for either."""
    drawn: int | None = None
    """The number of columns in a block, a power of two from 32 on, if the signs are drawn anew in each pass."""

    def __post_init__(self) -> None:
        signs, matrix = self.signs, self.matrix
        if sum(source is not None for source in (signs, matrix, self.drawn)) != 1:
            raise ValueError(
                "a Rotation has signs, of a Hadamard transform, or the rows of a matrix, or its signs are drawn: pass "
                "one of signs, matrix and drawn"
            )
        if self.drawn is not None:
            if type(self.drawn) is not int or self.drawn < WORD or self.drawn.bit_count() != 1:
                raise ValueError(f"a Rotation has drawn={self.drawn!r}: it is a power of two from {WORD} on")
            return
        try:  # lists and tensors do as well, and are kept as tuples, which can be compared and hashed
            signs = None if signs is None else tuple(float(sign) for sign in signs)  # type: ignore[misc]
            matrix = None if matrix is None else tuple(tuple(float(entry) for entry in row) for row in matrix)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"signs of a Rotation are numbers, and its matrix has rows of numbers: {error}") from error
        if matrix is not None:
            signs = _signs_of(matrix)
        if signs is not None and (any(sign not in (1, -1) for sign in signs) or len(signs).bit_count() != 1):
            shown = ", ".join(f"{sign:g}" for sign in signs)
            raise ValueError(f"signs of a Rotation are 1 or -1, as many as a power of two, and not [{shown}]")
        object.__setattr__(self, "signs", None if signs is None else tuple(map(int, signs)))
        object.__setattr__(self, "matrix", matrix if signs is None else None)

    @property
    def block(self) -> int:
        """How many columns are mixed with each other."""
        return self.drawn or len(self.signs or self.matrix or ())

    def apply(self, x: Tensor, turn: Tensor | None = None) -> Tensor:
        """The rotated matrix in fp32, its columns padded to whole blocks."""
        x = pad_blocks(x, (1, self.block)).float()
        return self._applied(x, self._signs(x, turn))

    def undo(self, y: Tensor, turn: Tensor | None = None) -> Tensor:
        """The matrix that ``apply`` would take to ``y``, padding included."""
        return self._undone(y, self._signs(y, turn))

    def without_padding(self, stored: Tensor, cols: int, turn: Tensor | None = None) -> Tensor:
        """A rotated matrix whose padding counts in no product: columns of padding do not decode to zeros once they were
        rotated and rounded."""
        whole, ragged = cols - cols % self.block, cols % self.block
        stored = stored[:, : whole + self.block * (ragged > 0)]
        if not ragged:
            return stored
        last = stored[:, whole:]
        signs = self._signs(last, turn)
        cut = pad_blocks(self._undone(last, signs)[:, :ragged], (1, self.block))
        return torch.cat([stored[:, :whole], self._applied(cut, signs)], 1)

    def __str__(self) -> str:
        if self.drawn is not None:
            return f"a Hadamard transform of {self.drawn} after signs that each pass draws"
        if self.signs is None:
            return f"a matrix of {self.block}"
        return f"a Hadamard transform of {self.block} after the signs {''.join('-+'[s > 0] for s in self.signs)}"

    def _applied(self, x: Tensor, signs: Tensor | None) -> Tensor:
        if signs is None:
            return _multiplied(x, self.matrix or ())
        return _hadamard(x * (signs * self.block**-0.5), self.block)

    def _undone(self, y: Tensor, signs: Tensor | None) -> Tensor:
        if signs is None:
            return _multiplied(y, tuple(zip(*(self.matrix or ()), strict=True)))
        return _hadamard(y * self.block**-0.5, self.block) * signs

    def _signs(self, x: Tensor, turn: Tensor | None) -> Tensor | None:
        """The sign of each column; None where a matrix is the rotation. It comes from constants, since copying a list
        to a GPU would wait for it."""
        if self.matrix is not None:
            return None
        if self.drawn is not None:
            if turn is None:
                raise ValueError(f"{self}: pass the turn, by which they are drawn")
            return signs_of(turn, self.drawn).repeat(x.shape[1] // self.drawn)
        bits = list[Tensor]()
        for first in range(0, self.block, WORD):
            signs = (self.signs or ())[first : first + WORD]
            word = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
            bits.append(word >> torch.arange(len(signs), device=x.device) & 1)
        return (1 - 2 * torch.cat(bits)).float().repeat(x.shape[1] // self.block)


def why_unfit(side: Any, storages: type[Any]) -> tuple[str, str] | None:
    """Why the rotation that a quantizer declares is refused, and the remedy: it is declared as in interface 1, or could
    not be undone. ``storages``: the class whose methods a format replaces by its own."""
    storage, remedy = side.storage, f"let {type(side).__name__}.rotation be a Rotation, of lpq.core, or None"
    if side.basis is not None and not isinstance(side.basis, Rotation):
        cause = f"{side} has rotation={side.basis!r}: a name tells no rotations apart"
    elif side.basis != side.rotation:
        cause = f"{side}: {type(side).__name__}.rotation is another one whenever it is called"
        remedy = "return one value"
    elif hasattr(side, "rotation_options"):
        cause = (
            f"{side} has rotation_options, which plugin interface 2 does without: a Rotation is compared by its value"
        )
        remedy = "take rotation_options away, and " + remedy
    elif storage.decode_rotated is not storages.decode_rotated:
        cause = f"{storage.__name__} defines decode_rotated, which is the core's since plugin interface 2"
        remedy = "define decode_stored(self), the stored values before a rotation is undone, in place of both"
    elif side.basis is None:
        return None
    elif side.basis.drawn and (not side.stochastic or TURN not in side.names):
        cause = f"{side} is rotated by {side.basis}, and {storage.__name__} keeps no {TURN!r}"
        remedy = f"be stochastic, and declare Buffer({TURN!r}, torch.int32, block=(None, None)), which has bits.turn"
    elif storage.decode is not storages.decode or storage.decode_stored is storages.decode_stored:
        cause = f"{side} is rotated, and {storage.__name__} has no decode_stored(self), or a decode(self) of its own"
        remedy = "define decode_stored(self), the rotated values; the core makes decode of it"
    elif all(buffer.unit(1) is None or (buffer.unit(1) or 1) % side.basis.block for buffer in side.layout):
        cause = (
            f"{side} mixes {side.basis.block} columns, and every buffer of {storage.__name__} may be cut between them"
        )
        remedy = f"declare pad={side.basis.block} for a buffer"
    else:
        return None
    return cause, remedy


def _signs_of(matrix: Sequence[Sequence[float]]) -> tuple[int, ...] | None:
    """The signs of which a matrix is a Hadamard transform; None if it is another one. Raise if it is no rotation."""
    order = len(matrix)
    if order == 0 or any(len(row) != order for row in matrix):
        raise ValueError("the matrix of a Rotation is square: pass as many rows as columns")
    exact = torch.tensor(matrix, dtype=torch.float64)
    if not ((exact @ exact.t() - torch.eye(order, dtype=exact.dtype)).abs() < NEAR).all():
        raise ValueError("the matrix of a Rotation is orthonormal, so that its transpose undoes it; this one is not")
    if order.bit_count() != 1:
        return None
    signs = exact[:, 0].sign()
    sylvester = _hadamard(torch.diag(signs), order) * order**-0.5
    return tuple(int(sign) for sign in signs) if ((sylvester - exact).abs() < NEAR).all() else None


def _hadamard(x: Tensor, order: int) -> Tensor:
    """``x · H`` in fp32: sums and differences of elements half an order apart, then of nearer ones."""
    rows, cols = x.shape
    spare = torch.empty_like(x)
    apart = order // 2
    while apart:
        pairs = (rows, cols // (2 * apart), 2, apart)
        first, second = x.view(pairs).unbind(2)
        total, difference = spare.view(pairs).unbind(2)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        x, spare = spare, x
        apart //= 2
    return x


def _multiplied(x: Tensor, matrix: Sequence[Sequence[float]]) -> Tensor:
    """``x · matrix`` block by block, summed in the order of the rows, so that an element has the same bits in any
    matrix."""
    order = len(matrix)
    rows = torch.tensor(matrix, dtype=torch.float32, device=x.device)
    blocks = x.reshape(x.shape[0], x.shape[1] // order, order)
    product = torch.zeros_like(blocks)
    for i in range(order):
        product = product + blocks[:, :, i : i + 1] * rows[i]
    return product.flatten(1)


HADAMARD = Rotation(signs=(1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1))
"""A random Hadamard transform of 16, which spreads an outlier over its neighbours. It is the one that kernels have."""
