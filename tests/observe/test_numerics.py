"""Statistics of a run: as a user takes them, and that they are what they say."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.plugins import FormatPlugin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.nn import GroupedLinear
from lpq.observe import Observed, Reading, observing
from lpq.observe.operands import operands
from lpq.observe.table import normal_snr

RECIPES = [
    "fp8-current", "fp8-delayed", "mxfp8", "nvfp4", "nvfp4-eden", "mxfp4", "mxfp8-one-copy",
    "fprop=nvfp4, dgrad=mxfp8, wgrad=fp8()",
    "x=hybrid(row=mxfp8, col=fp8(scaling=delayed), col_source=row), w=mxfp8, "
    "dy=hybrid(row=mxfp8, col=nvfp4(stochastic=true), col_source=row)",
]  # fmt: skip


def model(recipe: Any = "mxfp8", width: int = 64) -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)), recipe)


def batch(rows: int = 48, width: int = 64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def train(net: Any, watch: Any = None, steps: int = 3) -> list[Tensor]:
    """Train for some steps, each with the same random bits; return the weights."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        if watch is None:
            net(batch()).square().mean().backward()
        else:
            with watch.step():
                net(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*net.state_dict().values(), torch.get_rng_state()]


def by_operand(readings: Any) -> dict[str, Reading]:
    return {one.title: one for one in readings}


def test_a_run_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user does it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    net = model("nvfp4")
    watch = lpq.observe.numerics(net, every=2, layers="*")
    train(net, watch)
    table = watch.table()
    assert "step 2, the most noise first" in table
    assert watch.table(0) == watch.table(None)
    assert "13 more with less noise" in watch.table(1)
    assert "0 " in table
    assert "dy.col" in table
    assert table.count("nvfp4(rht=true, stochastic=true)") == sum(
        one.format == "nvfp4(rht=true, stochastic=true)" for one in watch.worst()
    ), "without a terminal nothing is broken"
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, watch.table().splitlines())) <= 60
    assert {word for word in table.split() if word.strip("─")} - {"layer"} <= set(watch.table().split())
    watch.write(tmp_path / "numerics.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "numerics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {0, 2}
    assert len(lines) == 2 * 2 * 7
    worst = watch.worst()
    assert [one.snr_db for one in worst] == sorted(one.snr_db for one in worst if one.snr_db is not None)
    assert lpq.observe.Readings.read(tmp_path / "numerics.jsonl").worst() == worst


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_the_same_with_it_and_without(recipe: str) -> None:
    """Weights, states and random bits, also where another recipe with random bits is asked about."""
    watched, alone = model(recipe), model(recipe)
    found = train(watched, lpq.observe.numerics(watched, every=1, what_if="nvfp4"))
    assert equal(found, train(alone))
    assert not any(m.passes.observers for m in watched.modules() if isinstance(m, lpq.nn.Layer))


@pytest.mark.parametrize("value", [1.0, 0.0, math.nan, math.inf])
def test_a_nan_comes_first_and_what_has_no_error_last(value: float) -> None:
    """No format makes an error with ones and zeros, nor does any in the gradient of the weight. Zeros in the rows that
    are looked at are not known to be NaN."""
    net = lpq.convert(nn.Linear(64, 32, bias=False), "fp8-current")
    nn.init.ones_(net.weight)
    watch, x = lpq.observe.numerics(net, every=1, rows=128), torch.full((256, 64), value)
    x[128:] = 1.0
    with watch.step():
        net(x).sum().backward()
    found = by_operand(watch.worst())
    is_finite = math.isfinite(value)
    for name in ("x.row", "dw") if value else ("x.row",):
        assert found[f"the model itself.{name}"].shrinkage == (0.0 if is_finite else None)
    assert ("NaN" in watch.table()) is not is_finite
    assert is_finite or next(iter(found.values())).operand in ("x.row", "x.col", "dw")


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-eden", "mxfp8-one-copy"])
def test_normal_numbers_have_the_normal_snr(recipe: str) -> None:
    """Also in a column operand that is made of the row operand, and has the errors of both."""
    net = lpq.convert(nn.Linear(512, 512, bias=False), recipe)
    nn.init.normal_(net.weight)
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(torch.randn(256, 512)).backward(torch.randn(256, 512))
    for name, one in by_operand(watch.readings()).items():
        if one.tensor != "dw":
            assert one.snr_db == pytest.approx(normal_snr(one.format, one.direction or "row"), abs=0.5), name


@pytest.mark.parametrize("size", [1e-30, 1e-21, 1.0, 1e18, 1e25])
def test_outliers_are_told_of_tensors_of_any_size(size: float) -> None:
    """Also where squares vanish in fp32, or are beyond its largest number."""
    net, x = lpq.convert(nn.Linear(64, 32, bias=False), "mxfp8"), torch.randn(128, 64)
    watch = lpq.observe.numerics(net, every=1, rows=128)
    with watch.step():
        net(x * size).square().mean().mul(0.0).backward()
    found = by_operand(watch.readings())["the model itself.x.row"]
    assert found.amax_over_rms == pytest.approx(float(x.abs().max() / x.square().mean().sqrt()), rel=1e-4)


def ratio(x: Tensor, decoded: Tensor) -> float:
    x = x.double().reshape(decoded.shape)
    return float(10 * (x.square().sum() / (decoded.double() - x).square().sum()).log10())


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_the_operands(recipe: str) -> None:
    """They are taken of the operands that the pass multiplies, with its states and random bits."""
    net, expected = model(recipe), {}
    watch = lpq.observe.numerics(net, every=1)

    class Direct:
        def observe(self, seen: Observed) -> None:
            layer: Any = seen.layer
            if seen.name != "y":
                for direction, decoded in zip(("row", "col"), seen.decoded(), strict=True):
                    assert decoded is not None
                    expected[f"{layer.qualified_name}.{seen.name}.{direction}"] = seen.value.clone(), decoded

    torch.manual_seed(7)
    with watch.step(), observing(net, Direct()):
        net(batch()).square().mean().backward()
    found = by_operand(watch.readings())
    assert found.keys() == expected.keys() | {"0.dw", "2.dw"}
    for name, (x, decoded) in expected.items():
        one = found[name]
        assert one.snr_db == pytest.approx(ratio(x, decoded), abs=1e-3), name
        assert one.amax == x.abs().max()
        assert one.amax_over_rms == pytest.approx(float(x.abs().max() / x.square().mean().sqrt()), rel=1e-4)
        assert one.shrinkage == pytest.approx(float((decoded * x).sum() / x.square().sum() - 1), abs=1e-5)
        if (
            lpq.quantizer(one.format).side(one.direction).basis is None
        ):  # one that is rotated is looked at as it is stored
            assert one.flushed == pytest.approx(float(((decoded == 0) & (x != 0)).sum() / (x != 0).sum()))
    for layer in ("0", "2"):
        (x, x_col), (dy, dy_col) = expected[f"{layer}.x.col"], expected[f"{layer}.dy.col"]
        assert found[f"{layer}.dw"].snr_db == pytest.approx(ratio(dy.t() @ x, dy_col.t() @ x_col), abs=0.05)


class Take(dict[str, Observed]):
    def observe(self, seen: Observed) -> None:
        self[seen.name] = seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_encoded_as_in_the_whole_tensor(recipe: str) -> None:
    """To the bit, with its scales, states and random bits."""
    net, seen = model(recipe), Take()
    train(net, steps=1)
    with observing(net[0], seen):
        net(batch(512)).square().mean().backward()
    for one in (seen["x"], seen["dy"]):
        whole = {operand.direction: operand.decoded for operand in operands(one, 512, 0)}
        derived = one.quantizer.col_source == "row"
        for turn in range(1 if derived else 4):
            for part in operands(one, 512 if derived else 128, turn):
                rows = part.decoded if part.direction == "row" else part.decoded.t()
                of_whole = whole[part.direction] if part.direction == "row" else whole[part.direction].t()
                assert torch.equal(rows, of_whole if derived else of_whole[128 * turn :][:128]), (one.name, turn)
    assert len(operands(seen["x"], 128, 0)) == 2


# ---------------------------------------------------------------------------------------------- the error and its parts


def parts_of(recipe: Any, x: Tensor) -> dict[str, Reading]:
    net = lpq.convert(nn.Sequential(nn.Linear(x.shape[1], 32, bias=False)), recipe)
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(x).sum().backward()
    return by_operand(watch.readings())


def test_the_error_is_split_by_what_makes_it() -> None:
    """A scale that needs no rounding adds nothing; elements that become 0 add their squares; the parts add up to 1."""
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    rounded = parts_of("mxfp8", x)["0.x.row"]
    assert rounded.error_scale is not None
    assert rounded.error_scale > 0.02
    amax = x.view(32, 2, 32).abs().amax(2, keepdim=True)
    exact = parts_of("mxfp8", (x.view(32, 2, 32) * (448 / amax)).reshape(32, 64))["0.x.row"]
    assert exact.error_scale == pytest.approx(0, abs=1e-4)
    assert parts_of("fp8-current", x)["0.x.row"].error_scale == 0
    assert parts_of("x=fp8(pow2=true), w=fp8(), dy=fp8()", x)["0.x.row"].error_scale != 0
    x[:, 1:] *= 1e-8
    flushed = parts_of("fp8-current", x)["0.x.row"]
    assert flushed.error_flushed is not None
    assert flushed.flushed is not None
    assert flushed.flushed > 0.9
    decoded = lpq.quantizer("fp8").quantize(x).row.decode()
    expected = x[decoded == 0].square().sum() / (decoded - x).square().sum()
    assert flushed.error_flushed == pytest.approx(float(expected), rel=1e-3)
    for one in (rounded, exact, flushed):
        parts = (one.error_scale, one.error_flushed, one.error_grid)
        assert sum(part for part in parts if part is not None) == pytest.approx(1)


def test_elements_beyond_a_remembered_scale_are_saturated() -> None:
    net = lpq.convert(nn.Sequential(nn.Linear(64, 32)), "fp8-delayed")
    x = batch(32)
    net(x).sum().backward()
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(4 * x).sum().backward()
    expected = float(((4 * x).abs() > x.abs().max()).float().mean())
    assert by_operand(watch.readings())["0.x.row"].saturated == pytest.approx(expected, rel=0.1)
    assert expected > 0.1
    for recipe in ("fp8-current", "fp8-row"):  # an amax that is stored as less by the rounding of its scale is not cut
        assert parts_of(recipe, x)["0.x.row"].saturated == 0


@pytest.mark.parametrize(
    ("text", "largest"),
    [
        ("mxfp8", 448.0), ("mxfp8(dtype=e5m2)", 57344.0), ("mxfp4", 6.0), ("nvfp4", 6.0), ("nvfp4(block=16x16)", 6.0),
        ("fp8(scaling=block)", 448.0), ("fp8(scaling=row)", 448.0),
    ],
)  # fmt: skip
def test_a_format_stores_the_same_where_its_scales_need_no_rounding(text: str, largest: float) -> None:
    """Control: where they do, it stores something else."""
    quantizer = lpq.quantizer(text).side("row")
    torch.manual_seed(0)
    x = torch.randn(128, 256)
    for block in ((16, 16), (16, 32)):
        tiles = x.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
        x = (tiles / tiles.abs().amax((1, 3), keepdim=True) * largest).flatten(2, 3).flatten(0, 1)
        if "nvfp4" in text and block == (16, 16):
            break
    x[:, ::16] = largest
    if "nvfp4" in text:
        x[-16:] *= 448  # so that the scale of the tensor is 1
    other = torch.cat([x[:64] * 1.3, x[64:]])
    for given, same in ((x, True), (other, "row" in text)):
        stats = quantizer.measure(given)
        decoded = quantizer.encode(given, stats).bind(quantizer, (128, 256), given.dtype).decode()
        exact = quantizer.unrounded(given, stats)
        assert exact is not None
        assert torch.allclose(exact, decoded, rtol=1e-5) == same


class BytesStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("step", torch.float32, block=(None, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.step


@dataclass(frozen=True)
class BytesQuantizer(Quantizer):
    """A third party's format that offers no more than it must."""

    stats = (Stat("largest"),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"largest": x.float().abs().amax()}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        step = torch.where(stats["largest"] > 0, stats["largest"] / 127, 1.0)
        return BytesStorage(data=(x.float() / step).round().clamp(-127, 127).to(torch.int8), step=step)


def test_a_format_that_says_no_more_has_all_but_one_part() -> None:
    """What comes from its scales stays within the rounding of elements."""
    registry.register(FormatPlugin("bytes", BytesQuantizer, BytesStorage), name="bytes")
    try:
        one = parts_of("x=bytes(), w=bytes(), dy=bytes()", batch(32))["0.x.row"]
        assert {name for name, value in vars(one).items() if value is None} == {"error_scale"}
        assert one.error_grid is not None
        assert one.error_flushed is not None
        assert one.error_flushed > 0
        assert one.error_flushed + one.error_grid == pytest.approx(1)
    finally:
        registry.refresh()


# ---------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_add_up_and_what_is_computed_again_counts_once(reentrant: bool) -> None:
    net, x = model(), batch().requires_grad_()
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        checkpoint(net, x, use_reentrant=reentrant).square().mean().backward()
    with watch.step():
        net(x).square().mean().backward()
    with watch.step():
        for half in (x, x):
            net(half).square().mean().backward()
    once, plain, twice = ({one.title: one.as_dict() for one in watch.readings() if one.step == i} for i in range(3))
    assert len(once) == 2 * 7
    for found in (once, twice):
        for title, one in plain.items():
            numbers = {key: value for key, value in one.items() if isinstance(value, float)}
            assert len(numbers) >= (1 if "dw" in title else 8)
            assert {key: found[title][key] for key in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)


@pytest.mark.starts
def test_a_compiled_model_is_watched() -> None:
    net, alone = model(), model()
    watch, expected = lpq.observe.numerics(net, every=2), lpq.observe.numerics(alone, every=2)
    net.compile(backend="aot_eager")
    train(net, watch)
    train(alone, expected)
    assert [one.title for one in watch.readings()] == [one.title for one in expected.readings()]
    assert watch.worst()[0].snr_db == pytest.approx(expected.worst()[0].snr_db, abs=0.5)


def test_groups_count_together() -> None:
    torch.manual_seed(0)
    stack = GroupedLinear(3, 64, 32, recipe="mxfp8")
    watch = lpq.observe.numerics(stack, every=1)
    x = torch.randn(40, 64)
    with watch.step():
        stack(x, [24, 0, 16]).square().mean().backward()
    found = by_operand(watch.readings())
    assert len(found) == 7
    decoded = torch.cat([lpq.quantizer("mxfp8").quantize(part).row.decode() for part in x.split([24, 16])])
    assert found["the model itself.x.row"].snr_db == pytest.approx(ratio(x, decoded), abs=1e-3)


def test_another_recipe_is_asked_about() -> None:
    net = model("mxfp8")
    watch = lpq.observe.numerics(net, every=1, layers=["0"], what_if="nvfp4")
    train(net, watch, 1)
    own, other = ([one for one in watch.readings() if one.recipe == name] for name in ("", "nvfp4"))
    assert len(own) == len(other) == 7
    assert {one.layer for one in own} == {"0"}
    assert min(one.snr_db or 0 for one in own) > max(one.snr_db or 0 for one in other) + 5
    assert "0 if nvfp4" in watch.table()


def test_formats_are_those_of_the_passes_where_a_recipe_changes_in_the_step() -> None:
    rules = [{"match": "*", "recipe": "nvfp4", "until": 1}, {"match": "*", "recipe": "mxfp8"}]
    net = lpq.convert(nn.Sequential(nn.Linear(64, 32)), {"rules": rules}, steps=4)
    watch = lpq.observe.numerics(net, every=1)
    for step in range(2):
        with watch.step():
            lpq.set_step(net, step)
            net(batch(32)).sum().backward()
    seen = {(one.step, one.operand): one.format for one in watch.readings()}
    assert [seen[step, "x.col"] for step in range(2)] == ["nvfp4(rht=true)", "mxfp8"]
    assert [seen[step, "dy.row"] for step in range(2)] == ["nvfp4(stochastic=true)", "mxfp8"]


def test_a_step_without_a_pass_is_told_of() -> None:
    watch = lpq.observe.numerics(model(), every=2)
    with pytest.warns(UserWarning, match="no layer told of a tensor in step 0"), watch.step():
        pass
    with watch.step():
        pass
    assert watch.readings() == []
    assert watch.table() == "no step was watched so far: steps are watched inside of `with watch.step():`"


def test_a_nan_comes_first() -> None:
    net, x = model(), batch()
    x[3, 5] = torch.nan
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(x)
    assert watch.worst()[0].title.startswith("0.x")
    assert watch.worst()[0].snr_db is None


def test_a_page_has_what_the_table_has_first_and_zeros_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = model(), batch()
    x[3, 5] = torch.nan
    watch = lpq.observe.numerics(net, every=1)
    with watch.step():
        net(x)
    monkeypatch.setattr("lpq.observe.page.WORST", 2)
    watch.page(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    first = [re.findall("<td>(.*?)</td>", row)[:2] for row in re.findall("<tr>(<td>.*?)</tr>", text)]
    assert first == [[one.layer, one.operand] for one in watch.worst()[:2]] == [["0", "x.row"], ["0", "x.col"]]
    net = model()
    quiet = lpq.observe.numerics(net, every=1)
    with quiet.step():
        net(torch.zeros_like(x))
    assert {one.operand for one in quiet.worst() if one.amax == 0} == {one.operand for one in quiet.worst()[-2:]}


@pytest.mark.parametrize(
    ("recipe", "times", "above", "gone"),
    [("nvfp4", 1, 0, 7), ("nvfp4", 100, 7, 25), ("mxfp4", 1, 0, 10), ("mxfp4", 100, 0, 47), ("mxfp4", 10, -3, 20)],
)
def test_outliers_show_in_what_becomes_0_where_they_do_not_in_the_noise(
    recipe: str, times: int, above: int, gone: int
) -> None:
    """As docs/watch.md says of one channel of 64."""
    net, x = lpq.convert(nn.Sequential(nn.Linear(512, 128)), recipe), batch(512, 512)
    x[:, ::64] *= times
    watch = lpq.observe.numerics(net, every=1, rows=512)
    with watch.step():
        net(x)
    one = by_operand(watch.readings())["0.x.row"]
    assert one.snr_db is not None
    assert round(one.snr_db - (normal_snr(one.format) or 0)) == above
    assert round(100 * (one.flushed or 0)) == gone


@pytest.mark.parametrize("layers", ["first", "second", "[fs]*"])
def test_a_layer_with_two_names_is_watched_by_either(layers: str) -> None:
    tied = nn.Linear(64, 64)
    net = lpq.convert(nn.ModuleDict({"first": tied, "other": nn.Linear(64, 64), "second": tied}), "mxfp8")
    watch = lpq.observe.numerics(net, layers=layers)
    with watch.step():
        tied(torch.ones(1, 64)).sum().backward()
    assert {one.layer for one in watch.readings()} == {"first"}


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no layer of lpq to watch"):
        lpq.observe.numerics(nn.Linear(2, 2))
    for words, options in (
        ("no layer matches 'blocks.*'; they are 0, 2", {"layers": "blocks.*"}),
        ("every=0: it is a whole number from 1 on", {"every": 0}),
        ("rows=True: it is a whole number from 1 on", {"rows": True}),
        ("step=-1: it is a whole number from 0 on", {"step": -1}),
        ("layers=3: it is a pattern for the names of layers", {"layers": 3}),
        (r"layers=\[\]: it is a pattern for the names of layers", {"layers": []}),
    ):
        with pytest.raises(ValueError, match=words):
            lpq.observe.numerics(model(), **options)
    watch = lpq.observe.numerics(net := model(), every=2)
    for number in range(2):
        with watch.step():
            net(batch())
            with pytest.raises(ValueError, match=f"step {number} is under way already"), watch.step():
                pass
        assert watch.number == number + 1
    for lines in (-2, "x", False):
        with pytest.raises(ValueError, match=r"table: most=.*: it is a whole number from 0 on"):
            watch.table(lines)
