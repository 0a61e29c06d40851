"""Products of codes in groups: every kernel, beside what the operands decode to, multiplied in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lpq
from lpq import registry
from lpq.formats.format import Storage
from lpq.formats.sections import bounds, matrices, starts, unit
from lpq.kernels.table import why_not
from lpq.operations import group_tiles
from lpq.operations.binding import Operand
from lpq.operations.decoding import decode
from lpq.operations.groups import encode_groups
from lpq.registry import KernelSpec

KERNELS = {kernel.impl: kernel for name in registry.formats() for kernel in registry.kernels("grouped_gemm", (name,))}
PAIRS = [
    ("fp8", "fp8"), ("fp8(dtype=e5m2)", "fp8"), ("fp8", "fp8(dtype=e5m2)"), ("fp8(scaling=row)", "fp8(scaling=row)"),
    ("fp8(scaling=row, dtype=e5m2)", "fp8(scaling=row)"), ("fp8(scaling=row)", "fp8"), ("fp8", "fp8(scaling=row)"),
    ("fp8(scaling=block)", "fp8(scaling=block)"),
    ("fp8(scaling=block)", "fp8(scaling=block, block=128x128)"),
    ("fp8(scaling=block, dtype=e5m2)", "fp8(scaling=block, pow2=false, block=128x128)"),
]  # fmt: skip
"""Those of rows in groups and of their matrices, or of both operands where groups lie along the contraction."""
COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(100, 600)), min_size=1, max_size=6)
SIXTEENS = st.integers(1, 40).map(lambda n: 16 * n)
Product = Callable[..., Tensor | None]


def product_of(impl: str, a: str, b: str) -> Product:
    """The kernel, or a skip with the reason why it does not take these operands here."""
    kernel: KernelSpec = KERNELS[impl]
    reason = why_not(kernel, (lpq.quantizer(a), lpq.quantizer(b)), torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    found: Product = registry.resolve(impl)
    return found


def poisoned(product: Product, a: Operand, b: Operand | Storage, offs: Tensor, fast: bool = False) -> Tensor:
    """The product, in memory that holds NaN before."""
    sizes = product(a, b, offs, fast)
    assert sizes is not None
    shape = sizes.shape
    del sizes
    torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)  # the next tensor of this size lies there
    made = product(a, b, offs, fast)
    assert made is not None
    assert made.shape == shape
    return made


def compare(made: Tensor, left: Storage, right: Storage) -> None:
    """Each sum is that of the decoded, up to its rounding to bf16 and to what tensor cores lose of 128 elements: they
    cut each product to 13 bits below the largest, always towards zero. On the whole far less is lost."""
    a, b = (decode(storage, torch.float32).double() for storage in (left, right))
    wanted, size = a @ b.t(), a.abs() @ b.abs().t()
    error = made.double() - wanted
    assert (error.abs() <= 2**-8 * wanted.abs() + 2**-7 * size).all()
    assert error.norm() <= 2**-8 * wanted.norm()


def data(cols: int, rows: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(rows, cols) * torch.rand(rows, 1) * 4).bfloat16().cuda()


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
@pytest.mark.parametrize("impl", KERNELS)
@settings(deadline=None, max_examples=12)
@given(counts=COUNTS, behind=st.integers(0, 9), wide=SIXTEENS, deep=SIXTEENS, seed=st.integers(0, 99))
def test_products_are_those_of_what_is_decoded(
    impl: str, pair: tuple[str, str], counts: list[int], behind: int, wide: int, deep: int, seed: int
) -> None:
    product = product_of(impl, *pair)
    first, second = (lpq.quantizer(text) for text in pair)
    offs = torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()
    rows = sum(counts) + behind
    if not rows:
        return
    x = data(deep, rows, seed)
    x[sum(counts) :] = torch.nan
    stack = second.quantize(torch.randn(len(counts), wide, deep, device="cuda").bfloat16(), stack=True)
    x_row, _ = encode_groups(first, x, offs, row=True, col=False)
    assert x_row is not None
    made = poisoned(product, x_row, stack.row, offs)
    begins = starts(offs.tolist(), unit(first.side("row"), 0))
    for i, ((start, stop), matrix) in enumerate(zip(bounds(offs.tolist()), matrices(stack.row), strict=True)):
        if stop > start:
            compare(made[start:stop], x_row.group(i, start, stop, begins[i]), matrix)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "128x128" not in pair[1]], ids=" ".join)
@pytest.mark.parametrize("impl", KERNELS)
@settings(deadline=None, max_examples=12)
@given(counts=COUNTS, behind=st.integers(0, 9), tall=SIXTEENS, wide=SIXTEENS, seed=st.integers(0, 99))
def test_products_of_columns_are_those_of_what_is_decoded(
    impl: str, pair: tuple[str, str], counts: list[int], behind: int, tall: int, wide: int, seed: int
) -> None:
    product = product_of(impl, *pair)
    offs = torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()
    rows = sum(counts) + behind
    if not rows:
        return
    both = []
    for text, cols in zip(pair, (tall, wide), strict=True):
        x = data(cols, rows, seed)
        x[sum(counts) :] = torch.nan
        _, made_of_columns = encode_groups(lpq.quantizer(text), x, offs, row=False, col=True)
        assert made_of_columns is not None
        both.append(made_of_columns)
    a, b = both
    made = poisoned(product, a, b, offs)
    begins = starts(offs.tolist(), unit(a.quantizer, 1))
    for i, (start, stop) in enumerate(bounds(offs.tolist())):
        if stop > start:
            compare(made[i], *(operand.group(i, start, stop, begins[i]) for operand in (a, b)))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("impl", KERNELS)
def test_small_numbers_are_not_lost_beside_a_large_one(impl: str, fast: bool) -> None:
    """The largest product comes first and is taken away at the end. In the precision of a tensor core's sums nothing
    of the others would be left, as where a recipe allows that."""
    product = product_of(impl, "fp8", "fp8")
    deep, largest = 4096, 448
    a, b = torch.ones(32, deep), torch.ones(32, deep)
    a[:, [0, -1]] = b[:, 0] = largest
    b[:, -1] = -largest
    side = lpq.quantizer("fp8")
    offs = torch.tensor([32], dtype=torch.int32, device="cuda")
    x_row, _ = encode_groups(side, a.bfloat16().cuda(), offs, row=True, col=False)
    assert x_row is not None
    stack = side.quantize(b.bfloat16().cuda()[None], stack=True)
    made = product(x_row, stack.row, offs, fast)
    assert made is not None
    kept = bool((made >= deep - 2 * 128).all())
    if "hopper" in impl or not fast:
        assert kept, made
    elif torch.cuda.get_device_capability() == (9, 0):
        assert not kept, "the precision of fast sums has grown: this test shows nothing any more"


def test_rows_of_no_group_and_matrices_of_empty_ones_are_set_to_zero() -> None:
    offs = torch.tensor([0, 5, 5], dtype=torch.int32, device="cuda")
    made = torch.full((9, 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    made[:5] = 1
    rows = group_tiles.bind_in_rows(torch.bfloat16, offs.device)(made, offs, None)
    assert torch.equal(rows[5:], torch.zeros_like(rows[5:]))
    assert (rows[:5] == 1).all()
    stack = torch.full((3, 16, 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    stack[1] = 1
    found = group_tiles.bind_of_groups(torch.bfloat16, offs.device)(stack, offs, None)
    assert torch.equal(found[[0, 2]], torch.zeros_like(found[[0, 2]]))
    assert (found[1] == 1).all()
