"""The example mean split: its format and its layer against their formulas, its evidence, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from rich.console import Console
from support.examples import evidence_of, plugged
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lpq
from lpq.train import compare
from lpq.train.compare_config import CompareConfig, training

REST = "x=nvfp4(), w=nvfp4(block=16x16), dy=nvfp4(stochastic=true)"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with plugged("mean-split"):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(recipe: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(48, 64)), recipe, **options)[0]


def test_an_operand_is_the_rest_and_the_mean_of_the_tokens() -> None:
    x = normal(40, 48) + 3
    t = lpq.quantizer("mean_split(rest=nvfp4)").quantize(x)
    for operand, mean, rest in ((t.row, x.mean(0, keepdim=True), x), (t.col, x.t().mean(1, keepdim=True), x.t())):
        assert torch.allclose(operand.mean, mean)
        encoded = lpq.quantizer("nvfp4").quantize((rest - operand.mean).contiguous(), col=False)
        assert torch.equal(operand.decode(), encoded.row.decode() + operand.mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_multiplied_in_high_precision(dtype: torch.dtype) -> None:
    split, rest = layer("mean_split").to(dtype), layer(REST).to(dtype)
    assert split.state_dict().keys() == rest.state_dict().keys() == {"weight", "bias"}
    x, dy = (normal(4, 10, 48) + 2).to(dtype).requires_grad_(), normal(4, 10, 64, seed=1).to(dtype)
    mean = x.detach().mean((0, 1))
    grads = []
    for made, shift in ((split, 0), (rest, mean)):
        torch.manual_seed(3)
        y = made(x - shift)
        grads.append((y.detach(), *torch.autograd.grad(y, [x, made.weight, made.bias], dy)))
    (y, dx, dw, db), (y_rest, dx_rest, dw_rest, db_rest) = grads
    assert torch.equal(y, y_rest + nn.functional.linear(mean, rest.weight))
    assert torch.equal(dx, dx_rest)
    assert torch.equal(db, db_rest)
    assert torch.allclose(
        dw, dw_rest + torch.outer(dy.sum((0, 1)), mean), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5
    )


def test_it_takes_no_token_and_one() -> None:
    """The mean of no token was NaN, and so was the gradient of the weight; a vector had the mean of its elements."""
    made = layer("mean_split")
    made(torch.empty(0, 48)).sum().backward()
    assert not made.weight.grad.any()
    assert not made.bias.grad.any()
    x = normal(48) + 2
    assert torch.equal(made(x), made(x[None])[0])
    assert made(torch.full((1, 48), float("nan"))).isnan().all()


def test_its_evidence_is_what_its_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: both errors fall by a fifth and more, and less where the weight that multiplies the mean is rounded."""
    evidence = evidence_of("mean-split", monkeypatch)
    plain, split = (evidence.RECIPES[name] for name in evidence.RECIPES if "nearest" in name)
    found = evidence.errors(plain, 0), evidence.errors(split, 0, converted=False), evidence.errors(split, 0)
    for before, between, after in zip(*found, strict=True):
        assert after < 0.8 * before
        assert after < between < before


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any, Tensor], Any], str]] = {
    "weights": ({"weights": "high_precision"}, lambda made, x: x, r"convert without weights="),
    "accumulate": ({"accumulate": "main_grad"}, lambda made, x: x, r"call lpq\.convert without accumulate="),
    "encoded": ({}, lambda made, x: lpq.quantizer("nvfp4").quantize(x), r"its input is encoded already"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str) -> None:
    options, given, words = REFUSED[what]
    made = layer("mean_split", **options)
    with pytest.raises(ValueError, match=rf"layer 0, lpq\.nn\.Linear\(48, 64\): mean_split .*{words}"):
        made(given(made, normal(8, 48)))


def test_it_follows_the_policy() -> None:
    rules = [{"match": "*", "recipe": "mean_split", "until": 1}, {"match": "*", "recipe": "mxfp8"}]
    made = lpq.convert(nn.Sequential(nn.Linear(48, 64)), {"rules": rules}, steps=2)
    wanted, x = layer("mxfp8"), normal(32, 48) + 2
    made.load_state_dict({f"0.{key}": value for key, value in wanted.state_dict().items()})
    assert not torch.equal(made(x), wanted(x))
    lpq.set_step(made, 1)
    assert torch.equal(made(x), wanted(x))
    with pytest.raises(ValueError, match=r"0 \(MeanSplitLinear\) cannot be restored: you or a plugin built it"):
        lpq.restore(made)


def test_it_compiles() -> None:
    made, x = layer("mean_split"), normal(32, 48) + 2
    assert torch.equal(torch.compile(made, backend="aot_eager", fullgraph=True)(x), made(x))


@pytest.mark.starts
@pytest.mark.parametrize("least", [0.5, 99])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_it_compiles_for_tokens_that_a_mask_chooses(least: float) -> None:
    """Also where it chooses none."""
    made, x = layer("mean_split"), normal(32, 48) + 2

    def chosen(x: Tensor) -> Tensor:
        return torch.as_tensor(made(x[x[:, 0] > least]))

    assert torch.equal(torch.compile(chosen, backend="aot_eager", fullgraph=True)(x), chosen(x))


@on_ranks(2)
def test_fsdp2_shards_it_and_tensor_parallelism_does_not(rank: int) -> None:
    with plugged("mean-split"):
        alone, sharded = layer("mean_split"), layer("mean_split")
        fully_shard(sharded)
        x = normal(32, 48, seed=rank) + 2
        assert torch.equal(sharded(x), alone(x))
        parallel = parallelize_module(layer("mean_split"), init_device_mesh("cpu", (2,)), ColwiseParallel())
        with pytest.raises(ValueError, match=r"layer 0, .*its weight is divided over ranks, by tensor parallelism"):
            parallel(x)


def test_a_recipe_of_an_installed_plugin_is_compared_by_its_name(tmp_path: Path) -> None:
    """Trained by the plugin's layer, beside the format without the layer and the rest without the split."""
    (tmp_path / "text.txt").write_text("".join(f"line {i * i}\n" for i in range(4000)))
    size = {"layers": 1, "heads": 1, "width": 16, "seq": 16, "batch": 2, "data": (str(tmp_path / "text.txt"),)}
    settings = training("toy", str(3 * 32), {**size, "device": "cpu"})
    config = CompareConfig(("mean_split", REST), 1, settings, tmp_path / "out", 1, None)
    of = {t.title: t for t in compare.run(config, Console(quiet=True))}
    assert of["mean_split"].policy == lpq.policy("mean_split").to_toml()
    assert "mean_split(rest=nvfp4)" in of["mean_split"].policy
    assert len({tuple(t.losses) for t in of.values()}) == 3
    assert all(t.diverged is None and len(t.losses) == 3 for t in of.values())
