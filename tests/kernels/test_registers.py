"""Kernels that cast large matrices, and the grouped product of FP8, keep all they need in registers: while casts did
not, operands of E5M2 took up to 1.4 times as long as those of E4M3. No result shows that, and a CPU can tell."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import imitated
import merged
import pytest
import torch
from compiling import Macros, run_nvcc
from lpq_fp8 import groups_hopper
from tile_sides import on_cuda

import lpq
from lpq import registry
from lpq.kernels import tiles
from lpq.kernels.cuda import CudaKernel

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which says where values lie")
SPILLS = re.compile(r"Function properties for (\w+)\s+\d+ bytes stack frame, (\d+) bytes spill stores")
QUANTIZERS = [
    "fp8", "fp8(scaling=delayed, dtype=e5m2)", "fp8(scaling=row, dtype=e5m2)", "fp8(scaling=block, dtype=e5m2)",
    "fp8(scaling=block, pow2=false, dtype=e5m2)", "mxfp8(dtype=e5m2)", "mxfp4", "nvfp4", "nvfp4(rht=true)",
]  # fmt: skip


def spilled(source: Path, folder: Path, *places: Path) -> dict[str, int]:
    """The bytes that each kernel of a source spills to memory, on Hopper."""
    words = run_nvcc(source, (), "sm_90a", folder / "out.cubin", "-Xptxas=-v", places=places)
    return {name: int(stored) for name, stored in SPILLS.findall(words)}


def launched(text: str, patch: pytest.MonkeyPatch) -> tuple[Path, tuple[str, ...]]:
    """The source and the macros of the kernel that encodes both operands of a large matrix."""
    found: list[tuple[Path, tuple[str, ...]]] = []

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        if self.name == "quantize":
            found.append((self.source.resolve(), macros))

    patch.setattr(tiles, "multiprocessors", lambda device: 132)
    patch.setattr(tiles, "MANY_TILES", 1)
    quantizer = lpq.quantizer(text)
    kernel = on_cuda("quantize", quantizer)
    assert kernel is not None
    x = torch.zeros(512, 512, dtype=torch.bfloat16)
    with imitated.in_place_of_launches(launch):
        registry.resolve(kernel.impl)(x, [], quantizer.side("row"), quantizer.side("col"), None, 0, False)
    (one,) = found
    assert "LPQ_WHOLE" in one[1]
    return one


@pytest.fixture(scope="module")
def spills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The bytes that the kernel of each quantizer spills: all are compiled at once."""
    folder = tmp_path_factory.mktemp("registers")
    copies = merged.headers(folder / "csrc")
    with pytest.MonkeyPatch.context() as patch:
        sets = [launched(text, patch) for text in QUANTIZERS]
    source = folder / "all.cu"
    source.write_text(merged.merged(sets, copies))
    found = spilled(source, folder, copies / "common")
    of_sets = [[count for name, count in found.items() if f"set{i}8quantize" in name] for i in range(len(sets))]
    assert [len(counts) for counts in of_sets] == [1] * len(QUANTIZERS)
    return {text: count for text, (count,) in zip(QUANTIZERS, of_sets, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("text", QUANTIZERS)
def test_large_matrices_are_cast_in_registers(text: str, spills: dict[str, int]) -> None:
    assert spills[text] == 0, f"{text}: {spills[text]} bytes"


def test_spills_are_noticed(tmp_path: Path) -> None:
    source = tmp_path / "many.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) many(volatile int* x) {\n'
        "    int v[64];\n"
        "    for (int i = 0; i < 64; ++i) v[i] = x[i];\n"
        "    for (int i = 0; i < 64; ++i) x[63 - i] = v[i] * v[(i * 7) % 64];\n"
        "}\n"
    )
    assert spilled(source, tmp_path)["many"] > 0


# ------------------------------------------------------------------------------------------ grouped products


SUMS = 4 * 64
"""The bytes of a thread's sums of 64 rows."""


def every() -> Iterator[Macros]:
    """Each two macros that go together, in one set at least."""
    for tall, columns, blocks in itertools.product((128, 256), (False, True), groups_hopper.BLOCKS.values()):
        if blocks != 1 or tall == 128:
            yield groups_hopper.macros(tall, columns, blocks, a_e5m2=tall == 128, b_e5m2=tall == 256 and columns)


@pytest.mark.starts
@pytest.mark.parametrize("macros", sorted(set(every())), ids=" ".join)
def test_sums_are_kept_in_registers(macros: Macros, tmp_path: Path) -> None:
    source = groups_hopper.KERNELS[128].source
    words = run_nvcc(source, macros, "sm_90a", tmp_path / "out.cubin", "-Xptxas=-v")
    (frame,) = re.findall(r"(\d+) bytes stack frame", words)
    assert int(frame) < SUMS, words
    assert "serialized" not in words, "a product waits for the one before it"
