"""Preparation of a converted model's weights for sharding: how they are stored, and in which form they are gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch import Tensor, nn

from lpq.distributed.shard import WeightShard, as_shard
from lpq.distributed.shardability import (
    operand_bytes,
    part_of,
    sent_bytes,
    why_in,
    why_not,
    why_not_of_shards,
    why_uncut,
    why_whole,
)
from lpq.formats import Quantizer
from lpq.formats.sections import is_stack
from lpq.nn.first_argument import check_choices
from lpq.nn.linear import Layer, weight_of
from lpq.nn.names import first_few
from lpq.operations.derived_operands import derives_col
from lpq.recipes import RecipeError, Schedule
from lpq.registry.showing import listed
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered, attribute_names
from lpq.tensor.inference import normal_tensors
from lpq.torch_private.hooks import hooks_of_tensor
from lpq.torch_private.tensors import PARAMETER, local_part

if TYPE_CHECKING:
    from lpq.torch_private.fsdp import Site

Weights = Literal["high_precision", "quantized"]
TAKEN = (attribute_names(QuantizedTensor) | attribute_names(WeightShard)) - {"replaced_by", PARAMETER}
"""The attributes that a prepared weight has for lpq and torch."""


def check_options(weights: Weights | None, ranks: int | None, earlier: int | None = None) -> None:
    """Refuse options that fit no model. ``earlier``: the number of ranks for which the model's weights are prepared
    already."""
    check_choices((None, *get_args(Weights)), weights=weights)
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ValueError(f"ranks={ranks!r}: it is the number of ranks of the shards, from 1 on")
    if weights is None and ranks not in (None, earlier):
        raise ValueError(
            f"ranks={ranks} is for weights that are prepared, and weights=None prepares none: add weights='quantized' "
            "or weights='high_precision', or leave ranks out"
        )


def check_weights(
    model: nn.Module, modules: Mapping[str, nn.Module], weights: Weights | None, ranks: int | None,
    schedules: Mapping[str, Schedule],
) -> None:  # fmt: skip
    """Refuse weights of these modules of a model that cannot be prepared, or are stored otherwise already."""
    layers = {
        name: cast("Layer", module)
        for name, module in modules.items()
        if type(module) is nn.Linear or (isinstance(module, Layer) and not module.transposed)
    }
    sharded, owners = _sharded(model, layers.values(), weights), owners_of(model)
    for name, module in layers.items():
        schedule = schedules[name]
        quantizers = [recipe.w if recipe is not None else None for _, recipe in schedule.pieces]
        if not any(quantizers) and not isinstance(module, Layer):
            continue
        weight = sharded[module] if module in sharded else weight_of(module)
        if any(quantizers) and hasattr(weight, "device_mesh"):
            from lpq.distributed.tensor_parallel import STYLED

            if STYLED in vars(module) and not isinstance(module, Layer):
                raise ValueError(
                    f"{name}: parallelize_module gave it a style of lpq.distributed.tensor_parallel before it had a "
                    "recipe, and such a style is set up for what it finds: build the model anew, call lpq.convert "
                    "first and parallelize_module after it. Torch's own styles work in either order"
                )
            if weights is not None:
                raise ValueError(
                    f"{name}: its weight is sharded already; call lpq.convert before fully_shard; where tensor "
                    "parallelism shards it, before parallelize_module, or without weights="
                )
        stored = _stored(weight)
        if stored is not None:
            _check_stored(name or type(module).__name__, stored, weight.shape, weights, ranks, schedule)
        elif weights is not None and "weight" in module._parameters and owners[id(weight)] < 2:  # others stay
            if (weights == "quantized" and any(quantizers)) or type(weight.detach()) is Tensor:
                check_replaced(name or type(module).__name__, weight)
            if weights == "quantized" and any(quantizers):
                _check_storable(name or type(module).__name__, schedule, {*quantizers})


def _check_storable(name: str, schedule: Schedule, quantizers: set[Quantizer | None]) -> None:
    """Refuse to store a weight quantized if the recipes give it more than one format."""
    if any(w is not None and (w.side("row").static or w.side("col").static) for w in quantizers):
        raise RecipeError(
            f"{name}: its weight would be stored quantized with a static scale, to which no write to it keeps: "
            f"{schedule}. Use weights='high_precision', or export the model and load it with lpq.load_quantized"
        )
    if len(quantizers) > 1:
        raise RecipeError(
            f"{name}: its weight would be stored quantized, and the policy changes its format: {schedule}. Use "
            "weights='high_precision', or rules that quantize the weight alike"
        )


def _check_stored(
    name: str, stored: Quantizer, shape: Sequence[int], weights: Weights | None, ranks: int | None, schedule: Schedule
) -> None:
    """Refuse a recipe that would change the format of a stored weight, at this step or a later one."""
    is_stored = f"{name}: its weight is stored as {stored}"
    anew = "before fully_shard, make it an ordinary weight: layer.weight = nn.Parameter(layer.weight.dequantize())"
    for _, recipe in schedule.pieces:
        if recipe is None or recipe.w != stored:
            form = f"as {recipe.w}" if recipe is not None else "in high precision"
            raise RecipeError(
                f"{is_stored}, which it keeps, and the policy wants it {form}: {schedule}. Use rules with w={stored}; "
                f"or, {anew}"
            )
    if weights == "high_precision":
        raise ValueError(
            f"{is_stored}, and weights='high_precision' wants it in high precision. Use weights='quantized' or None, "
            f"which leave it as it is; or, {anew}"
        )
    if weights is not None and ranks is not None and (why := why_uncut(stored, shape[0], ranks, is_stack(shape))):
        raise ValueError(f"{is_stored} and cannot be cut for ranks={ranks}: {why}. Use another number; or, {anew}")


def _sharded(model: nn.Module, layers: Iterable[Layer], weights: Weights | None) -> dict[nn.Module, Tensor]:
    """The weights that FSDP2 shards, as the optimizer has them: a layer itself may have the gathered one at present."""
    if weights is None and all(type(weight_of(layer)) is nn.Parameter for layer in layers):
        return {}  # for ordinary weights there is nothing to find out, and FSDP2 need not be imported
    from lpq.torch_private.fsdp import outermost, sites

    return {module: site.param for module, site in sites(outermost(model), "weight").items()}


def _stored(weight: Tensor) -> Quantizer | None:
    """The quantizer of a weight, whole or sharded, that is stored quantized."""
    local = local_part(weight)
    return local.quantizer if isinstance(local, QuantizedTensor) else None


def prepare_weights(model: nn.Module, weights: Weights, ranks: int | None) -> None:
    """Have FSDP2 gather the weights of the converted layers in their quantized form, or store them so, too."""
    from lpq.distributed.model_gathers import Gathering
    from lpq.distributed.weight_gather import Gather

    fsdp, models = Gathering(model), {layer.model: replace(layer.model) for _, layer, _ in _layers(model)}
    for name, layer, shared in list(_layers(model)):
        if shared or layer.transposed or "weight" not in layer._parameters or hasattr(layer.weight, "device_mesh"):
            continue
        layer.model = models[layer.model]
        layer.model.fsdp = fsdp
        fsdp.add(layer)
        layer.gather = gather = Gather(layer, layer.gather is not None and layer.gather.rounded)
        weight = layer.weight.detach()
        quantizer = layer.weight_quantizer() if weights == "quantized" else None
        if isinstance(weight, QuantizedTensor) or (quantizer is None and type(weight) is not Tensor):
            continue
        stack = is_stack(weight.shape)
        if quantizer is not None and why_uncut(quantizer, weight.shape[0], ranks or 1, stack) is None:
            gather.rounded = not weight.is_meta
            with normal_tensors(not weight.is_inference()):
                weight = quantizer.quantize(weight, col=not derives_col(quantizer), stack=stack)
            weight.title = f"{name}.weight".strip(".")
        else:
            weight = as_shard(weight)
        replace_parameter(layer, "weight", weight)
        layer.claim_weight()


def check_replaced(name: str, weight: Tensor) -> None:
    """Refuse a weight that has what ``replace_parameter`` would lose."""
    if any(hooks_of_tensor(weight)):
        raise ValueError(f"{name}: weights= replaces its weight, and loses hooks: add them after fully_shard")
    if not isinstance(weight, Gathered) and (names := sorted(vars(weight).keys() & TAKEN)):
        raise ValueError(f"{name}: weights= replaces its weight, and loses {listed(names)}: rename yours")


def replace_parameter(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter, with the gradient and the attributes that this has."""
    was: Any = getattr(module, key)
    parameter = nn.Parameter(tensor, requires_grad=was.requires_grad)
    parameter.grad = was.grad
    vars(parameter).update(was.given() if isinstance(was, Gathered) else vars(was))
    setattr(module, key, parameter)
    if not isinstance(was, Gathered):  # which notices it by itself
        was.replaced_by = "lpq.convert"  # for an optimizer's error


def why_none_stored(model: nn.Module, ranks: int | None) -> str | None:
    """Why no weight of the model is stored quantized; None if one is."""
    if any(_stored(weight_of(layer)) is not None for _, layer, _ in _layers(model)):
        return None
    notes = [f"{name or 'the model'}: {note}" for name, note in weight_notes(model, ranks)]
    return first_few(notes, "; ") or "no linear layer has a recipe"


def weight_notes(model: nn.Module, ranks: int | None) -> Iterator[tuple[str, str]]:
    """Yield, for each layer whose weight was prepared, or could not be, the form in which it is stored and gathered.
    ``ranks``: over how many ranks the weights will be sharded, where they are not yet.
    """
    from lpq.torch_private.fsdp import outermost, sites

    sharded = sites(outermost(model), "weight")
    for name, layer, shared in _layers(model):
        site = sharded.get(layer)
        if shared:
            yield name, f"{_form(layer.weight)}: the weight belongs to several modules"
        elif "weight" not in layer._parameters:  # a hook sets it before each forward
            yield name, "in high precision: the weight is no parameter but computed from others, as by pruning"
        elif layer.transposed:
            yield name, "in high precision: the weight is [in, out], and only one of [out, in] is gathered quantized"
        elif layer.gather is None:
            continue
        elif site is not None:  # the layer itself may have the gathered weight at present
            yield name, _note(layer, site.param, site.group.size(), site)
        elif sharded and not hasattr(layer.weight, "device_mesh"):
            why = "fully_shard ignores it, or got no module that it is in"
            yield name, f"{_form(layer.weight)}, whole on every rank and not gathered: {why}"
        else:
            yield name, _note(layer, layer.weight, ranks or 1, None)


def _form(weight: Tensor) -> str:
    stored = _stored(weight)
    return "in high precision" if stored is None else f"stored as {stored}"


def _note(layer: Layer, weight: Tensor, ranks: int, site: Site | None) -> str:
    quantizer, kind = layer.weight_quantizer(), _stored(weight)
    if kind is not None and kind != quantizer:
        return f"stored as {kind}, and its recipe wants {quantizer or 'high precision'}: it keeps its format"
    if quantizer is None:
        return "in high precision: the recipe quantizes nothing"
    local, refusal, part = local_part(weight), None, None
    shape, dtype, stays = local.shape, weight.dtype, False
    if site is not None:
        shape, dtype, stays, refusal, part = site.shape, site.dtype, site.stays, site.refusal, part_of(site)
    *_, rows, cols = shape
    if not isinstance(local, QuantizedTensor | WeightShard):
        refusal = "the weight was replaced after lpq.convert"
    cut = why_uncut if kind is not None else why_not
    reason = refusal or cut(quantizer, shape[0], ranks, is_stack(shape))
    if reason is None and part is not None:
        reason = why_not_of_shards(part, quantizer)
    if reason is not None:
        return f"in high precision: {reason}" if kind is None else f"{_form(weight)}, and cannot be gathered: {reason}"
    whole = why_whole(quantizer, shape[0], ranks, is_stack(shape))
    sizes = sent_bytes(quantizer, rows, cols, dtype, stays=stays, stored=kind is not None, whole=whole)
    in_bf16 = max(2 * rows * cols, 1)
    how = f"{'stored and ' if kind is not None else ''}gathered as {quantizer}: "
    if stays:
        how += f"{sizes[0] / in_bf16:.2f} of bf16, once for forward and backward"
    else:
        how += f"{sizes[0] / in_bf16:.2f} of bf16 in forward, {sizes[1] / in_bf16:.2f} in backward"
    gathers = {"": (True, True)} if stays else {" in forward": (True, False), " in backward": (False, True)}
    for (when, directions), count in zip(gathers.items(), sizes, strict=False):
        operands = operand_bytes(quantizer, rows, cols, dtype, *directions)
        if (reason := why_in(whole, directions)) is not None:
            how += f"; in high precision{when}: {reason}"
        elif operands > count and ranks > 1:
            how += f"; in high precision{when}, for its operands would be {operands / in_bf16:.2f}"
    return how


def _layers(model: nn.Module) -> Iterator[tuple[str, Layer, bool]]:
    """Every converted layer, and whether its weight is a parameter of another module, too."""
    owners = owners_of(model)
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            yield name, module, owners[id(module._parameters.get("weight"))] > 1  # nothing is computed, as by pruning


def owners_of(model: nn.Module) -> Counter[int]:
    """The number of modules that have each parameter, by its ``id``."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
