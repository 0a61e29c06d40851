"""Tokens a second and peak memory of training Hugging Face's Llama, or its Mixtral, with random weights.

On one GPU everything is in bf16. Under torchrun FSDP2 shards the model, a unit for each decoder layer: fp32 shards,
bf16 compute. The optimizer is fused AdamW, and the head is left as it is.

Each contender has a fresh model, one after the other, since a GPU does not hold them all. Each decoder layer is
compiled by itself, as users of large models do.

Beside the time of a step stand the host's, which launches it, and the GPU's, without what is sent: the larger one of
the two decides.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.contenders import compile_afresh, training_step
from benchmarks.profiles import busy, functions
from benchmarks.shapes import Decoder
from benchmarks.stack import Failed, gathered_in, together
from benchmarks.timing import launching, one_after_another
from lpq.bench.contenders import Contender, in_words

PROFILED = 10
"""Steps in which it is looked where the host's time goes."""


def lacking(liger: bool) -> str | None:
    """Why this cannot be measured here, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "llama trains Hugging Face's model, and transformers is not installed: pip install transformers"
    if liger and importlib.util.find_spec("liger_kernel") is None:
        return "--liger takes functions of Liger, which is not installed: pip install liger-kernel"
    return None


def measure(
    everyone: list[Contender],
    shape: Decoder,
    steps: int,
    device: torch.device,
    *,
    profile: bool = False,
    liger: bool = False,
) -> Iterator[dict[str, Any]]:
    """Tokens a second of each contender, the times of host and GPU, and the most memory that was allocated; after each,
    so far. ``profile``: print where the host's time goes, too. ``liger``: all have Liger's rotary positions and its
    loss."""
    if liger:
        kind = "mixtral" if shape.experts else "llama"
        apply = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind}")
        apply(rms_norm=False, swiglu=False)
    peers = dist.new_group(backend="gloo") if ranks() > 1 else None
    results: list[dict[str, Any]] = []
    for contender in everyone:
        results.append(_of(contender, shape, steps, device, peers, profile))
        yield {**asdict(shape), "ranks": ranks(), "results": [*results]}


def ranks() -> int:
    """How many share the model out."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _of(
    contender: Contender, shape: Decoder, steps: int, device: torch.device, peers: dist.ProcessGroup | None,
    profile: bool,
) -> dict[str, Any]:  # fmt: skip
    compile_afresh()
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    counters.clear()
    result: dict[str, Any]
    found = ""
    try:
        with _all(peers):
            step = _step(contender, shape, device)
        with _all(peers):
            timing, loss = one_after_another(step, steps, device)
            peak = torch.cuda.max_memory_allocated() if on_gpu else None
            host, gpu = (launching(step) * 1e3, busy(step) * 1e3) if on_gpu else (None, None)
            gathered = gathered_in(step, contender) if peers is not None else None
            found = functions(step, steps=PROFILED, warm=1, order="tottime") if profile else ""
        speed = shape.tokens / timing.median
        result = {**timing.record("ms"), "tokens_per_second": speed, "loss": loss, "peak_bytes": peak, "failure": None}
        result |= {"host_ms": host, "gpu_ms": gpu, "gathered_bytes": gathered}
        result["graph_breaks"] = sum(counters["graph_break"].values()) if contender.compiled else None
    except Exception as error:  # what one library cannot do is a result, and the others go on
        result = {"peak_bytes": None, "failure": str(error) if isinstance(error, Failed) else in_words(error)}
    said = result["failure"] or f"{result['tokens_per_second']:,.0f} tokens/s"
    if result.get("host_ms"):
        best, peak = shape.tokens / result["fastest_ms"] * 1e3, result["peak_bytes"] / 2**30
        said += f" (best {best:,.0f}), {result['ms']:.0f} ms, host {result['host_ms']:.0f}, GPU {result['gpu_ms']:.0f}"
        said += f", {peak:.1f} GiB"
    if result.get("graph_breaks"):
        said += f", {result['graph_breaks']} graph breaks"
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{contender.name}: {said}\n{found}".rstrip(), file=sys.stderr)
    return {**contender.record(), **result}


def _all(peers: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """A failure in one rank is one in all ranks."""
    return together(peers) if peers is not None else nullcontext()


def _step(contender: Contender, shape: Decoder, device: torch.device) -> Callable[[], Tensor]:
    """A step of training, which returns its loss."""
    mesh = init_device_mesh(device.type, (ranks(),)) if ranks() > 1 else None  # before what may fail in one rank
    model = made(contender, shape, device)
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        model.to(torch.bfloat16)
    torch.manual_seed(1 + (dist.get_rank() if ranks() > 1 else 0))
    tokens = torch.randint(shape.words, (shape.batch, shape.sequence), device=device)

    def loss() -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return training_step(contender, model, loss)


def made(contender: Contender, shape: Decoder, device: torch.device) -> Any:
    """The model of a contender in fp32: all but its head converted, and each layer compiled if so wished."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, masking_utils

    # No sequence is packed here. To see that, each step would wait for the GPU.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    of_experts: dict[str, Any] = {"num_local_experts": shape.experts, "num_experts_per_tok": 2}
    kinds: tuple[Any, Any] = (MixtralForCausalLM, MixtralConfig) if shape.experts else (LlamaForCausalLM, LlamaConfig)
    make, describe = kinds
    config = describe(
        vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.sequence,
        tie_word_embeddings=False, use_cache=False, **(of_experts if shape.experts else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: Any = make(config)
    model.train()
    model.model = contender.convert(model.model)
    for layer in model.model.layers if contender.compiled else ():
        layer.compile(dynamic=False)
    return model
