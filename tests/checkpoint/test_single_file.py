"""A whole model in one file: plain tensors for everybody, and bit for bit the same for a model of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import FORMATS, Net, model_differences
from support.comparing import as_bytes
from torch import nn
from torch.serialization import get_crc32_options, set_crc32_options

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError
from lpq.core import QuantizedTensor

SMALL = {name: FORMATS[name] for name in ("mx", "fp4_square")}
"""For what depends on no format."""


def test_bit_for_bit(tmp_path: Path) -> None:
    path = lpq.export(net := Net(1), tmp_path / "new" / "model.pt", layout="lpq").path
    content = torch.load(path, weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in content["model"].values())
    assert content["lpq"]["quantized"]["model.stored.mx.weight"]["quantizer"] == "mxfp8"
    assert content["model"]["stored.fp4.weight.row.data"].dtype == torch.uint8
    loaded = Net(2)
    info = checkpoint.import_file(loaded, path)
    assert model_differences(loaded, net) == {}
    assert info.policy == lpq.policy(content["lpq"]["conversions"][""]["policy"])


def test_a_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net(1, 64, SMALL)
    for path in (".", tmp_path):
        with pytest.raises(CheckpointError, match=rf"{tmp_path} is a directory, .* the name of one in it$"):
            lpq.export(net, path, layout="lpq")
    assert not list(tmp_path.iterdir())


def test_the_earlier_name_names_the_new_call(tmp_path: Path) -> None:
    net = Net(1, 64, SMALL)
    with pytest.warns(
        DeprecationWarning, match=r'removed .*: call lpq\.export\(model, path, layout="lpq", decode=True\)$'
    ):
        path = checkpoint.export_file(tmp_path / "earlier.pt", net, decode=True)
    now = lpq.export(net, tmp_path / "now.pt", layout="lpq", decode=True)
    assert (path, now.path) == (tmp_path / "earlier.pt", tmp_path / "now.pt")
    found, expected = (torch.load(one, weights_only=True) for one in (path, now.path))
    assert found["lpq"] == expected["lpq"]
    assert all(torch.equal(value, expected["model"][name]) for name, value in found["model"].items())
    with pytest.warns(DeprecationWarning, match=r'call lpq\.export\(model, path, layout="lpq"\)$'):
        checkpoint.export_file(tmp_path / "earlier.pt", net)


def test_the_record_names_what_is_stored_quantized(tmp_path: Path) -> None:
    made = lpq.export(net := Net(1), tmp_path / "model.pt", layout="lpq")
    assert (made.layout, made.left, made.notes) == ("lpq", (), ())
    assert made.layers["mxfp8"] == ("stored.mx.weight",)
    assert sorted(sum(made.layers.values(), ())) == sorted(f"stored.{name}.weight" for name in FORMATS)
    assert not lpq.export(net, tmp_path / "model.pt", layout="lpq", decode=True).layers


def test_what_is_for_engines_is_refused_with_one_file(tmp_path: Path) -> None:
    engines: dict[str, Any] = {
        "base": tmp_path, "dtype": torch.float16, "input_amax": {}, "leave": ["0"], "siblings": "any", "shard_bytes": 1,
    }  # fmt: skip
    net = Net(1, 64, SMALL)
    for name, value in engines.items():
        with pytest.raises(CheckpointError, match='layout="lpq" writes a model as it is, and takes decode and'):
            lpq.export(net, tmp_path / "x", layout="lpq", **{name: value})
    with pytest.raises(CheckpointError, match=r'decode=True is for layout="lpq", and .*layout=.modelopt. quantized'):
        lpq.export(net, tmp_path / "x", layout="modelopt", decode=True)
    with pytest.raises(CheckpointError, match=r'layout="lpq" is of a model: load run into one, and export that'):
        lpq.export("run", tmp_path / "x", layout="lpq")
    assert not (tmp_path / "x").exists()


def test_decoded_it_is_an_ordinary_state_dict(tmp_path: Path) -> None:
    net = Net(1)
    content = torch.load(lpq.export(net, tmp_path / "model.pt", layout="lpq", decode=True).path, weights_only=True)
    ordinary = nn.ModuleDict({name: nn.Linear(96, 512, bias=False) for name in FORMATS})
    ordinary.load_state_dict({k.removeprefix("stored."): v for k, v in content["model"].items() if "stored" in k})
    for name, layer in ordinary.items():
        assert torch.equal(layer.weight, net.stored[name].weight.dequantize()), name


def test_between_weights_that_are_stored_otherwise(tmp_path: Path) -> None:
    """Quantized into high precision: decoded. High precision into quantized: encoded. Other dtypes: cast."""
    stored = nn.Sequential(nn.Linear(32, 64))
    stored[0].weight = nn.Parameter(lpq.quantizer("mxfp8").quantize(torch.randn(64, 32)), requires_grad=False)
    lpq.export(stored, tmp_path / "stored.pt", layout="lpq")
    plain = nn.Sequential(nn.Linear(32, 64, dtype=torch.bfloat16))
    checkpoint.import_file(plain, tmp_path / "stored.pt")
    assert torch.equal(plain[0].weight, stored[0].weight.dequantize().bfloat16())
    assert torch.equal(plain[0].bias, stored[0].bias.bfloat16())

    values = nn.Sequential(nn.Linear(32, 64))
    torch.save(values.state_dict(), tmp_path / "plain.pt")  # anybody's file
    checkpoint.import_file(stored, tmp_path / "plain.pt")
    truth = lpq.quantizer("mxfp8").quantize(values[0].weight)
    assert torch.equal(as_bytes(stored[0].weight.row.data), as_bytes(truth.row.data))
    assert torch.equal(as_bytes(stored[0].weight.col.scale), as_bytes(truth.col.scale))

    torch.save(stored.state_dict(), tmp_path / "torch.pt")  # with a quantized tensor in it
    again = nn.Sequential(nn.Linear(32, 64))
    again[0].weight = nn.Parameter(lpq.quantizer("mxfp8").quantize(torch.zeros(64, 32)), requires_grad=False)
    checkpoint.import_file(again, tmp_path / "torch.pt")
    assert isinstance(again[0].weight, QuantizedTensor)
    assert torch.equal(as_bytes(again[0].weight.col.data), as_bytes(truth.col.data))


def test_a_stack_is_decoded(tmp_path: Path) -> None:
    stored, plain = nn.Module(), nn.Module()
    stack = lpq.quantizer("mxfp8").quantize(torch.randn(3, 64, 32), stack=True)
    stored.experts = nn.Parameter(stack, requires_grad=False)
    plain.experts = nn.Parameter(torch.zeros(3, 64, 32))
    checkpoint.import_file(plain, lpq.export(stored, tmp_path / "stored.pt", layout="lpq").path)
    assert torch.equal(plain.experts, stack.dequantize())
    content = torch.load(lpq.export(stored, tmp_path / "decoded.pt", layout="lpq", decode=True).path, weights_only=True)
    assert torch.equal(content["model"]["experts"], stack.dequantize())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = lpq.export(nn.Sequential(nn.Linear(4, 4)), tmp_path / "model.pt", layout="lpq").path
    with pytest.raises(CheckpointError, match=r"model.pt cannot be imported: 0.weight was saved with shape \[4, 4\]"):
        checkpoint.import_file(nn.Sequential(nn.Linear(4, 8)), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be imported: it (is damaged|holds)"):
        checkpoint.import_file(nn.Sequential(nn.Linear(4, 4)), path)
    for garbage in (b"garbage" * 100, b""):
        path.write_bytes(garbage)
        with pytest.raises(CheckpointError, match=r"it is damaged, or torch\.save did not write it"):
            checkpoint.import_file(nn.Sequential(nn.Linear(4, 4)), path)
    with pytest.raises(CheckpointError, match=r"it is a directory; if that is a checkpoint, lpq\.checkpoint\.load"):
        checkpoint.import_file(nn.Sequential(nn.Linear(4, 4)), tmp_path)
    torch.save({"weight": Path}, path)
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be imported: it (is damaged|holds)"):
        checkpoint.import_file(nn.Sequential(nn.Linear(4, 4)), path)
    with pytest.raises(CheckpointError, match=r"nowhere\.pt cannot be imported: there is no such file"):
        checkpoint.import_file(nn.Linear(4, 4), tmp_path / "nowhere.pt")


def _changed(path: Path, of: torch.Tensor) -> None:
    """One bit of a tensor, in a file that ``torch.load`` reads without a word."""
    raw, data = bytearray(path.read_bytes()), as_bytes(of).numpy().tobytes()
    assert raw.count(data) == 1
    raw[raw.index(data) + len(data) // 2] ^= 1
    path.write_bytes(raw)
    torch.load(path, weights_only=True)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Ours and anybody's; unless it was saved without checksums, of which nobody can know."""
    path, (net, other, before) = tmp_path / "model.pt", (Net(seed, 64, SMALL) for seed in (1, 2, 2))
    for changed in SMALL:
        for save in (lambda: lpq.export(net, path, layout="lpq"), lambda: torch.save(net.state_dict(), path)):
            save()
            _changed(path, net.stored[changed].weight.row.data)
            with pytest.raises(
                CheckpointError, match=r"model\.pt cannot be imported: it is damaged or was changed since"
            ):
                checkpoint.import_file(other, path)
            assert model_differences(other, before) == {}
    computed = get_crc32_options()
    try:
        set_crc32_options(False)
        lpq.export(net, path, layout="lpq")
    finally:
        set_crc32_options(computed)
    checkpoint.import_file(other, path)
    assert model_differences(other, net) == {}


CHANGED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c.pop("model"), r"it lacks 'model': write it with lpq\.checkpoint"),
    (lambda c: c.update(model="a"), "it has 'model' of type str, not dict"),
    (lambda c: c.update(lpq=1), "it has 'lpq' of type int, not dict"),
    (lambda c: c.update(lpq=None), "it has 'lpq' of type NoneType, not dict"),
    (lambda c: c["lpq"].clear(), r"its description \(lpq\) lacks 'version', 'step', .* and 3 more"),
    (lambda c: c["lpq"].pop("memories"), r"its description \(lpq\) lacks 'memories': "),
    (lambda c: c["lpq"].update(stored="mxfp8"), r"its description \(lpq\) has 'stored' of type str, not list or tuple"),
    (lambda c: c["lpq"].update(step="3"), r"its description \(lpq\) has 'step' of type str, not int or NoneType"),
    (lambda c: c["lpq"].update(version=9), "it is written in version 9 .* pip install --upgrade"),
    (lambda c: c["lpq"]["quantized"]["model.0.weight"].pop("dtype"), r"\(lpq\) of 0\.weight lacks 'dtype'"),
    (lambda c: c["lpq"]["quantized"].update({"model.0.weight": 1}), r"\(lpq\) of 0\.weight is of type int, not dict"),
    (lambda c: c["model"].update({0: torch.ones(1)}), "it holds no state dict"),
]


@pytest.mark.parametrize(("change", "words"), CHANGED, ids=[words for _, words in CHANGED])
def test_what_is_incomplete_is_refused_in_words(
    change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path
) -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8", weights="quantized")
    path = lpq.export(model, tmp_path / "model.pt", layout="lpq").path
    content = torch.load(path, weights_only=True)
    torch.save({**content, "mine": 1}, path)  # what is beside it is nobody's business
    checkpoint.import_file(model, path)
    change(content)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"model\.pt cannot be imported: .*{words}"):
        checkpoint.import_file(model, path)
