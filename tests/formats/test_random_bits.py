"""Philox against its published vectors, and the random bits of an operand against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpq.core import RandomBits
from lpq.formats.random_bits import philox

# From the known-answer tests of Random123 (philox 4x32 10): counter, key, result.
VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_the_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert tuple(int(w) for w in philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))) == result


def words(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in Python's integers, as its authors write it."""
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(p1 >> 32) ^ counter[1] ^ key[0], p1 % 2**32, (p0 >> 32) ^ counter[3] ^ key[1], p0 % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("direction", [0, 1])
def test_an_element_takes_one_byte_of_the_words_of_its_group(seed: int, direction: int) -> None:
    offset = (5, 24)
    drawn = RandomBits(torch.tensor(seed), direction, offset).bytes(3, 21)
    unsigned = seed % 2**64
    expected = []
    for row in range(5, 8):
        for col in range(24, 45):
            word = words([col // 16, row, direction, 0], [unsigned % 2**32, unsigned >> 32])[col % 16 // 4]
            expected.append(word >> 8 * (col % 4) & 0xFF)
    assert drawn.dtype == torch.uint8
    assert drawn.flatten().tolist() == expected


SIZE = st.integers(0, 40)


@given(SIZE, SIZE, SIZE, SIZE, st.integers(-(2**63), 2**63 - 1))
def test_a_shard_that_knows_its_offset_draws_the_bits_of_the_whole(
    top: int, rows: int, left: int, cols: int, seed: int
) -> None:
    key = torch.tensor(seed)
    whole = RandomBits(key, 1).bytes(top + rows, left + cols)
    assert torch.equal(RandomBits(key, 1, (top, left)).bytes(rows, cols), whole[top:, left:])


def test_seeds_and_directions_draw_unlike_bits() -> None:
    streams = [
        RandomBits(torch.tensor(seed), direction).bytes(64, 64) for seed in (0, 1, 2**32, -1) for direction in (0, 1)
    ]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert (one == other).float().mean() < 0.02  # by chance 1 in 256


def chi_square(drawn: torch.Tensor) -> float:
    """How far the counts of 256 values are from equal; about 255 ± 23 for a uniform draw."""
    counts, expected = torch.bincount(drawn.flatten().int(), minlength=256).double(), drawn.numel() / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_bits_are_uniform_along_rows_and_columns_and_independent_of_their_neighbours() -> None:
    drawn = RandomBits(torch.tensor(3), 0).bytes(1024, 1024)
    for name, bits in {
        "all": drawn,
        "one column": RandomBits(torch.tensor(3), 0).bytes(1 << 15, 16)[:, 5],
        "difference along a row": drawn[:, 1:] - drawn[:, :-1],
        "difference down a column": drawn[1:] - drawn[:-1],
        "against the next group": drawn[:, 16:] ^ drawn[:, :-16],
    }.items():
        assert 150 < chi_square(bits) < 370, name
    assert chi_square(drawn & 0xFE) > 1000, "the statistic must see a bit that is stuck"
