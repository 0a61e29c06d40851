"""Fused models to which other libraries have done something: they compute the same, and the report says what stays
apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from test_fuse_families import step
from test_fuse_models import model, norms
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lpq
from lpq.nn import fused_blocks

ATTENTION, NORM = "model.layers.0.self_attn", "model.layers.0.input_layernorm"
REPLACED = "was replaced on the object"


def _apart(net: nn.Module) -> dict[str, str]:
    return {entry.name: entry.note for entry in lpq.report(net).apart}


def _same(net: Any, plain: Any) -> None:
    for _ in range(2):
        assert equal(step(net), step(plain))
        assert equal_states(net.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("recipe", "name", "apart"),
    [
        ("fp8-delayed", "model.layers.0", []),
        ("fp8-delayed", ATTENTION, [NORM]),
        ("mxfp8", "model.layers.0.self_attn.q_proj", [NORM]),
        ("mxfp8", "model.layers.0.mlp", ["model.layers.0.mlp", "model.layers.0.post_attention_layernorm"]),
        ("fp8-delayed", NORM, [NORM]),
    ],
)
def test_hooks_of_accelerate(name: str, apart: list[str], recipe: str) -> None:
    """Such hooks replace the forward on the object. They get ordinary tensors, a second ``lpq.fuse`` breaks nothing,
    and ``lpq.unfuse`` refuses where a hook goes on to call the forward that ``lpq.unfuse`` takes away."""
    hooks: Any = pytest.importorskip("accelerate.hooks", reason="needs accelerate, which `make install` brings")
    seen: list[type] = []

    class Hook(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.extend(type(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            return args, kwargs

    plain, net = model(recipe=recipe), lpq.fuse(model(recipe=recipe))
    for each in (plain, net):
        hooks.add_hook_to_module(each.get_submodule(name), Hook())
    _same(net, plain)
    assert set(seen) == {Tensor}
    assert list(_apart(net)) == apart
    assert all(REPLACED in why for why in _apart(net).values())
    lpq.fuse(net)
    _same(net, plain)
    assert all(REPLACED in why for why in _apart(net).values())
    if name in (ATTENTION, "model.layers.0.self_attn.q_proj"):
        lpq.unfuse(net)
    else:
        fused = len(lpq.report(net).fused)
        for back in (lpq.unfuse, lpq.restore):
            with pytest.raises(RuntimeError, match=f"^{name}: its forward was replaced on the object since"):
                back(net)
        assert len(lpq.report(net).fused) == fused
    _same(net, plain)
    for each in (plain, net):
        hooks.remove_hook_from_module(each.get_submodule(name))
        del each.get_submodule(name).forward
    assert len(lpq.report(lpq.fuse(net)).fused) == 6
    _same(lpq.unfuse(net), plain)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
def test_offloaded_by_accelerate(recipe: str) -> None:
    """Weights are on the meta device between the passes of their layers."""
    accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate, which `make install` brings")
    plain, net = model(recipe=recipe), lpq.fuse(model(recipe=recipe))
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(net.eval()(tokens).logits, plain.eval()(tokens).logits)
    assert len(_apart(net)) == 6
    assert not lpq.report(net).fused


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize(("recipe", "before"), [("fp8-delayed", False), ("mxfp8", True)])
def test_a_parametrized_weight_of_a_norm(before: bool, recipe: str) -> None:
    """It is no parameter of the norm, which computes as before; a norm that had it before is not known."""
    plain, net = model(recipe=recipe), model(recipe=recipe)
    for what in ("fuse", "parametrize") if not before else ("parametrize", "fuse"):
        if what == "fuse":
            lpq.fuse(net)
        else:
            for each in (plain, net):
                parametrize.register_parametrization(each.get_submodule(NORM), "weight", Doubled())
    _same(net, plain)
    assert _apart(net) == ({} if before else {NORM: "its weight is no ordinary parameter"})
    _same(lpq.fuse(net), plain)
    assert len(lpq.report(net).fused) == 5
    if not before:
        with pytest.raises(RuntimeError, match=r"has become a ParametrizedLlamaRMSNorm since.*call lpq\.unfuse"):
            lpq.unfuse(net)
        assert len(lpq.report(net).fused) == 5
    parametrize.remove_parametrizations(net.get_submodule(NORM), "weight", leave_parametrized=False)
    parametrize.remove_parametrizations(plain.get_submodule(NORM), "weight", leave_parametrized=False)
    assert len(lpq.report(lpq.fuse(net)).fused) == 6
    _same(lpq.unfuse(net), plain)


def _saved(peft: Any) -> Any:
    return peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["input_layernorm"], init_lora_weights=False)


def _tuned(peft: Any) -> Any:
    return peft.LNTuningConfig(target_modules=["input_layernorm"])


@pytest.mark.parametrize(("recipe", "config"), [("fp8-delayed", _saved), ("mxfp8", _tuned)])
def test_peft_around_a_norm(config: Callable[[Any], Any], recipe: str) -> None:
    """It trains a copy of the norm, which has no copies of the layers behind the norm."""
    peft: Any = pytest.importorskip("peft", reason="needs peft, which `make install` brings")
    plain, net = model(recipe=recipe), lpq.fuse(model(recipe=recipe))
    adapted = [peft.get_peft_model(each, config(peft)) for each in (plain, net)]
    adapted[0].load_state_dict(adapted[1].state_dict())
    assert not [m for m in adapted[1].modules() if "consumers" in vars(m) and m.consumers not in _known(net)]
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1) for each in adapted]
    for _ in range(2):
        assert equal(*[step(each) for each in adapted])
        for optimizer in optimizers:
            optimizer.step()
    assert equal_states(*[each.state_dict() for each in adapted])
    notes = [note for name, note in _apart(adapted[1]).items() if "input_layernorm" in name]
    assert len(notes) == 2
    assert all(note.startswith("it is no child of its block any more") for note in notes)
    lpq.fuse(adapted[1])
    assert equal(*[step(each) for each in adapted])
    assert not any("input_layernorm" in name for name in norms(adapted[1]))
    assert not _apart(adapted[1])


def _known(net: Any) -> list[tuple[nn.Module, ...]]:
    """The layers behind the norms of a model; none for a norm without."""
    layers = [((a := layer.self_attn).q_proj, a.k_proj, a.v_proj) for layer in net.model.layers]
    return [(), *layers, *((layer.mlp.gate_proj, layer.mlp.up_proj) for layer in net.model.layers)]


def test_a_copy_of_a_norm_and_of_its_block() -> None:
    """A norm alone is copied without the layers behind it, a block with its own."""
    net = lpq.fuse(model())
    layer = net.model.layers[0]
    norm, twin = copy.deepcopy(layer.input_layernorm), copy.deepcopy(layer)
    assert not norm.consumers
    assert not norm.places
    x = torch.randn(2, 8, 64).bfloat16()
    assert type(norm(x)) is Tensor
    assert torch.equal(norm(x), layer.input_layernorm(x) + 0)
    assert twin.input_layernorm.consumers[0] is twin.self_attn.q_proj
    assert len(layer.input_layernorm.consumers) == 3


def test_a_layer_whose_weight_is_not_there_yet_stays_as_it_is() -> None:
    net = lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(4)), "mxfp8", fuse=True)
    assert type(net[1]) is nn.LazyLinear
    assert net(torch.randn(16, 64)).shape == (16, 4)


def test_an_error_half_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = model(), []
    before = [(module, type(module), {**vars(module)}) for module in net.modules()]

    def extended(layer: nn.Module) -> None:
        seen.append(type(layer))
        if layer is net.lm_head:  # the last
            raise RuntimeError("no more")

    monkeypatch.setattr(fused_blocks, "extend_residual", extended)
    with pytest.raises(RuntimeError, match="no more"):
        lpq.fuse(net)
    assert seen != [cls for _, cls, _ in before], "blocks and norms were extended before"
    assert [(type(module), vars(module)) for module, *_ in before] == [(cls, own) for _, cls, own in before]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("scripted", ["norm", "mlp", "mlp.up", "mlp.act", "all"])
def test_a_part_that_is_compiled_by_torch_jit(scripted: str) -> None:
    """Nobody sees the functions that it calls, so that a block around it stays as it is, and the report says so."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.first = nn.LayerNorm(64), nn.Linear(64, 64)
            self.norm, self.mlp = nn.LayerNorm(64), MLP()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(self.before(x))
            return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]

    def made() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block())
        if scripted == "all":
            net[0] = torch.jit.script(net[0])
        else:
            net[0].set_submodule(scripted, torch.jit.script(net[0].get_submodule(scripted)))
        return lpq.convert(net, "mxfp8", include="all")

    plain, net = made(), lpq.fuse(made())
    x = torch.randn(4, 64)
    for each in (plain, net):
        each(x).square().sum().backward()
    pairs = zip(net[1].parameters(), plain[1].parameters(), strict=True)  # what torch.jit compiles changes after a run
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert torch.equal(net(x), plain(x))
    assert {"1.before", "1.norm", "1.mlp"} <= {entry.name for entry in lpq.report(net).fused}
    apart = _apart(net)
    assert all(name.startswith("0.") for name in apart)
    if scripted != "all":
        assert "is compiled by torch.jit, which hides what takes its output" in apart["0.before"]
    lpq.unfuse(net)
    assert torch.equal(net(x), plain(x))
