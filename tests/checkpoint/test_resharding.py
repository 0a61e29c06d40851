"""Saved on 4 ranks, loaded on 2, then on 1, then on 4: not a bit changes, whatever the format and the mesh.

And training that goes on from there, on another number of ranks, is the training that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trained
from checkpointed import (
    CHANGED,
    COLS,
    FORMATS,
    POLICY,
    ROWS,
    Net,
    model_differences,
    optimizer_differences,
    optimizer_of,
    random,
    shard,
)
from ranks import spawn
from support.comparing import as_bytes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lpq
from lpq import checkpoint

TRUTH, OTHER = 1, 2
EVERY = {**FORMATS, "third_party": "int4", "fp4_by_powers": "mxfp4"}
FEW = {name: FORMATS[name] for name in ("square", "fp4", "mixed_back", "mixed_delayed")}
"""For another mesh: how a weight is cut does not depend on what else there is."""
ODD = {"row": FORMATS["row"], "identity": FORMATS["identity"]}
"""Formats whose shards may be uneven: their blocks are rows."""


def _net(seed: int, formats: dict[str, str] = EVERY) -> Net:
    return Net(seed, formats=formats)


def _loaded(path: Path, net: torch.nn.Module, rows: int = 512, formats: dict[str, str] = EVERY) -> None:
    """Load into a model that holds other values, and compare with the one that was saved."""
    truth = Net(TRUTH, rows, formats)
    before = model_differences(net, truth)
    assert set(before) >= {f"stored.{name}.weight" for name in formats}, "there is something to load"
    optimizer = optimizer_of(net, None)
    info = checkpoint.load(net, path, optimizer)
    assert model_differences(net, truth) == {}
    assert optimizer_differences(optimizer, optimizer_of(truth, TRUTH)) == {}
    assert (info.step, info.steps, info.extra) == (3, 10, {"tokens": 12345})
    assert info.policy == lpq.policy(info.description.conversions[""]["policy"]) == lpq.policy(POLICY)


def _save(path: Path, net: torch.nn.Module) -> Path:
    return checkpoint.save(net, path, optimizer_of(net, TRUTH), step=3, extra={"tokens": 12345})


def _weight(value: float) -> torch.nn.Linear:
    """A layer that may be cut both ways, as tensor parallelism does it."""
    layer = torch.nn.Linear(64, 64, bias=False)
    weight = lpq.quantizer("hybrid(row=mxfp8, col=nvfp4)").quantize(random((64, 64), 5) * value)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def _save_tiles(path: Path, mesh: DeviceMesh) -> None:
    checkpoint.save(shard(_weight(1.0), mesh, (Shard(0), Shard(1))), path)


def _on_four(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    _save(folder / "four", shard(_net(TRUTH), mesh))
    _save(folder / "odd", shard(Net(TRUTH, 510, ODD), mesh))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _save(folder / "hsdp", shard(_net(TRUTH, FEW), hybrid, (Replicate(), Shard(0))))
    _save_tiles(folder / "tiles", init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")))


def _on_two(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for source, formats in (("hsdp", FEW), ("four", EVERY)):
        net = shard(_net(OTHER, formats), mesh)
        _loaded(folder / source, net, formats=formats)
        _save(folder / f"{source}-two", net)
    lpq.export(net, folder / "two.pt", layout="lpq")
    lpq.export(net, folder / "two-decoded.pt", layout="lpq", decode=True)
    _loaded(folder / "odd", shard(Net(OTHER, 510, ODD), mesh), 510, ODD)


def _on_four_again(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    _loaded(folder / "four-one", shard(_net(OTHER), mesh))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _loaded(folder / "hsdp-one", shard(_net(OTHER, FEW), hybrid, (Replicate(), Shard(0))), formats=FEW)
    net = shard(_net(OTHER), mesh)
    checkpoint.import_file(net, folder / "one.pt")
    assert model_differences(net, _net(TRUTH)) == {}
    plain = shard(_net(OTHER, {}), mesh)
    plain.stored = nn.ModuleDict({name: nn.Linear(COLS, ROWS, bias=False) for name in EVERY})
    for layer in plain.stored.values():  # stored quantized in the file, in high precision here
        placed = distribute_tensor(torch.zeros(ROWS, COLS), mesh, [Shard(0)])
        layer.weight = nn.Parameter(placed, requires_grad=False)
    checkpoint.import_file(plain, folder / "one.pt")
    decoded = torch.load(folder / "one-decoded.pt", weights_only=True)["model"]
    for name, layer in plain.stored.items():
        assert torch.equal(layer.weight.full_tensor(), decoded[f"stored.{name}.weight"]), name


def _trains(rank: int, folder: Path) -> None:
    trained.uninterrupted(folder, "four")


def _goes_on(rank: int, folder: Path, *saved: str) -> None:
    trained.resumed(folder, *saved, used=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the other processes have it: how sums are split over threads changes their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("int4", "one_thread")
def test_four_two_one_four(tmp_path: Path) -> None:
    spawn(_on_four, 4, tmp_path)
    spawn(_on_two, 2, tmp_path)
    for source, formats in (("hsdp", FEW), ("four", EVERY)):
        net = _net(OTHER, formats)
        _loaded(tmp_path / f"{source}-two", net, formats=formats)
        _save(tmp_path / f"{source}-one", net)
    tiles = _weight(-3.0)
    checkpoint.load(tiles, tmp_path / "tiles")
    assert model_differences(tiles, _weight(1.0)) == {}
    _loaded(tmp_path / "odd", Net(OTHER, 510, ODD), 510, ODD)
    lpq.export(net, tmp_path / "one.pt", layout="lpq")
    lpq.export(net, tmp_path / "one-decoded.pt", layout="lpq", decode=True)
    for kind in ("", "-decoded"):
        one, two = (torch.load(tmp_path / f"{ranks}{kind}.pt", weights_only=True) for ranks in ("one", "two"))
        assert one["lpq"] == two["lpq"]
        assert list(one["model"]) == list(two["model"])
        for name, tensor in one["model"].items():
            assert torch.equal(as_bytes(tensor), as_bytes(two["model"][name])), name
    spawn(_on_four_again, 4, tmp_path)


@pytest.mark.usefixtures("one_thread")
def test_training_goes_on_from_four_on_two_and_one(tmp_path: Path) -> None:
    spawn(_trains, 4, tmp_path)
    spawn(_goes_on, 2, tmp_path, "four", "two")
    trained.resumed(tmp_path, "two", shard=False)


def test_a_checkpoint_of_a_later_step_gives_layers_the_recipe_of_that_step(tmp_path: Path) -> None:
    saved = Net(TRUTH)
    lpq.set_step(saved, CHANGED)
    assert "remembering.x_amax" not in saved.state_dict()
    checkpoint.save(saved, tmp_path, step=CHANGED)
    net = Net(OTHER)
    assert "remembering.x_amax" in net.state_dict()
    assert checkpoint.load(net, tmp_path).step == CHANGED
    assert model_differences(net, saved) == {}
    assert net.remembering.recipe == saved.remembering.recipe == lpq.recipe("mxfp8()")
