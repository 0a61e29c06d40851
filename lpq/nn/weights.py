"""Preparing the weights of a converted model for sharding: how they are stored, and what is gathered of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor, nn

from lpq.core import QuantizedTensor
from lpq.core.derive import derives_col
from lpq.nn.linear import Linear
from lpq.recipes import RecipeError

if TYPE_CHECKING:
    from lpq.recipes import Schedule

Weights = Literal["high_precision", "quantized"]


def check_weights(model: nn.Module, weights: Weights, ranks: int | None, schedules: Mapping[str, Schedule]) -> None:
    """Refuse what cannot be prepared, before anything of the model is converted."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r}: it is one of {', '.join(map(repr, get_args(Weights)))}, or None")
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ValueError(f"ranks={ranks!r}: it is the number of ranks that will share the weights out, from 1 on")
    for name, schedule in schedules.items():
        module = model.get_submodule(name)
        found = [recipe.w if recipe is not None else None for _, recipe in schedule.pieces]
        if not isinstance(module, nn.Linear) or not any(found):
            continue
        if hasattr(module.weight, "device_mesh"):
            raise ValueError(f"{name}: its weight is sharded already; call lpq.convert before fully_shard")
        if weights == "quantized" and any(w != found[0] for w in found):
            raise RecipeError(
                f"{name}: its weight would be stored quantized, and the policy changes its format: {schedule}. Use "
                "weights='high_precision', or rules that quantize the weight alike"
            )


def prepare_weights(model: nn.Module, weights: Weights, ranks: int | None) -> None:
    """Have FSDP2 gather the weights of the converted layers in their quantized form, or store them so, too."""
    from lpq.distributed.fits import why_uncut
    from lpq.distributed.gathering import Gathering
    from lpq.distributed.shard import as_shard

    gathering = Gathering(model)
    for _, layer, shared in list(_layers(model)):
        if shared or hasattr(layer.weight, "device_mesh"):
            continue
        layer.gathering = gathering
        weight = layer.weight.detach()
        quantizer = layer.weight_quantizer() if weights == "quantized" else None
        if isinstance(weight, QuantizedTensor):
            continue
        if quantizer is not None and why_uncut(quantizer, weight.shape[0], ranks or 1) is None:
            weight = quantizer.quantize(weight, col=not derives_col(quantizer))
        else:
            weight = as_shard(weight)
        layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


def weight_notes(model: nn.Module, ranks: int | None) -> Iterator[tuple[str, str]]:
    """Of each layer whose weight was prepared, or could not be: what is stored and what is gathered.

    ``ranks``: how many will share the weights out, where they do not yet.
    """
    from lpq.distributed.fsdp import outermost, sites

    sharded = sites(outermost(model), "weight")
    for name, layer, shared in _layers(model):
        site = sharded.get(layer)
        if shared:
            yield name, "in high precision: the weight belongs to several modules"
        elif layer.gathering is None:
            continue
        elif site is not None:  # the layer itself may have the gathered weight at present
            yield name, _note(layer, site.param, ranks, site.refusal())
        elif sharded and not hasattr(layer.weight, "device_mesh"):
            yield name, _note_unsharded(layer)
        else:
            yield name, _note(layer, layer.weight, ranks, None)


def _note_unsharded(layer: Linear) -> str:
    """Of a weight that FSDP2 does not shard, though it shards others of the model."""
    form = f"stored as {layer.weight.quantizer}" if isinstance(layer.weight, QuantizedTensor) else "in high precision"
    return f"{form}, whole on every rank and not gathered: fully_shard ignores it, or got no module that it is in"


def _note(layer: Linear, weight: Tensor, ranks: int | None, refusal: str | None) -> str:
    from lpq.distributed.fits import sent_bytes, why_not, why_uncut
    from lpq.distributed.shard import WeightShard

    quantizer = layer.weight_quantizer()
    if quantizer is None:
        return "in high precision: the recipe quantizes nothing"
    rows, cols = weight.shape
    mesh = getattr(weight, "device_mesh", None)
    over = mesh.size(mesh.ndim - 1) if mesh is not None else ranks or 1
    local = getattr(weight, "_local_tensor", weight)
    stored = isinstance(local, QuantizedTensor)
    if not isinstance(local, QuantizedTensor | WeightShard):
        refusal = "the weight was replaced after lpq.convert"
    reason = refusal or (why_uncut if stored else why_not)(quantizer, rows, over)
    if reason is not None:
        return f"in high precision: {reason}"
    shares = [sent / (2 * rows * cols) for sent in sent_bytes(quantizer, rows, cols, weight.dtype)]
    kept = "stored and gathered" if stored else "gathered"
    return f"{kept} as {quantizer}: {shares[0]:.2f} of bf16 in forward, {shares[1]:.2f} in backward"


def _layers(model: nn.Module) -> Iterator[tuple[str, Linear, bool]]:
    """Every converted layer, and whether its weight is a parameter of another module, too."""
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module, owners[id(module.weight)] > 1
