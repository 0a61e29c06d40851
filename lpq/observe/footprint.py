"""Bytes of a model's weights: on each rank, in the optimizer, on the wire; for models on the meta device, too.

Every number follows from tensors and declared layouts, so that nothing has to be allocated or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lpq import registry
from lpq.distributed.alike import converted
from lpq.distributed.shardability import operand_bytes, sent_bytes, why_not, why_uncut, why_whole
from lpq.formats import Quantizer
from lpq.formats.sections import is_stack
from lpq.nn import Layer
from lpq.nn.first_argument import check_model, check_whole
from lpq.observe.readings import NumericsError
from lpq.operations.derived_operands import derives_col
from lpq.optim import QuantizedStates
from lpq.optim.adamw import FIRST, SECOND
from lpq.optim.states import StateForm
from lpq.optim.stored_size import stored_bytes, why_stays
from lpq.registry.showing import brief
from lpq.tensor import QuantizedTensor, quantize
from lpq.torch_private.tensors import local_part

FP32 = torch.float32.itemsize
BF16 = torch.bfloat16.itemsize
WANTED = {True: ((True, False), (False, True)), False: ((True, True),)}
"""The operands, row and column, that each gather takes, for a block that is resharded after forward or is not."""


@dataclass(frozen=True)
class Memory:
    """The memory of a model's parameters under FSDP2, in bytes; of the rank that holds most."""

    ranks: int
    parameters: int = 0
    """How many numbers the model has."""
    converted: int = 0
    """How many parameters are stored, or gathered, quantized."""
    quantized: int = 0
    """The bytes of these parameters in their quantized form, in all directions that are kept, on all ranks together."""
    weights: int = 0
    """The bytes of the parameters that a rank stores."""
    masters: int = 0
    """The bytes of fp32 masters of the weights that are stored quantized, as ``lpq.optim.MasterWeights`` has them."""
    gradients: int = 0
    """The bytes of a rank's gradients once they are reduced."""
    moments: int = 0
    """The bytes of the two moments of Adam, stored in formats or not."""
    forward: int = 0
    """The bytes gathered in a forward: whole weights, once for each gather."""
    backward: int = 0
    """The bytes gathered in a backward: whole weights, once for each gather."""
    at_once: int = 0
    """The most gathered bytes that a rank holds at a time: the parameters of no block, and the largest block."""

    @property
    def total(self) -> int:
        """The bytes that a rank holds from step to step, and the bytes of its gradients."""
        return self.weights + self.masters + self.gradients + self.moments

    @property
    def share(self) -> float | None:
        """The quantized form of the converted weights as a fraction of the same in bf16; None if there are none."""
        return self.quantized / (BF16 * self.converted) if self.converted else None

    def __add__(self, other: Memory) -> Memory:
        names = [f.name for f in fields(self) if f.name != "ranks"]
        return Memory(self.ranks, **{name: getattr(self, name) + getattr(other, name) for name in names})


def memory(
    model: nn.Module,
    ranks: int | None = None,
    *,
    blocks: Iterable[nn.Module] = (),
    param_dtype: torch.dtype | None = None,
    moments: Mapping[str, str | Quantizer] | None = None,
) -> Memory:
    """Count the bytes of the parameters of a model that FSDP2 shards and AdamW trains.

    Args:
        model: A model, converted or not, with ``weights=…`` or without. It may be sharded already.
        ranks: The number of ranks that share it; None: as it is sharded, or one rank.
        blocks: The modules on which ``fully_shard`` is called before it is called on the model. These are gathered once
            more in backward.
        param_dtype: The ``param_dtype`` of FSDP2's ``MixedPrecisionPolicy``; None: each parameter is gathered in its
            own dtype.
        moments: The formats of AdamW's states by their names, as ``QuantizedStates`` takes them; a state that is not
            named stays in high precision.
    """
    check_model(model)
    check_whole("memory", 1, NumericsError, ranks=1 if ranks is None else ranks)
    if not isinstance(param_dtype, torch.dtype | None):
        raise TypeError(f"memory: param_dtype={param_dtype!r}: it is a dtype, such as torch.bfloat16, or None")
    given: Any = {} if moments is None else moments.items() if isinstance(moments, Mapping) else [(None, moments)]
    if not all(name in (FIRST, SECOND) and isinstance(form, str | Quantizer) for name, form in given):
        raise TypeError(f"memory: moments={brief(moments)}: it has a format for {FIRST!r}, for {SECOND!r}, or for both")
    if not isinstance(blocks, Iterable):
        raise TypeError(f"memory: blocks is a {type(blocks).__name__}: it lists modules of the model, as [model.layer]")
    for layer in converted(model):
        if getattr(layer, "layouts", None) is not None or getattr(layer, "dispatched", None) is not None:
            raise ValueError(f"memory counts what FSDP2 shards: call it before a style shares out {layer.title}")
    forms = _forms(tuple(given)) if given else {}
    over = ranks or next((p.device_mesh.size(-1) for p in model.parameters() if isinstance(p, DTensor)), 1)
    gathered = (m for m in model.modules() if isinstance(m, Layer) and m.gather is not None)
    layers = {id(m._parameters.get("weight")): m for m in gathered}
    names = {id(p): name for name, p in model.named_parameters()}
    rest = {id(p): p for p in model.parameters()}
    parts = []
    for block in blocks:
        if not isinstance(block, nn.Module) or any(id(p) not in names for p in block.parameters()):
            raise TypeError(f"memory: blocks has a {type(block).__name__} that is not in the model: list its modules")
        own = [rest.pop(id(p)) for p in block.parameters() if id(p) in rest]
        inside = (_of(p, over, True, param_dtype, layers.get(id(p)), names[id(p)], forms) for p in own)
        parts.append(sum(inside, Memory(over)))
    root = (_of(p, over, False, param_dtype, layers.get(id(p)), names[id(p)], forms) for p in rest.values())
    largest = max((part.at_once for part in parts), default=0)
    total = sum([*parts, *root], Memory(over))
    return Memory(**{**total.__dict__, "at_once": total.at_once - sum(part.at_once for part in parts) + largest})


def held_bytes(tensor: Tensor) -> int:
    """Count the bytes that this rank holds of a tensor.

    Args:
        tensor: An ordinary tensor, or one that is sharded, stored quantized, or both.
    """
    part = local_part(tensor)
    return part.held_bytes if isinstance(part, QuantizedTensor) else part.nbytes


def _of(
    p: Tensor, ranks: int, resharded: bool, dtype: torch.dtype | None, layer: Layer | None, name: str,
    forms: Mapping[str, StateForm],
) -> Memory:  # fmt: skip
    """The memory of one parameter."""
    stored = isinstance(local_part(p), QuantizedTensor)
    quantizer = layer.weight_quantizer() if layer is not None else None
    if quantizer is not None:
        reason = (why_uncut if stored else why_not)(quantizer, p.shape[0], ranks, is_stack(p.shape))
        if reason is not None and stored:
            raise ValueError(f"{name} is stored as {quantizer}, and {reason}: lpq.convert(…, ranks={ranks})")
        quantizer = quantizer if reason is None else None
    trained = p.requires_grad
    kept = p if isinstance(p, DTensor) or not p.dim() else p.detach()[: -(-p.shape[0] // ranks)]
    elements, here = p.numel(), local_part(kept).numel()  # of the first rank, which holds most
    updated = torch.float32 if stored else p.dtype
    gathers = [_gathered(p, ranks * here, dtype or p.dtype, quantizer, *wanted) for wanted in WANTED[resharded]]
    forward, backward = gathers[0], gathers[-1] if resharded else 0
    if quantizer is not None:
        *count, rows, cols = p.shape
        whole = why_whole(quantizer, p.shape[0], ranks, is_stack(p.shape))
        both = sent_bytes(quantizer, rows, cols, dtype or p.dtype, stays=not resharded, stored=stored, whole=whole)
        forward, backward = (math.prod(count) * of_each for of_each in both)
    return Memory(
        ranks,
        parameters=elements,
        converted=elements if quantizer is not None else 0,
        quantized=_quantized(quantizer, p.shape, p.dtype) if quantizer is not None else 0,
        weights=held_bytes(kept),
        masters=FP32 * here if stored and trained else 0,
        gradients=p.dtype.itemsize * here if trained else 0,
        moments=sum(_moment(p, here, updated, forms.get(name)) for name in (FIRST, SECOND)) if trained else 0,
        forward=forward if ranks > 1 else 0,
        backward=backward if ranks > 1 else 0,
        at_once=max(gathers) if ranks > 1 else 0,
    )


@registry.cached
def _forms(moments: tuple[tuple[str, str | Quantizer], ...]) -> Mapping[str, StateForm]:
    """How these states of AdamW are stored; a format that does not serve is an error."""
    return QuantizedStates(torch.optim.AdamW([torch.zeros(1, dtype=torch.float32)]), **dict[str, Any](moments)).forms


def _moment(p: Tensor, here: int, dtype: torch.dtype, form: StateForm | None) -> int:
    """The bytes of a moment of ``here`` elements of a parameter: of the first rank's shard."""
    if form is None or why_stays(form.quantizer, p.shape, dtype) is not None:
        return here * dtype.itemsize
    shard = here // p.shape[-1], p.shape[-1]
    return stored_bytes(form.quantizer, shard, dtype)


def _gathered(p: Tensor, padded: int, dtype: torch.dtype, quantizer: Quantizer | None, row: bool, col: bool) -> int:
    """The bytes of a parameter that is gathered: of these operands, if it is quantized, or of ``padded`` elements."""
    if quantizer is not None:
        *count, rows, cols = p.shape
        return math.prod(count) * operand_bytes(quantizer, rows, cols, dtype, row, col)
    return padded * dtype.itemsize


@registry.cached
def _quantized(quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype) -> int:
    """The bytes of a whole weight that is quantized, with all that cannot be derived from the rest."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    return quantize(quantizer, whole, col=not derives_col(quantizer), stack=is_stack(shape)).held_bytes
