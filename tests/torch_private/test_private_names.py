"""Private names of torch are there, and do what is said of them, in torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpq.torch_private import (
    autograd,
    callers,
    compiling,
    cuda,
    dispatch,
    memory,
    operators,
    optimizers,
    pytree,
    tensors,
)

CPU = torch.device("cpu")


class Seen(dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Counts what passes the dispatcher."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------- memory


def test_allocation_bypasses_the_dispatcher() -> None:
    assert hasattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    for dispatched in (False, True):
        with Seen() as seen:
            made = memory.allocator(CPU, dispatched=dispatched)((3, 4), (1, 3), torch.float8_e4m3fn)
        assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 3), torch.float8_e4m3fn)
        assert seen.calls == dispatched


def test_without_the_private_name_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    made = memory.allocator(CPU)((), (), torch.bfloat16)
    assert (made.shape, made.dtype) == ((), torch.bfloat16)


def test_views_have_the_number_of_their_storage_and_copies_another() -> None:
    x = torch.zeros(4, 4)
    of, same = memory.storage_number(x.untyped_storage()), memory.storage_number(x.t()[1:].untyped_storage())
    assert of == same != memory.storage_number(x.clone().untyped_storage())


# ---------------------------------------------------------------------------------------------- tensors


class Wrapped(Tensor):
    """A tensor of a subclass, which sees operators and no functions."""

    seen: list[str]

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapped:
        made: Wrapped = tensors.wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.seen = []
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args[0].seen.append(dispatch.schema_of(func).name)
        return args[0]

    __torch_function__ = tensors.no_torch_function


def test_a_subclass_without_memory_sees_operators() -> None:
    made = Wrapped(torch.zeros(2, 3))
    assert (made.shape, made.untyped_storage().size()) == ((2, 3), 2 * 3 * 4)
    assert not made.data_ptr()
    nn.functional.relu(made)
    assert made.seen == ["aten::relu"]


def test_a_subclass_is_a_parameter_once_it_is_marked() -> None:
    made = Wrapped(torch.zeros(2))
    assert not tensors.is_parameter(made)
    assert not isinstance(made, nn.Parameter)
    tensors.mark_as_parameter(made)
    assert tensors.is_parameter(made)
    assert tensors.PARAMETER in vars(nn.Parameter(made))
    assert isinstance(made, nn.Parameter)


def test_versions_count_writes_and_bases_tell_views() -> None:
    x = torch.zeros(4)
    view = x[1:]
    before = tensors.version_of(x)
    view.add_(1)
    assert tensors.version_of(x) == tensors.version_of(view) == before + 1
    assert tensors.base_of(view) is x
    assert tensors.base_of(x) is None
    with torch.inference_mode():
        untracked = torch.zeros(1)
    with pytest.raises(RuntimeError, match="do not track version"):
        tensors.version_of(untracked)
    assert [*map(id, (tensors.local_part(x), *tensors.local_parts([view])))] == [id(x), id(view)]


def test_a_batch_of_gradients_has_no_storage() -> None:
    found: list[bool] = []
    x = torch.zeros(4, requires_grad=True)
    y = x * 2
    y.register_hook(lambda dy: found.append(tensors.has_storage(dy)))
    for batched, dy in ((False, torch.ones(4)), (True, torch.ones(3, 4))):
        torch.autograd.grad(y, x, dy, is_grads_batched=batched, retain_graph=True)
    assert found == [True, False]


# ---------------------------------------------------------------------------------------------- the dispatcher


def test_what_is_at_work_is_seen() -> None:
    def at_work() -> tuple[bool, bool, bool]:
        return bool(dispatch.modes()), dispatch.transforms(), dispatch.autocasts()

    found: list[Any] = []
    assert at_work() == (False, False, False)
    with Seen():
        assert at_work() == (True, False, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert at_work() == (False, False, True)
    torch.func.vmap(lambda x: found.append(at_work()) or x)(torch.zeros(2))
    assert found == [(False, True, False)]
    with dispatch.FakeTensorMode():
        assert at_work()[0]
        assert not torch.zeros(2).is_meta


def test_an_operator_that_a_mode_calls_reaches_vmap() -> None:
    def doubled(x: Tensor) -> Tensor:
        return torch.vmap(lambda one: one * 2)(x)

    def reached(x: Tensor) -> Tensor:
        with dispatch.reaching_transforms():
            return doubled(x)

    bodies = {"doubled": doubled, "reached": reached}
    operators = {n: torch.library.custom_op(f"lpq_test::{n}", f, mutates_args=()) for n, f in bodies.items()}
    x = torch.ones(3, 2)
    with Seen():
        assert torch.equal(operators["reached"](x), 2 * x)
        with pytest.raises((RuntimeError, NotImplementedError)):
            operators["doubled"](x)
    assert torch.equal(operators["reached"](x), 2 * x)


def test_the_key_of_an_early_tracer_is_told_from_others() -> None:
    assert not dispatch.jit_traces()
    traced: list[bool] = []
    torch.jit.trace(lambda x: (traced.append(dispatch.jit_traces()), x + 1)[1], (torch.zeros(2),), check_trace=False)
    assert traced == [True]
    assert not dispatch.has_key(dispatch.PRE_DISPATCH)
    with torch._C._IncludeDispatchKeyGuard(dispatch.PRE_DISPATCH):
        assert dispatch.has_key(dispatch.PRE_DISPATCH)


def test_a_schema_says_what_is_written_to() -> None:
    schema = dispatch.schema_of(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.is_mutable) == ("aten::add_", True)
    assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == ["self"]


def test_what_an_operator_returns_can_be_made_to_alias() -> None:
    x = torch.zeros(2)
    made = dispatch.return_and_correct_aliasing(torch.ops.aten.add_.Tensor, (x, x), {}, x.clone())
    assert made is x


# ---------------------------------------------------------------------------------------------- operators


def test_operators_do_as_their_public_kin() -> None:
    x = torch.arange(6.0)
    assert torch.equal(operators.to_copy(x, dtype=torch.bfloat16), x.bfloat16())
    assert torch.equal(operators.unsafe_view(x, (2, 3)), x.view(2, 3))
    assert tensors.base_of(operators.unsafe_view(x, (2, 3))) is None
    assert "aten::_pin_memory" in str(dispatch.schema_of(operators.pin_memory.default))
    schema = dispatch.schema_of(operators.rms_norm_gradients.default)
    names = ["grad_out", "input", "normalized_shape", "rstd", "weight", "output_mask"]
    assert [argument.name for argument in schema.arguments] == names
    assert operators.canonicalize_dim(2, -1) == 1
    first, second = torch.zeros(6), torch.zeros(6)
    assert dispatch.schema_of(torch.ops.aten._foreach_copy_.default).name == f"aten::{operators.OF_EACH}copy_"
    operators.copy_each([first, second], [x, -x])
    assert torch.equal(first, x)
    assert torch.equal(second, -x)
    assert [n.item() for n in operators.norm_of_each([x, torch.ones(4)], 1)] == [15, 4]
    assert operators.has_fast_bf16() in (True, False)


def test_the_scaled_product_multiplies_by_both_scales() -> None:
    a, b = torch.full((16, 32), 2.0).to(torch.float8_e4m3fn), torch.full((16, 32), 3.0).to(torch.float8_e4m3fn)
    half, quarter = torch.tensor(0.5), torch.tensor(0.25)
    made = operators.scaled_matmul(a, b.t(), half, quarter, None, None, torch.bfloat16, False)
    assert torch.equal(made, torch.full((16, 16), 32 * 6 / 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("dims", [2, 3])
def test_the_scaled_product_of_groups_takes_a_scale_for_each_row_of_each_group(dims: int) -> None:
    """On a CPU it has a result without values only."""
    a = torch.empty(16 if dims == 2 else 64, 64 if dims == 2 else 32, dtype=torch.float8_e4m3fn, device="meta")
    b = torch.empty(*(() if dims == 2 else (2,)), 48, a.shape[1], dtype=torch.float8_e4m3fn, device="meta")
    scales = [torch.empty(n, device="meta") for n in ((32, 96) if dims == 2 else (64, 96))]
    of_b = scales[1] if dims == 2 else scales[1].view(2, 48)
    offs = torch.empty(2, dtype=torch.int32, device="meta")
    b = b.transpose(-2, -1)
    made = operators.scaled_grouped_matmul(a, b, scales[0], of_b, offs, None, None, torch.bfloat16, False)
    plain = operators.grouped_matmul(a.bfloat16(), b.bfloat16(), offs)
    assert made.dtype == torch.bfloat16
    assert made.shape == plain.shape == ((2, 16, 48) if dims == 2 else (64, 48))


def test_trees_are_walked() -> None:
    tree = {"a": [1, (2.0, "x")], "b": 3}
    assert [*pytree.tree_iter(tree)] == pytree.tree_leaves(tree) == [1, 2.0, "x", 3]
    assert pytree.tree_map(str, tree) == {"a": ["1", ("2.0", "x")], "b": "3"}
    assert pytree.tree_map_only(int, lambda i: -i, tree) == {"a": [-1, (2.0, "x")], "b": -3}
    paths, _ = pytree.tree_flatten_with_path(tree)
    assert [pytree.keystr(path) for path, _ in paths] == ["['a'][0]", "['a'][1][0]", "['a'][1][1]", "['b']"]


# ---------------------------------------------------------------------------------------------- autograd


class Asking(torch.autograd.Function):
    """Writes down in backward what autograd says of itself."""

    found: list[tuple[bool, ...]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        runs = autograd.graph_task() != -1, autograd.runs_whole(), autograd.keeps_graph()
        Asking.found.append((*runs, autograd.will_execute(ctx.next_functions[1][0])))
        return dy, dy


def test_a_backward_is_seen_and_what_it_will_run() -> None:
    Asking.found = []
    assert autograd.graph_task() == -1
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Asking.apply(x, weight).sum().backward(retain_graph=True)
    Asking.apply(x, weight).sum().backward(inputs=[x])
    assert Asking.found == [(True, True, True, True), (True, False, False, False)]
    with pytest.raises(RuntimeError, match=r"autograd\.grad\(\)"):
        torch.autograd.grad(Asking.apply(x, weight).sum(), [weight])


def test_a_node_that_keeps_a_gradient_is_seen() -> None:
    keeps = "torch::autograd::AccumulateGrad"
    found: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    between = leaf * 2
    between.register_hook(lambda _: found.append(autograd.runs_node(keeps)))
    leaf.register_post_accumulate_grad_hook(lambda _: found.append(autograd.runs_node(keeps)))
    between.sum().backward()
    assert found == [False, True]
    assert not autograd.runs_node(keeps)


def test_what_is_called_at_the_end_of_backward_comes_last_and_may_raise() -> None:
    found: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    between = leaf * 2

    def last() -> None:
        found.append("end")
        raise OSError("in words")

    between.register_hook(lambda _: autograd.at_the_end_of_backward(last))
    leaf.register_post_accumulate_grad_hook(lambda _: found.append("leaf"))
    with pytest.raises(OSError, match="in words"):
        between.sum().backward()
    assert found == ["leaf", "end"]


def test_who_calls_is_seen() -> None:
    """An operator that autograd's engine calls is in tests/nn/test_encoded_gradients.py, other reads of a weight in
    tests/nn/test_called.py."""
    assert torch.autograd.graph._engine_run_backward.__module__ == callers.ENGINE
    assert not callers.engine_calls()
    assert all(hasattr(torch.zeros(2), name) for name in callers.LOOKS)
    found: list[bool] = []

    class Read(torch.nn.Module):
        @property
        def value(self) -> Tensor:
            found.append(callers.another_pass_reads(self))
            return torch.zeros(2)

        def forward(self, other: Any) -> Tensor:
            (other.value.shape, self.value + 1)
            return other.value + 1

    module, other = Read(), Read()
    module(other)
    module.forward(other)
    assert found == [False, False, True, False, False, False]


# ---------------------------------------------------------------------------------------------- compiling


def test_exporting_is_told_from_compiling() -> None:
    """``torch.compiler.is_exporting()`` is true where torch 2.11 compiles, too."""
    found: list[bool] = []

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if compiling.is_exporting() else x + 2

    x, module = torch.zeros(2), Module()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    found = [bool(compiled(x)[0] == 1)]
    found.append(bool(torch.export.export(module, (x,)).module()(x)[0] == 1))
    assert found == [False, True]
    assert compiling.compiled_from(compiled) is module
    assert compiling.compiled_from(module) is None
    assert compiling.COMPILED_CALL not in vars(module)
    module.compile(backend="eager")
    assert compiling.COMPILED_CALL in vars(module)


def test_a_function_is_called_once_when_it_is_traced() -> None:
    called: list[int] = []

    @compiling.once_when_traced
    def constant() -> int:
        called.append(1)
        return len(called)

    compiled = torch.compile(lambda x: x + constant(), backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(1)).item() for _ in range(3)] == [1, 1, 1]
    assert called == [1]


def test_a_function_is_called_outside_of_graphs() -> None:
    compiles: list[bool] = []

    @compiling.outside_graphs
    def outside(x: Tensor) -> Tensor:
        compiles.append(torch.compiler.is_compiling())
        return x + len(compiles)

    compiled = torch.compile(lambda x: outside(x + 1) * 2, backend="eager")
    assert [compiled(torch.zeros(1)).item() for _ in range(2)] == [4, 6]
    assert outside(torch.zeros(1)).item() == 3
    assert compiles == [False, False, False]


def test_guarded_tensors_are_printed_by_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in those versions is memory lent to freed buffers of gathered weights, so that they can be read."""
    printed: list[Any] = []
    write = torch._tensor_str._str

    def watched(t: torch.Tensor, **how: Any) -> str:
        if type(t) is torch.Tensor:  # one of a tracer has no memory
            printed.append(t)
        return write(t, **how)

    monkeypatch.setattr(torch._tensor_str, "_str", watched)
    held = [torch.ones(2, requires_grad=True)]
    torch.compiler.reset()
    torch.compile(lambda x: x + held[0], backend="aot_eager")(torch.zeros(2)).sum().backward()
    assert compiling.PRINTS_GUARDED or not printed
    assert str(held[0]) == "tensor([1., 1.], requires_grad=True)"
    assert printed, "or it sees nothing"


def test_functions_are_called_around_compiling_until_it_is_reset() -> None:
    called: list[str] = []

    def before(*_: Any) -> None:
        called.append("before")

    def after(*_: Any) -> None:
        called.append("after")

    torch.compiler.reset()
    compiling.call_around_compiling(before, after)
    assert before in sys.modules[compiling.CALLBACKS].callback_handler.start_callbacks
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    assert called == ["before", "after"]
    torch.compiler.reset()
    assert before not in sys.modules[compiling.CALLBACKS].callback_handler.start_callbacks


def test_a_dynamic_size_must_not_be_fixed() -> None:
    x = torch.zeros(4, 3)
    compiling.mark_dynamic(x, 0)
    compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    assert compiled(x).shape == (4, 3)
    torch.compiler.reset()
    fixed = torch.compile(lambda x: x + torch.zeros(4, 3), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?i)constraint"):
        fixed(x)
    torch.compiler.reset()


def test_what_is_sure_of_a_size_is_no_guard() -> None:
    """A size that stands for any number is surely above zero; one that is in the data is not."""
    found: list[bool] = []

    def add(x: Tensor, at: Tensor) -> Tensor:
        some = x[at]
        found[:] = [
            compiling.surely(x.numel() > 0),
            compiling.surely(x.shape[0] > 4),
            compiling.surely(some.numel() > 0),
        ]
        return some + 1

    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(add, backend="eager", fullgraph=True, dynamic=True)
        compiled(torch.zeros(4, 3), torch.tensor([True, False, True, False]))
    torch.compiler.reset()
    assert found == [True, False, False]
    assert compiling.surely(3 > 2)


def thrice(x: Tensor) -> Tensor:
    """Another result than the operator's, so that it shows which of them is called."""
    return x * 3


def test_the_code_that_is_generated_calls_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = torch.library.Library("lpq_test", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("twice(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("lpq_test::twice", torch.empty_like, lib=library)
    compiled = torch.compile(lambda x: torch.ops.lpq_test.twice(x) + 1, fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), x + 2)
    compiling.call_in_place_of("lpq_test::twice", __name__, "thrice")
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert torch.equal(compiled(x), x * 3 + 1)


# ---------------------------------------------------------------------------------------------- optimizers and devices


def test_hooks_of_an_optimizer_are_in_its_lists() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)
    before, after = (lambda *_: None for _ in range(2))
    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    assert [*optimizers.load_pre_hooks(optimizer).values()] == [before]
    assert [*optimizers.load_post_hooks(optimizer).values()] == [after]
    assert [*map(len, optimizers.step_hooks(optimizer))] == [0, 0]
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    assert [[*hooks.values()] for hooks in optimizers.step_hooks(optimizer)] == [[before], [after]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_current_device_and_stream_are_torchs() -> None:
    assert cuda.current_device is torch._C._cuda_getDevice
    assert cuda.current_device() == torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert cuda.current_stream(0) == torch.cuda.current_stream(0).cuda_stream != 0
