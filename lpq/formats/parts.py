"""Formats composed of formats: an operand that consists of several operands of one matrix, its parts.

A part is a field of the quantizer that is a quantizer itself, such as ``base`` and ``rest`` of a sum. Its buffers and
statistics have its name in front: ``base_data``, ``base_scale``, ``rest_data``. These functions put them together and
take them apart; the format defines how the parts make up the matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from lpq import registry
from lpq.formats.format import Direction, Quantizer, Storage
from lpq.formats.layout import DIMENSIONS, Buffer, Stat
from lpq.registry.errors import OptionError

Declared = TypeVar("Declared", Buffer, Stat)
OfParts = TypeVar("OfParts", bound=Quantizer)

# ---------------------------------------------------------------------------------------------- the quantizers


def read(whole: type[Quantizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a quantizer, with the parts among them made from their strings. Raise if a part is missing
    or unfit: it remembers across steps, rounds with random bits, keeps the dtype of the matrix, or makes its column
    operand from its row operand.

    Args:
        whole: The quantizer class that ``from_options`` was called on.
        options: Its options by name, of which each part is a text or a quantizer.
    """
    complete, name = dict(options), registry.format_of(whole).name
    for field, hint in get_type_hints(whole).items():
        if isinstance(hint, type) and issubclass(hint, Quantizer):
            if field not in complete:
                raise OptionError(f"{name} needs a quantizer for each part: add {field}=FORMAT")
            complete[field] = part = registry.quantizer(complete[field])
            if why := _unfit(part):
                raise OptionError(f"{name}: {field}={part} {why}: choose another quantizer for {field}")
    return complete


def _unfit(part: Quantizer) -> str:
    """Why a quantizer cannot encode a part; empty if it can."""
    sides = part.side("row"), part.side("col")
    if any(side.state for side in sides):
        return "remembers statistics across steps, and no state is kept for a part"
    if any(stat.round == 2 for side in sides for stat in side.stats):
        return "measures in two rounds, and a part is measured once"
    if any(side.stochastic for side in sides):
        return "rounds with random bits, and no part has any of its own"
    if any(buffer.dtype is None for side in sides for buffer in side.layout):
        return "keeps a matrix in its own dtype, and what a part encodes is in fp32"
    return "" if part.col_source == "original" else "makes its column operand of its row operand"


def side(whole: OfParts, direction: Direction) -> OfParts:
    """Return the quantizer with the side of each part in this direction; the same one if these are its parts. Each call
    makes a new one: keep it, as ``Quantizer.side`` must return the same object.

    Args:
        whole: The quantizer with the parts.
        direction: ``"row"`` or ``"col"``.
    """
    parts = {f.name: getattr(whole, f.name) for f in fields(whole)}  # type: ignore[arg-type]
    sides = {name: q.side(direction) for name, q in parts.items() if isinstance(q, Quantizer)}
    return whole if all(sides[name] == parts[name] for name in sides) else replace(whole, **sides)  # type: ignore[type-var]


def uncut(*first: Quantizer, later: Sequence[Quantizer] = ()) -> tuple[int, ...]:
    """``Quantizer.uncut`` of a format with these parts.

    Args:
        *first: Parts whose statistics are declared, and so are reduced over ranks.
        later: Parts that encode the rest of others, which exists only after statistics are reduced. So they are
            measured when they are encoded, with no second round, and a statistic of a whole dimension would cover one
            shard alone.
    """
    return tuple(
        dim
        for dim in range(len(DIMENSIONS))
        if any(part.why_no_parts(dim) is not None for part in (*first, *later))
        or any(stat.block[dim] is None for part in later for stat in part.stats)
    )


# ---------------------------------------------------------------------------------------------- names


def named(**declared: Iterable[Declared]) -> tuple[Declared, ...]:
    """The buffers or the statistics ``**declared`` of parts, each with the name of its part in front. A later part is
    measured when it is encoded, so no buffer is declared to follow from statistics (``Buffer.from_stats``)."""
    parts = (replace(d, name=f"{part}_{d.name}") for part, of_part in declared.items() for d in of_part)
    return tuple(replace(d, from_stats=False) if isinstance(d, Buffer) else d for d in parts)  # type: ignore[call-arg]


def joined(**tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of parts, given as ``**tensors``, each with the name of its part in front."""
    return {f"{part}_{name}": tensor for part, of_part in tensors.items() for name, tensor in of_part.items()}


def taken(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part, by the names that its format gives them.

    Args:
        part: The name of the part.
        tensors: Buffers or statistics of all parts, as ``joined`` names them.
    """
    front = part + "_"
    return {name.removeprefix(front): tensor for name, tensor in tensors.items() if name.startswith(front)}


# ---------------------------------------------------------------------------------------------- the operands


def measure(part: Quantizer, x: Tensor) -> dict[str, Tensor]:
    """The statistics of ``x`` that one part needs, in the basis in which it is stored.

    Args:
        part: The quantizer of the part, for one direction.
        x: The matrix that the part encodes.
    """
    return part.measure(part.rotated(x)) or {}


def encode(part: Quantizer, x: Tensor, stats: Mapping[str, Tensor] | None = None) -> Storage:
    """The operand of one part of ``x``.

    Args:
        part: The quantizer of the part, for one direction.
        x: The matrix that the part encodes.
        stats: Its statistics by the names that its format gives them. None, as for a later part: it is measured here.
    """
    if stats is None:
        rows, cols = x.shape
        stats = measure(part, x) if x.numel() else {s.name: s.zeros(rows, cols, x.device) for s in part.stats}
    if part.plain:
        x = x.clone()  # its buffer may be a view
    return part.encode(part.rotated(x), stats).bind(part, (x.shape[0], x.shape[1]), x.dtype)


def part(whole: Storage, name: str, quantizer: Quantizer) -> Storage:
    """A part of an operand, as an operand of its format over the same buffers.

    Args:
        whole: The operand with the parts.
        name: The name of the part.
        quantizer: The quantizer of the part, for the direction of the operand.
    """
    tensors = [getattr(whole, f"{name}_{buffer}") for buffer in quantizer.names]
    return quantizer.storage.from_tensors(tensors, quantizer, whole.shape, whole.dtype)


def transposed(part: Storage) -> dict[str, Tensor]:
    """The buffers of the transpose of ``part``, an operand whose format is transposable."""
    rows, cols = part.shape
    return part.transposed().bind(part.quantizer, (cols, rows), part.dtype).buffers()
