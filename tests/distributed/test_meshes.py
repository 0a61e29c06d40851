"""These tests run on the CPU also where there are GPUs: FSDP2 takes those if it is not given a mesh."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
FILES = [*HERE.glob("*.py"), *(HERE.parent / "checkpoint").glob("*.py")]


def _calls_without_mesh(text: str) -> Iterator[int]:
    """The lines on which torch's ``fully_shard`` is called without a mesh; that of ``ranks`` gives it one."""
    tree = ast.parse(text)
    given = {
        name.asname or name.name
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "ranks"
        for name in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "fully_shard" and name not in given and not {k.arg for k in node.keywords} & {"mesh", None}:
                yield node.lineno


def test_every_model_is_sharded_over_a_mesh_that_is_given() -> None:
    found = {file.name: lines for file in FILES if (lines := list(_calls_without_mesh(file.read_text())))}
    assert found == {}, "from ranks import fully_shard, or give it mesh="
    assert list(_calls_without_mesh("fully_shard(net)")) == [1]
    assert list(_calls_without_mesh("fsdp.fully_shard(net, reshard_after_forward=True)")) == [1]
    assert list(_calls_without_mesh("from ranks import fully_shard\nfully_shard(net)\nfully_shard(net, mesh=m)")) == []
