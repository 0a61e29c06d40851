"""INT8 as an author would write it, and what could go wrong: each class makes one mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.operations.decoding import decode_reference
from lpq.operations.exact_form import Exact
from lpq.operations.measuring import measure_reference
from lpq.operations.multiplying import gemm_reference
from lpq.operations.quantizing import quantize_reference
from lpq.operations.transposing import transpose_reference
from lpq.registry import FormatSpec, KernelSpec, hookimpl
from lpq.registry.errors import OptionError


class Int8Storage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


@dataclass(frozen=True)
class Int8(Quantizer):
    stats = (Stat("amax", block=(1, None)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax(dim=1, keepdim=True).float()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        return Int8Storage(data=(x / scale).round().to(torch.int8), scale=scale)


class Unscaled(Int8):
    """Its scale is that of any matrix."""

    stats = ()

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return super().encode(x, {"amax": torch.full((x.shape[0], 1), 127.0, device=x.device)})


class SaysThatItIsTheLargest(Int8):
    """Its statistic is twice what it is declared to be."""

    stats = (Stat("amax", block=(1, None), largest=True),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": super().measure(x)["amax"] * 2}


class WrongDtype(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=made.data.short(), scale=made.scale)


class WrongShape(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=made.data, scale=made.scale.squeeze(1))


class MissingBuffer(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=made.data, scales=made.scale)


class ReturnsNothing(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        super().encode(x, stats)
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class MeasuresNothing(Int8):
    def measure(self, x: Tensor) -> dict[str, Tensor]:
        super().measure(x)
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class SaysTransposable(Int8):
    transposable = True


@dataclass(frozen=True)
class Dithers(Int8):
    """Random, without saying so."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return super().encode(x + torch.rand_like(x) * 1e-2, stats)


class ChangesItsInput(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return super().encode(x.mul_(1.5), stats)


class RankLocal(Int8):
    """Takes the scale from what it sees, which on a rank is a shard."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return super().encode(x, self.measure(x) if x.numel() else stats)


class HidesNaN(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        amax = stats["amax"].nan_to_num(nan=1.0, posinf=1.0)
        return super().encode(x.nan_to_num(), {"amax": amax})


class LosesTheScale(Int8):
    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=made.data, scale=torch.full_like(made.scale, 1 / 32))


class TensorStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale

    def transposed(self) -> Storage:
        rows, cols = self.shape
        return TensorStorage(data=self.data.reshape(cols, rows), scale=self.scale)


@dataclass(frozen=True)
class TransposesByReshape(Quantizer):
    """One scale for the tensor, so transposable; but ``transposed`` moves no element."""

    stats = (Stat("amax"),)
    transposable = True

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax().float()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 127
        return TensorStorage(data=(x / scale).round().to(torch.int8), scale=scale)


@dataclass(frozen=True)
class SharesOneScale(TransposesByReshape):
    """One scale for the tensor; right as far as no operand is derived."""

    transposable = False


class NoZero(Int8):
    """Has a grid without a zero, and says so."""

    known_failures: ClassVar[dict[str, str]] = {"test_zeros_stay_zeros": "this grid has no zero"}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        made = super().encode(x, stats)
        return Int8Storage(data=torch.where(made.data == 0, 1, made.data).to(torch.int8), scale=made.scale)


@dataclass(frozen=True)
class MaybeNoZero(Int8):
    """Has a grid with or without a zero, and says of the latter that it has none."""

    zero: bool = True

    @property
    def known_failures(self) -> dict[str, str]:
        return {} if self.zero else {"test_zeros_stay_zeros": "without zero=true this grid has no zero"}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        made = super().encode(x, stats)
        if self.zero:
            return made
        return Int8Storage(data=torch.where(made.data == 0, 1, made.data).to(torch.int8), scale=made.scale)


class ThreeBits(Int8):
    """Keeps three bits in each byte: more error than eight stored bits promise."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scale = stats["amax"].clamp(min=1e-12) / 3
        return Int8Storage(data=(x / scale).round().to(torch.int8), scale=scale)


class HonestThreeBits(ThreeBits):
    error_bound: ClassVar[float] = 0.35


class BoundlessThreeBits(ThreeBits):
    """Says of its error what no mistake exceeds."""

    error_bound: ClassVar[float] = 2.0


class BoundedButLost(LosesTheScale):
    error_bound: ClassVar[float] = 0.35


class LosesTheTop(Int8):
    """Clips its scale, and so what is large, and stays finite."""

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        amax = {"amax": stats["amax"].clamp(max=2.0**100)}
        return super().encode(x.clamp(-(2.0**100), 2.0**100), amax)


class Pessimist(Int8):
    """Claims a failure that it does not have."""

    known_failures: ClassVar[dict[str, str]] = {"test_zeros_stay_zeros": "it is said"}


class Misspelt(Int8):
    known_failures: ClassVar[dict[str, str]] = {"test_zeroes_stay_zeros": "this grid has no zero"}


@dataclass(frozen=True)
class Modes(Int8):
    """Has two options; nothing is wrong with it."""

    wide: bool = False
    mode: Literal["a", "b"] = "a"


class Picky(Modes):
    """Has two options that do not go together; nothing else is wrong with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wide and self.mode == "b":
            raise OptionError("wide goes with mode a only")


@dataclass(frozen=True)
class LeavesOneOut(Int8):
    """An option that ``==`` leaves out: what was made for one quantizer is taken for another."""

    half: bool = field(default=False, compare=False)


@dataclass(frozen=True, eq=False)
class IsItself(Int8):
    """Equal to itself alone."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True)
class ComparesLetters(Int8):
    """Its own ``==`` takes words for the same that differ in case."""

    mode: str = "a"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparesLetters) and self.mode.lower() == other.mode.lower()

    __hash__ = Int8.__hash__


class Word(str):
    """A word that is equal to others."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@dataclass(frozen=True)
class TakesWords(Int8):
    mode: str = "a"
    step: float = 1.0


def right_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    return decode_reference(operand, dtype)


def wrong_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Forgets the last row, where its output holds what was in that memory."""
    out = torch.empty(operand.shape, dtype=dtype)
    out[:-1] = decode_reference(operand, dtype)[:-1]
    return out


def turned_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right, but for how the result lies in memory."""
    return decode_reference(operand, dtype).t().contiguous().t()


def transposing_kernel(operand: Storage) -> Storage:
    return turned_transpose(operand).map(Tensor.contiguous)


def turned_transpose(operand: Storage) -> Storage:
    """Right, but for how the result lies in memory: as views that were copied as they were."""
    return transpose_reference(operand).map(Tensor.clone)


def keeping_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right, but the result lies in memory of the operand's."""
    values = decode_reference(operand, dtype)
    kept: Tensor = operand.scale
    kept.untyped_storage().resize_(8 * kept.numel() * dtype.itemsize + values.nbytes)
    inside = torch.empty(0, dtype=dtype).set_(kept.untyped_storage(), 8 * kept.numel(), values.shape)
    return inside.copy_(values)


def hasty_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right for operands whose buffers are whole: it reads their memory from the first byte to the last."""
    rows, cols = operand.shape
    data, scale = operand.data, operand.scale
    return (torch.as_strided(data, (rows, cols), (cols, 1)) * torch.as_strided(scale, (rows, 1), (1, 1))).to(dtype)


def writing_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right, but it leaves its operand scaled."""
    values = decode_reference(operand, dtype)
    operand.scale.mul_(2)
    return values


def narrow_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right in bf16, through which it rounds whatever is asked for."""
    return decode_reference(operand, torch.bfloat16).to(dtype)


def own_dtype_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right in the dtype of the operand, which it always gives."""
    return decode_reference(operand, operand.dtype)


def dense_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right where rows begin at multiples of 2: it takes two elements at a time, and of a row what is left not."""
    values = decode_reference(operand, dtype)
    if len(values) > 1 and values.shape[1] % 2:
        values[:, -1] = 0
    return values


def losing_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right for finite values."""
    return decode_reference(operand, dtype).nan_to_num()


def clipping_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right for values of usual size: large ones are lost, and no infinity tells of it."""
    values = decode_reference(operand, dtype)
    return torch.where(values.isfinite(), values.clamp(-(2.0**60), 2.0**60), values)


def right_quantize(*arguments: Any) -> list[Tensor]:
    return quantize_reference(*arguments)


def forgetful_quantize(*arguments: Any) -> list[Tensor]:
    """Does not return the statistics that it is asked for."""
    return quantize_reference(*arguments[:-1], False)


def deaf_quantize(x: Tensor, stats: Any, *rest: Any) -> list[Tensor]:
    """Measures for itself, whatever it is given."""
    return quantize_reference(x, [None] * len(stats), *rest)


def demanding_quantize(x: Tensor, stats: Any, row: Quantizer | None, col: Quantizer | None, *rest: Any) -> list[Tensor]:
    """Right where each operand has a place among the statistics."""
    needed = [stats[i] for i, side in enumerate(s for s in (row, col) if s is not None)]
    return quantize_reference(x, needed, row, col, *rest)


def seeded_quantize(x: Tensor, stats: Any, row: Any, col: Any, seed: Any, *rest: Any) -> list[Tensor]:
    """Right where there is a seed, which it does not need."""
    seed.data_ptr()
    return quantize_reference(x, stats, row, col, seed, *rest)


def rounding_quantize(x: Tensor, *rest: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    return quantize_reference(x.to(dtype or x.dtype), *rest)


def half_rounding_quantize(x: Tensor, *rest: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Rounds what it encodes, and measures what it did not round."""
    made = rounding_quantize(x, *rest, dtype=dtype)
    _, row, col, *_, measure = rest
    if not measure:
        return made
    measured = measure_reference(x, row, col)
    return made[: len(made) - len(measured)] + measured


def flat_quantize(x: Tensor, *rest: Any) -> list[Tensor]:
    """Right for matrices whose rows lie one after the other."""
    return quantize_reference(torch.as_strided(x, x.shape, (x.shape[1], 1)), *rest)


def right_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    return gemm_reference(a, b, bias, dtype)


def unbiased_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Adds a bias of an even number of elements only."""
    return gemm_reference(a, b, bias if b.shape[0] % 2 == 0 else None, dtype)


def half_biased_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Adds a bias where sums may be fast."""
    return gemm_reference(a, b, bias if fast_accumulate else None, dtype)


def swapped_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Right for products that are symmetric."""
    return gemm_reference(b, a, None, dtype)


def hasty_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Writes nothing where there is nothing to sum."""
    if not a.shape[1]:
        return torch.empty(a.shape[0], b.shape[0], dtype=dtype)
    return gemm_reference(a, b, bias, dtype)


def rounded_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Right in bf16, through which it rounds whatever is asked for."""
    return gemm_reference(a, b, bias, torch.bfloat16).to(dtype)


def wide_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Whatever is asked for, it returns fp32."""
    return gemm_reference(a, b, bias, torch.float32)


def right_exact(operand: Storage) -> Exact:
    return Exact(operand.data.to(torch.bfloat16).contiguous(), operand.scale.contiguous())


def losing_exact(operand: Storage) -> Exact:
    """Right for finite values."""
    return Exact(operand.data.to(torch.bfloat16).contiguous(), operand.scale.nan_to_num().contiguous())


def choosy_exact(operand: Storage) -> Exact | None:
    """Serves an even number of rows."""
    return right_exact(operand) if operand.shape[0] % 2 == 0 else None


def idle_exact(operand: Storage) -> Exact | None:
    """Serves no shape."""
    return None


def idle_tile(quantizer: Quantizer, direction: str) -> None:
    """Of no operand does it say how it is made."""


def idle_measure(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """Right for what has no statistics."""
    return []


class Plugin:
    """A plugin with one of these formats, as ``registry.register`` takes it."""

    def __init__(self, quantizer: type[Quantizer], storage: type[Storage] = Int8Storage, **spec: Any) -> None:
        self.spec = FormatSpec(
            name="broken",
            summary="for a test",
            quantizer=f"{quantizer.__module__}:{quantizer.__name__}",
            storage=f"{storage.__module__}:{storage.__name__}",
            effective_bits=spec.pop("effective_bits", 8),
            **spec,
        )

    @hookimpl
    def lpq_register_formats(self) -> FormatSpec:
        return self.spec


def cpu_kernel(name: str, op: str = "decode", **options: Any) -> KernelSpec:
    """A kernel of this module that runs on the CPU."""
    return KernelSpec(op=op, impl=f"{__name__}:{name}", backend="torch", device="cpu", **options)
