"""``lpq.json`` with anything in it: what is not as it should be is refused in words, with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lpq
from lpq import checkpoint
from lpq.checkpoint.description import Description
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, MissingPlugin
from lpq.checkpoint.model import Model

Data = dict[str, Any]


def written() -> Data:
    """The description of a checkpoint that has a layer of a format of another package."""
    data = Description(
        step=3,
        conversions={"": {"policy": {"rules": [{"match": ["*"], "recipe": "mxfp8"}]}, "steps": "later"}},
        recipes={"a": "mxfp8", "b": None},
        memories=("a.x_amax",),
        quantized={
            "a.weight": {"quantizer": "mxfp8", "shape": [2, 32], "dtype": "bfloat16", "operands": {"row": "mxfp8"}}
        },
        formats={"acme": {"plugin": "acme", "distribution": "acme-lpq", "version": "1.0"}},
        stored=("mxfp8",),
        stacks={"c.up_proj": {"recipe": "mxfp8", "layers": ["c.{}.up_proj"]}},
        renamed={"d.weight": "e.weight"},
        aliases={"f.weight": "d.weight"},
        tied=("d.weight",),
    ).data()
    plain: Data = json.loads(json.dumps(data))
    return plain


def entry(**changed: object) -> Callable[[Data], None]:
    return lambda data: data["quantized"]["a.weight"].update(changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(memories=[1]), "has 1 where a text should be"),
        (lambda d: d.update(stored=[None]), "has None where a text"),
        (lambda d: d["renamed"].update(a=1), "has 1 where a text"),
        (lambda d: d["aliases"].update(a=1), "has 1 where a text"),
        (lambda d: d.update(tied=[1]), "has 1 where a text"),
        (lambda d: d.update(stacks=[]), "has 'stacks' of type list, not dict or NoneType"),
        (lambda d: d["stacks"].update(a="b"), "of the experts a is of type str"),
        (lambda d: d["stacks"]["c.up_proj"].update(layers=[0]), "has 0 where a text"),
        (lambda d: d["recipes"].update(a=["mxfp8"]), r"has \['mxfp8'\] where"),
        (lambda d: d["formats"].update(acme="1.0"), "of the format 'acme' is of type str, not dict"),
        (lambda d: d["formats"]["acme"].pop("version"), "of the format 'acme' lacks 'version'"),
        (lambda d: d["formats"]["acme"].update(distribution=7), "has 'distribution' of type int, not str"),
        (lambda d: d["conversions"].update(x=3), "of the conversion of 'x' is of type int"),
        (lambda d: d["conversions"][""].pop("steps"), "of the conversion of '' lacks 'steps'"),
        (entry(dtype="no_such"), "of a.weight is .*'no_such'.*, which is no tensor"),
        (entry(dtype="int8"), "which is no tensor"),
        (entry(dtype="float32.real"), "which is no tensor"),
        (entry(shape=[]), "which is no tensor"),
        (entry(shape=[2, "x"]), "which is no tensor"),
        (entry(shape=[-2, 4]), "which is no tensor"),
        (entry(operands={}), "which is no tensor"),
        (entry(operands={"row": 3}), "which is no tensor"),
        (entry(operands={"up": "mxfp8"}), "which is no tensor"),
    ],
)  # fmt: skip
def test_fields_of_other_types_are_refused(change: Callable[[Data], None], words: str) -> None:
    data = written()
    assert json.loads(json.dumps(Description.read(data).data())) == data
    change(data)
    with pytest.raises(CheckpointError, match=rf"its description \(lpq\).*{words}.*: write it with lpq\.checkpoint"):
        Description.read(data)


def test_a_file_of_an_earlier_release_is_read() -> None:
    data = written()
    del data["stacks"], data["renamed"], data["aliases"], data["tied"]
    assert Description.read(data).stacks is None


def test_a_model_whose_experts_cannot_be_named_is_saved_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(model: nn.Module) -> None:
        raise AttributeError("no such function")

    monkeypatch.setattr(checkpoint.model, "stacks_in_files", fail)
    model = nn.ModuleDict({"experts": lpq.nn.GroupedLinear(2, 32, 32, recipe="mxfp8")})
    with pytest.warns(CheckpointWarning, match=r"lpq\.export refuses it: export the model .*no such function"):
        checkpoint.save(model, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="expert"):
        lpq.export(tmp_path / "saved", tmp_path / "exported", layout="compressed-tensors")


def test_only_the_name_of_a_distribution_is_in_a_command() -> None:
    data = written()
    with pytest.raises(MissingPlugin, match=r"not installed here: pip install acme-lpq$"):
        Description.read(data).require(["acme"])
    data["formats"]["acme"]["distribution"] = "acme; rm -rf ~\x1b[2J"
    with pytest.raises(MissingPlugin, match=r"not installed here: install what brings it$") as caught:
        Description.read(data).require(["acme"])
    assert str(caught.value).isprintable()


# ---------------------------------------------------------------------------------------------- earlier policies


def net(**how: str | None) -> nn.Module:
    layers = {"up": nn.Linear(32, 32), "lm_head": nn.Linear(32, 64)}
    return lpq.convert(nn.ModuleDict(layers), "mxfp8", **how)  # type: ignore[arg-type]


def earlier(*layers: str) -> Description:
    """A description with one recipe, which these layers had."""
    policy = {"rules": [{"match": ["*"], "recipe": "mxfp8()"}]}
    said = Model(net()).describe({}, 1)
    return replace(said, conversions={"": {"policy": policy, "steps": None}}, recipes=dict.fromkeys(layers, "mxfp8()"))


def test_it_is_the_same_policy_if_it_reached_the_same_layers() -> None:
    Model(net()).check_policy(earlier("up"))
    Model(net(include="all")).check_policy(earlier("up", "lm_head"))
    for model, layers in ((net(), ("up", "lm_head")), (net(include="all"), ("up",))):
        with pytest.raises(CheckpointError, match="another policy"):
            Model(model).check_policy(earlier(*layers))
    other = lpq.convert(nn.ModuleDict({"up": nn.Linear(32, 32)}), "nvfp4")
    with pytest.raises(CheckpointError, match="another policy"):
        Model(other).check_policy(earlier("up"))
