"""lpq.fuse: layers whose norms add the residual, found by what they compute. Bits stay, whatever stands around them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from test_fuse_families import model, residual_layers, step
from torch import Tensor, nn

import lpq
from lpq.nn.fused_blocks import FusedBlock, layers_of


@pytest.mark.parametrize(
    ("recipe", "reentrant"),
    [("fp8-current", True), ("fp8-delayed", None), ("fp8-delayed", False), ("nvfp4", None), ("nvfp4", True)],
)
def test_recipes_and_gradient_checkpointing(
    recipe: str, reentrant: bool | None, added: list[bool], fused_passes: list[int]
) -> None:
    plain, net = model("Llama", recipe), lpq.fuse(model("Llama", recipe))
    for each in (plain, net):
        if reentrant is not None:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for _ in range(2):
        assert equal(step(net), step(plain))
        assert equal_states(net.state_dict(), plain.state_dict())
    assert len(added) == 2 * len(fused_passes) == (4 if reentrant is None else 8)


def test_generate_and_what_a_layer_is_given(added: list[bool], fused_passes: list[int]) -> None:
    plain, net = model("Llama").eval(), lpq.fuse(model("Llama")).eval()
    tokens = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padding
    made = [each.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False) for each in (net, plain)]
    assert torch.equal(*made)
    assert len(added) == 2 * len(fused_passes) == 8
    with torch.no_grad():
        found = [each(tokens, attention_mask=mask, output_hidden_states=True) for each in (net, plain)]
    assert equal(found[0].hidden_states, found[1].hidden_states)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_copies_and_pickles(family: str, added: list[bool], fused_passes: list[int]) -> None:
    net = lpq.fuse(model(family))
    expected, report = step(net), lpq.report(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        added.clear()
        fused_passes.clear()
        assert equal(step(other), expected)
        assert (added, len(fused_passes)) == ([False, True], 1)
        assert {id(m) for m in other.modules()}.isdisjoint(id(m) for m in net.modules())
        (block,) = (m for m in other.modules() if isinstance(m, FusedBlock))
        assert {*layers_of(block)} <= {*block.modules()}
        lpq.unfuse(other)
    assert lpq.report(net) == report


@pytest.mark.parametrize("hook", ["before", "behind", "backward", "backward before"])
def test_a_hook_of_a_norm_gets_what_it_got(hook: str, added: list[bool]) -> None:
    seen: list[list[Tensor]] = []

    def hang(net: Any) -> None:
        own: list[Tensor] = []
        seen.append(own)
        norm = net.model.layers[0].post_attention_layernorm
        if hook == "before":
            norm.register_forward_pre_hook(lambda m, args: own.append(args[0].detach().clone()))
        elif hook == "behind":
            norm.register_forward_hook(lambda m, args, y: own.append(args[0].detach().clone()))
        elif hook == "backward":
            norm.register_full_backward_hook(lambda m, dx, dy: own.extend([dx[0].clone(), dy[0].clone()]))
        else:
            norm.register_full_backward_pre_hook(lambda m, dy: own.append(dy[0].clone()))

    plain, net = model("Llama"), lpq.fuse(model("Llama"))
    for each in (plain, net):
        hang(each)
    assert equal(step(net), step(plain))
    assert equal(*seen)
    assert seen[0]
    assert added == [False]


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_of_the_layer_on_the_object_is_named(before: bool) -> None:
    """As by a hook of Accelerate. Before `lpq.fuse` its norms stay apart; later they add nothing."""
    net = model("Llama")
    layer = net.model.layers[0]
    if not before:
        lpq.fuse(net)
    layer.forward = layer.forward
    if before:
        lpq.fuse(net)
    report = lpq.report(net)
    entries = report.apart if before else report.fused
    own = [entry.note for entry in entries if "norm" in entry.name]
    assert len(own) == 2
    for note in own:
        assert note.endswith("the forward of its block was replaced on the object: call lpq.fuse again without that")
        assert ("torch adds what is added before" in note) is not before


@pytest.mark.parametrize("hook", ["forward_pre_hook", "full_backward_hook"])
def test_the_report_names_hooks_of_a_norm(hook: str) -> None:
    net = lpq.fuse(model("Llama"))
    getattr(net.model.layers[0].post_attention_layernorm, f"register_{hook}")(lambda *args: None)
    assert "torch adds what is added before: a hook is called with it" in str(lpq.report(net))


def test_hooks_of_a_layer_and_of_others_are_called(added: list[bool]) -> None:
    plain, net = model("Llama"), lpq.fuse(model("Llama"))
    for each in (plain, net):
        layer = each.model.layers[0]
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
        layer.register_forward_hook(lambda m, args, y: y * 2)
        layer.register_full_backward_hook(lambda m, dx, dy: (dx[0] * 3,))
        layer.self_attn.register_forward_hook(lambda m, args, y: (y[0] * 2, y[1]))
        layer.mlp.register_full_backward_hook(lambda m, dx, dy: (dx[0] * 2,))
    assert equal(step(net), step(plain))
    assert added == [True]  # the hook of attention keeps the first norm from encoding
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    try:
        assert equal(step(net), step(plain))
    finally:
        handle.remove()
    assert len(added) == 1


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_hooks_that_transformers_leaves_behind_keep_nothing_apart(asked: str, added: list[bool]) -> None:
    """They stay after a pass that was asked for more than logits."""
    plain, net = model("Llama"), lpq.fuse(model("Llama"))
    for each in (plain, net):
        each.set_attn_implementation("eager")
    tokens = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    found = [each(tokens, **{asked: True})[asked.removeprefix("output_")] for each in (net, plain)]
    assert equal(*found)
    assert net.model.layers[0].self_attn._forward_hooks
    assert added == [False, True]
    assert equal(step(net), step(plain))
    assert added == [False, True] * 2
    assert len(lpq.report(net).fused) == 3
    net.model.layers[0].self_attn.register_forward_hook(lambda module, given, y: None)
    assert equal(step(net), step(plain))
    assert added[4:] == [True]


def test_a_part_that_is_replaced(added: list[bool]) -> None:
    class Twice(nn.Module):
        def __init__(self, own: nn.Module) -> None:
            super().__init__()
            self.own = own

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = 2 * self.own(x)
            return y

    plain, net = model("Llama"), lpq.fuse(model("Llama"))
    for each in (plain, net):
        each.model.layers[0].mlp = Twice(each.model.layers[0].mlp)
    assert equal(step(net), step(plain))
    assert True not in added
    lpq.fuse(net)
    assert equal(step(net), step(plain))
    assert added == [False, True]


class Layer(nn.Module):
    """A layer of somebody's own, which may do a little more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.n1, self.n2 = nn.RMSNorm(64), nn.RMSNorm(64)
        self.a, self.b, self.dropout = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0, flag: bool = False) -> Tensor:
        h = self.n1(x)
        h = self.dropout(self.a(h)) if self.kind == "dropout" else self.a(h)
        if self.kind == "flag" and flag:
            h = h * 2
        if self.kind == "scaled" or scale != 1.0:
            h = h * scale
        if self.kind == "in place":
            h += x
            x = h
        elif self.kind == "from the norm":
            x = self.n1(x) + h
        elif self.kind == "twice":
            x = x + h + h
        else:
            x = h + x if self.kind == "other order" else x + h
        y: Tensor = x + self.b(self.n2(x))
        return (y, x)[0] if self.kind != "returns both" else (y, x)  # type: ignore[return-value]


FITS = ("plain", "dropout", "other order", "flag")


@pytest.mark.parametrize("kind", [*FITS, "scaled", "in place", "from the norm", "twice", "returns both"])
def test_layers_of_one_s_own(kind: str, added: list[bool]) -> None:
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(Layer(kind)).bfloat16(), "mxfp8")
    net: Any = lpq.fuse(copy.deepcopy(plain))
    assert len(residual_layers(net)) == (kind in FITS)

    def run(of: Any, *args: Any, **kwargs: Any) -> list[Any]:
        torch.manual_seed(1)
        of.zero_grad()
        x = torch.randn(4, 64).bfloat16().requires_grad_()
        y = of[0](x, *args, **kwargs)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        return [*(y if isinstance(y, tuple) else (y,)), x.grad, *(p.grad for p in of.parameters())]

    for args, kwargs in (((), {}), ((2.0,), {}), ((), {"flag": False}), ((), {"flag": True}), ((1.0,), {"flag": True})):
        added.clear()
        assert equal(run(net, *args, **kwargs), run(plain, *args, **kwargs)), (args, kwargs)
        usual = kind in FITS and not args and (kind != "flag" or not kwargs.get("flag"))
        assert added == ([False, True] if usual else [])
    for of in (net, plain):
        of.eval()
    assert equal(run(net), run(plain))
    if kind in FITS:
        assert "it adds the residual, and it adds the gradients that meet there" in str(lpq.report(net))
        net[0].lpq_calls.clear()
        run(net, 2.0)
        assert "torch adds what is added before: in the calls so far, its block" in str(lpq.report(net))


class Wide(nn.Module):
    """A layer whose rows are wider than the kernel of gradients takes."""

    def __init__(self, cols: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(cols), nn.Sequential(nn.Linear(cols, 32), nn.Linear(32, cols))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(self.norm(x))
        return y


@pytest.mark.parametrize(("cols", "dtype"), [(8192, torch.bfloat16), (8224, torch.bfloat16), (4128, torch.float32)])
def test_the_report_says_where_no_kernel_adds_the_gradients(cols: int, dtype: torch.dtype) -> None:
    net = lpq.convert(nn.Sequential(Wide(cols)).to(dtype), "mxfp8", fuse=True)
    (entry,) = lpq.report(net).fused
    torchs = f"torch adds the gradients that meet there in backward, as no kernel takes gradients of {cols} columns"
    assert (torchs in str(entry.note)) == (cols != 8192)
    assert ("it adds the gradients that meet there" in str(entry.note)) == (cols == 8192)


@pytest.mark.starts
def test_compiled_a_layer_computes_as_before() -> None:
    torch.manual_seed(0)
    plain: Any = lpq.convert(nn.Sequential(Layer("plain")).bfloat16(), "mxfp8")
    net: Any = lpq.fuse(copy.deepcopy(plain))
    x = torch.randn(4, 64).bfloat16()
    whole = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x), plain(x))


@pytest.mark.starts
def test_a_layer_that_the_compiler_leaves_eager_is_tried_eagerly() -> None:
    """As for weights whose gradient is added in place. Dynamo traced the trial itself, and raised what ends one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain: Any = lpq.convert(nn.Sequential(Layer("plain")).bfloat16(), "mxfp8", accumulate="grad")
    net: Any = lpq.fuse(copy.deepcopy(plain))
    compiled = torch.compile(net, backend="eager")
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(4, 64).bfloat16()
        for each in (compiled, plain):
            each(x).sum().backward()
    assert any(kind.course for kind in net[0].lpq_calls.values())
    assert equal([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
