"""The pytest plugin: ``--lpq-format`` and its effect on the tests of the conformance kit.

Every pytest run in an environment with lpq loads it, so it imports nothing until a test of the kit is
collected, and touches no other test.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lpq.formats import Quantizer
    from lpq.testing.options import Family

KIT = "lpq.testing.conformance."
FIRST = ("purity", "encoding", "layout", "parts", "ranks", "directions", "products", "rounding", "state", "kernels")
"""The modules of the kit that run first: purity, without which any test may fail, and those that find most mistakes."""

pytest.register_assert_rewrite("lpq.testing.comparing", "lpq.testing.conformance", "lpq.testing.expect")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lpq", "lpq: conformance of number formats").addoption(
        "--lpq-format",
        action="append",
        default=[],
        metavar="FORMAT",
        help="a format to test with lpq.testing.conformance, in all its options (nvfp4) or in one way "
        "('nvfp4(block=16x16)'); may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(scope="session")
def conformance_kit() -> ModuleType:
    """All tests of the kit."""
    return import_module(KIT.removesuffix("."))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the tests of the kit; see ``lpq.testing.conformance``."""
    if not metafunc.function.__module__.startswith(KIT):
        return
    from lpq.testing.options import partners

    families = _families(metafunc)
    quantizers = [quantizer for family in families for quantizer in family.quantizers]
    sides = [side for quantizer in quantizers for side in (quantizer.side("row"), quantizer.side("col"))]
    formats = ", ".join(map(str, families))
    for argument in metafunc.fixturenames:
        if argument == "quantizer":
            _parametrize(metafunc, argument, {quantizer: quantizer for quantizer in quantizers}, formats)
        elif argument == "side":
            _parametrize(metafunc, argument, {side: side for side in sides}, formats)
        elif argument == "family" and "kernel" in metafunc.fixturenames:
            _parametrize_kernels(metafunc, families, formats)
        elif argument == "family":
            _parametrize(metafunc, argument, {family: family.default for family in families}, formats)
        elif argument == "partner":
            metafunc.parametrize(argument, partners())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Expect a test, or one case of it, to fail where the format declares it as a known failure."""
    call = getattr(item, "callspec", None)
    if call is None or not isinstance(item, pytest.Function) or not item.function.__module__.startswith(KIT):
        return
    from lpq.testing.options import known_failures

    value = next((call.params[name] for name in ("quantizer", "side", "family") if name in call.params), None)
    if value is None:
        return
    failures = known_failures(getattr(value, "default", value))
    name, case = item.function.__name__, f"-{call.id}-".replace(f"-{value}-", "-", 1).strip("-")
    reason = failures.get(name) or failures.get(f"{name}[{case}]")
    if reason:
        item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first the tests of the kit that find most, and last the tests that compile. Each file keeps its place; the
    files of the kit count as one."""
    groups: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.function.__module__.startswith(KIT):
            groups.setdefault(_file(item), []).append(item)
    ordered = {file: iter(sorted(group, key=_rank)) for file, group in groups.items()}
    kit = {id(item) for group in groups.values() for item in group}
    items[:] = [next(ordered[_file(item)]) if id(item) in kit else item for item in items]


def _file(item: pytest.Item) -> str:
    module = getattr(item, "module", None)
    name = getattr(module, "__name__", "")
    return KIT if name.startswith(KIT) else str(item.path)


def _rank(item: pytest.Function) -> tuple[bool, int]:
    module = item.function.__module__.removeprefix(KIT).removeprefix("test_")
    return "compile" in item.function.__name__, FIRST.index(module) if module in FIRST else len(FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add the test's docstring, its requirement, to the report of a failure."""
    if call.excinfo is None or not isinstance(item, pytest.Function) or not item.function.__module__.startswith(KIT):
        return
    requirement = " ".join((item.function.__doc__ or "").split())
    if requirement and call.excinfo.errisinstance(Exception):
        call.excinfo.value.add_note(f"{item.function.__name__} asks for this: {requirement}")


def _families(metafunc: pytest.Metafunc) -> list[Family]:
    """The formats that the module (``lpq_formats = [...]``) or else the command line names."""
    texts = getattr(metafunc.module, "lpq_formats", None) or metafunc.config.getoption("--lpq-format")
    if not texts:
        raise pytest.Collector.CollectError(
            "the conformance kit must know what to test: --lpq-format FORMAT on the command line, "
            "or lpq_formats = ['FORMAT'] in the module that imports it"
        )
    from lpq.registry.errors import LpqError
    from lpq.testing.options import family

    try:
        return [family(text) for text in texts]
    except LpqError as error:
        raise pytest.Collector.CollectError(str(error)) from None


def _parametrize(metafunc: pytest.Metafunc, argument: str, values: dict[Any, Quantizer], formats: str) -> None:
    """Run the test for each of these values, if it is about the value's quantizer."""
    from lpq.testing.options import ONLY

    applies, words = getattr(metafunc.function, ONLY, (lambda quantizer: True, ""))
    parameters = [pytest.param(value, id=str(value)) for value, quantizer in values.items() if applies(quantizer)]
    _run_with(metafunc, (argument,), parameters, f"nothing {words} in {formats}")


def _parametrize_kernels(metafunc: pytest.Metafunc, families: list[Family], formats: str) -> None:
    """Run the test for each kernel of each of these formats."""
    from lpq.testing.kernel_checks import compared

    marks = {"cuda": [pytest.mark.gpu]}
    parameters = [
        pytest.param(family, kernel, id=f"{family}-{kernel.backend}-{kernel.op}", marks=marks.get(kernel.device, ()))
        for family in families
        for kernel in compared(family.default)
    ]
    _run_with(metafunc, ("family", "kernel"), parameters, f"nothing has a kernel beside its reference in {formats}")


def _run_with(metafunc: pytest.Metafunc, names: Sequence[str], parameters: list[Any], none: str) -> None:
    """Run the test with each of these, or skip it with the reason that there is none."""
    nothing = [pytest.param(*(None for _ in names), id="none", marks=pytest.mark.skip(reason=none))]
    metafunc.parametrize(names, parameters or nothing)
