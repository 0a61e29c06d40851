"""Calls of cuBLASLt, without it: what is made is destroyed, and what goes wrong is said."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from ctypes import c_void_p
from typing import Any

import pytest
import torch

import lpq
from lpq.emulation import bf16_gemm
from lpq.kernels import KernelError, cublaslt


class Library:
    """A library that does nothing, with a status for each call that is not to succeed."""

    def __init__(self, found: int = 1, **status: int) -> None:
        self.found = found
        self.status = status
        self.calls: Counter[str] = Counter()
        self.preferred: list[tuple[int, int]] = []
        """The attributes of preferences that were set, and their values."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            if name == "cublasLtMatmulPreferenceSetAttribute":
                self.preferred.append((arguments[1], arguments[2]._obj.value))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = self.found
            return self.status.get(name, 0)

        return call


CPU = torch.device("cpu")


def plan(monkeypatch: pytest.MonkeyPatch, library: Library, bias: bool = False) -> Any:
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda index: c_void_p())
    return cublaslt._Plan(cublaslt._How(0, 8, 16, 32, torch.bfloat16, bias=bias))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The library for products of what lies on the CPU, as if it lay on a GPU."""
    library = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr("lpq.torch_private.cuda.current_device", lambda: -1)
    monkeypatch.setattr("lpq.torch_private.cuda.current_stream", lambda index: 0)
    kept = cublaslt._plan, cublaslt._handle, cublaslt._matmul, cublaslt._attribute
    for function in kept:
        function.cache_clear()
    yield library
    for function in kept:
        function.cache_clear()


def at(offset: int) -> torch.Tensor:
    """A contiguous matrix, so many elements of bf16 after a multiple of 256 bytes."""
    whole = torch.zeros(1024, dtype=torch.bfloat16)
    begin = -whole.data_ptr() % 256 // 2 + offset
    return whole[begin : begin + 16 * 32].view(16, 32)


@pytest.mark.parametrize(
    ("left", "right", "aligned"),
    [(0, 0, 256), (128, 0, 256), (1, 0, 2), (0, 1, 2), (8, 0, 16), (0, 12, 8), (24, 32, 16), (3, 8, 2)],
)
def test_the_library_is_told_how_matrices_are_aligned(left: int, right: int, aligned: int, library: Library) -> None:
    cublaslt.bind(CPU, 16, 16, 32, torch.bfloat16, False)(at(left), at(right), torch.zeros(2), None, None)
    alignments = {attribute: value for attribute, value in library.preferred if attribute in (5, 6)}
    assert alignments == {5: aligned, 6: aligned}
    assert library.calls["cublasLtMatmul"] == 1


def test_what_was_found_for_aligned_matrices_serves_no_others(library: Library) -> None:
    for offset in (0, 1, 0, 3, 256):
        cublaslt.bind(CPU, 16, 16, 32, torch.bfloat16, False)(at(offset), at(0), torch.zeros(2), None, None)
    assert library.calls["cublasLtMatmul"] == 5
    assert library.calls["cublasLtMatmulAlgoGetHeuristic"] == 2


def test_what_describes_a_product_goes_before_the_next_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(cublaslt, "_DESCRIPTIONS", [])
    made = plan(monkeypatch, library, bias=True)
    created = {name.removesuffix("Create"): n for name, n in library.calls.items() if name.endswith("Create")}
    assert sum(created.values()) == 5
    kept = plan(monkeypatch, library)
    assert not [name for name in library.calls if "Destroy" in name]
    del made
    gc.collect()
    another = plan(monkeypatch, library)
    assert created == {name.removesuffix("Destroy"): n for name, n in library.calls.items() if "Destroy" in name}
    assert kept is not another


def test_no_way_to_multiply_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match=r"no product of 8x32 and 16x32 in torch\.bfloat16 and "):
        plan(monkeypatch, Library(found=0))


def test_a_call_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="cublasLtMatrixLayoutCreate failed with status 7"):
        plan(monkeypatch, Library(cublasLtMatrixLayoutCreate=7))


def test_without_the_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    quantizer = lpq.quantizer("nvfp4")
    assert bf16_gemm.why_not_alpha(quantizer, quantizer) == "torch came without cuBLASLt"
