"""lpq.fuse under autocast, as with weights and a residual stream in fp32: bits stay, and the report says what is not
fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.comparing import equal
from test_fuse_families import model as of_family
from test_fuse_families import step
from torch import Tensor

import lpq
from lpq.nn import halves


def nets(family: str, recipe: str = "mxfp8") -> tuple[Any, Any]:
    """A model with weights in fp32, plain and fused."""
    plain, net = of_family(family, recipe).float(), of_family(family, recipe).float()
    return plain, lpq.fuse(net)


def cast_step(net: Any) -> list[Tensor | None]:
    with torch.autocast("cpu", torch.bfloat16):
        return step(net)


@pytest.fixture
def high_powers() -> Iterator[None]:
    """Autocast computes powers in fp32, as it does on a GPU."""
    library, key = torch.library.Library("aten", "IMPL"), torch._C.DispatchKey.AutocastCPU

    def power(x: Tensor, exponent: float) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return torch.pow(x.float(), exponent)

    library.impl("pow.Tensor_Scalar", power, "AutocastCPU")
    yield
    library._destroy()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_norms_that_compute_in_fp32_encode_nothing_and_the_report_says_so(
    recipe: str, fused_passes: list[int], added: list[bool]
) -> None:
    plain, net = nets("Llama", recipe)
    assert len(lpq.report(net).fused) == 3
    for _ in range(2):
        assert equal(cast_step(net), cast_step(plain))
    assert (len(fused_passes), added) == (2, [])
    report = lpq.report(net)
    assert len(report.fused) == 1
    assert {entry.note for entry in report.apart} == {"in its last pass: autocast is on"}
    net.bfloat16(), plain.bfloat16()
    assert equal(step(net), step(plain))
    assert added == [False, True]
    assert len(lpq.report(net).fused) == 3
    lpq.unfuse(net)
    assert [vars(m).keys() for m in net.modules()] == [vars(m).keys() for m in plain.modules()]


def test_an_input_of_another_dtype_than_the_weight_s() -> None:
    net = lpq.convert(torch.nn.Sequential(lpq.nn.RMSNorm(64), torch.nn.Linear(64, 64)), "mxfp8", include="all")
    lpq.fuse(net)
    net[1].bfloat16()
    net[0](torch.randn(4, 64, dtype=torch.bfloat16))
    assert [e.note for e in lpq.report(net).apart] == [
        "in its last pass: its input is torch.bfloat16 and its weight torch.float32"
    ]


@pytest.mark.parametrize("family", ["Mixtral", "Phi3"])
def test_one_kernel_computes_an_activation_that_autocast_has_no_part_in(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.dtype] = []
    own = halves._bound
    monkeypatch.setattr(halves, "_bound", lambda *of: [calls.append(of[3]), own(*of)][1])
    plain, net = nets(family)
    assert equal(cast_step(net), cast_step(plain))
    assert calls
    assert {*calls} == {torch.bfloat16}


@pytest.mark.usefixtures("high_powers")
@pytest.mark.parametrize("family", ["GPT2", "Llama, with biases"])
def test_an_activation_of_which_autocast_computes_a_part_in_fp32(family: str, fused_passes: list[int]) -> None:
    plain, net = nets(family)
    assert equal(cast_step(net), cast_step(plain))
    assert not fused_passes
    (note,) = [entry.note for entry in lpq.report(net).apart if entry.name.endswith("mlp")]
    assert note == "in its last pass: autocast is on"
    assert equal(step(net.bfloat16()), step(plain.bfloat16()))
    assert len(fused_passes) == 1
    assert [entry for entry in lpq.report(net).fused if entry.name.endswith("mlp")]
