"""Forward and backward of a grouped linear layer, as the experts of a mixture have it, beside torch's grouped product.

Each contender takes turns with bf16, so that their ratio is of one clock. The floor of FP8 is torch's three scaled
grouped products alone, fast in forward and exact for both gradients, and the bytes of quantizing at copy speed. Each
contender's result is handed on as soon as it is there. torchao's and TransformerEngine's grouped layers stand beside
where they are installed: torchao sums in less than fp32 everywhere, TransformerEngine is given counts on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from benchmarks import transformer_engine
from benchmarks.contenders import installed
from benchmarks.shapes import Experts
from benchmarks.timing import copy_speed
from lpq.bench.contenders import in_words, label
from lpq.bench.timing import Effort, Step, Timing, on_gpu
from lpq.nn import GroupedLinear

RECIPES = (
    "fp8-current", "x=fp8(), w=fp8(), dy=fp8()", "fp8-row", "fp8-row-bf16-wgrad", "fp8-block", "mxfp8", "nvfp4",
    "mxfp8-fwd-nvfp4-bwd", "nvfp4-fwd-mxfp8-bwd", "nvfp4-fwd-bf16-bwd",
)  # fmt: skip
PEERS = (("torchao", "rowwise, fast everywhere"), ("TransformerEngine", "current"), ("TransformerEngine", "block"))
E4M3, READS = torch.float8_e4m3fn, 2
BYTES = 2 * READS + 2
"""Read and written by quantizing one element: bf16 in twice, a byte for each operand out."""


def measure(
    recipes: tuple[str, ...], shapes: tuple[Experts, ...], effort: Effort, device: torch.device,
    clock: Callable[[dict[str, Step], Effort], dict[str, Timing]] = on_gpu,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """At each shape: milliseconds of each contender and of bf16 beside it, and the floor."""
    copied = copy_speed(device) if device.type == "cuda" else 1.0
    found: list[dict[str, Any]] = []
    for shape in shapes:
        data = Data(shape, device)
        at = {**asdict(shape), "floor": _floor(shape, device, effort, copied, clock), "results": []}
        found.append(at)
        peers = [peer for peer in PEERS if device.type == "cuda" and installed(peer[0]) is not None]
        for library, recipe in (("torch", "bf16"), *(("lpq", recipe) for recipe in recipes), *peers):
            at["results"].append(_one(data, library, recipe, effort, clock))
            yield {"copy_speed": copied, "shapes": found}


class Data:
    """x, dy and offsets, and bf16's weight."""

    def __init__(self, shape: Experts, device: torch.device) -> None:
        how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        rows = shape.experts * shape.tokens
        self.shape, self.device = shape, device
        self.x = torch.randn(rows, shape.inputs, **how).requires_grad_()
        self.dy = torch.randn(rows, shape.outputs, **how)
        self.w = torch.randn(shape.experts, shape.outputs, shape.inputs, **how).requires_grad_()
        ends = torch.arange(1, shape.experts + 1) * shape.tokens
        self.offs = ends.to(device, torch.int32)

    def plain(self) -> None:
        """The step in bf16."""
        self._step(grouped_mm(self.x, self.w.transpose(-2, -1), offs=self.offs))

    def by(self, library: str, recipe: str) -> Step:
        """The step of a contender."""
        if library == "lpq":
            return self.of(recipe)
        return self._torchao() if library == "torchao" else self._transformer_engine(recipe)

    def _torchao(self) -> Step:
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as multiply

        def step() -> None:
            w = self.w.transpose(-2, -1)
            self._step(multiply(self.x, w, self.offs, pad_token_groups_for_grouped_mm=False))

        return step

    def _transformer_engine(self, recipe: str) -> Step:
        import transformer_engine.pytorch as te

        shape = self.shape
        layer = te.GroupedLinear(
            shape.experts, shape.inputs, shape.outputs, bias=False, params_dtype=torch.bfloat16, device="cuda"
        )
        counts, how = [shape.tokens] * shape.experts, transformer_engine.recipe(recipe)

        def step() -> None:
            with te.autocast(enabled=True, recipe=how):
                y = layer(self.x, counts)
            self._step(y)
            layer.zero_grad(set_to_none=True)

        return step

    def of(self, recipe: str) -> Step:
        """The step of a layer that has this weight."""
        layer = GroupedLinear(
            self.shape.experts, self.shape.inputs, self.shape.outputs, bias=False, recipe=recipe, device="meta"
        )
        layer.weight = torch.nn.Parameter(self.w.detach())

        def step() -> None:
            self._step(layer(self.x, self.offs))
            layer.weight.grad = None

        return step

    def _step(self, y: Tensor) -> None:
        y.backward(self.dy)  # type: ignore[no-untyped-call]
        self.x.grad = self.w.grad = None


def _one(
    data: Data,
    library: str,
    recipe: str,
    effort: Effort,
    clock: Callable[[dict[str, Step], Effort], dict[str, Timing]],
) -> dict[str, Any]:
    """One contender, and bf16 in the same rounds; of bf16 alone, itself."""
    record: dict[str, Any] = {"library": library, "recipe": recipe, "compiled": False, "failure": None}
    steps: dict[str, Step] = {"bf16": data.plain}
    name = label(library, recipe, False)
    try:
        if library != "torch":
            steps[name] = data.by(library, recipe)
            steps[name]()
        taken = clock(steps, effort)
    except Exception as error:  # what one cannot do is a result, and the others go on
        return {**record, "failure": in_words(error)}
    own = taken[name]
    return {**record, **own.record("ms"), "bf16_ms": taken["bf16"].median * 1e3}


def _floor(
    shape: Experts,
    device: torch.device,
    effort: Effort,
    copied: float,
    clock: Callable[[dict[str, Step], Effort], dict[str, Timing]],
) -> dict[str, Any]:
    """The three products in FP8, and the bytes of quantizing x, w and dy."""
    moved = BYTES * sum(shape.tensors)
    try:
        products = {f"{fast}": in_fp8(shape, device, fast) for fast in (True, False)}
        taken = clock(
            {f"{which} {fast}": step for fast, three in products.items() for which, step in three.items()}, effort
        )
    except Exception as error:  # a GPU without them
        return {"bytes": moved, "failure": in_words(error)}
    of = {name: timing.median * 1e3 for name, timing in taken.items()}
    exact = of["fprop True"] + of["dgrad False"] + of["wgrad False"]
    fast = sum(of[f"{which} True"] for which in ("fprop", "dgrad", "wgrad"))
    copying = moved / copied * 1e3
    return {"bytes": moved, "gemms_ms": exact, "fast_gemms_ms": fast, "ms": exact + copying, "fast_ms": fast + copying}


def in_fp8(shape: Experts, device: torch.device, fast: bool) -> dict[str, Step]:
    experts, inputs, outputs = shape.experts, shape.inputs, shape.outputs
    rows = experts * shape.tokens
    offs = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * shape.tokens

    def operand(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16).to(E4M3)

    def ones(*size: int) -> Tensor:
        return torch.ones(size, device=device)

    def product(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Step:
        return lambda: torch._scaled_grouped_mm(
            a, b.transpose(-2, -1), of_a, of_b, offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return {
        "fprop": product(operand(rows, inputs), operand(experts, outputs, inputs), ones(rows), ones(experts, outputs)),
        "dgrad": product(operand(rows, outputs), operand(experts, inputs, outputs), ones(rows), ones(experts, inputs)),
        "wgrad": product(
            operand(outputs, rows), operand(inputs, rows), ones(experts * outputs), ones(experts * inputs)
        ),
    }
