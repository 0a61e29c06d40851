"""The kernels of norms with and without a residual: time, and the share of the copy speed of the same run.

    python -m benchmarks.norms [--rows 8192] [--cols 2048]

Bytes are counted once for each matrix that is read or written. ``apart`` is the kernel without the residual and an
addition of torch. The matrices take turns, so that no cache holds them. With ``LPQ_KERNELS=triton`` the kernels are
those in Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import copy_speed, seconds
from lpq.operations.norm_choice import norm_kernels_of
from lpq.operations.norms import NormKind

COPIES = 6
"""The number of matrices that take turns: with 2048 columns more than the L2 cache of an H100 holds."""
KINDS = {
    "rms": NormKind(1e-5), "rms, rounds twice": NormKind(1e-5, rounds=True), "layer": NormKind(1e-5, centers=True),
}  # fmt: skip


class Timed(NamedTuple):
    """A kernel that is timed, or a kernel and an addition."""

    name: str
    matrices: int
    """The number of matrices that are read and written; additions apart move three more."""
    run: Callable[[int], object]
    apart: Callable[[int], object] | None = None


def timed(norm: NormKind, rows: int, cols: int) -> Iterator[Timed]:
    device, dtype, shape = torch.device("cuda"), torch.bfloat16, (rows, cols)
    x, residual, dy = ([torch.randn(shape, device=device, dtype=dtype) for _ in range(COPIES)] for _ in range(3))
    kernels = norm_kernels_of(norm, shape, dtype, device)
    if isinstance(kernels, str):
        raise SystemExit(kernels)
    find, add = kernels.bind_rows(norm, shape, dtype, device), kernels.bind_sum_rows(norm, shape, dtype, device)
    yield Timed("rows", 1, lambda i: find(x[i % COPIES]))
    yield Timed(
        "residual and rows", 3, lambda i: add(x[i % COPIES], residual[i % COPIES]),
        lambda i: find(x[i % COPIES] + residual[i % COPIES]),
    )  # fmt: skip
    gradients = kernels.bind_gradients(norm, shape, dtype, device)
    weight, (factor, *_) = torch.ones(cols, device=device, dtype=dtype), find(x[0])

    def back(i: int, other: Tensor | None) -> Tensor:
        assert gradients is not None
        return gradients(dy[i % COPIES], x[i % COPIES], weight, factor, True, other)[0]

    if gradients is None:
        return
    yield Timed("gradients", 3, lambda i: back(i, None))
    yield Timed(
        "gradients and the stream's", 4, lambda i: back(i, residual[i % COPIES]),
        lambda i: back(i, None) + residual[i % COPIES],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=2048)
    options = parser.parse_args()
    busy = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    speed = copy_speed(busy.device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.rows} x {options.cols} in bf16")
    print(f"{'':44}{'µs':>8}{'share of copy speed':>22}{'apart, µs':>12}")
    for kind, norm in KINDS.items():
        for one in timed(norm, options.rows, options.cols):
            took = seconds(one.run, busy.clone)
            share = 2 * one.matrices * options.rows * options.cols / took / speed
            apart = "" if one.apart is None else f"{1e6 * seconds(one.apart, busy.clone):.1f}"
            print(f"{kind + ': ' + one.name:44}{1e6 * took:8.1f}{share:22.2f}{apart:>12}")


if __name__ == "__main__":
    main()
