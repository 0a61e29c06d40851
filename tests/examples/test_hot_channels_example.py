"""The example hot channels: its format against its formula, the channels that it finds, its evidence, its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import on_ranks
from support.examples import evidence_of, plugged
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import lpq
from lpq.registry.errors import OptionError

HOT = [3, 17, 40]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with plugged("hot-channels"):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., [n for n in HOT if n < shape[-1]]] *= 15
    return x


def apart(x: Tensor, rest: str) -> Tensor:
    """The matrix with its hot columns in bf16, from its definition."""
    there = [n for n in HOT if n < x.shape[1]]
    without = x.clone()
    without[:, there] = 0
    decoded = lpq.quantizer(rest).quantize(without, col=False).row.decode()
    decoded[:, there] = x[:, there].bfloat16().float()
    return decoded


@pytest.mark.parametrize("rest", ["nvfp4", "mxfp8", "nvfp4(block=16x16)"])
@pytest.mark.parametrize("columns", [48, 20, 2])
def test_an_operand_is_the_rest_and_the_hot_columns(rest: str, columns: int) -> None:
    x = normal(32, columns)
    t = lpq.quantizer(f'hot_channels(rest={rest}, channels="3 17 40")').quantize(x)
    assert torch.equal(t.row.decode(), apart(x, rest))
    assert torch.equal(t.col.decode(), apart(x.t().contiguous(), rest))
    assert t.row.quantizer.why_no_parts(0) is None
    assert "must not be cut" in str(t.row.quantizer.why_no_parts(1))


def test_a_layer_multiplies_the_channels_that_it_found() -> None:
    from lpq_hot_channels.finding import rules

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))
    x = normal(4, 10, 64)
    found = rules(model, [x[:2], x[2:]], share=3 / 64)
    assert [rule["match"] for rule in found] == ["0", "2"]
    assert 'channels="3 17 40"' in found[0]["recipe"]["fprop"]["x"]
    plain = lpq.convert(nn.Sequential(nn.Linear(64, 48)), "nvfp4")
    plain[0].load_state_dict(model[0].state_dict())
    policy = lpq.policy("nvfp4").to_dict()
    made: Any = lpq.convert(model, policy | {"rules": [*found, *policy["rules"]]})[0]
    x.requires_grad_()
    y = made(x)
    operands = apart(x.detach().flatten(0, 1), "nvfp4"), apart(made.weight.detach(), "nvfp4(block=16x16)")
    assert torch.allclose(y.flatten(0, 1), operands[0] @ operands[1].t() + made.bias, atol=1e-4)
    grads = []
    for layer in (made, plain[0]):  # backward is NVFP4's
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(layer(x).sum(), [x, layer.weight]))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


def test_its_evidence_is_what_its_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: half of the hot channels are better than none, all of them better still, and better than residuals."""
    evidence = evidence_of("hot-channels", monkeypatch)
    plain, half, every, _, _, beside, _ = evidence.errors(0).values()
    assert every < 0.5 * half < 0.5 * plain
    assert every < 0.5 * beside < 0.5 * plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", r'needs the columns that are hot: add channels="3 17 40"'),
        (', channels="17 3"', r"channels='17 3': list numbers of columns in ascending order"),
        (", channels=none", r"list numbers of columns"),
        (", channels=-1", r"list numbers of columns"),
    ],
)
def test_channels_are_numbers(options: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        lpq.quantizer(f"hot_channels(rest=nvfp4{options})")


@on_ranks(2)
def test_fsdp2_gathers_it_encoded_and_tensor_parallelism_cuts_no_contraction(rank: int) -> None:
    with plugged("hot-channels"):
        half = 'hot_channels(rest=nvfp4, channels="3 17")'
        recipe, x = f"x={half}, w={half}, dy=bf16", normal(32, 64)

        def layer(weights: Any = None) -> Any:
            torch.manual_seed(0)
            return lpq.convert(nn.Sequential(nn.Linear(64, 128)), recipe, weights=weights)

        sharded = layer("high_precision")
        fully_shard(sharded)
        assert torch.equal(sharded(x), layer()(x))
        assert "gathered as hot_channels" in str(lpq.report(sharded))
        parallel = parallelize_module(layer()[0], init_device_mesh("cpu", (2,)), RowwiseParallel())
        with pytest.raises(
            ValueError, match=r"layer 0, .*cannot be divided over 2 ranks: the columns .* must not be cut"
        ):
            parallel(x[:, 32 * rank : 32 * rank + 32])
