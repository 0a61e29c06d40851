"""The inverse of one rounding: the fp32 number for which a function returns a given value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NEAR = 4
"""How many neighbours of a first guess are tried on either side."""


def preimage(function: Callable[[Tensor], Tensor], value: Tensor, guess: Tensor) -> Tensor:
    """Return the positive fp32 number next to ``guess`` for which ``function`` returns ``value``.

    Often several numbers give the same quotient: the result is the one with the fewest bits, as a value measured in
    bf16 has few. If no number gives ``value``, which was then computed in another way, the result is ``guess``.

    Args:
        function: A function of several fp32 numbers at once.
        value: Its result, 0-dimensional.
        guess: A number near the one that is sought, 0-dimensional.
    """
    bits = guess.reshape(1).view(torch.int32) + torch.arange(-NEAR, NEAR + 1, dtype=torch.int32, device=guess.device)
    near = bits[bits > 0].view(torch.float32)
    fitting = near[function(near) == value]
    if not len(fitting):
        return guess
    trailing = fitting.view(torch.int32)
    return fitting[int((trailing & -trailing).argmax())]
