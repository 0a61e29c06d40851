"""Tokens a second and peak memory of training Hugging Face's Llama with a billion random weights on one GPU.

Everything is in bf16, the optimizer is fused AdamW, and the head is left as it is.

Each contender has a fresh model, one after the other, since a GPU does not hold them all. Each decoder layer is
compiled by itself, as users of large models do.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.contenders import Contender, compile_afresh, in_words, training_step
from benchmarks.shapes import Decoder
from benchmarks.timing import one_after_another


def lacking() -> str | None:
    """Why this cannot be measured here, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "llama trains Hugging Face's model, and transformers is not installed: pip install transformers"
    return None


def measure(everyone: list[Contender], shape: Decoder, steps: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Tokens a second of each contender, and the most memory that was allocated; after each, so far."""
    results: list[dict[str, Any]] = []
    for contender in everyone:
        results.append(_of(contender, shape, steps, device))
        yield {**asdict(shape), "ranks": 1, "results": [*results]}


def _of(contender: Contender, shape: Decoder, steps: int, device: torch.device) -> dict[str, Any]:
    compile_afresh()
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    counters.clear()
    result: dict[str, Any]
    try:
        timing, loss = one_after_another(_step(contender, shape, device), steps, device)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        speed = shape.tokens / timing.median
        result = {**timing.record("ms"), "tokens_per_second": speed, "loss": loss, "peak_bytes": peak, "failure": None}
        result["graph_breaks"] = sum(counters["graph_break"].values()) if contender.compiled else None
    except Exception as error:  # what one library cannot do is a result, and the others go on
        result = {"peak_bytes": None, "failure": in_words(error)}
    said = result["failure"] or f"{result['tokens_per_second']:,.0f} tokens/s"
    if result.get("graph_breaks"):
        said += f", {result['graph_breaks']} graph breaks"
    print(f"{contender.name}: {said}", file=sys.stderr)
    return {**contender.record(), **result}


def _step(contender: Contender, shape: Decoder, device: torch.device) -> Callable[[], Tensor]:
    """A step of training, which returns its loss."""
    model = made(contender, shape, device)
    torch.manual_seed(1)
    tokens = torch.randint(shape.words, (shape.batch, shape.sequence), device=device)

    def loss() -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return training_step(contender, model, loss)


def made(contender: Contender, shape: Decoder, device: torch.device) -> Any:
    """The model of a contender: all but its head converted, and each layer compiled if so wished."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.sequence,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).train()
    model.model = contender.convert(model.model)
    for layer in model.model.layers if contender.compiled else ():
        layer.compile(dynamic=False)
    return model
