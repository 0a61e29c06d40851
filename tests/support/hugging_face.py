"""Small models of Hugging Face's transformers, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def small(
    name: str, dtype: torch.dtype = torch.float32, *, hidden: int = 64, inner: int = 64, layers: int = 1,
    experts: int = 4, seed: int = 0, **more: Any,
) -> Any:  # fmt: skip
    """A language model with the same weights each time, for 64 words.

    Args:
        name: ``Llama``, or one with experts: ``Mixtral``, ``Qwen3Moe``, ``GptOss``, ``Llama4``
        more: other arguments of its configuration
    """
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": hidden // 2, "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if name == "Qwen3Moe":
        sizes |= {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": 2}
    elif name == "Llama4":
        sizes |= {"intermediate_size_mlp": inner, "interleave_moe_layer_step": 1, "pad_token_id": 0}
        sizes |= {"num_local_experts": experts}
    elif name != "Llama":
        sizes |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    config = getattr(transformers, "Llama4TextConfig" if name == "Llama4" else f"{name}Config")
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config(**{**sizes, **more})).to(dtype)
