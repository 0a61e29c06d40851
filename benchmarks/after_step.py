"""The most that an optimizer could save which leaves encoded weights behind, or the amaxes that they need.

python -m benchmarks.after_step
torchrun --nproc-per-node 2 -m benchmarks.after_step

A step of the optimizer reads and writes all weights, and the next step of training reads them again to encode them.
Here are the times of AdamW's step and of the encodings, of all layers of Hugging Face's Llama of 1B weights. Amaxes
that are given save the search for them. Operands that are given save one more read, which takes half the time of a
copy.

Under torchrun FSDP2 shards that Llama, and the time of a whole step stands beside the time of steps in which no shard
is searched for its amax, and in which none is encoded either: they send what the first steps found. Each is compiled
and recorded in a CUDA graph, which encodes for forward and for backward. An optimizer saves less, as it writes what it
leaves behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import lpq
from benchmarks import environment, huggingface, recomputing, stack
from benchmarks.contenders import compile_afresh, training_step
from benchmarks.shapes import Decoder
from benchmarks.timing import recorded
from lpq.bench.contenders import Contender, by_recipes
from lpq.bench.timing import QUICK, Effort, Step, Timing, on_gpu
from lpq.distributed.several_matrices import BoundOperands, ShardOperands, ShardStatistics
from lpq.operations.encoder import EncoderSpec, bind_encoder
from lpq.operations.sides import declared

FORMATS = {"fp8-current": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4(block=16x16)"}
"""Recipes, and the format of their weights."""
Clock = Callable[[dict[str, Step], Effort], dict[str, Timing]]
SHARDED = Effort(rounds=7)
REPEATS = 8
"""Steps in a sample of several ranks."""


def weights(shape: Decoder, device: torch.device) -> list[Tensor]:
    """The weights of all layers, in bf16."""
    hidden, shared = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    sizes = [(hidden, hidden), (shared, hidden), (shared, hidden), (hidden, hidden)]
    sizes += [(shape.ffn, hidden), (shape.ffn, hidden), (hidden, shape.ffn)]
    return [torch.randn(size, device=device).bfloat16() for _ in range(shape.layers) for size in sizes]


def steps(everyone: list[Tensor]) -> dict[str, Step]:
    """AdamW's step, a copy, and the encodings of these weights without and with their statistics."""
    held = [w.clone().requires_grad_() for w in everyone]
    for w in held:
        w.grad = torch.full_like(w, 1e-4)
    optimizer = torch.optim.AdamW(held, lr=1e-5, fused=everyone[0].is_cuda)
    into = [torch.empty_like(w) for w in everyone]
    found: dict[str, Step] = {"AdamW": optimizer.step, "copy": lambda: torch._foreach_copy_(into, everyone)}
    for recipe, text in FORMATS.items():
        found[recipe] = _encodings(text, everyone, given=False)
        found[f"{recipe}, given"] = _encodings(text, everyone, given=True)
    return found


def _encodings(text: str, everyone: list[Tensor], given: bool) -> Step:
    """Encode all weights, as layers do; ``given``: with statistics that were measured before."""
    quantizer, bound = lpq.quantizer(text), {}
    count = len(declared(quantizer.side("row"), quantizer.side("col"))) if given else 0
    known = {}
    for w in everyone:
        rows, cols = w.shape
        wanted = EncoderSpec(quantizer, (rows, cols), w.dtype, w.device, given=(True,) * count)
        bound[w.shape] = bind_encoder(wanted).encode
        if count:
            apart = bind_encoder(wanted._replace(apart=True)).measure
            assert apart is not None
            known[w] = apart(w)
    return lambda: [bound[w.shape](w, known.get(w, ()), None) for w in everyone]


def lines(shape: Decoder, effort: Effort, device: torch.device, clock: Clock) -> Iterator[str]:
    """Yield the times, and what would be saved."""
    taken = {name: timing.median * 1e3 for name, timing in clock(steps(weights(shape, device)), effort).items()}
    read = taken["copy"] / 2
    yield f"AdamW {taken['AdamW']:.2f} ms, a read of all weights {read:.2f} ms"
    for recipe in FORMATS:
        whole, saved = taken[recipe], taken[recipe] - taken[f"{recipe}, given"]
        yield f"{recipe}: encodings {whole:.2f} ms; given amaxes save {saved:.2f}, operands {saved + read:.2f}"


@contextmanager
def left_behind(operands: bool) -> Iterator[None]:
    """Measure no shard that was measured before; ``operands``: nor encode one that was encoded before. Ranks send what
    was found then."""
    measure, encode = ShardStatistics.measure, ShardOperands.encode

    def measured(self: ShardStatistics, xs: Sequence[Tensor]) -> None:
        if self._bound is None:
            measure(self, xs)

    def encoded(
        self: ShardOperands, xs: Sequence[Tensor], stats: Sequence[Sequence[Tensor | None]],
        versions: Sequence[object] = (),
    ) -> BoundOperands:  # fmt: skip
        found = next(iter(self._bound.values()), None) if operands else None
        return encode(self, xs, stats, versions) if found is None else found

    with patch.object(ShardStatistics, "measure", measured), patch.object(ShardOperands, "encode", encoded):
        yield


def sharded_lines(
    contender: Contender, shape: Decoder, effort: Effort, device: torch.device, clock: Clock,
    record: Callable[[Callable[[], Tensor]], Step],
) -> Iterator[str]:  # fmt: skip
    """Yield the times of whole steps of a model that ranks share out, as they are and with what is left behind."""
    model = huggingface.made(contender, shape, recomputing.NONE, device)
    step = training_step(contender, model, huggingface.loss_of(model, shape, device))

    def without(operands: bool) -> Tensor:
        with left_behind(operands):
            return step()

    ways: dict[str, Callable[[], Tensor]] = {
        "whole": step, "amaxes": partial(without, False), "operands": partial(without, True),
    }  # fmt: skip
    times = clock({name: record(way) for name, way in ways.items()}, effort)
    whole, amaxes, operands = (times[name].median * 1e3 for name in ways)
    yield f"{contender.name}, {dist.get_world_size()} ranks: {whole:.2f} ms a step"
    for name, took in (("amaxes", amaxes), ("operands, too,", operands)):
        yield f"{name} left behind save at most {whole - took:.2f} ms, {100 * (whole - took) / whole:.1f} %"


def main() -> int:
    """Print them; the exit status is 2 where nothing can be measured."""
    by_torchrun = environment.by_torchrun()
    lack = environment.lacking(int(os.environ.get("WORLD_SIZE", "1")))
    lack = lack or (huggingface.lacking(None) if by_torchrun else None)
    if lack is not None:
        print(f"benchmarks: {lack}", file=sys.stderr)
        return 2
    if by_torchrun:
        compile_afresh()
        with stack.group():
            device = torch.device("cuda", torch.cuda.current_device())
            *_, contender = by_recipes(("fp8-current",), True, weights="high_precision")
            clock = partial(on_gpu, count=REPEATS)
            of_ranks = sharded_lines(replace(contender, recorded=True), Decoder(), SHARDED, device, clock, recorded)
            for line in of_ranks:
                if dist.get_rank() == 0:
                    print(line, flush=True)
        return 0
    print(torch.cuda.get_device_name(), torch.__version__)
    for line in lines(Decoder(), QUICK, torch.device("cuda"), on_gpu):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
