"""The kernels that compute a source and encode it: time, and the share of the copy speed of the same run.

    python -m benchmarks.sources [--rows 8192] [--cols 8192] [--dtype bfloat16]

Bytes are counted once for each tensor that is read or written. A recipe whose scales need the amax of a row or of the
tensor reads its inputs twice: *share* counts them once, and *of two reads* twice. *Apart*: the source by torch's
operations, and then the encodings by lpq. The inputs take turns, so that no cache holds them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lpq
from benchmarks.timing import copy_speed, seconds
from lpq.operations.encoder import EncoderSpec
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.producer import Output, Producer, bind_producer
from lpq.operations.source import ACTIVATIONS, Source

COPIES = 3
"""The number of sets of inputs that take turns."""
SOURCES = {
    "RMS norm": norm_source(NormKind(1e-5)),
    "layer norm": norm_source(NormKind(1e-5, centers=True), True),
    "silu(gate) * up": ACTIVATIONS["silu"].gated.product,
    "its backward": ACTIVATIONS["silu"].gated.backward,
    "gelu(up)": ACTIVATIONS["gelu"].alone.product,
    "its backward, of gelu": ACTIVATIONS["gelu"].alone.backward,
    "gelu_tanh(gate) * up": ACTIVATIONS["gelu_tanh"].gated.product,
    "its backward, of gelu_tanh": ACTIVATIONS["gelu_tanh"].gated.backward,
}
FORMATS = {
    "fp8-delayed": "fp8(scaling=delayed)", "mxfp8": "mxfp8", "fp8-block": "fp8(scaling=block)",
    "fp8-current": "fp8", "fp8-row": "fp8(scaling=row)", "nvfp4": "nvfp4",
}  # fmt: skip
TWICE = {"fp8-current", "fp8-row", "nvfp4"}
"""Those whose scales need the amaxes of the tensor, or of its rows and columns, first."""


class Sides(NamedTuple):
    """Which operands are made."""

    row: bool
    col: bool


SIDES = {"row": Sides(True, False), "both": Sides(True, True)}


def bound(
    source: Source,
    text: str,
    sides: Sides,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Producer, Any]:
    """The producer of a source, whose last output of several is the column operand of the activation, and the state of
    each output."""
    quantizer = lpq.quantizer(text)
    state = quantizer.new_state(device)
    spec = EncoderSpec(quantizer, shape, dtype, device, *sides, remembers=bool(state))
    specs = [spec] * source.outputs
    if source.outputs > 1:
        specs[-1] = spec._replace(row=not sides.col, col=sides.col)
    return bind_producer(source, [Output(one) for one in specs]), [quantizer.new_state(device) or () for _ in specs]


def inputs_of(
    source: Source, shape: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    sizes = {"matrix": (shape, dtype), "row": (shape[:1], torch.float32), "col": (shape[1:], dtype)}
    return [torch.randn(size, device=device).to(dtype) for size, dtype in (sizes[kind] for kind in source.inputs)]


def rows(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[str, ...]]:
    """The cells of each source, format and sides."""
    device = torch.device("cuda", 0)
    busy = torch.empty(8192, 8192, device=device, dtype=torch.bfloat16)
    speed = copy_speed(device)
    for name, source in SOURCES.items():
        sets = [inputs_of(source, shape, device, dtype) for _ in range(COPIES)]
        read = sum(x.nbytes for x in sets[0])
        for recipe, text in FORMATS.items():
            for which, sides in SIDES.items():
                producer, states = bound(source, text, sides, shape, device, dtype)
                apart, _ = bound(source._replace(struct="", program=None), text, sides, shape, device, dtype)
                if why := next(filter(None, producer.why_not), None):
                    yield name, recipe, which, why
                    continue

                def run(by: Producer, i: int, states: Any = states, sets: Any = sets) -> Any:
                    return by.produce(sets[i % COPIES], states, [None] * len(states))

                written = sum(t.nbytes for one in run(producer, 0) for t in (*one.row, *one.col))
                took, plain = (seconds(partial(run, by), busy.clone) for by in (producer, apart))
                reads = 1 + (recipe in TWICE)
                shares = [f"{(n * read + written) / took / speed:.2f}" for n in (1, reads)]
                yield name, recipe, which, f"{1e6 * took:.1f}", shares[0], shares[1], f"{1e6 * plain:.1f}"
        del sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    size = f"{options.rows} x {options.cols}"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size} in {options.dtype}")
    print("| source | recipe | operands | µs | share | of two reads | apart, µs |\n|---|---|---|---:|---:|---:|---:|")
    for cells in rows((options.rows, options.cols), getattr(torch, options.dtype)):
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
