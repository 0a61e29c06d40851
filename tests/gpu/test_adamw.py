"""AdamW's step of stored moments on a GPU: the kernel equals the reference bit for bit, and needs no memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lpq.optim import QuantizedStates, adamw, adamw_triton

SECOND = "fp8(scaling=block, pow2=false)"


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = [(130, 4096), (64, 33), (4, 32, 512), (5, 1000), (64, 64)]
    return [nn.Parameter(torch.randn(shape, generator=random).to("cuda", dtype)) for shape in shapes]


def _step(params: list[nn.Parameter], optimizer: QuantizedStates, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for p in params:
        sizes = torch.rand(p.shape, generator=random).mul(-60).exp2() * (torch.rand(p.shape, generator=random) > 0.1)
        p.grad = (torch.randn(p.shape, generator=random) * sizes).to("cuda", p.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", ["mxfp8", "mxfp8(dtype=e5m2)", "fp8(scaling=block)", SECOND])
def test_the_kernel_equals_the_reference(first: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    launch = adamw_triton.launch
    monkeypatch.setattr(
        adamw_triton, "launch", lambda *given, **kinds: launched.append(given[1]) or launch(*given, **kinds)
    )
    ours, theirs = _params(dtype), _params(dtype)
    optimizer, reference = (
        QuantizedStates(AdamW(params, lr=1e-2), least=1, exp_avg=first, exp_avg_sq=SECOND) for params in (ours, theirs)
    )
    for step in range(5):
        _step(ours, optimizer, step)
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "tiles", lambda *_: None)
            _step(theirs, reference, step)
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q), step
            for key in ("exp_avg", "exp_avg_sq_root"):
                buffers = zip(optimizer.state[p][key].buffers, reference.state[q][key].buffers, strict=True)
                assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in buffers), (step, key)
    assert len(launched) == 5 * 2  # whose columns are multiples of 16, and others


def test_a_step_takes_no_memory_beside_the_states() -> None:
    params = [nn.Parameter(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = QuantizedStates(AdamW(params), exp_avg="mxfp8", exp_avg_sq=SECOND)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_the_host_does_not_wait_for_the_gpu_in_a_step() -> None:
    params = _params(torch.bfloat16)
    optimizer = QuantizedStates(AdamW(params), least=1, exp_avg="mxfp8", exp_avg_sq=SECOND)
    _step(params, optimizer, 0)
    _step(params, optimizer, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        with pytest.raises(RuntimeError, match="synchronizing"):
            params[0].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gradient_that_is_transposed_is_copied() -> None:
    ours, theirs = ([nn.Parameter(torch.ones(64, 512, device="cuda"))] for _ in range(2))
    gradient = torch.randn(512, 64, device="cuda").t()
    for params, laid in ((ours, gradient), (theirs, gradient.contiguous())):
        optimizer = QuantizedStates(AdamW(params, lr=1e-2), exp_avg="mxfp8", exp_avg_sq=SECOND)
        for _ in range(3):
            params[0].grad = laid
            optimizer.step()
    assert torch.equal(ours[0], theirs[0])
    assert not torch.equal(ours[0], torch.ones_like(ours[0]))
