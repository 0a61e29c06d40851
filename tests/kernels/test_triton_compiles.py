"""The Triton kernels compile for old and new GPUs of two makers, without the instructions that would change a bit.

Nothing is run: this needs Triton and no GPU.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import kept
from tile_sides import choose_triton

import lpq
from lpq import registry
from lpq.kernels import table
from lpq.operations import norm_programs, produced_programs
from lpq.operations.binding import Encoding
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.references import quantize_reference
from lpq.operations.source import ACTIVATIONS, Source

pytest.importorskip("triton", reason="needs Triton, which lpq installs where there is a wheel of it")

from lpq_nvfp4 import eden_triton

from lpq.optim import adamw

TARGETS = [("cuda", 75, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)]
RMS, LAYER = NormKind(1e-6, rounds=True), NormKind(1e-5, centers=True)
EDEN = "nvfp4(stochastic=eden)"
QUANTIZERS = [
    "fp8(scaling=block, block=128x128)",
    "mxfp8",
    "hybrid(row=mxfp4, col=mxfp4(scale=ceil, rht=true, stochastic=true))",
    "hybrid(row=nvfp4(rht=true, stochastic=true), col=nvfp4(block=16x16))",
    "hybrid(row=nvfp4(search=four_over_six), col=nvfp4(block=16x16, search=four_over_six, error=mae, norm=256))",
    EDEN,
]
"""All for the oldest GPU, which has the least; the others have one."""
FMA, EX2, RCP = "fma.rn.f32", "ex2.approx.ftz.f32", "rcp.approx.ftz.f32"
FUSED_OR_FLUSHED = re.compile(r"\bfma\.|\bmad\.[a-z.]*f32|\.ftz|div\.(?:full|approx)|rcp\.approx")


@pytest.fixture(params=TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """Launches compile for a GPU that is not there, and are not made: for which quantizers, and what they compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*request.param)

        def get_current_device(self) -> int:
            return 1000 + TARGETS.index(request.param)  # each has a cache of its own

        def get_current_stream(self, device: int) -> int:
            return 0

    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(self, *arguments, grid=grid, warmup=True, **options))
        return found[-1]

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept.folder() / "triton"))
    monkeypatch.setattr(driver, "_active", Absent())  # its own reset asks for a GPU
    return [QUANTIZERS, QUANTIZERS[:1], QUANTIZERS[2:]][TARGETS.index(request.param)], found


@pytest.mark.slow
@pytest.mark.starts
def test_they_compile_to_what_the_references_compute(compiled: tuple[list[str], list[Any]]) -> None:
    texts, found = compiled
    x, seed = torch.randn(256, 384).bfloat16(), torch.tensor(1)
    for text in texts:
        quantizer = lpq.quantizer(text)
        row, col = quantizer.side("row"), quantizer.side("col")
        kernels = importlib.import_module(f"lpq_{registry.format_of(type(row)).name}.triton")
        if text == EDEN:
            for sides in ((row, None), (None, col)):
                eden_triton.quantize(x, [], *sides, seed, 0, False)
            made = quantize_reference(x, [], row, None, seed, 0, False)
            eden_triton.decode(row.storage.from_tensors(made, row, (256, 384), x.dtype), torch.bfloat16)
            continue
        kernels.measure(x, row, col)
        kernels.quantize(x, [], row, col, seed, 0, False)
        for side in (row, col):
            made = quantize_reference(x, [], side, None, seed, 0, False)
            operand = side.storage.from_tensors(made, side, (256, 384), x.dtype)
            kernels.decode(operand, torch.bfloat16)
            if side.transposable:
                kernels.transpose(operand)
    assert len({kernel.metadata.name for kernel in found}) >= (5 if texts == QUANTIZERS else 2)
    for kernel in found:
        assert kernel.metadata.shared <= 48 << 10, kernel.metadata.name
        if "ptx" in kernel.asm:
            assert not FUSED_OR_FLUSHED.search(kernel.asm["ptx"]), kernel.metadata.name
        else:  # gradual underflow; a fused multiply-add is part of division there
            assert "float_denorm_mode_32 3" in kernel.asm["amdgcn"], kernel.metadata.name


@pytest.mark.slow
@pytest.mark.starts
def test_a_step_of_adamw_compiles_too(compiled: tuple[list[str], list[Any]]) -> None:
    _, found = compiled
    p = torch.randn(256, 384).bfloat16()
    for first in ("mxfp8", "fp8(scaling=block, dtype=e5m2)"):
        m, root = lpq.quantizer(first), lpq.quantizer("fp8(scaling=block, pow2=false)")
        formats = (importlib.import_module(f"lpq_{registry.format_of(type(q)).name}.triton") for q in (m, root))
        tiles = adamw.Tiles(*(f.stored_tile(q) for f, q in zip(formats, (m, root), strict=True)), 2.0**-18)
        held = [q.quantize(p, col=False) for q in (m, root)]
        numbers = adamw.Numbers(1, 0.1, 0.9, 0.1, 1, 1e-8, 1e-3, maximize=True)
        work = adamw.Work(p, torch.zeros(()), p, p, *held)
        tensors = (p, p, *(buffer for moment in held for buffer in moment.buffers))
        entry = (*(tensor.data_ptr() for tensor in tensors), *p.shape)
        for count in (1, 2):
            each = count * [work], count * [entry]
            adamw.step_kernel(adamw.StepLaunch(numbers, tiles, count == 2, tensors, *each))
    assert len(found) == 4  # alone, and by a table
    for kernel in found:
        assert "ptx" not in kernel.asm or not FUSED_OR_FLUSHED.search(kernel.asm["ptx"])


@pytest.mark.slow
@pytest.mark.starts
@pytest.mark.parametrize(
    ("source", "text", "of_libdevice"),
    [
        (ACTIVATIONS["relu"].gated.backward, "hybrid(row=mxfp8, col=fp8(scaling=block))", set[str]()),
        (ACTIVATIONS["silu"].gated.product, "hybrid(row=nvfp4, col=mxfp4(rht=true))", {FMA, "fma.rm.f32", EX2}),
        (ACTIVATIONS["gelu_tanh"].alone.product, "fp8", {FMA, EX2, RCP}),
        (norm_source(RMS), "mxfp8", set[str]()),
        (norm_source(LAYER, biased=True), "hybrid(row=fp8, col=mxfp8)", {FMA}),
    ],
    ids=["relu", "silu", "gelu_tanh", "rms_norm", "layer_norm"],
)
def test_sources_compile_too(
    source: Source, text: str, of_libdevice: set[str], compiled: tuple[list[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Products are fused with sums, and numbers are flushed, only where CUDA's own functions do so."""
    _, found = compiled
    monkeypatch.setattr(table, "choose", choose_triton)
    shape, dtype, cpu = (256, 384), torch.bfloat16, torch.device("cpu")
    quantizer = lpq.quantizer(text)
    e = Encoding(quantizer.side("row"), quantizer.side("col"), shape, dtype, dtype, cpu, measure=True)
    output = produced_programs.operands(e)
    assert not isinstance(output, str)
    outputs = [output, None, output][: source.outputs]
    run = produced_programs.bind(source, shape, dtype, cpu, outputs, [True] * source.outputs)
    sizes = {"matrix": (shape, dtype), "row": (shape[:1], torch.float32), "col": (shape[1:], dtype)}
    inputs = [torch.randn(sizes[kind][0]).to(sizes[kind][1]) for kind in source.inputs]
    run(inputs, [()] * source.outputs, [None] * source.outputs)
    assert found
    for kernel in found:
        assert kernel.metadata.shared <= 48 << 10, kernel.metadata.name
        if "ptx" in kernel.asm:
            lines = [line.split() for line in kernel.asm["ptx"].splitlines() if FUSED_OR_FLUSHED.search(line)]
            assert {line[0].removesuffix("x2") for line in lines} == of_libdevice


@pytest.mark.slow
@pytest.mark.starts
def test_halves_compile_too(compiled: tuple[list[str], list[Any]]) -> None:
    _, found = compiled
    for source, others in zip(ACTIVATIONS["relu"].gated, (0, 1), strict=True):
        run = produced_programs.bind_halves(source, (64, 72), torch.bfloat16, torch.device("cpu"))
        run(torch.ones(64, 144, dtype=torch.bfloat16), *[torch.ones(64, 72, dtype=torch.bfloat16)] * others)
    assert len(found) == 2


@pytest.mark.slow
@pytest.mark.starts
@pytest.mark.parametrize("norm", [RMS, LAYER], ids=["rms", "layer"])
def test_kernels_of_norms_compile_too(
    norm: NormKind, compiled: tuple[list[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one tile and of several, one alone, and rows of one element. A product is fused with a sum where the
    source says so: in the gradients once, and in the sum of squares."""
    _, found = compiled
    monkeypatch.setattr(norm_programs, "at_once", lambda blocks, each, device: min(blocks, 8))
    cpu = torch.device("cpu")
    for shape, dtype in (((33, 8192), torch.bfloat16), ((64, 72), torch.float16), ((1, 1), torch.float32)):
        x, dy, other = torch.ones(3, *shape, dtype=dtype)
        of = norm, shape, dtype, cpu
        factor = norm_programs.bind_rows(*of)(x)[-1]
        norm_programs.bind_sum_rows(*of)(x, other)
        compute = norm_programs.bind_gradients(*of)
        assert (compute is None) == norm.centers
        if compute is not None:
            compute(dy, x, x[0], factor, True, None)
            compute(dy, x, x[0], factor, False, other)
    assert len(found) == (6 if norm.centers else 12)
    for kernel in found:
        assert kernel.metadata.shared <= 48 << 10, kernel.metadata.name
        if "ptx" in kernel.asm:
            lines = [line.split() for line in kernel.asm["ptx"].splitlines() if FUSED_OR_FLUSHED.search(line)]
            assert {line[0].removesuffix("x2") for line in lines} == {FMA}, kernel.metadata.name


def test_no_branch_is_chosen_by_a_function_of_the_device() -> None:
    """In Triton 3.6, which torch 2.11 brings, such a function's result is no constant: both branches are compiled, and
    GPUs that lack a type of either refuse the kernel. Newer Tritons, as here, do not notice."""
    root = Path(lpq.__file__).parents[1]
    files = [*(root / "lpq").rglob("*.py"), *(root / "plugins").rglob("*.py")]
    functions = [f for file in files for f in ast.walk(ast.parse(file.read_text())) if isinstance(f, ast.FunctionDef)]
    of_device = {f.name: f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
    assert {"widen", "narrow", "cast_float8"} <= {*of_device}
    branches = [node.test for f in of_device.values() for node in ast.walk(f) if isinstance(node, ast.If | ast.IfExp)]
    assert len(branches) > 20
    called = {ast.unparse(c.func) for test in branches for c in ast.walk(test) if isinstance(c, ast.Call)}
    assert not called & {*of_device}


def test_a_fused_product_would_be_noticed() -> None:
    assert FUSED_OR_FLUSHED.search("\tfma.rn.f32 \t%f1, %f2, %f3, %f4;")
    assert FUSED_OR_FLUSHED.search("\tmul.rn.ftz.f32 \t%f1, %f2, %f3;")
    assert not FUSED_OR_FLUSHED.search("\tmad.lo.s32 \t%r1, %r2, %r3, %r4;\n\tdiv.rn.f32 \t%f1, %f2, %f3;")
