"""The memory report counts what layouts declare: of real model shapes on the meta device, and of what is there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq.cli.shapes import SHAPES, Transformer
from lpq.observe import NumericsError, held_bytes, memory
from lpq.optim import QuantizedStates

BLOCK = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
"""The elements of the seven matrices of a block of Llama-3-8B."""
NVFP4 = {
    gemm: {operand: "nvfp4(block=1x16)" for operand in ("x", "w", "dy") if operand in operands}
    for gemm, operands in (("fprop", "xw"), ("dgrad", ("dy", "w")), ("wgrad", ("dy", "x")))
}
"""NVFP4 in blocks of 1x16, of which each direction has its own."""


def llama(recipe: Any, weights: Any, ranks: int = 8) -> Transformer:
    model = Transformer(SHAPES["llama-3-8b"])
    if recipe is not None:
        lpq.convert(model, {"rules": [{"match": "blocks.*", "recipe": recipe}]}, weights=weights, ranks=ranks)
    return model


def test_llama_3_8b_is_what_it_is_called() -> None:
    found = memory(llama(None, None), 8, param_dtype=torch.bfloat16)
    assert found.parameters == 8_030_261_248
    assert found.forward == 2 * found.parameters
    assert (found.converted, found.quantized, found.share) == (0, 0, None)
    assert found.weights == found.gradients == 4 * found.parameters // 8
    assert found.moments == 2 * found.weights


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
@pytest.mark.parametrize(
    ("recipe", "kept", "forward", "backward"),
    [
        ("fp8-current", 0.5, 0.5, 0.5),
        ("nvfp4", (0.5 + 1 / 256) / 2, (0.5 + 1 / 256) / 2, (0.5 + 1 / 256) / 2),  # one copy of 16x16 for both
        (NVFP4, 2 * 0.28125, 0.28125, 0.28125),
        ("mxfp8", 2 * (1 + 1 / 32) / 2, (1 + 1 / 32) / 2, (1 + 1 / 32) / 2),
        ("bf16", 1, 1, 1),
    ],
)
def test_what_half_and_a_quarter_of_the_weights_mean(
    recipe: Any, kept: float, forward: float, backward: float, weights: str
) -> None:
    model = llama(recipe, weights)
    found = memory(model, 8, blocks=model.blocks, param_dtype=torch.bfloat16)
    plain = llama(None, None)
    before = memory(plain, 8, blocks=plain.blocks, param_dtype=torch.bfloat16)
    converted = 32 * BLOCK
    assert found.converted == converted
    tensor_wide = 1e-6  # a few bytes of scales that cover a whole tensor
    assert found.share == pytest.approx(kept, abs=tensor_wide)
    assert before.forward - found.forward == pytest.approx((1 - forward) * 2 * converted, rel=tensor_wide)
    assert before.backward - found.backward == pytest.approx((1 - backward) * 2 * converted, rel=tensor_wide)
    if weights == "quantized":
        assert found.masters == 4 * converted // 8
        assert before.weights - found.weights == pytest.approx((4 - 2 * kept) * converted / 8, rel=tensor_wide)
    else:
        assert (found.masters, found.weights) == (0, before.weights)
    assert (found.moments, found.gradients) == (before.moments, before.gradients)


def test_what_belongs_to_no_block_is_gathered_once_in_all_directions() -> None:
    model = llama("mxfp8", "high_precision")
    blocks, root = memory(model, 8, blocks=model.blocks), memory(model, 8)
    assert root.backward == 0
    assert root.forward == blocks.forward + blocks.backward - _norms(model)
    assert root.at_once == root.forward
    beside = sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("blocks."))
    one = (blocks.forward - beside) // 32
    assert blocks.at_once == beside + one


def _norms(model: Transformer) -> int:
    """The bytes of the blocks' norms, which two gathers bring twice."""
    return sum(p.nbytes for p in model.blocks.parameters() if p.dim() == 1)


@pytest.mark.parametrize("ranks", [0, -2, 1.5, "x", True])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: Any) -> None:
    with pytest.raises(NumericsError, match=r"memory: ranks=.*: it is a whole number from 1 on"):
        memory(nn.Linear(64, 64), ranks)


def test_ranks_share_out_and_one_rank_sends_nothing() -> None:
    by_ranks = {n: memory(llama("nvfp4", "quantized", n), n) for n in (1, 8)}
    assert by_ranks[1].forward == by_ranks[1].backward == by_ranks[1].at_once == 0
    assert by_ranks[8].total == pytest.approx(by_ranks[1].total / 8, rel=1e-5)


def test_it_counts_what_is_there_and_what_is_not_cut() -> None:
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 40))
    lpq.convert(model, "nvfp4", weights="quantized", ranks=2)
    assert [type(p).__name__ for p in model.parameters()] == ["QuantizedTensor", "WeightShard", "Parameter"]
    one = memory(model)
    assert one.weights == sum(held_bytes(p) for p in model.parameters())
    with pytest.raises(ValueError, match=r"0\.weight is stored as nvfp4.*cut the blocks of 16 .*ranks=4"):
        memory(model, 4)


def test_what_is_not_trained_has_no_gradient() -> None:
    model = llama("nvfp4", "quantized")
    trained = memory(model, 8)
    model.requires_grad_(False)
    assert memory(model, 8) == replace(trained, masters=0, gradients=0, moments=0)


def test_moments_are_counted_as_they_are_stored() -> None:
    formats: dict[str, Any] = {"exp_avg": "mxfp8", "exp_avg_sq": "fp8(scaling=block, pow2=false)"}
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    optimizer = QuantizedStates(torch.optim.AdamW(model.parameters()), **formats)
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    states = [state.get(key) for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    roots = [state.get("exp_avg_sq_root") for state in optimizer.state.values()]
    held = sum(held_bytes(value) for value in (*states, *roots) if value is not None)
    assert memory(model, moments=formats).moments == held
    assert held < memory(model).moments / 3
    first = memory(model, moments={"exp_avg": "mxfp8"}).moments
    assert held < first < memory(model).moments
    by_ranks = [memory(model, ranks, moments=formats).moments for ranks in (1, 4)]
    assert by_ranks[0] == 4 * by_ranks[1]


ODD = (
    {"exp_avgs": "mxfp8"},
    {"least": 0},
    {"optimizer": "mxfp8"},
    {1: "mxfp8"},
    {"exp_avg": None},
    {"exp_avg": ["mxfp8"]},
)


@pytest.mark.parametrize("moments", ODD, ids=str)
def test_moments_that_adam_has_not_or_that_have_no_format_are_refused(moments: Any) -> None:
    """An option of ``QuantizedStates``, as ``least``, was taken for a state, and others ended in words of Python."""
    words = re.escape(f"memory: moments={moments}: it has a format for 'exp_avg', for 'exp_avg_sq', or for both")
    with pytest.raises(TypeError, match=words):
        memory(nn.Linear(64, 64), moments=moments)


def test_a_uneven_parameter_is_padded_where_it_travels() -> None:
    found = memory(nn.Linear(3, 5, bias=False, device="meta"), 2)
    assert found.weights == found.gradients == 3 * 3 * 4
    assert found.forward == 2 * 3 * 3 * 4
