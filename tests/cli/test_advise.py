"""``lpq advise``: predictions for a model on meta, and a line that works when it is pasted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plugins import FormatPlugin
from torch import nn

import lpq as library
from lpq import registry
from lpq.bench.contenders import by_recipes, plain
from lpq.bench.gpus import GPUS
from lpq.bench.layers import Layers, StackSize
from lpq.bench.timing import in_turn
from lpq.cli import advise as command
from lpq.cli.models import alike, patterns
from lpq.cli.shapes import SHAPES
from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.recipes.globs import matches


class OwnStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, 64)))


@dataclass(frozen=True)
class OwnQuantizer(Quantizer):
    stats = (Stat("amax", block=(1, 64)),)


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama-3-8b", replace(SHAPES["llama-3-8b"], layers=2, vocabulary=1024))


def advised(lpq: Callable, *arguments: object) -> dict:
    ended = lpq("advise", *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


def test_a_wide_model_on_a_measured_gpu_is_given_a_line_to_paste(lpq: Callable) -> None:
    found = advised(lpq, "llama-3-8b", "--gpu", "h100", "--world", 8)
    assert found["line"] == 'lpq.convert(model, "fp8-current", weights="high_precision")'
    assert found["measured_rates"]
    assert found["gain"]["fp8-current"] == pytest.approx(1.5, abs=0.1)
    assert found["gain"]["mxfp8"] < 1, "which an H100 multiplies in bf16"
    assert {(g["layers"], g["count"]) for g in found["layers"]} >= {("blocks.*.q_proj", 2), ("blocks.*.down_proj", 2)}
    assert found["gathered_bytes"]["fp8-current"] / found["gathered_bytes"]["bf16"] == pytest.approx(0.5, abs=0.02)
    table = lpq("advise", "llama-3-8b", "--gpu", "h100", "--world", 8)
    assert table.out.splitlines()[-1] == found["line"]
    assert "The rates of the H100 SXM are measured" in table.out


def test_its_tables_break_no_number_and_no_name_on_a_usual_screen(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = lpq("advise", "llama-3-8b", "--gpu", "h100", "--world", 8).out.splitlines()
    (heading,) = [line.split() for line in lines if line.startswith("layers  ")]
    assert heading[-5:] == ["current", "row", "block", "mxfp8", "nvfp4"]
    (row,) = [line.split() for line in lines if line.startswith("blocks.*.gate_proj")]
    assert row[1:3] == ["2", "4096x14336"]
    assert len(row) == 9
    assert max(map(len, lines)) <= 80


def test_narrow_layers_are_left_out_by_the_line(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama-3-8b", replace(SHAPES["llama-3-8b"], kv_heads=1))
    found = advised(lpq, "llama-3-8b", "--gpu", "h200", "--recipe", "fp8-current")
    assert found["leave_out"] == ["blocks.*.k_proj", "blocks.*.v_proj"]
    model = command.on_meta("llama-3-8b", "")
    exec(found["line"], {"lpq": library, "model": model})
    converted = {name for name, module in model.named_modules() if isinstance(module, library.nn.Linear)}
    assert {name.rpartition(".")[2] for name in converted} == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


PARTS = ("0", "1", "10", "q", "big[0]", "big0", "big*", "big?", "é", "\N{SLIGHTLY SMILING FACE}", 'a"b')
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=2).map(tuple)


def of_widths(widths: dict[tuple[str, ...], int]) -> nn.Module:
    model = nn.Module()
    for parts, width in widths.items():
        inside = model
        for part in parts[:-1]:
            if part not in dict(inside.named_children()):
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        inside.add_module(parts[-1], nn.Linear(width, width, device="meta"))
    return model


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, st.sampled_from([64, 8192]), min_size=1, max_size=5))
def test_the_line_converts_the_layers_that_are_told_to_gain_and_no_others(widths: dict[tuple[str, ...], int]) -> None:
    widths = {parts: width for parts, width in widths.items() if len(parts) > 1 or not any(
        parts == other[:1] for other in widths if len(other) > 1)}  # fmt: skip
    wide = {".".join(parts) for parts, width in widths.items() if width == 8192}
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "on_meta", lambda source, option: of_widths(widths))
        patched.setattr(command, "as_json", told.append)
        command.advise("any", gpu="h100", recipe=["fp8-current"], json=True)
    (found,) = told
    assert (found["line"] is not None) == bool(wide)
    for group in found["layers"]:
        own = {name for name in map(".".join, widths) if any(matches(p, name) for p in group["layers"].split(", "))}
        assert (len(own), group["predicted"]["fp8-current"] > 1) == (group["count"], own <= wide)
    model = of_widths(widths)
    if found["line"] is not None:
        exec(found["line"], {"lpq": library, "model": model})
        assert {n for n, m in model.named_modules() if isinstance(m, library.nn.Linear)} == wide


def test_a_pattern_stands_for_numbers_only_where_it_matches_no_other_layer() -> None:
    names = ["a.0.q", "a.1.q", "a.2.q", "b.0", "b.1", "c.1"]
    assert patterns(names, ["a.0.k", "b.0.q"]) == ["a.*.q", "b.0", "b.1", "c.1"]
    assert patterns(names[:2], ["a.2.q"]) == ["a.0.q", "a.1.q"]
    assert patterns(["x[0]", "", "y[a].0", "y[a].1"], []) == ["x[[]0]", "*", "y[[]a].*"]
    assert [(one.title, one.size) for one in alike({"0": 1, "1": 2, "2": 1})] == [("0, 2", 1), ("1", 2)]


def test_experts_of_which_nothing_is_known_are_left_out_by_the_line(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = advised(lpq, "test_advise:experts", "--gpu", "h100", "--recipe", "fp8-current")
    assert '["experts"], "recipe": "skip"' in found["line"]
    assert not any("slower" in sentence for sentence in found["remarks"])


def shared() -> nn.Module:
    """A narrow layer under three names, and a list with it and a wide layer."""
    narrow = nn.Linear(64, 8192)
    return nn.ModuleDict({"narrow": narrow, "again": narrow, "list": nn.ModuleList([narrow, nn.Linear(8192, 8192)])})


def test_a_layer_in_several_places_is_left_out_by_all_its_names(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = advised(lpq, "test_advise:shared", "--gpu", "h100", "--recipe", "fp8-current")
    assert [(g["layers"], g["count"]) for g in found["layers"]] == [("narrow", 1), ("list.1", 1)]
    assert found["leave_out"] == ["narrow", "again", "list.0"]
    model = shared()
    exec(found["line"], {"lpq": library, "model": model})
    assert [n for n, m in model.named_modules() if isinstance(m, library.nn.Linear)] == ["list.1"]


def raises() -> nn.Module:
    raise ValueError("no such model")


def double() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64)).double()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096)).half()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "double",
            "0: its weight is torch.float64; float32, bfloat16 and float16 can be encoded: cast",
        ),
        ("lazy", "test_advise:lazy has lazy parameters, without sizes: make layers with their sizes"),
    ],
)
def test_a_model_that_cannot_be_converted_is_told(
    model: str, words: str, lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    named = f"test_advise:{model}"
    for ended in (lpq("advise", named, "--gpu", "h100"), lpq("bench", "--device", "cpu", "--model", named)):
        assert (ended.status, words in ended.err) == (1, True)


def test_the_memory_of_a_model_names_its_own_dtype(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert "MiB, with float16 shards and" in lpq("advise", "test_advise:half", "--gpu", "h100").out


def test_a_function_that_raises_is_named_with_what_it_raised(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    for arguments in (("advise", "test_advise:raises"), ("bench", "--device", "cpu", "--model", "test_advise:raises")):
        ended = lpq(*arguments, *(("--gpu", "h100") if arguments[0] == "advise" else ()))
        assert ended.status == 1
        assert ": test_advise:raises raised ValueError: no such model (test_advise.py, line " in ended.err
        assert "call it in Python to see the traceback" in ended.err


def test_a_module_that_is_not_found_is_told_with_the_remedy(lpq: Callable) -> None:
    for name, has_remedy in (("no_such_module:model", True), ("torch.no_such_part:model", False)):
        ended = lpq("advise", name, "--gpu", "h100")
        assert (ended.status, "cannot be imported: ModuleNotFoundError" in ended.err) == (2, True)
        assert ("give `python -m lpq` in the folder that has it, or" in ended.err) == has_remedy


def uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(8192, 8200), nn.Linear(8192, 8192))


def test_sizes_that_are_multiplied_in_bf16_are_told_and_left_out(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = advised(lpq, "test_advise:uneven", "--gpu", "h100", "--recipe", "fp8-row")
    (said,) = [sentence for sentence in found["remarks"] if "no multiple of 16" in sentence]
    assert said.startswith("0: inputs, outputs or tokens")


def frozen() -> nn.Module:
    first, second = nn.Linear(8192, 8192), nn.Linear(8192, 4096)
    first.weight.requires_grad_(False)
    return nn.Sequential(first, second)


def test_layers_that_are_frozen_are_told(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = advised(lpq, "test_advise:frozen", "--gpu", "h100", "--recipe", "fp8-current")
    assert [said.partition(".")[0] for said in found["remarks"] if "frozen" in said] == [
        "0: predicted as if all were trained"
    ]
    assert found["rank_bytes"]["bf16"] == 4 * (8192 * (8192 + 4) + 4 * 4096 * 8193), (
        "no gradients, and no moments, of the first weight"
    )


class Beside(nn.Module):
    """A layer beside matrices that no layer of lpq reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(8192, 8192), nn.Parameter(torch.empty(3, 8192, 8192))


def test_what_is_not_reached_is_told(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    arguments = ("--gpu", "h100", "--recipe", "fp8-current", "--recipe", "fp8-row")
    (said,) = [text for text in advised(lpq, "test_advise:Beside", *arguments)["remarks"] if "lpq.convert:" in text]
    assert said.startswith("lpq.convert: 25 % of the matrix parameters are converted")
    assert not any("lpq.convert:" in text for text in advised(lpq, "llama-3-8b", *arguments)["remarks"])


class Transposed(nn.Module):
    """Wide layers of weights ``[in, out]``, which FSDP2 gathers as they are."""

    def __init__(self) -> None:
        super().__init__()
        Conv1D = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.encoder, self.decoder = (nn.ModuleList([Conv1D(4096, 4096)]) for _ in range(2))


def test_gathers_are_told_to_be_quantized_where_they_are(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = advised(lpq, "test_advise:Transposed", "--gpu", "h100", "--world", 8)
    assert found["line"] == 'lpq.convert(model, "fp8-current")'
    assert not any("gathered quantized" in sentence for sentence in found["remarks"])
    elements = 2 * 4097 * 4096
    assert found["gathered_bytes"]["bf16"] == 2 * 2 * elements, "both lists are gathered again in backward"
    assert found["gathered_bytes"]["fp8-current"] == found["gathered_bytes"]["bf16"]


def test_the_memory_of_a_small_model_is_told_in_a_unit_that_fits(lpq: Callable) -> None:
    out = lpq("advise", "tiny", "--gpu", "h100", "--world", 2).out
    assert "MiB, with float32 shards and weights gathered in the form of the recipe" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith(" whole weights gathered in a step")]
    assert all(0 < float(cell) < 1024 for cell in row[-5:])


def test_a_share_that_is_more_than_the_memory_of_the_gpu_is_told(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GPUS, "h100", replace(GPUS["h100"], memory=4))
    for world, told in {1: ["A rank would hold 7 GiB before activations, and the H100 SXM has 4"], 8: []}.items():
        remarks = advised(lpq, "llama-3-8b", "--gpu", "h100", "--world", world, "--recipe", "fp8-current")["remarks"]
        assert [said.partition(":")[0] for said in remarks if "before activations" in said] == told


def test_a_gpu_that_nobody_measured_is_called_so(lpq: Callable) -> None:
    found = advised(lpq, "llama-3-8b", "--gpu", "B200", "--tokens", 16384)
    assert not found["measured_rates"]
    assert any("Nobody measured lpq on the B200" in sentence for sentence in found["remarks"])
    assert found["line"] == 'lpq.convert(model, "mxfp8")'
    assert any("nvfp4: faster still, with codes of 4 bits" in sentence for sentence in found["remarks"])


def test_what_was_compared_with_no_measured_layer_is_told_and_not_as_fast(lpq: Callable) -> None:
    recipes = [word for name in ("nvfp4", "nvfp4-eden", "nvfp4-four-over-six") for word in ("--recipe", name)]
    found = advised(lpq, "llama-3-8b", "--gpu", "h100", *recipes)
    (sentence,) = (remark for remark in found["remarks"] if "no such layer was measured" in remark)
    assert sentence.startswith("nvfp4-eden, nvfp4-four-over-six: ")
    for group in found["layers"]:
        assert group["predicted"]["nvfp4-eden"] < 0.95 * group["predicted"]["nvfp4"], group["layers"]


def test_a_format_without_a_kernel_for_the_gpu_is_told(lpq: Callable) -> None:
    """Predictions count one read of a tensor, and PyTorch's operators read it many times."""

    def told(*recipes: str, gpu: str = "h100") -> list[str]:
        words = [word for recipe in recipes for word in ("--recipe", recipe)]
        remarks = advised(lpq, "tiny", "--gpu", gpu, *words)["remarks"]
        return [remark for remark in remarks if "as if one kernel encoded" in remark]

    registry.register(FormatPlugin("own", OwnQuantizer, OwnStorage), name="own")
    try:
        (sentence,) = told("mxfp8", "x=own, w=own, dy=nvfp4(search=mse, stochastic=true)", "nvfp4-eden", "fp8-current")
        assert sentence.startswith(
            "nvfp4(stochastic=true, search=mse), own: predicted as if one kernel encoded such operands"
        )
        assert "until the plugin has a KernelSpec for `tile` or `quantize`" in sentence
        assert not told("own", gpu="mi300"), "which kernels run there is not known here"
    finally:
        registry.refresh()
    assert not told("mxfp8", "nvfp4-eden", "nvfp4", "mxfp4", "fp8-block", "fprop=bf16, dgrad=mxfp8, wgrad=bf16")


def test_where_nothing_is_gained_it_says_to_stay_in_bf16(lpq: Callable) -> None:
    for gpu in ("mi300", "a100"):
        found = advised(lpq, "tiny", "--gpu", gpu)
        assert found["line"] is None
        assert "Stay in bf16 here: no recipe saves time for these layers." in found["remarks"]
    of_bf16 = advised(lpq, "tiny", "--gpu", "h100", "--recipe", "bf16", "--recipe", "nvfp4")["remarks"]
    assert [said for said in of_bf16 if "saves bytes" in said and said.startswith("nvfp4: lpq multiplies them in bf16")]
    assert not any(said.startswith("bf16") for said in of_bf16), "it has no codes to multiply, and saves no bytes"


def test_where_codes_of_4_bits_alone_gain_it_does_not_say_that_nothing_does(lpq: Callable) -> None:
    given = ("--gpu", "b200", "--tokens", 16384, "--recipe", "fp8-block", "--recipe", "nvfp4")
    found = advised(lpq, "llama-3-8b", *given)
    assert found["gain"]["fp8-block"] < 1 < found["gain"]["nvfp4"]
    assert found["line"] is None
    assert "Stay in bf16 here: no recipe but nvfp4 saves time for these layers." in found["remarks"]
    assert "nvfp4: faster, with codes of 4 bits; compare the loss before you choose it." in found["remarks"]


def test_layers_are_measured_where_the_gpu_is_here(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_named", lambda gpu, option: (GPUS["h100"], True))
    monkeypatch.setattr(command, "_measured", lambda groups, recipes: {g.sizes: {recipes[0]: 1.25} for g in groups})
    out = lpq("advise", "tiny", "--recipe", "fp8-current").out
    assert out.count("(1.25)") == 7


def experts() -> nn.Module:
    return nn.ModuleDict(
        {"experts": library.nn.GroupedLinear(4, 32, 32, recipe="mxfp8"), "o_proj": nn.Linear(4096, 4096)}
    )


def test_experts_are_predicted_if_it_is_known_how_many_rows_they_get(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    unknown = advised(lpq, "test_advise:experts", "--gpu", "h100")
    assert [g["layers"] for g in unknown["layers"]] == ["o_proj"]
    says = "Experts are left out (experts): --experts-per-token says to how many of them a token goes."
    assert says in unknown["remarks"]
    known = advised(lpq, "test_advise:experts", "--gpu", "h100", "--experts-per-token", 2, "--tokens", 1000)
    assert [g["layers"] for g in known["layers"]] == ["o_proj", "experts"]
    assert known["layers"][1]["matrices"] == [{"tokens": 2000, "inputs": 32, "outputs": 32, "experts": 4}]
    assert says not in known["remarks"]


def test_a_model_of_experts_alone_asks_how_many_a_token_goes_to(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    ended = lpq("advise", "test_advise:only_experts", "--gpu", "h100")
    assert (ended.status, "--experts-per-token says" in ended.err) == (2, True)
    more = lpq("advise", "test_advise:only_experts", "--gpu", "h100", "--experts-per-token", 5)
    assert (more.status, more.err) == (2, "lpq: --experts-per-token 5: 0 has 4 experts\n")


def test_the_number_of_experts_is_refused_where_there_are_none(lpq: Callable) -> None:
    for arguments in (("advise", "llama-3-8b", "--gpu", "h100"), ("bench", "--model", "llama-3-8b", "--device", "cpu")):
        ended = lpq(*arguments, "--experts-per-token", 2)
        assert ended.status == 2
        assert "--experts-per-token 2: no experts of the model are layers of lpq" in ended.err


def only_experts() -> nn.Module:
    return nn.Sequential(library.nn.GroupedLinear(4, 32, 32, recipe="mxfp8"))


MIXTURES = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_of_hugging_face_are_layers_of_the_advice(lpq: Callable, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 128, **MIXTURES[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = advised(lpq, tmp_path, "--gpu", "h100", "--world", 2, "--recipe", "fp8-row", "--recipe", "mxfp8")
    (experts,) = [g for g in found["layers"] if g["layers"] == "model.layers.*.mlp.experts"]
    each = int(config.get("num_local_experts", config.get("num_experts", 0)))
    assert (experts["count"], {m["experts"] for m in experts["matrices"]}) == (2, {each})
    assert {m["tokens"] for m in experts["matrices"]} == {8192 * int(config["num_experts_per_tok"])}
    assert (experts["predicted"]["fp8-row"] > 1) == (kind != "qwen3_moe"), "whose experts are small"
    assert ("model.layers.*.mlp.experts" in found["leave_out"]) == (kind == "qwen3_moe")
    model = command.on_meta(str(tmp_path), "")
    exec(found["line"], {"lpq": library, "model": model})
    inside = [m for name, m in model.named_modules() if name.endswith("mlp.experts")]
    assert {getattr(m, "recipe", None) is not None for m in inside} == {kind != "qwen3_moe"}
    assert found["gathered_bytes"]["fp8-row"] < found["gathered_bytes"]["bf16"]
    if kind == "mixtral":
        table = lpq("advise", tmp_path, "--gpu", "h100").out
        assert "8x4096x28672" in table
        assert "An expert gets 2,048 rows, as many as any other." in table


def test_formats_whose_groups_no_gpu_multiplies_save_no_time_for_experts(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    options = ["--experts-per-token", 2, "--tokens", 1 << 20, "--recipe", "mxfp8", "--recipe", "fp8-row"]
    found = advised(lpq, "test_advise:experts", "--gpu", "b200", *options)
    o_proj, experts = found["layers"]
    assert experts["predicted"]["mxfp8"] < 1 < o_proj["predicted"]["mxfp8"]
    assert "mxfp8: this GPU multiplies the rows of experts in bf16." in found["remarks"]


def test_experts_are_measured_as_layers() -> None:
    """A CPU in the place of the GPU: what is timed are the steps of a grouped layer with equal groups."""
    device = torch.device("cpu")
    size = StackSize(64, 32, 48, 4)
    layers = Layers([*plain(), *by_recipes(("mxfp8",))], size, device)
    assert layers.failures == {}
    assert torch.equal(layers.ends[0], torch.tensor([16, 32, 48, 64], dtype=torch.int32))
    assert {m.recipe and m.recipe.name for m in layers.modules.values()} == {None, "mxfp8"}
    y = layers.modules["bf16"](layers.x, *layers.ends)
    w = layers.modules["bf16"].weight
    assert torch.equal(y[16:32], layers.x[16:32] @ w[1].T)
    assert all(ms.median > 0 for ms in in_turn(layers.steps(), device).values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(lpq: Callable) -> None:
    ended = lpq("advise", "tiny")
    assert ended.status == 2
    assert "--gpu: name one of h100, h200" in ended.err
