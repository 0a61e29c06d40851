"""Tokens a second and peak memory of training Hugging Face's Llama with random weights.

On one GPU everything is in bf16. Under torchrun accelerate shards the model by FSDP2: fp32 shards, bf16 compute. The
optimizer is fused AdamW, and the head is left as it is.

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
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.contenders import Contender, compile_afresh, in_words, training_step
from benchmarks.shapes import Decoder
from benchmarks.timing import one_after_another


def lacking(ranks: int = 1) -> str | None:
    """Why this cannot be measured here, or None."""
    for needed in ("transformers", *(["accelerate"] if ranks > 1 else [])):
        if importlib.util.find_spec(needed) is None:
            return f"llama trains Hugging Face's model, and {needed} is not installed: pip install {needed}"
    return None


def measure(everyone: list[Contender], shape: Decoder, steps: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Tokens a second of each contender, and the most memory that was allocated; after each, so far."""
    results: list[dict[str, Any]] = []
    accelerator = _accelerator() if ranks() > 1 else None
    for contender in everyone:
        results.append(_of(contender, shape, steps, device, accelerator))
        yield {**asdict(shape), "ranks": ranks(), "results": [*results]}


def ranks() -> int:
    """How many share the model out."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _of(contender: Contender, shape: Decoder, steps: int, device: torch.device, accelerator: Any) -> dict[str, Any]:
    compile_afresh()
    if accelerator is not None:
        accelerator.free_memory()  # or it keeps the model before
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    counters.clear()
    result: dict[str, Any]
    try:
        timing, loss = one_after_another(_step(contender, shape, device, accelerator), steps, device)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        speed = shape.tokens / timing.median
        result = {**timing.record("ms"), "tokens_per_second": speed, "loss": loss, "peak_bytes": peak, "failure": None}
        result["graph_breaks"] = sum(counters["graph_break"].values()) if contender.compiled else None
    except Exception as error:  # what one library cannot do is a result, and the others go on
        result = {"peak_bytes": None, "failure": in_words(error)}
    said = result["failure"] or f"{result['tokens_per_second']:,.0f} tokens/s"
    if result.get("graph_breaks"):
        said += f", {result['graph_breaks']} graph breaks"
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{contender.name}: {said}", file=sys.stderr)
    return {**contender.record(), **result}


def _step(contender: Contender, shape: Decoder, device: torch.device, accelerator: Any) -> Callable[[], Tensor]:
    """A step of training, which returns its loss."""
    model = made(contender, shape, device)
    if accelerator is not None:
        return _accelerated(contender, model, shape, device, accelerator)
    model.to(torch.bfloat16)
    torch.manual_seed(1)
    tokens = torch.randint(shape.words, (shape.batch, shape.sequence), device=device)

    def loss() -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return training_step(contender, model, loss)


def _accelerator() -> Any:
    """Shards each decoder layer by FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    return Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)


def _accelerated(
    contender: Contender, model: Any, shape: Decoder, device: torch.device, accelerator: Any
) -> Callable[[], Tensor]:
    """The same of a model that accelerate shards."""
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(shape.words, (shape.batch, shape.sequence), device=device)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def made(contender: Contender, shape: Decoder, device: torch.device) -> Any:
    """The model of a contender in fp32: all but its head converted, and each layer compiled if so wished."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.sequence,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config)
    model.train()
    model.model = contender.convert(model.model)
    for layer in model.model.layers if contender.compiled else ():
        layer.compile(dynamic=False)
    return model
