"""The pytest plugin: ``--lpq-format`` and what it does to the tests of the conformance kit.

It is loaded by every pytest run in an environment with lpq, so it imports nothing until a test of the kit is collected,
and touches no other test.
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of the kit once for each format (``family``), for each of its options (``quantizer``), and for each
    installed format beside it (``partner``)."""
    if not metafunc.function.__module__.startswith(KIT):
        return
    families = _families(metafunc)
    if "quantizer" in metafunc.fixturenames:
        quantizers = dict.fromkeys(q for family in families for q in family.quantizers)
        _parametrize(metafunc, "quantizer", {q: q for q in quantizers})
    if "family" in metafunc.fixturenames:
        _parametrize(metafunc, "family", {family: family.default for family in families})
    if "partner" in metafunc.fixturenames:
        from lpq.testing.options import simple_formats

        metafunc.parametrize("partner", simple_formats())


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


def _parametrize(metafunc: pytest.Metafunc, argument: str, values: dict[Any, Quantizer]) -> None:
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
        asked = ", ".join(dict.fromkeys(str(value) for value in values))
        reason = f"nothing here {words}: {asked}"
        parameters = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]
    metafunc.parametrize(argument, parameters)
