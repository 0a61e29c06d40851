"""The tensors of a checkpoint of ``lpq.checkpoint``, read one at a time and without a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp

from lpq import recipes, registry
from lpq.checkpoint.errors import CheckpointError, shown
from lpq.checkpoint.finding import find
from lpq.checkpoint.info import read
from lpq.checkpoint.model import PREFIX
from lpq.checkpoint.ranks import Ranks
from lpq.checkpoint.reading import Planner, Reader
from lpq.engines.entries import Entry, Multiplied, Pieces, Stored
from lpq.engines.experts import FUSED_EXPERTS, counted, split, split_rows


class Saved:
    """A checkpoint, or the whole one of a run that was written last."""

    def __init__(self, path: Path) -> None:
        found = find(path, Ranks())
        info, _ = read(found)
        self._description, self._path, self._sizes = info.description, found.path, found.sizes
        self._description.require(self._description.formats)
        self._saved = Reader(found.path, found.sizes).saved()

    def entries(self, dtype: torch.dtype | None) -> list[Entry]:
        """Its tensors, without what quantizers remember; ``dtype`` as in ``lpq.engines.models``."""
        description = self._description
        made: list[Entry] = []
        for name in self._names():
            quantized = description.quantized.get(name)
            if quantized is not None:
                if "row" not in quantized["operands"]:
                    raise CheckpointError(f"{shown(name)} was saved without its row operand, which engines multiply")
                shape, own = self._shape(name), getattr(torch, quantized["dtype"])
                stored = Stored(registry.quantizer(quantized["operands"]["row"]), own)
            else:
                shape, own, stored = self._shape(name), self._saved[name][1], None
            kept = dtype if dtype is not None and own.is_floating_point else own
            gather, own_name = partial(self._gather, name, stored), name.removeprefix(PREFIX)
            made += self._entries(Entry(own_name, shape, kept, gather, self._layer(name), stored), name)
        return made

    def _entries(self, entry: Entry, name: str) -> Iterator[Entry]:
        """The tensor, or those of a layer for each expert."""
        layer, _, leaf = entry.name.rpartition(".")
        used = self._layer(f"{PREFIX}{layer}.weight") if leaf in ("weight", "bias") else None
        shape = self._shape(f"{PREFIX}{layer}.weight")
        if used is None or len(shape) != 3:
            yield entry
            return
        names, plain = counted(layer, shape[0]), replace(entry, layer=None, stored=None)
        if leaf == "bias":
            yield from split_rows(names, plain, entry.gather)
        else:
            how = partial(replace, used)
            yield from split(names, shape, plain, entry.gather, lambda own: how(name=own), entry.stored, used.memories)

    def _shape(self, name: str) -> tuple[int, ...]:
        """That of a tensor of the model; empty if there is none."""
        if name in self._description.quantized:
            return tuple(self._description.quantized[name]["shape"])
        return tuple(self._saved[name][0]) if name in self._saved else ()

    def unquantized(self, quantized: set[str]) -> Iterator[str]:
        """The modules with a matrix as weight, but for this set. Engines do not quantize embeddings, but a checkpoint
        does not show which these are, and to ignore one changes nothing."""
        for name, (shape, _) in self._saved.items():
            layer, _, leaf = name.removeprefix(PREFIX).rpartition(".")
            stack = len(shape) == 3 and (
                leaf in FUSED_EXPERTS or (leaf == "weight" and layer in self._description.recipes)
            )
            apart = stack and self._layer(name) is not None  # as a layer for each expert
            matrix = leaf == "weight" and len(shape) == 2
            if name.startswith(PREFIX) and (matrix or stack) and not apart and layer not in quantized:
                yield layer

    def _names(self) -> list[str]:
        description = self._description
        parts = {f"{name}.{d}." for name, entry in description.quantized.items() for d in entry["operands"]}
        plain = [
            name
            for name in self._saved
            if name.startswith(PREFIX)
            and name not in description.memories
            and not any(name.startswith(p) for p in parts)
        ]
        return sorted([*plain, *description.quantized])

    def _layer(self, name: str) -> Multiplied | None:
        layer, _, leaf = name.removeprefix(PREFIX).rpartition(".")
        text = self._description.recipes.get(layer) if leaf == "weight" else None
        if text is None:
            return None
        recipe = recipes.recipe(text)
        if recipe.w.side("row").plain and name not in self._description.quantized:
            return None
        memories: dict[str, dict[str, Tensor]] = {}
        for buffer in self._description.memories:
            owner, _, own = buffer.removeprefix(PREFIX).rpartition(".")
            if owner == layer:
                tensor, _, key = own.partition("_")
                memories.setdefault(tensor, {})[key] = self._read([buffer])[buffer]
        return Multiplied(layer, recipe.w, None if recipe.x.side("row").plain else recipe.x, memories)

    def _gather(self, name: str, stored: Stored | None) -> Pieces:
        if stored is None:
            return {"": self._read([name])[name]}
        parts = self._read([f"{name}.row.{buffer}" for buffer in stored.side.names])
        return {part.rpartition(".")[2]: value for part, value in parts.items()}

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        """These tensors; the index is read anew, since a reader of DCP's serves one load."""
        if lacking := [shown(name) for name in names if name not in self._saved]:
            raise CheckpointError(f"it lacks {lacking[0]}")
        found = {name: torch.empty(self._saved[name][0], dtype=self._saved[name][1]) for name in names}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(found, storage_reader=Reader(self._path, self._sizes), planner=Planner(), no_dist=True)
        return found
