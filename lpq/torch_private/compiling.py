"""The compiler and the exporter: whether it runs, what it made of a module, and what it does before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. Where torch 2.11 compiles, ``torch.compiler.is_exporting`` is true, too."""
    return bool(torch.compiler._is_exporting_flag)


def once_when_traced(function: F) -> F:
    """Have torch.compile call this while it traces, and take what it returns as a constant. torch.compiler's own
    decorator does the same, and imports the whole compiler for that."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` was given to make this one; None if it made none."""
    return cast("nn.Module | None", getattr(module, "_orig_mod", None))


CALLBACKS = "torch._dynamo.callback"
"""The module whose ``callback_handler.start_callbacks`` are called before torch compiles. Its import takes a second."""


PRINTS_GUARDED = tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 13)
"""Whether the compiler may print tensors that it guards, and so read them. 2.11 printed them; 2.13 does not."""


def call_around_compiling(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Have these called before and after torch compiles, until ``torch.compiler.reset``."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(before)
    callback_handler.register_end_callback(after)


def surely(condition: Any) -> bool:
    """Whether a condition on sizes holds for all that a compiler that traces takes them for, without a new guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Have a compiler take this size for any number, and raise where it cannot."""
    torch._dynamo.mark_dynamic(tensor, dim)


def call_in_place_of(operator: str, function: Callable[..., Any]) -> None:
    """Have the Python that Inductor writes call a function in place of an operator, which costs the dispatcher.

    ``operator``: its name with the namespace, and no overload. ``function``: one of a module's, which takes what the
    operator takes and returns what it returns. Code of other kinds than a graph's Python goes on calling the operator.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine, PythonWrapperCodegen
    from torch._inductor.virtualized import V

    name = operator.replace("::", "_")

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = V.graph.wrapper_code
        if type(wrapper) is PythonWrapperCodegen:  # a part of a graph would import nothing
            wrapper.add_import_once(f"from {function.__module__} import {function.__name__} as {name}")
            node.python_kernel_name = name
        writeline(ExternKernelAllocLine(wrapper, node))

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{operator.replace('::', '.')}.default"] = CustomCodegen(python=write)
