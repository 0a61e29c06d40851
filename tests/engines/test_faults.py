"""Files that are damaged, edited or somebody's trap: refused with the name of the file and of the tensor, unread."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import equal_states
from tiny import FLOAT_SCALES, Net, layers, tensors
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import lpq
from lpq.checkpoint import CheckpointError
from lpq.files.safetensors import TensorKind, Writer

UP = "blocks.0.mlp.up_proj"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in one file, in several, and in another layout."""
    folder = tmp_path_factory.mktemp("exported")
    model = lpq.convert(Net(), "fp8-current")
    amax = {n: 2.0 for n, m in model.named_modules() if isinstance(m, lpq.nn.Layer) and m.recipe is not None}
    done = {
        "one": lpq.export(model, folder / "one", layout="compressed-tensors", input_amax=amax),
        "many": lpq.export(model, folder / "many", layout="compressed-tensors", shard_bytes=20_000),
        "nvfp4": lpq.export(lpq.convert(Net(), "nvfp4"), folder / "nvfp4", layout="modelopt"),
        "mxfp8": lpq.export(lpq.convert(Net(), "mxfp8"), folder / "mxfp8", layout="modelopt"),
        "block": lpq.export(lpq.convert(Net(), "fp8-block"), folder / "block", layout="fp8-block"),
    }
    return {name: one.path for name, one in done.items()}


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def write(path: Path, found: dict[str, Tensor]) -> None:
    writer = Writer(path / "model.safetensors", {n: TensorKind.of(t) for n, t in found.items()})
    for name, tensor in found.items():
        writer.add(name, tensor)
    writer.close()


def storage(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Write a model's file anew, with other tensors."""

    def apply(path: Path) -> None:
        found = tensors(path)
        change(found)
        write(path, found)

    return apply


def with_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = json.loads((path / name).read_text())
        change(data)
        (path / name).write_text(json.dumps(data))

    return apply


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Write a part of one layer anew."""
    return storage(lambda t: t.update({f"{UP}.{name}": change(t[f"{UP}.{name}"])}))


def coded(tensor: Tensor, at: int, code: int) -> Tensor:
    tensor.view(torch.uint8).view(-1)[at] = code
    return tensor


def without(name: str) -> Callable[[Path], None]:
    return storage(lambda t: t.pop(name))


def with_config(**entries: Any) -> Callable[[Path], None]:
    """Edit the description of the layout."""
    return with_json("config.json", lambda c: c["quantization_config"].update(entries))


def with_group(**entries: Any) -> Callable[[Path], None]:
    """Edit the only group of layers."""
    return with_json("config.json", lambda c: c["quantization_config"]["config_groups"]["group_0"].update(entries))


def with_text(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Edit the text of a file's header, and leave the bytes of its tensors."""

    def apply(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        text = change(data[8:end].rstrip())
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return apply


def with_header(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Edit what the file says of its tensors."""

    def edited(text: bytes) -> bytes:
        header = json.loads(text)
        change(header)
        return json.dumps(header).encode()

    return with_text(edited)


def said(**entries: Any) -> Callable[[Path], None]:
    """Edit what the file says of one weight."""
    return with_header(lambda header: header[f"{UP}.weight"].update(entries))


def truncated(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])


class Trap:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle was run')",)


def pickled(path: Path) -> None:
    (path / "model.safetensors").write_bytes(pickle.dumps(Trap()))


def saved_by_torch(path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, path / "model.safetensors")


def only_a_bin(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def first(index: Any) -> str:
    return str(next(iter(index["weight_map"])))


def elsewhere(to: str) -> Callable[[Path], None]:
    """Let the index refer to another file."""
    return with_json(INDEX, lambda index: index["weight_map"].update({first(index): to}))


def with_large_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((17 << 20).to_bytes(8, "little"))
    os.truncate(path / "model.safetensors", 18 << 20)


INDEX = "model.safetensors.index.json"
ONE = r"model\.safetensors"
CUT = rf"{ONE} is no safetensors, was cut off or changed: "
UNKNOWN = "no format that is installed has weights as in its group_0"
FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": ("one", truncated, rf"{CUT}.*not fully covered"),
    "empty": ("one", lambda p: (p / "model.safetensors").write_bytes(b""), rf"{CUT}.*too small"),
    "no file": ("one", lambda p: (p / "model.safetensors").unlink(), rf"neither {ONE} nor {ONE}\.index\.json"),
    "more behind": ("one", lambda p: (p / "model.safetensors").open("ab").write(b"more"), rf"{CUT}.*not fully covered"),
    "pickle": ("one", pickled, rf"{ONE}: it is a pickle.* are not read"),
    "torch.save": ("one", saved_by_torch, rf"{ONE}: it is a pickle, as torch\.save writes them"),
    "only a .bin": ("one", only_a_bin, r"pytorch_model\.bin is a pickle, which can run code"),
    "header": ("one", said(shape=[128, 128]), rf"{CUT}.*invalid shape, data type, or offset"),
    "overlap": ("one", said(data_offsets=[0, 32768]), rf"{CUT}.*invalid offset for tensor"),
    "negative": ("one", said(data_offsets=[-5, 32763]), rf"{CUT}.*invalid value: integer `-5`"),
    "dtype": ("one", said(dtype="F8_E4M3FNUZ"), rf"{ONE}: '{UP}\.weight' is of dtype 'F8_E4M3FNUZ', which is none"),
    "no dtype": ("one", said(dtype="F3"), rf"{CUT}.*unknown variant `F3`"),
    "a name twice": (
        "one", with_text(lambda text: re.sub(rb'("[^"]*":\{"dtype"[^}]*\})', rb"\1,\1", text, count=1)),
        rf"{CUT}it has a name twice",
    ),
    "deep": ("one", with_text(lambda text: b'{"a":' * 10**5 + text + b"}" * 10**5), rf"{CUT}.*recursion limit"),
    "missing scale": (
        "one", without(f"{UP}.weight_scale"),
        rf"{UP} has weight, input_scale and lacks weight_scale|{UP} has .* lacks weight_scale",
    ),
    "missing input scale": ("one", without(f"{UP}.input_scale"), rf"{UP} has .* lacks input_scale"),
    "missing weight": ("nvfp4", without(f"{UP}.weight"), rf"{UP} has .* lacks weight"),
    "missing norm": ("one", without("blocks.0.norm.weight"), r"have nothing for .*: blocks\.0\.norm\.w"),
    "unknown tensor": (
        "one", storage(lambda t: t.update({f"{UP}.zero_point": torch.ones(1)})),
        rf"has no place: {UP}\.zero_point",
    ),
    "shape of a weight": (
        "one", changed("weight", lambda t: t[:128]),
        rf"{UP}\.weight has shape \[128, 128\], and for a weight of 256x128 it is \[256, 128\]",
    ),
    "shape of scales": (
        "nvfp4", changed("weight_scale", lambda t: t.t().contiguous()),
        rf"{UP}\.weight_scale has shape \[8, 256\], and for a weight of 256x128 it is \[256, 8\]",
    ),
    "dtype of scales": (
        "nvfp4", changed("weight_scale", Tensor.float),
        rf"{UP}\.weight_scale is torch\.float32, and NVFP4 has torch\.float8_e4m3fn there",
    ),
    "scale of zero": (
        "one", changed("weight_scale", Tensor.zero_), rf"{UP}\.weight_scale is \[0\.0\], and engines divide",
    ),
    "scale of NaN": (
        "nvfp4", changed("weight_scale_2", lambda t: t.fill_(torch.nan)), rf"{UP}\.weight_scale_2 has values that",
    ),
    "exponent of NaN": (
        "mxfp8", changed("weight_scale", lambda t: coded(t, 5, 255)),
        rf"{UP}\.weight_scale has values that are not finite",
    ),
    "code of NaN": (
        "mxfp8", changed("weight", lambda t: coded(t, 7, 255)), rf"{UP}\.weight has values that are not finite",
    ),
    "shape of a norm": (
        "one", storage(lambda t: t.update({"blocks.0.norm.weight": torch.ones(3)})),
        r"norm\.weight has shape \[3\]",
    ),
    "codes that nobody announced": (
        "one", with_config(ignore=["lm_head", UP]),
        rf"{UP}\.weight is torch\.float8_e4m3fn and not quantized in the files, and torch\.float32 in the model: cast",
    ),
    "method": (
        "one", with_config(quant_method="modelop"),
        "quant_method is 'modelop', and no layout .* did you mean 'modelopt'",
    ),
    "no method": ("one", with_json("config.json", lambda c: c.clear()), "a model in high precision"),
    "bits": (
        "one", with_group(weights={"num_bits": 3, "type": "float", "strategy": "tensor", "symmetric": True}), UNKNOWN,
    ),
    "rotated": (
        "one", with_config(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        r"its transform_config is .*R1.* weights were rotated",
    ),
    "sparse": ("one", with_config(sparsity_config={"format": "sparse-24-bitmask"}), "its weights are sparse"),
    "outputs": ("one", with_group(output_activations={"num_bits": 8}), "engines encode the outputs of its group_0"),
    "format": ("one", with_group(format="mxfp8-quantized"), "the format of its group_0 is 'mxfp8-quantized', and FP8"),
    "zero points": (
        "one", with_group(weights={"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": False}), UNKNOWN,
    ),
    "no targets": ("one", with_group(targets=["LlamaAttention"]), "no tensor of the files is one of theirs"),
    "ignored text": ("one", with_config(ignore="lm_head"), "'lm_head' are no names or patterns of layers"),
    "scales below 0": (
        "nvfp4", changed("weight_scale", lambda t: (t.view(torch.uint8) | 128).view(t.dtype)),
        rf"{UP}\.weight_scale has scales below 0",
    ),
    "fmt": ("block", with_config(fmt="e5m2"), "its fmt is 'e5m2', and lpq reads 'e4m3' there"),
    "fp4": ("block", with_config(expert_dtype="fp4"), "its expert_dtype is 'fp4', and lpq reads 'fp8' there"),
    "tables": ("block", with_config(modules_to_convert=["embed"]), r"its modules_to_convert is \['embed'\], and lpq"),
    "scale_fmt": ("block", with_config(scale_fmt="e5m10"), "no format that is installed has .*'scale_fmt': 'e5m10'"),
    "no groups": ("one", with_config(config_groups=[]), "its config_groups are"),
    "bad pattern": ("one", with_config(ignore=["re:["]), r"'\[' is no pattern of layers that lpq reads: unterminated"),
    "no pattern": ("one", with_config(ignore=[3]), "are no names or patterns"),
    "large header": ("one", with_large_header, rf"{ONE}: its header has 17825792 bytes, and at most 16777216 are read"),
    "large config": (
        "one", lambda p: os.truncate(p / "config.json", 65 << 20),
        r"config\.json cannot be read: .*it has more than 64 MiB",
    ),
    "algorithm": ("nvfp4", with_config(quant_algo="INT4"), "quant_algo='INT4'"),
    "block": ("block", with_config(weight_block_size=[1, 64]), r"no format that is installed has .*64"),
    "config": ("one", lambda p: (p / "config.json").write_text("{"), r"config\.json cannot be read"),
    "config that nests": (
        "one", lambda p: (p / "config.json").write_text("[" * 100_000), "it is nested too deep",
    ),
    "config of a list": ("one", lambda p: (p / "config.json").write_text("[]"), r"config\.json is \[\], and no table"),
    "no config": ("one", lambda p: (p / "config.json").unlink(), r"it has no config\.json"),
    "outside": ("many", elsewhere("../model.safetensors"), r"refers to '\.\./model\.safetensors', which is not"),
    "absolute": ("many", elsewhere("/etc/passwd"), "refers to '/etc/passwd', which is not the name"),
    "index to a pickle": ("many", elsewhere("model.bin"), r"refers to 'model\.bin', which is no safetensors"),
    "index to nothing": ("many", elsewhere("model-9.safetensors"), r"model-9\.safetensors, .* is missing"),
    "index to another": ("many", elsewhere("model-00002-of-00009.safetensors"), r"is missing|is not in model-00002-of"),
    "not in the index": (
        "many", with_json(INDEX, lambda i: i["weight_map"].pop(first(i))), "which .*index.json does not list",
    ),
    "no map": ("many", with_json(INDEX, lambda i: i.update(weight_map=[])), "has no weight_map"),
}  # fmt: skip


HEADERS = {
    "missing norm", "unknown tensor", "shape of a weight", "shape of scales", "dtype of scales", "shape of a norm",
    "codes that nobody announced",
}  # fmt: skip
"""Faults that show without a value, so that a model is not converted."""


@contextlib.contextmanager
def refused(model: nn.Module, words: str) -> Iterator[pytest.ExceptionInfo[CheckpointError]]:
    """Expect an error, and that nothing is written to a model, which is not converted if it was not."""
    before, kinds = {name: tensor.clone() for name, tensor in model.state_dict().items()}, [*map(type, model.modules())]
    with pytest.raises(CheckpointError, match=words) as error:
        yield error
    assert [*map(type, model.modules())] == kinds
    assert equal_states(model.state_dict(), before)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_in_words(fault: str, exported: dict[str, Path], tmp_path: Path) -> None:
    kind, damage, words = FAULTS[fault]
    folder = copied(exported[kind], tmp_path / "x")
    recipe = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "block": "fp8-block"}.get(kind, "fp8-current")
    lpq.load_quantized(Net(), folder, policy=recipe)  # before
    damage(folder)
    for model in (lpq.convert(Net(), recipe), *([Net()] if fault in HEADERS else [])):
        with refused(model, f"{folder} cannot be loaded: .*(?:{words})"):
            lpq.load_quantized(model, folder)


UNFIT: dict[str, tuple[str, Any, str, str]] = {
    "format": ("one", "mxfp8", r"q_proj\.weight is FP8 per tensor in the files \(fp8\), and stored as mxfp8", "fp8"),
    "one layer": (
        "one", {"rules": [{"match": "*.up_proj", "recipe": "nvfp4"}, {"match": "*_proj", "recipe": "fp8-current"}]},
        r"up_proj\.weight is FP8 per tensor in the files \(fp8\), and stored as nvfp4\(block=16x16\)", "fp8",
    ),
    "high precision": (
        "one", lpq.policy("fp8-current", include="all"),
        r"lm_head\.weight is torch\.float32 and not quantized in the files, and stored as fp8", "fp8",
    ),
    "options": (
        "fp8-block", "fp8-block", r"FP8 per block .*pow2=false\)\), and stored as fp8\(scaling=block, .*128\):",
        "fp8(scaling=block, pow2=false, block=128x128)",
    ),
    "scales": (
        "compressed-tensors", "fp8-block",
        r"its scales are no powers of two, as the scales of fp8\(scaling=block, block=128x128\)",
        "fp8(scaling=block, pow2=false, block=128x128)",
    ),
    "rows": ("rows", "nvfp4", r"q_proj: its rows have scales of their own, and nvfp4\(block=16x16\)", "nvfp4"),
}  # fmt: skip


@pytest.mark.parametrize("why", UNFIT)
def test_a_policy_that_does_not_fit_is_refused_with_one_that_does(
    why: str, exported: dict[str, Path], tmp_path: Path
) -> None:
    """Before the model is converted, so that it can be loaded by the other one."""
    kind, policy, words, fits = UNFIT[why]
    if kind in ("fp8-block", "compressed-tensors"):
        lpq.export(lpq.convert(Net(), FLOAT_SCALES), tmp_path / "x", layout=kind)
    elif kind == "rows":
        lpq.export(lpq.convert(Net(), "x=nvfp4(), w=nvfp4(), dy=bf16"), tmp_path / "x", layout="modelopt")
    path, model = exported.get(kind, tmp_path / "x"), Net()
    with refused(model, words) as error:
        lpq.load_quantized(model, path, policy=policy)
    said = re.search(r"policy=(\{.*\}); or by weights=None", str(error.value))
    assert said is not None
    read: Any = lpq.load_quantized(model, path, policy=ast.literal_eval(said[1]))
    stored = {str(layer.weight.row.quantizer) for layer in layers(read).values()}
    assert (stored, len(layers(read))) == ({fits}, 4)
    lpq.load_quantized(Net(), path, policy=policy, weights=None)


def test_a_converted_model_that_does_not_fit_is_told_the_recipes_that_do(exported: dict[str, Path]) -> None:
    model = lpq.convert(Net(), "mxfp8", weights="quantized")
    words = r"stored as mxfp8: convert by what fits .*'recipe': 'x=mxfp8\(\), w=fp8\(\), dy=mxfp8\(\)'"
    with pytest.raises(CheckpointError, match=words):
        lpq.load_quantized(model, exported["one"])


def named(*names: str) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(128, 128)) for name in names))


def test_a_name_like_a_pattern_is_of_its_layer_alone(tmp_path: Path) -> None:
    """Where files are loaded, in the policy that fits them, and in the remedy of an export."""
    names = "w[0]", "w0"
    policy = {"rules": [{"match": "w[[]0]", "recipe": "fp8-current"}, {"match": "w0", "recipe": "mxfp8"}]}
    model = lpq.convert(named(*names), policy)
    lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    read = layers(lpq.load_quantized(named(*names), tmp_path / "x"))
    assert {name: str(layer.weight.row.quantizer) for name, layer in read.items()} == {"w[0]": "fp8", "w0": "mxfp8"}
    with pytest.raises(CheckpointError) as unfit:
        lpq.load_quantized(named(*names), tmp_path / "x", policy="mxfp4")
    said = re.search(r"policy=(\{.*\}); or by weights=None", str(unfit.value))
    assert said is not None
    assert len(layers(lpq.load_quantized(named(*names), tmp_path / "x", policy=ast.literal_eval(said[1])))) == 2
    with pytest.raises(CheckpointError) as unfit:
        lpq.export(model, tmp_path / "y", layout="fp8-block")
    said = re.search(r"or keep all 2 layers without a place in high precision, leave=(\[.*\])$", str(unfit.value))
    assert said is not None
    assert ast.literal_eval(said[1]) == ["w[[]0]", "w0"]
    with pytest.raises(CheckpointError, match=r"w0.*, or keep the layer in high precision, leave=\['w0'\]$"):
        lpq.export(model, tmp_path / "y", layout="fp8-block", leave=["w[[]0]"])


@pytest.mark.parametrize("amax", [None, {"a": 0.0, "b": 1.0, "c": float("nan")}])
def test_all_layers_that_an_export_refuses_are_named_at_once(amax: Any) -> None:
    recipe = "fp8-current" if amax else "x=bf16, w=nvfp4(stochastic=true), dy=bf16"
    rules = [{"match": "b", "recipe": "fp8-current"}, {"match": "*", "recipe": recipe}]
    model = lpq.convert(named("a", "b", "c"), {"rules": rules})
    with pytest.raises(CheckpointError, match=r"keep all 2 layers without a place .*, leave=\['a', 'c'\]$"):
        lpq.export.stream(model, "modelopt", input_amax=amax or {"b": 1.0})


def test_a_weight_without_its_row_operand_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    lpq.export(lpq.convert(named("a", "b"), "mxfp8"), tmp_path / "x", layout="compressed-tensors")
    model: Any = lpq.convert(named("a", "b"), "mxfp8")
    stored = lpq.quantizer("mxfp8").quantize(model.b.weight.detach(), row=False)
    model.b.weight = nn.Parameter(stored, requires_grad=False)
    before = model.a.weight.detach().clone()
    for work in (lpq.load_quantized, lpq.export):
        with pytest.raises(CheckpointError, match=r"b\.weight is stored without its row operand, which engines mult"):
            work(model, tmp_path / "x")
    assert torch.equal(model.a.weight.detach(), before)


def test_another_architecture_is_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    words = r"weights of linear layers that the model has not: blocks\.0\.mlp.*; build the model that was exported"
    with pytest.raises(CheckpointError, match=words):
        lpq.load_quantized(nn.Sequential(nn.Linear(16, 16)), exported["one"])
    with pytest.raises(CheckpointError, match=r"embed\.weight has shape \[64, 128\], and in .* \[64, 256\]: make"):
        lpq.load_quantized(Net(width=256), exported["one"])
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(CheckpointError, match=r"embed\.weight is on the meta device"):
        lpq.load_quantized(empty, exported["one"])
    with pytest.raises(CheckpointError, match=r"it is a file: give the directory"):
        lpq.load_quantized(Net(), exported["one"] / "model.safetensors")
    lpq.export(lpq.convert(nn.Sequential(nn.Linear(16, 16)), "mxfp8"), tmp_path / "one.pt", layout="lpq")
    with pytest.raises(CheckpointError, match=r"it is a file: .*; lpq\.checkpoint\.import_file reads"):
        lpq.load_quantized(Net(), tmp_path / "one.pt")
    with pytest.raises(CheckpointError, match=r"path must be str or Path, got NoneType"):
        lpq.load_quantized(Net(), None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no such directory"):
        lpq.load_quantized(Net(), tmp_path / "nothing")


def test_a_block_of_rows_with_scales_of_their_own_is_no_square(exported: dict[str, Path], tmp_path: Path) -> None:
    """A scale for 16 rows is written 16 times; where the 16 differ, only a format of single rows has a place."""
    folder = copied(exported["nvfp4"], tmp_path / "x")
    storage(lambda t: t[f"{UP}.weight_scale"].view(torch.uint8)[3].sub_(1))(folder)
    with pytest.raises(CheckpointError, match=rf"{UP}: its rows have scales of their own, and nvfp4\(block=16x16\)"):
        lpq.load_quantized(Net(), folder, policy="nvfp4")
    read: Any = lpq.load_quantized(Net(), folder)
    assert str(read.blocks[0].mlp.up_proj.weight.row.quantizer) == "nvfp4"


@pytest.mark.parametrize("how", ["pruned", "parametrized"])
def test_a_layer_whose_weight_is_computed_is_refused_and_not_left_out(how: str, tmp_path: Path) -> None:
    """A model and its checkpoint alike; a layer without a recipe is as the user has it."""

    def build(policy: Any) -> Any:
        torch.manual_seed(0)
        net: Any = nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})
        if how == "pruned":
            prune.l1_unstructured(net["up"], "weight", 0.5)
        lpq.convert(net, policy)
        if how == "parametrized":
            parametrize.register_parametrization(net["up"], "weight", nn.Identity())
        return net

    model = build("fp8-row")
    lpq.checkpoint.save(model, tmp_path / "run")
    for source in (model, tmp_path / "run"):
        with pytest.raises(CheckpointError, match=r"weight of up is computed in each pass.*prune\.remove"):
            lpq.export(source, tmp_path / "x")
    remove: Any = prune.remove if how == "pruned" else parametrize.remove_parametrizations
    remove(model["up"], "weight")
    lpq.export(model, tmp_path / "x")
    assert {"up.weight", "up.weight_scale"} <= tensors(tmp_path / "x").keys()
    left = {"rules": [{"match": "up", "recipe": "skip"}, {"match": "down", "recipe": "fp8-row"}]}
    assert "up" in lpq.export(build(left), tmp_path / "y").left


def test_layers_of_in_by_out_stay_in_high_precision_and_that_is_said(tmp_path: Path) -> None:
    """In a model and in its checkpoint, also a square one; engines would take rows for columns."""
    utils: Any = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    net: Any = nn.ModuleDict({"c": utils.Conv1D(64, 64), "d": utils.Conv1D(64, 64), "up": nn.Linear(64, 64)})
    rules = [{"match": "d", "recipe": "bf16"}, {"match": "*", "recipe": "fp8-row"}]
    lpq.checkpoint.save(lpq.convert(net, {"rules": rules}), tmp_path / "run")
    assert net["c"].recipe == net["up"].recipe
    for number, source in enumerate((net, tmp_path / "run")):
        made = lpq.export(source, tmp_path / f"{number}")
        assert "c" in made.left
        assert any(note.startswith("the weights of c are [in, out]") for note in made.notes)
        found = tensors(made.path)
        assert torch.equal(found["c.weight"], net["c"].weight)
        assert {"up.weight_scale"} == {name for name in found if "scale" in name}
    alone = lpq.convert(nn.Sequential(utils.Conv1D(64, 64)), "fp8-row")
    lpq.checkpoint.save(alone, tmp_path / "alone")
    for source in (alone, tmp_path / "alone"):
        with pytest.raises(CheckpointError, match=r"quantized weight of \[out, in\]: the weights of 0 are \[in, out\]"):
            lpq.export(source, tmp_path / "x")
