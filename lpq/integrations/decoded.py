"""Saving the decoded values of weights that are stored quantized, by transformers' ``save_pretrained``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from lpq.nn.first_argument import check_model
from lpq.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch import Tensor, nn

METHOD = "lpq"
"""The name under which transformers finds lpq's quantizer."""


def attach(model: nn.Module) -> nn.Module:
    """Have ``save_pretrained`` write decoded values of weights that are stored quantized, and return the model.

    ``LpqCallback`` does it, too.

    Args:
        model: A model of transformers, or one that holds some, as sentence-transformers' do. Save a sharded one without
            this: what accelerate gathers is decoded already.
    """
    check_model(model)
    from transformers import PreTrainedModel

    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            _attach_one(each)
    return model


def _stores(model: nn.Module) -> bool:
    return any(isinstance(weight, QuantizedTensor) for weight in model.parameters())


def _attach_one(model: Any) -> None:
    before = getattr(model, "hf_quantizer", None)
    if _stores(model):
        if not (before is None or isinstance(before, Decoded)):
            raise ValueError(
                f"{type(before).__name__} saves this model, of which lpq stores weights quantized, and transformers "
                "has one quantizer for a model: convert it without weights='quantized'"
            )
        from transformers.quantizers.base import HfQuantizer

        cls: Any = type("LpqQuantizer", (Decoded, HfQuantizer), {})
        model.hf_quantizer = cls(cls)
    elif isinstance(before, Decoded):
        del model.hf_quantizer  # from before it was sharded


class Decoded:
    """A quantizer for transformers, with all methods that it needs for a model that is trained and saved as any
    other."""

    quant_method = METHOD
    is_trainable = is_qat_trainable = is_compileable = True

    def is_serializable(self, safe_serialization: bool = True) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        """Nothing: transformers 4 has no such method of its own, nor the next one."""

    _process_model_after_weight_loading = _process_model_before_weight_loading

    def get_state_dict_and_metadata(
        self, model: nn.Module, safe_serialization: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The model's tensors, in high precision."""
        state = model.state_dict()
        if any(isinstance(tensor, DTensor) for tensor in state.values()):
            raise RuntimeError(
                "the model was sharded after it was made ready to be saved as a whole: call "
                "lpq.integrations.transformers.attach(model) after sharding, or give the Trainer LpqCallback()"
            )
        return {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in state.items()}, {}
