"""``LpqConfig``: transformers' ``from_pretrained`` converts the model that it loads, and ``config.json`` names how.

Importing this module imports transformers and registers ``LpqConfig`` there, so that a directory whose ``config.json``
names it is loaded converted. Files hold weights in high precision, as an ordinary model's do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lpq import recipes
from lpq.checkpoint.description import Description, check_fields, formats_of, origins
from lpq.checkpoint.errors import CheckpointWarning
from lpq.checkpoint.model import PREFIX, Model
from lpq.integrations.decoded import METHOD, Decoded, attach
from lpq.nn import convert
from lpq.nn.conversion import RECORD, Conversion
from lpq.nn.expert_stacks import names_in_files
from lpq.nn.sharded_weights import Weights, check_options
from lpq.registry.warning import warn

if TYPE_CHECKING:
    from lpq.recipes import Include, PolicyLike, Steps

__all__ = ["LpqConfig"]

FIELDS: dict[str, tuple[type, ...]] = {
    "policy": (dict,), "steps": (int, str, type(None)), "weights": (str, type(None)), "ranks": (int, type(None)),
    "formats": (dict,),
}  # fmt: skip
"""The types that each field may have in ``config.json``."""


@register_quantization_config(METHOD)
class LpqConfig(QuantizationConfigMixin):
    """How ``lpq.convert`` converts the model that ``from_pretrained(…, quantization_config=…)`` loads."""

    def __init__(
        self,
        policy: PolicyLike,
        *,
        steps: Steps = None,
        include: Include = None,
        weights: Weights | None = None,
        ranks: int | None = None,
    ) -> None:
        """Take the arguments of ``lpq.convert``, and refuse those that it refuses for any model."""
        check_options(weights, ranks)
        self.quant_method: Any = METHOD
        self.policy = recipes.policy(policy, include=include)
        self.steps, self.weights, self.ranks = steps, weights, ranks
        self._model: weakref.ref[nn.Module] | None = None

    def describe(self, model: nn.Module) -> None:
        """Describe this model from now on as it is, converted anew or calibrated."""
        self._model = weakref.ref(model)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data, for ``config.json``, with the plugins that bring the formats."""
        model = self._model() if self._model is not None else None
        now = model.__dict__.get(RECORD) if model is not None else None
        if isinstance(now, Conversion) and now.policy != self.policy:
            policy, steps, weights, ranks = now.policy, now.steps, now.weights, now.ranks
        else:
            policy, steps, weights, ranks = self.policy, self.steps, self.weights, self.ranks
        quantizers = [q for r in policy.rules if r.recipe for q in r.recipe.operands.values()]
        formats = origins({name for quantizer in quantizers for name in formats_of(quantizer)})
        return {
            "quant_method": self.quant_method, "policy": policy.to_dict(), "steps": steps, "weights": weights,
            "ranks": ranks, "formats": formats,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Copies, as of a model's configuration, describe no model."""
        return {**vars(self), "_model": None}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **others: Any) -> Any:
        """Read what ``config.json`` has."""
        check_fields(
            "quantization_config", dict(config_dict), FIELDS, "pass LpqConfig(…), or leave what it wrote as it is"
        )
        conversion = {"policy": config_dict["policy"], "steps": config_dict["steps"]}
        description = Description(conversions={"": conversion}, formats=config_dict["formats"])
        policy, steps = Description.read(description.data()).policies()[""]
        config = cls(policy, steps=steps, weights=config_dict["weights"], ranks=config_dict["ranks"])
        return (config, others) if return_unused_kwargs else config


@register_quantizer(METHOD)
class LpqQuantizer(Decoded, HfQuantizer):
    """Converts a model after it was loaded as any other is."""

    def __init__(self, quantization_config: LpqConfig, **others: Any) -> None:
        super().__init__(quantization_config, pre_quantized=True)  # so files are read as any others
        self._again, self._files = bool(others.get("pre_quantized")), list[str]()

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Cast loaded tensors as without a quantizer."""
        return dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **others: Any) -> None:
        if "checkpoint_files" not in others:
            raise ImportError(
                f"LpqConfig needs transformers 5: {transformers.__version__} does not tell which files it loads, and "
                "what layers remembered would be lost. Load the model without it, and call lpq.convert(model, …)"
            )
        self._files = others["checkpoint_files"] or []

    def postprocess_model(self, model: Any, **_: Any) -> None:
        """Convert the model, as ``lpq.convert`` does; its configuration then names the conversion, too."""
        config: Any = self.quantization_config
        if hasattr(model, "hf_device_map"):
            raise ValueError(
                f"device_map spreads the model over {sorted(map(str, set(model.hf_device_map.values())))}, and hooks "
                "compute its layers: lpq converts a model on one device. Leave device_map out, and shard with FSDP2"
            )
        del model.hf_quantizer, model.quantization_method  # as long as they are there, it may not be cast or sharded
        model.is_quantized = False
        model.config.quantization_config = config
        config.describe(model)
        convert(model, config.policy, steps=config.steps, weights=config.weights, ranks=config.ranks)
        if self._again and config.weights == "quantized":
            warn(
                "the files hold decoded values of weights that were stored quantized, and encoding these again may "
                "give other bits: lpq.checkpoint keeps the codes",
                CheckpointWarning,
            )
        _remember(model, self._files)
        attach(model)


@torch.no_grad()
def _remember(model: Any, files: list[str]) -> None:
    """Read the statistics that layers remembered; ``from_pretrained`` had no buffers for them yet."""
    memories = {name.removeprefix(PREFIX): buffer for name, buffer in Model(model).memories().items()}
    others = names_in_files(model, [*memories])
    memories = {others.get(name, name): buffer for name, buffer in memories.items()}
    prefix = f"{model.base_model_prefix}."  # files may be of a model with a head, and this one without, or the reverse
    for path in files if memories else ():
        if Path(path).suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                there = set(file.keys())
                for name, buffer in memories.items():
                    names = [n for n in (name, prefix + name, name.removeprefix(prefix)) if n in there]
                    if names:
                        buffer.copy_(file.get_tensor(names[0]))
    for _, layer in Model(model).stateful_layers():
        layer.decide_fresh()
