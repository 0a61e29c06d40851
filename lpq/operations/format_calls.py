"""Calls of a format's methods: the first result of each is checked, with errors in words.

Each buffer, statistic and decoded matrix must be as the layout and ``stats`` declare it. The conformance kit tries many
matrices; these checks are for a format on which it was never run. The result of each method is checked once for each
dtype and device; from then on the check is a lookup in a set.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from lpq import registry
from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import Covering
from lpq.formats.random_bits import RandomBits
from lpq.kernels.host_to_device import captured
from lpq.operations.operators import ORDINARY, can_bypass_dispatcher
from lpq.registry import PluginError

Shape = tuple[int, int]
Fault = tuple[str, str]
"""The fault, and its remedy."""
FP32_COUNTS = 2**24
"""The greatest number up to which fp32 has all integers."""
AS_DECLARED = "return it as declared, or declare what is returned"
OF_COUNTS = ". A count is an int64 tensor since plugin interface 2, and in fp32 where the spec has api_version=1"


def measured_by(quantizer: Quantizer, x: Tensor) -> list[Tensor]:
    """The statistics that the format's ``measure`` and ``measure_again`` find, in the order of ``stats``."""
    stats = _by_name(quantizer, "measure", quantizer.measure(quantizer.rotated(x)))
    if any(stat.round == 2 for stat in quantizer.stats):
        return measured_again_by(quantizer, x, stats)
    return _measured(quantizer, "measure", x, stats)


def measured_again_by(quantizer: Quantizer, x: Tensor, first: Mapping[str, Tensor]) -> list[Tensor]:
    """The given statistics of round 1, and those that the format's ``measure_again`` finds with them, in the order of
    ``stats``."""
    for_format = _handed_back(quantizer, first) if quantizer.counts_in_fp32 else first
    second = _by_name(quantizer, "measure_again", quantizer.measure_again(quantizer.rotated(x), for_format))
    return _measured(quantizer, "measure_again", x, {**first, **second})


def _by_name(quantizer: Quantizer, method: str, returned: object) -> Mapping[str, Tensor]:
    """The statistics that a method returned; None stands for none."""
    if returned is not None and not isinstance(returned, dict | Mapping):  # a dict is known without a call
        raise lacking(quantizer, method, returned)
    return returned or {}


def _measured(quantizer: Quantizer, method: str, x: Tensor, by_name: Mapping[str, Tensor]) -> list[Tensor]:
    if quantizer.counts_in_fp32:
        by_name = _counted(quantizer, method, x, by_name)
    try:
        measured = [by_name[stat.name] for stat in quantizer.stats]
    except KeyError as error:
        raise lacking(quantizer, method, by_name, error.args[0]) from None
    if _is_unchecked(quantizer, method, x):
        of, fault = unfit_stats(quantizer, method, by_name, x)
        _check(quantizer, of, x, fault)
    return measured


def _counted(quantizer: Quantizer, method: str, x: Tensor, by_name: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The statistics of a format of interface 1, with its counts, which are in fp32, in int64."""
    if x.numel() > FP32_COUNTS:
        cause = f"counts in fp32, as in plugin interface 1, exact up to 2^24 elements, and these are {x.numel():,}"
        raise _fault(quantizer, method, cause, "count in int64, and write api_version=2 in the spec")
    return {n: t.to(torch.int64) if n in quantizer.counts_in_fp32 else t for n, t in by_name.items()}


def _handed_back(quantizer: Quantizer, stats: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Statistics as the format wants them: counts in fp32 where it is of interface 1."""
    return {n: t.to(torch.float32) if n in quantizer.counts_in_fp32 else t for n, t in stats.items()}


def encoded_by(quantizer: Quantizer, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits | None) -> Storage:
    """The operand that the format's ``encode`` makes of a matrix, or, with random bits, ``encode_stochastic``."""
    if quantizer.counts_in_fp32:
        stats = _handed_back(quantizer, stats)
    method = "encode" if bits is None else "encode_stochastic"
    own = quantizer.rotated(x, bits)
    storage = quantizer.encode(own, stats) if bits is None else quantizer.encode_stochastic(own, stats, bits)
    if not isinstance(storage, Storage):
        raise _no_storage(quantizer, method, storage)
    storage = storage.bind(quantizer, (x.shape[0], x.shape[1]), x.dtype)
    # As _is_unchecked, without a call: layers encode ordinary matrices so at every step.
    if not is_dynamo_compiling() and (method, x.dtype, x.device) not in quantizer.checked and type(x) in ORDINARY:
        _check(quantizer, method, x, unfit_storage(storage, x))
    return storage


def transpose_reference(operand: Storage) -> Storage:
    """Return the transposed ``operand``: of the transposed matrix."""
    quantizer, (rows, cols), first = operand.quantizer, operand.shape, operand.tensors()[0]
    storage = operand.transposed()
    if not isinstance(storage, Storage):
        raise _no_storage(quantizer, "transposed", storage)
    storage = storage.bind(quantizer, (cols, rows), operand.dtype)
    if _is_unchecked(quantizer, "transposed", first):
        _check(quantizer, "transposed", first, unfit_storage(storage, first))
    return storage


def decode_reference(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Return the matrix that an operand stands for.

    Args:
        operand: The operand.
        dtype: The dtype of the matrix, to which each element is rounded once.
    """
    quantizer, first = operand.quantizer, operand.tensors()[0]
    values = operand.decode()
    if _is_unchecked(quantizer, "decode", first):
        _check(quantizer, "decode", first, unfit_matrix(operand, values))
    return values.to(dtype)


def _is_unchecked(quantizer: Quantizer, method: str, x: Tensor) -> bool:
    """Whether the result of a method for such a tensor is still to be checked."""
    return not is_dynamo_compiling() and (method, x.dtype, x.device) not in quantizer.checked and type(x) in ORDINARY


def _check(quantizer: Quantizer, method: str, x: Tensor, fault: Fault | None) -> None:
    """Raise if the result of a method for ``x`` has a fault. Otherwise skip the check from then on, unless ``x`` is
    empty, which shows too little."""
    if fault is not None:
        raise _fault(quantizer, method, *fault)
    if x.numel():
        quantizer.checked.add((method, x.dtype, x.device))


# ---------------------------------------------------------------------------------------------- faults


def unfit_storage(storage: Storage, x: Tensor) -> Fault | None:
    """The fault of the buffers of an operand; None if they have none."""
    quantizer, (rows, cols) = storage.quantizer, storage.shape
    name, shape = quantizer.storage.__name__, (rows, cols)
    if not isinstance(storage, quantizer.storage):
        return (
            f"returned a {type(storage).__name__}; the spec names {name}",
            f"return {name}(…), or name the other class",
        )
    tensors = {key: value for key, value in vars(storage).items() if isinstance(value, Tensor)}
    if set(tensors) != set(quantizer.names):
        return f"set {list(tensors)}; {name}.layout declares {list(quantizer.names)}", _storage_call(quantizer)
    for buffer in quantizer.layout:
        fault = _unfit(tensors[buffer.name], buffer, buffer.dtype or storage.dtype, shape, x)
        if fault:
            declaration = _declared(buffer, buffer.dtype, shape)
            return f"returned {buffer.name} {fault}; {name}.layout declares {declaration}", AS_DECLARED
    return None


def unfit_stats(
    quantizer: Quantizer, method: str, by_name: Mapping[str, Tensor], x: Tensor
) -> tuple[str, Fault | None]:
    """The fault of the statistics of a matrix, with the method that returned it; ``method`` and None if they have
    none."""
    name, shape = type(quantizer).__name__, (x.shape[0], x.shape[1])
    if extra := set(by_name) - {stat.name for stat in quantizer.stats}:
        return method, (f"returned {min(extra)}, which {name}.stats does not declare", "declare it, or leave it out")
    for stat in quantizer.stats:
        of = "measure" if stat.round == 1 else method
        fault = _unfit(by_name[stat.name], stat, stat.dtype, shape, x)
        if fault:
            declaration = _declared(stat, stat.dtype, shape)
            remedy = AS_DECLARED + (OF_COUNTS if stat.reduce == "sum" else "")
            return of, (f"returned {stat.name} {fault}; {name}.stats declares {declaration}", remedy)
        if can_bypass_dispatcher(x) and not captured(x.device) and bool((by_name[stat.name] < 0).any()):
            cause = f"returned {stat.name} below 0, and ranks combine the bits of statistics, which order so from 0 on"
            return of, (cause, "for a least value measure the largest of -x, at least 0")
    return method, None


def unfit_matrix(operand: Storage, values: Tensor) -> Fault | None:
    """The fault of a decoded matrix; None if it has none."""
    if not isinstance(values, Tensor):
        return f"returned {type(values).__name__} and no tensor", "return the matrix in fp32"
    if tuple(values.shape) != tuple(operand.shape):
        return f"returned {list(values.shape)} for a matrix {list(operand.shape)}", "cut off what pads it: self.shape"
    if values.dtype != torch.float32:
        return f"returned {values.dtype}; a decoded matrix is torch.float32", "return the matrix in fp32"
    return None


def _unfit(tensor: object, declared: Covering, dtype: torch.dtype, shape: Shape, x: Tensor) -> str:
    """How a tensor differs from its declaration; empty if it does not."""
    if not isinstance(tensor, Tensor):
        return f"as a {type(tensor).__name__}"
    if tensor.dtype != dtype:
        return f"as {tensor.dtype}"
    if tuple(tensor.shape) != declared.grid(*shape):
        return f"of shape {list(tensor.shape)} for {list(shape)}"
    if tensor.layout != torch.strided:
        return f"as {tensor.layout}"
    return f"on {tensor.device}, of a matrix on {x.device}" if tensor.device != x.device else ""


def _declared(declared: Covering, dtype: torch.dtype | None, shape: Shape) -> str:
    several = "" if declared.values is None else f", {declared.values} values"
    return f"{dtype or 'the dtype of the matrix'}, block {declared.block}{several}, so {list(declared.grid(*shape))}"


def _no_storage(quantizer: Quantizer, method: str, result: object) -> PluginError:
    return _fault(quantizer, method, f"returned {type(result).__name__} and no storage", _storage_call(quantizer))


def _storage_call(quantizer: Quantizer) -> str:
    return f"return {quantizer.storage.__name__}({', '.join(f'{name}=…' for name in quantizer.names)})"


def lacking(quantizer: Quantizer, method: str, returned: object, name: str = "") -> PluginError:
    """The error for what a method of a format returned in place of a dict of all statistics."""
    no_dict = not isinstance(returned, Mapping)
    what = f"a {type(returned).__name__} and no dict" if no_dict else f"no {name!r}, which stats declares"
    return _fault(quantizer, method, f"returned {what}", "return a dict of all of them, as {'amax': …}")


def _fault(quantizer: Quantizer, method: str, what: str, remedy: str) -> PluginError:
    owner = quantizer.storage if hasattr(Storage, method) else type(quantizer)
    name = registry.format_of(type(quantizer)).name
    return registry.at_fault(name, f"{quantizer}: {owner.__name__}.{method} {what}", remedy)
