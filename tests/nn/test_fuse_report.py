"""lpq.report names the blocks and norms that lpq.fuse looks at."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal_states
from support.small_models import LlamaMlp, Normed, Stream
from torch import Tensor, nn

import lpq


class Adapter(nn.Module):
    """An adapter like one of peft: it has the sizes of the layer in it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = layer, layer.in_features, layer.out_features
        self.added = nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.added(x)
        return y


class Attention(nn.Module):
    """Its layers have the sizes of a block in which one layer makes gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, kv = self.qkv_proj(x).split(64, -1)
        y: Tensor = self.o_proj(q * positions + kv)
        return y


def model(**rules: str) -> Any:
    """Two blocks. ``rules``: the recipes of layers by the end of their names, where they are not ``mxfp8``."""
    torch.manual_seed(0)
    policy = [{"match": f"*.{name}_proj", "recipe": recipe} for name, recipe in rules.items()]
    return lpq.convert(nn.Sequential(Normed(), Normed()), {"rules": [*policy, {"match": "*", "recipe": "mxfp8"}]})


def apart(net: nn.Module) -> dict[str, str]:
    return {entry.name: entry.note for entry in lpq.report(net).apart}


def test_a_layer_that_a_policy_skips() -> None:
    assert apart(lpq.fuse(model(up="skip"))) == dict.fromkeys(["0.mlp", "1.mlp"], "its up has no recipe")


def test_a_block_with_an_adapter_is_named() -> None:
    nets = [model(), model()]
    for net in nets:
        torch.manual_seed(1)
        net[0].mlp.up_proj = Adapter(net[0].mlp.up_proj)
    lpq.fuse(nets[0])
    why = "its up is test_fuse_report's Adapter with a forward of its own, around a layer of lpq"
    assert apart(nets[0]) == {"0.mlp": why}
    x = torch.randn(32, 64)
    assert torch.equal(*[net(x) for net in nets])
    nets[0][0].mlp.up_proj, nets[0][1].norm = nets[0][0].mlp.up_proj.base_layer, nn.LayerNorm(64)
    notes = apart(nets[0])
    assert notes.keys() == {"0.mlp", "0.norm", "1.norm"}  # the other norm was before the adapter
    assert all("call lpq.fuse again" in note for note in notes.values())
    assert not apart(lpq.fuse(nets[0]))


def test_a_norm_before_layers_with_different_histories_stays_apart_until_they_are_equal() -> None:
    net: Any = lpq.convert(nn.Sequential(Normed(), Normed()), "fp8-delayed")
    gate, up = net[0].mlp.gate_proj, net[0].mlp.up_proj
    up.x_amax.fill_(3.0)
    alone, x = copy.deepcopy(net), torch.randn(32, 64)
    ((name, note),) = apart(lpq.fuse(net)).items()
    assert name == "0.norm"
    assert note.startswith("x_amax of layer 0.mlp.gate_proj, ")
    assert "layer 0.mlp.up_proj" in note
    assert note.endswith("differ, as if they had not got the same inputs")
    for one in (net, alone):
        one(x).sum().backward()
    assert equal_states(net.state_dict(), alone.state_dict())
    for memory in up.state_buffers():
        if memory.tensor == "x":
            getattr(up, memory.name).copy_(getattr(gate, memory.name))
    assert not apart(lpq.fuse(net))


@pytest.mark.parametrize("other", [Attention(), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))], ids=["a", "l"])
def test_what_is_no_feed_forward_block_is_not_named(other: nn.Module) -> None:
    report = lpq.report(lpq.convert(nn.Sequential(other, LlamaMlp()), "mxfp8", fuse=True))
    assert [entry.name for entry in (*report.fused, *report.apart)] == ["1"]


class NormedHeads(nn.Module):
    """Attention of heads that are normed, as wide as the input of a layer, as an adapter's may be by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qk_norm = nn.RMSNorm(64), nn.RMSNorm(16)
        self.qk_proj, self.adapter, self.adapted = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm(x)
        heads = self.qk_norm((self.qk_proj(x) + self.adapted(self.adapter(x))).unflatten(-1, (4, 16)))
        scores = heads @ heads.mT
        return scores if mask is None else scores + mask


def test_norms_in_a_block_that_is_called_with_more_than_rows() -> None:
    """A run without a mask shows the code that takes the output of a norm of heads, and not the code that needs one."""
    net = lpq.convert(nn.Sequential(NormedHeads()), "mxfp8", fuse=True)
    assert apart(net) == {
        "0.norm": "its block is called with mask beside its rows, so that a run on rows alone does not show what takes "
        "its output",
        "0.qk_norm": "something other than layers of lpq takes its output",
    }


class AsksForDtype(LlamaMlp):
    """As T5's: it reads a weight of its last layer, or of the first one before it calls any."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x.to(self.up_proj.weight.dtype)
        y: Tensor = self.down_proj((F.silu(self.gate_proj(x)) * self.up_proj(x)).to(self.down_proj.weight.dtype))
        return y


@pytest.mark.parametrize("first", [True, False])
def test_a_block_that_raises_is_named(first: bool) -> None:
    net = lpq.convert(nn.Sequential(AsksForDtype(first)), "mxfp8", fuse=True)
    assert apart(net) == {
        "0": "it does not run on a few rows by itself, which would show what it computes: it raises AttributeError"
    }


class Scores(nn.Module):
    """Attention of one argument, with layers that are alike; it has heads of another size than a trial's rows."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return F.scaled_dot_product_attention(*(t.unflatten(1, (3, -1)) for t in (q, k, v)))
        return self.q(x).unflatten(1, (3, -1)) @ self.k(x).mT @ self.v(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("together", [True, False])
def test_attention_that_raises_is_not_named(together: bool) -> None:
    assert not apart(lpq.convert(nn.Sequential(Scores(together)), "mxfp8", fuse=True))


def test_a_model_of_which_nothing_is_converted_is_not_fused() -> None:
    net = nn.Sequential(nn.Embedding(4, 64))
    with pytest.warns(UserWarning, match="left every layer as it was"):
        assert lpq.convert(net, "mxfp8", fuse=True) is net
    assert not lpq.report(net).fused


def test_a_block_may_ask_for_the_dtype_of_its_norm() -> None:
    class Mixer(Normed):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x.to(self.norm.weight.dtype))

    assert len(lpq.report(lpq.convert(nn.Sequential(Mixer()), "mxfp8", fuse=True)).fused) == 2


def test_a_model_without_memory_is_fused_already() -> None:
    with torch.device("meta"):
        net = nn.Sequential(Normed(), Normed())
    lpq.convert(net, "mxfp8", fuse=True)
    for _ in range(2):
        assert len(lpq.report(net).fused) == 4
        net.to_empty(device="cpu")


def test_norms_with_the_same_words_share_a_line() -> None:
    net = lpq.fuse(model(up="nvfp4"))
    (line,) = [line for line in str(lpq.report(net)).splitlines() if "LayerNorm" in line]
    assert "fused  0–1.norm (2 LayerNorm): it encodes its output in 2 runs, " in line
    assert "mxfp8 for mlp.gate_proj, and nvfp4(rht=true) for mlp.up_proj" in line
    for block in net:
        block.mlp.up_proj.register_forward_hook(lambda module, args, y: None)
    (line,) = [line for line in str(lpq.report(net)).splitlines() if "LayerNorm" in line]
    assert "not fused  0–1.norm (2 LayerNorm): layer mlp.up_proj, " in line
    assert "has a forward hook" in line


RUNS: list[str] = []


class Noted(Stream):
    """A layer whose runs are noted where no trial looks."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("layer")
        return super().forward(x)


def test_a_report_tries_each_layer_once() -> None:
    """It was tried for each norm in it, and once more for what takes their outputs."""
    net = lpq.convert(nn.Sequential(*(Noted(nn.RMSNorm, 64, by_norms=False) for _ in range(3))), "mxfp8", fuse=True)
    RUNS.clear()
    notes = [entry.note for entry in lpq.report(net).fused]
    assert len(RUNS) == 3
    assert ["torch adds what is added before its layer" in note for note in notes] == [True, False] * 3
