"""The compiler and the exporter: whether either runs, the module that was compiled, and calls that the compiler
replaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lpq.torch_private.autograd import hooks_that_save

F = TypeVar("F", bound=Callable[..., Any])


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. Where torch 2.11 compiles, ``torch.compiler.is_exporting`` is true, too."""
    return bool(torch.compiler._is_exporting_flag)


def once_when_traced(function: F) -> F:
    """Make torch.compile call the function while it traces, and take its result as a constant. torch.compiler's own
    decorator does the same, and imports the whole compiler for that."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: F) -> F:
    """Make torch.compile call the function outside of graphs. torch.compiler's own decorator does the same, and imports
    the whole compiler for that."""
    outside = _disable_dynamo(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return outside(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else function(*args, **kwargs)

    return cast("F", call)


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module from which ``torch.compile`` made this module; None if it was not compiled."""
    return cast("nn.Module | None", getattr(module, "_orig_mod", None))


COMPILED_CALL = "_compiled_call_impl"
"""The attribute that a module has after ``module.compile()``: it runs in place of the module's own call."""
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
    """Whether a condition holds for all sizes for which a compiler is tracing, without a new guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Have a compiler take this size for any number, and raise where it cannot."""
    torch._dynamo.mark_dynamic(tensor, dim)


def is_run_again() -> bool:
    """Whether a compiler traces a run of forward that activation checkpointing makes again in backward. Torch 2.13
    traces checkpointing as it runs; 2.11 marks what it traces."""
    return hooks_that_save() is not None or "recompute" in torch.fx.traceback.current_meta


def saved_if_run_again(operator: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call an operator, whose result is saved where this run is made again, and not made again itself."""
    if not is_run_again():
        return operator(*args)
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils.checkpoint import CheckpointPolicy

    mode = get_proxy_mode()
    nodes: Any = () if mode is None else mode.tracer.graph.nodes
    before, result = len(nodes), operator(*args)
    for node in [*nodes][before:]:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return result


def call_in_place_of(operator: str, module: str, function: str) -> None:
    """Have the Python that Inductor writes call a function in place of an operator, which costs the dispatcher.

    ``operator``: its name with the namespace, and no overload. ``function``: what ``module`` calls a function with the
    arguments and results of the operator; Inductor keeps code that imports it. Code of other kinds than a graph's
    Python goes on calling the operator.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine, PythonWrapperCodegen
    from torch._inductor.virtualized import V

    name = operator.replace("::", "_")

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = V.graph.wrapper_code
        if type(wrapper) is PythonWrapperCodegen:  # a part of a graph would import nothing
            wrapper.add_import_once(f"from {module} import {function} as {name}")
            node.python_kernel_name = name
        writeline(ExternKernelAllocLine(wrapper, node))

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{operator.replace('::', '.')}.default"] = CustomCodegen(python=write)


def compile_as_wait(operator: Any) -> None:
    """Have Inductor compile an operator as torch's own wait, until which it keeps the memory of a collective."""
    from torch._inductor.lowering import lowerings

    lowerings[operator] = lowerings[torch.ops._c10d_functional.wait_tensor.default]
