"""Exporting a model: into files that an inference engine reads, or tensor by tensor into an engine that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpq.checkpoint.background import ranks_of
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, tensor_name
from lpq.checkpoint.model import Model, is_shared
from lpq.checkpoint.ranks import ALIKE, CheckpointRanks, Meshes
from lpq.checkpoint.single import write_file
from lpq.engines.config_files import DTYPE, as_json, base_of, configuration, small_files
from lpq.engines.entries import FileEntry, is_quantized, shared_layers
from lpq.engines.experts import Stacks, left_modules, stacks
from lpq.engines.models import check_ties, entries, unquantized
from lpq.engines.names import CONFIG
from lpq.engines.plan import Assigned, ExportPlan, planned
from lpq.engines.saved import SavedCheckpoint
from lpq.engines.siblings import Siblings, fused
from lpq.engines.writing import Directory, shards
from lpq.files.disk import place
from lpq.nn.first_argument import check_flags, check_model
from lpq.operations.inputs import DTYPES
from lpq.registry.showing import Readable, listed, number
from lpq.registry.warning import warn

SHARD = 5 * 10**9
"""Bytes of a file, as Hugging Face has them."""
ONE_FILE = "lpq"
"""The layout of one file that holds a whole model for lpq, or for PyTorch alone."""
NO_MODEL = (
    "config.json has no architecture, by which engines build the model: give base=…, the directory of the model that "
    "was trained (lpq export --base)"
)
Amaxes = Mapping[str, Tensor | float]


@dataclass(frozen=True)
class Exported(Readable):
    """A record of an export."""

    path: Path
    layout: str
    layers: Mapping[str, tuple[str, ...]]
    """The quantized layers, by how they lie in the files."""
    left: tuple[str, ...]
    """The layers in high precision that the files name to an engine."""
    notes: tuple[str, ...]
    """Remarks for the user."""
    readers: tuple[str, ...] = ()
    """The programs that read all layers, as the formats' plugins declare."""

    def __str__(self) -> str:
        """A few lines to read."""
        read_by = f", read by {', '.join(self.readers)}" if self.readers else ""
        lines = [
            f"{self.path}, in the layout {self.layout}{read_by}",
            *(f"{number(len(names), 'layer')}: {title}" for title, names in self.layers.items()),
            *([f"{number(len(self.left), 'layer')} in high precision: {listed(self.left)}"] if self.left else []),
            *self.notes,
        ]
        return "\n  ".join(lines)


class Export:
    """``lpq.export(model, path, layout=…)``, and ``lpq.export.stream(model, layout)``."""

    def __call__(
        self,
        model: nn.Module | str | Path,
        path: str | Path,
        *,
        layout: str = "compressed-tensors",
        base: str | Path | None = None,
        dtype: torch.dtype | None = None,
        input_amax: Amaxes | None = None,
        leave: Sequence[str] = (),
        siblings: Siblings = "alike",
        shard_bytes: int = SHARD,
        decode: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> Exported:
        """Write a model into the directory ``path`` for inference engines; return a record.

        Weights have the codes that the layers multiply, bit for bit: stored quantized weights are written unchanged,
        weights in high precision are encoded once, as their recipe does it in forward. All ranks that share the model
        call this, or the ranks of ``process_group``. No rank holds more than its shards and one layer. A model that
        ranks do not share, or the directory of a checkpoint, is exported by rank 0 alone.

        ``layout="lpq"`` writes the whole model into one file, ``path``, for ``lpq.checkpoint.import_file``: all tensors
        bit for bit, whatever their names. The first rank has the whole model in the CPU's memory on the way.

        Args:
            model: A model that ``lpq.convert`` converted, however its weights are stored and sharded; or the directory
                of a checkpoint of ``lpq.checkpoint.save``.
            path: The directory to write, or the file for ``layout="lpq"``.
            layout: ``"compressed-tensors"``, ``"modelopt"``, one that a plugin brings (``lpq export --help`` lists
                them), or ``"lpq"``.
            base: The directory of the model that was trained, whose tokenizer, templates and other small files are
                copied, and whose configuration is taken where the model has none. None: the directory from which
                transformers loaded the model, if that is here.
            dtype: The dtype to which training casts weights before a layer encodes them (autocast does not), and in
                which all else is written. None: the one in which FSDP2 gathers weights, or each tensor's own.
            input_amax: The amax of the inputs of layers, by name, for layouts with static scales. None: what quantizers
                remember; ``{}``: none.
            leave: Names and patterns of layers whose weights stay in high precision.
            siblings: ``"alike"``: layers that engines fuse, as ``q_proj``, ``k_proj`` and ``v_proj``, must lie alike.
                ``"any"``: they need not, for engines that fuse none.
            shard_bytes: The most bytes of one file.
            decode: For ``layout="lpq"``: write a file for programs without lpq, which load ``torch.load(path,
                weights_only=True)["model"]`` as any state dict. Quantized weights are tensors of their own dtype, and
                what quantizers remember is left out.
            process_group: The ranks over which the model lies; None: all ranks.
        """
        if layout == ONE_FILE or decode:
            for_engines = (base, dtype, input_amax, *leave, siblings, shard_bytes)
            return _one_file(model, path, layout, for_engines, decode, process_group)
        ranks = ranks_of(process_group, is_shared(model, replicas=False), "exports", first=True)
        with ranks.error_context("nothing is exported"):
            target = ranks.each(lambda: place(path))

        def begin() -> Directory:
            texts = {name: as_json(data) for name, data in config.items()}
            small = small_files(source.model, base_of(source.model, base)) | texts
            return Directory(target, shards(plan, shard_bytes), small)

        with ranks.error_context(f"nothing is exported to {target}"):
            plan, source = _planned(model, layout, dtype, input_amax, leave, siblings, shard_bytes, ranks, target)
            config = ranks.first(lambda: _config(source, base, plan, dtype))
            config_json = config[CONFIG]
            no_model = [NO_MODEL] if not config_json.get("architectures") else []
            remarks = plan.remarks(next((str(config_json[key]) for key in DTYPE if config_json.get(key)), None))
            directory = ranks.each(lambda: begin() if ranks.rank == 0 else None)
            with directory.discarded_on_error() if directory is not None else nullcontext():
                _write(plan, directory, ranks, siblings)
        notes = (*plan.notes, *source.notes, *no_model, *remarks)
        return Exported(target, layout, {g.title: g.layers for g in plan.groups}, plan.left, notes, plan.readers)

    def stream(
        self,
        model: nn.Module,
        layout: str,
        *,
        dtype: torch.dtype | None = None,
        input_amax: Amaxes | None = None,
        leave: Sequence[str] = (),
        siblings: Siblings = "alike",
        process_group: dist.ProcessGroup | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a model as an engine of this layout names and reads them, one after the other.

        Weights that are stored quantized, sharded or not, are gathered as they are, one at a time: there is no copy in
        high precision. All ranks go through it together, or the ranks of ``process_group``. Each gets all tensors, on
        its device. Where ranks do not share the model, each goes through its own.

        Args:
            model: A model that ``lpq.convert`` converted.
            layout: The layout of the engine, as for ``lpq.export``.
            dtype: As for ``lpq.export``.
            input_amax: As for ``lpq.export``.
            leave: As for ``lpq.export``.
            siblings: As for ``lpq.export``.
            process_group: The ranks over which the model lies; None: all ranks.
        """
        ranks = ranks_of(process_group, is_shared(model, replicas=False), "streams")
        with ranks.error_context("the model cannot be streamed"):
            ranks.all(lambda: check_model(model, CheckpointError))
            plan, _ = _planned(model, layout, dtype, input_amax, leave, siblings, SHARD, ranks)
        return _streamed(plan)


@dataclass(frozen=True)
class _Source:
    """Where tensors come from."""

    entries: Sequence[FileEntry]
    linear: Callable[[set[str]], Iterator[str]]
    model: nn.Module | None
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
    saved: SavedCheckpoint | None = None


def _planned(
    model: nn.Module | str | Path,
    layout: str,
    dtype: torch.dtype | None,
    input_amax: Amaxes | None,
    leave: Sequence[str],
    siblings: Siblings,
    shard_bytes: int,
    ranks: CheckpointRanks,
    target: Path | None = None,
) -> tuple[ExportPlan, _Source]:
    """The tensors of the files, the same ones on all ranks, and where they come from. ``target``: the directory."""

    def prepare() -> tuple[ExportPlan, _Source]:
        if dtype is not None and dtype not in DTYPES:
            raise CheckpointError(f"dtype={dtype!r}: it is one of {listed([*map(str, DTYPES)])}")
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise CheckpointError(f"shard_bytes={shard_bytes!r}: it is the most bytes of one file, as {SHARD:_}")
        source = _source(model, dtype, ranks)
        return planned(source.entries, layout, source.linear, input_amax, leave, siblings, source.notes), source

    _check_ranks(model, f"{target.absolute() if target else 'a stream'} in the layout {layout}", ranks)
    plan, source = ranks.each(prepare)
    kinds = [f"{name} {kind}" for tensor in plan.tensors for name, kind in tensor.kinds().items()]
    ranks.equal(kinds, "the ranks hold different models, and an engine gets one", ALIKE)
    return plan, source


def _one_file(
    model: nn.Module | str | Path, path: str | Path, layout: str, for_engines: tuple[object, ...], decode: bool,
    process_group: dist.ProcessGroup | None,
) -> Exported:  # fmt: skip
    """Write a whole model into one file. ``for_engines``: the arguments that mean nothing here."""
    check_flags("export", CheckpointError, decode=decode)
    if layout != ONE_FILE:
        raise CheckpointError(f'decode=True is for layout="{ONE_FILE}", and engines read layout={layout!r} quantized')
    if for_engines != (None, None, None, "alike", SHARD):
        raise CheckpointError(f'layout="{ONE_FILE}" writes a model as it is, and takes decode and process_group alone')
    if isinstance(model, str | Path):
        raise CheckpointError(f'layout="{ONE_FILE}" is of a model: load {model} into one, and export that')
    target, description = write_file(model, path, decode, process_group)
    layers: dict[str, tuple[str, ...]] = {}
    for name, entry in description.quantized.items():
        layers[entry["quantizer"]] = (*layers.get(entry["quantizer"], ()), tensor_name(name))
    return Exported(target, layout, layers, (), ())


def _source(model: nn.Module | str | Path, dtype: torch.dtype | None, ranks: CheckpointRanks) -> _Source:
    if isinstance(model, str | Path):
        saved = SavedCheckpoint(place(model, "model"), ranks)
        notes = _notes(saved.stacks, saved.shared_layers(), saved.transposed)
        return _Source(saved.entries(dtype), saved.unquantized, None, notes, saved)
    view = Model(model)
    recipes = {name: layer.recipe for name, layer in view.layers()}
    shared = shared_layers(recipes, view.tensors(), view.aliases(), view.tied())
    check_ties(view)
    experts = stacks(view.module)
    notes = _notes(experts, shared, [n for n, m in view.layers() if m.transposed and is_quantized(m.recipe)])
    return _Source(entries(view, dtype, experts), partial(unquantized, view.module, stacks=experts), view.module, notes)


def _notes(stacks: Stacks, shared: Sequence[str], transposed: Sequence[str]) -> tuple[str, ...]:
    """Remarks about what stays in high precision though it is trained quantized."""
    experts = [name for name, trained in left_modules(stacks).items() if trained]
    notes = {
        f"the experts of {listed(experts)} are in high precision, in one tensor: engines have no layers for experts "
        "that are transposed, interleaved or with biases, or that transformers has in one tensor in files": experts,
        f"the weights of {listed(shared)} belong to other modules as well, and are written once, in high precision: "
        "training multiplies their codes": shared,
        f"the weights of {listed(transposed)} are [in, out], and are written in high precision: engines read quantized "
        "weights as [out, in]": transposed,
    }
    return tuple(note for note, names in notes.items() if names)


def _check_ranks(model: nn.Module | str | Path, where: str, ranks: CheckpointRanks) -> None:
    def meshes() -> Meshes:
        if not isinstance(model, nn.Module | str | Path):
            raise CheckpointError(
                f"model must be a torch.nn.Module or the directory of a checkpoint, got {type(model).__name__}"
            )
        return Model(model).meshes(ranks.many) if isinstance(model, nn.Module) else Meshes()

    ranks.check_alike(where, ranks.each(meshes), ())


def _config(
    source: _Source, base: str | Path | None, plan: ExportPlan, dtype: torch.dtype | None
) -> dict[str, dict[str, Any]]:
    """The JSON beside the tensors, by the names of files."""
    config = configuration(source.model, base_of(source.model, base))
    if source.saved is not None:
        source.saved.check_ties(config)
    if dtype is not None:
        config |= {key: str(dtype).removeprefix("torch.") for key in DTYPE if key in config}
    tables = {name: dict(data) for name, data in plan.files.items()}
    tables[CONFIG] = {**config, **tables.get(CONFIG, {})}
    return tables


def _write(plan: ExportPlan, directory: Directory | None, ranks: CheckpointRanks, siblings: Siblings) -> None:
    """Gather each tensor on all ranks, and write it on the first, which goes on gathering where that fails: else the
    others would wait for it."""
    failed: list[Exception] = []
    values: dict[str, list[float]] = {}
    for tensor in plan.tensors:
        pieces = tensor.entry.gather()
        if directory is None or failed:
            del pieces
            continue
        try:
            tensors = tensor.tensors(pieces)
            directory.add(tensor, tensors)
            values.update(_values(tensor, tensors))
            del tensors, pieces  # before the next is gathered
        except Exception as error:
            failed.append(error)

    def publish() -> None:
        if failed:
            raise failed[0]
        if directory is not None:
            directory.publish()
            if siblings == "alike":
                _warn_of_siblings(values)

    ranks.first(publish)


def _streamed(plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
    for tensor in plan.tensors:
        tensors = tensor.tensors(tensor.entry.gather())
        while tensors:
            name = next(iter(tensors))
            yield name, tensors.pop(name)


def _values(tensor: Assigned, tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The values of a quantized layer that must be equal in layers that engines fuse."""
    if tensor.scheme is None:
        return {}
    alike = [p.name for p in tensor.parts() if p.holds == "value"]
    return {tensor.layer: [tensors[f"{tensor.layer}.{name}"].item() for name in alike]}


def _warn_of_siblings(values: Mapping[str, list[float]]) -> None:
    if unlike := [names for names in fused(values) if len({tuple(values[name]) for name in names}) > 1]:
        warn(
            f"engines fuse {listed(unlike[0])} and give them one scale, and theirs differ"
            f"{f', as in {len(unlike) - 1} more places' if unlike[1:] else ''}: they then compute "
            "another model than was trained. Use a format without a scale of the whole tensor, or give them the same "
            "scales: lpq.calibrate does, of weights that are not stored quantized",
            CheckpointWarning,
        )


export = Export()
