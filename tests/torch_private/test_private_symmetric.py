"""Private names of symmetric memory are there, in torch 2.11 and 2.13, and lpq keeps workspaces that grow."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq.torch_private import symmetric


def test_names_and_arguments() -> None:
    gather, workspace = (
        symmetric.memory._pipelined_multi_all_gather_and_consume,
        symmetric.memory.get_symm_mem_workspace,
    )
    assert [*signature(gather).parameters] == ["shard", "shard_consumer", "ag_out", "group_name", "ag_out_needed"]
    assert [*signature(workspace).parameters] == ["group_name", "min_size"]
    assert isinstance(symmetric.memory._group_name_to_workspace_tensor, dict)


def test_devices() -> None:
    assert [symmetric.serves(torch.device(name)) for name in ("cuda:1", "cpu", "meta")] == [True, False, False]


def test_a_workspace_that_is_replaced_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that was recorded before may read it."""
    workspaces: dict[str, Tensor] = {}
    calls: list[tuple[Any, ...]] = []

    def grow(group: str, size: int) -> None:
        workspaces[group] = torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(symmetric.memory, "_group_name_to_workspace_tensor", workspaces)
    monkeypatch.setattr(symmetric.memory, "get_symm_mem_workspace", grow)
    monkeypatch.setattr(symmetric.memory, "_pipelined_multi_all_gather_and_consume", lambda *args: calls.append(args))

    def gather(*sizes: int) -> Tensor:
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        symmetric.gather_and_consume(parts, print, parts, "g", False)
        return workspaces["g"]

    first = gather(100, 29)
    assert first.numel() == 256, "few sizes, so that few are kept"
    assert gather(256) is first
    second: Any = gather(257)
    assert (second.numel(), second.before) == (512, first)
    assert [args[1:2] + args[3:] for args in calls] == [(print, "g", False)] * 3


def test_gpus_that_reach_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: str, size: int) -> None:
        raise RuntimeError(f"no access in {group}\nand a trace")

    monkeypatch.setattr(symmetric.memory, "get_symm_mem_workspace", refuse)
    for device, expected in (("cuda", "no access in g"), ("cpu", None)):
        mesh: Any = SimpleNamespace(device_type=device, get_group=lambda: SimpleNamespace(group_name="g"))
        assert symmetric.why_not(mesh) == expected
