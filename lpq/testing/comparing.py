"""Comparisons of a kernel's results with the reference of its operation, on poisoned memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lpq import operations, registry
from lpq.emulation.bf16_gemm import exact as exact_form
from lpq.formats import Quantizer, Storage
from lpq.operations import fused_pair as pairs_of_any
from lpq.operations.binding import on_device, operand_like
from lpq.operations.exact_form import Multiplicand
from lpq.operations.multiplicands import multiplicands
from lpq.operations.recoding import bind_recode
from lpq.registry import KernelSpec
from lpq.testing.calls import calls, fresh, of_operands, on, parts
from lpq.testing.expect import equal, one_nan, relative_error, same, there
from lpq.testing.operands import SEED, encode, measure, normal
from lpq.testing.options import partners
from lpq.testing.table import DTYPES
from lpq.torch_private.dispatch import TorchDispatchMode

POISON = 0xA5
KEPT = 1 << 16
"""The least number of elements of results for which kernels may keep memory of their own."""
FAST = 1e-2
SUMMED = {torch.bfloat16: 4e-3, torch.float16: 1.4e-3, torch.float32: 1.4e-3}
"""How far a product may be off, in RMS. Tensor cores keep some 14 bits of sums of 8-bit floats, which are then added in
fp32; a product that is rounded to bf16 on its way to another dtype is off by 1.6e-3."""
PAIR = KernelSpec(op="quantize", impl="lpq.operations.fused_pair:quantize", backend="cuda")
"""The kernel that makes operands of two formats."""
PART = "a part of an operand"


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


def compare_calls(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str
) -> bool:
    """Call a kernel, and on the CPU the reference of its operation, in all ways with the same matrix, which messages
    call ``name``. Whether there was anything to compare."""
    of = f"{_names(row, col)}, {list(x.shape)} {x.dtype}, {name}"
    return _compare_each(kernel, calls(kernel.op, row, col, x), device, of)


def _compare_each(kernel: KernelSpec, ways: Iterable[tuple[str, tuple[Any, ...]]], device: str, of: str) -> bool:
    """Call a kernel in these ways of calling it, each with its name. Whether there was anything to compare."""
    results = [
        compare_call(kernel, arguments, on(device, arguments), f"{of}, {how}" if how else of) for how, arguments in ways
    ]
    return any(results)


def _names(*sides: Quantizer | None) -> str:
    return " and ".join(str(side) for side in sides if side is not None)


def compare_call(kernel: KernelSpec, arguments: tuple[Any, ...], there: tuple[Any, ...], of: str) -> bool:
    """Call a kernel with the arguments that lie on its device, and the reference with those that lie on the CPU.
    Whether they return anything."""
    what = f"{kernel.backend} kernel {kernel.impl} on {of}"
    expected = flat(getattr(operations, f"{kernel.op}_reference")(*arguments))
    inputs = [t for value in there for t in flat(value) if isinstance(t, Tensor)]
    before = [t.clone() for t in inputs]
    with Poisoned():  # type: ignore[no-untyped-call]
        results = flat(registry.resolve(kernel.impl)(*there))
    for one, other in zip(inputs, before, strict=True):
        same(one, other, f"{what}: it changed what it was given")
    check_number(results, expected, what)
    if kernel.op == "gemm":
        *_, dtype, fast = arguments
        check_apart(kernel, there, results, what)
        close(results[0], expected[0], FAST if fast else SUMMED[dtype], what)
        return True
    check_new(results, inputs, what)
    check_apart(kernel, there, results, what)
    check_order(results, expected if kernel.op == "quantize" else [t.contiguous() for t in expected], what)
    results, expected = ([one_nan(t) if t.dtype in DTYPES else t for t in outputs] for outputs in (results, expected))
    same_outputs(results, expected, what)
    return bool(expected)


def same_outputs(results: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Check that a kernel's results are, to the bit, the results of the reference."""
    check_number(results, expected, what)
    for i, (one, other) in enumerate(zip(results, expected, strict=True)):
        same(one.cpu(), other.cpu(), f"{what}, output {i}")


def check_number(results: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Check that there are as many results as the reference has."""
    assert len(results) == len(expected), f"{what}: it returned {len(results)} tensors and must return {len(expected)}"


def close(actual: Tensor, expected: Tensor, error: float, what: str) -> None:
    """Check that both agree up to the order of sums, and that the same elements are not finite."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype, f"{what}: it is {actual.dtype} and must be {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)}, not {list(expected.shape)}"
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{what}: what is not finite in one is finite in the other"
    one, other = torch.where(finite, actual, 0), torch.where(finite, expected, 0)
    if other.any():
        difference = relative_error(one, other)
        assert difference < error, f"{what}: it is not the same, by {difference:.1e} of the RMS"
    else:
        assert not one.any(), f"{what}: it must be zero"


def compare_views(kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, device: str) -> bool:
    """Operands may be views of larger ones, with any strides. Whether there was anything to compare."""
    views = parts([side for side in (row, col) if side is not None], "cpu")
    if not views:
        return False
    return _compare_each(kernel, of_operands(kernel.op, *views), device, f"{_names(row, col)}, {PART}")


def compare_encodings(kernel: KernelSpec, row: Quantizer, shapes: Sequence[tuple[int, int]], device: str) -> None:
    """Check that a kernel that encodes several matrices in one launch gives each the operand of the reference, of
    elements that it rounds to each dtype."""
    matrices = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes) if all(shape)]
    placed = on(device, matrices)
    where, sizes = placed[0].device, [(len(x), x.shape[1]) for x in matrices]
    for dtype in DTYPES:
        bound = registry.resolve(there(kernel.several, "a kernel for several"))(row, sizes, dtype, where)
        if bound is None:
            continue
        rounded = [x.to(dtype) for x in matrices]
        stats = [operations.measure_reference(x, row, None) for x in rounded]
        expected = [
            operations.quantize_reference(x, known, row, None, None, 0, False)
            for x, known in zip(rounded, stats, strict=True)
        ]
        out = _to_be_written(expected, where)
        with on_device(where):
            bound(placed, on(device, stats), out).run()
        for made, reference, size in zip(out, expected, sizes, strict=True):
            what = f"{kernel.several} on {row}, the matrix of {list(size)} among several, rounded to {dtype}"
            same_outputs(made, [t.contiguous() for t in reference], what)


def compare_transposes(kernel: KernelSpec, row: Quantizer, shapes: Sequence[tuple[int, int]], device: str) -> None:
    """Check that a kernel that transposes several operands in one launch gives for each the result of the reference."""
    here = [fresh(encode(row, normal(*shape))) for shape in shapes if all(shape)]
    expected = [operations.transpose_reference(operand).map(torch.Tensor.contiguous) for operand in here]
    rows = [on(device, operand) for operand in here]
    where = rows[0].device
    out = _to_be_written([operand.tensors() for operand in expected], where)
    bound = registry.resolve(there(kernel.several, "a kernel for several"))(tuple(map(operand_like, rows)), where)
    with on_device(where):
        bound([operand.tensors() for operand in rows], out)
    for made, reference in zip(out, expected, strict=True):
        what = f"{kernel.several} on {row}, the operand of {list(reference.shape[::-1])} among several"
        same_outputs(made, reference.tensors(), what)


def _to_be_written(expected: Sequence[Sequence[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Memory for such buffers, full of a pattern."""
    with Poisoned():  # type: ignore[no-untyped-call]
        return [[torch.empty(t.shape, dtype=t.dtype, device=device) for t in buffers] for buffers in expected]


def compare_rounded(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str,
    dtypes: Sequence[torch.dtype],
) -> None:  # fmt: skip
    """Check that a kernel that rounds as it reads gives the result for a rounded copy."""
    impl = registry.resolve(kernel.impl)
    for dtype in (dtype for dtype in dtypes if dtype != x.dtype):
        for how, (rounded, *rest) in calls(kernel.op, row, col, x.to(dtype)):
            rest = on(device, rest)
            expected = flat(impl(on(device, rounded), *rest))
            with Poisoned():  # type: ignore[no-untyped-call]
                results = flat(impl(x.to(device), *rest, dtype=dtype))
            what = f"{kernel.impl} on {_names(row, col)}, {list(x.shape)} rounded to {dtype}, {how}"
            same_outputs(results, expected, what)


def compare_tiles(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str
) -> bool:
    """An operand, and one of another format that takes part, are made from one read as by the reference. Whether there
    is such a format."""
    side = there(row or col, "an operand to make tile by tile")
    for partner in partners():
        other = registry.quantizer(partner) if registry.kernels("tile", (partner,)) else side
        if type(other) is not type(side):
            first, second = row or other.side("row"), col or other.side("col")
            if pairs_of_any.why_not(first, second) is None:
                return compare_calls(PAIR, first, second, x, device, name)
    return False


def compare_recoded(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str
) -> bool:
    """Compare the column operand that is made of an operand's codes with the column operand of its decoded values.
    Return whether any was made."""
    side = there(row, f"the operand of {kernel.impl}")
    operand = fresh(encode(side, x))
    placed = on(device, operand)
    recode = bind_recode(operand_like(placed), side, placed.device)
    if recode is None:
        return False
    with on_device(placed.device), Poisoned():  # type: ignore[no-untyped-call]
        buffers = recode(placed.tensors())
    decoded = operations.decode_reference(operand, torch.float32)
    expected = operations.quantize_reference(decoded, [], None, side, None, 0, False)
    same_outputs(list(buffers), expected, f"{kernel.impl} on {side}, {list(x.shape)} {x.dtype}, {name}")
    return True


def compare_exact_tiles(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str
) -> bool:
    """An operand in its exact form is made beside the other operand. Whether any was made."""
    one, other = (there(side, f"an operand for {kernel.impl}") for side in (row or col, col or row))
    return compare_multiplicands(one, other, on(device, x), (row is not None, col is not None))


def compare_multiplicands(row: Quantizer, col: Quantizer, x: Tensor, exact: tuple[bool, bool]) -> bool:
    """Check that an operand made without being encoded is, to the bit, the exact form of the encoded one. Return
    whether any was made."""
    seed = torch.tensor(SEED, device=x.device)
    with torch.no_grad():
        with Poisoned():  # type: ignore[no-untyped-call]
            pair = multiplicands(x, row, col, seed, exact)
        encoded = operations.quantize(x, None, row, col, seed)
    for actual, operand in zip(pair or (), encoded, strict=False):
        assert isinstance(operand, Storage), "quantize returns its operands first"
        what = f"{operand.quantizer}, {list(x.shape)}"
        if isinstance(actual, Multiplicand):
            expected = exact_form(operand)
            if expected is None:  # LPQ_KERNELS leaves out the kernel that would give it
                close(actual.decode_rotated().double(), operand.decode_rotated().double().cpu(), 1e-6, what)
                continue
            equal(actual.form.constant, expected.constant, f"the constant of {what}")
            same(actual.form.matrix.cpu(), expected.matrix.cpu(), f"the matrix of {what}")
            if expected.factor is not None:
                factor = there(actual.form.factor, f"the factor of {what}")
                same(factor.cpu(), expected.factor.cpu(), f"the factor of {what}")
        else:
            same_outputs(actual.tensors(), operand.tensors(), f"{what}, beside one that is not encoded")
    return pair is not None


def compare_exact(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str
) -> bool:
    """Check that an operand's exact form gives its decoded values. Return whether there is such a form."""
    row = there(row, f"the operand of {kernel.impl}")
    operand = on(device, fresh(encode(row, x)))
    return _compare_exact(kernel, operand, f"{row}, {list(x.shape)} {x.dtype}, {name}")


def compare_exact_of_views(kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, device: str) -> bool:
    """As ``compare_exact``, for a view of a larger operand."""
    row = there(row, f"the operand of {kernel.impl}")
    return any(_compare_exact(kernel, operand, f"{row}, {PART}") for operand in parts([row], device))


def _compare_exact(kernel: KernelSpec, operand: Storage, of: str) -> bool:
    """Check that a bf16 matrix, its factor and its constant give the decoded operand, but for roundings to fp32. Return
    whether there is such a matrix: a kernel may decline a shape."""
    with Poisoned():  # type: ignore[no-untyped-call]
        form = registry.resolve(kernel.impl)(operand)
    what = f"{kernel.backend} kernel {kernel.impl} on {of}"
    if form is None:
        return False
    assert form.matrix.dtype == torch.bfloat16, f"{what}: the matrix is {form.matrix.dtype}"
    values = form.matrix.double() * form.constant * (1 if form.factor is None else form.factor.double())
    expected = operand.decode_rotated()
    if form.rest is not None:
        values = torch.cat([values, form.rest.double()], 1)
        expected = torch.cat([expected[:, : form.matrix.shape[1]], operand.decode()[:, form.matrix.shape[1] :]], 1)
    close(values, expected.double().cpu(), 1e-6, what)
    return True


def check_new(results: list[Tensor], inputs: list[Tensor], what: str) -> None:
    """Check that outputs share no memory: operands are kept while the tensors they were made of are written to."""
    memories = [t.untyped_storage().data_ptr() for t in (*inputs, *results) if t.numel()]
    for i, one in enumerate(results):
        memory = one.untyped_storage().data_ptr()
        assert not one.numel() or memories.count(memory) == 1, f"{what}: output {i} shares memory with another tensor"


def check_apart(kernel: KernelSpec, arguments: tuple[Any, ...], results: list[Tensor], what: str) -> None:
    """Check that a second call leaves the results of the first alone, where they are large: both are in use at once."""
    if sum(t.numel() for t in results) < KEPT:
        return
    again = flat(registry.resolve(kernel.impl)(*arguments))
    memory = {t.untyped_storage().data_ptr() for t in results if t.numel()}
    for i, one in enumerate(again):
        overlaps = one.numel() and one.untyped_storage().data_ptr() in memory
        assert not overlaps, (
            f"{what}: output {i} of a second call lies in memory of the first: allocate it at each call"
        )


def check_order(results: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Check that outputs have the strides that a compiler expects: row-major, unless a buffer of an encoded operand has
    others."""
    for i, (one, other) in enumerate(zip(results, expected, strict=True)):
        strides, reference = (
            [s for size, s in zip(t.shape, t.stride(), strict=True) if size > 1] for t in (one, other)
        )
        ask = f"{reference}: return it contiguous, or a buffer as Storage.fresh allocates it"
        assert not other.numel() or strides == reference, (
            f"{what}: output {i} has strides {strides} and must have {ask}"
        )


def compare_memories(
    kernel: KernelSpec, row: Quantizer | None, col: Quantizer | None, x: Tensor, device: str, name: str
) -> bool:
    """Let a kernel and the quantizer itself take the same steps into their states. Whether there is a state."""
    side, x = there(row, f"the operand of {kernel.impl}"), x.to(device)
    ours, theirs = side.new_state(x.device), side.new_state(x.device)
    factors = (1.0, 0.0, torch.inf, 0.25, torch.nan, 3.0)
    steps = max(len(factors), *(math.prod(buffer.shape) + 2 for buffer in side.state), 0)
    for step, factor in enumerate(factor for factor, _ in zip(itertools.cycle(factors), range(steps), strict=False)):
        stats = measure(side, x * factor)
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
