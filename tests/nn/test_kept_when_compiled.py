"""Tensors that a compiled layer keeps for backward: torch's partitioner decides, as between PyTorch's own operators."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.comparing import equal
from torch import Tensor, nn

import lpq

pytestmark = pytest.mark.usefixtures("no_storm")
WIDTH, FFN, TOKENS = 64, 192, 128
DELAYED_AND_SAVED = ", ".join([f"{t}=fp8(scaling=delayed)" for t in ("x", "w", "dy")] + ["x.save=input, w.save=weight"])
EVERYTHING_STOCHASTIC = "x=nvfp4(stochastic=true), w=nvfp4(stochastic=true), dy=nvfp4(stochastic=true)"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A block as Llama has them, of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (project(h).unsqueeze(0) for project in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0))
        h = self.norm2(x)
        down: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + down


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().bfloat16()


# ---------------------------------------------------------------------------------------------- another library's way


class OfPlainOperators(torch.autograd.Function):
    """A product of FP8 operands as other libraries write it: out of PyTorch's own operators, casting again in backward
    what forward has cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(_cast(x), _cast(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        (x, x_scale), (weight, w_scale), (dy, dy_scale) = (_cast(t) for t in (*ctx.saved_tensors, dy))
        dx = _multiplied((dy, dy_scale), (weight.t().contiguous(), w_scale))
        return dx, _multiplied((dy.t().contiguous(), dy_scale), (x.t().contiguous(), x_scale))


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448.0 / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), 1 / scale


def _multiplied(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16)


class PlainLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OfPlainOperators.apply(x, self.weight)
        return y


# ---------------------------------------------------------------------------------------------- what is kept


def compiled(module: nn.Module, x: Tensor) -> tuple[int, Counter[str], Counter[str]]:
    """The bytes that forward keeps for backward besides its inputs, and lpq's operators in forward and in backward;
    nothing is run."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    graphs: list[torch.fx.Graph] = []

    def record(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module.graph)
        outputs = [None if node is None else node.meta["val"] for node in module.graph.output_node().args[0]]
        shapes = [None if v is None else ([int(n) for n in v.shape], v.dtype) for v in outputs]
        return make_boxed_func(lambda *_: [None if s is None else torch.empty(s[0], dtype=s[1]) for s in shapes])

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(joint)  # which Inductor runs before; they take away what does nothing
        return min_cut_rematerialization_partition(joint, inputs, **options)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, decompositions=select_decomp_table(), partition_fn=partition
    )
    y = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)
    y.sum().backward()
    forward, backward = graphs
    y_node, *kept = forward.output_node().args[0]
    fresh = {node for node in kept if node.op != "placeholder" and node is not y_node}
    counts = (Counter(str(n.target).split(".")[1] for n in g.nodes if str(n.target).startswith("lpq.")) for g in graphs)
    assert backward
    return sum(node.meta["val"].nbytes for node in fresh), *counts


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    """Those that a block of PyTorch's own operators keeps."""
    torch._dynamo.reset()
    module = block()
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = PlainLinear
    return compiled(module, torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True))[0]


def test_a_compiled_block_keeps_what_one_of_pytorchs_operators_would(plain_bytes: int) -> None:
    """Encoded in forward would be the inputs of all layers, and their weights; and nothing would be made again. The
    four layers of attention draw random bits."""
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    rules = [{"match": name, "recipe": "nvfp4"} for name in ("q", "k", "v", "out")]
    policy = {"rules": [*rules, {"match": "*", "recipe": "fp8-current"}]}
    kept, forward, backward = compiled(lpq.convert(block(), policy, include="all"), x)
    assert kept <= plain_bytes + TOKENS * WIDTH / 8  # scales of blocks, seeds
    # Four inputs and seven weights are encoded: q, k and v have one input, and so have gate and up. At most one of
    # these inputs is encoded for backward in forward already.
    assert 11 <= forward["quantize"] <= 12
    assert forward["quantize"] + backward["quantize"] == 2 * (4 + 7) + 7
    assert (forward["gemm"], backward["gemm"]) == (7, 14)
    assert forward["draw_seeds"] == 4
    assert set(backward) == {"quantize", "gemm"}


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_a_layer_alone_keeps_its_input_encoded(recipe: str) -> None:
    """Nobody else keeps it in high precision: so nothing is made again but the operand of the weight, which is kept
    anyway."""
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer = lpq.nn.Linear(WIDTH, FFN, bias=False, dtype=torch.bfloat16, recipe=recipe)
    kept, forward, backward = compiled(layer, x)
    assert kept <= TOKENS * WIDTH * (1 + 1 / 32) + 64
    assert (forward["quantize"], backward["quantize"]) == (3, 2)


# ---------------------------------------------------------------------------------------------- the same numbers


def steps(run: Any, module: nn.Module) -> list[Tensor]:
    """All that two steps give: each is two forwards, and then two backwards."""
    out = []
    for step in range(2):
        torch.manual_seed(step)
        inputs = [torch.randn(32, WIDTH, dtype=torch.bfloat16).mul(1 + step).requires_grad_() for _ in range(2)]
        outputs = [run(x) for x in inputs]
        for y in reversed(outputs):
            y.float().square().sum().backward()
        out += [*(y.detach() for y in outputs), *(x.grad for x in inputs)]
    return out + [p.grad for p in module.parameters()] + [*module.buffers()]


def test_operands_that_are_made_again_have_the_same_bits() -> None:
    """Statistics that are remembered move between one backward and the next. Seeds are drawn in forward, in its order,
    though backward has the input from which they are drawn: it is kept for the gradient of what is before the layer."""
    sizes = (WIDTH, 48), (48, 32), (32, 48), (48, 32)
    recipes = ("fp8-delayed", EVERYTHING_STOCHASTIC, "nvfp4", DELAYED_AND_SAVED)
    layers = (lpq.nn.Linear(*s, dtype=torch.bfloat16, recipe=r) for s, r in zip(sizes, recipes, strict=True))
    eager = nn.Sequential(*(module for layer in layers for module in (nn.Sigmoid(), layer)))
    again = copy.deepcopy(eager)
    assert equal(steps(eager, eager), steps(torch.compile(again, fullgraph=True, backend="aot_eager"), again))


@pytest.mark.parametrize("recipe", ["mxfp8-fwd-bf16-bwd", "x=mxfp8, w=mxfp8, dy=mxfp8, x.save=input"])
def test_a_write_to_the_input_after_its_layer_changes_no_gradient(recipe: str) -> None:
    """Without a compiler PyTorch refuses that where the layer keeps the input itself."""
    module = lpq.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, recipe=recipe)

    def writing(x: Tensor) -> Tensor:
        x = x * 2
        y: Tensor = module(x)
        x.mul_(3)
        return y

    with pytest.raises(RuntimeError, match=r"inplace"):
        steps(writing, module)
    module.zero_grad()
    expected = [t.clone() for t in steps(lambda x: module(x * 2), module)]
    module.zero_grad()
    assert equal(expected, steps(torch.compile(writing, fullgraph=True, backend="aot_eager"), module))
