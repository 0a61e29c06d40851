"""The files beside a model's tensors: its configuration, and the small files of the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lpq.checkpoint.errors import CheckpointError
from lpq.engines.names import CONFIG, INDEX, JSON_FILES
from lpq.files.disk import json_of
from lpq.registry.reading import read_text
from lpq.registry.showing import brief

COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""The files that are copied of a model's directory: tokenizers, templates, settings for generating and for images."""
NOT_COPIED = (*JSON_FILES, INDEX, "*.index.json", "trainer_state.json", "lpq.json", "manifest.json")
SNAPSHOTS, BLOBS = "snapshots", "blobs"
"""The folders of Hugging Face's cache: directories of the first have links to files of the second, beside it."""
DTYPE = ("dtype", "torch_dtype")
"""The keys of the model's dtype: present releases of transformers write the first."""
MOST = 64 << 20
"""The most bytes of a JSON file: the list of the tensors of a model is the largest."""


def configuration(model: nn.Module | None, base: Path | None) -> dict[str, Any]:
    """The configuration of the model: its own, as transformers' models have one, or the configuration of ``base``; else
    empty.

    A model of transformers has the dtype that it has now, as in what ``save_pretrained`` writes."""
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_diff_dict", None)):
        data: dict[str, Any] = json.loads(json.dumps(config.to_diff_dict(), default=_text))
        own = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))  # FSDP2 made it another one
        data["architectures"] = [own.__name__]
        if isinstance(dtype := getattr(model, "dtype", None), torch.dtype):  # the config has the dtype of its loading
            data[next((key for key in DTYPE if key in data), DTYPE[0])] = _text(dtype)
    else:
        data = read_json(_own(base / CONFIG)) if base is not None and (base / CONFIG).is_file() else {}
    data.pop("quantization_config", None)  # a layout writes its own
    return data


def base_of(model: nn.Module | None, base: str | Path | None) -> Path | None:
    """The directory whose small files are copied: as it is given, or where the model came from, if that is here."""
    if base is not None:
        if not Path(base).is_dir():
            raise CheckpointError(f"base={str(base)!r} is no directory: pass the directory of the trained model")
        return Path(base)
    came_from = getattr(getattr(model, "config", None), "_name_or_path", None)
    return Path(came_from) if isinstance(came_from, str) and came_from and Path(came_from).is_dir() else None


def small_files(model: nn.Module | None, base: Path | None) -> dict[str, bytes]:
    """The small files, by name: tokenizers and templates of ``base``, and the settings for generating."""
    contents = {}
    for path in sorted(base.iterdir()) if base is not None else []:
        is_small = any(fnmatchcase(path.name, pattern) for pattern in COPIED)
        if is_small and path.is_file() and not any(fnmatchcase(path.name, pattern) for pattern in NOT_COPIED):
            contents[path.name] = _own(path).read_bytes()
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        contents["generation_config.json"] = generation.to_json_string().encode()
    return contents


def _own(path: Path) -> Path:
    """A file of a directory that is given to others: a link out of it is refused."""
    folder, target = path.parent.resolve(), path.resolve()
    blobs = [folder.parent.parent / BLOBS] if folder.parent.name == SNAPSHOTS else []
    if not any(target.is_relative_to(allowed) for allowed in (folder, *blobs)):
        raise CheckpointError(
            f"{path} is a link to {target}, outside of the directory, and what lies there is not copied: put the file "
            "in its place, or give another directory, base=…"
        )
    return path


def as_json(data: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file."""
    return (json.dumps(data, indent=2) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, which is a table."""
    try:
        table = json_of(read_text(path, MOST))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path.name} is {brief(table)}, and no table")
    return table


def _text(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
