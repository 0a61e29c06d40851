"""Experts that a model holds in stacks are layers in the files of engines: with the bytes of separate layers."""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import fully_shard, spawn
from support.comparing import equal_states
from support.hugging_face import small
from support.small_models import experts_apart
from tiny import tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.checkpoint import CheckpointError
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.nn import GroupedLinear, expert_stacks
from lpq.nn.expert_stacks import counted, names_in_files, numbered

pytestmark = pytest.mark.usefixtures("quiet")
COUNT, WIDTH, INNER = 4, 64, 128
LAYOUT = "compressed-tensors"


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = GroupedLinear(COUNT, WIDTH, INNER, recipe=None)
        self.down_proj = GroupedLinear(COUNT, INNER, WIDTH, bias=False, recipe=None)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.up_proj(rows, ends).relu(), ends)
        return y


class Model(nn.Module):
    """Experts in stacks, or the same ones as layers; and a router."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        stacked = Stacked()
        self.router = nn.Linear(WIDTH, COUNT)
        self.experts: Any = experts_apart(stacked) if apart else stacked


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-block", "fp8-current"])
def test_each_expert_has_the_bytes_of_a_layer(recipe: str, tmp_path: Path) -> None:
    """However the stack is kept, and of a checkpoint too; with the scales of inputs where they are given."""
    apart = lpq.convert(Model(apart=True), recipe)
    amax = {name: 2.0 + i for i, name in enumerate(tiny.layers(apart))}
    lpq.export(apart, tmp_path / "apart", layout=LAYOUT, input_amax=amax)
    expected = tensors(tmp_path / "apart")
    assert len(amax) == 2 * COUNT
    for weights in (None, "quantized"):
        model = lpq.convert(Model(), recipe, weights=weights)
        lpq.export(model, tmp_path / f"{weights}", layout=LAYOUT, input_amax=amax)
        assert equal_states(tensors(tmp_path / f"{weights}"), expected)
        assert tiny.config(tmp_path / f"{weights}")["ignore"] == ["router"]
        lpq.checkpoint.save(model, tmp_path / f"run-{weights}")
        lpq.export(tmp_path / f"run-{weights}", tmp_path / f"of-{weights}", layout=LAYOUT, input_amax=amax)
        assert equal_states(tensors(tmp_path / f"of-{weights}"), expected)
        assert tiny.config(tmp_path / f"of-{weights}")["ignore"] == ["router"]
    read: Any = lpq.load_quantized(Model(apart=True), tmp_path / "None")
    with torch.no_grad():
        x = torch.randn(8, WIDTH)
        assert torch.equal(
            read.experts[1].down_proj.weight.row.decode(), tiny.operand(apart.experts[1].down_proj).decode()
        )
        assert read.experts[1].up_proj(x).isfinite().all()
    for weights in (None, "quantized"):
        stacks: Any = lpq.load_quantized(Model(), tmp_path / "None", weights=weights)
        with torch.no_grad():
            y = stacks.experts.up_proj(x, [2, 0, 5, 1])
            for i, rows in ((0, slice(0, 2)), (2, slice(2, 7)), (3, slice(7, 8))):
                assert torch.equal(y[rows], read.experts[i].up_proj(x[rows])) or weights is None
        if weights is not None:
            lpq.export(stacks, tmp_path / "again", layout=LAYOUT)
            assert equal_states(tensors(tmp_path / "again"), expected)


def test_calibrated_experts_are_imported_with_their_scales(tmp_path: Path) -> None:
    """Static as they were, or as recipes of the user's want them; and written again with the same bytes."""
    model: Any = lpq.convert(Model(), "nvfp4")
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 17)[:, None]
    for batch in (rows, rows.flip(0)):
        lpq.calibrate(model, [batch], forward=lambda net, x: (net.router(x), net.experts(x, [4, 4, 4, 4])))
    lpq.export(model, tmp_path / "x", layout="modelopt")
    expected = tensors(tmp_path / "x")
    assert len({expected[f"experts.{i}.up_proj.input_scale"].item() for i in range(COUNT)}) == COUNT
    read: Any = lpq.load_quantized(Model(), tmp_path / "x")
    side = model.experts.up_proj.recipe.x.side("row")
    assert read.experts.up_proj.recipe.x.side("row") == side
    assert torch.allclose(read.experts.up_proj.static_values()["x_row_amax"], model.experts.up_proj.x_row_amax)
    for policy in (None, "nvfp4"):
        again = lpq.load_quantized(Model(), tmp_path / "x", policy=policy)
        lpq.export(again, tmp_path / f"{policy}", layout="modelopt")
        assert equal_states(tensors(tmp_path / f"{policy}"), expected)
    again.train()
    again.experts(rows, [4, 4, 4, 4]).sum().backward()
    lacking = {name: value for name, value in expected.items() if not name.startswith("experts.1.up_proj.")}
    safetensors: Any = pytest.importorskip("safetensors.torch")
    safetensors.save_file(lacking, tmp_path / "x" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj.*quantized and not experts\.1\.up_proj"):
        lpq.load_quantized(Model(), tmp_path / "x")


def test_experts_that_are_left_are_ignored_by_name(tmp_path: Path) -> None:
    model = lpq.convert(Model(), "mxfp8")
    lpq.export(model, tmp_path / "x", layout=LAYOUT, leave=["experts.1.*"], siblings="any")
    assert tiny.config(tmp_path / "x")["ignore"] == ["router", "experts.1.up_proj", "experts.1.down_proj"]
    assert torch.equal(tensors(tmp_path / "x")["experts.1.up_proj.weight"], model.experts.up_proj.weight[1])
    lpq.convert(model, {"rules": [{"match": "*down_proj", "recipe": "mxfp8"}]})
    with pytest.raises(CheckpointError, match=r"experts\.up_proj in high precision"):
        lpq.export(model, tmp_path / "y", layout=LAYOUT)
    lpq.export(model, tmp_path / "y", layout=LAYOUT, siblings="any")
    assert tiny.config(tmp_path / "y")["ignore"] == ["experts.up_proj", "router"]
    assert torch.equal(tensors(tmp_path / "y")["experts.up_proj.weight"], model.experts.up_proj.weight)


@pytest.mark.parametrize(
    ("layout", "recipe", "readers"),
    [
        ("modelopt", "fp8-row", ("TensorRT-LLM",)), ("modelopt", "fp8-block", ("TensorRT-LLM",)),
        ("compressed-tensors", tiny.WEIGHT_ONLY, ("SGLang", "transformers")),
    ],
)  # fmt: skip
def test_a_program_that_fails_to_load_experts_is_none_of_their_readers(
    layout: str, recipe: str, readers: tuple[str, ...], tmp_path: Path
) -> None:
    """And is one of other layers' readers."""
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(128, 128)]), "up": nn.Linear(128, 128)})
    both = lpq.export(lpq.convert(model, recipe), tmp_path / "both", layout=layout)
    assert both.readers == readers
    (note,) = [note for note in both.notes if note.startswith("vLLM fails to load experts")]
    assert "(experts.0), though not other layers" in note
    rest = lpq.export(model, tmp_path / "rest", layout=layout, leave=["experts.0"])
    assert "vLLM" in rest.readers
    assert not any("experts" in note for note in rest.notes)


def _shared_out(rank: int, ranks: int, by_fsdp: bool) -> None:
    expected = dict(lpq.export.stream(lpq.convert(Model(), "nvfp4"), LAYOUT))
    model: Any = lpq.convert(Model(), "nvfp4")
    if by_fsdp:
        fully_shard(model.experts)
    else:
        parallelize_module(model.experts, init_device_mesh("cpu", (ranks,)), ExpertParallel())
    assert isinstance(model.experts.up_proj.weight, DTensor)
    assert equal_states(dict(lpq.export.stream(model, LAYOUT)), expected)


@pytest.mark.parametrize(("ranks", "by_fsdp"), [(4, False), (2, False), (2, True)])
def test_experts_of_several_ranks_are_exported_as_of_one(ranks: int, by_fsdp: bool) -> None:
    spawn(_shared_out, ranks, ranks, by_fsdp)


# ---------------------------------------------------------------------------------------------- Hugging Face's


def fused(name: str, **sizes: Any) -> Any:
    return small(name, torch.bfloat16, **{"hidden": 128, "inner": 128, "experts": COUNT, **sizes})


POLICY = {"rules": [{"match": ["*mlp.gate", "lm_head"], "recipe": None}, {"match": "*"}]}
"""Routers and the head stay as they are."""


def policy(recipe: str) -> Any:
    (left, every) = POLICY["rules"]
    return {"rules": [left, {**every, "recipe": recipe}]}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "recipe"), [("Qwen3Moe", "fp8-block"), ("Mixtral", "fp8-block")])
def test_transformers_reads_the_experts_that_lpq_decodes(name: str, recipe: str, tmp_path: Path) -> None:
    """By the names that it has in files, from which it fuses them again."""
    import transformers

    model = lpq.convert(fused(name), policy(recipe))
    assert not lpq.export(model, tmp_path / "x", layout="fp8-block").notes
    one = "mlp.experts.2.up_proj" if name == "Qwen3Moe" else "block_sparse_moe.experts.2.w3"
    assert f"model.layers.0.{one}.weight_scale_inv" in tensors(tmp_path / "x")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.bfloat16).state_dict()
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    for key in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, key).detach()
        expected = experts.recipe.w.quantize(weight, col=False, stack=True).dequantize()
        assert torch.equal(read[f"model.layers.0.mlp.experts.{key}"], expected)
        assert not torch.equal(expected, weight)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "recipe"), [("Qwen3Moe", "fp8-block"), ("Mixtral", "nvfp4"), ("Mixtral", "mxfp8")])
def test_fused_experts_are_imported_bit_for_bit(name: str, recipe: str, tmp_path: Path) -> None:
    """Calibrated or not, and written again with the same bytes; in evaluation the imported model computes the same."""
    model = lpq.convert(fused(name), policy(recipe)).eval()
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    if recipe == "nvfp4":
        lpq.calibrate(model, [tokens])
    lpq.export(model, tmp_path / "x", layout=LAYOUT)
    expected = tensors(tmp_path / "x")
    assert any(".gate_proj." in key or ".w1." in key for key in expected)
    router = "model.layers.0.block_sparse_moe.gate" if name == "Mixtral" else "model.layers.0.mlp.gate"
    assert f"{router}.weight" in expected
    assert router in tiny.config(tmp_path / "x")["ignore"]
    read = lpq.load_quantized(fused(name), tmp_path / "x").eval()
    lpq.export(read, tmp_path / "y", layout=LAYOUT)
    assert equal_states(tensors(tmp_path / "y"), expected)
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, model(tokens).logits)
    decoded = lpq.load_quantized(fused(name), tmp_path / "x", weights=None)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(decoded.get_parameter(key), read.get_parameter(key).dequantize())
    changed = {**expected}
    scale = next(k for k in changed if "experts" in k and (".gate_proj." in k or ".w1." in k) and k.endswith("scale"))
    del changed[scale]
    safetensors: Any = pytest.importorskip("safetensors.torch")
    safetensors.save_file(changed, tmp_path / "x" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks .*scale"):
        lpq.load_quantized(fused(name), tmp_path / "x")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_stack_that_files_have_in_one_tensor_of_another_name_is_read(tmp_path: Path) -> None:
    model = lpq.convert(fused("GraniteMoe"), policy("mxfp8"))
    lpq.export(model, tmp_path / "x", layout=LAYOUT)
    key = "model.layers.0.block_sparse_moe.experts.gate_up_proj"
    assert key not in tensors(tmp_path / "x")
    other = fused("GraniteMoe", seed=1)
    assert not torch.equal(other.get_parameter(key), model.get_parameter(key))
    assert torch.equal(lpq.load_quantized(other, tmp_path / "x").get_parameter(key), model.get_parameter(key))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_others_set_on_a_stack_stays(tmp_path: Path) -> None:
    """Where the stack is stored as the files have it, and where it is cast afterwards."""
    key, seen = "model.layers.0.mlp.experts.gate_up_proj", []
    lpq.export(lpq.convert(fused("Qwen3Moe"), policy("mxfp8")), tmp_path / "x", layout=LAYOUT)
    model: Any = fused("Qwen3Moe")
    was = model.get_parameter(key)
    handle, was.mark, was.grad = was.register_hook(lambda _: None), 3, torch.ones_like(was)
    with pytest.raises(CheckpointError, match=rf"{key}: weights= replaces its weight, and loses hooks"):
        lpq.load_quantized(model, tmp_path / "x")
    assert model.get_parameter(key) is was
    handle.remove()
    optimizer = torch.optim.SGD([was], lr=1.0)
    stored: Any = lpq.load_quantized(model, tmp_path / "x").get_parameter(key)
    assert isinstance(stored, lpq.QuantizedTensor)
    assert (stored.mark, stored.grad.sum().item()) == (3, was.numel())
    with pytest.raises(RuntimeError, match=r"lpq\.convert replaced in the model"):
        optimizer.step()
    stored.register_hook(seen.append)
    stored.grad = None
    model.half()(torch.arange(32)[None]).logits.sum().backward()
    assert (stored.dtype, stored.mark, len(seen)) == (torch.float16, 3, 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("of_experts", ["bf16", "skip", "fprop=mxfp8, dgrad=bf16, wgrad=bf16"])
def test_hooks_stay_on_a_stack_that_is_not_stored(of_experts: str, tmp_path: Path) -> None:
    """And are refused on one that is, as the last recipe has it."""
    key, keeps = "model.layers.0.mlp.experts.gate_up_proj", not of_experts.startswith("fprop")
    lpq.export(lpq.convert(fused("Qwen3Moe"), policy("mxfp8")), tmp_path / "x", layout=LAYOUT)
    model: Any = fused("Qwen3Moe")
    was = model.get_parameter(key)
    was.register_hook(lambda _: None)
    rules = {"rules": [{"match": "*.experts", "recipe": of_experts}, {"match": "*", "recipe": "skip"}]}
    with nullcontext() if keeps else pytest.raises(CheckpointError, match="loses hooks"):
        lpq.load_quantized(model, tmp_path / "x", policy=rules)
    assert model.get_parameter(key) is was
    assert (type(was), bool(was._backward_hooks)) == (nn.Parameter, True)


def test_experts_that_engines_have_no_layers_for_stay_in_one_tensor_and_that_is_said(tmp_path: Path) -> None:
    model = lpq.convert(fused("GptOss"), policy("mxfp8"))
    done = lpq.export(model, tmp_path / "x", layout=LAYOUT)
    assert any("experts of model.layers.0.mlp.experts are in high precision, in one tensor" in n for n in done.notes)
    assert "model.layers.0.mlp.experts" in done.left
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors(tmp_path / "x")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("recipe", "others", "reads"),
    [
        ("fp8-row", "fp8-row", True), ("fp8-current", "fp8-current", True), ("mxfp4", "mxfp4", True),
        ("fp8-row", "mxfp8", True), ("mxfp4", "fp8-row", True), ("mxfp8", "mxfp8", False),
        ("fp8-block", "fp8-block", False), ("nvfp4", "nvfp4", False), ("nvfp4", "fp8-row", False),
    ],
)  # fmt: skip
def test_the_record_says_whether_transformers_reads_the_experts(
    recipe: str, others: str, reads: bool, tmp_path: Path
) -> None:
    """Which is so: else it fails, or decodes them to other values without a word."""
    import transformers

    rules = policy(others)
    rules["rules"].insert(1, {"match": "*.experts", "recipe": recipe})
    sizes = {"hidden": 256, "inner": 128}
    made = lpq.export(lpq.convert(fused("Qwen3Moe", **sizes), rules), tmp_path / "x", layout=LAYOUT)
    assert ("transformers" in made.readers) == reads
    assert any(note.startswith("transformers fails to load experts as") for note in made.notes) != reads
    expected: Any = lpq.load_quantized(fused("Qwen3Moe", **sizes), tmp_path / "x", weights=None)
    try:
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        assert not reads
        return
    for key in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{key}"
        assert torch.equal(read.get_parameter(name), expected.get_parameter(name)) == reads


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_that_have_another_name_in_files_are_left_by_either_name(tmp_path: Path) -> None:
    """transformers looks for the names of modules: it would wait for scales of the head, and make some up."""
    import transformers

    text = fused("Qwen3Moe").config
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    torch.manual_seed(0)
    model = lpq.convert(transformers.LlavaForConditionalGeneration(config).bfloat16(), "fp8-row")
    lpq.checkpoint.save(model, tmp_path / "run")
    of_checkpoint = lpq.export(tmp_path / "run", tmp_path / "y", layout=LAYOUT).left
    made = lpq.export(model, tmp_path / "x", layout=LAYOUT)
    assert {"lm_head", "language_model.lm_head"} <= {*made.left} <= {*of_checkpoint}
    assert "language_model.lm_head.weight" in tensors(tmp_path / "x")
    read, info = type(model).from_pretrained(tmp_path / "x", dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)
    assert read(torch.arange(32)[None]).logits.isfinite().all()


CHECKPOINTS = [
    ("Qwen3Moe", "mxfp8", 16), ("Qwen3Moe", "nvfp4", 16), ("Mixtral", "fp8-block", 16), ("GptOss", "nvfp4", 4),
    ("Llama4", "mxfp8", 7),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "recipe", "count"), CHECKPOINTS)
def test_a_checkpoint_of_fused_experts_is_exported_as_its_model_is(
    name: str, recipe: str, count: int, tmp_path: Path
) -> None:
    """The same tensors, layers and notes; those of an imported model, whose stacks are stored quantized, as well."""
    sizes = {"hidden": 64, "inner": 64, "experts": 2} if name == "Llama4" else {}
    model = lpq.convert(fused(name, **sizes), policy(recipe))
    if recipe == "nvfp4":
        lpq.calibrate(model, [torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))])
    models = {"x": model}
    made = lpq.export(model, tmp_path / "x", layout=LAYOUT)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"architectures": ["Mine"], "dtype": "bfloat16"}')
    assert sum(map(len, made.layers.values())) == count
    if name in ("Qwen3Moe", "Mixtral"):
        models["stored"] = lpq.load_quantized(fused(name), tmp_path / "x")
        stored: Any = models["stored"].get_parameter("model.layers.0.mlp.experts.down_proj")
        assert isinstance(stored, lpq.QuantizedTensor)
    for key, one in models.items():
        lpq.checkpoint.save(one, tmp_path / f"run-{key}")
        found = lpq.export(tmp_path / f"run-{key}", tmp_path / f"of-{key}", layout=LAYOUT, base=tmp_path / "base")
        assert equal_states(tensors(tmp_path / f"of-{key}"), tensors(tmp_path / "x"))
        assert {*found.left} - {*made.left} == {"model.embed_tokens"}
        assert {*made.left} <= {*found.left}
        assert found.notes == made.notes
        assert {*map(frozenset, found.layers.values())} == {*map(frozenset, made.layers.values())}


def test_a_checkpoint_that_does_not_name_its_experts_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases wrote it, or where transformers cannot name them: it would be exported in high precision."""

    def fail(model: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(lpq.checkpoint.model, "stacks_in_files", fail)
    for name, model, said in (("a", fused("Mixtral"), "experts.down_proj"), ("b", Model(), "experts.down_proj.weight")):
        lpq.checkpoint.save(lpq.convert(model, "mxfp8"), tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{said} seems to hold experts.*load it into its model"):
            lpq.export(tmp_path / name, tmp_path / "x", layout=LAYOUT)
    lpq.checkpoint.load(lpq.convert(Model(), "mxfp8"), tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "first"),
    [("experts.up_proj", "experts.0.up_proj"), ("a.b.c", "a.b.0.c"), ("up_proj", "up_proj.0"), ("1", "1.0"), ("", "0")],
)
def test_a_layer_has_a_name_of_its_own_below_the_module_that_holds_it(name: str, first: str) -> None:
    found = numbered((counted(name),), 3)
    assert found[0] == (first,)
    assert len({*found}) == 3


def test_names_in_files_are_found_for_many_tensors_whatever_the_default_dtype_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"layers.{i}.weight" for i in range(300)]

    def in_files(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{name}": value for name, value in state.items()}

    monkeypatch.setattr(expert_stacks, "_reverts", lambda model: in_files)
    torch.set_default_dtype(torch.bfloat16)  # which has no number for 257
    try:
        assert names_in_files(nn.Module(), names) == {name: f"model.{name}" for name in names}
    finally:
        torch.set_default_dtype(torch.float32)


def test_experts_that_cut_blocks_are_refused_at_once_before_anything_is_written(tmp_path: Path) -> None:
    """Of all layers, with a remedy that serves as it is: also where a checkpoint has them quantized."""
    narrow = lpq.convert(
        fused("Qwen3Moe", moe_intermediate_size=96, layers=2), policy("fp8-block"), weights="quantized"
    )
    lpq.checkpoint.save(narrow, tmp_path / "saved")
    cut = r"gate_proj\.weight is a part of a matrix that is encoded as one, and shards of 96 rows cut the blocks of 128"
    for source in (narrow, tmp_path / "saved"):
        with pytest.raises(CheckpointError, match=cut) as refused:
            lpq.export(source, tmp_path / "y", layout="fp8-block")
        found = re.search(
            r"or keep all 16 layers without a place in high precision, leave=(\[.*\])$", str(refused.value)
        )
        assert found is not None
        leave = ast.literal_eval(found[1])
        assert leave == [f"model.layers.{i}.mlp.experts.*" for i in range(2)]
        assert [*tmp_path.iterdir()] == [tmp_path / "saved"]
    (layers,) = lpq.export(tmp_path / "saved", tmp_path / "y", layout="fp8-block", leave=leave).layers.values()
    assert layers
    assert not any("experts" in name for name in layers)
    whole = narrow.get_parameter("model.layers.1.mlp.experts.gate_up_proj").dequantize()[2]
    written = [
        tensors(tmp_path / "y")[f"model.layers.1.mlp.experts.2.{name}.weight"] for name in ("gate_proj", "up_proj")
    ]
    assert torch.equal(torch.cat(written), whole)
