"""One kernel computes and encodes a source: the bytes of torch's own operators and of each format's own kernels.

The kernels are in CUDA C++ and in Triton, each by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzed import assert_same
from support.third_party import row_operand, row_side
from torch import Tensor

import lpq
from lpq.kernels.cuda import CudaKernel
from lpq.operations import fused_pair, produced_programs, produced_tiles
from lpq.operations.binding import Encoding
from lpq.operations.encoder import EncoderSpec
from lpq.operations.produced_tiles import Produced, SourceOutput
from lpq.operations.producer import Output, bind_halves, bind_producer, kernels_of
from lpq.operations.references import quantize_reference
from lpq.operations.source import ACTIVATIONS, Source
from lpq.torch_private.memory import Allocate, allocator

pytest.importorskip("cuda.core", reason="needs cuda-core")

SOURCES = SWIGLU, SWIGLU_BACKWARD = ACTIVATIONS["silu"].gated
OTHERS = [
    of for act in ACTIVATIONS.values() for between in (act.gated, act.alone) for of in between if of not in SOURCES
]
"""The code of a side does not depend on the source: one format shows that these work."""
TEXTS = [
    "fp8", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "mxfp8", "mxfp4(scale=even, rht=true)", "nvfp4",
    "nvfp4(stochastic=true)", "nvfp4(search=four_over_six, norm=256)", "nvfp4(scaling=row)",
    "hybrid(row=mxfp8, col=fp8)", "hybrid(row=fp8(scaling=block), col=nvfp4)", "fp8(scaling=row)",
    "hybrid(row=fp8, col=fp8(scaling=row))",
]  # fmt: skip
APART = [
    ("nvfp4(rht=true, stochastic=true)", ["cuda"]),
    ("nvfp4(search=mse)", ["cuda", "triton"]),
    ("hybrid(row=mxfp8, col=mxfp8, col_source=row)", ["cuda", "triton"]),
]
"""And which kernels have no sides for them."""
SHAPES = [(256, 512), (131, 264), (1, 8)]


@pytest.fixture(params=["cuda", "triton"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The language of the kernels; those of formats are then in it, too."""
    name: str = request.param
    monkeypatch.setenv("LPQ_KERNELS", f"{name},torch,reference")
    return name


FAMILIES = pytest.mark.usefixtures("family")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of a pattern, so that an element which a kernel never writes shows."""

    def poison(device: torch.device, *, dispatched: bool = False) -> Allocate:
        empty = allocator(device, dispatched=dispatched)

        def full(*args: Any) -> Tensor:
            out = empty(*args)
            out.untyped_storage().fill_(0xA5)
            return out

        return full

    for module in (fused_pair, produced_tiles):
        monkeypatch.setattr(module, "allocator", poison)


def numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Among them some that are no ordinary numbers, in other places each time."""
    x = 3 * torch.randn(*shape, device="cuda")
    for value in (torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, -1e-38, 3e38, -90.0, 88.5):
        if x.numel() > 100:
            x.view(-1)[torch.randint(x.numel(), (3,), device="cuda")] = value
    return x.to(dtype)


def inputs_of(source: Source, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = {"matrix": (shape, dtype), "row": (shape[:1], torch.float32), "col": (shape[1:], dtype)}
    return [numbers(*sizes[kind]) for kind in source.inputs]


def both(
    source: Source, outputs: list[Output], inputs: list[Tensor], known: list[Any], apart: Callable[[int], bool]
) -> None:
    """By a kernel, and by the definition and encoders."""
    seeds = [torch.tensor(7 + i, device="cuda") for i in range(source.outputs)]
    fused, plain = bind_producer(source, outputs), bind_producer(source._replace(struct="", program=None), outputs)
    assert [why is not None for why in fused.why_not] == [apart(i) for i in range(source.outputs)], fused.why_not
    assert None not in plain.why_not
    assert fused.operands == plain.operands
    made, expected = (producer.produce(inputs, known, seeds) for producer in (fused, plain))
    for i, (got, wanted) in enumerate(zip(made, expected, strict=True)):
        assert_same(flat(got), flat(wanted), f"{source.name} {outputs[i]}, output {i}")


def flat(made: Produced) -> list[Tensor]:
    value = [] if made.value is None else [one_nan(made.value)]
    return [*made.row, *made.col, *made.stats, *value]


def one_nan(matrix: Tensor) -> Tensor:
    """One NaN stands for all, as kernels and torch round a NaN to bits of their own."""
    return matrix.masked_fill(matrix.isnan(), torch.nan)


def outputs_of(source: Source, text: str, shape: tuple[int, int], dtype: torch.dtype, **rest: Any) -> list[Output]:
    """Each with a pair of operands, but for the last of several, which has a column operand."""
    wanted = EncoderSpec(lpq.quantizer(text), shape, dtype, torch.device("cuda", 0), **rest)
    last = source.outputs - 1 if source.outputs > 1 else 1
    return [Output(wanted._replace(row=i != last), value=i != 1) for i in range(source.outputs)]


@pytest.mark.parametrize("source", [*SOURCES, *OTHERS], ids=lambda source: source.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_torch(source: Source, dtype: torch.dtype, family: str) -> None:
    """The first input has every number of the dtype, and the others many."""
    shape = 1024, 512
    inputs = inputs_of(source, shape, dtype)
    inputs[0] = torch.arange(1 << 16, device="cuda").to(torch.int16).view(dtype).repeat(8).view(shape)
    outputs = [Output(EncoderSpec(lpq.quantizer("mxfp8"), shape, dtype, inputs[0].device), True)] * source.outputs
    producer = bind_producer(source, outputs)
    there = family == "cuda" or source.program is not None
    assert [why is None for why in producer.why_not] == [there] * source.outputs
    made = producer.produce(inputs, [()] * source.outputs, [None] * source.outputs)
    for i, (one, x) in enumerate(zip(made, source.compute(*inputs), strict=True)):
        assert one.value is not None
        of_nans = [y.masked_fill(y.isnan(), torch.nan) for y in (one.value, x)]  # which torch hands on as they are
        assert_same(of_nans[:1], of_nans[1:], f"{source.name}, output {i}")


EVERY_ERF = """
#include "sources.cuh"
extern "C" __global__ void differing(u32* count) {
    for (u64 i = blockIdx.x * 256 + threadIdx.x; i >> 32 == 0; i += (u64)gridDim.x * 256) {
        const float a = sources::erf_of_both(__uint_as_float((u32)i)), b = erff(__uint_as_float((u32)i + APART));
        if (__float_as_uint(a) != __float_as_uint(b) && (a == a || b == b)) atomicAdd(count, 1u);
    }
}
"""


def test_erf_has_the_bits_of_erff_for_every_number(tmp_path: Path) -> None:
    (tmp_path / "erf.cu").write_text(EVERY_ERF)
    kernel = CudaKernel(tmp_path / "erf.cu", "differing", "P", threads=256)
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    for apart in (0, 1):
        kernel.launch(0, (f"APART={apart}u",), 2048, counts[apart].data_ptr())
    assert counts[0] == 0
    assert counts[1] > 0


@FAMILIES
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("measures", [False, True], ids=["", "measured"])
def test_operands_are_those_of_encoders(source: Source, text: str, measures: bool) -> None:
    for shape in SHAPES:
        dtype = torch.bfloat16 if shape[0] % 2 == 0 or measures else torch.float16
        outputs = outputs_of(source, text, shape, dtype, measures=measures)
        both(source, outputs, inputs_of(source, shape, dtype), [()] * source.outputs, lambda i: False)


@pytest.mark.parametrize("source", OTHERS, ids=lambda source: source.name)
def test_operands_of_other_sources(source: Source) -> None:
    outputs = outputs_of(source, "fp8", (131, 264), torch.bfloat16)
    inputs = inputs_of(source, (131, 264), torch.bfloat16)
    both(source, outputs, inputs, [()] * source.outputs, lambda i: False)


def check_third_party(source: Source, shape: tuple[int, int], dtype: torch.dtype, folder: Path) -> None:
    """Its struct is compiled with the source, beside a format of lpq, and encodes what the kernel computes. ``folder``
    gets the header."""
    device, ours, inputs = torch.device("cuda", 0), lpq.quantizer("mxfp8"), inputs_of(source, shape, dtype)
    e = Encoding(lpq.quantizer("identity"), ours, shape, dtype, dtype, device)
    output = SourceOutput(e, row_side(folder), fused_pair.side_of(ours, "col", device))
    run = produced_tiles.bind(source, shape, dtype, device, [output] * source.outputs, [True] * source.outputs)
    for i, one in enumerate(run(inputs, [()] * source.outputs, [None] * source.outputs)):
        assert one.value is not None
        expected = [row_operand(one.value), *quantize_reference(one.value, [], None, ours, None, 0, False)]
        assert_same([*one.row, *one.col], expected, f"{source.name} {shape}, output {i}")


@pytest.mark.parametrize("source", [*SOURCES, *OTHERS], ids=lambda source: source.name)
def test_a_tile_of_a_third_party(source: Source, tmp_path: Path) -> None:
    check_third_party(source, (131, 264), torch.bfloat16, tmp_path)


@FAMILIES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_fp32(name: str, family: str) -> None:
    """They are encoded without being rounded before, as layers encode inputs in fp32."""
    source = ACTIVATIONS[name].alone.product
    without = family == "triton" and source.program is None
    for shape in SHAPES:
        for text in ("fp8", "mxfp8", "nvfp4", "hybrid(row=mxfp8, col=fp8(scaling=row))"):
            outputs = outputs_of(source, text, shape, torch.float32, measures=True)
            both(source, outputs, inputs_of(source, shape, torch.float32), [()], lambda i: without)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize(("text", "without"), APART)
def test_others_are_encoded_from_what_the_kernel_writes(
    source: Source, text: str, without: Sequence[str], family: str
) -> None:
    outputs = outputs_of(source, text, (131, 264), torch.bfloat16)
    inputs = inputs_of(source, (131, 264), torch.bfloat16)
    both(source, outputs, inputs, [()] * source.outputs, lambda i: family in without)


@FAMILIES
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("text", ["fp8(scaling=delayed)", "hybrid(row=fp8(scaling=delayed), col=mxfp8)"])
def test_with_a_state(source: Source, text: str) -> None:
    shape = 256, 384
    outputs = outputs_of(source, text, shape, torch.bfloat16, remembers=True)
    quantizer, states = lpq.quantizer(text), []
    for i in range(source.outputs):
        state = quantizer.new_state("cuda")
        states.append({name: torch.full_like(t, 5.0 + i) for name, t in state.items()})
    both(source, outputs, inputs_of(source, shape, torch.bfloat16), states, lambda i: False)


@FAMILIES
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_many_tiles_and_views(source: Source) -> None:
    """Blocks of threads find amaxes in several tiles; inputs lie anywhere, and have leading dimensions."""
    shape = 128 * 34, 128 * 33
    inputs = inputs_of(source, shape, torch.bfloat16)
    inputs[0] = inputs[0].t().contiguous().t()
    inputs[1] = torch.cat([inputs[1].new_zeros(1), inputs[1].flatten()])[1:].view(2, -1, shape[1]).view(shape)
    for text in ("fp8", "nvfp4"):
        outputs = outputs_of(source, text, shape, torch.bfloat16)
        both(source, outputs, inputs, [()] * source.outputs, lambda i: False)


@FAMILIES
def test_one_output_is_wanted_as_it_is_and_formats_are_several() -> None:
    shape = 256, 256
    wanted = [
        EncoderSpec(lpq.quantizer(text), shape, torch.bfloat16, torch.device("cuda", 0)) for text in ("fp8", "mxfp8")
    ]
    inputs = inputs_of(SWIGLU_BACKWARD, shape, torch.bfloat16)
    outputs = [Output(wanted[0]), Output(None, True), Output(wanted[1], True)]
    both(SWIGLU_BACKWARD, outputs, inputs, [()] * 3, lambda i: False)
    outputs = [Output(wanted[1]._replace(row=False)), Output(wanted[0]._replace(col=False)), Output(None)]
    both(SWIGLU_BACKWARD, outputs, inputs, [()] * 3, lambda i: False)


@FAMILIES
def test_inputs_that_do_not_fit() -> None:
    outputs = outputs_of(SWIGLU, "fp8", (64, 64), torch.bfloat16)
    producer, x = bind_producer(SWIGLU, outputs), torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    for wrong in (x.float(), x[:32]):
        with pytest.raises(ValueError, match=r"silu_gate: input 1 has .* and not 4096 in torch.bfloat16"):
            producer.produce([x, wrong], [()], [None])


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("text", ["fp8", "mxfp8", "fp8(scaling=block)", "nvfp4(rht=true, stochastic=true)"])
def test_programs_take_odd_sizes(source: Source, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "triton,torch,reference")
    for shape in ((131, 77), (1, 1)):
        outputs = outputs_of(source, text, shape, torch.bfloat16, measures=True)
        both(source, outputs, inputs_of(source, shape, torch.bfloat16), [()] * source.outputs, lambda i: False)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_halves_of_one_matrix(name: str, family: str) -> None:
    gated = ACTIVATIONS[name].gated
    gate, up, dy = inputs_of(gated.backward, (133, 264), torch.bfloat16)
    halves = torch.cat([gate, up], 1)
    kernels = {"cuda": produced_tiles, "triton": produced_programs}[family]
    for source, inputs, count in ((gated.product, (halves,), 1), (gated.backward, (halves, dy), 2)):
        of = source, (133, 264), torch.bfloat16, halves.device
        found = kernels_of(*of)
        assert found is kernels or (isinstance(found, str) and source.program is None and family == "triton")
        made, expected = bind_halves(*of)(*inputs), torch.cat(source.compute(gate, up, *inputs[1:])[:count], 1)
        assert_same([one_nan(made)], [one_nan(expected)], source.name)
