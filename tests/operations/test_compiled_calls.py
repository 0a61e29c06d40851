"""Compiled code calls functions in place of operators, and gets the same bytes. A compiler keeps programs on disk: what
it compiled before a format declared another layout is of no use then."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from imitated_gpu import calls_of, imitated_gpu
from lpq_mxfp8 import storage
from support.comparing import equal, equal_bytes
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config
from torch._inductor import config
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq import operations, registry
from lpq.operations.multiplying import gemm_tensors
from lpq.operations.operators import layout_hash
from lpq.operations.quantizing import quantize_tensors
from lpq.operations.sides import quantizer_of
from lpq.torch_private.dispatch import schema_of

SIDES = [
    ("fp8", ""), ("", "fp8"), ("fp8", "fp8"), ("fp8(scaling=row)", "fp8(scaling=row)"), ("mxfp8", "nvfp4"),
    ("nvfp4(stochastic=true)", ""), ("nvfp4(block=16x16)", "nvfp4(block=16x16)"),
]  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("row", "col"), SIDES)
def test_what_is_encoded_is_that_of_the_operator(row: str, col: str, autocast: bool) -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    row, col = (str(registry.quantizer(text)) if text else "" for text in (row, col))
    seed = torch.tensor(7)
    how = (x, [], row, col, seed, 0, True, layout_hash(row, col))
    with torch.autocast("cpu", enabled=autocast):
        expected = torch.ops.lpq.quantize.default(*how)
        found = quantize_tensors(*how)
        assert equal_bytes(found, expected)
        count = sum(len(q.stats) for q in map(quantizer_of, (row, col)) if q is not None)
        if count and len(expected) > count and row != col:
            stats = [s * 2 for s in expected[len(expected) - count :]]
            given = (x, stats, row, col, seed, 16, False, layout_hash(row, col))
            assert equal_bytes(quantize_tensors(*given), torch.ops.lpq.quantize.default(*given))
            assert not equal_bytes(quantize_tensors(*given), found)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4"])
def test_a_product_is_that_of_the_operator(text: str, autocast: bool) -> None:
    text = str(registry.quantizer(text))
    a, b = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for rows in (32, 48))
    left, right = (torch.ops.lpq.quantize.default(m, [], text, "", None, 0, False) for m in (a, b))
    dtype = torch.float32
    how = (left, right, torch.ones(48), text, text, [32, 64], [48, 64], dtype, dtype, dtype, False)
    with torch.autocast("cpu", enabled=autocast):
        assert torch.equal(gemm_tensors(*how), torch.ops.lpq.gemm.default(*how))


CALLS, PRODUCT_CALLS = (4, 4), (7, 2)
"""Python calls of lpq, and buffers allocated, of an encoding that is given its amax and of a product (from C two calls
fewer). Exactly: where there are fewer, lower the number."""


def test_no_call_and_no_buffer_is_added() -> None:
    x, amax, text, dtype = torch.zeros(256, 512, dtype=torch.bfloat16), torch.ones(()), "fp8", torch.bfloat16
    with imitated_gpu() as gpu:
        counts = []

        def encode() -> None:
            nonlocal operands
            operands = quantize_tensors(x, [amax], text, text, None, 0, False, "")

        def multiply() -> None:
            how = (None, text, text, [256, 512], [256, 512], dtype, dtype, dtype, False)
            gemm_tensors(operands[:2], operands[:2], *how)

        operands: list[Tensor] = []
        for call in (encode, multiply):
            call()
            before = gpu.allocated
            counts.append((calls_of(call), gpu.allocated - before))
    assert counts == [CALLS, PRODUCT_CALLS]


def test_compiled_layers_call_no_operator() -> None:
    """By Inductor, whose code has the bytes of eager execution: with random bits, with formats of each product's own,
    and with state."""
    torch.manual_seed(0)
    recipes = ("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "fp8-delayed")
    sizes = itertools.pairwise((64, 48, 32))
    layers = (nn.Linear(*size, dtype=torch.bfloat16) for size in sizes)
    eager = nn.Sequential(*(lpq.convert(layer, recipe) for layer, recipe in zip(layers, recipes, strict=True)))
    again = copy.deepcopy(eager)
    x, dy = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(48, 32, dtype=torch.bfloat16)
    found = []
    # No graph is taken from a cache, where there may be code that another lpq wrote.
    with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
        for module, run in ((eager, eager), (again, torch.compile(again, fullgraph=True))):
            for step in range(2):
                x.grad = None
                module.zero_grad()
                torch.manual_seed(step)
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    y = run(x)
                    y.backward(dy)
            found.append((y, x.grad, *(p.grad for p in module.parameters()), *module.buffers()))
    assert not {event.name for event in seen.events() if event.name.startswith("lpq::")}
    assert equal(*found)


@pytest.mark.parametrize("name", ["quantize", "multiplicands", "gemm", "draw_seeds"])
def test_code_on_disk_finds_the_functions(name: str) -> None:
    """A newer lpq runs code that Inductor wrote under this one: it imports these names, and passes what the operator
    takes."""
    takes = [argument.name for argument in schema_of(getattr(torch.ops.lpq, name).default).arguments]
    function = getattr(importlib.import_module("lpq.operations.compiled_calls"), name)
    assert [*inspect.signature(function).parameters][: len(takes)] == takes


def test_code_imports_no_other_names() -> None:
    layers = nn.Sequential(lpq.convert(nn.Linear(64, 64), "fprop=mxfp8, dgrad=nvfp4, wgrad=fp8-current"))
    x = torch.randn(64, 64, requires_grad=True)
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
        _, codes = run_fw_bw_and_get_code(lambda: torch.compile(layers, fullgraph=True)(x))
    imported = {line for code in codes for line in code.splitlines() if line.startswith("from lpq")}
    assert {line.split()[1] for line in imported} == {"lpq.operations.compiled_calls"}
    assert {line.split()[3] for line in imported} <= {"quantize", "multiplicands", "gemm", "draw_seeds"}


# ------------------------------------------------------------------------------------------ layouts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the compiler keeps what it compiles."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if not config.fx_graph_cache:
        pytest.skip("the compiler is told by its environment to keep nothing")
    yield tmp_path
    torch._dynamo.reset()
    registry.refresh()


def scale_when_compiled(x: Tensor) -> Tensor:
    """As by a new process, in which nothing but the folder is left."""
    registry.refresh()
    torch._dynamo.reset()
    counters.clear()
    side = lpq.quantizer("mxfp8").side("row")

    def encode(x: Tensor) -> Tensor:
        row, _, _ = operations.quantize(x, None, side, None)
        assert row is not None
        return row.tensors()[1]

    with torch.no_grad():
        return torch.compile(encode, fullgraph=True)(x)


def test_a_program_for_another_layout_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 96)
    by_columns = scale_when_compiled(x)
    assert by_columns.stride() == (1, 64)
    assert scale_when_compiled(x).stride() == (1, 64)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1  # else this says nothing of what is on disk
    by_rows = dataclasses.replace(storage.SCALE, column_major=False)
    monkeypatch.setattr(storage, "LAYOUTS", {name: (data, by_rows) for name, (data, _) in storage.LAYOUTS.items()})
    again = scale_when_compiled(x)
    assert again.stride() == (3, 1)
    assert torch.equal(again, by_columns)
