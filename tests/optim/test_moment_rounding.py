"""The rounding of second moments: which formats are taken, which are refused, and what is said of them."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.plugins import FormatPlugin
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import lpq
from lpq import registry
from lpq.cli.new_plugin import rendered
from lpq.core import Quantizer
from lpq.optim import QuantizedStates, rounding
from lpq.registry.errors import OptionError

FINE = "fp8(scaling=block, pow2=false)"
GRIDS = (FINE, "fp8(scaling=row)", "fp8(scaling=block, dtype=e5m2, pow2=false)", "nvfp4")


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 128))


# ---------------------------------------------------------------------------------- a format of a plugin's author


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Quantizer]]:
    """The format that ``lpq new-plugin`` writes."""
    written: Any = ModuleType("written_int8")
    monkeypatch.setitem(sys.modules, written.__name__, written)
    exec(rendered("int8")["lpq_int8/format.py"], vars(written))
    registry.register(FormatPlugin("int8", written.Int8Quantizer, written.Int8Storage), name="int8")
    yield written.Int8Quantizer
    registry.refresh()


def test_the_format_that_new_plugin_writes_stores_second_moments(int8: type[Quantizer]) -> None:
    p = _matrix()
    with pytest.warns(UserWarning, match=r"grown by a factor of 1\.5: .* 23\.6 times too large"):
        optimizer = QuantizedStates(AdamW([p]), exp_avg_sq=int8())
    p.grad = torch.full_like(p, 1e-3).index_fill(1, torch.tensor(0), 1.0)
    optimizer.step()
    root = optimizer.state[p]["exp_avg_sq_root"].dequantize()
    assert bool((root > 0).all()), "the least are raised, where INT8 would store zero"


def test_one_that_declares_no_amax_is_refused_with_the_remedy(
    int8: type[Quantizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "stats", tuple(replace(stat, largest=False) for stat in int8.stats))
    remedy = r"loses small elements .*declares no amax .* declare that statistic so, Stat\(…, largest=True\)"
    with pytest.raises(OptionError, match=remedy):
        QuantizedStates(AdamW([_matrix()]), exp_avg_sq=int8())
    with pytest.warns(UserWarning, match="exp_avg of AdamW as int8, in which an element .* may not fall"):
        QuantizedStates(AdamW([_matrix()]), exp_avg=int8())


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e15])
def test_no_update_blows_up_whatever_the_size_of_gradients(int8: type[Quantizer], size: float) -> None:
    p = _matrix()
    with pytest.warns(UserWarning, match="grown by a factor"):
        optimizer = QuantizedStates(AdamW([p], lr=1.0, weight_decay=0.0, eps=1e-30), exp_avg_sq=int8())
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        before, p.grad = p.detach().clone(), (torch.rand(p.shape, generator=draw) + 0.5) * size
        optimizer.step()
        assert 0.25 < (p.detach() - before).abs().min() <= (p.detach() - before).abs().max() < 4


@pytest.mark.parametrize(
    "bounds", [{"min": 1e-12}, {"min": 1e-12, "max": 1e30}, {"max": 1e12}, {"dtype": torch.float16}]
)
def test_a_format_that_loses_whole_tensors_of_small_or_large_roots_is_refused(
    int8: type[Quantizer], monkeypatch: pytest.MonkeyPatch, bounds: dict[str, Any]
) -> None:
    """Its scales end before fp32 does: updates would be divided by zero, or by what was cut."""
    encode, held = int8.encode, bounds.pop("dtype", torch.float32)

    def bounded(self: Quantizer, x: Tensor, stats: dict[str, Tensor]) -> Any:
        amax = stats["amax"].clamp(**bounds) if bounds else stats["amax"]
        scale = (amax / 127).to(held).float()
        stored = encode(self, x, stats)
        codes = (x.float() / scale.where(scale > 0, 1)).round().clamp(-127, 127)
        return type(stored)(data=codes.to(torch.int8), scale=scale)

    monkeypatch.setattr(int8, "encode", bounded)
    remedy = r"exp_avg_sq of AdamW as int8: it loses elements of a tensor whose largest is about .*scales be in fp32"
    with pytest.raises(OptionError, match=remedy):
        QuantizedStates(AdamW([_matrix()], betas=(0.9, 0.95)), exp_avg_sq=int8())


def test_a_format_that_makes_nans_of_zeros_is_refused(int8: type[Quantizer], monkeypatch: pytest.MonkeyPatch) -> None:
    encode = int8.encode

    def divided(self: Quantizer, x: Tensor, stats: dict[str, Tensor]) -> Any:
        stored = encode(self, x, stats)
        return type(stored)(data=stored.data, scale=stored.scale * stats["amax"] / stats["amax"])

    monkeypatch.setattr(int8, "encode", divided)
    with pytest.raises(OptionError, match="exp_avg of AdamW as int8: it does not keep a tensor of zeros"):
        QuantizedStates(AdamW([_matrix()]), exp_avg=int8())


# ---------------------------------------------------------------------------------- beside a larger element


def _rise(text: str) -> float:
    quantizer = lpq.quantizer(text).side("row")
    least = rounding.least_kept(quantizer, 0.999**0.5)
    assert not isinstance(least, str)
    return rounding.rise(quantizer, least)


def _stepped(root: Tensor, gradient: Tensor, beta: float, steps: int, **formats: str) -> tuple[Tensor, Tensor]:
    """The second moment's root, and the update of the last step, after steps with a steady gradient."""
    p = nn.Parameter(torch.zeros_like(root))
    optimizer: Optimizer = AdamW([p], lr=1.0, weight_decay=0.0, betas=(0.9, beta))
    optimizer = QuantizedStates(optimizer, least=1, **formats) if formats else optimizer
    state = {"step": torch.tensor(10_000.0), "exp_avg": gradient.clone(), "exp_avg_sq": root.square()}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    before = p.detach()
    for _ in range(steps):
        p.grad, before = gradient.clone(), p.detach().clone()
        optimizer.step()
    held = optimizer.state[p]
    after = held["exp_avg_sq_root"].dequantize() if "exp_avg_sq_root" in held else held["exp_avg_sq"].sqrt()
    return after, (before - p.detach()).abs()


@pytest.mark.parametrize("beta", [0.999, 0.95])
def test_a_root_that_ought_to_rise_stays_up_to_the_bound_and_not_beyond(beta: float) -> None:
    """The first element stays the largest of its block, and a gradient grows for good for the second."""
    grown, root = _rise(FINE), torch.full((1, 128), 2.0**-9).index_fill(1, torch.tensor(0), 1.0)
    root[0, 0] = 448 * 2.0**-9  # so that the scale is a power of two, and the others are the least of a binade
    most = rounding.too_large(grown, beta**0.5)
    for share, held in ((0.999, True), (1.01, False)):
        gradient = root.clone()
        gradient[0, 1] *= most * grown * share
        after, update = _stepped(root, gradient, beta, 3, exp_avg_sq=FINE)
        assert (after[0, 1] == root[0, 1]).item() is held
        assert after[0, 0] == root[0, 0]
        if held:  # it stays so: the state is what it was
            assert most * 0.99 < update[0, 1].item() <= most
    exact, _ = _stepped(root, gradient, beta, 3)
    assert exact[0, 1] > root[0, 1] * 1.05, "fp32 rises at once"


def test_the_page_has_the_bounds_of_the_grids_and_all_that_are_coarser_than_the_first_warn() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizer-states.md").read_text()
    for text in GRIDS:
        grown = _rise(text)
        cells = f"{grown:.4g}", *(f"{rounding.too_large(grown, beta**0.5):.1f}" for beta in (0.999, 0.95))
        assert f"| `{text}` | {' | '.join(cells)} |" in page
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            QuantizedStates(AdamW([_matrix()]), exp_avg_sq=text)
        said = " ".join(str(one.message) for one in caught)
        assert (f"grown by a factor of {grown:.3g}" in said) is (grown > 1.07), text
    most = [f"{rounding.too_large(rounding.TWICE, beta**0.5):.1f}" for beta in (0.999, 0.95)]
    assert f"which is {most[0]} × `lr` and {most[1]}." in page


@pytest.mark.parametrize("text", [FINE, "fp8", "nvfp4"])
def test_a_root_without_a_gradient_stays_beside_a_larger_one(text: str) -> None:
    """And falls where no larger one stays: the page says which of both is tried before a format is taken."""
    root = torch.full((2, 128), 0.5).index_fill(1, torch.tensor(0), 1.0)
    gradient = root.clone()
    gradient[:, 1:] = 0.0
    start, _ = _stepped(root, root, 0.999, 1, exp_avg_sq=text)
    after, _ = _stepped(start, gradient * (start[0, 0] / root[0, 0]), 0.999, 20, exp_avg_sq=text)
    assert torch.equal(after, start)
    fallen, _ = _stepped(start, torch.zeros_like(root), 0.999, 20, exp_avg_sq=text)
    assert bool((fallen < start * 0.9951).all())
    assert math.isclose(0.9995**1386, 0.5, rel_tol=1e-3), "the page has the steps in which an exact one is halved"


def test_a_first_moment_that_would_not_fall_is_warned_of_where_a_second_moment_divides_it() -> None:
    for text, beta in (("nvfp4", 0.9), ("mxfp4", 0.9), ("mxfp8", 0.95), ("fp8", 0.95)):
        with pytest.warns(
            UserWarning, match=rf"exp_avg of AdamW as {text}, in .* not fall by a factor of {beta}: .* finer"
        ):
            QuantizedStates(AdamW([_matrix()], betas=(beta, 0.999)), exp_avg=text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("mxfp8", "fp8", FINE):
            QuantizedStates(AdamW([_matrix()]), exp_avg=text)
        QuantizedStates(Muon([_matrix()]), momentum_buffer="mxfp4")


def test_updates_without_a_gradient_grow_where_a_first_moment_does_not_fall() -> None:
    """The page has the factor of a thousand steps; the control is a finer format."""
    root, gradient = torch.full((1, 32), 0.3), torch.full((1, 32), 0.3)
    root[0, 0] = gradient[0, 0] = 1.0
    updates: dict[str, list[float]] = {}
    for text in ("nvfp4", "mxfp8"):
        p = nn.Parameter(torch.zeros_like(root))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = QuantizedStates(AdamW([p], lr=1.0, weight_decay=0.0), least=1, exp_avg=text)
        state = {"step": torch.tensor(10_000.0), "exp_avg": gradient.clone(), "exp_avg_sq": root.square()}
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
        still = gradient.clone().index_fill(1, torch.arange(1, 32), 0.0)
        for step in range(300):
            p.grad, before = still.clone(), p.detach().clone()
            optimizer.step()
            if step in (99, 299):
                updates.setdefault(text, []).append((before - p.detach())[0, 1].item())
    first, last = updates["nvfp4"]
    assert last / first == pytest.approx(0.999**-100, rel=1e-3)
    assert last > 0.5
    assert max(updates["mxfp8"]) < 1e-3


def test_a_first_moment_of_mxfp8_stays_up_to_the_factor_of_the_page_too_large() -> None:
    """The code 9 of an octave from 8 to 16 has the widest half step below it."""
    largest, element = 448.0, 9.0
    for times, stays in ((2.24, True), (2.26, False)):
        root = torch.full((1, 32), element).index_fill(1, torch.tensor(0), largest)
        p = nn.Parameter(torch.zeros_like(root))
        optimizer = QuantizedStates(AdamW([p], lr=0.0), least=1, exp_avg="mxfp8")
        state = {"step": torch.tensor(10_000.0), "exp_avg": root.clone(), "exp_avg_sq": root.square()}
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
        for _ in range(3):
            p.grad = (root / times).index_fill(1, torch.tensor(0), largest)
            optimizer.step()
        assert torch.equal(optimizer.state[p]["exp_avg"].dequantize(), root) is stays


def test_a_group_that_is_added_is_tried_as_the_first_ones() -> None:
    first, second = ({"params": [nn.Parameter(torch.zeros(64, 64))], "betas": (0.9, beta)} for beta in (0.1, 0.999))
    optimizer = QuantizedStates(AdamW([first]), exp_avg_sq="mxfp8")
    with pytest.raises(OptionError, match=r"what falls by a factor of 0\.9995 in a step would never fall in it"):
        optimizer.add_param_group(second)
    assert len(optimizer.param_groups) == len(optimizer.optimizer.param_groups) == 1
    optimizer.add_param_group(second | {"betas": (0.9, 0.2)})
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.1), (0.9, 0.2)]
