"""lpq.fuse: blocks of Hugging Face's models are found by what they compute, and compute it to the bit."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.comparing import equal, equal_states
from test_fuse_families import model as of_family
from test_fuse_families import step, transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.tensor.with_value import WithValue


def model(family: str = "Llama", recipe: str = "mxfp8", **options: Any) -> Any:
    """A converted model of two layers."""
    return of_family(family, recipe, num_hidden_layers=2, **options)


def results(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The output, and the gradients of all parameters."""
    y = net(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


def blocks(net: nn.Module) -> list[str]:
    return [entry.name for entry in lpq.report(net).fused if "norm" not in entry.name]


def norms(net: nn.Module) -> list[str]:
    return [entry.name for entry in lpq.report(net).fused if "norm" in entry.name]


def test_by_convert(fused_passes: list[int]) -> None:
    net = lpq.convert(model(), "fp8-current", fuse=True)
    assert len(blocks(net)) == 2
    assert equal(step(net), step(model(recipe="fp8-current")))
    lpq.convert(net, "nvfp4")
    assert equal(step(net), step(model(recipe="nvfp4")))
    assert len(fused_passes) == 4


def test_layers_with_delayed_scaling_behind_norms_share_histories(tmp_path: Any) -> None:
    plain, net = model(recipe="fp8-delayed"), lpq.fuse(model(recipe="fp8-delayed"))
    assert len(norms(net)) == 4
    for _ in range(2):
        assert equal(step(net), step(plain))
        assert equal_states(net.state_dict(), plain.state_dict())
        net.eval().generate(torch.ones(2, 4, dtype=torch.long), max_new_tokens=2, do_sample=False)
    for block in net.model.layers:
        attention, mlp = block.self_attn, block.mlp
        assert attention.q_proj.x_amax is attention.k_proj.x_amax is attention.v_proj.x_amax is not mlp.up_proj.x_amax
        assert mlp.up_proj.x_amax is mlp.gate_proj.x_amax
    net.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == plain.state_dict().keys()
    lpq.unfuse(net)
    assert equal(step(net), step(plain))
    assert equal_states(net.state_dict(), plain.state_dict())


def test_adapters(fused_passes: list[int]) -> None:
    """A block with adapters runs as before, and the report says why; one without is fused, with frozen weights. Once
    adapters are merged, and ``fuse`` is called again, all are fused."""
    peft: Any = pytest.importorskip("peft", reason="needs peft, which `make install` brings")
    for targets, passes in ((["q_proj"], 2), (["gate_proj", "q_proj"], 0)):
        nets = [model(), lpq.fuse(model())]
        config = peft.LoraConfig(target_modules=targets, r=16, init_lora_weights=False)
        adapted = [peft.get_peft_model(net, config) for net in nets]
        adapted[0].load_state_dict(adapted[1].state_dict())
        fused_passes.clear()
        found = [step(net) for net in adapted]
        assert equal(*found)
        assert len(fused_passes) == passes
        report = lpq.report(adapted[1])
        assert len(blocks(adapted[1])) == passes
        assert len(norms(adapted[1])) == passes
        assert "a layer that took its output was replaced since" in str(report)
        if not passes:
            assert "its gate_proj is another module since, peft's Linear: call lpq.fuse again" in str(report)
        lpq.fuse(adapted[1])
        assert len(norms(adapted[1])) == 4  # adapters get the outputs in high precision
        assert equal(*[step(net) for net in adapted])
        why = "its gate is peft's Linear with a forward of its own, around a layer of lpq"
        assert (why in str(lpq.report(adapted[1]))) == (not passes)
        assert len(lpq.report(adapted[1]).fused) == 4 + passes
        merged = [net.merge_and_unload().requires_grad_(True) for net in adapted]
        assert lpq.fuse(merged[1]) is nets[1]
        assert len(lpq.report(merged[1]).fused) == 6
        assert equal(*[step(net) for net in merged])


def test_hooks_of_a_block_are_called(fused_passes: list[int]) -> None:
    net = lpq.fuse(model())
    seen: list[str] = []
    mlp = net.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda *args: seen.append("before"))
    mlp.register_forward_hook(lambda *args: seen.append("after"))
    mlp.register_full_backward_hook(lambda *args: seen.append("back"))
    assert equal(step(net), step(model()))
    assert seen == ["before", "after", "back"]
    assert len(fused_passes) == 2
    mlp.up_proj.register_forward_hook(lambda *args: seen.append("up"))
    assert equal(step(net), step(model()))
    assert "up" in seen
    assert len(fused_passes) == 3
    assert "not fused  model.layers.0.mlp (LlamaMLP): hooks are called with its up" in str(lpq.report(net))


def test_the_report() -> None:
    net = model()
    assert not lpq.report(net).fused
    assert "fused" not in str(lpq.report(net))
    lpq.fuse(net)
    net.model.layers[1].mlp.down_proj.recipe = None
    text = str(lpq.report(net))
    assert "5 of 6 blocks and norms fused" in text
    assert text.count("(2 LlamaRMSNorm): it encodes its output, once, for the layers that take it") == 2
    assert "not fused  model.layers.1.mlp" in text
    assert "    fused  model.layers.0.mlp (LlamaMLP): its layers are one function" in text
    assert "not fused  model.layers.1.mlp (LlamaMLP): its down has no recipe" in text


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Llama", {"hidden_act": "quick_gelu"}, "is neither down(act(gate(x)) * up(x)) nor down(act(up(x))) alone"),
        (
            "Mixtral",
            {"num_local_experts": 4, "hidden_act": "tanh"},
            "its activation is not act(gate) * up of two halves",
        ),
    ],
)
def test_blocks_that_stay_apart(kind: str, options: Any, reason: str, fused_passes: list[int]) -> None:
    net, plain = lpq.fuse(model(kind, **options)), model(kind, **options)
    apart = [entry.note for entry in lpq.report(net).apart if "norm" not in entry.name]
    assert not blocks(net)
    assert len(apart) == 2
    assert all(reason in note for note in apart)
    assert equal(step(net), step(plain))
    assert not fused_passes


def test_of_mamba2_the_norm_before_the_mixer_is_fused_and_the_gated_one_in_it_is_not() -> None:
    """Its mixer reads the weight and ``variance_epsilon`` of its gated norm, which asks for all sizes of its input."""
    nets = []
    for fuse in (True, False):
        torch.manual_seed(0)
        config = transformers.Mamba2Config(
            hidden_size=64, num_heads=8, head_dim=16, state_size=16, num_hidden_layers=2, vocab_size=64, n_groups=1
        )
        net: Any = transformers.Mamba2ForCausalLM(config).bfloat16()
        nets.append(lpq.convert(net, "mxfp8", fuse=fuse))
    assert equal(step(nets[0]), step(nets[1]))
    report = lpq.report(nets[0])
    assert [entry.name.split(".", 3)[3] for entry in report.fused] == ["norm"] * 2
    assert not report.apart


def test_a_hook_of_attention_gets_an_ordinary_tensor() -> None:
    net = lpq.fuse(model())
    seen: list[type] = []
    attention = net.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(type(kwargs["hidden_states"])), with_kwargs=True
    )
    assert equal(step(net), step(model()))
    assert seen == [Tensor]
    assert norms(net)[0] == "model.layers.0.post_attention_layernorm"


class Gated(nn.RMSNorm):
    """A norm that may be given a gate."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class Normed(nn.Module):
    """A norm, and layers that take its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm: nn.RMSNorm = Gated(64) if kind == "gated" else nn.RMSNorm(64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "weight alone":
            normed = nn.functional.rms_norm(x, (64,), self.norm.weight, self.norm.eps)
        else:
            normed = self.norm(x, x.sigmoid()) if self.kind == "gated" else self.norm(x)
        if self.kind.endswith("_"):
            getattr(normed, self.kind)(2)
        y: Tensor = self.first(normed) + self.second(normed)
        if self.kind == "residual":
            return y + normed
        if self.kind == "returned":
            return (y, normed)[0] if y.requires_grad else normed
        if self.kind == "view":
            return y + self.first(normed.flatten(0, -2)).view_as(y)
        if self.kind == "twice":
            return y + self.second(self.norm(y))
        return y


@pytest.mark.parametrize("kind", ["layers alone", "residual", "returned", "view", "twice", "gated", "weight alone"])
def test_norms_of_one_s_own(kind: str) -> None:
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(Normed(kind)), "mxfp8")
    net = lpq.fuse(copy.deepcopy(plain))
    x = torch.randn(2, 16, 64)
    assert equal(results(net, x), results(plain, x))
    assert norms(net) == (["0.norm"] if kind in ("layers alone", "residual", "returned") else [])
    text = str(lpq.report(net))
    assert ("and hands it to others in high precision, from the same run" in text) == (kind in ("residual", "returned"))
    assert ("it runs twice in its block, or a layer that takes its output does" in text) == (kind in ("view", "twice"))
    assert ("its block calls it with more than its input, as with a gate" in text) == (kind == "gated")
    assert ("its block computes without calling it" in text) == (kind == "weight alone")


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed", "fprop=mxfp8, dgrad=nvfp4(), wgrad=fp8()"])
@pytest.mark.parametrize("second", ["as the first", "in high precision", "in another format", "no layer of lpq"])
def test_others_get_the_output_of_a_norm_as_it_is(recipe: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the run that encodes it for layers of lpq."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Normed("residual")).bfloat16()
    lpq.convert(plain, {"rules": [{"match": "*first", "recipe": recipe}]} if second.startswith("no") else recipe)
    if second.startswith("in"):
        plain[0].second.recipe = None if second == "in high precision" else "fp8-row"
    net, x = lpq.fuse(copy.deepcopy(plain)), torch.randn(2, 16, 64).bfloat16()
    made: list[object] = []
    kept = WithValue.__setattr__
    monkeypatch.setattr(
        WithValue, "__setattr__", lambda t, name, v: [made.append(v) if name == "source" else None, kept(t, name, v)][1]
    )
    for _ in range(2):
        net.zero_grad()
        plain.zero_grad()
        assert equal(results(net, x), results(plain, x))
    assert made
    assert all(isinstance(source, Tensor) for source in made), "nothing is computed for them afterwards"
    assert norms(net) == ["0.norm"]
    assert ("in 2 runs, one for each format" in str(lpq.report(net))) == (second == "in another format")


class Behind(nn.Module):
    """Two layers and a residual, which a compiler or a checkpoint may take as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) + self.second(x) + 3 * x
        return y


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.behind = nn.RMSNorm(64), Behind()
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y: Tensor = checkpoint(self.behind, normed, use_reentrant=False) if self.checkpoints else self.behind(normed)
        return y


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_others_in_a_module_that_is_taken_as_a_whole(how: str) -> None:
    torch.manual_seed(0)
    plain: Any = lpq.convert(nn.Sequential(Around()).bfloat16(), "fp8-current")
    net, found = lpq.fuse(copy.deepcopy(plain)), []
    for model in (net, plain):
        model[0].checkpoints = how == "checkpointed"
        if how == "compiled" and model is net:
            model[0].behind.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        found.append([*results(model, x), x.grad])
    assert norms(net) == ["0.norm"]
    assert equal(*found)


def test_a_write_to_what_layers_have_encoded() -> None:
    net: Any = lpq.fuse(lpq.convert(nn.Sequential(Normed("residual")), "mxfp8"))
    with torch.no_grad(), pytest.raises(TypeError, match=r"write to a copy, or call lpq\.unfuse"):
        net[0].norm(torch.randn(2, 64)).mul_(2)
    for kind in ("mul_", "__imul__", "fill_"):
        assert not norms(lpq.fuse(lpq.convert(nn.Sequential(Normed(kind)), "mxfp8")))


def test_rotations_by_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernel takes rotations as wide as a head, and runs on a GPU alone."""
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    rotate = llama.apply_rotary_pos_emb

    def as_wide_as_a_head(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        assert cos.shape[-1] == sin.shape[-1] == q.shape[-1]
        return rotate(q, k, cos, sin)

    def on_a_gpu(*_: Any) -> Any:
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", as_wide_as_a_head)
    assert len(norms(lpq.fuse(model()))) == 4
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", on_a_gpu)
    net = lpq.fuse(model())
    reasons = {entry.note for entry in lpq.report(net).apart if "norm" in entry.name}
    assert len(reasons) == 1
    assert "on cpu it raises RuntimeError; if it has kernels for a GPU alone, call lpq.fuse again" in reasons.pop()
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", rotate)
    assert len(norms(lpq.fuse(net))) == 4


def test_no_trial_of_a_model_on_the_meta_device_has_tensors_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would be launched with no address."""
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    rotate, kinds = llama.apply_rotary_pos_emb, set[str]()

    def noted(*args: Tensor) -> Any:
        kinds.update(x.device.type for x in args)
        return rotate(*args)

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", noted)
    net = lpq.fuse(model().to("meta"))
    assert (len(blocks(net)), len(norms(net)), kinds) == (2, 4, {"cpu"})


def test_a_forward_on_the_object() -> None:
    net = model()
    mlp = net.model.layers[0].mlp
    mlp.forward = mlp.forward
    lpq.fuse(net)
    assert blocks(net) == ["model.layers.1.mlp"]
    assert "its forward was replaced on the object" in str(lpq.report(net))


@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm"])
def test_a_forward_that_is_set_on_the_object_later(name: str) -> None:
    net = lpq.fuse(model())
    module, fused = net.model.layers[0].get_submodule(name), lpq.report(net).fused
    module.forward = lambda x: 2 * x
    report = lpq.report(net)
    assert f"model.layers.0.{name}" not in [entry.name for entry in report.fused]
    (note,) = (entry.note for entry in report.apart if entry.name == f"model.layers.0.{name}")
    assert note.startswith("its forward was replaced on the object since")
    del module.forward
    assert lpq.report(net).fused == fused


class Block(nn.Module):
    """A block of somebody's own, which does a little more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w1, self.w2, self.w3 = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 96)
        self.dropout = nn.Dropout(0.5)
        self.act = nn.Tanh() if kind == "other activation" else nn.SiLU()
        for layer in (self.w1, self.w3):
            layer.bias = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "upside down":
            return self.w2(self.w3(x) * self.act(self.w1(x)))  # type: ignore[no-any-return]
        if self.kind == "dropout":
            return self.w2(self.dropout(self.act(self.w1(x)) * self.w3(x)))  # type: ignore[no-any-return]
        if self.kind == "residual":
            return x + self.w2(self.act(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]
        if self.kind == "other input":
            return self.w2(self.act(self.w1(x)) * self.w3(x * 1))  # type: ignore[no-any-return]
        if self.kind == "other numbers":
            gate = self.w1(x)
            return self.w2(gate * torch.sigmoid(gate) * self.w3(x))  # type: ignore[no-any-return]
        if self.kind == "twice":
            return self.w2(F.silu(self.w1(x)) * self.w3(x)) if self.w1(x) is not None else x  # type: ignore[no-any-return]
        return self.w2(self.act(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["plain", "upside down"])
def test_blocks_of_one_s_own(kind: str, fused_passes: list[int]) -> None:
    """Whatever its layers are called, and in whatever order they are made."""
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(Block(kind)), "mxfp8")
    net = lpq.fuse(copy.deepcopy(plain))
    assert blocks(net) == ["0"]
    x = torch.randn(32, 64)
    assert equal(results(net, x), results(plain, x))
    assert len(fused_passes) == 1


class Ungated(nn.Module):
    """A block without a gate, with a dropout somewhere."""

    def __init__(self, act: nn.Module, where: str, p: float = 0.5) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(64, 96), nn.Linear(96, 64)
        self.act, self.dropout, self.where = act, nn.Dropout(p), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "between":
            return self.c_proj(self.dropout(self.act(self.c_fc(x))))  # type: ignore[no-any-return]
        y: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return self.dropout(y) if self.where == "twice" else y


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()], ids=str)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_blocks_without_a_gate(act: nn.Module, recipe: str, fused_passes: list[int]) -> None:
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(Ungated(act, "behind")), recipe, include="all")
    net = lpq.fuse(copy.deepcopy(plain))
    assert blocks(net) == ["0"]
    for _ in range(2):
        x, found = torch.randn(2, 32, 64), []
        for of in (net, plain):
            torch.manual_seed(3)
            found.append(results(of, x))
        assert equal(*found)
    assert len(fused_passes) == 2
    seen: list[Tensor] = []
    net[0].dropout.register_forward_hook(lambda module, given, y: seen.append(y))
    assert torch.equal(net.eval()(x), plain.eval()(x))
    assert len(seen) == 1


@pytest.mark.parametrize("where", ["between", "twice"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_dropout_elsewhere(where: str, p: float) -> None:
    net = lpq.fuse(lpq.convert(nn.Sequential(Ungated(nn.ReLU(), where, p)), "mxfp8"))
    assert not blocks(net)
    assert ("a dropout stands before its last layer" in str(lpq.report(net))) is (where == "between")


@pytest.mark.parametrize("kind", ["dropout", "residual", "other input", "other numbers", "twice", "other activation"])
@pytest.mark.parametrize("trains", [True, False])
def test_blocks_that_compute_something_else(kind: str, trains: bool) -> None:
    net = lpq.fuse(lpq.convert(nn.Sequential(Block(kind)).train(trains), "mxfp8"))
    assert blocks(net) == []
    words = "a dropout stands before its last layer" if kind == "dropout" else "its forward is neither down(act"
    assert words in str(lpq.report(net))


def test_an_activation_that_is_replaced(fused_passes: list[int]) -> None:
    net = lpq.fuse(lpq.convert(nn.Sequential(Block("plain")), "mxfp8"))
    net[0].act = nn.Tanh()
    x = torch.randn(32, 64)
    expected = net[0].w2(torch.tanh(net[0].w1(x)) * net[0].w3(x))
    assert torch.equal(net(x), expected)
    assert not fused_passes
    assert "its act is another module since, torch's Tanh: call lpq.fuse again" in str(lpq.report(net))
    lpq.fuse(net)
    assert type(net[0]) is Block


def test_a_model_that_was_not_converted() -> None:
    with pytest.raises(ValueError, match=r"call lpq\.convert"):
        lpq.fuse(nn.Sequential(Block("plain")))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        lpq.fuse("model")  # type: ignore[arg-type]
