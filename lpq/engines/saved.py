"""The tensors of a checkpoint of ``lpq.checkpoint``, read one at a time and without a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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


class Saved:
    """A checkpoint, or the whole one of a run that was written last."""

    def __init__(self, path: Path) -> None:
        found = find(path, Ranks())
        info, _ = read(found)
        self._said, self._path, self._sizes = info.description, found.path, found.sizes
        self._said.require(self._said.formats)
        self._saved = Reader(found.path, found.sizes).saved()

    def entries(self, dtype: torch.dtype | None) -> list[Entry]:
        """Its tensors, without what quantizers remember; ``dtype`` as in ``lpq.engines.models``."""
        said, made = self._said, []
        for name in self._names():
            quantized = said.quantized.get(name)
            if quantized is not None:
                if "row" not in quantized["operands"]:
                    raise CheckpointError(f"{shown(name)} was saved without its row operand, which engines multiply")
                shape, own = tuple(quantized["shape"]), getattr(torch, quantized["dtype"])
                stored = Stored(registry.quantizer(quantized["operands"]["row"]), own)
            else:
                (size, own), stored = self._saved[name], None
                shape = tuple(size)
            kept = dtype if dtype is not None and own.is_floating_point else own
            gather = partial(self._gather, name, stored)
            made.append(Entry(name.removeprefix(PREFIX), shape, kept, gather, self._layer(name), stored))
        return made

    def unquantized(self, quantized: set[str]) -> Iterator[str]:
        """The modules with a matrix as weight, but for this set. An embedding is none that engines quantize, but a
        checkpoint does not tell which these are, and to ignore one changes nothing."""
        for name, (shape, _) in self._saved.items():
            layer, _, leaf = name.removeprefix(PREFIX).rpartition(".")
            if name.startswith(PREFIX) and leaf == "weight" and len(shape) == 2 and layer not in quantized:
                yield layer

    def _names(self) -> list[str]:
        said = self._said
        parts = {f"{name}.{d}." for name, entry in said.quantized.items() for d in entry["operands"]}
        plain = [
            name
            for name in self._saved
            if name.startswith(PREFIX) and name not in said.memories and not any(name.startswith(p) for p in parts)
        ]
        return sorted([*plain, *said.quantized])

    def _layer(self, name: str) -> Multiplied | None:
        layer, _, leaf = name.removeprefix(PREFIX).rpartition(".")
        text = self._said.recipes.get(layer) if leaf == "weight" else None
        if text is None:
            return None
        recipe = recipes.recipe(text)
        if recipe.w.side("row").plain and name not in self._said.quantized:
            return None
        memories: dict[str, dict[str, Tensor]] = {}
        for buffer in self._said.memories:
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
