"""``lpq.json``: the description of a checkpoint in plain data, by which it can be judged before a tensor is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lpq import registry
from lpq.checkpoint.errors import CheckpointError, MissingPlugin, tensor_name
from lpq.formats import Quantizer
from lpq.recipes import Policy, Steps, policy
from lpq.registry.errors import LpqError
from lpq.registry.showing import brief, listed, pip

VERSION = 2
"""The version of a checkpoint: from 2 on it has an ``index.json``. One of a later version is refused, in words."""
FIELDS: dict[str, tuple[type, ...]] = {
    "version": (int,), "step": (int, type(None)), "conversions": (dict,), "recipes": (dict,), "quantized": (dict,),
    "memories": (list, tuple), "formats": (dict,), "stored": (list, tuple), "stacks": (dict, type(None)),
    "renamed": (dict,), "aliases": (dict,), "tied": (list, tuple), "transposed": (list, tuple),
}  # fmt: skip
"""The type that each field of a description has in a file."""
LATER: dict[str, Any] = {"stacks": None, "renamed": {}, "aliases": {}, "tied": (), "transposed": ()}
"""The fields that earlier releases did not write, as if they had."""
ENTRY: dict[str, tuple[type, ...]] = {"quantizer": (str,), "shape": (list,), "dtype": (str,), "operands": (dict,)}
"""The type of each field that describes a quantized tensor."""
ORIGIN: dict[str, tuple[type, ...]] = {"plugin": (str,), "distribution": (str,), "version": (str,)}
"""The type of each field that describes the origin of a format."""
STACK: dict[str, tuple[type, ...]] = {"recipe": (str, type(None)), "layers": (list, tuple, type(None))}
"""The type of each field that describes a stack of experts."""
CONVERSION: dict[str, tuple[type, ...]] = {"policy": (dict,), "steps": (int, str, type(None))}
"""The type of each field that describes a conversion."""
WRITE = "write it with lpq.checkpoint, and do not edit it"


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint's tensors, and of the model to which they belong."""

    step: int | None = None
    conversions: Mapping[str, Any] = field(default_factory=dict)
    """The policy as data, and the length of the run, by the name of the module that ``lpq.convert`` got."""
    recipes: Mapping[str, str | None] = field(default_factory=dict)
    """The recipe of each layer of lpq at that step, as text."""
    memories: tuple[str, ...] = ()
    """The names of the buffers that hold the states of quantizers."""
    quantized: Mapping[str, Any] = field(default_factory=dict)
    """The quantizer, shape, dtype and operands of each tensor that is stored quantized."""
    formats: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The plugin, distribution and version that brought each format in use."""
    stored: tuple[str, ...] = ()
    """The formats of ``quantized``."""
    stacks: Mapping[str, Any] | None = None
    """By the name of each stack of experts its recipe, as text, and the names of its layers in files, with ``{}`` in
    the place of the expert's number, or None (``lpq.nn.expert_stacks``); None: they were not noted."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The names in files of tensors beside such stacks that have other names there."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """For each further name of a tensor, its first name."""
    tied: tuple[str, ...] = ()
    """The first names of parameters that several modules have."""
    transposed: tuple[str, ...] = ()
    """The layers that hold their weight as ``[in, out]``."""
    version: int = VERSION

    def data(self) -> dict[str, Any]:
        """The description as plain data."""
        return dataclasses.asdict(self)

    def json(self) -> bytes:
        """The bytes of the file."""
        return json.dumps(self.data(), indent=1).encode()

    def lines(self) -> list[str]:
        """The lines of the file, by which ranks compare it."""
        return self.json().decode().splitlines()

    @classmethod
    def read(cls, data: Any) -> Description:
        """Make a description from such data; refuse other data."""
        version = data.get("version", VERSION) if isinstance(data, Mapping) else VERSION
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                f"it is written in version {version} of the format, and this lpq reads versions up to {VERSION}: "
                "pip install --upgrade lpq"
            )
        data = {**LATER, **data} if isinstance(data, Mapping) else data
        check_fields("its description (lpq)", data, FIELDS)
        for name, entry in data["quantized"].items():
            check_fields(f"its description (lpq) of {tensor_name(str(name))}", entry, ENTRY)
            _check_tensor(name, entry)
        for name, origin in data["formats"].items():
            check_fields(f"its description (lpq) of the format {brief(name)}", origin, ORIGIN)
        for name, conversion in data["conversions"].items():
            check_fields(f"its description (lpq) of the conversion of {brief(name)}", conversion, CONVERSION)
        stacks: Mapping[str, Any] = data["stacks"] or {}
        for name, stack in stacks.items():
            check_fields(f"its description (lpq) of the experts {tensor_name(str(name))}", stack, STACK)
        tuples = ("memories", "stored", "tied", "transposed")
        texts = [text for name in tuples for text in data[name]]
        texts += [*data["renamed"].values(), *data["aliases"].values()]
        texts += [recipe for recipe in data["recipes"].values() if recipe is not None]
        texts += [layer for stack in stacks.values() for layer in stack["layers"] or ()]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise CheckpointError(f"its description (lpq) has {brief(wrong[0])} where a text should be: {WRITE}")
        values = {name: data[name] for name in FIELDS}
        return cls(**{**values, **{name: tuple(data[name]) for name in tuples}})

    def require(self, formats: Iterable[str]) -> None:
        """Make sure that these formats are installed; the error names the package that brings a missing one."""
        for name in sorted(formats):
            try:
                registry.format(name)
            except LookupError as error:
                raise MissingPlugin(self._missing(name)) from error
            except LpqError as error:
                raise MissingPlugin(f"it uses the format {name}, which cannot be used here: {error}") from error

    def _missing(self, name: str) -> str:
        origin = self.formats.get(name)
        if origin is None:
            return f"it uses the format {name}, which no plugin brings here: install the one that does"
        title = f"plugin {origin['plugin']} ({origin['distribution']} {origin['version']})".replace(" )", ")")
        remedy = "bring the plugin in the same way"
        if origin["version"]:
            remedy = pip("install", [origin["distribution"]], "install what brings it")
        return f"it uses the format {name}, which came with {title} and is not installed here: {remedy}"

    def policies(self) -> dict[str, tuple[Policy, Steps]]:
        """The policy and the length of the run of each conversion."""
        self.require(self.formats)
        return {n: (policy(c["policy"]), c["steps"]) for n, c in self.conversions.items()}


def check_fields(what: str, data: Any, fields: Mapping[str, tuple[type, ...]], remedy: str = WRITE) -> None:
    """Refuse data in which one of these fields is missing or has another type: another program wrote or changed it."""
    if not isinstance(data, dict):
        raise CheckpointError(f"{what} is of type {type(data).__name__}, not dict: {remedy}")
    if absent := [repr(name) for name in fields if name not in data]:
        raise CheckpointError(f"{what} lacks {listed(absent)}: {remedy}")
    for name, types in fields.items():
        if not isinstance(data[name], types):
            names = " or ".join(t.__name__ for t in types)
            raise CheckpointError(f"{what} has {name!r} of type {type(data[name]).__name__}, not {names}: {remedy}")


def _check_tensor(name: str, entry: Mapping[str, Any]) -> None:
    """Refuse an entry that no quantized tensor can have."""
    dtype = getattr(torch, entry["dtype"], None)
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    shape = bool(entry["shape"]) and all(type(n) is int and n >= 0 for n in entry["shape"])
    operands = entry["operands"]
    sides = operands and set(operands) <= {"row", "col"} and all(isinstance(text, str) for text in operands.values())
    if floating and shape and sides:
        return
    raise CheckpointError(
        f"its description (lpq) of {tensor_name(name)} is {brief(entry)}, which is no tensor: {WRITE}"
    )


def formats_of(quantizer: Quantizer) -> set[str]:
    """The formats that a quantizer is made of."""
    inner = (getattr(quantizer, field.name) for field in dataclasses.fields(quantizer))  # type: ignore[arg-type]
    names = {name for value in inner if isinstance(value, Quantizer) for name in formats_of(value)}
    return names | {registry.format_of(type(quantizer)).name}


def origins(formats: Iterable[str]) -> dict[str, dict[str, str]]:
    """The plugin, distribution and version that bring each of these formats."""
    plugins = registry.plugins()
    entries = {}
    for name in sorted(formats):
        plugin = next((p for p in plugins if name in p.formats), None)
        if plugin is not None:
            entries[name] = {"plugin": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
    return entries
