"""Private names of torch that lpq uses are there, and do what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lpq.torch_private import allocator, is_exporting

CPU = torch.device("cpu")


class Seen(TorchDispatchMode):  # type: ignore[misc]
    """Counts what passes the dispatcher."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_allocation_bypasses_the_dispatcher() -> None:
    """In torch 2.11 and 2.13."""
    assert hasattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    for dispatched in (False, True):
        with Seen() as seen:
            made = allocator(CPU, dispatched=dispatched)((3, 4), (1, 3), torch.float8_e4m3fn)
        assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 3), torch.float8_e4m3fn)
        assert seen.calls == dispatched


def test_without_the_private_name_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    made = allocator(CPU)((), (), torch.bfloat16)
    assert (made.shape, made.dtype) == ((), torch.bfloat16)


def test_exporting_is_told_from_compiling() -> None:
    """``torch.compiler.is_exporting()`` is true where torch 2.11 compiles, too."""
    found: list[bool] = []

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if is_exporting() else x + 2

    x, module = torch.zeros(2), Module()
    found = [bool(torch.compile(module, backend="eager", fullgraph=True)(x)[0] == 1)]
    found.append(bool(torch.export.export(module, (x,)).module()(x)[0] == 1))
    assert found == [False, True]
