"""One model in every way that ranks can share it out, beside the same on one GPU: steps of training, and the loss.

All train on the same sequences from the same first weights, with fp32 weights and bf16 compute as FSDP2 has it, so the
losses differ by the order of sums alone. What one layout cannot do is a result, and the others go on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import overlap
from benchmarks.contenders import training_step
from benchmarks.llama import Block, Llama, rotations
from benchmarks.mixtures import Routed, mixture
from benchmarks.rows import Row, Task, one_by_one
from benchmarks.shapes import ONE_GPU, Mixture, Stack
from benchmarks.stack import Failed, begun, gathered_in, meeting, timed, together, told
from lpq.bench.contenders import Contender, by_recipes, plain
from lpq.distributed import tensor_parallel
from lpq.distributed.expert_parallel import ExpertParallel
from lpq.distributed.expert_rows import Dispatch

RECIPES = ("fp8-current", "mxfp8")
STEPS = 12
AXES = ("copies", "stages", "replicas", "shards", "experts", "tensor")
ZERO_BUBBLE = "InterleavedZeroBubble"
OLD = "zero-bubble schedules of torch 2.11 fail with any autograd function that is written in Python"


@dataclass(frozen=True)
class Layout:
    """How many ranks share what out. What is left of the ranks trains copies of the same."""

    name: str
    stages: int = 1
    replicas: int = 1
    shards: int = 1
    experts: int = 1
    tensor: int = 1
    schedule: str = "1F1B"
    overlap: bool = False
    dispatch: Dispatch = "high_precision"
    mode: str | None = None
    """How blocks are compiled, of those contenders that are."""

    @property
    def ranks(self) -> int:
        """How many train one model."""
        return self.stages * self.replicas * self.shards * self.experts * self.tensor

    @property
    def parts(self) -> int:
        """Among how many the sequences are dealt out."""
        return self.replicas * self.shards * self.experts

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks; each must call it."""
        sizes = (dist.get_world_size() // self.ranks, *(getattr(self, axis) for axis in AXES[1:]))
        return init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


ONE = Layout(ONE_GPU)


def of_blocks(ranks: int) -> list[Layout]:
    """The layouts of a model without experts.

    Zero-bubble schedules of torch 2.13 leave gradients of sharded weights out, in bf16, too: its losses show it.
    """
    half, graphs = ranks // 2, "reduce-overhead"
    found = [
        ONE,
        Layout(f"{ONE_GPU}, CUDA graphs", mode=graphs),
        Layout(f"FSDP {ranks}", shards=ranks),
        Layout(f"FSDP {ranks}, CUDA graphs", shards=ranks, mode=graphs),
        Layout(f"TP {ranks}", tensor=ranks),
        Layout(f"TP {ranks}, overlapped", tensor=ranks, overlap=True),
        Layout(f"TP {ranks}, CUDA graphs", tensor=ranks, mode=graphs),
    ]
    if half > 1:
        found += [
            Layout(f"HSDP 2 x {half}", replicas=2, shards=half),
            Layout(f"HSDP 2 x {half}, CUDA graphs", replicas=2, shards=half, mode=graphs),
            Layout(f"TP 2 x FSDP {half}", tensor=2, shards=half),
            Layout(f"TP 2 x FSDP {half}, overlapped", tensor=2, shards=half, overlap=True),
            Layout(f"TP 2 x FSDP {half}, CUDA graphs", tensor=2, shards=half, mode=graphs),
        ]
    found += [
        Layout(f"PP 2 x FSDP {half}, {words}", stages=2, shards=half, schedule=schedule)
        for words, schedule in (("1F1B", "1F1B"), ("zero bubble", ZERO_BUBBLE))
    ]
    return found


def of_experts(ranks: int) -> list[Layout]:
    """The layouts of a model with experts."""
    half = ranks // 2
    found = [ONE, Layout(f"FSDP {ranks}", shards=ranks), Layout(f"EP {ranks}", experts=ranks)]
    found += [Layout(f"EP {ranks}, rows encoded", experts=ranks, dispatch="encoded")]
    return found + ([Layout(f"EP {half} x FSDP 2", experts=half, shards=2)] if half > 1 else [])


def contenders(recipes: tuple[str, ...], compiled: bool, of: Stack) -> list[Contender]:
    """bf16 and lpq's recipes; lpq gathers weights quantized, but for experts, where it cannot."""
    how = {} if isinstance(of, Mixture) else {"weights": "high_precision"}
    return [*plain(compiled), *by_recipes(recipes, compiled, **how)]


def measure(
    layouts: Sequence[Layout],
    everyone: Sequence[Contender],
    shape: Stack,
    steps: int,
    device: torch.device,
    before: Row | None = None,
) -> Iterator[Row]:
    """Milliseconds of a step, tokens a second of one model, the most memory of one, the bytes it gathers, and the loss
    after the last step; before and after each, so far."""
    peers = meeting(device)
    tasks = []
    for layout in layouts:
        for contender in everyone:
            if (layout.mode is None or contender.compiled) and _meant(layout, contender):
                one = replace(contender, mode=layout.mode)
                run = partial(_of, layout, one, shape, steps, device, peers)
                tasks.append(Task({"layout": layout.name, **one.record()}, run))
    yield from one_by_one(tasks, {**asdict(shape), "ranks": dist.get_world_size()}, before)


def _meant(layout: Layout, contender: Contender) -> bool:
    """Rows travel encoded by recipes that allow it; in bf16 the compiler alone overlaps what is sent with products."""
    if layout.overlap and contender.library == "torch" and not contender.compiled:
        return False
    return layout.dispatch != "encoded" or contender.recipe.endswith("-one-copy")


def _of(
    layout: Layout, contender: Contender, shape: Stack, steps: int, device: torch.device, peers: dist.ProcessGroup
) -> Row:
    result = _measured(layout, contender, shape, steps, device, peers)
    if dist.get_rank() == 0:
        said = result["failure"] or f"{result['ms']:.1f} ms, loss {result['loss']:.6f}"
        print(f"{layout.name}: {contender.name}: {said}", file=sys.stderr, flush=True)
    return result


def _measured(
    layout: Layout, contender: Contender, shape: Stack, steps: int, device: torch.device, peers: dist.ProcessGroup
) -> Row:
    result = begun(device)
    if layout.schedule == ZERO_BUBBLE and contender.library == "lpq" and torch.__version__ < "2.12":
        return {"failure": OLD, "peak_bytes": None}
    mesh = layout.mesh(device)
    try:
        with together(peers):
            step = _step(layout, contender, shape, mesh, device)
        timing, loss, peak = timed(step, steps, device, peers)
        with together(peers):
            gathered = gathered_in(step, contender)
    except Failed as error:
        return {**result, "failure": str(error), "peak_bytes": None}
    every = told(peers, loss * layout.tensor)
    losses = [one for one in every if one == one]  # a rank without the last stage has none
    return {
        **result, **timing.record("ms"), "tokens_per_second": shape.tokens / timing.median, "peak_bytes": peak,
        "gathered_bytes": gathered, "loss": sum(losses) / len(losses), "failure": None,
    }  # fmt: skip


class Part(nn.Module):
    """Some blocks of the model, which take the stream of all of them and give it on."""

    def __init__(self, blocks: Sequence[nn.Module], cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.cos, self.sin = cos, sin

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def _step(
    layout: Layout, contender: Contender, shape: Stack, mesh: DeviceMesh, device: torch.device
) -> Callable[[], Tensor]:
    """A step of training, which returns the loss of this rank's tokens, or NaN."""
    torch.manual_seed(0)
    with device:
        made = mixture(shape) if isinstance(shape, Mixture) else Llama(shape)
    cos, sin = rotations(shape, device, torch.bfloat16)
    blocks: list[Any] = list(made.blocks)
    own = 2 if layout.schedule == ZERO_BUBBLE and layout.stages > 1 else 1
    count, rank = own * layout.stages, mesh.get_local_rank("stages")
    numbers, each = [rank + i * layout.stages for i in range(own)], len(blocks) // count
    parts = [Part(blocks[i * each : (i + 1) * each], cos, sin) for i in numbers]
    del made, blocks  # of a converted model prepared weights would keep the blocks of other stages
    for part in parts:
        contender.convert(part)
        for block in part.blocks:
            assert isinstance(block, Block)
            _share_out(block, layout, contender, mesh)
        _shard(part, _data(layout, mesh))
    x, target = _sequences(layout, shape, mesh, device)
    if layout.stages == 1:
        (part,) = parts
        return training_step(contender, part, lambda: _loss(part(x), target) / layout.tensor)
    return _pipelined(layout, parts, numbers, count, x, target, mesh, device)


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y.float(), target.float())


def _sequences(layout: Layout, shape: Stack, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """What this rank has of the sequences, which are the same in all layouts."""
    draw = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.sequence, shape.hidden)
    part = 0
    for axis in ("replicas", "shards", "experts"):
        part = part * mesh[axis].size() + mesh.get_local_rank(axis)
    mine = []
    for _ in range(2):
        whole = torch.randn(size, generator=draw, device=device, dtype=torch.bfloat16)
        rows = whole.chunk(layout.parts)[part]
        mine.append(rows.chunk(layout.tensor, dim=1)[mesh.get_local_rank("tensor")].contiguous())
    return mine[0], mine[1]


def _share_out(block: Block, layout: Layout, contender: Contender, mesh: DeviceMesh) -> None:
    """Tensor and expert parallelism, compilation and FSDP2, in this order."""
    if layout.tensor > 1:
        parallelize_module(block, mesh["tensor"], _plan(layout, contender))
    routed = block.ffn if isinstance(block.ffn, Routed) else None
    if routed is not None and layout.experts > 1:
        parallelize_module(routed.experts, mesh["experts"], ExpertParallel(dispatch=layout.dispatch))
    if contender.compiled:
        how = overlap.options(contender, layout.overlap, layout.overlap, mesh["tensor"].get_group())
        block.compile(fullgraph=routed is None, dynamic=False, **how)
    if routed is not None and layout.experts > 1:
        _shard(routed.experts, mesh["shards"], layout.parts)
    _shard(block, _data(layout, mesh))


def _plan(layout: Layout, contender: Contender) -> dict[str, Any]:
    """Sequences are shared out between the layers, too."""
    made: Any = styles if contender.library == "torch" else tensor_parallel
    prepare = styles.PrepareModuleInput if contender.library == "torch" else tensor_parallel.PrepareInput
    options = {"overlap": layout.overlap} if contender.library == "lpq" else {}
    norm = styles.SequenceParallel(use_local_output=True)
    wide, narrow = made.ColwiseParallel(**options), made.RowwiseParallel(output_layouts=Shard(1))
    into = made.ColwiseParallel(input_layouts=Shard(1), **options)
    whole = prepare(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    return {
        "norm1": norm, "attention": whole, "attention.q": wide, "attention.k": wide, "attention.v": wide,
        "attention.out": narrow, "norm2": norm, "ffn.gate": into, "ffn.up": into, "ffn.down": narrow,
    }  # fmt: skip


def _data(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that have sequences of their own."""
    if layout.replicas > 1:
        return mesh["replicas", "shards"]
    return mesh["shards", "experts"]._flatten() if layout.experts > 1 else mesh["shards"]


def _shard(module: nn.Module, mesh: DeviceMesh, divided_by: int | None = None) -> None:
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    if divided_by is not None:  # by the number of all ranks with sequences, though fewer share the experts
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(divided_by)
        module.set_force_sum_reduction_for_comms(dist.get_backend(mesh.get_group()) == "gloo")


def _pipelined(
    layout: Layout, parts: list[Part], numbers: list[int], count: int, x: Tensor, target: Tensor, mesh: DeviceMesh,
    device: torch.device,
) -> Callable[[], Tensor]:  # fmt: skip
    """Each sequence is a micro-batch."""
    like: dict[str, Any] = {
        name: (torch.zeros_like(x[:1], requires_grad=True),) for name in ("input_args", "output_args")
    }
    stages = [
        PipelineStage(part, number, count, device, group=mesh.get_group("stages"), **like)
        for part, number in zip(parts, numbers, strict=True)
    ]
    made: Any = getattr(pipelining, f"Schedule{layout.schedule}")
    schedule = made(stages if len(stages) > 1 else stages[0], len(x), loss_fn=_loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-5, fused=True)
    last = count - 1 in numbers

    def step() -> Tensor:
        losses: list[Tensor] = []
        schedule.step(*((x,) if 0 in numbers else ()), **({"target": target, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if last else torch.full((), torch.nan, device=device)

    return step
