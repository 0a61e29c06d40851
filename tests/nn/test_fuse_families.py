"""lpq.fuse: what is fused in each family of Hugging Face's models, and what is not; results are equal to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from torch import Tensor, nn

import lpq
from lpq.nn import halves
from lpq.nn.residual_layers import ResidualLayer

transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {name: size for name, size in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
OPT |= {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}
OTHERS = "something other than layers of lpq takes its output"
EXPERTS = "its activation is not act(gate) * up of two halves, with a SiLU, GELU or ReLU"
RMS = ("input_layernorm", "post_attention_layernorm")
GEMMA = (
    SIZES | {"head_dim": 32},
    ("mlp", "input_layernorm", "pre_feedforward_layernorm"),
    {"post_attention_layernorm": OTHERS, "post_feedforward_layernorm": OTHERS},
)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, str]]] = {
    "Llama": (SIZES, ("mlp", *RMS), {}),
    "Llama, with biases": (SIZES | {"mlp_bias": True, "hidden_act": "gelu_new"}, ("mlp", *RMS), {}),
    "Mistral": (SIZES | {"hidden_act": "gelu"}, ("mlp", *RMS), {}),
    "Qwen2": (SIZES, ("mlp", *RMS), {}),
    "Qwen3": (SIZES, ("mlp", *RMS), {}),
    "Gemma": (SIZES | {"head_dim": 32}, ("mlp", *RMS), {}),
    "Gemma2": GEMMA,
    "Gemma3": GEMMA,
    "Phi": (SIZES, ("mlp", "input_layernorm"), {}),
    "Phi3": (SIZES, ("mlp", *RMS), {}),
    "GptOss": (
        SIZES | {"num_local_experts": 4, "head_dim": 32}, RMS[:1], {"mlp.experts": EXPERTS, RMS[1]: OTHERS},
    ),
    "Mixtral": (SIZES | {"num_local_experts": 4}, ("mlp.experts", RMS[0]), {RMS[1]: OTHERS}),
    "Qwen3Moe": (
        SIZES | {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        ("mlp.experts", RMS[0]), {RMS[1]: OTHERS},
    ),
    "GPT2": (GPT2, ("mlp", "ln_1", "ln_2"), {}),
    "OPT": (OPT, ("self_attn_layer_norm", "final_layer_norm"), {}),
}  # fmt: skip
"""The sizes of a model, what is fused in one of its layers, and what is not."""
ADDING = dict.fromkeys(FAMILIES, 2) | {"GptOss": 1, "Mixtral": 1, "Qwen3Moe": 1, "Phi": 0, "OPT": 0}
"""The norms of a layer that add the residual."""
PAGE = Path(__file__).parents[2] / "docs/fused.md"


def model(family: str = "Llama", recipe: str = "mxfp8", **options: Any) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    name = family.partition(",")[0]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    return lpq.convert(kind(config(**{**FAMILIES[family][0], **options})).bfloat16(), recipe)


def step(net: Any) -> list[Tensor | None]:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    net.zero_grad()
    loss = net.train()(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


def residual_layers(net: nn.Module) -> list[Any]:
    return [m for m in net.modules() if isinstance(m, ResidualLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_each_family(family: str, fused_passes: list[int], added: list[bool]) -> None:
    """It is the same layer, fused and no longer fused."""
    plain, net = model(family), model(family)
    layer = next(name for name, m in net.named_modules() if name.endswith(".0") and any(m.children()))
    classes = [type(m) for m in net.modules()]
    assert lpq.fuse(net) is net
    report = lpq.report(net)
    assert str(report).count("*_layernorm") <= 1  # it does not stand for fused ones and for others
    assert not report.uncalled  # no pass has run yet
    assert equal(step(net), step(plain))
    _, fused, apart = FAMILIES[family]
    assert {e.name.removeprefix(f"{layer}.") for e in report.fused} == {*fused}
    assert {e.name.removeprefix(f"{layer}."): e.note for e in report.apart} == apart
    assert len(fused_passes) == ("mlp" in fused and family != "Phi3")
    assert added == [False, True][: ADDING[family]]
    assert len(residual_layers(net)) == bool(added)
    notes = [entry.note for entry in report.fused if "norm" in entry.name or "ln_" in entry.name]
    behind = f"{'torch' if family == 'GPT2' else 'it'} adds the gradients that meet there in backward"
    before = "torch adds what is added before its layer", "it adds the residual"
    said = [note for note in notes if note.endswith(f", and {behind}")]
    assert [note.split("; ")[-1] for note in said] == [f"{words}, and {behind}" for words in before[: len(added)]]
    others = [note for note in notes if note not in said]
    assert all("; torch adds what is added before: the forward of its block is not x + f(norm(x))" in n for n in others)
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert equal_states(net.state_dict(), plain.state_dict())
    assert str(net) == str(plain)
    assert all(isinstance(m, cls) for m, cls in zip(net.modules(), classes, strict=True))
    lpq.unfuse(net)
    assert [type(m) for m in net.modules()] == classes
    assert [vars(m).keys() for m in net.modules()] == [vars(m).keys() for m in plain.modules()]
    assert not lpq.report(net).fused
    assert equal(step(net), step(plain))
    assert len(fused_passes) <= 1


@pytest.mark.parametrize("family", ["Mixtral", "Phi3"])
def test_gate_and_up_of_one_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function computes their activation, unless somebody looks at it."""
    calls: list[int] = []
    own = halves.ActivatedHalves.forward
    monkeypatch.setattr(halves.ActivatedHalves, "forward", staticmethod(lambda *args: [calls.append(1), own(*args)][1]))
    net, plain = lpq.fuse(model(family)), model(family)
    assert equal(step(net), step(plain))
    assert len(calls) == 1
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    step(net)
    handle.remove()
    assert len(calls) == 1
    owner, name = (net.model.layers[0].mlp, "activation_fn") if family == "Phi3" else (experts_of(net), "act_fn")
    getattr(owner, name).register_forward_hook(lambda module, given, y: y * 2)
    other = plain.model.layers[0].mlp if family == "Phi3" else experts_of(plain)
    getattr(other, name).register_forward_hook(lambda module, given, y: y * 2)
    assert equal(step(net), step(plain))
    assert len(calls) == 1
    assert "hooks are called with its activation" in str(lpq.report(net))
    lpq.unfuse(net)
    assert vars(owner).keys() == vars(other).keys()
    assert type(owner) is type(other)


def experts_of(net: Any) -> Any:
    return net.model.layers[0].mlp.experts


@pytest.mark.parametrize("family", ["GPT2", "Phi3"])
def test_a_block_compiles_whole(family: str) -> None:
    net = lpq.fuse(model(family)).eval()
    mlp = net.transformer.h[0].mlp if family == "GPT2" else net.model.layers[0].mlp
    x = torch.randn(2, 16, 64).bfloat16()
    with torch.no_grad():
        expected = mlp(x)
        mlp.compile(backend="aot_eager", fullgraph=True)
        assert torch.equal(mlp(x), expected)


def test_the_page_says_so() -> None:
    rows = re.findall(r"^\| ([A-Z][\w, ]+) \| (fused|fused in part|–) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    said = {name: (block != "–", norms) for names, block, norms in rows for name in names.split(", ")}
    assert said.keys() == {family.partition(",")[0] for family in FAMILIES}
    for family, (_, fused, _) in FAMILIES.items():
        block, norms = said[family.partition(",")[0]]
        count = 2 if norms.startswith(("both", "the two")) else 1
        assert len(fused) == count + block, family
        assert bool({"mlp", "mlp.experts"} & {*fused}) == block, family
