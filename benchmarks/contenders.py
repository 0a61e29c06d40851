"""The contenders: bf16, lpq's recipes, and the other libraries that are installed, as their users run them.

A contender turns the ``nn.Linear`` layers of a model into its own. A library that is missing is reported in words;
nothing is left out in silence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor, nn

from benchmarks import liger, transformer_engine
from lpq.bench.contenders import BASELINE, Contender, by_recipes, plain

RECIPES = (
    "fp8-current",
    "fp8-delayed",
    "fp8-block",
    "fp8-row",
    "mxfp8",
    "nvfp4",
    "mxfp8-fwd-nvfp4-bwd",
    "nvfp4-fwd-mxfp8-bwd",
    "nvfp4-fwd-bf16-bwd",
    "mxfp8-fwd-bf16-bwd",
)
MODELS = ("fp8-current", "mxfp8", "nvfp4")
"""Those that whole models are trained with, if none is asked for."""
GATHERED_IN_BF16 = ", gathered in bf16"
"""Ends the recipe of a sharded model whose weights are not gathered quantized."""
FUSED = ", fused"
"""Ends the recipe of a model whose blocks are fused."""
ATTENTION = ", attention compiled"
"""Ends the recipe of a model whose attention alone is compiled, before ``FUSED``: a compiler merges rotary positions,
and norms and feed-forward blocks are fused."""
RECORDED = ", recorded"
"""Ends the recipe of a model whose whole step is recorded in a CUDA graph."""
PEERS = {"torchao": "torchao", "TransformerEngine": "transformer_engine", "Liger": "liger_kernel"}
"""Other libraries, and what one imports of them."""
KINDS = {
    ("torchao", "tensorwise"): "fp8-current",
    ("torchao", "tensorwise, gathered in FP8"): "fp8-current",
    ("torchao", "rowwise"): "fp8-row",
    ("TransformerEngine", "delayed"): "fp8-delayed",
    ("TransformerEngine", "current"): "fp8-current",
    ("TransformerEngine", "block"): "fp8-block",
}
"""Which of lpq's recipes does the same arithmetic as another library's."""


class NobodyError(LookupError):
    """A name that no contender has."""


def installed(library: str) -> str | None:
    """The version of a library, or None."""
    return version(PEERS[library]) if importlib.util.find_spec(PEERS[library]) is not None else None


def of_layers(recipes: tuple[str, ...] = RECIPES, compiled: bool = True) -> list[Contender]:
    """All that can run one layer here; bf16 comes first."""
    return [*plain(compiled), *by_recipes(recipes, compiled), *_torchao(sharded=False), *_transformer_engine()]


def of_stacks(recipes: tuple[str, ...] = RECIPES, compiled: bool = True) -> list[Contender]:
    """All that can run a model that FSDP2 shards; lpq gathers its weights quantized."""
    others = [*_torchao(sharded=True), *_transformer_engine()]
    return [*plain(compiled), *others, *by_recipes(recipes, compiled, weights="high_precision")]


def of_models(
    recipes: tuple[str, ...] = MODELS,
    compiled: bool = True,
    sharded: bool = False,
    fused: bool = False,
    recorded: bool = False,
) -> list[Contender]:
    """All that can run a whole model of Hugging Face's, without and with ``torch.compile``; of one that is sharded lpq
    gathers the weights in bf16, and quantized. ``fused``: lpq's without ``torch.compile`` also with fused blocks, and
    on one GPU with attention alone compiled between them. ``recorded``: each once more, its whole step recorded in a
    CUDA graph."""
    others = [
        one for one in _torchao(sharded) if one.recipe.startswith("tensorwise") and (compiled or not one.compiled)
    ]
    made = [*plain(compiled), *sorted(others, key=lambda one: one.compiled)]
    made += [*_liger(), *_blocks_of_transformer_engine()] if fused and not sharded else []
    for ending in ("", FUSED)[: 1 + fused]:
        lpq_ = partial(by_recipes, recipes, compiled and not ending, fuse=bool(ending))
        made += _ending(f"{ending}{GATHERED_IN_BF16 if sharded else ''}", lpq_())
        made += _ending(ending, lpq_(weights="high_precision")) if sharded else []
    if fused and compiled and not sharded:
        made += [
            replace(one, recipe=f"{one.recipe}{ATTENTION}{FUSED}", convert=partial(_attention_compiled, one.convert))
            for one in by_recipes(recipes, fuse=True)
        ]
    again = [replace(one, recorded=True) for one in made] if recorded else []
    return [*made, *_ending(RECORDED, again)]


def _ending(ending: str, everyone: Iterable[Contender]) -> list[Contender]:
    """Those contenders, their recipes with this ending."""
    return [replace(one, recipe=f"{one.recipe}{ending}") for one in everyone]


def _attention_compiled(convert: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    """Convert a model of Hugging Face's, and compile the attention of each layer."""
    converted = convert(model)
    for name, module in converted.named_modules():
        if name.endswith(".self_attn"):
            module.compile(dynamic=False)
    return converted


def in_mode(everyone: list[Contender], mode: str | None) -> list[Contender]:
    """Those contenders, of which the compiled ones are compiled in this mode."""
    return [replace(one, mode=mode) if one.compiled else one for one in everyone]


def chosen(everyone: list[Contender], only: Sequence[str] | None, leave_out: Sequence[str] = ()) -> list[Contender]:
    """Those whose name begins with one of ``only`` and has nothing of ``leave_out`` in it; and bf16, to which all are
    compared. It is an error if nobody has such a name, but for a library that is not installed."""
    for name in only or ():
        absent = any(name.startswith(library) and installed(library) is None for library in PEERS)
        if not absent and not any(c.name.startswith(name) for c in everyone):
            raise NobodyError(f"--only {name!r} is nobody's name: there are {', '.join(c.name for c in everyone)}")
    wanted = [c for c in everyone if only is None or c.name.startswith(tuple(only))]
    kept = [c for c in wanted if not any(text in c.name for text in leave_out)]
    return [c for c in everyone if c.name == BASELINE or c in kept]


def _torchao(sharded: bool) -> Iterator[Contender]:
    if installed("torchao") is None:
        return
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    tensorwise = Float8LinearConfig.from_recipe_name("tensorwise")
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    yield Contender("torchao", "tensorwise", True, partial(convert_to_float8_training, config=tensorwise))
    yield Contender("torchao", "rowwise", True, partial(convert_to_float8_training, config=rowwise))
    if sharded:
        gathered = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert = partial(convert_to_float8_training, config=gathered)
        after = precompute_float8_dynamic_scale_for_fsdp
        yield Contender("torchao", "tensorwise, gathered in FP8", True, convert, after)
    else:
        yield Contender("torchao", "tensorwise", False, partial(convert_to_float8_training, config=tensorwise))


def _transformer_engine() -> Iterator[Contender]:
    if installed("TransformerEngine") is None:
        return
    for recipe in transformer_engine.RECIPES:
        yield Contender("TransformerEngine", recipe, False, partial(transformer_engine.convert, name=recipe))


def _blocks_of_transformer_engine() -> Iterator[Contender]:
    if installed("TransformerEngine") is None:
        return
    for name in (None, "current", "delayed"):
        convert = partial(transformer_engine.with_own_blocks, name=name)
        yield Contender("TransformerEngine", f"{name or 'bf16'}, its own blocks", False, convert)


def _liger() -> Iterator[Contender]:
    if installed("Liger") is not None:
        yield Contender("Liger", "bf16, its norms and SwiGLU", False, liger.with_own_norms)


def compile_afresh() -> None:
    """Forget what was compiled, and let one function be compiled for each contender."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64


def training_step(contender: Contender, model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step of training by fused AdamW, which returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=contender.recorded)

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if contender.after_step is not None:
            contender.after_step(model)
        return loss.detach()

    return step
