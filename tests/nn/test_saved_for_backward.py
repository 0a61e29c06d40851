"""A recipe chooses which tensors a layer keeps for backward, and no number changes by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from counting import encodings, kept_for_backward
from lpq_nvfp4.quantizer import NVFP4Quantizer
from support.comparing import equal
from support.passes import Run, autocast, offloaded, plainly, recomputed, step
from support.plugins import FormatPlugin
from support.small_models import Mlp, converted
from torch import Tensor

import lpq
from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.operations import references
from lpq.operations.encoder import EncoderSpec, bind_encoder, in_two_steps, through_operators
from lpq.operations.measuring import measure_reference
from lpq.registry import refresh, register
from lpq.registry.errors import LpqError

ROWS, WIDTH, OUT = 48, 64, 96
OPTIONS = ("x.save=input", "w.save=weight", "x.save=input, w.save=weight")
RECIPES = (
    "x=fp8(), w=fp8(), dy=fp8(dtype=e5m2)",
    "fprop=fp8-delayed, dgrad=fp8-delayed, wgrad=fp8-delayed",
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
    "x=nvfp4(stochastic=true), w=nvfp4(block=16x16, stochastic=true), dy=nvfp4(stochastic=true)",
    "x=hybrid(row=fp8(scaling=delayed), col=mxfp8), w=hybrid(row=mxfp8, col=fp8(scaling=delayed)), dy=mxfp8()",
    "x=hybrid(row=nvfp4, col=mxfp8, col_source=row), w=nvfp4(block=16x16), dy=mxfp8()",
    "x=hybrid(row=mxfp8, col=fp8(scaling=delayed), col_source=row), w=mxfp8(), dy=mxfp8()",
    "x=hybrid(row=clipped, col=clipped, col_source=row), w=clipped, dy=mxfp8()",
)


class ClippedStorage(Storage):
    layout = Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(None, None))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale

    def transposed(self) -> Storage:
        return ClippedStorage(data=self.data.t().contiguous(), scale=self.scale)


@dataclass(frozen=True)
class ClippedQuantizer(Quantizer):
    """To encode again what it decodes to gives other codes: the largest magnitude is clipped each time."""

    stats = (Stat("amax"),)
    transposable = True

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.float().abs().amax()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scale = stats["amax"].clamp(min=1e-30) / 127
        return ClippedStorage(data=(x.float() / scale).round().clamp(-90, 90).to(torch.int8), scale=scale)


@pytest.fixture(autouse=True)
def clipped() -> Iterator[None]:
    register(FormatPlugin("clipped", ClippedQuantizer, ClippedStorage), name="clipped")
    yield
    refresh()


def test_a_policy_chooses_for_each_layer() -> None:
    """Sigmoid keeps what it returns, so that the layer that is given it need keep nothing."""
    fp8 = "fprop=fp8-current, dgrad=fp8-current, wgrad=fp8-current"

    def trained(policy: Any) -> tuple[int, list[Tensor]]:
        torch.manual_seed(1)
        model = lpq.convert(Mlp(WIDTH, WIDTH, torch.sigmoid), policy)
        y, kept = kept_for_backward(lambda: model(torch.ones(ROWS, WIDTH)))
        y.square().mean().backward()
        return kept, [p.grad for p in model.parameters() if p.grad is not None]

    usual, gradients = trained(fp8)
    rules = [{"match": "down", "recipe": f"{fp8}, x.save=input"}, {"match": "*", "recipe": fp8}]
    less, same = trained({"rules": rules})
    assert usual - less == ROWS * WIDTH  # its operand: a byte for each element; its amax is kept in place of a scale
    assert equal(gradients, same)


def layer(recipe: str, **how: Any) -> Any:
    return converted(recipe, WIDTH, OUT, **how)[0]


def inputs(count: int = 1) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(2)
    return [torch.randn(2, ROWS // 2, WIDTH, generator=drawn).mul_(1 + 3 * i).requires_grad_() for i in range(count)]


def numbers(recipe: str, run: Run = plainly) -> list[Tensor | None]:
    module = layer(recipe)
    return [t for x in inputs(2) for t in step(module, x, run)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_number_changes(recipe: str) -> None:
    usual = numbers(recipe)
    for option in OPTIONS:
        assert equal(usual, numbers(f"{recipe}, {option}")), option


def _two_before_backward(recipe: str) -> list[Tensor]:
    """The first one's backward moves what the layer remembers, which the second one's operands were made of."""
    module = layer(recipe)
    small, large = inputs(2)
    module(small).sum().backward()
    module.zero_grad()
    a, b = module(small).square().mean(), module(large).square().mean()
    b.backward()
    a.backward()
    return [module.weight.grad, *module.buffers()]


def test_what_the_layer_remembered_in_forward_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed = RECIPES[1]
    usual = _two_before_backward(delayed)
    assert equal(usual, _two_before_backward(f"{delayed}, {OPTIONS[2]}"))

    monkeypatch.setattr(Tensor, "clone", lambda self: self.data)
    assert not equal(usual, _two_before_backward(f"{delayed}, {OPTIONS[2]}"))


def test_an_operand_that_is_the_other_one_turned_round_has_its_random_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NVFP4Quantizer, "transposable", True)
    refresh()
    x, seed = inputs()[0].detach(), torch.tensor(7)
    wanted = EncoderSpec(NVFP4Quantizer(block="16x16", stochastic=True), (ROWS, WIDTH), torch.float32, x.device)
    for encoder in (bind_encoder, through_operators):
        _, now, _ = encoder(wanted).encode(x, (), seed)
        later = in_two_steps(encoder, wanted)
        assert later.later is not None
        assert equal([*now], [*later.later(later.encode(x, (), seed)[1])])
        _, by_itself, _ = encoder(wanted._replace(row=False)).encode(x, (), seed)
        assert not equal([*now], [*by_itself])
    monkeypatch.undo()
    refresh()


def test_operands_are_made_when_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = encodings(monkeypatch)
    for option, forward, backward in (
        ("x.save=input", [(True, False), (True, True)], [(False, True)]),
        ("w.save=weight", [(True, True), (True, False)], [(False, True)]),
    ):
        module, (x,) = layer(f"{RECIPES[0]}, {option}"), inputs()
        y = module(x)
        assert [(w.row, w.col) for w in seen] == forward
        seen.clear()
        y.sum().backward()
        assert sorted((w.row, w.col) for w in seen) == [*backward, (True, True)]
        seen.clear()
        module.requires_grad_(False)
        y, kept = kept_for_backward(lambda module=module, x=x: module(x))
        assert kept == WIDTH * OUT * (4 if option != "x.save=input" else 1) + 4  # the scale, or the amax
        seen.clear()


@pytest.mark.parametrize("option", ["x.save=encoded", *OPTIONS])
def test_the_amax_of_a_tensor_is_measured_once(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []

    def counted(x: Tensor, *sides: Any) -> list[Tensor]:
        measured.append(tuple(x.shape))
        return measure_reference(x, *sides)

    monkeypatch.setattr(references, "measure_reference", counted)
    module, (x,) = layer(f"{RECIPES[0]}, {option}"), inputs()
    module(x).sum().backward()
    assert measured == [(ROWS, WIDTH), (OUT, WIDTH), (ROWS, OUT)]


def test_the_bytes() -> None:
    of_x, of_w = ROWS * WIDTH, WIDTH * OUT
    for option, bytes_kept in (
        ("x.save=encoded, w.save=encoded", of_x + 4 + of_w + 4),
        ("x.save=input", 4 * of_x + 4 + of_w + 4),
        ("w.save=weight", of_x + 4 + 4 * of_w + 4),
    ):
        module, (x,) = layer(f"{RECIPES[0]}, {option}"), inputs()
        assert kept_for_backward(lambda module=module, x=x: module(x))[1] == bytes_kept


@pytest.mark.parametrize("option", OPTIONS[:2])
def test_what_is_kept_may_not_be_written_to(option: str) -> None:
    module, x = layer(f"{RECIPES[0]}, {option}"), inputs()[0] * 2
    y = module(x)
    with torch.no_grad():
        (x if option.startswith("x") else module.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["foreach", "fused", "differentiable"])
def test_steps_of_all_optimizers_are_writes_to_a_weight_that_is_prepared(kind: str) -> None:
    """torch counts no write to a tensor of a subclass that stands in a list: gradients were of the later weight."""
    module, x = layer(f"{RECIPES[0]}, w.save=weight", weights="high_precision"), inputs()[0]
    optimizer = torch.optim.AdamW(module.parameters(), **{kind: kind != "differentiable"})
    module(x).sum().backward()
    y = module(x)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).step()
    y.sum().backward(retain_graph=True)  # control: nothing was written
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", [RECIPES[1], RECIPES[3]], ids=["delayed", "stochastic"])
@pytest.mark.parametrize("run", [recomputed, offloaded, autocast])
def test_ways_to_run(run: Run, recipe: str) -> None:
    assert equal(numbers(recipe, run), numbers(f"{recipe}, {OPTIONS[2]}", run))


def test_compiled() -> None:
    """A compiler traces the choice too, and then makes its own."""
    torch._dynamo.reset()
    module = layer(f"{RECIPES[1]}, {OPTIONS[2]}")
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert equal(numbers(RECIPES[1]), [t for x in inputs(2) for t in step(module, x, lambda _, x: whole(x))])


def test_a_weight_that_is_encoded_already_is_what_is_kept() -> None:
    def held(recipe: str) -> tuple[Tensor, int]:
        module, (x,) = layer(recipe), inputs()
        with lpq.hold_weights(module):
            return kept_for_backward(lambda: module(x))

    def stored(recipe: str) -> tuple[Tensor, int]:
        module, (x,) = layer(recipe, weights="quantized", ranks=1), inputs()
        return kept_for_backward(lambda: module(x))

    for made in (held, stored):
        usual, other = made(RECIPES[0]), made(f"{RECIPES[0]}, w.save=weight")
        assert torch.equal(usual[0], other[0])
        assert usual[1] == other[1]


def test_another_value_is_refused() -> None:
    with pytest.raises(LpqError, match=r"^x\.save: it must be 'encoded' or 'input', not 'weight'"):
        lpq.recipe(f"{RECIPES[0]}, x.save=weight")
    with pytest.raises(LpqError, match=r"^w\.save: it must be 'encoded' or 'weight', not 'auto'"):
        lpq.recipe(f"{RECIPES[0]}, w.save=auto")


def test_what_is_kept_is_part_of_a_recipe() -> None:
    usual, given = lpq.recipe(RECIPES[2]), lpq.recipe(f"{RECIPES[2]}, {OPTIONS[2]}")
    assert given != usual
    assert "save" not in usual.text + usual.to_toml()
    assert lpq.recipe(given.text) == lpq.recipe(given.to_toml()) == lpq.recipe(given.to_dict()) == given
    taken = lpq.recipe({"fprop": given, "dgrad": given, "wgrad": usual})
    assert (taken.save_x, taken.save_w) == ("encoded", "weight")  # with the operand that is kept or made
    made = lpq.recipe({"x": given, "w": given, "dy": given, "x.save": "encoded"})
    assert made.saves == {"x": "encoded", "w": "weight"}
