"""Operators of ``torch.library`` around the bodies of operations; a check whether a body may be called without one; and
the arguments that an operator writes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer
from lpq.formats.layout import row_major
from lpq.torch_private.compiling import once_when_traced
from lpq.torch_private.dispatch import PRE_DISPATCH, autocasts, has_key, jit_traces, modes, schema_of, transforms
from lpq.torch_private.memory import storage_number
from lpq.torch_private.operators import OF_EACH

F = TypeVar("F", bound=Callable[..., Any])
Inside = Callable[[torch.device], AbstractContextManager[object]]
ORDINARY = frozenset((Tensor, torch.nn.Parameter))
LIBRARY = torch.library.Library("lpq", "DEF")  # type: ignore[no-untyped-call]


def opaque_when_traced(function: F) -> F:
    """Make torch.compile keep a call of ``function`` as one node, without tracing into it. torch.compiler's own
    decorator, which imports the whole compiler, is applied when a compiler first comes by."""

    @once_when_traced
    def allow() -> None:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]

    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            allow()
        return function(*args)

    return cast("F", call)


def define(
    schema: str, body: Callable[..., Any], fake: Callable[..., Any], inside: Inside = lambda device: nullcontext(),
    **options: Any,
) -> None:  # fmt: skip
    """Give an operator its body on every device, and its results for fake tensors. ``inside``: a context for the device
    of the first tensor, in which the body runs."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, **options)  # type: ignore[no-untyped-call]
    arguments = schema_of(getattr(torch.ops.lpq, name).default).arguments
    lists = [i for i, a in enumerate(arguments[1:]) if isinstance(a.type, torch.ListType)]
    LIBRARY.impl(name, _by_itself(body, lists, inside), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"lpq::{name}", fake, lib=LIBRARY)


def _by_itself(body: Callable[..., Any], lists: Sequence[int], inside: Inside) -> Callable[..., Any]:
    """Run a body without autocast, which would round the operands of a reference's matmul, and without autograd, which
    would record the operations inside, and with which not every body can run.

    ``lists``: the arguments after the first that are lists. A package of AOTInductor passes None for an empty one."""

    @wraps(body)
    def run(first: Tensor | list[Tensor], *args: Any) -> Any:
        for i in lists:
            if i < len(args) and args[i] is None:
                args = (*args[:i], [], *args[i + 1 :])
        device = (first if isinstance(first, Tensor) else first[0]).device
        with torch.no_grad(), inside(device):
            if device.type == "meta" or not torch.is_autocast_enabled(device.type):
                return body(first, *args)
            with torch.autocast(device.type, enabled=False):
                return body(first, *args)

    return run


def can_call_directly(x: Tensor) -> bool:
    """Whether a body may be called by itself: no gradient is to be stopped, and the dispatcher may be bypassed."""
    return not torch.is_grad_enabled() and can_bypass_dispatcher(x)


def can_bypass_dispatcher(x: Tensor) -> bool:
    """Whether nothing that the dispatcher serves is at work: no tracer, mode, transform, subclass or cast.

    A tensor on the meta device has no values: an operator infers its shapes without the body."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and type(x) in ORDINARY
        and not x.is_meta
        and not transforms()
        and not modes()
        and not has_key(PRE_DISPATCH)
        and not jit_traces()
        and not autocasts()
    )


@once_when_traced
@registry.cached
def layout_hash(*texts: str) -> str:
    """A hash of the layouts and statistics that the formats of these quantizers declare. An operator takes the hash and
    ignores it: a compiler that keeps programs on disk thus never runs a program compiled for other declarations."""
    sides: list[Quantizer] = [registry.quantizer(text) for text in texts if text]
    return f"{crc32(repr([(side.layout, side.stats) for side in sides]).encode()):08x}"


def unaliased(tensors: Sequence[Tensor], inputs: Sequence[Tensor | None], *sides: Quantizer | None) -> list[Tensor]:
    """The tensors that an operator may return: the buffers of fresh operands of ``sides``, in their own memory layouts,
    then contiguous tensors. None is an input, and none comes twice. A kernel must ensure that itself. A format need
    not: it may return the matrix, or a statistic of the whole matrix, as a buffer, and one buffer in both operands."""
    memories = {_memory(t) for t in inputs if t is not None}
    buffers = [buffer for side in sides if side is not None for buffer in side.layout]
    out: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        tensor = buffers[i].laid(tensor) if i < len(buffers) else row_major(tensor)
        out.append(tensor.clone() if _memory(tensor) in memories else tensor)
        memories.add(_memory(tensor))
    return out


OVERWRITES = frozenset(
    (
        "zero_", "fill_", "copy_", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "geometric_",
        "cauchy_", "bernoulli_",
    )
)  # fmt: skip
"""Operators that write every element of a tensor, whatever stood there."""


def overwrites(func: Any) -> bool:
    """Whether an operator reads nothing of the tensors that it writes to, which may hold no number yet: it writes to
    ``out=``, or it assigns to one tensor or to a list."""
    writes = [a for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    name = schema_of(func).name.removeprefix("aten::").removeprefix(OF_EACH)
    return all(a.kwarg_only for a in writes) or (func.namespace == "aten" and name in OVERWRITES)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to; lists are taken apart."""
    schema = schema_of(func).arguments
    pairs = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    out: list[Any] = []
    for argument, value in pairs:
        if argument.alias_info is not None and argument.alias_info.is_write:
            out += value if isinstance(value, list | tuple) else [value]
    return out


def _memory(tensor: Tensor) -> int:
    """The number of the memory that a tensor and its views share."""
    return storage_number(tensor.untyped_storage())
