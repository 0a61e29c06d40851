"""Calibrating a model in one process: what each method finds, what engines fuse, what saw no token, and going on."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import searched_format
import torch
from counting import encodings
from models import converted, data, layers, model, statics
from support.comparing import equal_states
from torch import Tensor, nn

import lpq
from lpq.calibration import CalibrationError, CalibrationWarning
from lpq.formats.layout import Stat
from lpq.nn.siblings import SharedInputs


def inputs_of(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """All that is given to each layer, one tensor each."""
    found: dict[str, list[Tensor]] = {}

    def note(name: str) -> Any:
        return lambda module, args: found.setdefault(name, []).append(args[0].detach().flatten())

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers(net).items()]
    with torch.no_grad():
        for batch in batches:
            net.eval()(batch)
    for hook in hooks:
        hook.remove()
    net.train()
    return {name: torch.cat(parts) for name, parts in found.items()}


FUSED = [
    ("0.attn.q_proj", "0.attn.k_proj", "0.attn.v_proj"),
    *((f"0.experts.{i}.w1", f"0.experts.{i}.w3") for i in range(3)),
]


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8"])
def test_max_takes_the_largest_magnitudes_and_fused_layers_share_them(recipe: str) -> None:
    net, batches = converted(recipe), data()
    seen = inputs_of(net, batches)
    weights = {name: layer.weight.detach().abs().amax() for name, layer in layers(net).items()}
    made = lpq.calibrate(net, batches)
    assert (made.samples, made.batches, len(made.layers)) == (32, 8, 13)
    found = statics(net)
    key = {"x": "x_amax", "w": "w_amax"} if recipe == "fp8-current" else {"x": "x_row_amax", "w": "w_row_amax"}
    together = {name: names for names in FUSED for name in names}
    for name in layers(net):
        w_key = key["w"] if f"{name}.{key['w']}" in found else "w_amax"
        same_scale = together.get(name, (name,))
        assert found[f"{name}.{w_key}"] == max(weights[n] for n in same_scale)
        assert found[f"{name}.{key['x']}"] == max(seen[n].abs().amax() for n in same_scale)
    assert len({weights[n].item() for n in FUSED[0]}) == 3, "control: they differ"
    assert net.training
    for layer in layers(net).values():
        assert layer.recipe is not None
        assert layer.recipe.x.side("row").static
    assert lpq.report(net).unmatched == ()


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_fused_layers_encode_the_input_that_they_share_once(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before they were calibrated, and of a checkpoint too; control: layers that share nothing."""
    x, together = data(1)[0].requires_grad_(), converted(recipe)
    lpq.calibrate(together, data())
    lpq.checkpoint.save(together, tmp_path / "run")
    loaded = lpq.convert(model(), lpq.checkpoint.info(tmp_path / "run").policy)
    lpq.checkpoint.load(loaded, tmp_path / "run")
    apart = copy.deepcopy(together)
    for layer in layers(apart).values():
        layer.join(replace(layer.model, inputs=SharedInputs()))
    seen, made, outputs = encodings(monkeypatch), [], []
    for net in (converted(recipe), together, loaded, apart):
        with torch.no_grad():
            outputs.append(net(x))
        made.append(sum(wanted.shape == (12, 64) for wanted in seen))
        seen.clear()
    assert made[:3] == [8, 8, 8], "one of q, k and v, one of o, and of each expert one of w1 and w3, and one of w2"
    assert made[3] == len(layers(apart)) == 13
    assert torch.equal(outputs[1], outputs[3])
    assert torch.equal(outputs[2], outputs[3])


@pytest.mark.parametrize("group", [("k_proj", "o_proj"), ("[ko]_*",)])
def test_other_siblings_can_be_named(group: tuple[str, ...]) -> None:
    net = converted("fp8-current")
    lpq.calibrate(net, data(), siblings=[group])
    found = statics(net)
    assert found["0.attn.k_proj.w_amax"] == found["0.attn.o_proj.w_amax"]
    assert found["0.attn.k_proj.w_amax"] != found["0.attn.q_proj.w_amax"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_percentile_is_that_of_all_elements(dtype: torch.dtype) -> None:
    """In bf16 exactly that of the sorted magnitudes; in fp32 the next number of bf16."""
    net, batches = lpq.convert(model(dtype=dtype), "fp8-current"), data(dtype=dtype)
    seen = inputs_of(net, batches)
    lpq.calibrate(net, batches, method="percentile", percentile=99.5)
    for name in ("0.attn.q_proj", "0.attn.o_proj", "0.experts.2.w2"):
        magnitudes = seen[name].abs().float().sort().values
        wanted = magnitudes[-(-995 * len(magnitudes) // 1000) - 1]
        rounded = wanted.bfloat16().float()
        above = rounded if rounded >= wanted else (rounded.view(torch.int32) + (1 << 16)).view(torch.float32)
        assert statics(net)[f"{name}.x_amax"] == above
        assert above < magnitudes[-1], "control: something is cut off"
    with pytest.raises(CalibrationError, match="an iterator gives them once"):
        lpq.calibrate(net, iter(batches), method="percentile")


def test_the_order_of_batches_does_not_matter() -> None:
    found = []
    for order in (data(4), data(4)[::-1]):
        for method in ("max", "percentile"):
            net = converted("x=nvfp4(rht=true), w=nvfp4, dy=nvfp4(rht=true)", experts=0)
            lpq.calibrate(net, order, method=method, percentile=90)
            found.append(statics(net))
    assert equal_states(found[0], found[2])
    assert equal_states(found[1], found[3])
    assert not equal_states(found[0], found[1])


@pytest.mark.parametrize("method", ["mse", "four_over_six"])
def test_scales_of_weights_are_searched_where_their_format_can(method: Any) -> None:
    policy = {"rules": [{"match": "*attn*", "recipe": "nvfp4"}, {"match": "*", "recipe": "fp8-current"}]}
    net = lpq.convert(model(), policy)
    made = lpq.calibrate(net, data(), method=method)
    assert made.searched == tuple(f"0.attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    recipe = layers(net)["0.attn.q_proj"].recipe
    assert recipe is not None
    assert str(recipe.w) == f"nvfp4(block=16x16, static=true, search={method})"
    assert "search" not in str(recipe.x)
    with pytest.raises(CalibrationError, match="searches scales of blocks of weights, and here there are none"):
        lpq.calibrate(converted("fp8-current"), data(), method=method)


def test_a_format_tells_by_which_method_its_scales_are_searched() -> None:
    """Also where a format has an option of its own for it, and in one direction alone."""
    searched_format.register()
    for recipe in ("w=rows(), x=fp8(), dy=bf16", "w=hybrid(row=rows(best=true), col=mxfp8), x=fp8(), dy=bf16"):
        net = converted(recipe)
        assert lpq.calibrate(net, data(), method="mse").searched == tuple(layers(net))
        assert layers(net)["0.attn.q_proj"].recipe.w.side("row").best
        with pytest.raises(CalibrationError, match="searches scales of blocks of weights, and here there are none"):
            lpq.calibrate(converted(recipe), data(), method="four_over_six")


@pytest.mark.parametrize("recipe", ["nvfp4-four-over-six", "nvfp4-eden"])
def test_a_recipe_that_searches_already_is_searched_by_the_method(recipe: str) -> None:
    """``error`` and ``norm`` are options of its own search: another one starts without them."""
    for method, options in (("four_over_six", "search=four_over_six, norm=256"), ("mse", "search=mse")):
        net = converted(recipe)
        made = lpq.calibrate(net, data(), method=method)  # type: ignore[arg-type]
        assert made.searched == made.layers
        weight = layers(net)["0.attn.q_proj"].recipe.w.side("row")
        assert str(weight) in (f"nvfp4(block=16x16, static=true, {options})", f"nvfp4(static=true, {options})")


@pytest.mark.parametrize("recipe", ["nvfp4-row-fwd-mxfp8-bwd", "nvfp4-row-fwd-decoded-bwd", "w=fp8(), x=bf16, dy=bf16"])
def test_where_weights_alone_have_static_scales_no_batch_is_read(recipe: str) -> None:
    """An amax of each row follows its row, and the record says that no batch was read in place of a count of 0."""
    net = converted(recipe)
    made = lpq.calibrate(net, data())
    assert (made.samples, len(made.layers)) == (0, 13)
    assert all(".w_" in name for name in made.values)
    assert (
        str(made) == "static scales of weights alone in 13 layers: inputs are measured as before, so no batch was read"
    )
    with pytest.raises(CalibrationError, match="no input has a scale of a whole tensor"):
        lpq.calibrate(converted(recipe), data(), method="percentile")


def test_calibrating_again_does_not_depend_on_what_was_static() -> None:
    net = converted("fp8-current", experts=0)
    lpq.calibrate(net, data())
    first = statics(net)
    for value in first.values():
        value.fill_(1e-3)  # all would be clamped
    lpq.calibrate(net, data())
    fresh = converted("fp8-current", experts=0)
    lpq.calibrate(fresh, data())
    assert equal_states(statics(net), statics(fresh))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_weights_that_outgrow_their_scale_are_cut_until_calibrated_again(recipe: str) -> None:
    net = converted(recipe)
    lpq.calibrate(net, data())
    layer = next(one for one in net.modules() if isinstance(one, lpq.nn.Linear))
    static = layer.static_values()["w_amax"].clone()
    with torch.no_grad():
        layer.weight[0, 0] = 4 * static

    def largest() -> float:
        state = {"amax": layer.static_values()["w_amax"]}
        return float(layer.recipe.w.quantize(layer.weight.detach(), state=state).dequantize().abs().max())

    assert largest() <= 1.01 * static
    lpq.calibrate(net, data())
    assert largest() > 3.9 * static


def test_a_recipe_that_is_static_from_the_start_is_filled() -> None:
    net = converted("x=fp8(static=true), w=fp8(static=true), dy=fp8()")
    lpq.calibrate(net, data())
    fresh = converted("fp8()")
    lpq.calibrate(fresh, data())
    assert equal_states(statics(net), statics(fresh))


def test_it_ends_with_the_batch_that_makes_the_samples() -> None:
    net, batches = converted("fp8-current", experts=0), data()
    made = lpq.calibrate(net, batches, samples=9)
    assert (made.samples, made.batches) == (12, 3)
    few = converted("fp8-current", experts=0)
    lpq.calibrate(few, batches[:3])
    assert equal_states(statics(net), statics(few))


def test_experts_that_saw_no_token_get_the_scales_of_others_with_a_warning() -> None:
    net = converted("nvfp4", used=2)
    with pytest.warns(
        CalibrationWarning, match=r"no token went through 0\.experts\.2\.w1, 0\.experts\.2\.w3, 0\.experts\.2\.w2"
    ):
        lpq.calibrate(net, data())
    found = statics(net)
    for leaf in ("w1", "w2", "w3"):
        of = [found[f"0.experts.{i}.{leaf}.x_row_amax"] for i in range(3)]
        assert of[2] == max(of[:2])
        assert found[f"0.experts.2.{leaf}.w_amax"] > 0
    with pytest.raises(CalibrationError, match=r"0\.experts\.2\.w1 saw no input but zeros"):
        lpq.calibrate(converted("nvfp4", used=2), data(), unseen="error")
    with pytest.raises(CalibrationError, match=r"0\.experts\.0\.w1 saw no input.*no layer beside it"):
        lpq.calibrate(converted("nvfp4", used=0), data())


def test_where_it_fails_the_model_is_as_it_was() -> None:
    net = converted("fp8-current")
    lpq.calibrate(net, data())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    recipes = {name: layer.recipe for name, layer in layers(net).items()}
    bad = data()
    bad[3][0, 0, 0] = torch.nan
    with pytest.raises(CalibrationError, match=r"0\.attn\.q_proj\.x_amax is nan"):
        lpq.calibrate(net, bad)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        lpq.calibrate(net, [*data(2), torch.randn(2, 3, 65)])
    assert equal_states(net.state_dict(), before)
    assert {name: layer.recipe for name, layer in layers(net).items()} == recipes
    assert net.training


def test_where_a_model_does_not_evaluate_what_is_compiled_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    net, graphs = converted("fp8-current"), []

    def refuse(model: nn.Module) -> None:
        raise ValueError("no evaluation")

    monkeypatch.setattr(nn.Module, "eval", refuse)
    with pytest.raises(ValueError, match="no evaluation"):
        lpq.calibrate(net, data(1), progress=False)
    torch.compile(torch.sin, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.ones(1))
    assert len(graphs) == 1


def test_weights_of_zeros_have_a_scale_and_stay_zeros() -> None:
    net = model()
    torch.nn.init.zeros_(net[0].attn.o_proj.weight)
    lpq.convert(net, "nvfp4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpq.calibrate(net, data())
    assert statics(net)["0.attn.o_proj.w_amax"] == 1
    y = layers(net)["0.attn.o_proj"](torch.randn(3, 64))
    assert torch.equal(y, layers(net)["0.attn.o_proj"].bias.expand(3, -1))


# ---------------------------------------------------------------------------------------------- going on


class Interrupted(Exception):
    pass


def until(batches: list[Tensor], count: int) -> Any:
    """Batches, and then an error; a new one each time it is gone through."""

    class Some:
        def __iter__(self) -> Any:
            yield from itertools.islice(batches, count)
            raise Interrupted

    return Some()


@pytest.mark.parametrize("method", ["max", "percentile"])
def test_an_interrupted_calibration_goes_on(method: Any, tmp_path: Path) -> None:
    """With the statistics of an uninterrupted one, and without the batches that it has; control: they are missed."""
    file, whole = tmp_path / "state.pt", converted("nvfp4", experts=1)
    lpq.calibrate(whole, data(), method=method)
    net = converted("nvfp4", experts=1)
    with pytest.raises(Interrupted):
        lpq.calibrate(net, until(data(), 5), method=method, state=file, every=2)
    assert not statics(net)
    damaged = [torch.full_like(batch, 1e3) if i < 4 else batch for i, batch in enumerate(data())]
    if method == "max":
        lpq.calibrate(net, damaged, method=method, state=file, every=2)
    else:
        lpq.calibrate(net, data(), method=method, state=file, every=2)
    assert equal_states(statics(net), statics(whole))
    other = converted("nvfp4", experts=1)
    lpq.calibrate(other, damaged, method=method)
    assert not equal_states(statics(other), statics(whole))
    with pytest.raises(CalibrationError, match="was kept with samples=512, and this is samples=8"):
        lpq.calibrate(converted("nvfp4", experts=1), data(), method=method, samples=8, state=file)
    with pytest.raises(CalibrationError, match="was kept of another model"):
        lpq.calibrate(converted("nvfp4", blocks=2), data(), method=method, state=file)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"nonsense", None):
        file = tmp_path / "state.pt"
        file.write_bytes(content) if content is not None else torch.save({"version": 0}, file)
        with pytest.raises(CalibrationError, match=r"state\.pt (cannot be read|is not) "):
            lpq.calibrate(converted("fp8-current"), data(), state=file)


def test_a_file_of_which_one_bit_changed_is_refused_or_the_same(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    lpq.calibrate(whole := converted("fp8-current", experts=0), data(2), state=file)
    raw, refused = file.read_bytes(), list[str]()
    for place in range(40, len(raw), len(raw) // 25):
        changed = bytearray(raw)
        changed[place] ^= 64
        file.write_bytes(changed)
        try:
            lpq.calibrate(net := converted("fp8-current", experts=0), data(2), state=file)
        except CalibrationError as error:
            refused.append(str(error))
        else:
            assert equal_states(statics(net), statics(whole)), place
    assert len(refused) > 10
    assert not [words for words in refused if "weights_only" in words]


STATES: list[tuple[Any, str]] = [
    (lambda found: found.update(version=9), "it is of version 9, and this lpq reads version 1"),
    (lambda found: found.pop("settings"), "it lacks 'settings'"),
    (lambda found: found.update(passes=[]), "it has 'passes' of type list"),
    (lambda found: found["passes"].update(statistics=3), "its pass 'statistics' is of type int"),
    (lambda found: found["passes"]["statistics"].pop("batches"), "lacks 'batches'"),
    (lambda found: found["passes"]["statistics"].update(batches=-1), "its pass 'statistics' is none"),
    (lambda found: found["passes"]["statistics"]["statistics"].pop("sum"), "lacks 'sum'"),
    (lambda found: found["settings"].update(method=torch.ones(2)), r"was kept with method=tensor"),
]
VALUES = (
    3,
    None,
    "x",
    torch.tensor(-1.0),
    torch.tensor(1),
    torch.ones(2).to_sparse(),
    torch.tensor(1.0, device="meta"),
)


def test_a_file_that_is_no_state_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    lpq.calibrate(converted("fp8-current", experts=0), data(2), state=file)
    name = next(iter(torch.load(file)["passes"]["statistics"]["statistics"]["max"]))
    values = [
        (lambda found, value=value: found["passes"]["statistics"]["statistics"]["max"].update({name: value}), words)
        for value in VALUES
        for words in ("something else than a max as",)
    ]
    raw = file.read_bytes()
    for change, words in [*STATES, *values]:
        file.write_bytes(raw)
        found = torch.load(file, weights_only=True)
        change(found)
        torch.save(found, file)
        with pytest.raises(CalibrationError, match=rf"state\.pt .*{words}"):
            lpq.calibrate(converted("fp8-current", experts=0), data(2), state=file)


# ---------------------------------------------------------------------------------------------- the bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_how_far_it_is_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO, **options: Any) -> str:
        monkeypatch.setattr("sys.stderr", stream)
        lpq.calibrate(converted("fp8-current", experts=0), data(), **options)
        return stream.getvalue()

    found = shown(Terminal(), samples=32, method="percentile")
    assert all(f"calibrating: {name}" in found for name in ("magnitudes", "statistics"))
    assert "100%" in found
    assert not shown(Terminal(), progress=False)
    assert not shown(io.StringIO())


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "maximum"}, "method='maximum': did you mean 'max'"),
        ({"samples": 0}, "samples=0: it is a whole number from 1 on"),
        ({"percentile": 101, "method": "percentile"}, "percentile=101: it is a number from 50 to 100, such as 99"),
        ({"percentile": 0.999, "method": "percentile"}, "percentile=0.999: it is a number from 50 to 100, such as"),
        ({"percentile": "99"}, "percentile='99': it is a number"),
        ({"siblings": "w1"}, "siblings='w1': it is a list of groups"),
        ({"siblings": ["w1", "w3"]}, r"siblings=\['w1', 'w3'\]: it is a list of groups"),
        ({"siblings": [("w1", "w4")]}, r"siblings has \('w1', 'w4'\), and the model has no two layers"),
        ({"forward": 3}, r"forward=3: it is a function that calls the model"),
        ({"batches": None}, r"batches is of type NoneType: it is a list"),
        ({"unseen": "never"}, "unseen='never': choose from error, siblings"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        lpq.calibrate(converted("fp8-current"), **{"batches": data(), **options})


def test_models_with_nothing_to_calibrate_are_refused() -> None:
    for net in (model(), converted("mxfp8")):
        with pytest.raises(CalibrationError, match="no layer has a scale of a whole tensor"):
            lpq.calibrate(net, data())
    with pytest.raises(CalibrationError, match="there is no batch"):
        lpq.calibrate(converted("fp8-current"), [])
    with pytest.raises(CalibrationError, match=r"batches is a tensor \[4, 32\].*pass a list"):
        lpq.calibrate(converted("fp8-current"), torch.randn(4, 32))
    with pytest.raises(CalibrationError, match="a batch is a str without a tensor"):
        lpq.calibrate(converted("fp8-current"), ["text"])
    staged = {"rules": [{"match": "*", "recipe": "fp8-current", "until": 5}, {"match": "*", "recipe": "nvfp4"}]}
    with pytest.raises(CalibrationError, match=r"0\.attn\.q_proj: its recipe changes by step"):
        lpq.calibrate(lpq.convert(model(), staged), data())


def test_layers_without_static_scales_are_listed() -> None:
    """Those whose formats have no scale of a whole tensor keep what they measure."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.grouped = lpq.nn.GroupedLinear(2, 64, 64, recipe="fp8-current")

        def forward(self, x: Tensor) -> Tensor:
            return self.grouped(self.second(self.first(x)), [4, 4])  # type: ignore[no-any-return]

    policy = {"rules": [{"match": ["first", "grouped"], "recipe": "mxfp8"}, {"match": "*", "recipe": "fp8-current"}]}
    net = lpq.convert(Net(), policy)
    made = lpq.calibrate(net, [torch.randn(8, 64)])
    assert (made.layers, made.left) == (("second",), ("first", "grouped"))
    assert "all is measured as before in 2 layers" in str(made)
    assert list(statics(net)) == ["second.x_amax", "second.w_amax"]


def test_a_statistic_of_blocks_is_never_static() -> None:
    assert not lpq.quantizer("nvfp4(static=true)").recalls(Stat("block_amax", (1, 16)))
    assert str(lpq.quantizer("mxfp8").frozen()) == "mxfp8"
    assert str(lpq.quantizer("fp8(scaling=row)").frozen()) == "fp8(scaling=row)"
    assert str(lpq.quantizer("hybrid(row=fp8, col=mxfp8)").frozen()) == "hybrid(row=fp8(static=true), col=mxfp8)"
    assert str(lpq.quantizer("fp8(static=true)").frozen(static=False)) == "fp8"
