"""The place of each tensor of a model in a layout, judged before anything is gathered or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lpq import registry
from lpq.checkpoint.errors import CheckpointError, UnknownName
from lpq.engines.checks import check_value
from lpq.engines.entries import FileEntry, Pieces
from lpq.engines.layouts import layout_named, parts_of, schemes_for, summaries
from lpq.engines.siblings import EXPERTS, Siblings, check_alike
from lpq.files.safetensors import TensorKind
from lpq.formats import Quantizer
from lpq.operations.cut import why_cut
from lpq.recipes.globs import exactly
from lpq.registry import Group, Inputs, Part, Scheme
from lpq.registry.showing import brief, listed, number


@dataclass(frozen=True)
class Assigned:
    """A tensor of a model with its place in a layout."""

    entry: FileEntry
    scheme: Scheme | None = None
    """None: it is written in high precision."""
    inputs: Inputs | None = None
    amax: Tensor | None = None
    """The amax of the layer's input, if engines do not measure it."""

    @property
    def layer(self) -> str:
        """The name of the layer whose weight it is."""
        return self.entry.name.rpartition(".")[0]

    def parts(self) -> list[Part]:
        """The tensors to write for it and its input."""
        assert self.scheme is not None
        return parts_of(self.scheme, self.inputs)

    def kinds(self) -> dict[str, TensorKind]:
        """The tensors that are written, as they will be."""
        if self.scheme is None:
            return {self.entry.name: TensorKind(self.entry.shape, self.entry.dtype)}
        rows, cols = self.entry.shape
        return {f"{self.layer}.{p.name}": TensorKind(p.shape(rows, cols), p.dtype) for p in self.parts()}

    def tensors(self, pieces: Pieces) -> dict[str, Tensor]:
        """The tensors that are written, checked: each is there, and none has what engines cannot compute with."""
        if self.scheme is None:
            return {self.entry.name: self.entry.values(pieces)}
        operand = self.entry.operand(pieces)
        parts, values = self.parts(), [*self.scheme.write(operand)]
        if self.inputs is not None and self.inputs.write is not None and self.amax is not None:
            values.append(self.inputs.write(self.amax))
        _check_written(registry.format_of(type(operand.quantizer)).name, self.scheme, self.kinds(), values)
        by_name = {f"{self.layer}.{part.name}": value for part, value in zip(parts, values, strict=True)}
        for part, (name, value) in zip(parts, by_name.items(), strict=True):
            check_value(name, part, value)
        return by_name


def _check_written(format: str, scheme: Scheme, kinds: Mapping[str, TensorKind], values: Sequence[object]) -> None:
    """Refuse tensors of a scheme that are not as its parts declare them; a file has room for those alone."""
    actual_kinds = [TensorKind.of(t) if isinstance(t, Tensor) else type(t).__name__ for t in values]
    wrong = [
        f"writes {name} as {actual}, and parts declares {part}"
        for (name, part), actual in zip(kinds.items(), actual_kinds, strict=False)
        if actual != part
    ]
    if len(actual_kinds) != len(kinds):
        wrong = [f"writes {number(len(actual_kinds), 'tensor')}, and parts declares {len(kinds)}"]
    if wrong:
        cause = f"its scheme {scheme.title!r} of the layout {scheme.layout!r} {wrong[0]}"
        raise registry.at_fault(format, cause, "return from write what parts declares, or declare what is returned")


@dataclass(frozen=True)
class ExportPlan:
    """A model with its place in a layout."""

    tensors: tuple[Assigned, ...]
    groups: tuple[Group, ...]
    left: tuple[str, ...]
    """The layers in high precision that an engine would take for quantized ones."""
    files: Mapping[str, Mapping[str, object]]
    """The layout's JSON."""
    notes: tuple[str, ...]
    """Remarks for the user."""

    @property
    def readers(self) -> tuple[str, ...]:
        """The programs that read every layer right."""
        first, *others = [[n for n in group.readers if n not in _not_readers(group)] for group in self.groups]
        return tuple(name for name in first if all(name in readers for readers in others))

    def remarks(self, dtype: str | None) -> list[str]:
        """The limits of readers that these layers meet in a model of this dtype; None: in the dtype of each weight."""
        layers_by_text: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.scheme is None:
                continue
            rows, cols = tensor.entry.shape
            own = dtype or str(tensor.entry.dtype).removeprefix("torch.")
            for limited in (tensor.scheme, tensor.inputs):
                remark = limited.remark if limited is not None else None
                if remark is not None and (text := remark(rows, cols, own)) is not None:
                    layers_by_text.setdefault(text, []).append(tensor.layer)
        return [f"{number(len(names), 'layer')} ({listed(names)}): {text}" for text, names in layers_by_text.items()]


def planned(
    entries: Sequence[FileEntry],
    layout: str,
    linear: Callable[[set[str]], Iterable[str]],
    input_amax: Mapping[str, Tensor | float] | None,
    leave: Sequence[str],
    siblings: Siblings,
    unread: Sequence[str] = (),  # why layers that train quantized lie in high precision
) -> ExportPlan:
    """Find the place of each tensor. ``linear``: the layers that an engine takes for linear ones, but for a set."""
    own_layout = layout_named(layout)
    quantized = {entry.layer.name for entry in entries if entry.layer is not None}
    _check_names(quantized, input_amax, leave)
    places = [_assigned(entry, layout, input_amax, leave) for entry in entries]
    unfit = {e.layer.name: p for e, p in zip(entries, places, strict=True) if e.layer and isinstance(p, str)}
    if unfit:
        which = "the layer" if len(unfit) == 1 else f"all {len(unfit)} layers without a place"
        blocks = {name: EXPERTS.fullmatch(name) for name in unfit}  # whose experts have one format
        patterns = {exactly(name) if block is None else f"{exactly(block[1])}.*": 0 for name, block in blocks.items()}
        names = listed([*map(repr, patterns)], most=50)
        raise CheckpointError(f"{next(iter(unfit.values()))}, or keep {which} in high precision, leave=[{names}]")
    assigned = [place for place in places if isinstance(place, Assigned)]
    by_scheme: dict[tuple[int, str | None], tuple[Scheme, Inputs | None, list[str]]] = {}
    for tensor in assigned:
        if tensor.scheme is not None:
            key = id(tensor.scheme), tensor.inputs.quantizer if tensor.inputs is not None else None
            by_scheme.setdefault(key, (tensor.scheme, tensor.inputs, []))[2].append(tensor.layer)
    if not by_scheme:
        why = [f"leave={[*leave]} keeps them all"] if quantized else unread or ["convert the model first, lpq.convert"]
        raise CheckpointError(f"no layer has a quantized weight of [out, in]: {'; '.join(why)}")
    groups = tuple(Group(scheme, inputs, tuple(layers)) for scheme, inputs, layers in by_scheme.values())
    apart = [t.layer for t in assigned if t.entry.layer is not None and t.scheme is None]
    left = tuple(dict.fromkeys([*linear({layer for group in groups for layer in group.layers}), *apart]))
    check_alike(groups, left, siblings)
    changed = [t.layer for t in assigned if t.scheme and not t.inputs and t.entry.layer and t.entry.layer.x is not None]
    notes = [_note(changed)] if changed else []
    notes += [_note_of_experts(group) for group in groups if _not_readers(group)]
    return ExportPlan(tuple(assigned), groups, left, own_layout.files(groups, left), tuple(notes))


def _note(layers: Sequence[str]) -> str:
    return (
        f"engines will not encode the inputs of {number(len(layers), 'layer')} ({listed(layers)}), as training does: "
        "the layout has no place for their format, or needs their amax, which lpq.calibrate finds, and input_amax={…} "
        "gives"
    )


def _not_readers(group: Group) -> tuple[str, ...]:
    """The programs that would read these layers, were none of them experts."""
    has_experts = any(map(EXPERTS.fullmatch, group.layers))
    return tuple(name for name in group.not_experts if has_experts and name in group.readers)


def _note_of_experts(group: Group) -> str:
    experts = sorted(layer for layer in group.layers if EXPERTS.fullmatch(layer))
    return (
        f"{listed(_not_readers(group))} fails to load experts as {group.title} in the layout "
        f"{group.scheme.layout!r}, or gives them other values ({listed(experts)}), though not other layers: choose "
        "another layout for it"
    )


def _check_names(layers: set[str], input_amax: Mapping[str, Tensor | float] | None, leave: Sequence[str]) -> None:
    if "" in layers:
        raise CheckpointError("the model is one layer, and engines know layers by name: export nn.Sequential(model)")
    if isinstance(leave, str) or not isinstance(leave, Iterable) or not all(isinstance(name, str) for name in leave):
        one = f", as [{leave!r}]" if isinstance(leave, str) else ""
        raise CheckpointError(f"leave={leave!r}: it is a list of names or patterns of layers{one}")
    if not isinstance(input_amax, Mapping | None):
        raise CheckpointError(f"input_amax={input_amax!r}: it is a mapping of layers to numbers, as {{'q_proj': 4.0}}")
    for name, value in (input_amax or {}).items():
        one_tensor = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not one_tensor and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"input_amax has {brief(value)} for {name}, and no number or tensor of one element")
    if unknown := [name for name in input_amax or () if name not in layers]:
        raise CheckpointError(f"input_amax has {listed(unknown)}, and the model has no quantized layer of that name")
    if unused := [pattern for pattern in leave if not any(fnmatchcase(name, pattern) for name in layers)]:
        raise UnknownName(f"leave has {listed(unused)}, and the model has no quantized layer of that name")


def _assigned(
    entry: FileEntry, layout: str, input_amax: Mapping[str, Tensor | float] | None, leave: Sequence[str]
) -> Assigned | str:
    """The place of a tensor; or why the layout has none for it, in words that begin a sentence."""
    layer = entry.layer
    if layer is None or any(fnmatchcase(layer.name, pattern) for pattern in leave):
        return Assigned(entry)
    schemes = schemes_for(entry.side, layout)
    scheme = next((scheme for scheme in schemes if scheme.serves(entry.side)), None)
    quantized = f"{entry.name} is quantized as {entry.side}"
    if scheme is None:
        return f"{quantized}, for which the layout {layout!r} has no place{_elsewhere(entry.side, schemes)}"
    if scheme.unwritten is not None:
        return f"{quantized}, and lpq writes no {scheme.title} in the layout {layout!r}: {scheme.unwritten}"
    if entry.stored is None and entry.side.stochastic:
        return f"{quantized}, which rounds stochastically, to other codes in each step: round weights to nearest"
    rows, cols = entry.shape
    if (reason := scheme.why_not(rows, cols)) is not None:
        return f"{entry.name} is {rows}x{cols}, and {reason} in the layout {layout!r}: give it no recipe"
    if entry.part is not None and (reason := why_cut([(entry.side, 0)], rows, "rows")) is not None:
        return f"{entry.name} is a part of a matrix that is encoded as one, and {reason}: give it no recipe"
    x = layer.x.side("row") if layer.x is not None else None
    given = layer.known_amax() if input_amax is None else input_amax.get(layer.name)
    amax = None if given is None else torch.as_tensor(given, dtype=torch.float32).detach().cpu().reshape(())
    fitting = [i for i in scheme.inputs if x is not None and i.serves(x) and (i.part is None or amax is not None)]
    inputs = fitting[0] if fitting else None
    if inputs is None or inputs.part is None:
        return Assigned(entry, scheme, inputs)
    assert amax is not None
    if not (torch.isfinite(amax).item() and amax.item() > 0):
        return (
            f"{layer.name}: the amax of its inputs is {amax.item()}, and an engine would divide by it: call "
            "lpq.calibrate, or with delayed scaling train a step, or give input_amax={…}, or have engines measure by "
            "input_amax={}"
        )
    return Assigned(entry, scheme, inputs, amax)


def _elsewhere(side: Quantizer, schemes: Sequence[Scheme]) -> str:
    """List the quantizers for which the layout has a place, and the ways to files that engines read."""
    others = ", ".join(scheme.quantizer for scheme in schemes if scheme.unwritten is None)
    has = f"; it has one for: {others}" if others else ", nor for another option of this format"
    layouts = [
        name for name in summaries() if any(s.serves(side) and s.unwritten is None for s in schemes_for(side, name))
    ]
    if layouts:
        return f"{has}. Export with layout={' or '.join(map(repr, layouts))}"
    return f"{has}. Only layout='lpq' has a place for it: train with weights that another one has a place for"
