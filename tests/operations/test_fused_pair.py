"""Two formats from one read: which pairs the table gives to the kernel of any two, and what that is handed."""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import lpq
from lpq import operations, registry
from lpq.emulation import bf16_gemm
from lpq.kernels import choose, cuda, table, tiles
from lpq.kernels.cuda import CudaKernel
from lpq.nn.step import Shapes, bind
from lpq.nn.traced_step import through_dispatcher
from lpq.operations import fused_pair, produced_tiles
from lpq.operations.binding import cached_by_shape, operand_of
from lpq.operations.encoder import EncoderSpec
from lpq.operations.exact_form import Exact, Multiplicand
from lpq.operations.fused_pair import Job, Made, Make, TileSide
from lpq.operations.multiplicands import multiplicands
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.producer import Output, bind_producer
from lpq.operations.source import ACTIVATIONS, Source
from lpq.registry import FormatSpec, KernelSpec, hookimpl, refresh, register

GPU = torch.device("cuda", 0)
ROWS = [
    "fp8", "fp8(scaling=delayed)", "fp8(scaling=row)", "fp8(scaling=block)", "fp8(scaling=block, block=128x128)",
    "mxfp8", "nvfp4", "nvfp4(stochastic=true)", "nvfp4(block=16x16)",
]  # fmt: skip
COLS = [*ROWS, "mxfp8(dtype=e5m2)", "nvfp4(rht=true)", "nvfp4(rht=true, stochastic=true)"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """A GPU that has all that kernels want, and writes down what is launched: the kernel and its macros."""
    launched: list[tuple[str, tuple[str, ...]]] = []

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        self._slots.pack(*arguments)
        launched.append((self.name, macros))

    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    monkeypatch.setattr(table, "_elsewhere", lambda kernel, device, allowed: None)
    monkeypatch.setattr(table, "_installed", lambda module: True)
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def bind(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int) -> Callable[..., None]:
        return lambda *arguments: launch(self, device, macros, blocks, *arguments)

    monkeypatch.setattr(CudaKernel, "launch", launch)
    monkeypatch.setattr(CudaKernel, "bind", bind)
    refresh()
    yield launched
    refresh()


def chosen(row: str, col: str | None = None) -> table.Choice:
    """The kernel for the operands of two formats, or of one."""
    quantizer = lpq.quantizer(f"hybrid(row={row}, col={col})" if col else row)
    return choose("quantize", (quantizer.side("row").text, quantizer.side("col").text), GPU)


def pair_of(row: Any, col: Any) -> Any:
    return fused_pair.Pair(fused_pair.side_of(row, "row", GPU), fused_pair.side_of(col, "col", GPU))


def test_any_two_formats_are_served_by_one_kernel(gpu: list[Any]) -> None:
    for row, col in itertools.product(ROWS, COLS):
        if row.partition("(")[0] != col.partition("(")[0]:
            assert chosen(row, col).impl is fused_pair.quantize, (row, col)


@pytest.mark.parametrize(
    ("row", "col"),
    [("fp8", "fp8(scaling=block)"), ("nvfp4", "nvfp4(block=16x16)"), ("fp8", "fp8(dtype=e5m2)")],
)
def test_two_kinds_of_a_format_are_too_and_no_portable_kernel_comes_first(row: str, col: str, gpu: list[Any]) -> None:
    choice = chosen(row, col)
    assert choice.impl is fused_pair.quantize
    assert {kernel.backend for kernel, _ in choice.rejected} == {"cuda"}


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4", "nvfp4(rht=true)", "fp8(scaling=row)"])
def test_a_format_that_has_a_kernel_for_both_keeps_it(text: str, gpu: list[Any]) -> None:
    choice = chosen(text)
    assert choice.kernel is not None
    assert choice.kernel.impl.startswith("lpq_")


def test_what_is_not_made_tile_by_tile_says_so(gpu: list[Any]) -> None:
    mxfp8, nvfp4 = lpq.quantizer("mxfp8"), lpq.quantizer("nvfp4(rht=true)")
    assert fused_pair.why_not(mxfp8, nvfp4) is None
    assert fused_pair.why_not(nvfp4, mxfp8) == "nvfp4(rht=true) has no row operand tile by tile: its plugin names none"
    assert "identity has no col operand" in str(fused_pair.why_not(mxfp8, lpq.quantizer("identity")))
    fp8 = lpq.quantizer("fp8")
    assert fused_pair.why_not(fp8, fp8) == "the column operand follows from the row operand"


def test_without_the_kernels_of_a_format_its_pairs_are_made_one_after_the_other(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_elsewhere", lambda kernel, *_: "not today" if "mxfp8.tile" in kernel.impl else None)
    refresh()
    choice = chosen("mxfp8", "nvfp4")
    assert choice.backend == "reference"
    (reason,) = [why for kernel, why in choice.rejected if kernel.impl == "lpq.operations.fused_pair:quantize"]
    assert reason == "mxfp8 has no row operand tile by tile: not today"


@pytest.mark.parametrize("row", ROWS)
def test_it_returns_what_the_operation_returns(row: str, gpu: list[Any]) -> None:
    """The tensors that the kernel is to fill, those of the reference in shape and dtype, and none of them twice."""
    shapes = itertools.islice(itertools.cycle([(256, 384), (33, 80), (0, 16)]), ROWS.index(row), None)
    for col, (rows, cols) in zip(COLS, shapes, strict=False):
        quantizer = lpq.quantizer(f"hybrid(row={row}, col={col})")
        sides = quantizer.side("row"), quantizer.side("col")
        if fused_pair.why_not(*sides) is not None:
            continue
        pair = pair_of(*sides)
        x, seed = torch.randn(rows, cols), torch.tensor(1)
        others = operations.measure_reference(x, *sides)
        for stats, measure in itertools.product(([], others, [None] * len(others)), (False, True)):
            expected = operations.quantize_reference(x, stats, *sides, seed, 0, measure)
            gpu.clear()
            got = cached_by_shape(pair.bind)(x, stats, *sides, seed, 0, measure)
            assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in expected]
            assert len({t.data_ptr() for t in got}) == len(got) or not x.numel()
            assert [name for name, _ in gpu].count("pair") == bool(x.numel())


@pytest.mark.parametrize(
    ("row", "col", "kernels"), [
        ("mxfp8", "fp8(scaling=block)", ["pair"]), ("fp8", "mxfp8", ["amax_parts", "pair"]),
        ("fp8", "nvfp4", ["amax_parts", "pair"]), ("nvfp4", "fp8", ["amax_parts", "pair"]),
        ("fp8", "nvfp4(rht=true)", ["amaxes", "pair"]),
        ("fp8(scaling=row)", "nvfp4", ["zero", "amax", "amax_parts", "pair"]),
    ]
)  # fmt: skip
def test_what_both_need_to_know_is_measured_once(row: str, col: str, kernels: list[str], gpu: list[Any]) -> None:
    first, second = lpq.quantizer(row).side("row"), lpq.quantizer(col).side("col")
    pair = pair_of(first, second)
    x = torch.randn(256, 384)
    cached_by_shape(pair.bind)(x, [], first, second, None, 0, False)
    assert [name for name, _ in gpu] == kernels
    known = operations.measure_reference(x, first, second)
    gpu.clear()
    cached_by_shape(pair.bind)(x, known, first, second, None, 0, False)
    assert [name for name, _ in gpu] == ["pair"], "all that is needed is given"


# ---------------------------------------------------------------------------------------------- a third party's format


def theirs(quantizer: lpq.core.Quantizer, direction: str) -> TileSide:
    def bind(job: Job) -> Make:
        def make(*given: Any) -> Made:
            made = quantizer.storage.empty(quantizer, job.shape, job.dtype, job.device).tensors()
            return Made(made, (), (made[0].data_ptr(), 0.5))

        return make

    return TileSide(Path("/somewhere/theirs.cuh"), f"Theirs<{direction == 'row'}>", "Pf", bind)


class Acme:
    """Somebody's format, which borrows what a format must have, and says how it is made tile by tile."""

    @staticmethod
    @hookimpl
    def lpq_register_formats() -> FormatSpec:
        return FormatSpec(
            name="acme", summary="somebody's", effective_bits=8,
            quantizer="test_pairs:AcmeQuantizer", storage="lpq_mxfp8.storage:MXFP8Storage",
            kernels=(KernelSpec(op="tile", impl="test_pairs:theirs", backend="cuda"),),
        )  # fmt: skip


class AcmeQuantizer(type(lpq.quantizer("mxfp8"))):
    pass


def test_a_third_partys_format_takes_part(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_pairs", sys.modules[__name__])
    register(Acme, name="acme")
    assert chosen("acme", "nvfp4").impl is fused_pair.quantize
    assert chosen("fp8", "acme").impl is fused_pair.quantize
    pair = fused_pair.pair_of("acme", "nvfp4", (False, False), GPU)
    x: Tensor = torch.randn(128, 256, dtype=torch.bfloat16)
    assert pair is not None
    got = cached_by_shape(pair.bind)(x, [], lpq.quantizer("acme"), lpq.quantizer("nvfp4"), None, 0, False)
    assert len(got) == 5
    name, macros = gpu[-1]
    assert name == "pair"
    assert {"LPQ_ROW=Theirs<True>", 'LPQ_ROW_HEADER="/somewhere/theirs.cuh"'} <= set(macros)
    assert "LPQ_COL=nvfp4::Col<0,false,false,false>" in macros


NORMS = [(NormKind(1e-6, offset=True), False), (NormKind(1e-6, rounds=True), False), (NormKind(1e-6, True), True)]
SOURCES = [source for activation in ACTIVATIONS.values() for between in activation for source in between]
SOURCES += [norm_source(*how) for how in NORMS]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_so_it_does_in_what_every_source_computes(
    source: Source, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "test_pairs", sys.modules[__name__])
    register(Acme, name="acme")
    monkeypatch.setattr(produced_tiles, "lacking", lambda *of: None)
    shape, dtype = (128, 256), torch.bfloat16
    spec = EncoderSpec(lpq.quantizer("hybrid(row=acme, col=nvfp4)"), shape, dtype, torch.device("cpu"))
    producer = bind_producer(source, [Output(spec)] * source.outputs)
    assert producer.why_not == (None,) * source.outputs
    sizes = {"matrix": (shape, dtype), "row": (shape[:1], torch.float32), "col": (shape[1:], dtype)}
    inputs = [torch.zeros(size, dtype=held) for size, held in map(sizes.__getitem__, source.inputs)]
    made = producer.produce(inputs, [()] * source.outputs, [None] * source.outputs)
    assert all(len(one.row) == 2 and len(one.col) == 3 for one in made)
    name, macros = gpu[-1]
    assert name == "produce"
    assert {f"LPQ_SOURCE={source.struct}", 'LPQ_HEADER_0="/somewhere/theirs.cuh"'} <= set(macros)
    (sides,) = (macro for macro in macros if macro.startswith("LPQ_SIDES="))
    assert sides.count("Theirs<True>") == source.outputs, sides


# ---------------------------------------------------------------------------------------------- multiplied at once


@pytest.mark.parametrize("exact", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("row", "col"), [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4(rht=true)"), ("mxfp8", "nvfp4")])
def test_operands_are_made_for_a_product(
    row: str, col: str, exact: tuple[bool, bool], gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "get_device", lambda self: 0)
    sides = lpq.quantizer(row).side("row"), lpq.quantizer(col).side("col")
    made = multiplicands(torch.randn(64, 96), *sides, None, exact)
    assert made is not None
    for operand, side, wanted, shape in zip(made, sides, exact, ((64, 96), (96, 64)), strict=True):
        assert isinstance(operand, Multiplicand) == wanted
        assert (operand.shape, operand.dtype, operand.quantizer) == (shape, torch.float32, side)
        if isinstance(operand, Multiplicand):
            assert (operand.form.matrix.shape, operand.form.matrix.dtype) == (shape, torch.bfloat16)
            assert (operand.form.factor is None) == side.text.startswith("mxfp8")
            assert operand.tensors()[0] is operand.form.matrix
    name, macros = gpu[-1]
    assert name == "pair"
    flags = [any(m.startswith(f"LPQ_{side}=") and m.endswith("true>") for m in macros) for side in ("ROW", "COL")]
    assert tuple(flags) == exact


def test_where_they_cannot_be_made_operands_are_encoded(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "get_device", lambda self: 0)
    mxfp8, fp8, random = (lpq.quantizer(text) for text in ("mxfp8", "fp8", "nvfp4(stochastic=true)"))
    x = torch.randn(32, 32)
    assert multiplicands(x, mxfp8, mxfp8, None, (True, True)) is not None
    for other in (x[:31], x[:, :24], x[:0]):
        assert multiplicands(other, mxfp8, mxfp8, None, (True, True)) is None
    assert multiplicands(x, fp8, mxfp8, None, (True, False)) is None  # fp8 has no need of it
    assert multiplicands(x, fp8, mxfp8, None, (False, True)) is not None
    assert multiplicands(x, random, mxfp8, None, (True, False)) is None  # without a seed
    assert multiplicands(x, random, mxfp8, torch.tensor(1), (True, False)) is not None
    monkeypatch.setattr(table, "_installed", lambda module: module != "cuda.core")
    refresh()
    assert multiplicands(x, mxfp8, mxfp8, None, (True, True)) is None
    monkeypatch.setenv("LPQ_KERNELS", "cuda")
    assert multiplicands(x, mxfp8, mxfp8, None, (True, True)) is None


def test_what_is_made_for_a_product_decodes_to_what_it_stands_for() -> None:
    operand = Multiplicand().bind(lpq.quantizer("nvfp4"), (1, 2), torch.bfloat16)
    operand.form = Exact(torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor(4.0), 0.5)
    assert operand.decode_rotated().tolist() == [[3.0, -4.0]]
    told = operand_of(operand.tensors(), operand.text, operand.shape, operand.dtype)
    assert isinstance(told, Multiplicand)
    assert (told.quantizer, told.shape, told.dtype) == (operand.quantizer, operand.shape, operand.dtype)
    assert told.form == operand.form


def test_only_formats_that_have_kernels_for_it_ask() -> None:
    """Others pay nothing."""
    plans = {
        text: lpq.nn.Linear(16, 16, recipe=text).passes.plan for text in ("fp8-current", "mxfp8", "nvfp4-fwd-bf16-bwd")
    }
    products = {text: (p.fprop, p.dgrad, p.wgrad) for text, p in plans.items() if p is not None}
    assert products["fp8-current"] == (None, None, None)
    assert all(products["mxfp8"])
    assert [product is not None for product in products["nvfp4-fwd-bf16-bwd"]] == [True, False, False]


def test_a_struct_is_one_parameter() -> None:
    from lpq.kernels.cuda import _Arguments

    kernel = CudaKernel("common/pair.cu", "pair", "P(PIf)(q)I", threads=256)
    packed = kernel._slots.pack(1, 2, 3, 0.5, 5, 6)
    assert struct.unpack_from("<f", packed, 24) == (0.5,)
    arguments = _Arguments(len(packed), kernel._places)
    start = arguments.array[0]
    assert start is not None
    assert [place - start for place in arguments.array] == [0, 8, 32, 40]


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4"])
def test_where_operators_are_called_operands_are_encoded(text: str, gpu: list[Any]) -> None:
    """They take encoded ones: where others look on than a compiler."""
    layer = lpq.nn.Linear(32, 48, bias=False, dtype=torch.bfloat16, recipe=text)
    plan, shapes = layer.passes.plan, Shapes(64, 32, 48, *[torch.bfloat16] * 4, GPU, True, True, False)
    assert plan is not None
    any_pair = registry.kernels("gemm", (registry.ANY, registry.ANY))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16_gemm, "choose", lambda *_: table.Choice("cuda", any_pair, print, ()))
        steps = bind(plan, shapes), through_dispatcher(plan, shapes)
    for step, made in zip(steps, (True, False), strict=True):
        operands = step.x.row, step.w.row if step.w else None, step.dy.row, step.dy.col
        assert [operand is not None and operand.form is not None for operand in operands] == [made] * 4


def compiled(recipe: str, tokens: int) -> tuple[list[str], list[str]]:
    """The operators of lpq in what a compiler makes of a layer's forward and of its backward; nothing of it is run."""
    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([t.name().removeprefix("lpq::") for t in targets if str(t).startswith("lpq.")])
        with torch._guards.detect_fake_mode(inputs):
            made = [(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in graph(*inputs)]
        return make_boxed_func(lambda *_: [None if m is None else torch.empty(m[0], dtype=m[1]) for m in made])

    torch._dynamo.reset()
    layer = lpq.nn.Linear(32, 48, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(layer, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)(x)
    y.backward(torch.ones_like(y))
    torch._dynamo.reset()
    forward, backward = graphs
    return forward, backward


@pytest.mark.parametrize(
    ("recipe", "tokens", "of_dy"),
    [("mxfp8", 33, "quantize"), ("mxfp8-fwd-nvfp4-bwd", 64, "multiplicands"), ("fp8-current", 64, "quantize")],
)
def test_a_compiler_sees_operands_that_are_made_for_a_product(
    recipe: str, tokens: int, of_dy: str, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of dy, in whole tiles. Operands of x and of the weight are made one by one: what is kept of them, a
    compiler decides."""
    monkeypatch.setattr(table, "_elsewhere", lambda kernel, *_: "needs Blackwell" if kernel.min_sm == 100 else None)
    refresh()
    seeds = ["draw_seeds"] if "nvfp4" in recipe else []
    forward, backward = compiled(recipe, tokens)
    assert sorted(forward) == sorted([*seeds, "quantize", "quantize", "gemm"])
    assert sorted(backward) == sorted(["quantize", "quantize", of_dy, "gemm", "gemm"])


def test_a_compiler_sees_encoded_operands_where_they_are_multiplied(gpu: list[Any]) -> None:
    """On this GPU, which has all that kernels want, mxfp8 is, too."""
    forward, backward = compiled("mxfp8", 64)
    assert sorted(forward) == ["gemm", "quantize", "quantize"]
    assert sorted(backward) == ["gemm", "gemm", "quantize", "quantize", "quantize"]
