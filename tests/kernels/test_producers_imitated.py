"""One kernel computes and encodes a source, to the bytes of the reference. A CPU imitates the GPU (``imitated``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imitated
import pytest
import torch
from support.comparing import expect_bytes
from support.third_party import row_operand, row_side
from tile_sides import side_of
from torch import Tensor

import lpq
from lpq.operations import produced_tiles, producer
from lpq.operations.binding import Encoding
from lpq.operations.cut import Cut
from lpq.operations.encoder import EncoderSpec, KnownStats, bind_encoder
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.part_encoders import SpanningStats, bind_part
from lpq.operations.produced_tiles import SourceOutput
from lpq.operations.producer import Output
from lpq.operations.references import quantize_reference
from lpq.operations.source import ACTIVATIONS, Source
from lpq.testing.comparing import Poisoned
from lpq.testing.operands import SEED

pytestmark = [*imitated.MARKS, pytest.mark.usefixtures("launched")]
CPU = torch.device("cpu")
SWIGLU, SWIGLU_BACKWARD = ACTIVATIONS["silu"].gated


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    x = 2 * torch.randn(shape)
    x.view(-1)[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 1e30])
    return x.to(dtype).view(-1).flip(0).view(shape) if shape[0] % 2 else x.to(dtype)


def check(source: Source, texts: list[str], shape: tuple[int, int], dtype: torch.dtype, measure: bool = False) -> None:
    torch.manual_seed(0)
    sizes = {"matrix": shape, "row": shape[:1], "col": shape[1:]}
    inputs = [numbers(*sizes[k], dtype=torch.float32 if k == "row" else dtype) for k in source.inputs]
    seeds = [torch.tensor(SEED + i) for i in range(source.outputs)]
    outputs: list[SourceOutput | None] = []
    for i, text in enumerate(texts):
        quantizer = lpq.quantizer(text)
        row, col = quantizer.side("row") if i != 2 else None, quantizer.side("col")
        e = Encoding(row, col, shape, dtype, dtype, CPU, measure=measure, dispatched=True)
        outputs.append(SourceOutput(e, side_of(row, "row"), side_of(col, "col")))
    run = produced_tiles.bind(source, shape, dtype, CPU, outputs, [True] * source.outputs)
    with Poisoned():
        made = run(inputs, [()] * source.outputs, seeds)
    for i, (output, one, x, seed) in enumerate(zip(outputs, made, source.compute(*inputs), seeds, strict=True)):
        value = one.value
        assert value is not None
        assert output is not None
        assert value.dtype is dtype
        close = torch.isclose(value.float(), x.float(), rtol=2**-6, atol=1e-6, equal_nan=True)
        assert close.all(), (i, value[~close], x[~close])
        expected = quantize_reference(value, [], output.e.row, output.e.col, seed, 0, measure)
        got = [*one.row, *one.col, *one.stats]
        expect_bytes(got, expected, f"{source.name} {texts} {shape} {dtype}, of its output {i}")


EVERY = [source for activation in ACTIVATIONS.values() for between in activation for source in between]
EVERY += [
    norm_source(NormKind(1e-6)), norm_source(NormKind(1e-6, rounds=True)), norm_source(NormKind(1e-6, offset=True)),
    norm_source(NormKind(1e-5, centers=True)), norm_source(NormKind(1e-5, centers=True), True),
]  # fmt: skip


@pytest.mark.parametrize("source", EVERY, ids=lambda source: source.name)
def test_a_tile_of_a_third_party(source: Source, tmp_path: Path, launched: list[str]) -> None:
    """Its struct is compiled with the source, beside a format of lpq, and encodes what the kernel computes."""
    torch.manual_seed(0)
    shape, dtype, ours = (37, 136), torch.bfloat16, lpq.quantizer("mxfp8")
    sizes = {"matrix": (shape, dtype), "row": (shape[:1], torch.float32), "col": (shape[1:], dtype)}
    inputs = [torch.randn(size).to(x_dtype) for size, x_dtype in map(sizes.__getitem__, source.inputs)]
    for i, extreme in enumerate((torch.inf, -torch.inf, torch.nan, -torch.nan, 3e38, -3e38)):
        inputs[0][i, i] = extreme
    e = Encoding(lpq.quantizer("identity"), ours, shape, dtype, dtype, CPU, dispatched=True)
    output = SourceOutput(e, row_side(tmp_path), side_of(ours, "col"))
    run = produced_tiles.bind(source, shape, dtype, CPU, [output] * source.outputs, [True] * source.outputs)
    with Poisoned():
        made = run(inputs, [()] * source.outputs, [None] * source.outputs)
    usual = inputs[0].abs() < 1e30  # beyond, a CPU's GELU has other results
    atol = 0.01 if "gelu_new" in source.name else 1e-6  # torch rounds its gradient more often on a GPU
    for one, x in zip(made, source.compute(*inputs), strict=True):
        assert one.value is not None
        torch.testing.assert_close(one.value[usual], x[usual], rtol=2**-6, atol=atol)
        expected = [row_operand(one.value), *quantize_reference(one.value, [], None, ours, None, 0, False)]
        expect_bytes([*one.row, *one.col], expected, source.name)
    assert launched == ["produce"]


@pytest.mark.parametrize(
    ("of", "dtype"),
    [(SWIGLU, torch.bfloat16), (SWIGLU_BACKWARD, torch.bfloat16), (ACTIVATIONS["silu"].alone.product, torch.float32)],
    ids=lambda one: one.name if isinstance(one, Source) else str(one),
)
def test_silu_without_branches_has_the_quotients_of_the_division(of: Source, dtype: torch.dtype) -> None:
    """At the ends of its range, at numbers whose quotients it does not correct, and at others."""
    torch.manual_seed(0)
    tiny, huge = [0.0, -0.0, 1e-40, 2.0**-65, 2.0**-64], [2.0**64, 3e38, torch.inf, torch.nan]
    ends = [*tiny, *huge, -33.9, -34.0, -87.5, -88.5, -99.0]
    shape, device = (128, 128), CPU
    inputs = [(10 * torch.randn(shape)).to(dtype) for _ in of.inputs]
    inputs[0].view(-1)[::128] = torch.tensor(ends * 10)[:128].to(dtype)
    made = []
    for other in ("Silu", "AnySilu"):
        way = of._replace(struct=of.struct.replace("Silu", other))
        run = produced_tiles.bind(way, shape, dtype, device, [None] * of.outputs, [True] * of.outputs)
        with Poisoned():
            outputs = run(inputs, [()] * of.outputs, [None] * of.outputs)
        made.append([output.value for output in outputs if output.value is not None])
    assert len(made[0]) == of.outputs
    expect_bytes(*made, of.name)


MIXED = ["hybrid(row=mxfp8, col=fp8)", "hybrid(row=fp8, col=mxfp8)", "fp8(scaling=block)"]


MEASURED = ["fp8(scaling=row)", "mxfp4(scale=even, rht=true)", "hybrid(row=fp8, col=fp8(scaling=row))"]
"""By sides in a run before."""


@pytest.mark.parametrize("texts", [["fp8"] * 3, MIXED, ["nvfp4"] * 3, ["nvfp4(scaling=row)"] * 3, MEASURED], ids=str)
def test_three_outputs(texts: list[str], launched: list[str]) -> None:
    check(SWIGLU_BACKWARD, texts, (256, 128), torch.bfloat16)
    check(SWIGLU_BACKWARD, texts, (133, 200), torch.bfloat16, measure=True)
    assert set(launched) >= {"produce"}


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "fp8(scaling=block, block=128x128)"])
def test_one_output(text: str) -> None:
    check(SWIGLU, [text], (37, 136), torch.float16)


@pytest.mark.parametrize("name", ["silu", "relu", "gelu_new"])
@pytest.mark.parametrize("text", [MIXED[0], "nvfp4", "fp8(scaling=row)"])
def test_an_activation_in_fp32(name: str, text: str) -> None:
    """It is encoded without being rounded before, as layers encode inputs in fp32."""
    for shape in ((128, 128), (133, 200)):
        check(ACTIVATIONS[name].alone.product, [text], shape, torch.float32, measure=shape[0] > 128)


def test_halves_of_one_matrix(launched: list[str]) -> None:
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(37, 136, dtype=torch.bfloat16) for _ in range(3))
    halves = torch.cat([gate, up], 1)
    for source, inputs, count in ((SWIGLU, (halves,), 1), (SWIGLU_BACKWARD, (halves, dy), 2)):
        with Poisoned():  # type: ignore[no-untyped-call]
            made = produced_tiles.bind_halves(source, (37, 136), torch.bfloat16, CPU)(*inputs)
        expected = torch.cat(source.compute(gate, up, *inputs[1:])[:count], 1)
        torch.testing.assert_close(made, expected, rtol=2**-6, atol=1e-6)
    assert launched == ["produce"] * 2


@pytest.mark.parametrize("text", ["fp8", "nvfp4", "mxfp8", "hybrid(row=mxfp8, col=fp8(scaling=row))"])
def test_parts_are_encoded_by_given_statistics(text: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank's columns of a matrix are, whose statistics other ranks make larger."""
    shape, dtype, quantizer = (128, 256), torch.bfloat16, lpq.quantizer(text)
    monkeypatch.setattr(produced_tiles, "why_not", lambda *what: None)
    monkeypatch.setattr(produced_tiles, "side_of", lambda quantizer, direction, *how: side_of(quantizer, direction))

    def exchange(parts: Sequence[SpanningStats | None], group: str) -> Any:
        def run(xs: Sequence[Any], seeds: None) -> Any:
            pairs = zip(parts, xs, strict=True)
            return [[] if p is None else [2 * t for t in p.measure(x)] for p, x in pairs], seeds

        return run

    monkeypatch.setattr(producer, "bind_exchange", exchange)
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for _ in SWIGLU_BACKWARD.inputs]
    wanted, cut = EncoderSpec(quantizer, shape, dtype, CPU), Cut(1, 0, 2, shape[1])
    made = producer.bind_producer(SWIGLU_BACKWARD, [Output(wanted, True, cut)] * 2 + [Output(None)])
    assert made.why_not == (None, None, None)
    for one in made.produce(inputs, [(), (), ()], [None] * 3)[:2]:
        assert one.value is not None
        part = bind_part(bind_encoder, wanted, cut, "")
        (found,), _ = exchange([part.statistics], "")([one.value], None)
        known: Any = KnownStats(found, ()) if found else ()
        of_row, of_col, _ = part.encoder.encode(one.value, known, None)
        expect_bytes([*one.row, *one.col], [*of_row, *of_col], text)
    assert "produce" in launched
