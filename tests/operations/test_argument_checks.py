"""Arguments of Quantizer.quantize beside the tensor: kernels get them as pointers, so they are checked before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import cast_master_weights

RANDOM = lpq.quantizer("nvfp4(stochastic=true)")
DELAYED = lpq.quantizer("fp8(scaling=delayed, history=4)")
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def codes(t: QuantizedTensor) -> Tensor:
    assert t.row is not None
    return t.row.data


@pytest.mark.parametrize(
    "seed",
    [torch.tensor(7), *(torch.tensor(7, dtype=d) for d in (torch.int32, torch.uint8, torch.int16))],
    ids=repr,
)
def test_the_bits_are_those_of_the_number(seed: Any) -> None:
    assert torch.equal(codes(RANDOM.quantize(X, seed=seed)), codes(RANDOM.quantize(X, seed=7)))


def test_a_seed_follows_the_tensor() -> None:
    t = RANDOM.quantize(X.to("meta"), seed=torch.tensor(7))
    assert t.device.type == "meta"


@pytest.mark.parametrize(
    ("seed", "said"), [
        (5.7, "5.7"), ("5", "'5'"), (True, "True"), (torch.tensor(5.0), r"torch.float32 of shape \[\]"),
        (torch.tensor(True), r"torch.bool of shape \[\]"), (torch.tensor([5]), r"torch.int64 of shape \[1\]"),
        (np.float64(5.7), ".*5.7"),
    ], ids=repr
)  # fmt: skip
@pytest.mark.parametrize("quantizer", [RANDOM, lpq.quantizer("mxfp8")], ids=str)
def test_what_is_no_seed_is_refused_in_words(quantizer: Any, seed: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"the seed is {said}.*: pass an int, or a 0-dimensional tensor of integers"):
        quantizer.quantize(X, seed=seed)


def _without(name: str) -> dict[str, Any]:
    return {n: t for n, t in DELAYED.new_state().items() if n != name}


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (
            _without("amax_history"),
            ValueError,
            r"state has no amax_history: pass the result of fp8\(.*\)\.new_state\(\)",
        ),
        ({"other": torch.zeros(())}, ValueError, "state has no "),
        (
            {name: torch.zeros(1).expand(t.shape) if t.dim() else t for name, t in DELAYED.new_state().items()},
            ValueError,
            r"has strides \[0\] and is not contiguous",
        ),
        (
            _without("amax_history") | {"amax_history": torch.zeros(7, 7)},
            ValueError,
            r"state: amax_history is of shape \[7, 7\] and not",
        ),
        (
            {n: t.double() for n, t in DELAYED.new_state().items()},
            ValueError,
            r"is torch\.float64 and not torch\.float32",
        ),
        (
            DELAYED.new_state("meta"),
            ValueError,
            r"is on meta, and the tensor to encode on cpu: pass the result of .*\.new_state\(device\)",
        ),
        (_without("amax_history") | {"amax_history": [0.0] * 4}, ValueError, "amax_history is a list and no tensor"),
    ],
)
def test_what_is_no_state_is_refused_in_words(state: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DELAYED.quantize(X, state=state)


def test_a_state_may_have_more_than_is_needed() -> None:
    state = DELAYED.new_state() | {"other": torch.zeros(3)}
    DELAYED.quantize(X, state=state)
    assert state["amax_history"][0] == X.abs().max()
    lpq.quantizer("mxfp8").quantize(X, state=state)  # which remembers nothing


@pytest.mark.parametrize("seed", [5.7, torch.tensor([5]), torch.tensor(5.0)], ids=repr)
def test_a_cast_of_masters_refuses_the_same(seed: Any) -> None:
    weight, master = RANDOM.quantize(X), X.flatten()
    with pytest.raises(TypeError, match=r"the seed is .*: pass an int, or a 0-dimensional tensor of integers"):
        cast_master_weights([weight], [master], [0], None, seed=seed)
    weight, state = DELAYED.quantize(X), {n: t.double() for n, t in DELAYED.new_state().items()}
    for wrong, words in ((state, r"is torch\.float64 and not"), (DELAYED.new_state("meta"), "is on meta, and the")):
        with pytest.raises(ValueError, match=rf"^states\[0\]: \w+ {words}"):
            cast_master_weights([weight], [master], [0], None, states=[wrong])


@pytest.mark.parametrize(
    ("offset", "error", "said"), [
        (-1, ValueError, "-1"), (-16, ValueError, "-16"), (1 << 32, ValueError, "4294967296"),
        (True, TypeError, "True"), (16.0, TypeError, "16.0"), (torch.tensor(16), TypeError, "a Tensor"),
        (None, TypeError, "None"), ("16", TypeError, "'16'"),
    ], ids=repr
)  # fmt: skip
@pytest.mark.parametrize("quantizer", [RANDOM, lpq.quantizer("fp8")], ids=str)
def test_what_is_no_row_to_begin_at_is_refused_in_words(
    quantizer: Any, offset: Any, error: type[Exception], said: str
) -> None:
    """Kernels would draw by the lowest 32 bits of a longer offset."""
    with pytest.raises(error, match=f"the offset is {said}: pass the first row of the shard in the whole tensor, "):
        quantizer.quantize(X, seed=7, offset=offset)


@pytest.mark.parametrize("offset", [0, 7, 16, np.int64(16), (1 << 32) - 32])
def test_any_row_may_be_the_first(offset: int) -> None:
    """No format needs a multiple of anything."""
    assert RANDOM.quantize(X, seed=7, offset=offset).row is not None


def test_an_offset_may_be_traced() -> None:
    traced = torch.compile(
        lambda x, offset: RANDOM.quantize(x, seed=7, offset=offset).dequantize(),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for offset in (16, 48):
        assert torch.equal(traced(X, offset), RANDOM.quantize(X, seed=7, offset=offset).dequantize())


@pytest.mark.filterwarnings("ignore")  # torch's, of sparse and nested tensors
@pytest.mark.parametrize(
    ("make", "said"), [
        (Tensor.to_sparse, r"is torch.sparse_coo: pass x.to_dense\(\)"),
        (Tensor.to_sparse_csr, r"is torch.sparse_csr: pass x.to_dense\(\)"),
        (Tensor.to_mkldnn, r"is torch._mkldnn: pass x.to_dense\(\)"),
        (lambda x: torch.nested.nested_tensor([x, x]), r"is nested: pass x.values\(\)"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), r"is nested: pass x.values\(\)"),
    ], ids=["sparse_coo", "sparse_csr", "mkldnn", "nested", "jagged"]
)  # fmt: skip
@pytest.mark.parametrize("text", ["mxfp8", "identity"])
def test_what_is_no_ordinary_tensor_is_refused_in_words(text: str, make: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"the tensor to encode {said}"):
        lpq.quantizer(text).quantize(make(X))


@pytest.mark.parametrize("text", ["mxfp8", "identity"])
def test_a_tangent_of_forward_mode_is_refused_in_words(text: str) -> None:
    quantizer = lpq.quantizer(text)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(TypeError, match=r"has a tangent of forward-mode AD.*: pass .*unpack_dual\(x\)\.primal"):
            quantizer.quantize(dual)
        plain = quantizer.quantize(forward_ad.unpack_dual(dual).primal).dequantize()
        assert forward_ad.unpack_dual(plain).tangent is None
        assert torch.equal(plain, quantizer.quantize(X).dequantize())
    with pytest.raises(TypeError, match="has a tangent of forward-mode AD"):
        torch.func.jvp(lambda x: quantizer.quantize(x).dequantize(), (X,), (X,))


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 10**5000], ids=["large", "small", "huge"])
def test_a_seed_of_more_than_64_bits_is_refused_in_words(seed: int) -> None:
    """It was that of its lowest 64 bits."""
    with pytest.raises(ValueError, match=r"the seed is .*, and kernels read 64 bits: pass one from -2\^63 on"):
        RANDOM.quantize(X, seed=seed)
    for fits in ((1 << 64) - 1, -(1 << 63)):
        RANDOM.quantize(X, seed=fits)


@pytest.mark.parametrize("state", [[1], [], "abc", torch.ones(3), 5], ids=repr)
def test_a_state_that_is_no_mapping_is_refused_in_words(state: Any) -> None:
    quantizer = lpq.quantizer("fp8(scaling=delayed)")
    with pytest.raises(TypeError, match=rf"state is a {type(state).__name__}: pass the result of .*new_state\(\), or"):
        quantizer.quantize(X, state=state)
    assert torch.equal(quantizer.quantize(X, state={}).dequantize(), quantizer.quantize(X).dequantize())
