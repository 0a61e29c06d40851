"""What an export writes: the codes of training, all that an engine needs, and nothing where something is wrong."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from support.commands import Command
from support.comparing import equal_states
from tiny import Case, Net, layers, tensors
from torch import nn

import lpq
from lpq.checkpoint import CheckpointError, reading
from lpq.engines import plan
from lpq.files import claim
from lpq.formats.elements import unpack_nibbles


def test_a_user_exports_a_model(tmp_path: Path) -> None:
    """One call; the directory has what an engine needs, and what was written can be printed."""
    model = lpq.convert(Net(), "fp8-block")
    assert lpq.export(model, tmp_path / "default").layout == "compressed-tensors"
    done = lpq.export(model, tmp_path / "out", layout="fp8-block")
    assert sorted(path.name for path in done.path.iterdir()) == ["config.json", "model.safetensors"]
    assert "4 layers: FP8 per block, inputs fp8(scaling=block)" in str(done)
    assert "1 layer in high precision: lm_head" in str(done)
    name, layer = "blocks.0.mlp.up_proj", model.blocks[0].mlp.up_proj
    found, operand = tensors(done.path), tiny.operand(layer)
    assert torch.equal(found[f"{name}.weight"].view(torch.uint8), operand.data.view(torch.uint8))
    assert torch.equal(found[f"{name}.weight_scale_inv"], operand.scale)
    assert torch.equal(found["blocks.0.self_attn.q_proj.bias"], model.blocks[0].self_attn.q_proj.bias)
    assert torch.equal(found["embed.weight"], model.embed.weight)
    assert tiny.config(done.path)["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("case", tiny.ALL, ids=str)
def test_what_is_stored_quantized_is_written_as_it_is_and_the_rest_is_encoded_once(case: Case, tmp_path: Path) -> None:
    """The same bytes from every way of keeping weights, streamed too, and codes that are not those of other weights."""
    written = []
    for weights in (None, "high_precision", "quantized"):
        model: Any = lpq.convert(Net(dtype=torch.bfloat16), case.recipe, weights=weights)
        with pytest.MonkeyPatch.context() as patch:
            if weights == "quantized":  # nothing is encoded again
                patch.setattr("lpq.engines.entries.encode_operands", None)
            lpq.export(model, tmp_path / str(weights), **case.options(model))
            written.append(tensors(tmp_path / str(weights)))
            assert equal_states(written[-1], dict(lpq.export.stream(model, **case.options(model))))
    assert equal_states(written[0], written[1])
    assert equal_states(written[0], written[2])
    assert len(layers(model)) == 4
    with torch.no_grad():
        weight = layers(model)["blocks.0.mlp.up_proj"].weight
        weight.copy_(-weight.dequantize())
    assert not equal_states(written[0], dict(lpq.export.stream(model, **case.options(model))))


def test_two_values_share_a_byte_the_even_column_low(tmp_path: Path) -> None:
    """As the layouts have it, and scales row by row."""
    model: Any = lpq.convert(Net(dtype=torch.bfloat16), "x=bf16, w=nvfp4(), dy=bf16")
    weight = model.blocks[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.zero_()
        weight[0, :4] = torch.tensor([1.0, -6.0, 0.5, 3.0])
        weight[1, 16:18] = torch.tensor([3.0, -1.5])
    found = dict(lpq.export.stream(model, "modelopt"))
    name = "blocks.0.mlp.up_proj"
    assert found[f"{name}.weight"][0, :2].tolist() == [0x2 | 0xF << 4, 0x1 | 0x5 << 4]
    assert found[f"{name}.weight_scale"][:2, :2].float().tolist() == [[448.0, 0.0], [0.0, 224.0]]
    assert found[f"{name}.weight_scale_2"].item() == torch.tensor(6.0).div(2688).item()
    assert dict(lpq.export.stream(model, "compressed-tensors"))[f"{name}.weight_global_scale"].tolist() == [448.0]
    assert unpack_nibbles(found[f"{name}.weight"])[1, 16:18].tolist() == [0x7, 0x8 | 0x5]


def test_a_block_of_rows_repeats_its_scale(tmp_path: Path) -> None:
    model: Any = lpq.convert(Net(), "nvfp4")
    found = dict(lpq.export.stream(model, "compressed-tensors"))
    scale = found["blocks.0.mlp.up_proj.weight_scale"].float()
    stored = tiny.operand(model.blocks[0].mlp.up_proj).scale.float()
    assert stored.shape == (16, 8)
    assert torch.equal(scale, stored.repeat_interleave(16, 0))


def test_several_files_have_the_tensors_of_one(tmp_path: Path) -> None:
    model = lpq.convert(Net(blocks=2), "mxfp8")
    lpq.export(model, tmp_path / "one", layout="modelopt")
    lpq.export(model, tmp_path / "many", layout="modelopt", shard_bytes=50_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert equal_states(tensors(tmp_path / "one"), tensors(tmp_path / "many"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = tensors(tmp_path / "many")
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    safetensors: Any = pytest.importorskip("safetensors.torch", reason="needs safetensors, as `make install` brings it")
    theirs = {name: t for file in files for name, t in safetensors.load_file(tmp_path / "many" / file).items()}
    assert equal_states(theirs, found)


def test_a_wrapper_adds_nothing_to_names(tmp_path: Path) -> None:
    model = lpq.convert(Net(), "mxfp8")
    wrapped = nn.DataParallel(model)
    assert equal_states(dict(lpq.export.stream(wrapped, "modelopt")), dict(lpq.export.stream(model, "modelopt")))
    lpq.checkpoint.save(wrapped, tmp_path / "run")
    lpq.checkpoint.load(lpq.convert(Net(), "mxfp8"), tmp_path / "run")


def test_tied_weights_are_written_once_and_stay_in_high_precision(tmp_path: Path) -> None:
    model = lpq.convert(Net(tied=True), lpq.policy("mxfp8", include="all"))
    lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    found = tensors(tmp_path / "x")
    assert "lm_head.weight" not in found
    assert torch.equal(found["embed.weight"], model.embed.weight)
    assert tiny.config(tmp_path / "x")["ignore"] == ["lm_head"]


@pytest.mark.parametrize("include", [None, "all"])
def test_a_checkpoint_of_tied_weights_is_exported_as_its_model_is(include: Any, tmp_path: Path) -> None:
    """Once, in high precision, and with a note where training multiplies its codes."""
    model = lpq.convert(Net(tied=True, dtype=torch.bfloat16), "mxfp8", include=include)
    lpq.checkpoint.save(model, tmp_path / "run")
    of_model = lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    of_run = lpq.export(tmp_path / "run", tmp_path / "y", layout="compressed-tensors")
    assert equal_states(tensors(tmp_path / "x"), tensors(tmp_path / "y"))
    assert of_model.notes == of_run.notes
    assert any("the weights of lm_head belong to other modules" in note for note in of_run.notes) == (include == "all")
    assert {*of_run.left} == {*of_model.left, "embed"}


def test_a_layer_in_two_places_is_exported_once_from_a_checkpoint_too(tmp_path: Path) -> None:
    layer = nn.Linear(64, 64)
    model = lpq.convert(nn.Sequential(layer, nn.ReLU(), layer), "mxfp8")
    lpq.checkpoint.save(model, tmp_path / "run")
    found = lpq.export(tmp_path / "run", tmp_path / "x", layout="compressed-tensors")
    assert equal_states(tensors(tmp_path / "x"), dict(lpq.export.stream(model, "compressed-tensors")))
    assert found.left == ()


def test_the_index_of_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each tensor: the index of a large model has millions of pieces."""
    lpq.checkpoint.save(lpq.convert(Net(), "mxfp8"), tmp_path / "run")
    read: list[Path] = []
    read_index = reading.read_index
    monkeypatch.setattr(reading, "read_index", lambda path, sizes: (read.append(path), read_index(path, sizes))[1])
    lpq.export(tmp_path / "run", tmp_path / "x", layout="compressed-tensors")
    assert read == [tmp_path / "run"]


def test_all_layers_in_high_precision_are_ignored_by_name(tmp_path: Path) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 128))

    model: Any = Net()
    model.router = Router()
    lpq.convert(model, {"rules": [{"match": "*mlp*", "recipe": "mxfp8"}]})
    done = lpq.export(model, tmp_path / "x", layout="compressed-tensors", leave=["*down_proj"])
    left = ["blocks.0.self_attn.q_proj", "blocks.0.self_attn.o_proj", "blocks.0.mlp.down_proj", "lm_head", "router"]
    assert [*done.left] == tiny.config(tmp_path / "x")["ignore"] == left
    assert torch.equal(tensors(tmp_path / "x")["blocks.0.mlp.down_proj.weight"], model.blocks[0].mlp.down_proj.weight)


def test_what_delayed_scaling_remembers_is_the_scale_of_inputs(tmp_path: Path) -> None:
    model: Any = lpq.convert(Net(), "fp8-delayed")
    with pytest.raises(CheckpointError, match=r"q_proj: the amax of its inputs is 0\.0.*input_amax=\{\}"):
        lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    lpq.export(model, tmp_path / "dynamic", layout="compressed-tensors", input_amax={})
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    found = tensors(tmp_path / "x")
    for name, layer in layers(model).items():
        assert layer.x_amax > 0
        assert found[f"{name}.input_scale"].tolist() == [(torch.tensor(448.0) / layer.x_amax).reciprocal().item()]
        state = {"amax_history": layer.w_amax_history, "amax": layer.w_amax}
        used = layer.recipe.w.quantize(layer.weight.detach(), col=False, state={k: v.clone() for k, v in state.items()})
        assert torch.equal(found[f"{name}.weight"].view(torch.uint8), used.row.data.view(torch.uint8))
    groups = [tiny.config(tmp_path / name)["config_groups"]["group_0"] for name in ("x", "dynamic")]
    assert [group["input_activations"]["dynamic"] for group in groups] == [False, True]


def test_a_weight_is_rounded_first_to_the_dtype_of_training() -> None:
    model, half = lpq.convert(Net(), "mxfp8"), lpq.convert(Net(dtype=torch.bfloat16), "mxfp8")
    rounded = dict(lpq.export.stream(model, "modelopt", dtype=torch.bfloat16))
    assert equal_states(rounded, dict(lpq.export.stream(half, "modelopt")))
    assert not equal_states(rounded, dict(lpq.export.stream(model, "modelopt")))


def test_a_weight_has_the_codes_that_autocast_multiplies() -> None:
    """Autocast leaves fp32 weights as they are, so no dtype is given; with one, the codes are others."""
    layer = lpq.convert(nn.Linear(128, 128, bias=False), "x=bf16, w=fp8(scaling=row), dy=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        multiplied = layer(torch.eye(128)).T
    for dtype, equal in ((None, True), (torch.bfloat16, False)):
        found = dict(lpq.export.stream(nn.ModuleDict({"up": layer}), "compressed-tensors", dtype=dtype))
        decoded = found["up.weight"].float() * found["up.weight_scale"].view(-1, 1)
        assert torch.equal(decoded.bfloat16(), multiplied) == equal


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "layout": ("mxfp8", {"layout": "compresed-tensors"}, r"no layout 'compresed-tensors': did you mean 'compressed-"),
    "format": (
        "fp8(dtype=e5m2)", {"layout": "compressed-tensors"},
        r"q_proj\.weight is quantized as fp8\(dtype=e5m2\), for which .* has no place; it has one for: fp8, ",
    ),
    "no place": (
        "nvfp4", {"layout": "fp8-block"},
        r"no place, nor for another option of this format\. Export with layout='compressed-tensors' or 'modelopt', or",
    ),
    "no layout": (
        "x=bf16, w=nvfp4(scaling=row), dy=bf16", {},
        r"q_proj\.weight is quantized as nvfp4\(scaling=row\), for which the layout 'compressed-tensors' has no place; "
        r"it has one for: nvfp4\. Only layout='lpq' has a place for it: train with weights that another one has a "
        r"place for, or keep",
    ),
    "one": (
        {"rules": [{"match": "*up_proj", "recipe": tiny.FLOAT_SCALES}, {"match": "*", "recipe": "fp8-block"}]},
        {"layout": "fp8-block"}, "has one scheme for all layers, and the model has FP8 per block: .*up_proj",
    ),
    "inputs": (
        "x=bf16, w=fp8(scaling=block, block=128x128), dy=bf16", {"layout": "fp8-block"},
        "the recipe of .* does not encode them so",
    ),
    "misread": (
        "mxfp8", {"layout": "fp8-block"},
        r"q_proj\.weight is quantized as mxfp8, and lpq writes no MXFP8 in the layout 'fp8-block': vLLM and SGLang "
        r"take its exponents for fp32 scales, .*'compressed-tensors', .*'modelopt', ",
    ),
    "by no name": (
        "fp8-current", {"layout": "fp8-block"},
        r"lpq writes no FP8 per tensor in .*: transformers calls its scales weight_scale_inv .*'compressed-tensors'",
    ),
    "static": ("fp8-current", {"layout": "modelopt"}, r"lpq\.calibrate first, or give input_amax=\{…\}"),
    "none": (None, {"layout": "modelopt"}, "no layer has a quantized weight .*: convert the model first"),
    "none left": ("mxfp8", {"leave": ["*"]}, r"no layer has a quantized weight .*: leave=\['\*'\] keeps them all"),
    "leave": ("mxfp8", {"layout": "modelopt", "leave": ["nothing"]}, "leave has nothing, and the model has no"),
    "amax": ("mxfp8", {"layout": "modelopt", "input_amax": {"x": 1.0}}, "input_amax has x, and the model has no"),
    "random": ("x=bf16, w=nvfp4(stochastic=true), dy=bf16", {"layout": "modelopt"}, "which rounds stochastically"),
    "base": ("mxfp8", {"layout": "modelopt", "base": "nowhere"}, "base='nowhere' is no directory"),
    "dtype": ("nvfp4", {"dtype": "bfloat16"}, "dtype='bfloat16': it is one of torch.float32, torch.bfloat16"),
    "integers": ("nvfp4", {"dtype": torch.int8}, "dtype=torch.int8: it is"),
    "no bytes": ("nvfp4", {"shard_bytes": 0}, "shard_bytes=0: it is the most bytes of one file, as 5_000_000_000"),
    "a text": ("nvfp4", {"shard_bytes": "5GB"}, "shard_bytes='5GB': it is"),
    "siblings": ("nvfp4", {"siblings": "all"}, "siblings='all': it is 'alike' or 'any'"),
    "left": ("nvfp4", {"leave": None}, "leave=None: it is a list of names"),
    "left numbers": ("nvfp4", {"leave": [3]}, r"leave=\[3\]: it is a list of names"),
    "one amax": ("nvfp4", {"input_amax": 3.0}, r"input_amax=3\.0: it is a mapping of layers to numbers"),
    "no amax": (
        "nvfp4", {"input_amax": {"blocks.0.mlp.up_proj": None}},
        r"input_amax has None for blocks\.0\.mlp\.up_proj, and no number",
    ),
    "many": (
        "nvfp4", {"input_amax": {"blocks.0.mlp.up_proj": torch.ones(3)}}, "and no number or tensor of one element",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_layout_has_no_place_for_is_refused_by_name(why: str, tmp_path: Path) -> None:
    recipe, options, words = REFUSED[why]
    model = lpq.convert(Net(), recipe if recipe is not None else {"rules": [{"match": "*", "recipe": "bf16"}]})
    with pytest.raises(CheckpointError, match=f"nothing is exported to {re.escape(str(tmp_path / 'x'))}: .*{words}"):
        lpq.export(model, tmp_path / "x", **options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_model_that_is_one_layer_has_no_name_for_engines(recipe: str, tmp_path: Path) -> None:
    """Nor has its checkpoint. In a module that names it the layer is exported."""
    model = lpq.convert(nn.Linear(64, 64), recipe)
    lpq.checkpoint.save(model, tmp_path / "run", step=1)
    for source in (model, tmp_path / "run"):
        with pytest.raises(CheckpointError, match="the model is one layer, and engines know layers by name"):
            lpq.export(source, tmp_path / "x", layout="compressed-tensors")
    with pytest.raises(CheckpointError, match="cannot be streamed: the model is one layer"):
        next(lpq.export.stream(model, "compressed-tensors"))
    done = lpq.export(nn.Sequential(model), tmp_path / "x", layout="compressed-tensors")
    assert [*done.layers.values()] == [("0",)]


def test_a_place_that_cannot_be_one_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (
        (tmp_path / "file" / "x", r"x\.partial cannot be made: "),
        (None, "path must be str or Path, got NoneType"),
    ):
        with pytest.raises(CheckpointError, match=words):
            lpq.export(lpq.convert(Net(), "mxfp8"), place, layout="modelopt")  # type: ignore[arg-type]


def test_columns_that_cut_a_block_are_refused_and_may_be_left(tmp_path: Path) -> None:
    model = lpq.convert(Net(width=72), "nvfp4")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is 72x72, and its columns are no multiple of 16"):
        lpq.export(model, tmp_path / "x", layout="modelopt")
    done = lpq.export(model, tmp_path / "x", layout="modelopt", leave=["*attn*", "*up_proj"])
    assert [*done.layers.values()] == [("blocks.0.mlp.down_proj",)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_a_weight_that_is_not_finite_is_refused_by_name(recipe: str, value: float, tmp_path: Path) -> None:
    model: Any = lpq.convert(Net(), recipe)
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight[3, 5] = value
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.up_proj\.weight\w* has values that are not finite"):
        lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_a_weight_of_zeros_has_no_scale_that_an_engine_could_not_divide_by(recipe: str) -> None:
    model: Any = lpq.convert(Net(), recipe)
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight.zero_()
    for layout in ("compressed-tensors", "modelopt"):
        amax = dict.fromkeys(layers(model), 1.0)
        found = dict(lpq.export.stream(model, layout, input_amax=amax))
        whole = [t for n, t in found.items() if "mlp.up_proj" in n and t.numel() == 1]
        assert len(whole) == 2
        assert all(t.isfinite().all() and (t > 0).all() for t in whole)


def test_an_export_that_ends_half_way_leaves_nothing_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lpq.convert(Net(), "mxfp8")
    made = plan.Assigned.tensors

    def interrupted(self: Any, pieces: Any) -> Any:
        if "down_proj" in self.entry.name:
            raise KeyboardInterrupt
        return made(self, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(plan.Assigned, "tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lpq.export(model, tmp_path / "x", layout="modelopt")
    assert not [*tmp_path.iterdir()]
    killed = tmp_path / "x.partial"  # what a process leaves that was killed
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    (killed / claim.LOCK).touch()
    lpq.export(model, tmp_path / "x", layout="modelopt")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(CheckpointError, match="is there already"):
        lpq.export(model, tmp_path / "x", layout="modelopt")


def test_no_link_out_of_the_base_is_followed(tmp_path: Path) -> None:
    """Those within it are, and those of Hugging Face's cache, whose directories have nothing else."""
    (tmp_path / "secret").write_text("{}")
    cache = tmp_path / "models--a--b"
    base, blobs = cache / "snapshots" / "0123", cache / "blobs"
    base.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ab").write_text('{"architectures": ["A"]}')
    for name in ("config.json", "tokenizer.json"):
        (base / name).symlink_to(Path("../../blobs/ab"))
    (base / "again.txt").symlink_to(Path("tokenizer.json"))
    model = lpq.convert(Net(), "mxfp8")
    (tmp_path / "link").symlink_to(base)
    done = lpq.export(model, tmp_path / "x", base=tmp_path / "link")
    assert [(done.path / name).read_bytes() for name in ("tokenizer.json", "again.txt")] == [
        (blobs / "ab").read_bytes()
    ] * 2
    for name in ("tokenizer.json", "config.json", "other.txt"):
        here = tmp_path / f"base-{name}"
        here.mkdir()
        (here / name).symlink_to(Path("../secret"))
        with pytest.raises(CheckpointError, match=rf"{name} is a link to .*secret, outside of the directory, .*base="):
            lpq.export(model, tmp_path / "y", base=here)
        assert not (tmp_path / "y").exists()
        assert not (tmp_path / "y.partial").exists()


def test_small_files_of_the_base_are_copied(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "model.safetensors", "pytorch_model.bin"):
        (base / name).write_text(name)
    (base / "config.json").write_text(
        '{"model_type": "own", "architectures": ["Own"], "quantization_config": {"quant_method": "other"}}'
    )
    model = lpq.convert(Net(), "mxfp8")
    assert lpq.export(model, tmp_path / "x", layout="modelopt", base=base).notes == ()
    (note,) = lpq.export(model, tmp_path / "y", layout="modelopt").notes
    assert "has no architecture, by which engines build the model: give base=" in note
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {
        "tokenizer.json", "tokenizer.model", "chat_template.jinja", "config.json", "hf_quant_config.json",
        "model.safetensors",
    }  # fmt: skip
    assert (tmp_path / "x" / "tokenizer.json").read_text() == "tokenizer.json"
    assert json.loads((tmp_path / "x" / "config.json").read_text())["model_type"] == "own"
    assert tiny.config(tmp_path / "x")["quant_method"] == "modelopt"


def test_the_command_exports_a_checkpoint(tmp_path: Path, lpq_command: Command) -> None:
    model = lpq.convert(Net(), "mxfp8")
    run = lpq.checkpoint.save(model, tmp_path / "run", step=3).parent
    options = ["--layout", "modelopt", "--dtype", "bfloat16", "--leave", "*.down_proj"]
    ended = lpq_command("export", run, tmp_path / "x", *options)
    assert ended.status == 0
    assert "3 layers: MXFP8" in ended.out
    assert "down_proj  " not in ended.out
    expected = dict(lpq.export.stream(model, "modelopt", dtype=torch.bfloat16, leave=["*.down_proj"]))
    assert equal_states(tensors(tmp_path / "x"), expected)
    ended = lpq_command("export", run, tmp_path / "y", "--layout", "modelop")
    assert ended.status == 2
    assert "did you mean 'modelopt'?" in ended.err
    for dtype, noted in (("float32", True), ("bfloat16", False)):
        ended = lpq_command("export", run, tmp_path / dtype, "--dtype", dtype)
        assert ended.status == 0
        assert ("transformers decodes these weights into bfloat16" in ended.out) == noted
    rows = [line.split() for line in lpq_command("export", run, tmp_path / "full", *options, "--full").out.splitlines()]
    layers = [name for name, module in model.named_modules() if isinstance(module, lpq.nn.Linear)]
    kinds = {row[0]: row[1] for row in rows if row and row[0] in layers}
    assert kinds == {name: "high" if name.endswith("down_proj") else "MXFP8," for name in layers}


def test_the_command_warns_in_words_alone(tmp_path: Path, lpq_command: Command) -> None:
    """There is no line of the user's to which the warning could point."""
    model = nn.ModuleDict({"q_proj": nn.Linear(64, 64), "k_proj": nn.Linear(64, 64)})
    ended = lpq_command("export", lpq.checkpoint.save(lpq.convert(model, "nvfp4"), tmp_path / "run"), tmp_path / "x")
    assert ended.status == 0
    (line,) = ended.err.splitlines()
    assert line.startswith("lpq: engines fuse k_proj, q_proj and give them one scale")


@pytest.mark.parametrize("weights", [None, "quantized"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", tiny.MIXTURE], ids=str)
def test_a_checkpoint_is_exported_as_its_model_is(recipe: Any, weights: Any, tmp_path: Path) -> None:
    model: Any = lpq.convert(Net(), recipe, weights=weights)
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    lpq.checkpoint.save(model, tmp_path / "run", step=3)
    options = {"layout": "compressed-tensors"}
    lpq.export(model, tmp_path / "model", **options)
    lpq.export(tmp_path / "run", tmp_path / "saved", **options)
    assert equal_states(tensors(tmp_path / "model"), tensors(tmp_path / "saved"))
    mine, theirs = tiny.config(tmp_path / "model"), tiny.config(tmp_path / "saved")
    assert {*mine.pop("ignore")} <= {*theirs.pop("ignore")}
    assert len(mine["config_groups"]) == len(theirs["config_groups"])


def test_a_checkpoint_of_which_a_shape_was_changed_is_refused(tmp_path: Path) -> None:
    """In words about its file; the scheme, which has declared something else, is not at fault."""
    path = lpq.checkpoint.save(lpq.convert(Net(), "nvfp4", weights="quantized"), tmp_path / "saved")
    described = json.loads((path / "lpq.json").read_text())
    name, entry = next(iter(described["quantized"].items()))
    entry["shape"] = [2**40, 2**20]
    raw, manifest = json.dumps(described).encode(), json.loads((path / "manifest.json").read_text())
    (path / "lpq.json").write_bytes(raw)
    manifest["files"]["lpq.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    words = rf"its lpq\.json has {re.escape(name.removeprefix('model.'))} as \[{2**40}, {2**20}\], and its data is \["
    with pytest.raises(CheckpointError, match=words):
        lpq.export(path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_inputs_with_an_amax_for_each_row_have_one_scale_in_files(layout: str, tmp_path: Path) -> None:
    """Engines that measure each row read files as of `nvfp4`, and leave the scale out. A note says what others do."""
    rows, one = (lpq.convert(Net(dtype=torch.bfloat16), name) for name in ("nvfp4-row-fwd-mxfp8-bwd", "nvfp4"))
    amax = dict.fromkeys(layers(rows), 3.75)
    done = lpq.export(rows, tmp_path / "rows", layout=layout, input_amax=amax)
    lpq.export(one, tmp_path / "one", layout=layout, input_amax=amax)
    assert equal_states(tensors(done.path), tensors(tmp_path / "one"))
    assert tiny.config(done.path) == tiny.config(tmp_path / "one")
    assert [note for note in done.notes if "training with a scale for each row" in note]
    assert "4 layers: NVFP4, inputs in high precision" in str(lpq.export(rows, tmp_path / "weights", layout=layout))


@pytest.mark.parametrize(
    ("recipe", "same", "other"),
    [
        ("mxfp8-one-copy", "mxfp8", "mxfp4"),
        ("fp8-block-one-copy", "fp8-block", "fp8-row"),
        ("nvfp4-eden", "x=bf16, w=nvfp4(search=four_over_six, norm=256), dy=bf16", "nvfp4"),
        ("nvfp4-eden-delayed", "nvfp4-eden", "nvfp4"),
        ("nvfp4-row-fwd-decoded-bwd", "x=bf16, w=nvfp4(), dy=bf16", "nvfp4-eden"),
    ],
)
def test_files_have_the_row_operand_whatever_the_column_operand_is_made_of(
    recipe: str, same: str, other: str, tmp_path: Path
) -> None:
    files = []
    for name in (recipe, same, other):
        torch.manual_seed(0)
        model = lpq.convert(Net(dtype=torch.bfloat16), name)
        files.append(tensors(lpq.export(model, tmp_path / str(len(files)), layout="compressed-tensors").path))
    assert equal_states(files[0], files[1])
    assert not equal_states(files[0], files[2])
