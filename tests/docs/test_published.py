"""A name that a page of the last release named is there: somebody imports it."""

from __future__ import annotations

import sys

import pytest
from published import LIST, in_code, is_there, published

NAMES = LIST.read_text(encoding="utf-8").split()


def test_names_of_the_last_release_are_there() -> None:
    gone = [name for name in NAMES if not is_there(name)]
    assert gone == [], (
        f"pages of the last release name {gone}: keep each for one version, a module in lpq.moved.MOVED and a "
        "function with a DeprecationWarning that names the new place"
    )


def test_a_name_that_is_gone_is_noticed() -> None:
    assert not any(map(is_there, ("lpq.core.nothing", "lpq.nothing", "lpq.checkpoint.save.nothing")))
    assert is_there("lpq.core.blocks.block_amax"), "which moved"


def test_names_of_modules_whose_framework_is_not_installed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for framework in ("verl", "torchtitan"):
        monkeypatch.setitem(sys.modules, framework, None)
    for module in ("lpq.integrations.verl", "lpq.integrations.torchtitan"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    names = ("lpq.integrations.verl", "lpq.integrations.verl.register", "lpq.integrations.torchtitan.LpqLinear")
    assert all(map(is_there, names))
    assert {*names} <= {*published()}
    assert not any(map(is_there, ("lpq.integrations.verl.nothing", "lpq.integrations.nothing.at_all")))


def test_the_pages_are_searched() -> None:
    names = {"lpq.convert", "lpq.core.Buffer", "lpq.checkpoint.export_file", "lpq.kernels.cuda.CudaKernel"}
    assert names <= {*NAMES}
    assert names <= {*published()}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from lpq.core import Buffer as B, Stat\nfrom torch import nn", {"lpq.core.Buffer", "lpq.core.Stat"}),
        ("import lpq.nn\nx = lpq.export.stream(y)", {"lpq.nn", "lpq.export", "lpq.export.stream"}),
        ("self.lpq.convert; f().lpq", set()),
        ("lpq train --steps 3", set()),
    ],
)
def test_what_code_names(code: str, names: set[str]) -> None:
    assert {*in_code(code)} == names
