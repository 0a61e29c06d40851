"""Several matrices that are encoded, measured or put in their places at once have, on a GPU, the bytes that each has by
itself."""

from __future__ import annotations

import pytest
import torch
from support.several import (
    DTYPES,
    ENCODED,
    MEASURED,
    SHAPES,
    TILED,
    TURNED,
    WHOLE,
    check_derived,
    check_operands,
    check_places,
    check_rows,
    check_statistics,
    check_tiled,
    check_versions,
)

from lpq.formats.format import Direction


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ENCODED)
def test_each_has_its_own_operand(text: str, dtype: torch.dtype) -> None:
    check_operands(text, dtype, torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", [SHAPES, WHOLE], ids=["ragged", "whole"])
@pytest.mark.parametrize(("text", "direction"), TILED)
def test_each_has_its_own_tiles(
    text: str, direction: Direction, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> None:
    check_tiled(text, direction, dtype, torch.device("cuda", 0), shapes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_their_own_amaxes(dtype: torch.dtype) -> None:
    check_rows(dtype, torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("text", "direction"), MEASURED)
def test_each_has_its_own_statistics(text: str, direction: Direction, dtype: torch.dtype) -> None:
    check_statistics(text, direction, dtype, torch.device("cuda", 0))


def test_each_is_put_in_its_place() -> None:
    check_places(torch.device("cuda", 0))


@pytest.mark.parametrize("text", TURNED)
def test_each_is_transposed(text: str) -> None:
    check_derived(text, torch.device("cuda", 0))


@pytest.mark.parametrize("text", ENCODED)
def test_the_same_versions_are_not_encoded_again(text: str) -> None:
    check_versions(text, torch.device("cuda", 0))
