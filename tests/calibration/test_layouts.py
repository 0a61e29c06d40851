"""Layout does not matter: models that FSDP2 shards over 1, 2 and 4 ranks get the bytes of one that is not sharded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import BATCHES, FEW, RECIPES, differs_on_some_rank, exported, laid_out, of_one, whole_statics
from models import data, layers, model, statics
from ranks import mesh_of, on_one, on_ranks, spawn
from support.comparing import equal_states
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import lpq
from lpq import calibration
from lpq.calibration import CalibrationError, calibrating, statistics
from lpq.calibration.parallel import Peers
from lpq.core import QuantizedTensor
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel
from lpq.torch_private.tensors import local_part


def sharded(recipe: str, ranks: int, weights: Any = None) -> Any:
    """A model over 4 ranks: whole on each, or sharded over so many of them and replicated over the rest."""
    net: Any = lpq.convert(model(experts=1), recipe, weights=weights)
    if ranks > 1:
        shape, names = ((4,), ("shard",)) if ranks == 4 else ((2, 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
    return net


def alone(recipe: str, method: Any, count: int = BATCHES, tokens: int = 3) -> nn.Module:
    """The same in one process, with all batches; handed to all ranks."""
    of_one()  # a group is made by all ranks
    net: nn.Module = on_one(_calibrated_alone, recipe, method, data(count, tokens=tokens))
    return net


def _calibrated_alone(recipe: str, method: Any, batches: list[Tensor]) -> nn.Module:
    net = lpq.convert(model(experts=1), recipe)
    lpq.calibrate(net, batches, method=method, process_group=of_one())
    return net


FSDP = [(1, None), (4, None), (2, None), (4, "high_precision")]
"""Ranks over which a model is sharded, and how its weights are stored."""


def _a_state_goes_on_in_another_layout(rank: int, folder: str) -> None:
    file = Path(folder) / "state.pt"
    expected = alone("fp8-current", "percentile")
    lpq.calibrate(sharded("fp8-current", 4), data(BATCHES)[:4][rank::4], method="percentile", state=file)
    # Half of the counts are there; the pass that follows them is not wanted yet.
    if rank == 0:
        kept = torch.load(file, weights_only=True)
        del kept["passes"]["statistics"]
        torch.save(kept, file)
    dist.barrier()
    net = sharded("fp8-current", 2)
    made = lpq.calibrate(net, data(BATCHES)[rank::4], method="percentile", state=file)
    assert made.batches == BATCHES
    assert equal_states(statics(net), statics(expected))


def parallel(net: Any, dp: int, tp: int, sequence: bool = False, fsdp: bool = False) -> Any:
    """The layers of a model shared out over ``tp`` of 4 ranks, for each of ``dp``: replicated there, or sharded."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    cut = Shard(1) if sequence else Replicate()
    column, row = ColwiseParallel(input_layouts=cut), RowwiseParallel(output_layouts=cut)
    plan: dict[str, Any] = {"norm": SequenceParallel(use_local_output=True)} if sequence else {}
    plan |= {f"attn.{name}": column for name in ("q_proj", "k_proj", "v_proj")} | {"attn.o_proj": row}
    plan |= {f"experts.0.{name}": style for name, style in (("w1", column), ("w3", column), ("w2", row))}
    for block in net:
        parallelize_module(block, mesh["tp"], plan)
        if fsdp:
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"]) if fsdp else net


LAYOUTS: dict[str, tuple[Any, Any, Any]] = {
    "fsdp": (
        sharded, lambda rank, ranks: data(BATCHES)[rank::4],
        (statistics, "reduce_max", lambda values, group: values),
    ),
    "tp": (
        lambda recipe, ranks: parallel(lpq.convert(model(experts=1), recipe), 4 // ranks, ranks, fsdp=ranks == 2),
        lambda rank, ranks: data(FEW)[rank // ranks :: 4 // ranks], (Peers, "whole", lambda self: nullcontext()),
    ),
}  # fmt: skip
"""A model over so many of 4 ranks, the batches of a rank, and what calibration may not do without: the reduction; that
layers are multiplied whole while statistics are collected."""


def _laid_out_again(rank: int, folder: Path, layout: str) -> None:
    """4 → 2 → 4 by checkpoints, calibrated anew or not. Control: without what it needs scales are others."""
    over, batches, needed = LAYOUTS[layout]
    net = over("nvfp4", 4)
    lpq.calibrate(net, batches(rank, 4))
    expected, static = exported(net), whole_statics(net)
    policy = net.__dict__["lpq_conversion"].policy
    for step, ranks in enumerate((2, 4)):
        lpq.checkpoint.save(net, folder / str(step))
        net = over(policy, ranks)
        lpq.checkpoint.load(net, folder / str(step))
        assert equal_states(whole_statics(net), static), ranks
        assert equal_states(exported(net), expected), ranks
        if ranks == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*needed)
                lpq.calibrate(net, batches(rank, 2))
            assert differs_on_some_rank(net, static)
            lpq.calibrate(net, batches(rank, 2))
            assert equal_states(exported(net), expected)


TP = [(2, 2, False, False), (1, 4, True, False), (2, 2, False, True)]
"""Ranks of data, ranks of tensor parallelism, whether sequences are shared out, whether FSDP2 shards as well."""


def _failing_inside_of_the_last_layer(net: Any, batch: Tensor) -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise ValueError("the ninth token")

    with net[0].experts[0].w2.register_forward_pre_hook(fail):  # behind the hook that gathers
        net(batch)


@pytest.mark.parametrize(("recipe", "method"), [*RECIPES.items()][::2], ids=["fp8", "searched"])
@on_ranks(4)
def test_fsdp_over_1_2_and_4_ranks(rank: int, recipe: str, method: Any) -> None:
    """5 batches among 4 ranks: one of them has more than the others."""
    expected = alone(recipe, method)
    x, static, codes = data(1)[0], statics(expected), exported(expected)
    y = expected(x)
    for ranks, weights in laid_out(FSDP, method):
        net = sharded(recipe, ranks, weights)
        made = lpq.calibrate(net, data(BATCHES)[rank::4], method=method, process_group=dist.group.WORLD)
        assert (made.samples, made.batches) == (4 * BATCHES, BATCHES)
        assert equal_states(statics(net), static), (ranks, weights)
        assert equal_states(exported(net), codes), (ranks, weights)
        computed = net(x)
        assert torch.equal(computed, y), "it computes the same, too"
        computed.square().sum().backward()


@on_ranks(4)
def test_without_the_reduction_layouts_differ(rank: int) -> None:
    """The control of the above: some scale is another one on some rank, whichever reduction is left out."""
    for reduction, method in (("reduce_max", "max"), ("reduce_sum", "percentile")):
        expected: Any = alone("fp8-current", method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics, reduction, lambda values, group: values)
            net = sharded("fp8-current", 4)
            lpq.calibrate(net, data(BATCHES)[rank::4], method=method)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, equal_states(statics(net), statics(expected)))
        assert not all(found), reduction


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_changes_no_byte(layout: str, tmp_path: Path) -> None:
    spawn(_laid_out_again, 4, tmp_path, layout)


def test_a_state_goes_on_in_another_layout(tmp_path: Path) -> None:
    spawn(_a_state_goes_on_in_another_layout, 4, str(tmp_path))


@on_ranks(4)
def test_what_one_rank_cannot_do_is_an_error_on_all(rank: int) -> None:
    everyone = dist.group.WORLD  # the model is whole on each
    net = lpq.convert(model(experts=1), "fp8-current")
    bad: list[Any] = data(2)[rank % 2 :: 2]
    if rank == 2:
        bad = [torch.randn(2, 3, 65)]
    with pytest.raises(CalibrationError, match=r"rank 2: .*normalized_shape"):
        lpq.calibrate(net, bad, process_group=everyone)
    with pytest.raises(CalibrationError, match="rank 1 has no batch at all"):
        lpq.calibrate(net, [] if rank == 1 else data(1), process_group=everyone)
    other = lpq.convert(model(experts=2 if rank == 3 else 1), "fp8-current")
    with pytest.raises(CalibrationError, match=r"rank 0 has \[none\], and rank 3 has \[0\.experts\.1\.w1\.x_"):
        lpq.calibrate(other, data(1), process_group=everyone)
    options: tuple[tuple[str, Any, str], ...] = (
        ("siblings", [("w1", "w3")], r"siblings=\[\('w1', 'w3'\)\]"), ("samples", 7, "samples=7"),
        ("percentile", 50, "percentile=50"), ("unseen", "error", "unseen='error'"),
    )  # fmt: skip
    for name, value, words in options:
        how = {name: value} if rank == 3 else {}
        with pytest.raises(CalibrationError, match=rf"in other ways: rank 0 has .*, and rank 3 has \[{words}\]"):
            lpq.calibrate(net, data(4)[rank::4], process_group=everyone, **how)
    assert not statics(net)
    stored: Any = lpq.convert(model(experts=1), "fp8-current", weights="quantized", ranks=4)
    codes = {n: m.weight.row.data.clone() for n, m in layers(stored).items() if isinstance(m.weight, QuantizedTensor)}
    lpq.calibrate(stored, data(4)[rank::4], process_group=everyone)
    assert codes
    for name, layer in layers(stored).items():
        assert torch.equal(layer.weight.row.data.view(torch.uint8), codes[name].view(torch.uint8)), "as they were"
        assert list(layer.static_values()) == ["x_amax"]


@on_ranks(2)
def test_a_rank_that_raises_where_another_one_gathers_has_its_own_error(rank: int) -> None:
    """It would go into another collective than that rank, which is inside of the model: gloo ends both for that."""
    net = fully_shard(lpq.convert(model(experts=1), "fp8-current"), mesh=mesh_of())

    def forward(net: Any, batch: Tensor) -> None:
        if rank == 0:
            net(batch)
        raise OSError(f"rank {rank} has no disk")

    with pytest.raises(OSError, match=f"rank {rank} has no disk"):
        lpq.calibrate(net, data(1), forward=forward)
    if rank == 1:
        net.eval()(data(1)[0])  # for which rank 0 waits


@pytest.mark.parametrize(("recipe", "method"), RECIPES.items(), ids=["fp8", "nvfp4", "searched"])
@on_ranks(4)
def test_tensor_parallelism_over_2_and_4_ranks(rank: int, recipe: str, method: Any) -> None:
    expected = alone(recipe, method, FEW, tokens=4)
    static, codes = statics(expected), exported(expected)
    for dp, tp, sequence, fsdp in laid_out(TP, method):
        net = parallel(lpq.convert(model(experts=1), recipe), dp, tp, sequence, fsdp)
        mine = data(FEW, tokens=4)[rank // tp :: dp]
        mine = [batch.chunk(tp, 1)[rank % tp] for batch in mine] if sequence else mine
        made = lpq.calibrate(net, mine, method=method)
        assert (made.samples, made.batches) == (4 * FEW, FEW)
        assert equal_states(statics(net), static), (dp, tp, sequence, fsdp)
        group = None if fsdp or dp == 1 else net[0].attn.q_proj.weight.device_mesh.get_group()
        assert equal_states(exported(net, group), codes), (dp, tp, sequence, fsdp)
        net(mine[0]).square().sum().backward()


@on_ranks(4)
def test_multiplied_in_parts_it_would_differ(rank: int) -> None:
    """Where layers are multiplied in parts, what later ones are given differs. Teams must have the same batches."""
    expected: Any = alone("fp8-current", "max", FEW, tokens=4)

    def calibrated(mine: list[Tensor]) -> tuple[Any, Any]:
        net = parallel(lpq.convert(model(experts=1), "fp8-current"), 2, 2)
        return net, lpq.calibrate(net, mine)

    mine = data(FEW, tokens=4)[rank // 2 :: 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "whole", lambda self: nullcontext())
        net, _ = calibrated(mine)
        assert not equal_states(statics(net), statics(expected))
        assert equal_states(statics(net[0].attn.q_proj), statics(expected[0].attn.q_proj)), "whose input no layer made"
    with pytest.raises(
        CalibrationError, match=r"ranks \[2, 3\] share layers.*rank 2 has \[4 samples\], and rank 3 has \[3 samples\]"
    ):
        calibrated([batch[: 3 if rank == 3 else 4] for batch in mine])
    net = parallel(lpq.convert(model(experts=1), "fp8-current"), 2, 2)
    before = {name: id(value) for name, value in net.named_parameters()}
    with pytest.raises(ValueError, match="the ninth token"):
        lpq.calibrate(net, mine, forward=_failing_inside_of_the_last_layer)
    assert {name: id(value) for name, value in net.named_parameters()} == before, "no layer keeps whole parameters"
    assert not any(m._forward_hooks_always_called for m in net.modules())
    narrow = lpq.convert(model(width=96, experts=1), "nvfp4")
    with pytest.raises(CalibrationError, match=r"0\.attn\.q_proj.*cannot be divided over 4 ranks"):
        lpq.calibrate(parallel(narrow, 1, 4), data(1, width=96))


@on_ranks(4)
def test_tensor_parallelism_takes_what_was_calibrated_before(rank: int) -> None:
    """With the scales that one process found; sums over ranks differ in their order alone."""
    net = lpq.convert(model(experts=0)[0].attn, "fp8-current")
    x = data(1)[0]
    lpq.calibrate(net, [x], process_group=of_one())
    with torch.no_grad():
        expected = net(x)
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    shared_out = parallelize_module(net, init_device_mesh("cpu", (4,)), plan)
    with torch.no_grad():
        assert torch.allclose(shared_out(x), expected, atol=1e-5)
        assert not torch.allclose(shared_out(x * 8), shared_out(x) * 8, atol=1e-2), "control: they are clamped"
    found = statics(shared_out)
    lpq.calibrate(shared_out, [x])
    assert equal_states(statics(shared_out), {name: local_part(value) for name, value in found.items()})


def test_the_public_name_is_the_function() -> None:
    assert lpq.calibrate is calibration.calibrate is calibrating.calibrate
