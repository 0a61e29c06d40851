"""The random Hadamard transform, which spreads an outlier over its 16 neighbours along the contraction.

``y = x · diag(s) · H / 4``, with the Sylvester matrix H of order 16 and fixed signs s.
"""

from __future__ import annotations

from lpq.core import Rotation

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
HADAMARD = Rotation(signs=SIGNS)
MINUS = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
"""The signs as the kernels have them."""
