"""Writes to a QuantizedTensor, to the whole or to a part: the values that are assigned are encoded at once.

An operator that reads the tensor to which it writes (``add_``, ``_foreach_lerp_``, a fused optimizer …) is refused: it
would round the tensor, and for a shard reduce its statistics, at each operation of one update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lpq.operations.inputs import DTYPES
from lpq.operations.operators import overwrites, written
from lpq.tensor.encode_writes import overwrite, write
from lpq.tensor.quantized_tensor import QuantizedTensor, Window
from lpq.torch_private.dispatch import schema_of
from lpq.torch_private.pytree import tree_map, tree_map_only


def assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes. It gets decoded tensors to read, and writes to a fresh tensor in place of each
    stored one, which is then encoded from it."""
    stored = [value for value in written(func, args, kwargs) if isinstance(value, QuantizedTensor)]
    if stored and not overwrites(func):
        _refuse(func, stored[0])
    targets: dict[int, tuple[QuantizedTensor, Tensor]] = {}

    def fresh(target: QuantizedTensor) -> Tensor:
        value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        targets[id(value)] = target, value
        return value

    def argument_for(argument: Any, value: Any) -> Any:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        take: Callable[[QuantizedTensor], Tensor] = fresh if writes else QuantizedTensor.dequantize
        return tree_map_only(QuantizedTensor, take, value)

    schema = schema_of(func).arguments
    named = {argument.name: argument for argument in schema}
    args = tuple(argument_for(argument, value) for argument, value in zip(schema, args, strict=False))
    out = func(*args, **{name: argument_for(named[name], value) for name, value in kwargs.items()})
    _write_all([target for target, _ in targets.values()], [value for _, value in targets.values()])
    torch.autograd.graph.increment_version([t for t, _ in targets.values()])  # torch counts no write to one in a list
    return tree_map(lambda v: targets[id(v)][0] if id(v) in targets else v, out)


AVERAGE = (
    ". An average of stored weights, as AveragedModel keeps one, would be rounded at each update: average the masters, "
    "see lpq.optim.MasterWeights.masters"
)


def _refuse(func: Any, target: QuantizedTensor) -> NoReturn:
    name = schema_of(func).name.removeprefix("aten::")
    # Where a TypeError is raised, Python takes ``w -= x`` for ``w = w - x``, which changes no weight, and
    # ``w.data -= x`` for ``w.data = w.data - x``, which does.
    raise (TypeError if target.is_data else RuntimeError)(
        f"{target.whose}{name} would compute in place in this {list(target.shape)} tensor, which is stored as "
        f"{target.quantizer} and would be rounded at each such operation. Step it with "
        "lpq.optim.MasterWeights(optimizer), or MasterWeights(optimizer, keep=False) which keeps no fp32 copy between "
        "steps; a state of an optimizer by lpq.optim.QuantizedStates; by hand, compute with value = "
        "weight.dequantize(), then weight.copy_(value)"
        f"{AVERAGE if 'lerp' in name else ''}"
    )


def copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy as ``aten.copy_`` does, where either of the two is stored quantized."""
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(target.dtype if target.is_floating_point() else None), non_blocking)
    if isinstance(source, QuantizedTensor):
        if (target.window is None or target.window.apart) and _same_layout(target, source):
            overwrite(target, *source.stored)
            return target
        target.tell_if_rounded_twice(source)
        source = source.dequantize(torch.float32)
    dtype = source.dtype if source.dtype in DTYPES else target.dtype  # torch casts values of other dtypes as well
    _write_all([target], [source.to(target.device, dtype).expand(target.shape)])
    return target


def _same_layout(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    def described(t: QuantizedTensor) -> list[Any]:
        return [(d, s.quantizer, tuple(s.shape), s.dtype) for d, s in t.operands]

    return a.shape == b.shape and described(a) == described(b)


def _write_all(targets: list[QuantizedTensor], values: list[Tensor]) -> None:
    """Encode these values, with one reduction for all values that are not parts of others."""
    now: list[tuple[QuantizedTensor, Tensor]] = []
    parts: list[tuple[Window, Tensor]] = []
    for target, value in zip(targets, values, strict=True):
        matrix = value.reshape(target.matrix_shape)
        if target.window is None or target.window.apart:
            now.append((target, matrix))
        else:
            parts.append((target.window, matrix))
    write([target for target, _ in now], [matrix for _, matrix in now])
    for window, matrix in parts:
        _write_through(window, matrix)


def _write_through(window: Window, matrix: Tensor) -> None:
    """Write a part of a tensor, and encode the whole again."""
    whole = window.whole
    plain = whole.dequantize(torch.float32)
    window.of(plain.view(whole.matrix_shape)).copy_(matrix)
    whole.copy_(plain)
