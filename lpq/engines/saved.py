"""The tensors of a checkpoint of ``lpq.checkpoint``, read one at a time and without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp

from lpq import recipes, registry
from lpq.checkpoint.errors import CheckpointError, tensor_name
from lpq.checkpoint.finding import find
from lpq.checkpoint.info import read
from lpq.checkpoint.model import PREFIX
from lpq.checkpoint.ranks import CheckpointRanks, quiet
from lpq.checkpoint.reading import CheckpointReader
from lpq.engines.entries import FileEntry, Multiplied, Pieces, Stored, is_quantized, shared_layers
from lpq.engines.experts import Stack, Stacks, left_modules, split
from lpq.nn.expert_stacks import numbered
from lpq.nn.fused_experts import DOWN, UP
from lpq.recipes import Recipe

HEAD = "lm_head.weight"
"""The name of the weight, in models of transformers, that their configuration ties to the embedding, or does not."""


class SavedCheckpoint:
    """A checkpoint, or the whole one of a run that was written last."""

    def __init__(self, path: Path, ranks: CheckpointRanks) -> None:
        """All ranks call it, and find the same one."""
        checkpoint = find(path, ranks)
        self._description = description = read(checkpoint)[0].description
        description.require(description.formats)
        self._reader = CheckpointReader(checkpoint.path, checkpoint.sizes)
        saved = self._reader.saved().items()
        # From here on a name has no prefix: the model has it, too.
        self._saved = {name.removeprefix(PREFIX): kind for name, kind in saved if name.startswith(PREFIX)}
        self._quantized = {name.removeprefix(PREFIX): entry for name, entry in description.quantized.items()}
        self._states = [name.removeprefix(PREFIX) for name in description.memories]
        self._recipes = {name: _recipe(text) for name, text in description.recipes.items()}
        self.transposed = [name for name in description.transposed if is_quantized(self._recipes.get(name))]
        self.stacks = self._read_stacks()

    def entries(self, dtype: torch.dtype | None) -> list[FileEntry]:
        """Its tensors, without what quantizers remember; ``dtype`` as in ``lpq.engines.models``."""
        entries: list[FileEntry] = []
        for name in self._names():
            quantized = self._quantized.get(name)
            if quantized is not None:
                if "row" not in quantized["operands"]:
                    raise CheckpointError(
                        f"{tensor_name(name)} was saved without its row operand, which engines multiply"
                    )
                shape, own = self._shape(name), getattr(torch, quantized["dtype"])
                stored = Stored(registry.quantizer(quantized["operands"]["row"]), own)
                self._check_shape(name, shape, stored)
            else:
                shape, own, stored = self._shape(name), self._saved[name].dtype, None
            file_dtype = dtype if dtype is not None and own.is_floating_point else own
            entry = FileEntry(name, shape, file_dtype, partial(self._gather, name, stored), self._layer(name), stored)
            plain = entry if entry.layer is not None else replace(entry, name=self._description.renamed.get(name, name))
            entries += split(replace(entry, layer=None), self.stacks, {}) or [plain]
        return entries

    def _check_shape(self, name: str, shape: tuple[int, ...], stored: Stored) -> None:
        """Refuse a matrix whose shape, which ``lpq.json`` has, is another one than its buffers make."""
        for buffer in stored.side.layout if len(shape) == 2 else ():
            kind, grid = self._saved.get(f"{name}.row.{buffer.name}"), buffer.grid(*shape)
            if kind is not None and tuple(kind[0]) != grid:
                raise CheckpointError(
                    f"its lpq.json has {tensor_name(name)} as {list(shape)}, and its {buffer.name} is "
                    f"{list(kind[0])}, not {list(grid)}: do not trust it"
                )

    def _read_stacks(self) -> Stacks:
        """Return the stacks of the model that was saved."""
        description = self._description
        if description.stacks is None and (several := [n for n in self._names() if self._may_be_stack(n)]):
            raise CheckpointError(
                f"{tensor_name(several[0])} seems to hold experts, and the checkpoint does not note their names in "
                "files, as earlier releases of lpq did not: load it into its model, and export that"
            )
        stacks = {}
        for name, entry in (description.stacks or {}).items():
            layer, _, leaf = name.rpartition(".")
            patterns = () if name in description.tied else entry["layers"] or ()
            memories = self._memories(layer, "" if leaf == "weight" else f"{leaf}_")
            shape = self._shape(name)
            names = numbered(patterns, shape[0] if shape else 0)
            stacks[name] = Stack(names, _recipe(entry["recipe"]), memories)
        return stacks

    def _may_be_stack(self, name: str) -> bool:
        layer, _, leaf = name.rpartition(".")
        recorded = leaf == "weight" and layer in self._recipes
        return len(self._shape(name)) == 3 and (recorded or leaf in (*UP, DOWN))

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the model; empty if there is no such tensor."""
        if name in self._quantized:
            return tuple(self._quantized[name]["shape"])
        return tuple(self._saved[name].shape) if name in self._saved else ()

    def unquantized(self, quantized: set[str]) -> Iterator[str]:
        """The modules with a matrix as weight, but for this set. Engines do not quantize embeddings, but a checkpoint
        does not show which modules are embeddings. To ignore one changes nothing."""
        yield from left_modules(self.stacks)
        aliases, tied = self._description.aliases, self._description.tied
        for name, (shape, _) in self._saved.items():
            if name in aliases and aliases[name] not in tied:
                continue  # of a layer in two places
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight" and len(shape) == 2 and layer not in quantized:
                yield from (n.removesuffix(".weight") for n in (name, self._description.renamed.get(name, name)))

    def _names(self) -> list[str]:
        parts = tuple(f"{name}.{d}." for name, entry in self._quantized.items() for d in entry["operands"])
        plain = {name for name in self._saved if not name.startswith(parts)} - {*self._states}
        return sorted((plain | self._quantized.keys()) - self._description.aliases.keys())

    def shared_layers(self) -> list[str]:
        """As ``lpq.engines.entries.shared_layers``."""
        aliases, tied = self._description.aliases, self._description.tied
        recipes = self._recipes.keys() - {name.rpartition(".")[0] for name in self.stacks}
        tensors = self._saved.keys() | self._quantized.keys() | aliases.keys()
        return shared_layers({name: self._recipes[name] for name in recipes}, tensors, aliases, tied)

    def check_ties(self, config: Mapping[str, Any]) -> None:
        """As ``lpq.engines.models.check_ties``, of the head of a language model, by the words of its configuration."""
        aliases, expected = self._description.aliases, config.get("tie_word_embeddings")
        for name in [*self._names(), *aliases]:
            tied = aliases.get(name, name) in self._description.tied
            if name.endswith(HEAD) and isinstance(expected, bool) and tied != expected:
                raise CheckpointError(
                    f"{name} is {'one weight with others' if tied else 'a weight of its own'} in the checkpoint, and "
                    f"not by config.json, by which engines build the model: set tie_word_embeddings to {tied} in base"
                )

    def _layer(self, name: str) -> Multiplied | None:
        layer, _, leaf = name.rpartition(".")
        is_matrix = leaf == "weight" and layer not in self._description.transposed
        recipe = self._recipes.get(layer) if is_matrix and name not in self._description.tied else None
        if recipe is None or not (name in self._quantized or is_quantized(recipe)):
            return None
        return Multiplied.by(recipe, layer, self._memories(layer))

    def _memories(self, layer: str, begin: str = "") -> dict[str, dict[str, Tensor]]:
        """The states of a layer; the names of states of one of several stacks begin with the name of the stack."""
        states: dict[str, dict[str, Tensor]] = {}
        for buffer in self._states:
            owner, _, own = buffer.rpartition(".")
            if owner == layer and own.startswith(begin):
                tensor, _, key = own.removeprefix(begin).partition("_")
                states.setdefault(tensor, {})[key] = self._read([buffer])[buffer]
        return states

    def _gather(self, name: str, stored: Stored | None) -> Pieces:
        if stored is None:
            return {"": self._read([name])[name]}
        parts = self._read([f"{name}.row.{buffer}" for buffer in stored.side.names])
        return {part.rpartition(".")[2]: value for part, value in parts.items()}

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        """These tensors."""
        if absent := [tensor_name(name) for name in names if name not in self._saved]:
            raise CheckpointError(f"it lacks {absent[0]}")
        kinds = [self._saved[name] for name in names]
        tensors = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in zip(names, kinds, strict=True)}
        with quiet():
            dcp.load({"model": tensors}, storage_reader=self._reader, no_dist=True)
        return tensors


def _recipe(text: str | None) -> Recipe | None:
    return recipes.recipe(text) if text is not None else None
