"""The pytest plugin: ``--lpq-format`` and what it does to the tests of the conformance kit.

Every pytest run in an environment with lpq loads it, so it imports nothing until a test of the kit is
collected, and touches no other test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lpq.core import Quantizer
    from lpq.testing.options import Family

KIT = "lpq.testing.conformance."

pytest.register_assert_rewrite("lpq.testing.conformance", "lpq.testing.expect")


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of the kit what they run for; see ``lpq.testing.conformance``."""
    if not metafunc.function.__module__.startswith(KIT):
        return
    from lpq.testing.options import partners

    families = _families(metafunc)
    quantizers = [quantizer for family in families for quantizer in family.quantizers]
    sides = [side for quantizer in quantizers for side in (quantizer.side("row"), quantizer.side("col"))]
    asked = ", ".join(map(str, families))
    for argument in metafunc.fixturenames:
        if argument == "quantizer":
            _parametrize(metafunc, argument, {quantizer: quantizer for quantizer in quantizers}, asked)
        elif argument == "side":
            _parametrize(metafunc, argument, {side: side for side in sides}, asked)
        elif argument == "family":
            _parametrize(metafunc, argument, {family: family.default for family in families}, asked)
        elif argument == "partner":
            metafunc.parametrize(argument, [_partner(name, reason) for name, reason in partners().items()])


def _families(metafunc: pytest.Metafunc) -> list[Family]:
    """The formats that the module (``lpq_formats = [...]``) or else the command line names."""
    asked = getattr(metafunc.module, "lpq_formats", None) or metafunc.config.getoption("--lpq-format")
    if not asked:
        raise pytest.Collector.CollectError(
            "the conformance kit must know what to test: --lpq-format FORMAT on the command line, "
            "or lpq_formats = ['FORMAT'] in the module that imports it"
        )
    from lpq.registry.errors import LpqError
    from lpq.testing.options import family

    try:
        return [family(text) for text in asked]
    except LpqError as error:
        raise pytest.Collector.CollectError(str(error)) from None


def _partner(name: str, reason: str) -> Any:
    """A format to stand on the other side of a hybrid; one that cannot be loaded is skipped, with the reason."""
    return pytest.param(name, id=name, marks=[pytest.mark.skip(reason=reason)] if reason else [])


def _parametrize(metafunc: pytest.Metafunc, argument: str, values: dict[Any, Quantizer], asked: str) -> None:
    """Give the test each of these values whose quantizer it is about; known failures must fail."""
    from lpq.testing.options import ONLY, known_failures

    applies, words = getattr(metafunc.function, ONLY, (lambda quantizer: True, ""))
    parameters = []
    for value, quantizer in values.items():
        if applies(quantizer):
            reason = known_failures(quantizer).get(metafunc.function.__name__)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            parameters.append(pytest.param(value, id=str(value), marks=marks))
    if not parameters:
        reason = f"nothing {words} in {asked}"
        parameters = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]
    metafunc.parametrize(argument, parameters)
