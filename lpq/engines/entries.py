"""The tensors of a model that is exported: each is gathered when its turn comes, and has what its layer does to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.checkpoint.errors import CheckpointError
from lpq.formats import Quantizer, Storage
from lpq.operations import encode_operands
from lpq.operations.inputs import as_matrix
from lpq.operations.states import recall
from lpq.recipes import Recipe
from lpq.registry.showing import listed
from lpq.tensor import QuantizedTensor

Memories = Mapping[str, Mapping[str, Tensor]]
"""The statistics that quantizers of ``x`` and of ``w`` remember, by the names of their buffers."""
Pieces = Mapping[str, Tensor]
"""A tensor as the model holds it: under ``""``, or the buffers of its row operand by name."""


@dataclass(frozen=True)
class Multiplied:
    """How a layer multiplies its weight in ``fprop``."""

    name: str
    """The name of the layer."""
    w: Quantizer
    """The quantizer of the weight."""
    x: Quantizer | None
    """The quantizer of the input; None: it is not encoded."""
    memories: Memories
    imported: Tensor | None = None
    """The amax of inputs in the files from which the model was imported."""

    @classmethod
    def by(cls, recipe: Recipe, name: str, memories: Memories, imported: Tensor | None = None) -> Multiplied:
        """How the layer with this name multiplies by a recipe."""
        x = None if recipe.x.side("row").plain else recipe.x
        return cls(name, recipe.w, x, memories, imported)

    def known_amax(self) -> Tensor | None:
        """The amax of inputs that the layer encodes with, or that it came with; None: it measures each input."""
        if self.x is None or not (side := self.x.side("row")).state:
            return self.imported
        stats = recall(self.x, side, None, self.memories.get("x", {}))
        return next((value for stat, value in zip(side.stats, stats, strict=True) if stat.block == (None, None)), None)


class Stored(NamedTuple):
    """How the pieces of a weight that is stored quantized make an operand."""

    side: Quantizer
    """The quantizer of its row operand."""
    dtype: torch.dtype


@dataclass(frozen=True)
class FileEntry:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in which the tensor is written in high precision, and to which a weight is rounded before it is
    encoded."""
    gather: Callable[[], Pieces]
    """Gives the whole tensor; where it is sharded that takes a collective."""
    layer: Multiplied | None = None
    """The layer whose weight it is; None: it is in high precision."""
    stored: Stored | None = None
    """The quantizer that it is stored with; None: in high precision."""
    part: tuple[int, int, int] | None = None
    """Its first row, the one behind its last one, and how many there are, of the matrix that is encoded as one; None:
    it is the whole."""

    @property
    def side(self) -> Quantizer:
        """The quantizer of the row operand of a layer's weight."""
        if self.stored is not None:
            return self.stored.side
        assert self.layer is not None
        return self.layer.w.side("row")

    def operand(self, pieces: Pieces) -> Storage:
        """The row operand: the stored operand, or the operand that the layer encodes, encoded once."""
        whole = self._whole(pieces)
        part = whole if self.part is None else whole.narrow(0, *self.part[:2])
        assert part is not None  # the plan refuses rows that cut blocks
        return part

    def _whole(self, pieces: Pieces) -> Storage:
        rows, cols = self.shape if self.part is None else (self.part[2], self.shape[1])
        if self.stored is not None:
            side, dtype = self.stored
            return side.storage.from_tensors([pieces[name] for name in side.names], side, (rows, cols), dtype)
        assert self.layer is not None
        matrix = as_matrix(pieces[""].to(self.dtype))
        state = self.layer.memories.get("w")
        operand = encode_operands(self.layer.w, matrix, row=True, col=False, state=state).row
        assert operand is not None
        return operand.row_major()

    def values(self, pieces: Pieces) -> Tensor:
        """The tensor in high precision."""
        if self.stored is None:
            whole = pieces[""]
        else:
            operand = self._whole(pieces)
            whole = QuantizedTensor(operand, None, operand.quantizer, operand.shape, self.dtype).dequantize()
        return (whole if self.part is None else whole[slice(*self.part[:2])]).to(self.dtype)


def is_quantized(recipe: Recipe | None) -> bool:
    """Whether engines get a weight of that recipe quantized."""
    return recipe is not None and not recipe.w.side("row").plain


def shared_layers(
    recipes: Mapping[str, Recipe | None], tensors: Collection[str], aliases: Mapping[str, str], tied: Container[str]
) -> list[str]:
    """The layers whose recipe quantizes a weight that other modules have as well: engines get it in high precision.
    Refuse what engines would not find: adapters of PEFT, and weights that are none of the model's ``tensors``."""
    if adapted := sorted({name.partition(".base_layer.")[0] for name in tensors if ".base_layer." in name}):
        raise CheckpointError(
            f"{listed(adapted)} have adapters beside their weights, which engines would not find: merge these first, "
            "model = model.merge_and_unload(), and export that model"
        )
    weights = {name: f"{name}.weight".lstrip(".") for name in sorted(recipes) if is_quantized(recipes[name])}
    if computed := [name for name, weight in weights.items() if weight not in tensors]:
        raise CheckpointError(
            f"the weight of {listed(computed)} is computed in each pass, as by pruning, and files would have none: "
            "make it a parameter first, by torch.nn.utils.prune.remove, remove_parametrizations or the like"
        )
    return [name for name, weight in weights.items() if aliases.get(weight, weight) in tied]
