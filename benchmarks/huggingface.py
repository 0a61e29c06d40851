"""Tokens a second and peak memory of training Hugging Face's Llama, or its Mixtral, with random weights.

On one GPU everything is in bf16. Under torchrun FSDP2 shards the model, a unit for each decoder layer: fp32 shards,
bf16 compute, gradients reduced in fp32. The optimizer is fused AdamW, and the head is left as it is.

Each contender has a fresh model, one after the other, since a GPU does not hold them all. It is made on the meta device
and allocated once it is sharded, so no rank ever holds the whole of it. Each decoder layer is compiled by itself, as
users of large models do.

Beside the time of a step stand the host's, which launches it, and the GPU's, in which it computes, only sends, or has
nothing to do: the larger one of host and GPU decides.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import recomputing
from benchmarks.contenders import training_step
from benchmarks.profiles import by_kind, functions, spent
from benchmarks.rows import Row, Task, one_by_one
from benchmarks.shapes import Decoder
from benchmarks.stack import Failed, begun, gathered_in, meeting, timed, together
from benchmarks.timing import launching, recorded
from lpq.bench.contenders import Contender

POSITIONS, BOTH = "positions", "both"
"""The parts of Liger that all contenders have: rotary positions, or these and the loss."""
PROFILED = 10
"""Steps in which it is looked where the host's time goes."""


def lacking(liger: str | None) -> str | None:
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
    checkpointing: str = recomputing.NONE,
    profile: bool = False,
    liger: str | None = None,
    before: Row | None = None,
) -> Iterator[Row]:
    """Tokens a second of each contender, the times of host and GPU, and the most memory that was allocated; before and
    after each, so far. ``checkpointing``: how layers run again in backward. ``profile``: print where the time of host
    and GPU goes, too. ``liger``: all have Liger's rotary positions and its loss, or the positions alone. Its loss waits
    for the GPU, so a step with it cannot be recorded."""
    if liger:
        kind = "mixtral" if shape.experts else "llama"
        apply = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind}")
        apply(rms_norm=False, swiglu=False, fused_linear_cross_entropy=liger == BOTH)
    peers = meeting(device) if dist.is_initialized() else None
    tasks = [
        Task(one.record(), partial(_of, one, shape, checkpointing, steps, device, peers, profile)) for one in everyone
    ]
    setting = {**asdict(shape), "checkpointing": checkpointing, "sharded": peers is not None, "ranks": ranks()}
    yield from one_by_one(tasks, setting, before)


def ranks() -> int:
    """How many share the model out."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _of(
    contender: Contender, shape: Decoder, checkpointing: str, steps: int, device: torch.device,
    peers: dist.ProcessGroup | None, profile: bool,
) -> Row:  # fmt: skip
    on_gpu = device.type == "cuda"
    counters.clear()
    result: Row = begun(device)
    found = ""
    try:
        with together(peers):
            step = _step(contender, shape, checkpointing, device)
        timing, loss, peak = timed(step, steps, device, peers)
        with together(peers):
            few = min(steps, 8)
            host, gpu = (launching(step, few) * 1e3, spent(step)) if on_gpu else (None, None)
            gathered = gathered_in(step, contender) if peers is not None else None
            found = functions(step, steps=PROFILED, warm=1, order="tottime") if profile else ""
            found += by_kind(step) if profile and on_gpu else ""
        peak = None if contender.recorded else peak  # a graph has its memory, which is not allocated anew
        speed = shape.tokens / timing.median
        result |= {**timing.record("ms"), "tokens_per_second": speed, "loss": loss, "peak_bytes": peak, "failure": None}
        result |= {"host_ms": host, "gathered_bytes": gathered}
        if gpu is not None:
            result |= {"gpu_ms": gpu.computing * 1e3, "sending_ms": gpu.sending * 1e3, "idle_ms": gpu.idle * 1e3}
        result["graph_breaks"] = sum(counters["graph_break"].values()) if contender.compiled else None
        result["graphs"] = counters["stats"]["unique_graphs"] if contender.compiled else None
    except Failed as error:  # what one library cannot do is a result, and the others go on
        result |= {"peak_bytes": None, "failure": str(error)}
    said = result["failure"] or f"{result['tokens_per_second']:,.0f} tokens/s"
    if result.get("host_ms"):
        best = shape.tokens / result["fastest_ms"] * 1e3
        said += f" (best {best:,.0f}), {result['ms']:.0f} ms, host {result['host_ms']:.0f}, GPU {result['gpu_ms']:.0f}"
        said += f" (only sends {result['sending_ms']:.0f}, idle {result['idle_ms']:.0f})"
    if result["peak_bytes"]:
        said += f", {result['peak_bytes'] / 2**30:.1f} GiB"
    if result.get("graph_breaks"):
        said += f", {result['graph_breaks']} graph breaks"
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{contender.name}: {said}\n{found}".rstrip(), file=sys.stderr)
    return result


def _step(contender: Contender, shape: Decoder, checkpointing: str, device: torch.device) -> Callable[[], Tensor]:
    """A step of training, which returns its loss."""
    model = made(contender, shape, checkpointing, device)
    step = training_step(contender, model, loss_of(model, shape, device))
    return recorded(step) if contender.recorded else step


def loss_of(model: nn.Module, shape: Decoder, device: torch.device) -> Callable[[], Tensor]:
    """The loss of the model for tokens of this rank's own."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    tokens = torch.randint(shape.words, (shape.batch, shape.sequence), device=device)

    def loss() -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return loss


def made(contender: Contender, shape: Decoder, checkpointing: str, device: torch.device) -> Any:
    """The model of a contender: all but its head converted, each layer compiled if so wished, sharded where there are
    ranks, and allocated."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, masking_utils

    # No sequence is packed here. To see that, each step would wait for the GPU. And no mask is made, nor while a CUDA
    # graph is recorded: attention is causal.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    vars(masking_utils)["is_tracing"] = lambda *_: False
    mesh = init_device_mesh(device.type, (ranks(),)) if dist.is_initialized() else None  # before what may fail in one
    of_experts: dict[str, Any] = {"num_local_experts": shape.experts, "num_experts_per_tok": 2}
    kinds: tuple[Any, Any] = (MixtralForCausalLM, MixtralConfig) if shape.experts else (LlamaForCausalLM, LlamaConfig)
    make, describe = kinds
    config = describe(
        vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.sequence,
        tie_word_embeddings=False, use_cache=False, **(of_experts if shape.experts else {}),
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = make(config)
    model.train()
    if mesh is None:  # first: in a trial of ``lpq.fuse``, a layer with Liger's kernel runs on a GPU alone
        model.to(torch.bfloat16).to_empty(device=device)
    model.model = contender.convert(model.model)
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = recomputing.wrapped(layer, checkpointing)
        if contender.compiled:
            layers[number].compile(dynamic=False)
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)
    else:
        model.to(torch.bfloat16)  # what a contender put in the place of layers
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # of buffers, which have no values now
    _draw(model, device)
    return model


@torch.no_grad()
def _draw(model: nn.Module, device: torch.device) -> None:
    """Give the parameters random values, or this rank's parts of them: the same to each contender."""
    draw = torch.Generator(device).manual_seed(ranks() * 1000 + (dist.get_rank() if dist.is_initialized() else 0))
    for name, parameter in model.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() == 1:
            part.fill_(1.0 if "norm" in name else 0.0)
        else:
            part.normal_(0.0, 0.02, generator=draw)
