"""Reading the directory of an exported model: its content is checked before a tensor of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpq.checkpoint.errors import CheckpointError
from lpq.engines.checks import check_value
from lpq.engines.config_files import read_json
from lpq.engines.layouts import layout_named, parts_of, schemes_in, summaries
from lpq.engines.names import CONFIG, INDEX, JSON_FILES, ONE
from lpq.files import disk
from lpq.files.manifest import DESCRIPTION
from lpq.files.safetensors import Reader, TensorKind
from lpq.registry import Described, Inputs, Part, Scheme
from lpq.registry.errors import suggestion
from lpq.registry.showing import brief, listed

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""The dtypes in which other programs keep powers of two."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""The dtypes in which other programs keep scales that are fp32 here."""


@dataclass(frozen=True)
class Quantized:
    """A layer whose weight is quantized in the files."""

    name: str
    scheme: Scheme
    inputs: Inputs | None
    parts: tuple[Part, ...]
    """The tensors that it must have, by the names that they have in the files."""


class Files:
    """An exported model: the tensors of all its files by name, and its JSON."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            if path.is_file():
                hint = "; lpq.checkpoint.import_file reads a file of layout='lpq'"
                other = "" if path.suffix == ".safetensors" else hint
                raise CheckpointError(f"it is a file: give the directory in which it is{other}")
            raise CheckpointError("there is no such directory; lpq.export writes one")
        self.json = {name: read_json(path / name) for name in JSON_FILES if (path / name).is_file()}
        if CONFIG not in self.json:
            ours = (path / DESCRIPTION).is_file()
            hint = "it is a checkpoint, which lpq.checkpoint.load loads" if ours else "no engine could read it"
            raise CheckpointError(f"it has no {CONFIG}: {hint}")
        self._readers = {name: Reader(path / name) for name in _file_names(path)}
        self._place: dict[str, Reader] = {}
        for reader in self._readers.values():
            for name in reader.tensors:
                if name in self._place:
                    raise CheckpointError(f"{name} is in {self._place[name].path.name} and in {reader.path.name}")
                self._place[name] = reader
        if (path / INDEX).is_file():
            listing, actual = _weight_map(path), {name: reader.path.name for name, reader in self._place.items()}
            if absent := [name for name, file in listing.items() if actual.get(name) != file]:
                raise CheckpointError(f"{absent[0]} is not in {listing[absent[0]]}, where {INDEX} has it")
            if unknown := [name for name in actual if name not in listing]:
                raise CheckpointError(f"{actual[unknown[0]]} has {unknown[0]}, which {INDEX} does not list")
        self.tensors = {name: reader.tensors[name] for name, reader in self._place.items()}
        """The dtype and the shape of each tensor."""
        self.layout, self._described = _described(self.json)
        self._in_file: dict[str, str] = {}
        """The names that tensors have in the files, of those that ``rename`` gave others."""

    def rename(self, others: Mapping[str, str]) -> None:
        """Call tensors as the model does. ``others``: the names that weights have in files where they have another one
        there; what lies beside a weight is called so, too. A name that the files have stays."""
        own = {in_file: name for name, in_file in others.items()}
        pairs = [(*in_file.rsplit(".", 1), *name.rsplit(".", 1)) for in_file, name in own.items()]
        layers = {pair[0]: pair[2] for pair in pairs if pair[1:4:2] == ("weight", "weight")}
        for in_file in [*self.tensors]:
            layer, _, leaf = in_file.rpartition(".")
            name = own.get(in_file, f"{layers[layer]}.{leaf}" if layer in layers else in_file)
            if name not in self.tensors:
                self.tensors[name], self._place[name] = self.tensors.pop(in_file), self._place.pop(in_file)
                self._in_file[name] = in_file

    def read(self, name: str) -> Tensor:
        """One of its tensors."""
        return self._place[name].read(self._in_file.get(name, name))

    def quantized(self) -> dict[str, Quantized]:
        """The layers whose weights are quantized, by name; that all their tensors are there."""
        layers: dict[str, Quantized] = {}
        leaves: dict[str, dict[str, TensorKind]] = {}
        for name, kind in self.tensors.items():
            layer, _, leaf = name.rpartition(".")
            leaves.setdefault(layer, {})[leaf] = kind
        for layer, own in leaves.items():
            in_file = self._in_file.get(f"{layer}.{next(iter(own))}", "").rpartition(".")[0]
            facts = self._described(in_file or layer) or self._described(layer)
            if facts is None:
                continue
            parts = tuple(  # by the names that they have in the files
                replace(part, name=next((name for name in (part.name, *part.others) if name in own), part.name))
                for part in parts_of(*facts)
            )
            here = [
                p.name
                for p in parts  # a weight in high precision has the name of one that is quantized
                if p.name in own and (p.name != "weight" or own[p.name].dtype == p.dtype)
            ]
            if not here:
                continue  # in high precision, as an embedding is
            if absent := [part.name for part in parts if part.name not in own]:
                raise CheckpointError(f"{layer} has {listed(here)} and lacks {listed(absent)}")
            layers[layer] = Quantized(layer, *facts, parts)
        return layers

    def check_headers(self, layer: Quantized, rows: int, cols: int) -> None:
        """Compare the shapes and dtypes of a layer's tensors with those that its scheme has for its weight."""
        if (reason := layer.scheme.why_not(rows, cols)) is not None:
            raise CheckpointError(f"{layer.name}.weight is {rows}x{cols} in the model, and {reason}")
        tensors = self.tensors
        for part in layer.parts:
            name = f"{layer.name}.{part.name}"
            kind, shape = tensors[name], part.shape(rows, cols)
            one = math.prod(shape) == math.prod(kind.shape) == 1  # others write [], [1] or [1, 1]
            if kind.shape != shape and not one:
                raise CheckpointError(
                    f"{name} has shape {list(kind.shape)}, and for a weight of {rows}x{cols} it is {list(shape)}"
                )
            wide = FLOATS if part.dtype == torch.float32 else (part.dtype,)
            if kind.dtype not in (EXPONENTS if part.holds == "exponents" else wide):
                raise CheckpointError(f"{name} is {kind.dtype}, and {layer.scheme.title} has {part.dtype} there")

    def parts(self, layer: Quantized, rows: int, cols: int) -> list[Tensor]:
        """The tensors of a layer, whose headers are checked, as its scheme has them."""
        tensors = []
        for part in layer.parts:
            name = f"{layer.name}.{part.name}"
            value = self.read(name)
            value = value.view(part.dtype) if part.holds == "exponents" else value.to(part.dtype)
            value = value.reshape(part.shape(rows, cols))
            check_value(name, part, value)
            tensors.append(value)
        return tensors


def _file_names(path: Path) -> list[str]:
    """The files with tensors."""
    if (path / INDEX).is_file():
        names = sorted({*_weight_map(path).values()})
    elif (path / ONE).exists():
        names = [ONE]
    else:
        others = sorted(entry.name for entry in path.iterdir() if entry.suffix in PICKLED)
        entry = f": {others[0]} is a pickle, which can run code, and is not read" if others else ""
        raise CheckpointError(f"it has neither {ONE} nor {INDEX}{entry}")
    for name in names:
        if not disk.PLAIN.fullmatch(name):
            raise CheckpointError(f"{INDEX} refers to {brief(name)}, which is not the name of a file in the directory")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} refers to {brief(name)}, which is no safetensors, and nothing else is read")
        if not (path / name).is_file():
            referred = f", to which {INDEX} refers," if (path / INDEX).is_file() else ""
            raise CheckpointError(f"{name}{referred} is missing or no ordinary file")
    return names


def _weight_map(path: Path) -> dict[str, str]:
    files = read_json(path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{INDEX} has no weight_map, which is a table of files")
    return files


def _described(config_files: Mapping[str, Mapping[str, Any]]) -> tuple[str, Described]:
    """The layout whose JSON this is, and its description of the layers."""
    for name in summaries():
        described = layout_named(name).read(config_files, schemes_in(name))
        if described is not None:
            return name, described
    config = config_files[CONFIG].get("quantization_config")
    if config is None:
        raise CheckpointError(f"{CONFIG} has no quantization_config: it is a model in high precision")
    method = config.get("quant_method") if isinstance(config, dict) else config
    raise CheckpointError(
        f"{CONFIG}: quant_method is {brief(method)}, and no layout that is installed is called so: "
        f"{suggestion(str(method), summaries())}"
    )
