"""Whether a weight can be cut into equal shards that are quantized one by one. Decided from global sizes only.

So every rank decides alike, and the report of a conversion can say what was decided.
"""

from __future__ import annotations

from lpq.core import Quantizer
from lpq.core.derive import derives_col


def why_not(quantizer: Quantizer, rows: int, ranks: int) -> str | None:
    """Why a weight of so many rows cannot be gathered in its quantized form by so many ranks; None if it can."""
    row, col = quantizer.side("row"), quantizer.side("col")
    if row.stochastic or col.stochastic:
        return f"{quantizer} rounds stochastically, and each rank would draw random bits of its own"
    if quantizer.col_source == "row" and col.state:
        return f"{col} would have to remember statistics of what the row operand decodes to"
    if rows % ranks:
        return f"its {rows} rows over {ranks} ranks are uneven"
    if ranks == 1:
        return None
    shard = rows // ranks
    sides = [(row, 0)] if derives_col(quantizer) else [(row, 0), (col, 1)]
    for side, dim in sides:
        units = [b.unit(dim) for b in side.storage.layout_for(side)] + [s.block[dim] for s in side.stats]
        for unit in units:
            if unit is not None and shard % unit:
                return f"shards of {shard} of its {rows} rows cut the blocks of {unit} of {side}"
    return None
