"""Sources in Triton, run by Triton's interpreter as the kernels of ``interpreted.py`` are.

The interpreter has no libdevice. Torch's functions of the same names take the place of libdevice's: so SwiGLU has the
bits of torch's operators. On a CPU torch computes a GELU in another way than on a GPU, and the sources are close to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import SEED
from packaging.version import Version
from quantizers import IN_KERNELS
from quick_interpreter import _quick_interpreter
from support.comparing import expect_bytes
from tile_sides import choose_triton
from torch import Tensor

import lpq
from lpq.core import Buffer, Quantizer, Storage
from lpq.formats.format import Direction
from lpq.kernels import table
from lpq.operations import measure_reference, produced_programs, tile_program
from lpq.operations.binding import Encoding
from lpq.operations.encoder import EncoderSpec
from lpq.operations.produced_tiles import SourceOutput
from lpq.operations.producer import Output, bind_producer
from lpq.operations.references import quantize_reference
from lpq.operations.source import ACTIVATIONS, Between, Source
from lpq.operations.tile_program import TileProgram
from lpq.testing.comparing import Poisoned

triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import TensorHandle  # noqa: E402

from lpq.kernels.triton import norms, sources  # noqa: E402
from lpq.kernels.triton.numbers import bits_of  # noqa: E402
from lpq.kernels.triton.tiles import store_tile  # noqa: E402

__all__ = ["_quick_interpreter"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
SWIGLU, SWIGLU_BACKWARD = ACTIVATIONS["silu"].gated
SOURCES = [
    s for act in ACTIVATIONS.values() for between in (act.gated, act.alone) for s in between if s.program is not None
]
ROUNDS_TWICE = Version(triton.__version__) < Version("3.9")
"""Whether Triton's interpreter rounds a product before a sum that is one operation on a GPU."""
SERVED = [text for text in IN_KERNELS if "delayed" not in text]


def of_torch(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        data = function(torch.from_numpy(x.handle.data.copy())).numpy()
        return tl.tensor(TensorHandle(data, x.handle.dtype), x.type)

    return run


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "choose", choose_triton)
    functions = {name: of_torch(getattr(torch, name)) for name in ("exp", "erf", "tanh", "rsqrt")}
    for module in (sources, norms):
        monkeypatch.setattr(module, "libdevice", SimpleNamespace(**functions))


def program(quantizer: Quantizer | None, direction: Direction, dtype: torch.dtype) -> TileProgram | None:
    if quantizer is None:
        return None
    if isinstance(quantizer, TopsQuantizer):
        return TileProgram(_write_tops, None, (), before=())
    found = tile_program.tile_program(quantizer, direction, dtype, CPU)
    assert not isinstance(found, str), found
    return found


# ---------------------------------------------------------------------------------------------- a third party's format


class TopsStorage(Storage):
    layout = (Buffer("data", torch.uint8),)

    def decode(self) -> Tensor:
        return (self.data.int() << 24).view(torch.float32)


@dataclass(frozen=True)
class TopsQuantizer(Quantizer):
    """The first byte of a number in fp32."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> TopsStorage:
        return TopsStorage(data=(x.float().contiguous().view(torch.int32) >> 24).to(torch.uint8))


TopsQuantizer.storage = TopsStorage


@triton.jit
def _write_tops(x, row, col, rows, cols, buffers, stats, seed, offset, OPTIONS: tl.constexpr):
    store_tile(buffers[0], (bits_of(x) >> 24).to(tl.uint8), row, col, rows, cols)


# ---------------------------------------------------------------------------------------------- one run


def numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    x = 2 * torch.randn(*shape)
    x.view(-1)[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 1e30])
    return x.to(dtype).view(-1).flip(0).view(shape) if shape[0] % 2 else x.to(dtype)


def check(
    source: Source, formats: Sequence[str | Quantizer], shape: tuple[int, int], dtype: torch.dtype, *,
    measure: bool = False, given: bool = False, offset: int = 0,
    sides: Sequence[tuple[bool, bool]] = ((True, True),) * 3,
) -> list[Tensor]:  # fmt: skip
    """Encode all outputs in these formats, by one run, and compare with what the reference encodes of the matrices that
    the same run returns. The matrices."""
    torch.manual_seed(0)
    sizes = {"matrix": (shape, dtype), "row": (shape[:1], torch.float32), "col": (shape[1:], dtype)}
    inputs = [numbers(*sizes[kind]) for kind in source.inputs]
    seeds = [torch.tensor(SEED + i) for i in range(source.outputs)]
    outputs, known = list[SourceOutput](), list[Any]()
    for format, (of_row, of_col), x in zip(formats, sides, source.compute(*inputs), strict=False):
        quantizer = lpq.quantizer(format) if isinstance(format, str) else format
        row, col = quantizer.side("row") if of_row else None, quantizer.side("col") if of_col else None
        stats = [2 * stat for stat in measure_reference(x, row, col)] if given else []
        e = Encoding(row, col, shape, dtype, dtype, CPU, (given,) * len(stats), measure, offset)
        outputs.append(SourceOutput(e, program(row, "row", dtype), program(col, "col", dtype)))
        known.append(stats)
    run = produced_programs.bind(source, shape, dtype, CPU, outputs, [True] * source.outputs)
    with Poisoned():
        made = run(inputs, known, seeds)
    for i, (output, one, stats, seed) in enumerate(zip(outputs, made, known, seeds, strict=True)):
        assert one.value is not None
        assert one.value.dtype is dtype
        expected = quantize_reference(one.value, stats, output.e.row, output.e.col, seed, offset, measure)
        expect_bytes([*one.row, *one.col, *one.stats], expected, f"{source.name} {formats} {shape}, of its output {i}")
    values = [one.value for one in made if one.value is not None]
    for i, (value, x) in enumerate(zip(values, source.compute(*inputs), strict=True)):
        # On a CPU, where torch 2.11 computes another silu than from 2.12 on.
        silu = ("silu",) if dtype.itemsize == 2 and torch.__version__ >= "2.12" and not ROUNDS_TWICE else ()
        exact = ("relu", "rms_norm", "layer_norm", *silu)
        if source.name.startswith(exact):
            same = (value == x) | (value.isnan() & x.isnan())
        else:
            rounds = source.name.startswith("gelu_new") and source.name.endswith("backward") and i == 0
            close = {"rtol": 0.05, "atol": 0.1 if rounds else 1e-5}  # torch rounds this gradient more often on a GPU
            same = torch.isclose(value.float(), x.float(), equal_nan=True, **close)
            same |= ~torch.stack(inputs).isfinite().all(0)
        assert same.all(), (source.name, i, value[~same], x[~same])
    return values


@pytest.mark.parametrize(("source", "dtype"), [*zip(SOURCES, cycle((torch.bfloat16, torch.float16)))])
def test_sources(source: Source, dtype: torch.dtype) -> None:
    check(source, ["mxfp8"] * 3, (37, 72), dtype)


@pytest.mark.parametrize("name", sorted({source.name for source in SOURCES} & {*ACTIVATIONS}))
def test_activations_in_fp32(name: str) -> None:
    """They are encoded without being rounded before, as layers encode inputs in fp32."""
    check(ACTIVATIONS[name].alone.product, ["hybrid(row=nvfp4, col=fp8)"], (37, 72), torch.float32, measure=True)


@pytest.mark.parametrize("text", SERVED)
def test_formats(text: str) -> None:
    """Both operands, of one tile and of several, which are ragged; statistics measured, given, and neither."""
    wide = 150 if "scaling=block" in text else 80
    check(SWIGLU, [text], (70, wide), torch.bfloat16, measure=True)
    check(SWIGLU, [text], (50, wide), torch.bfloat16, given=True, offset=32)
    check(SWIGLU, [text], (35, 17), torch.float16, measure=True, given=True)


SEVERAL = ["hybrid(row=mxfp8, col=fp8)", "hybrid(row=fp8(scaling=block), col=nvfp4)", "mxfp4(scale=ceil, rht=true)"]


@pytest.mark.parametrize("sides", [((True, True),) * 3, ((True, False), (False, True), (True, False))], ids=str)
def test_outputs_of_several_formats(sides: Sequence[tuple[bool, bool]]) -> None:
    """One run makes all, of which some are measured before."""
    check(SWIGLU_BACKWARD, SEVERAL, (70, 150), torch.bfloat16, measure=True, sides=sides)


@pytest.mark.parametrize("source", [*ACTIVATIONS["relu"].gated, *ACTIVATIONS["relu"].alone], ids=lambda s: s.name)
def test_a_format_of_a_third_party(source: Source) -> None:
    check(source, [TopsQuantizer()] * 3, (70, 150), torch.bfloat16)
    check(source, ["mxfp8", TopsQuantizer(), "mxfp8"], (35, 17), torch.bfloat16)


@pytest.mark.parametrize("text", ["fp8(scaling=delayed)", "hybrid(row=fp8(scaling=delayed), col=mxfp8)"])
def test_with_a_state_by_a_producer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of kernels finds programs where no kernel in CUDA runs; without them torch computes the matrices."""
    monkeypatch.setattr(produced_programs, "not_here", lambda *what: None)
    shape, dtype, quantizer = (70, 150), torch.bfloat16, lpq.quantizer(text)
    outputs = [Output(EncoderSpec(quantizer, shape, dtype, CPU, remembers=True, col=i != 1), i == 2) for i in range(3)]
    torch.manual_seed(0)
    inputs = [numbers(shape, dtype) for _ in SWIGLU_BACKWARD.inputs]
    states = [{name: torch.full_like(t, 5.0 + i) for name, t in quantizer.new_state("cpu").items()} for i in range(3)]
    programs = bind_producer(SWIGLU_BACKWARD, outputs)
    apart = bind_producer(SWIGLU_BACKWARD._replace(program=None), outputs)
    assert programs.why_not == (None, None, None)
    assert all(why is not None and "has no kernel in Triton" in why for why in apart.why_not)
    made, expected = (producer.produce(inputs, states, [None] * 3) for producer in (programs, apart))
    for one, other in zip(made, expected, strict=True):
        expect_bytes([*one.row, *one.col, *one.stats], [*other.row, *other.col, *other.stats], text)
        assert (one.value is None) == (other.value is None)


def test_what_has_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded of the matrix that the run returns."""
    monkeypatch.setattr(produced_programs, "not_here", lambda *what: None)
    shape, dtype = (64, 64), torch.bfloat16
    texts = "nvfp4(search=mse)", "mxfp8", "identity"
    outputs = [Output(EncoderSpec(lpq.quantizer(text), shape, dtype, CPU)) for text in texts]
    producer = bind_producer(SWIGLU_BACKWARD, outputs)
    assert [why is None for why in producer.why_not] == [False, True, False]
    inputs = [torch.randn(shape).to(dtype) for _ in range(3)]
    for x, text, one in zip(
        SWIGLU_BACKWARD.compute(*inputs), texts, producer.produce(inputs, [()] * 3, [None] * 3), strict=True
    ):
        whole = lpq.quantizer(text).quantize(x)
        expect_bytes([*one.row, *one.col], [*whole.row.tensors(), *whole.col.tensors()], text)
        assert one.value is None


GATED = [act.gated for act in ACTIVATIONS.values() if act.gated.product.program is not None]


@pytest.mark.parametrize("gated", GATED, ids=lambda gated: gated.product.name)
def test_halves_of_one_matrix(gated: Between) -> None:
    """They are what the source makes of two matrices, in tiles that are ragged where the halves meet."""
    torch.manual_seed(0)
    shape, dtype = (70, 75), torch.bfloat16
    gate, up, dy = (numbers(shape, dtype) for _ in range(3))
    halves = torch.cat([gate, up], 1)
    for source, inputs, apart in (
        (gated.product, (halves,), (gate, up)),
        (gated.backward, (halves, dy), (gate, up, dy)),
    ):
        run = produced_programs.bind(source, shape, dtype, CPU, [None] * source.outputs, [True] * source.outputs)
        with Poisoned():
            made = produced_programs.bind_halves(source, shape, dtype, CPU)(*inputs)
            nothing = [()] * source.outputs, [None] * source.outputs
            values = [one.value for one in run(apart, *nothing)][: max(source.outputs - 1, 1)]
        expected = torch.cat([value for value in values if value is not None], 1)
        assert made.shape == expected.shape
        expect_bytes([made], [expected], source.name)


def test_inputs_that_do_not_fit() -> None:
    run = produced_programs.bind(SWIGLU, (64, 64), torch.bfloat16, CPU, [None], [True])
    with pytest.raises(ValueError, match=r"silu_gate: input 1 has 2048 elements in .*, and not 4096 in torch.bfloat16"):
        run([torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)], [()], [None])


def test_tiles_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpq.kernels.triton.produce.programs", lambda *_: 1)
    with pytest.raises(AssertionError, match="differ"):
        check(SWIGLU, ["mxfp8"], (70, 150), torch.bfloat16)
