"""The table of operations, and what stands under the names of its rows elsewhere."""

import re
from pathlib import Path

import pytest
import torch

from lpq import operations
from lpq.operations.kernel_protocols import Decode, Measure, protocols_of, unfit
from lpq.registry.operations import TABLE
from lpq.testing.kernel_checks import CHECKS

REFERENCE = Path(__file__).parents[2] / "docs" / "plugins" / "reference.md"


@pytest.mark.parametrize("op", TABLE)
def test_each_operation_has_protocols_and_a_check(op: str) -> None:
    for protocol in protocols_of(TABLE[op]).values():
        assert protocol.__doc__
        assert protocol.__call__.__doc__
    assert list(CHECKS) == list(TABLE)
    reference = getattr(operations, f"{op}_reference", None)
    assert reference is None or (TABLE[op].reference and unfit(reference, protocols_of(TABLE[op])["impl"]) is None)


def test_the_reference_page_has_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| `(\w+)` \| (.*) \|$", REFERENCE.read_text(), re.MULTILINE)
    expected = [
        (row.name, row.meaning, row.impl, ", ".join(f"`{name}`" for name in (row.bind, row.several) if name) or "–")
        for row in TABLE.values()
    ]
    assert rows[1:] == expected


def test_arguments_that_differ_from_a_protocol_are_told() -> None:
    def decode(operand: object) -> None: ...

    def measure(x: object, row: object, col: object, *, dtype: object = None) -> None: ...

    words = unfit(decode, Decode)
    assert words is not None
    assert words.startswith("it cannot be called as Decode, with (operand, dtype): too many positional arguments")
    assert unfit(measure, Measure, "dtype") is None
    assert unfit(measure, Measure) is None
    assert "dtype" in (unfit(operations.measure_reference, Measure, "dtype") or "")
    assert unfit(torch.mul, Decode) is None  # a function in C does not tell
