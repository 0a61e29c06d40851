"""Checks of the arguments that a caller gives beside the tensors to encode or multiply, with errors in words.

Kernels get these arguments as pointers, and would read whatever lies there. Arguments that layers make are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from lpq.formats.format import Quantizer
from lpq.registry.showing import brief

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def check_seed(seed: object) -> None:
    """Refuse all but a seed, or None: kernels read 64 bits, and would round with the bits of any other tensor."""
    if isinstance(seed, Tensor):
        fits = seed.dim() == 0 and seed.dtype in INTEGERS
    else:
        fits = seed is None or (isinstance(seed, int) and not isinstance(seed, bool))
    if not fits:
        what = f"{seed.dtype} of shape {list(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise TypeError(f"the seed is {what}: pass an int, or a 0-dimensional tensor of integers")
    if isinstance(seed, int) and not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"the seed is {brief(seed)}, and kernels read 64 bits: pass one from -2^63 on and below 2^64")


def signed(seed: int) -> int:
    """The signed 64-bit number with the lowest 64 bits of a seed."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def as_seed(seed: Tensor | int | None, device: torch.device) -> Tensor | None:
    """A seed as kernels read it."""
    check_seed(seed)
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        return seed.to(device, torch.int64)
    return torch.tensor(signed(seed), dtype=torch.int64, device=device)


def check_offset(offset: Any) -> None:
    """Check that the offset is the number of a row. Random bits are drawn by 32 bits of it."""
    remedy = "pass the first row of the shard in the whole tensor"
    is_integer = isinstance(offset, Integral | torch.SymInt) and not isinstance(offset, bool)
    if not is_integer:
        what = f"a {type(offset).__name__}" if isinstance(offset, Tensor) else repr(offset)
        raise TypeError(f"the offset is {what}: {remedy}, an int")
    if not 0 <= offset < 1 << 32:
        raise ValueError(f"the offset is {offset}: {remedy}, from 0 on and below 2^32")


def check_stack(quantizer: Quantizer, x: Tensor, seed: object, state: object, group: object, offset: int) -> None:
    """Refuse all but a stack of matrices, and arguments that a stack cannot be given."""
    if x.dim() != 3:
        raise ValueError(f"stack=True is for a tensor [count, rows, cols], and this one is {list(x.shape)}")
    if state or group is not None or offset:
        raise ValueError(
            "stack=True: the matrices of a stack are encoded each by itself, with its own statistics: leave state, "
            "amax_group and offset out"
        )
    if quantizer.side("row").state or quantizer.side("col").state:
        raise ValueError(
            f"stack=True: {quantizer} remembers statistics across steps, and no state is kept for the matrices of a "
            "stack: choose one that does not"
        )
    if seed is not None and not (
        isinstance(seed, Tensor) and (seed.dtype, seed.shape, seed.device) == (torch.int64, x.shape[:1], x.device)
    ):
        raise TypeError(f"stack=True: the seed must be int64 of shape [{x.shape[0]}] on {x.device}, or None")


def check_dense(x: Tensor) -> None:
    """Refuse a tensor that is nested, is not strided, or has a tangent: encoding has no forward derivative."""
    if x.is_nested:
        raise TypeError("the tensor to encode is nested: pass x.values(), or torch.nested.to_padded_tensor(x, 0.0)")
    if x.layout != torch.strided:
        raise TypeError(f"the tensor to encode is {x.layout}: pass x.to_dense()")
    if not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise TypeError(
            "the tensor to encode has a tangent of forward-mode AD, and no derivative flows through encoding: pass "
            "torch.autograd.forward_ad.unpack_dual(x).primal"
        )


def state_of(
    quantizer: Quantizer, state: Mapping[str, Tensor], device: torch.device, what: str = "state", of: str = "the tensor"
) -> dict[str, Tensor]:
    """The buffers of a state that the quantizer needs; empty if it remembers nothing. Messages call the state ``what``,
    and the tensor that is encoded ``of``."""
    remedy = f"pass the result of {quantizer}.new_state(), or None to encode with the statistics of {of}"
    if not isinstance(state, Mapping):
        raise TypeError(f"{what} is a {type(state).__name__}: {remedy}")
    branches = quantizer.state_branches().items()
    needed = {prefix + buffer.name: buffer.shape for prefix, side in branches for buffer in side.state}
    if missing := [name for name in needed if name not in state]:
        raise ValueError(f"{what} has no {', '.join(missing)}: {remedy}")
    for name, shape in needed.items():
        if fault := _unfit_buffer(state[name], shape, device):
            raise ValueError(f"{what}: {name} {fault}: pass the result of {quantizer}.new_state(device)")
    return {name: state[name] for name in needed}


def _unfit_buffer(buffer: object, shape: Sequence[int], device: torch.device) -> str:
    """The fault of a buffer of a state; empty if it has none."""
    if not isinstance(buffer, Tensor):
        return f"is a {type(buffer).__name__} and no tensor"
    if buffer.shape != tuple(shape):
        return f"is of shape {list(buffer.shape)} and not {list(shape)}"
    if buffer.dtype != torch.float32:
        return f"is {buffer.dtype} and not torch.float32"
    if not buffer.is_contiguous():
        return f"has strides {list(buffer.stride())} and is not contiguous"
    return f"is on {buffer.device}, and the tensor to encode on {device}" if buffer.device != device else ""


def check_bias(bias: object, rows: int, device: torch.device, title: str = "gemm") -> None:
    """Refuse a bias that is not one real number for each of the ``rows`` rows of ``b``, on this device."""
    if not isinstance(bias, Tensor):
        raise TypeError(f"{title}: the bias is a {type(bias).__name__}: it must be a tensor, or None")
    if not bias.is_floating_point():
        raise TypeError(f"{title}: the bias is {bias.dtype}: cast it to a floating dtype")
    if bias.shape != (rows,):
        raise ValueError(
            f"{title}: the bias is {list(bias.shape)}, and b has {rows} rows: pass one number for each of them, "
            f"of shape [{rows}]"
        )
    if bias.device != device:
        raise ValueError(
            f"{title}: the bias is on {bias.device} and the operands are on {device}: move one to the other"
        )
