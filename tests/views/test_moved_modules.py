"""Modules that pages for authors of plugins named in earlier builds are imported by their old names."""

from __future__ import annotations

import importlib

import pytest

import lpq

PUBLISHED = [
    ("lpq.core.blocks", ("block_amax", "expand_blocks", "pad_blocks", "scale_blocks")),
    ("lpq.core.elements", ("pack_nibbles", "unpack_nibbles", "E4M3")), ("lpq.core.exact", ("decoded",)),
    ("lpq.core.quantizer", ("Quantizer",)), ("lpq.core.storage", ("Storage",)),
    ("lpq.core.operations", ("measure_reference", "gemm_reference")), ("lpq.ops", ("choose",)),
    ("lpq.ops.cuda", ("CudaKernel",)),
]  # fmt: skip
"""What they are imported for."""


@pytest.mark.parametrize(("module", "names"), PUBLISHED, ids=[module for module, _ in PUBLISHED])
def test_a_published_import_is_that_of_the_module_now(module: str, names: tuple[str, ...]) -> None:
    old, now = importlib.import_module(module), importlib.import_module(lpq.moved.MOVED[module])
    assert now.__spec__ is not None
    assert now.__spec__.name == lpq.moved.MOVED[module]
    for name in names:
        with pytest.warns(
            DeprecationWarning, match=rf"^{module}.{name} will be .* lpq 0.2: import it from {now.__name__}$"
        ) as warned:
            value = getattr(old, name)
        assert value is getattr(now, name)
        assert [one.filename for one in warned] == [__file__]


@pytest.mark.parametrize("module", sorted(lpq.moved.MOVED))
def test_each_module_that_moved_has_a_place(module: str) -> None:
    assert importlib.import_module(module).__name__ == module
    importlib.import_module(lpq.moved.MOVED[module])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", sorted(lpq.moved.MOVED))
def test_an_import_of_all_names_brings_all(module: str) -> None:
    brought: dict[str, object] = {}
    exec(f"from {module} import *", brought)
    now = vars(importlib.import_module(lpq.moved.MOVED[module]))
    names = {*now.get("__all__", (name for name in now if not name.startswith("_")))}
    assert brought.keys() - {"__builtins__"} == names
    others = {name for name in names if brought[name] is not now[name]}
    assert {f"{module}.{name}" for name in others} <= lpq.moved.MOVED.keys(), "modules that moved with it"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_import_of_all_names_warns() -> None:
    code = compile("from lpq.core.blocks import *", "mine.py", "exec")
    words = r"^lpq\.core\.blocks\.block_amax will be removed in lpq 0\.2: import it from lpq\.formats\.blocks$"
    with pytest.warns(DeprecationWarning, match=words) as warned:
        exec(code, {"__name__": "mine"})
    assert {one.filename for one in warned} == {"mine.py"}


@pytest.mark.parametrize("module", ["lpq.core.nothing", "lpq.ops.nothing"])
def test_no_other_module_is_made_up(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{module}'"):
        importlib.import_module(module)
