"""The files of inference engines: the interface between format plugins, with schemes, and layout plugins.

A **layout** is one way of naming a model's tensors and of describing them in JSON. A **scheme** is how one operand of a
format lies in one layout. A format lists schemes, a layout makes JSON of those that a model uses and finds them again.
Nothing here imports torch: tensors, quantizers and storages are ``Any``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

JSON = Mapping[str, Any]
Holds = Literal["codes", "scales", "exponents", "value"]
Remark = Callable[[int, int, str], str | None]
"""A limit of readers for weights of ``rows`` x ``cols``, in a model of this dtype (``float32``), with a remedy; None:
the limit does not apply. ``lpq.export`` returns it as a note, with the names of the layers."""


def decoded_in_bf16(rows: int, cols: int, dtype: str) -> str | None:
    """A ``Remark``: on weights that the package compressed-tensors decodes into bf16, whatever the model's dtype.

    Args:
        rows: The rows of a weight, which are of no consequence.
        cols: Its columns, likewise.
        dtype: The dtype of the model.
    """
    if dtype == "bfloat16":
        return None
    return (
        f"transformers decodes these weights into bfloat16, and with inputs in {dtype} its first product fails: "
        "load the files with from_pretrained(…, dtype=torch.bfloat16), or export with dtype=torch.bfloat16 (lpq export "
        "--dtype bfloat16), which rounds weights before they are encoded"
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a layer in an engine's files."""

    name: str
    """Beside the name of the layer: ``weight_scale``."""
    others: tuple[str, ...] = ()
    """The names that other programs give the tensor; it is also read by these names."""
    dtype: Any
    """Its ``torch.dtype``."""
    shape: Callable[[int, int], tuple[int, ...]]
    """Its shape for a weight of ``rows`` x ``cols``."""
    holds: Holds
    """``codes``: elements. ``scales``: floats, finite. ``exponents``: powers of two as bytes, where 255 is NaN.
    ``value``: one float of the whole weight or input, finite and more than 0, which must be equal in layers that
    engines fuse."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How engines encode the input of a layer before they multiply it."""

    serves: Callable[[Any], bool]
    """Whether that is what this quantizer, of the row operand of ``x``, does."""
    quantizer: str
    """The text of one that does it."""
    config: JSON
    """Its part of a layout's JSON, over ``Scheme.config``."""
    part: Part | None = None
    """Where a scale lies that engines do not measure; None: they measure all."""
    write: Callable[[Any], Any] | None = None
    """Makes the tensor from the amax of inputs, which is fp32 and 0-dimensional."""
    read: Callable[[Any], Any] | None = None
    """Computes the amax from which ``write`` makes this tensor."""
    readers: tuple[str, ...] = ()
    """The programs that read the scheme with these inputs, and not without."""
    not_readers: tuple[str, ...] = ()
    """The readers of the scheme that fail to load it with these inputs."""
    not_experts: tuple[str, ...] = ()
    """The readers that fail to load experts with these inputs, or give them other values."""
    remark: Remark | None = None


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one operand of a format, the weight in ``fprop``, lies in the files of one layout."""

    layout: str
    """The name of the layout."""
    title: str
    """Its name in reports."""
    serves: Callable[[Any], bool]
    """Whether the scheme is for operands of this quantizer."""
    quantizer: str
    """The text of the quantizer that reads any of these files."""
    config: JSON
    """Its part of the layout's JSON, where inputs are in high precision."""
    parts: tuple[Part, ...]
    write: Callable[[Any], Sequence[Any]]
    """The tensors of a ``Storage``, in the order of ``parts``."""
    read: Callable[[Any, Sequence[Any]], Sequence[Any]]
    """The buffers that a quantizer (which it serves) has for these tensors, in the order of its layout. A
    ``ValueError`` gives the reason in words if it has none."""
    inputs: tuple[Inputs, ...] = ()
    """The ways in which engines may encode inputs, the preferred first; if none is possible, inputs stay in high
    precision."""
    readers: tuple[str, ...] = ()
    """The programs that read such files right, as ``("vLLM",)``. ``lpq.export`` returns the programs that read all
    layers."""
    not_experts: tuple[str, ...] = ()
    """The readers that fail to load experts whose inputs are in high precision, or give them other values."""
    unwritten: str | None = None
    """The reason why files of others are read so and none are written, in words, and what to do; None: they are."""
    why_not: Callable[[int, int], str | None] = lambda rows, cols: None
    """Why weights of ``rows`` x ``cols`` cannot have this scheme, in words; None: they can."""
    remark: Remark | None = None


@dataclass(frozen=True)
class Group:
    """Layers that a layout's JSON describes together."""

    scheme: Scheme
    inputs: Inputs | None
    layers: tuple[str, ...]
    """Their names."""

    @property
    def config(self) -> dict[str, Any]:
        """Their part of the layout's JSON."""
        return {**self.scheme.config, **(self.inputs.config if self.inputs is not None else {})}

    @property
    def readers(self) -> tuple[str, ...]:
        """The programs that read them right."""
        if self.inputs is None:
            return self.scheme.readers
        every = (*self.scheme.readers, *self.inputs.readers)
        return tuple(name for name in every if name not in self.inputs.not_readers)

    @property
    def not_experts(self) -> tuple[str, ...]:
        """The readers that would fail to load them if they were experts."""
        return (self.scheme if self.inputs is None else self.inputs).not_experts

    @property
    def title(self) -> str:
        """The way in which they lie, in reports."""
        return f"{self.scheme.title}, inputs {'in high precision' if self.inputs is None else self.inputs.quantizer}"


Described = Callable[[str], tuple[Scheme, Inputs | None] | None]
"""How a layer with this name lies in files; None: in high precision."""


class Layout(ABC):
    """The JSON of one layout."""

    @abstractmethod
    def files(self, groups: Sequence[Group], left: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The JSON beside the tensors, by the names of files; for ``config.json`` what is added to it.

        ``left``: the layers in high precision that an engine would take for quantized ones. A layer that it cannot
        describe is a ``LayoutError``.
        """

    @abstractmethod
    def read(self, files: Mapping[str, JSON], schemes: Sequence[Scheme]) -> Described | None:
        """How the layers of a model lie whose JSON files these are; None: these are of another layout.

        A layer that none of ``schemes``, the schemes of this layout, describes is a ``LayoutError``.
        """
