"""A process of one commit and one GPU: it makes the steps that ``by_commit`` times, and measures them when it is asked.

    python -m benchmarks.by_commit_ranks JOB RANK

Commands come on its standard input and answers leave on its standard output, one line of JSON each. The commit's tree
comes first on the path, with metadata of its own, so that its plugins are found by its entry points; a module of lpq
from elsewhere is an error. So this module imports neither lpq nor what imports lpq.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import random
import statistics
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

RANKS = 2
RECIPES = ("fp8-current", "fp8-delayed")
MEASURED: dict[str, tuple[str, int | None, tuple[int, ...], tuple[int, ...]]] = {
    "plain small": ("plain", 0, (20, 1024, 1024), (2, 128, 128)),
    "plain wide": ("plain", 0, (10, 4096, 4096), (2, 256, 128)),
    "grouped small": ("grouped", 1, (12, 1024, 128), (1, 64, 16)),
    "grouped wide": ("grouped", 1, (8, 4096, 1024), (1, 64, 32)),
    "pair replicated": ("pair", None, (6, 2048, 8192, 4096, False), (2, 256, 512, 256, False)),
    "pair sequences": ("pair", None, (6, 2048, 8192, 4096, True), (2, 256, 512, 256, True)),
    "unit": ("unit", None, (2, 2048, 2048), (2, 256, 256)),
}
"""The method of ``Bench`` that makes the steps; the rank that measures them alone; steps in a sample and the method's
arguments, on a GPU and on an imitated one."""
Step = Callable[[], None]
Steps = dict[str, Step]


def take_tree(tree: Path, folder: Path) -> None:
    """Import lpq and its plugins from this tree alone; its metadata lie in the folder."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    plugins: dict[str, str] = project["entry-points"]["lpq.plugins"]
    info = folder / f"lpq-{project['version']}.dist-info"
    if not (info / "entry_points.txt").exists():
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lpq\nVersion: {project['version']}\n")
        lines = ["[lpq.plugins]", *(f"{name} = {module}" for name, module in plugins.items()), ""]
        (info / f".{os.getpid()}").write_text("\n".join(lines))
        os.replace(info / f".{os.getpid()}", info / "entry_points.txt")  # as the other rank may do so now
    ours = [folder, tree, *sorted(path for path in (tree / "plugins").iterdir() if path.is_dir())]
    others = [path for path in sys.path[1:] if "-packages" in path or not any(Path(path).glob("lpq*/__init__.py"))]
    sys.path[:] = [*map(str, ours), *others]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
    assert not _modules_of_lpq(), "lpq was imported before"
    for module in ("lpq", *plugins.values()):
        importlib.import_module(module)
    check_tree(tree)


def _modules_of_lpq() -> list[str]:
    return [name for name in sys.modules if name == "lpq" or name.startswith(("lpq.", "lpq_"))]


def check_tree(tree: Path) -> None:
    """Raise if a module of lpq is from elsewhere, but for what it has compiled, which lies in a cache."""
    for name in _modules_of_lpq():
        place = getattr(sys.modules[name], "__file__", None)
        if place and not place.endswith(".so") and not Path(place).resolve().is_relative_to(tree.resolve()):
            raise RuntimeError(f"{name} is from {place}, and not from {tree}")


class Bench:
    """The steps of one rank, and its clocks."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        import torch

        self.torch, self.rank = torch, rank
        self.tree, self.info = Path(job["tree"]), Path(job["info"])
        self.steps: dict[str, Steps] = {}
        self.rough: dict[str, dict[str, float]] = {}
        self.count: dict[str, dict[str, int]] = {}
        self.orders: dict[str, random.Random] = {}
        self.imitate: bool = job["imitate"]
        self.recipes = RECIPES if self.imitate else ("bf16", *RECIPES)  # an imitated GPU has no gradients of bf16
        self.device = torch.device("cpu") if self.imitate else torch.device("cuda", rank)
        self.sync: Callable[[], None] = (lambda: None) if self.imitate else torch.cuda.synchronize

    # ------------------------------------------------------------------------------------------ clocks

    def ahead(self, step: Step, n: int, cycles: int) -> tuple[float, float, bool]:
        """Host and GPU seconds of a step, of n queued behind a GPU that waits, and whether it waited long enough."""
        cuda: Any = self.torch.cuda
        self.sync()
        if self.imitate:
            began = time.perf_counter()
            for _ in range(n):
                step()
            return (time.perf_counter() - began) / n, 0.0, True
        slept, start, end = (cuda.Event(enable_timing=True) for _ in range(3))
        slept.record()
        cuda._sleep(cycles)
        start.record()
        began = time.perf_counter()
        for _ in range(n):
            step()
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        waited = slept.elapsed_time(start) / 1e3
        return host / n, start.elapsed_time(end) / 1e3 / n, waited > host

    def wall(self, step: Step, n: int) -> float:
        """The seconds of a step, of n until the GPU has done them."""
        self.sync()
        began = time.perf_counter()
        for _ in range(n):
            step()
        self.sync()
        return (time.perf_counter() - began) / n

    def calls(self, step: Step) -> int:
        """The functions of lpq that a step calls."""
        places, count = (str(self.tree / "lpq"), str(self.tree / "plugins")), 0

        def see(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            code = frame.f_code
            count += event == "call" and code.co_filename.startswith(places) and not code.co_name.startswith("<")

        with self.torch.autograd.set_multithreading_enabled(False):
            step()
            sys.setprofile(see)
            try:
                step()
            finally:
                sys.setprofile(None)
        return count

    def take_turns(self, name: str, n: int, alone: bool, rounds: int) -> list[dict[str, Any]]:
        """Measure recipes in turns; their medians. ``alone``: no other rank takes part."""
        steps = self.steps[name]
        if name not in self.rough:
            self.count[name] = {who: self.calls(step) for who, step in steps.items()}
            self.rough[name] = {}
            for who, step in steps.items():
                mine = min(self.ahead(step, n, 10_000_000)[0] for _ in range(3))
                self.rough[name][who] = mine if alone else max(self.told(mine))
        order = self.orders.setdefault(name, random.Random(0))  # alike on the ranks, whatever each measures alone
        found: dict[str, list[tuple[float, float, float]]] = {who: [] for who in steps}
        late = dict.fromkeys(steps, 0)
        gc.collect()
        gc.disable()
        for step in steps.values():
            step()
        for _ in range(rounds):
            for who in order.sample(list(steps), len(steps)):
                cycles = int((self.rough[name][who] * n * 1.4 + 5e-4) * 1.98e9)
                host, gpu, enough = self.ahead(steps[who], n, cycles)
                found[who].append((host, gpu, self.wall(steps[who], max(n, 4))))
                late[who] += not enough
        gc.enable()
        results = []
        for who, taken in found.items():
            medians = [statistics.median(times) * 1e6 for times in zip(*taken, strict=True)]
            row = {"measured": name, "recipe": who, "calls": self.count[name][who], "late": late[who]}
            results.append(row | dict(zip(("host_us", "gpu_us", "wall_us"), medians, strict=True)))
        return results

    # ------------------------------------------------------------------------------------------ ranks

    def told(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        found: list[Any] = [None] * RANKS
        self.dist.all_gather_object(found, value, group=self.peers)
        return found

    def together(self, words: str | None) -> None:
        """Raise on all ranks if one has words for what went wrong."""
        for rank, text in enumerate(self.told(words)):
            if text:
                raise RuntimeError(text if rank == self.rank else f"rank {rank}: {text}")

    def begin_ranks(self) -> None:
        """Meet the other rank."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        how: Any = {"backend": "gloo"} if self.imitate else {"backend": "nccl", "device_id": self.device}
        dist.init_process_group(rank=self.rank, world_size=RANKS, **how)
        self.dist: Any = dist
        self.peers = dist.new_group(backend="gloo")
        self.mesh = init_device_mesh(self.device.type, (RANKS,))
        self.together(None)

    # ------------------------------------------------------------------------------------------ what is measured

    def converted(self, model: Any, recipe: str, layers: int, **how: Any) -> Any:
        """The model with this number of layers of lpq."""
        import lpq

        if recipe == "bf16":
            return model
        model = lpq.convert(model, recipe, include="all", **how)
        count = sum(type(module).__module__.startswith("lpq") for module in model.modules())
        if count != layers:
            raise RuntimeError(f"{recipe}: {count} layers were converted, and not {layers}")
        return model

    def randn(self, *shape: int, grad: bool = False) -> Any:
        """A random tensor in bf16."""
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16, requires_grad=grad)

    def plain(self, width: int, tokens: int) -> Steps:
        """A linear layer, forward and backward."""
        from torch import nn

        x, dy = self.randn(tokens, width, grad=True), self.randn(tokens, width)
        steps: Steps = {}
        for recipe in self.recipes:
            layer: Any = nn.Linear(width, width, bias=False, dtype=self.torch.bfloat16, device=self.device)
            layer = self.converted(nn.Sequential(layer), recipe, 1)

            def step(layer: Any = layer) -> None:
                layer(x).backward(dy)
                x.grad = None
                layer.zero_grad()

            steps[recipe] = step
        return steps

    def grouped(self, width: int, rows: int) -> Steps:
        """Eight experts with this number of rows each; delayed scaling keeps no state for each group."""
        from torch.nn.functional import grouped_mm

        from lpq.nn import GroupedLinear

        torch: Any = self.torch
        groups = 8
        x, dy = self.randn(groups * rows, width, grad=True), self.randn(groups * rows, width)
        weight = self.randn(groups, width, width).mul_(0.02).requires_grad_()
        offs = (torch.arange(1, groups + 1) * rows).to(self.device, torch.int32)
        layer: Any = GroupedLinear(groups, width, width, bias=False, recipe=RECIPES[0], device="meta")
        layer.weight = torch.nn.Parameter(weight.detach())

        def bf16() -> None:
            y: Any = grouped_mm(x, weight.transpose(-2, -1), offs=offs)
            y.backward(dy)
            x.grad = weight.grad = None

        def step() -> None:
            layer(x, offs).backward(dy)
            x.grad = layer.weight.grad = None

        return {"bf16": bf16, RECIPES[0]: step}

    def pair(self, width: int, inner: int, tokens: int, sequences: bool) -> Steps:
        """A column-parallel layer and a row-parallel one, with sequences shared out or activations on all ranks."""
        from torch import nn
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as styles

        from lpq.distributed import tensor_parallel

        torch = self.torch
        mine = tokens // RANKS if sequences else tokens
        layout = Shard(0) if sequences else Replicate()
        torch.manual_seed(1 + self.rank if sequences else 1)
        x, dy = self.randn(mine, width, grad=True), self.randn(mine, width)
        steps: Steps = {}
        for recipe in self.recipes:
            torch.manual_seed(0)
            how: Any = {"bias": False, "device": self.device, "dtype": torch.bfloat16}
            pair: Any = nn.Sequential(nn.Linear(width, inner, **how), nn.Linear(inner, width, **how))
            pair = self.converted(pair, recipe, 2)
            made: Any = styles if recipe == "bf16" else tensor_parallel
            plan = {"0": made.ColwiseParallel(input_layouts=layout), "1": made.RowwiseParallel(output_layouts=layout)}
            styles.parallelize_module(pair, self.mesh, plan)
            wanted = [x, *pair.parameters()]

            def step(pair: Any = pair, wanted: Any = wanted) -> None:
                torch.autograd.grad(pair(x), wanted, dy)

            steps[recipe] = step
        return steps

    def unit(self, width: int, tokens: int) -> Steps:
        """Two units of seven layers each under FSDP2, and a step of the optimizer."""
        from torch import nn
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch, units, weights = self.torch, 2, 7
        x, dy = self.randn(tokens, width, grad=True), self.randn(tokens, width).mul_(1e-3)
        steps: Steps = {}
        contenders: list[tuple[str, dict[str, Any]]] = [
            ("bf16", {}), ("fp8-current", {"weights": "high_precision"}), ("fp8-current", {"weights": None}),
            ("fp8-delayed", {"weights": "high_precision"}),
        ]  # fmt: skip
        for recipe, how in contenders[self.imitate :]:
            torch.manual_seed(0)
            linear = functools.partial(nn.Linear, width, width, bias=False, device=self.device)
            model: Any = nn.Sequential(*(nn.Sequential(*(linear() for _ in range(weights))) for _ in range(units)))
            model = self.converted(model, recipe, units * weights, **how)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for one in (*model, model):
                fully_shard(one, mesh=self.mesh, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

            def step(model: Any = model, optimizer: Any = optimizer) -> None:
                model(x).backward(dy)
                x.grad = None
                optimizer.step()
                optimizer.zero_grad()

            steps[recipe + ("" if how.get("weights") or not how else ", weights=None")] = step
        return steps

    # ------------------------------------------------------------------------------------------ commands

    def start(self) -> dict[str, Any]:
        """Take the tree, and meet the other rank."""
        if not self.imitate:
            self.torch.cuda.set_device(self.device)
        self.torch.zeros(1, device=self.device)
        take_tree(self.tree, self.info)
        self.begin_ranks()
        return {}

    def make(self, name: str) -> dict[str, Any]:
        """Make the steps of a measurement, and run them a few times."""
        method, owner, *sizes = MEASURED[name]
        if owner not in (None, self.rank):
            return {}
        words: str | None = None
        steps: Steps = {}
        try:
            steps = getattr(self, method)(*sizes[self.imitate][1:])
        except Exception as error:
            if owner is not None:
                raise
            traceback.print_exc()
            words = in_words(error)
        if owner is None:
            self.together(words)
        for step in steps.values():
            for _ in range(4):
                step()
            self.sync()
        if owner is None:
            self.together(None)
        self.steps[name] = steps
        check_tree(self.tree)
        return {}

    def sample(self, names: list[str], rounds: int) -> dict[str, Any]:
        """Measure the steps that this rank has of these."""
        results = []
        for name in names:
            _, owner, *sizes = MEASURED[name]
            if name in self.steps:
                results += self.take_turns(name, sizes[self.imitate][0], owner is not None, rounds)
        return {"results": results}

    def serve(self, commands: IO[str], replies: IO[str]) -> None:
        """Do what is asked for, until nothing more is."""
        for line in commands:
            what, *arguments = json.loads(line)
            try:
                with self.imitated() if self.imitate and what != "start" else nullcontext():
                    answer = getattr(self, what)(*arguments)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": in_words(error)}
            replies.write(json.dumps(answer) + "\n")
            replies.flush()
            sys.stdout.flush()
            sys.stderr.flush()

    @contextmanager
    def imitated(self) -> Iterator[None]:
        """A GPU that does nothing, as the tests of this commit imitate it."""
        if (tests := str(self.tree / "tests")) not in sys.path:
            sys.path.append(tests)
        with importlib.import_module("imitated_gpu").imitated_gpu():
            yield


def in_words(error: Exception) -> str:
    """One line for an error."""
    return f"{type(error).__name__}: {error}"[:400]


def main(job: dict[str, Any], rank: int) -> None:
    """Serve, on a half of the cores, and end without waiting for the other rank."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cores = sorted(os.sched_getaffinity(0))
    if not job["imitate"] and len(cores) >= 8:
        half = len(cores) // RANKS
        os.sched_setaffinity(0, cores[rank * half : (rank + 1) * half])
    code = 1
    try:
        Bench(job, rank).serve(sys.stdin, replies)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
