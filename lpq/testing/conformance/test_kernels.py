"""Every kernel that can run here equals the reference bit for bit, whatever its outputs held before."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq import operations, registry
from lpq.distributed.casting.given import items_of
from lpq.distributed.masters import Pieces, finish_gather
from lpq.emulation.bf16_gemm import exact as exact_form
from lpq.formats import Quantizer, Storage
from lpq.kernels.table import BACKENDS, ENVIRONMENT, why_not
from lpq.operations import fused_pair as pairs_of_any
from lpq.operations.exact_form import Multiplicand
from lpq.registry import KernelSpec
from lpq.registry.errors import ImportStringError, words
from lpq.testing.calls import DTYPES, SHAPES, SIZES, calls, fresh, matrices, of_operands, on, parts
from lpq.testing.expect import equal, relative_error, same, there
from lpq.testing.operands import SEED, encode, normal
from lpq.testing.options import Family, only, partners
from lpq.torch_private.dispatch import TorchDispatchMode

POISON = 0xA5
SUMS = ("gemm", "exact", "exact_tile")
"""What is compared up to the order of sums, or of products; not of numbers of all sizes: where sums of these overflow
depends on their order."""
VIEWED = ("decode", "transpose", "gemm", "exact")
"""What takes operands, which may be views of larger ones."""
FAST = 1e-2
SUMMED = {torch.bfloat16: 4e-3, torch.float16: 1.4e-3, torch.float32: 1.4e-3}
"""How far a product may be off, in RMS. Tensor cores keep some 14 bits of sums of 8-bit floats, which are then added in
fp32; what is rounded to bf16 on its way to another dtype is off by 1.6e-3."""
FEW, MANY = 1 << 14, 1 << 20
"""Elements of a matrix, at most; fewer where Triton's interpreter takes seconds for what a GPU does at once."""
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
PAIR = KernelSpec(op="quantize", impl="lpq.operations.fused_pair:quantize", backend="cuda")
"""What makes operands of two formats."""
Pair = tuple[Quantizer | None, Quantizer | None]
NOTHING = {
    "exact": "it has no exact form of any operand that it was given",
    "exact_tile": "nothing was made by it of any matrix, though it accepts these operands",
    "tile": "no other built-in format has an operand to make beside its own",
}
"""Why there was nothing to compare, though a kernel accepts its operands."""


class Poisoned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New memory is full of a pattern, so that an element which a kernel never writes shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in (
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ):
            out.untyped_storage().fill_(POISON)
        return out


def kernels(quantizer: Quantizer) -> list[KernelSpec]:
    """The kernels in the table that serve this format, on one side at least."""
    name = registry.format_of(type(quantizer)).name
    return [kernel for plugin in registry.plugins() for kernel in plugin.kernels if name in kernel.formats]


@only(lambda quantizer: bool(kernels(quantizer)), "has a kernel beside its reference")
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_equal_the_reference(family: Family, device: str) -> None:
    """For all options, awkward shapes, numbers of every kind, views, and with the default options every dtype; for one
    operand and both; a GEMM up to the order of its sums.

    ``LPQ_KERNELS`` names the backends whose kernels are compared; unset, all are. With ``TRITON_INTERPRET=1``, by which
    Triton runs its kernels on a CPU, those are compared there. What was never compared is told, with the reason."""
    own = served_on(device, family.default)
    if not own:
        elsewhere = ", as Triton interprets them on the CPU" if device == "cuda" and triton_interprets() else ""
        pytest.skip(f"{family} has no kernel for {device}{elsewhere}")
    if device == "cuda" and not torch.cuda.is_available():
        names = ", ".join(kernel.impl for kernel in own)
        pytest.skip(f"there is no CUDA device here for {names}")
    refused: dict[str, str] = {}
    idle: dict[str, str] = {}
    served: set[str] = set()
    for kernel in own:
        for quantizer in family.quantizers:
            for row, col in pairs(kernel, quantizer):
                reason = refusal(kernel, tuple(side for side in (row, col) if side is not None), device)
                if reason is not None:
                    refused[kernel.impl] = reason
                    continue
                dtypes = DTYPES if quantizer == family.default else DTYPES[:1]
                compared = [
                    compare(kernel, row, col, x, device, name)
                    for name, x in matrices(dtypes, FEW if triton_interprets() else MANY)
                    if kernel.op not in SUMS or name != SIZES
                ]
                if kernel.op in VIEWED:
                    compared.append(compare_views(kernel, row, col, device))
                if any(compared):
                    served.add(kernel.impl)
                else:
                    idle[kernel.impl] = NOTHING.get(kernel.op, "it accepts these operands, and made nothing of them")
                if kernel.rounds:
                    for shape in SHAPES:
                        compare_rounded(kernel, row, col, normal(*shape), device, dtypes)
    no_pair = {kernel.impl: "no quantizer that was tried has operands for it" for kernel in own}
    unseen = [f"{impl}: {reason}" for impl, reason in (no_pair | refused | idle).items() if impl not in served]
    if not served:
        pytest.skip("; ".join(unseen))
    for one in unseen:
        warnings.warn(f"not compared with the reference: {one}", stacklevel=1)


@only(lambda quantizer: bool(kernels(quantizer)), "has a kernel beside its reference")
def test_import_strings_of_kernels(family: Family) -> None:
    """``impl`` and ``why_not`` name functions, of kernels for other hardware too; a module may lack what its kernel
    ``requires``."""
    for kernel in kernels(family.default):
        for string in (kernel.impl, kernel.why_not):
            if string is None:
                continue
            try:
                found = registry.resolve(string)
            except ImportStringError as error:
                missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
                if any(f"{needed}.".startswith(f"{missing}.") for needed in kernel.requires):
                    continue
                raise
            assert callable(found), f"the {kernel.op} kernel names {string!r}, which is {found!r} and cannot be called"


def triton_interprets() -> bool:
    """Whether Triton was asked to run its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def served_on(device: str, quantizer: Quantizer) -> list[KernelSpec]:
    """The kernels of a format that this type of device runs; the CPU those in Triton, where Triton interprets. Products
    of rows in groups have no matrix to be tried with."""
    found = kernels(quantizer)
    if triton_interprets():
        found = [dataclasses.replace(k, device="cpu") if k.backend == "triton" else k for k in found]
    return [kernel for kernel in found if kernel.device == device and kernel.op != "grouped_gemm"]


def refusal(kernel: KernelSpec, operands: tuple[Quantizer, ...], device: str) -> str | None:
    """Why a kernel is not compared for these operands; None: it is."""
    named = {name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",")} - {""}
    try:
        return why_not(kernel, operands, torch.device(device), frozenset(named or BACKENDS))
    except Exception as error:
        if kernel.backend == "triton" and device == "cpu":  # it may ask what the GPU is, and there is none
            return f"its why_not raised {words(error)}, where Triton interprets on a CPU"
        raise


def pairs(kernel: KernelSpec, quantizer: Quantizer) -> Iterator[Pair]:
    """The operands to try a kernel on: this quantizer where its format stands, else that format's default."""
    name = registry.format_of(type(quantizer)).name
    first, last = (
        quantizer if format == name else registry.quantizer(format)
        for format in (kernel.formats[0], kernel.formats[-1])
    )
    row, col = first.side("row"), last.side("col")
    if kernel.op in ("measure", "quantize"):
        yield row, col
        if len(kernel.formats) == 1:
            yield from ((row, None), (None, col))
    elif kernel.op == "gemm":
        yield row, last.side("row")
    elif kernel.op == "exact":
        yield from ((row, None), (col, None))
    elif kernel.op in ("tile", "exact_tile"):
        yield from ((row, None), (None, col))
    elif kernel.op in ("decode", "remember", "cast") or row.transposable:
        yield row, None


def compare(
    kernel: KernelSpec,
    row: Quantizer | None,
    col: Quantizer | None,
    x: Tensor,
    device: str,
    name: str = "normal values",
) -> bool:
    """Run a kernel, and on the CPU the reference of its operation, on the same input, which messages call ``name``.
    Whether there was anything to compare."""
    if kernel.op == "remember":
        row = there(row, f"the operand of {kernel.impl}")
        return compare_memories(kernel, row, x.to(device))
    if kernel.op == "exact":
        row = there(row, f"the operand of {kernel.impl}")
        operand = on(device, fresh(encode(row, x)))
        return compare_exact(kernel, operand, f"{row}, {list(x.shape)} {x.dtype}, {name}")
    if kernel.op == "cast":
        row = there(row, f"the operand of {kernel.impl}")
        return compare_cast(row, x.to(device))
    if kernel.op == "tile":
        return compare_tiles(row, col, x, device, name)
    if kernel.op == "exact_tile":
        first, second = row or col, col or row
        one, other = (there(side, f"an operand for {kernel.impl}") for side in (first, second))
        return compare_multiplicands(one, other, on(device, x), (row is not None, col is not None))
    of = f"{_named(row, col)}, {list(x.shape)} {x.dtype}, {name}"
    compared = [
        compare_call(kernel, arguments, on(device, arguments), f"{of}, {how}" if how else of)
        for how, arguments in calls(kernel.op, row, col, x)
    ]
    return any(compared)


def _named(*sides: Quantizer | None) -> str:
    return " and ".join(str(side) for side in sides if side is not None)


def compare_call(kernel: KernelSpec, arguments: tuple[Any, ...], there: tuple[Any, ...], of: str) -> bool:
    """Call a kernel with the arguments that lie on its device, and the reference with those that lie on the CPU.
    Whether they return anything."""
    what = f"{kernel.backend} kernel {kernel.impl} on {of}"
    expected = flat(getattr(operations, f"{kernel.op}_reference")(*arguments))
    given = [t for value in there for t in flat(value) if isinstance(t, Tensor)]
    before = [t.clone() for t in given]
    with Poisoned():  # type: ignore[no-untyped-call]
        got = flat(registry.resolve(kernel.impl)(*there))
    for one, other in zip(given, before, strict=True):
        same(one, other, f"{what}: it changed what it was given")
    assert len(got) == len(expected), f"{what}: it returned {len(got)} tensors and must return {len(expected)}"
    if kernel.op == "gemm":
        *_, dtype, fast = arguments
        close(got[0], expected[0], FAST if fast else SUMMED[dtype], what)
        return True
    check_new(got, given, what)
    check_order(got, expected if kernel.op == "quantize" else [t.contiguous() for t in expected], what)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one.dtype in DTYPES and other.dtype in DTYPES:  # which NaN it is, processors differ in
            one, other = (torch.where(t.isnan(), torch.nan, t) for t in (one, other))
        same(one.cpu(), other.cpu(), f"{what}, output {i}")
    return bool(expected)


def close(got: Tensor, expected: Tensor, error: float, what: str) -> None:
    """They agree up to the order of sums, and what is not finite is so in both."""
    got = got.cpu()
    assert got.dtype == expected.dtype, f"{what}: it is {got.dtype} and must be {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {list(got.shape)}, not {list(expected.shape)}"
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{what}: what is not finite in one is finite in the other"
    one, other = torch.where(finite, got, 0), torch.where(finite, expected, 0)
    if other.any():
        found = relative_error(one, other)
        assert found < error, f"{what}: it is not the same, by {found:.1e} of the RMS"
    else:
        assert not one.any(), f"{what}: it must be zero"


def compare_views(kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, device: str) -> bool:
    """Operands may be views of larger ones, with any strides. Whether there was anything to compare."""
    sides = [side for side in (row, col) if side is not None]
    here, there = parts(sides, "cpu"), parts(sides, device)
    if not here:
        return False
    of = f"{_named(row, col)}, a part of an operand"
    if kernel.op == "exact":
        return compare_exact(kernel, there[0], of)
    each = (of_operands(kernel.op, *operands) for operands in (here, there))
    compared = [
        compare_call(kernel, arguments, on_device, f"{of}, {how}" if how else of)
        for (how, arguments), (_, on_device) in zip(*each, strict=True)
    ]
    return any(compared)


def compare_rounded(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str,
    dtypes: Sequence[torch.dtype],
) -> None:  # fmt: skip
    """A kernel that rounds what it reads does what it does for a rounded copy."""
    impl = registry.resolve(kernel.impl)
    for dtype in (dtype for dtype in dtypes if dtype != x.dtype):
        for how, (rounded, *rest) in calls(kernel.op, row, col, x.to(dtype)):
            rest = on(device, rest)
            expected = flat(impl(on(device, rounded), *rest))
            with Poisoned():  # type: ignore[no-untyped-call]
                got = flat(impl(x.to(device), *rest, dtype=dtype))
            what = f"{kernel.impl} on {_named(row, col)}, {list(x.shape)} rounded to {dtype}, {how}"
            assert len(got) == len(expected), f"{what}: it returned {len(got)} tensors and must return {len(expected)}"
            for i, (one, other) in enumerate(zip(got, expected, strict=True)):
                same(one.cpu(), other.cpu(), f"{what}, output {i}")


def compare_cast(quantizer: Quantizer, x: Tensor) -> bool:
    """Two ranks that have each a part of a master, which cuts a row, make what encoding all of it makes. Whether it is
    large enough for two parts."""
    master, cut = x.float(), x.numel() // 2 + 1
    if not 0 < cut < x.numel():
        return False
    weights = [quantizer.quantize(torch.zeros_like(master)) for _ in range(2)]
    parts = [(0, cut), (cut, x.numel())]
    ranks = [
        Pieces(items_of([weight], [master.flatten()[start:stop]], [start], None, None, 2), rank, 2)
        for rank, (weight, (start, stop)) in enumerate(zip(weights, parts, strict=True))
    ]
    told = [pieces.tell() for pieces in ranks]
    for pieces in ranks:
        pieces.encode(torch.maximum(*told))
    for mine, yours in zip(*ranks, strict=True):
        for to, source in ((mine, yours), (yours, mine)):
            to.buffer[source.start : source.stop] = source.own
    whole = quantizer.quantize(master)
    for pieces, weight in zip(ranks, weights, strict=True):
        finish_gather(pieces)
        for (direction, made), (_, expected) in zip(weight.operands, whole.operands, strict=True):
            for name, buffer in expected.buffers().items():
                same(
                    made.buffers()[name].cpu(),
                    buffer.cpu(),
                    f"fragments of {quantizer}, {list(x.shape)}, {direction}.{name}",
                )
    return True


def compare_tiles(row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str) -> bool:
    """An operand, and one of another format that takes part, are made from one read as by the reference. Whether there
    is such a format."""
    side = there(row or col, "an operand to make tile by tile")
    for partner in partners():
        other = registry.quantizer(partner) if registry.kernels("tile", (partner,)) else side
        if type(other) is not type(side):
            first, second = row or other.side("row"), col or other.side("col")
            if pairs_of_any.why_not(first, second) is None:
                return compare(PAIR, first, second, x, device, name)
    return False


def compare_multiplicands(row: Quantizer, col: Quantizer, x: Tensor, exact: tuple[bool, bool]) -> bool:
    """What is made without being encoded is, to the bit, the exact form of the encoded operand. Whether it is made."""
    seed = torch.tensor(SEED, device=x.device)
    with torch.no_grad():
        with Poisoned():  # type: ignore[no-untyped-call]
            made = pairs_of_any.multiplicands(x, row, col, seed, exact)
        encoded = operations.quantize(x, None, row, col, seed)
    for got, operand in zip(made or (), encoded, strict=False):
        assert isinstance(operand, Storage), "quantize returns its operands first"
        what = f"{operand.quantizer}, {list(x.shape)}"
        if isinstance(got, Multiplicand):
            expected = exact_form(operand)
            if expected is None:  # LPQ_KERNELS leaves out what would say it
                close(got.decode_rotated().double(), operand.decode_rotated().double().cpu(), 1e-6, what)
                continue
            equal(got.form.constant, expected.constant, f"the constant of {what}")
            same(got.form.matrix.cpu(), expected.matrix.cpu(), f"the matrix of {what}")
            if expected.factor is not None:
                factor = there(got.form.factor, f"the factor of {what}")
                same(factor.cpu(), expected.factor.cpu(), f"the factor of {what}")
        else:
            for one, other in zip(got.tensors(), operand.tensors(), strict=True):
                same(one.cpu(), other.cpu(), f"{what}, beside one that is not encoded")
    return made is not None


def compare_exact(kernel: KernelSpec, operand: Storage, of: str) -> bool:
    """A bf16 matrix, its factor and its constant make what the operand decodes to, but for roundings to fp32. Whether
    there is such a matrix: a kernel may say that it does not serve a shape."""
    with Poisoned():  # type: ignore[no-untyped-call]
        found = registry.resolve(kernel.impl)(operand)
    what = f"{kernel.backend} kernel {kernel.impl} on {of}"
    if found is None:
        return False
    assert found.matrix.dtype == torch.bfloat16, f"{what}: the matrix is {found.matrix.dtype}"
    made = found.matrix.double() * found.constant * (1 if found.factor is None else found.factor.double())
    if found.rest is not None:
        made = torch.cat([made, found.rest.double()], 1)
    close(made, operand.decode_rotated().double().cpu(), 1e-6, what)
    return True


def check_new(got: list[Tensor], given: list[Any], what: str) -> None:
    """What a kernel returns is its caller's own: operands are kept while what they were made of is written to."""
    inputs = [t for value in given for t in flat(value) if isinstance(t, Tensor)]
    taken = [t.untyped_storage().data_ptr() for t in (*inputs, *got) if t.numel()]
    for i, one in enumerate(got):
        memory = one.untyped_storage().data_ptr()
        assert not one.numel() or taken.count(memory) == 1, f"{what}: output {i} shares memory with another tensor"


def check_order(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    """They lie in memory as a compiler is told that they do: row-major, unless a buffer says otherwise of what encoding
    leaves."""
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        found, wanted = ([s for size, s in zip(t.shape, t.stride(), strict=True) if size > 1] for t in (one, other))
        assert not other.numel() or found == wanted, f"{what}: output {i} has strides {found} and must have {wanted}"


def compare_memories(kernel: KernelSpec, side: Quantizer, x: Tensor) -> bool:
    """Let a kernel and the quantizer itself take the same steps into their states. Whether there is a state."""
    ours, theirs = side.new_state(x.device), side.new_state(x.device)
    for step, factor in enumerate((1.0, 0.0, torch.inf, 0.25, torch.nan, 3.0)):
        measured = operations.measure_reference(x * factor, side, None)
        stats = {stat.name: values for stat, values in zip(side.stats, measured, strict=True)}
        side.remember(theirs, stats)
        registry.resolve(kernel.impl)(side, ours, stats)
        for name, expected in theirs.items():
            same(ours[name].cpu(), expected.cpu(), f"{kernel.impl} of {side}, step {step}, {name}")
    return bool(theirs)


def flat(result: Any) -> list[Tensor]:
    """The tensors that an operation returned."""
    if isinstance(result, Storage):
        return result.tensors()
    return list(result) if isinstance(result, list | tuple) else [result]
