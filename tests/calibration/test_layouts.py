"""Layout does not matter: models that FSDP2 shards over 1, 2 and 4 ranks get the bytes of one that is not sharded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from models import Attention, data, layers, model, same, statics
from ranks import on_one, spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import lpq
from lpq import calibration
from lpq.calibration import CalibrationError, calibrating, collecting, reducing
from lpq.calibration.parallel import Team
from lpq.core import QuantizedTensor
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel
from lpq.nn import GroupedLinear
from lpq.torch_private.tensors import local_part

BATCHES, FEW = 5, 3
"""As many as 4 ranks, or 2, share unevenly."""
RECIPES = {
    "fp8-current": "max",
    "nvfp4": "percentile",
    "x=nvfp4(rht=true), w=nvfp4, dy=nvfp4(rht=true)": "four_over_six",
}
T = TypeVar("T")


def laid_out(layouts: list[T], method: str) -> list[T]:
    """All layouts for the method that costs least; the last two, in which each kind occurs, for one that counts inputs;
    and the last, where weights are cut most, for one that searches scales of weights."""
    return layouts if method == "max" else layouts[-2:] if method == "percentile" else layouts[-1:]


def exported(net: nn.Module, group: Any = None) -> dict[str, Tensor]:
    """The codes and scales of a model as engines get them, with those of inputs."""
    found = dict(lpq.export.stream(net, "compressed-tensors", process_group=group))
    assert any(name.endswith(("input_scale", "input_global_scale")) for name in found)
    return {name: value.view(torch.uint8) if value.itemsize == 1 else value for name, value in found.items()}


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
    _of_one()  # a group is made by all ranks
    net: nn.Module = on_one(_calibrated_alone, recipe, method, data(count, tokens=tokens))
    return net


def _calibrated_alone(recipe: str, method: Any, batches: list[Tensor]) -> nn.Module:
    net = lpq.convert(model(experts=1), recipe)
    lpq.calibrate(net, batches, method=method, process_group=_of_one())
    return net


_groups: dict[str, Any] = {}


def _of_one() -> Any:
    if "one" not in _groups:
        _groups["one"] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return _groups["one"][dist.get_rank()]


FSDP = [(1, None), (4, None), (2, None), (4, "high_precision")]
"""Ranks over which a model is sharded, and how its weights are stored."""


def _the_same(rank: int, recipe: str, method: Any) -> None:
    """5 batches among 4 ranks: one of them has more than the others."""
    expected = alone(recipe, method)
    x, static, codes = data(1)[0], statics(expected), exported(expected)
    y = expected(x)
    for ranks, weights in laid_out(FSDP, method):
        net = sharded(recipe, ranks, weights)
        made = lpq.calibrate(net, data(BATCHES)[rank::4], method=method)
        assert (made.samples, made.batches) == (4 * BATCHES, BATCHES)
        assert same(statics(net), static), (ranks, weights)
        assert same(exported(net), codes), (ranks, weights)
        computed = net(x)
        assert torch.equal(computed, y), "it computes the same, too"
        computed.square().sum().backward()


def _without_the_reduction(rank: int) -> None:
    """The control of the above: some scale is another one on some rank, whichever reduction is left out."""
    combine = reducing.Ranks.combine
    for left_out, method in (("max", "max"), ("sum", "percentile")):
        expected: Any = alone("fp8-current", method)

        def without(self: Any, packed: Tensor, how: Any, left_out: str = left_out) -> Tensor:
            return packed if how == left_out else combine(self, packed, how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reducing.Ranks, "combine", without)
            net = sharded("fp8-current", 4)
            lpq.calibrate(net, data(BATCHES)[rank::4], method=method)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, same(statics(net), statics(expected)))
        assert not all(found), left_out


def _differs_on_some_rank(net: Any, expected: dict[str, Tensor]) -> bool:
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, same(whole_statics(net), expected))
    return not all(found)


def _resharded(rank: int, folder: str) -> None:
    """4 → 2 → 4 by checkpoints, calibrated anew or not. Control: without the reduction scales are others."""
    net = sharded("nvfp4", 4)
    lpq.calibrate(net, data(BATCHES)[rank::4])
    expected, static = exported(net), statics(net)
    policy = net.__dict__["lpq_conversion"].policy
    for step, ranks in enumerate((2, 4)):
        lpq.checkpoint.save(Path(folder) / str(step), net)
        net = sharded(policy, ranks)
        lpq.checkpoint.load(Path(folder) / str(step), net)
        assert same(statics(net), static)
        assert same(exported(net), expected), ranks
        if ranks == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reducing.Ranks, "combine", lambda self, packed, how: packed)
                lpq.calibrate(net, data(BATCHES)[rank::4])
            assert _differs_on_some_rank(net, static)
            lpq.calibrate(net, data(BATCHES)[rank::4])
            assert same(exported(net), expected)


def _reshared(rank: int, folder: str) -> None:
    """Tensor parallelism over 4 → 2 → 4 ranks by checkpoints, calibrated anew or not. Control: layers multiplied in
    parts while statistics are collected give others."""
    net = parallel(lpq.convert(model(experts=1), "nvfp4"), 1, 4)
    lpq.calibrate(net, data(FEW))
    expected, static = exported(net), statics(net)
    policy = net.__dict__["lpq_conversion"].policy
    for step, tp in enumerate((2, 4)):
        lpq.checkpoint.save(Path(folder) / str(step), net)
        net = parallel(lpq.convert(model(experts=1), policy), 4 // tp, tp, fsdp=tp == 2)
        lpq.checkpoint.load(Path(folder) / str(step), net)
        assert same({name: local_part(value) for name, value in statics(net).items()}, static), tp
        assert same(exported(net), expected), tp
        if tp == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Team, "whole", lambda self: nullcontext())
                lpq.calibrate(net, data(FEW)[rank // tp :: 4 // tp])
            assert _differs_on_some_rank(net, static)
            lpq.calibrate(net, data(FEW)[rank // tp :: 4 // tp])
            assert same(exported(net), expected)


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
    assert same(statics(net), statics(expected))


def _what_one_rank_cannot_do_is_an_error_on_all(rank: int) -> None:
    net = lpq.convert(model(experts=1), "fp8-current")
    bad: list[Any] = data(2)[rank % 2 :: 2]
    if rank == 2:
        bad = [torch.randn(2, 3, 65)]
    with pytest.raises(CalibrationError, match=r"rank 2: .*normalized_shape"):
        lpq.calibrate(net, bad)
    with pytest.raises(CalibrationError, match="rank 1 has no batch at all"):
        lpq.calibrate(net, [] if rank == 1 else data(1))
    other = lpq.convert(model(experts=2 if rank == 3 else 1), "fp8-current")
    with pytest.raises(CalibrationError, match=r"rank 3 has 0\.experts\.1\.w1\.x_.*which rank 0 lacks"):
        lpq.calibrate(other, data(1))
    assert not statics(net)
    stored: Any = lpq.convert(model(experts=1), "fp8-current", weights="quantized", ranks=4)
    codes = {n: m.weight.row.data.clone() for n, m in layers(stored).items() if isinstance(m.weight, QuantizedTensor)}
    lpq.calibrate(stored, data(4)[rank::4])
    assert codes
    for name, layer in layers(stored).items():
        assert torch.equal(layer.weight.row.data.view(torch.uint8), codes[name].view(torch.uint8)), "as they were"
        assert list(layer.static_values()) == ["x_amax"]


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


TP = [(2, 2, False, False), (1, 4, True, False), (2, 2, False, True)]
"""Ranks of data, ranks of tensor parallelism, whether sequences are shared out, whether FSDP2 shards as well."""


def _tensor_parallel(rank: int, recipe: str, method: Any) -> None:
    expected = alone(recipe, method, FEW, tokens=4)
    static, codes = statics(expected), exported(expected)
    for dp, tp, sequence, fsdp in laid_out(TP, method):
        net = parallel(lpq.convert(model(experts=1), recipe), dp, tp, sequence, fsdp)
        mine = data(FEW, tokens=4)[rank // tp :: dp]
        mine = [batch.chunk(tp, 1)[rank % tp] for batch in mine] if sequence else mine
        made = lpq.calibrate(net, mine, method=method)
        assert (made.samples, made.batches) == (4 * FEW, FEW)
        assert same(statics(net), static), (dp, tp, sequence, fsdp)
        group = None if fsdp or dp == 1 else net[0].attn.q_proj.weight.device_mesh.get_group()
        assert same(exported(net, group), codes), (dp, tp, sequence, fsdp)
        net(mine[0]).square().sum().backward()


class Routed(nn.Module):
    """Attention, experts in stacks to which a router sends tokens, and a layer that is given what they make."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.router = Attention(64), nn.Linear(64, 64), nn.Linear(64, 4, bias=False)
        self.experts = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        chosen = self.router(rows).argmax(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=4).cumsum(0, dtype=torch.int32)
        y = torch.zeros_like(rows).index_copy(0, order, self.experts(rows[order], ends))
        return self.last((rows + y).view(x.shape))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (lpq.nn.GroupedLinear(4, 64, 64, bias=False, recipe=None) for _ in range(3))
        with torch.no_grad():
            self.w3.weight[2, 5, 7] = 0.75

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.w2(self.w1(rows, ends).relu() + self.w3(rows, ends), ends)
        return y


EXPERTS = [(4, 1, False), (1, 1, True), (2, 1, True), (2, 2, False)]
"""Ranks that share out experts, ranks of tensor parallelism, and whether FSDP2 shards over the others."""


def routed(recipe: Any, ep: int, tp: int, fsdp: bool) -> Any:
    """A model with experts, laid out so over 4 ranks."""
    net: Any = lpq.convert(Routed(), recipe)
    mesh = init_device_mesh("cpu", (4 // (ep * tp), ep, tp), mesh_dim_names=("dp", "ep", "tp"))
    column = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    if tp > 1:
        parallelize_module(net.first, mesh["tp"], {**column, "o_proj": RowwiseParallel()})
    if ep > 1:
        parallelize_module(net.experts, mesh["ep"], ExpertParallel())
    if fsdp:
        fully_shard(net.experts, mesh=mesh["dp"])
        if ep == 1:
            fully_shard(net, mesh=mesh["dp"])
    return net


def whole_statics(net: Any) -> dict[str, Tensor]:
    return {name: local_part(value) for name, value in statics(net).items()}


def _experts_alone(recipe: str, batches: list[Tensor], method: Any, samples: int) -> tuple[Any, Any]:
    """The same in one process, and the record of its calibration."""
    net = lpq.convert(Routed(), recipe)
    return net, lpq.calibrate(net, batches, method=method, samples=samples, process_group=_of_one())


def _with_experts(rank: int, recipe: str, method: Any) -> None:
    """Experts over 1, 2 and 4 ranks, beside tensor parallelism and FSDP2; 5 batches, so that some ranks have fewer."""
    _of_one()
    expected, made = on_one(_experts_alone, recipe, data(BATCHES, tokens=4), method, 18)
    static, codes = statics(expected), exported(expected)
    assert {"first", "experts", "last"} == {name.partition(".")[0] for name in static}
    x = data(1, tokens=4)[0]
    y = expected(x)
    for ep, tp, fsdp in laid_out(EXPERTS, method):
        net = routed(recipe, ep, tp, fsdp)
        again = lpq.calibrate(net, data(BATCHES, tokens=4)[rank // tp :: 4 // tp], method=method, samples=18)
        assert (again.samples, again.batches, again.layers) == (made.samples, made.batches, made.layers)
        assert same(dict(again.values), dict(made.values)), (ep, tp, fsdp)
        assert same(whole_statics(net), static), (ep, tp, fsdp)
        if not (fsdp and ep > 1):  # whose tensors lie over other ranks than the rest
            assert same(exported(net), codes), (ep, tp, fsdp)
        computed = net(x)
        if tp == 1:  # else sums have another order
            assert torch.equal(computed, y), (ep, tp, fsdp)
        computed.square().sum().backward()


def _fused_experts(rank: int) -> None:
    """Those of a Hugging Face model, which routes tokens itself."""
    import transformers

    def made() -> Any:
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=32, intermediate_size=64, num_experts_per_tok=2, num_local_experts=4,
        )  # fmt: skip
        return lpq.convert(transformers.MixtralForCausalLM(config), "fp8-current")

    batches = [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(BATCHES)]
    expected, net = made(), made()
    lpq.calibrate(expected, batches, method="percentile", process_group=_of_one())
    experts = net.get_submodule("model.layers.0.mlp.experts")
    parallelize_module(experts, init_device_mesh("cpu", (4,)), ExpertParallel())
    lpq.calibrate(net, batches[rank::4], method="percentile")
    found = {name: local_part(value) for name, value in experts.static_values().items()}
    assert same(found, expected.get_submodule("model.layers.0.mlp.experts").static_values())
    assert same(exported(net), exported(expected))
    with torch.no_grad():
        assert torch.equal(net(batches[0]).logits, expected(batches[0]).logits)


def _controls_of_experts(rank: int) -> None:
    """Experts have numbers among all, see one batch at a time, and none that does not count: those behind the fifth."""
    batches = data(8, tokens=4)
    for batch in batches[5:]:
        batch *= 16
    _of_one()
    expected, _ = on_one(_experts_alone, "fp8-current", batches, "max", 20)
    static = statics(expected)
    mixed_up = (GroupedLinear, "own_groups", lambda layer: slice(0, len(local_part(layer.weight))))
    at_once = (collecting, "_turns", lambda told, team: (0, 1))
    all_rows = (collecting, "sending_nothing", lambda model: nullcontext())
    everywhere: list[Any] = [None] * 4
    for wrong in (None, mixed_up, at_once, all_rows):
        net = routed("fp8-current", 4, 1, False)
        with pytest.MonkeyPatch.context() as patch:
            if wrong is not None:
                patch.setattr(*wrong)
            lpq.calibrate(net, batches[rank::4], samples=20)
        dist.all_gather_object(everywhere, same(whole_statics(net), static))
        assert everywhere == [wrong is None] * 4, wrong


def _controls_of_tensor_parallelism(rank: int) -> None:
    """Where layers are multiplied in parts, what later ones are given differs. Teams must have the same batches."""
    expected: Any = alone("fp8-current", "max", FEW, tokens=4)

    def calibrated(mine: list[Tensor]) -> tuple[Any, Any]:
        net = parallel(lpq.convert(model(experts=1), "fp8-current"), 2, 2)
        return net, lpq.calibrate(net, mine)

    mine = data(FEW, tokens=4)[rank // 2 :: 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Team, "whole", lambda self: nullcontext())
        net, _ = calibrated(mine)
        assert not same(statics(net), statics(expected))
        assert same(statics(net[0].attn.q_proj), statics(expected[0].attn.q_proj)), "whose input no layer made"
    with pytest.raises(CalibrationError, match=r"ranks \[2, 3\] share out.*rank 2 has a batch of 4 .* rank 3 has 3:"):
        calibrated([batch[: 3 if rank == 3 else 4] for batch in mine])
    narrow = lpq.convert(model(width=96, experts=1), "nvfp4")
    with pytest.raises(CalibrationError, match=r"0\.attn\.q_proj.*cannot be shared out over 4 ranks"):
        lpq.calibrate(parallel(narrow, 1, 4), data(1, width=96))


def _tensor_parallelism_takes_what_was_calibrated_before(rank: int) -> None:
    """With the scales that one process found; sums over ranks differ in their order alone."""
    net = lpq.convert(model(experts=0)[0].attn, "fp8-current")
    x = data(1)[0]
    lpq.calibrate(net, [x], process_group=_of_one())
    with torch.no_grad():
        expected = net(x)
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    shared_out = parallelize_module(net, init_device_mesh("cpu", (4,)), plan)
    with torch.no_grad():
        assert torch.allclose(shared_out(x), expected, atol=1e-5)
        assert not torch.allclose(shared_out(x * 8), shared_out(x) * 8, atol=1e-2), "control: they are clamped"
    found = statics(shared_out)
    lpq.calibrate(shared_out, [x])
    assert same(statics(shared_out), {name: local_part(value) for name, value in found.items()})


@pytest.mark.parametrize(("recipe", "method"), RECIPES.items(), ids=["fp8", "nvfp4", "searched"])
def test_fsdp_over_1_2_and_4_ranks(recipe: str, method: str) -> None:
    spawn(_the_same, 4, recipe, method)


def test_without_the_reduction_layouts_differ() -> None:
    spawn(_without_the_reduction, 4)


def test_resharding_changes_no_byte(tmp_path: Path) -> None:
    spawn(_resharded, 4, str(tmp_path))


def test_sharing_out_over_other_ranks_changes_no_byte(tmp_path: Path) -> None:
    spawn(_reshared, 4, str(tmp_path))


def test_a_state_goes_on_in_another_layout(tmp_path: Path) -> None:
    spawn(_a_state_goes_on_in_another_layout, 4, str(tmp_path))


def test_what_one_rank_cannot_do_is_an_error_on_all() -> None:
    spawn(_what_one_rank_cannot_do_is_an_error_on_all, 4)


@pytest.mark.parametrize(("recipe", "method"), RECIPES.items(), ids=["fp8", "nvfp4", "searched"])
def test_tensor_parallelism_over_2_and_4_ranks(recipe: str, method: str) -> None:
    spawn(_tensor_parallel, 4, recipe, method)


@pytest.mark.parametrize(("recipe", "method"), RECIPES.items(), ids=["fp8", "nvfp4", "searched"])
def test_experts_beside_tensor_parallelism_and_fsdp_over_4_ranks(recipe: str, method: str) -> None:
    spawn(_with_experts, 4, recipe, method)


def test_experts_of_hugging_face_models_over_4_ranks() -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    spawn(_fused_experts, 4)


@pytest.mark.filterwarnings("ignore:no token went through")
def test_experts_that_are_mixed_up_or_see_more_differ() -> None:
    spawn(_controls_of_experts, 4)


def test_multiplied_in_parts_it_would_differ() -> None:
    spawn(_controls_of_tensor_parallelism, 4)


def test_tensor_parallelism_takes_what_was_calibrated_before() -> None:
    spawn(_tensor_parallelism_takes_what_was_calibrated_before, 4)


def test_the_public_name_is_the_function() -> None:
    assert lpq.calibrate is calibration.calibrate is calibrating.calibrate
