"""Identity: the matrix itself or a cast of it, as a format like any other."""

from __future__ import annotations

import pytest
import torch
from nasty import DTYPES, normal, values
from support.comparing import expect_bytes

import lpq
from lpq import registry
from lpq.core import encode_operands, gemm, transpose
from lpq.registry.errors import OptionError

OPTIONS = {"identity": None, **{f"identity(dtype={str(d).removeprefix('torch.')})": d for d in DTYPES}}
every_option = pytest.mark.parametrize("text", OPTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@every_option
@every_dtype
def test_the_bytes_are_those_of_a_cast(text: str, dtype: torch.dtype) -> None:
    for name, x in values(dtype).items():
        t, expected = lpq.quantizer(text).quantize(x), x.to(OPTIONS[text] or dtype)
        assert list(t.row.buffers()) == list(t.col.buffers()) == ["data"]
        expect_bytes(
            [t.row.data, t.col.data, t.dequantize()], [expected, expected.t(), expected.float().to(dtype)], name
        )


@every_dtype
def test_a_layer_copies_nothing_that_it_need_not(dtype: torch.dtype) -> None:
    x = normal(8, 48, dtype=dtype)
    for option in (None, dtype):
        operands = encode_operands(lpq.quantizer("identity", dtype=option), x)
        held = (operands.row, operands.col, transpose(operands.row))
        assert [s.data.data_ptr() for s in held] == [x.data_ptr()] * 3
    cast = encode_operands(lpq.quantizer("identity", dtype="fp16" if dtype != torch.float16 else "bf16"), x)
    assert cast.row.data.data_ptr() == cast.col.data.data_ptr() != x.data_ptr()


@every_option
def test_a_quantized_tensor_owns_its_bytes(text: str) -> None:
    x = normal(8, 48)
    t = lpq.quantizer(text).quantize(x)
    t.zero_()
    assert not t.dequantize().any()
    assert torch.equal(x, normal(8, 48))


def test_a_product_is_the_ordinary_one() -> None:
    q = lpq.quantizer("identity")
    a, b, bias = normal(8, 48, dtype=torch.bfloat16), normal(16, 48, dtype=torch.bfloat16), normal(16)
    product = gemm(q.quantize(a).row, q.quantize(b).row, bias=bias)
    assert torch.equal(product, torch.nn.functional.linear(a, b, bias.bfloat16()))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *((d, str(d).removeprefix("torch.")) for d in DTYPES),
        *(("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")),
        (None, None),
    ],
)
def test_a_dtype_has_one_name_and_may_be_written_otherwise(written: object, name: str | None) -> None:
    q = lpq.quantizer("identity", dtype=written)
    assert q.dtype == name
    assert q == lpq.quantizer(f"identity(dtype={name})")
    assert str(q) == (f"identity(dtype={name})" if name else "identity")


@pytest.mark.parametrize("dtype", ["float64", "half", torch.int8, 16, True, ["bf16"]])
def test_other_dtypes_are_refused_in_words(dtype: object) -> None:
    with pytest.raises(OptionError, match="'dtype' must be 'float32' or 'bfloat16' or 'float16' or none"):
        lpq.quantizer("identity", dtype=dtype)
    with pytest.raises(OptionError, match="identity has no option 'type': did you mean 'dtype'"):
        lpq.quantizer("identity", type=dtype)


def test_the_recipe_bf16_casts_every_operand() -> None:
    recipe = lpq.recipe("bf16")
    assert {str(q) for q in (recipe.x, recipe.w, recipe.dy)} == {"identity(dtype=bfloat16)"}
    assert recipe.name == "bf16"
    assert {p.name: set(p.recipes) for p in registry.plugins()}["bf16"] == {"bf16"}


def test_it_has_neither_statistics_nor_state() -> None:
    q = lpq.quantizer("identity")
    assert (q.stats, q.new_state(), q.measure(normal(2, 2))) == ((), {}, {})
    assert q.plain
    assert q.transposable
    assert q.flipped() == q
