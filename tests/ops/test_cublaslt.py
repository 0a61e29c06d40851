"""Calls of cuBLASLt, without it: what is made is destroyed, and what goes wrong is said."""

from __future__ import annotations

import gc
from collections import Counter
from ctypes import c_void_p
from typing import Any

import pytest
import torch

import lpq
from lpq.core import exact
from lpq.ops import KernelError, cublaslt


class Library:
    """What a library does that does nothing, with a status for each call that is not to succeed."""

    def __init__(self, found: int = 1, **status: int) -> None:
        self.found = found
        self.status = status
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = self.found
            return self.status.get(name, 0)

        return call


def plan(monkeypatch: pytest.MonkeyPatch, library: Library, bias: bool = False) -> Any:
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    return cublaslt._Plan(c_void_p(), 8, 16, 32, torch.bfloat16, bias)


def test_what_describes_a_product_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    made = plan(monkeypatch, library, bias=True)
    created = {name.removesuffix("Create"): n for name, n in library.calls.items() if name.endswith("Create")}
    assert sum(created.values()) == 5
    del made
    gc.collect()
    assert created == {name.removesuffix("Destroy"): n for name, n in library.calls.items() if "Destroy" in name}


def test_no_way_to_multiply_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="no product of 8x32 and 16x32 in bf16"):
        plan(monkeypatch, Library(found=0))


def test_a_call_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="cublasLtMatrixLayoutCreate failed with status 7"):
        plan(monkeypatch, Library(cublasLtMatrixLayoutCreate=7))


def test_without_the_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    quantizer = lpq.quantizer("nvfp4")
    assert exact.why_not_alpha(quantizer, quantizer) == "torch came without cuBLASLt"
