"""Layers that engines make one layer of: refused where they lie in several ways, and told of where scales differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Command
from tiny import Net, layers
from torch import nn

import lpq
from lpq.checkpoint import CheckpointError, CheckpointWarning
from lpq.engines.siblings import FUSED


def test_siblings_that_an_engine_fuses_are_told_of(tmp_path: Path) -> None:
    model: Any = Net()
    model.gate_proj, model.up_proj = nn.Linear(128, 128), nn.Linear(128, 128)
    lpq.convert(model, "nvfp4")
    with pytest.warns(CheckpointWarning, match="engines fuse gate_proj, up_proj and give them one scale"):
        lpq.export(model, tmp_path / "x", layout="modelopt")
    model.up_proj.weight = nn.Parameter(model.gate_proj.weight.detach().clone())
    lpq.export(model, tmp_path / "y", layout="modelopt")


ATTENTION = ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj")


class Fused(nn.Module):
    """A block whose layers engines fuse, by their names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.self_attn = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
        self.mlp = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("gate_proj", "up_proj", "down_proj")})
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(128, 128) for name in ("w1", "w2", "w3")}) for _ in range(2)
        )


@pytest.mark.parametrize(
    ("apart", "other", "words"),
    [
        (
            "*.q_proj", "fp8-row",
            rf"one layer of {', '.join(ATTENTION)}, .*: {ATTENTION[0]}, {ATTENTION[2]} in MXFP8, inputs mxfp8; "
            rf"{ATTENTION[1]} in FP8 per row, inputs fp8\(scaling=row\)\. .*siblings='any'",
        ),
        ("*.k_proj", "skip", rf"{ATTENTION[0]} in high precision; .*leave=\['{ATTENTION[1]}', '{ATTENTION[2]}'\]"),
        ("*.gate_proj", "nvfp4", r"mlp\.gate_proj in NVFP4, inputs in high precision; mlp\.up_proj in MXFP8"),
        ("experts.0.w3", "skip", r"experts\.1\.w3 in MXFP8, inputs mxfp8; experts\.0\.w3 in high"),
        ("experts.1.*", "fp8-row", r"one layer of experts\.0\.w1, .*experts\.1\.w1, .* in FP8 per row"),
        ("experts.*.w2", "skip", r"experts\.0\.w2, experts\.1\.w2 in high precision"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_layers_that_an_engine_fuses_lie_alike(apart: str, other: str, words: str, layout: str, tmp_path: Path) -> None:
    """Engines load no others. The remedies of the message help, and other layers may have formats of their own."""
    model = lpq.convert(
        Fused(), {"rules": [{"match": apart, "recipe": other}, {"match": "*.o_proj", "recipe": "fp8-row"},
        {"match": "*", "recipe": "mxfp8"}]},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=words):
        lpq.export(model, tmp_path / "x", layout=layout)
    with pytest.raises(CheckpointError, match=words):
        lpq.export.stream(model, layout)
    assert not [*tmp_path.iterdir()]
    assert lpq.export(model, tmp_path / "any", layout=layout, siblings="any").layers
    leave = [name for name in layers(model) if name.startswith(apart.partition(".")[0].replace("*", ""))]
    rest = lpq.export(model, tmp_path / "rest", layout=layout, leave=[n for n in leave if "o_proj" not in n])
    assert "self_attn.o_proj" in rest.layers["FP8 per row, inputs fp8(scaling=row)"]


@pytest.mark.parametrize("names", FUSED, ids=" ".join)
def test_one_of_each_known_layers_is_refused_alone(names: tuple[str, ...]) -> None:
    """Under whatever parent, and where one of several is not there; layers of two parents are none of each other's."""
    model = nn.ModuleDict({parent: nn.ModuleDict({n: nn.Linear(32, 32) for n in names}) for parent in ("a", "b")})
    *others, last = names
    lpq.convert(model, {"rules": [{"match": "b.*", "recipe": "fp8-row"}, {"match": "*", "recipe": "mxfp8"}]})
    assert len(dict(lpq.export.stream(model, "compressed-tensors"))) == 6 * len(names)
    for left in (last, others[0]):
        with pytest.raises(CheckpointError, match=rf"one layer of {', '.join(sorted(f'b.{n}' for n in names))}, "):
            lpq.export.stream(model, "compressed-tensors", leave=[f"b.{left}"])
    del model["a"][others[0]]
    if len(others) > 1:
        with pytest.raises(CheckpointError, match=rf"one layer of a\.{others[1]}, a\.{last}, "):
            lpq.export.stream(model, "compressed-tensors", leave=[f"a.{last}"])


def test_names_that_only_resemble_others_are_apart() -> None:
    """Of two fused layers of Qwen 3.5, of a sequence, and of a fused layer that has one name in files as well."""
    names = ("in_proj_qkv", "in_proj_b", "fc1", "fc3", "wq_b", "wk", "w2", "w3", "qkv_proj", "o_proj")
    model = lpq.convert(nn.ModuleDict({name: nn.Linear(32, 32) for name in names}), "mxfp8")
    for name in names:
        assert dict(lpq.export.stream(model, "compressed-tensors", leave=[name]))


def test_one_sibling_that_is_left_is_refused(tmp_path: Path, lpq_command: Command) -> None:
    """Also of a checkpoint, and by the command."""
    model = lpq.convert(Fused(), "mxfp8")
    lpq.checkpoint.save(model, tmp_path / "run")
    for source in (model, tmp_path / "run"):
        with pytest.raises(CheckpointError, match=r"self_attn\.v_proj in high precision"):
            lpq.export(source, tmp_path / "x", leave=["*.v_proj"])
    for options, status in (((), 1), (("--siblings", "any"), 0)):
        ended = lpq_command("export", tmp_path / "run", tmp_path / "x", "--leave", "*.v_proj", *options)
        assert ended.status == status


def test_siblings_of_which_one_has_a_static_input_are_refused() -> None:
    """An engine has one way of encoding the input that they share."""
    model, names = lpq.convert(Fused(), "nvfp4"), ["self_attn.q_proj", "self_attn.v_proj"]
    with pytest.raises(CheckpointError, match=r"k_proj in NVFP4, inputs in high precision"):
        lpq.export.stream(model, "modelopt", input_amax=dict.fromkeys(names, 3.0))
    amax = dict.fromkeys([*names, "self_attn.k_proj"], 3.0)
    assert [*lpq.export.stream(model, "modelopt", input_amax=amax)]
