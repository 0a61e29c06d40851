"""``lpq advise MODEL``: what each recipe is predicted to gain for the layers of a model, and the line to paste."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn

import lpq
from lpq import observe
from lpq.bench.gpus import ALIGNED, GPUS, NARROW, USUAL_SHARE, Gpu, bytes_of_element, is_compared, key_of, predicted
from lpq.bench.layers import LayerSize, StackSize
from lpq.bench.native import encoded_by_torch, encodes, native_products
from lpq.bench.speedups import in_figures, measure, ratio, total
from lpq.cli.memory import unit_for
from lpq.cli.models import NAMED, Chosen, ModelError, alike, convert, layer_sizes, left_out, on_meta, patterns
from lpq.cli.output import Json, as_json, print_text
from lpq.nn.conversion_plan import rule_names
from lpq.nn.names import plain_name
from lpq.recipes import Recipe
from lpq.recipes.policy_sources import refuse_rules
from lpq.recipes.rules import LEAVE
from lpq.registry.errors import OptionError, suggestion
from lpq.registry.tables import table

USUAL = ("fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
LEAST = 1 / 1.15
"""The gain below which a layer is better left alone: predictions are off by up to 15 %, and layers of one input share
its encoding, which is counted for each."""
WIDE = 4096
"""From this width on gathers of codes save time; in narrower models they wait for the host."""
Source = Annotated[str, typer.Argument(metavar="MODEL", help=f"The model: {NAMED}")]
Card = Annotated[str, typer.Option("--gpu", help=f"The GPU: {', '.join(GPUS)}. Default: this machine's.")]
World = Annotated[int, typer.Option("--world", min=1, help="The number of GPUs over which FSDP2 shards the model.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="The tokens of a step on each GPU.")]
Recipes = Annotated[
    list[str] | None, typer.Option("--recipe", help=f"A recipe to look at; repeatable. Default: {', '.join(USUAL)}.")
]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one size whose names differ by numbers only, and the predicted seconds of each. The experts of a
    module, which have one recipe, are a layer."""

    title: str
    names: tuple[str, ...]
    sizes: tuple[LayerSize, ...]
    """One size of a linear layer, or one for each stack of experts."""
    plain: float
    seconds: Mapping[str, float]

    @property
    def count(self) -> int:
        return len(self.names)

    def gain(self, recipe: str) -> float:
        return self.plain / self.seconds[recipe]

    def experts(self) -> list[StackSize]:
        """The stacks, if these are experts."""
        return [size for size in self.sizes if isinstance(size, StackSize)]


def advise(
    model: Source,
    gpu: Card = "",
    world: World = 1,
    tokens: Tokens = 8192,
    chosen: Chosen = None,
    recipe: Recipes = None,
    json: Json = False,
) -> None:
    """Predict what each recipe gains for each linear layer of a model on a GPU, and give the line to paste.

    The model is built on the meta device, and nothing is allocated. Times are forward and backward of the layers by
    themselves: attention, norms, the optimizer and communication come on top, so the model gains less. Where this
    machine has the GPU in question, the layers are measured as well.
    """
    card, here = gpu_named(gpu, "--gpu")
    recipes = tuple(recipe or USUAL)
    for text in recipes:
        refuse_rules(text, "give the recipe of one of its rules")
        lpq.recipe(text)
    built = on_meta(model, "MODEL")
    blocks = _blocks(built)
    memories = {"bf16": observe.memory(built, world, blocks=blocks, param_dtype=torch.bfloat16)}
    warned: list[str] = []
    for text in recipes:
        warned += convert(built, text, "MODEL", world)
        memories[text] = observe.memory(built, world, blocks=blocks, param_dtype=torch.bfloat16)
    sizes = layer_sizes(built, tokens, chosen)
    groups = [_predicted(card, *group, recipes) for group in alike(sizes) if group.size]
    if not sizes:
        raise ModelError(f"MODEL {model}: lpq.convert reaches no linear layer of it: there is nothing to advise")
    unknown = left_out(sizes)
    if not groups:
        raise OptionError(str(unknown))
    measured: Measurements = _measured(groups, recipes) if here else {}
    fit = [text for text in recipes if not _is_narrow(text)] or recipes
    best = max(fit, key=lambda text: _gain(groups, text, _slow(groups, text)))
    slow = _slow(groups, best)
    every = rule_names(built)
    kept = {name for g in groups if g not in slow for name in g.names}
    skipped = patterns(
        (alias for name in sizes if name not in kept for alias in every[name]),
        (alias for name in kept for alias in every[name]),
    )
    gathered = {text: m.forward + m.backward for text, m in memories.items()}
    line = _line(groups, best, slow, skipped, gathered[best] < gathered["bf16"])
    if line is not None:
        convert(built, _policy(best, skipped), "MODEL", world)  # so that what is pasted is known to work
    sentences = [provenance(card), *dict.fromkeys(warned), *_reasons(card, recipes, groups, best, slow, line)]
    sentences += [text for text in (_frozen(built, groups), _too_large(card, memories["bf16"]), unknown) if text]
    if json:
        as_json(
            {
                "model": model, "gpu": card.title, "measured_rates": card.measured, "world": world, "tokens": tokens,
                "layers": [
                    {
                        "layers": g.title, "count": g.count, "matrices": [asdict(size) for size in g.sizes],
                        "bf16_ms": g.plain * 1e3, "predicted": {text: g.gain(text) for text in recipes},
                        "measured": measured.get(g.sizes, {}),
                    }
                    for g in groups
                ],
                "gain": {text: _gain(groups, text) for text in recipes},
                "gathered_bytes": gathered,
                "rank_bytes": {text: m.total for text, m in memories.items()},
                "leave_out": skipped, "line": line, "remarks": sentences,
            }
        )  # fmt: skip
        return
    _show(f"{model} on {world} {card.title}, {tokens:,} tokens on each", groups, recipes, measured)
    _show_memory(memories, world, {str(p.dtype).removeprefix("torch.") for p in built.parameters()})
    for sentence in sentences:
        print_text(sentence)
    if line is not None:
        typer.echo(f"\n{line}")


def gpu_named(gpu: str, option: str) -> tuple[Gpu, bool]:
    """The GPU that an option asks for, or else this machine's; and whether this machine has it."""
    ours = key_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    name = gpu.lower() or ours
    if name is None:
        raise OptionError(f"{option}: name one of {', '.join(GPUS)}; this machine has none of them")
    if name not in GPUS:
        raise OptionError(f"{option} {gpu}: {suggestion(name, GPUS)}")
    return GPUS[name], name == ours


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded by themselves: those in lists, which may be inside no other list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    inside = {id(m) for blocks in lists for block in blocks for m in block.modules()}
    return [block for blocks in lists if id(blocks) not in inside for block in blocks]


def _predicted(
    card: Gpu, title: str, names: tuple[str, ...], sizes: tuple[LayerSize, ...], recipes: Sequence[str]
) -> LayerGroup:
    def seconds(text: str | None) -> float:
        return sum(predicted(card, size, None if text is None else lpq.recipe(text)) for size in sizes)

    return LayerGroup(title, names, sizes, seconds(None), {text: seconds(text) for text in recipes})


Measurements = Mapping[tuple[LayerSize, ...], Mapping[str, float | None]]


def _measured(groups: Sequence[LayerGroup], recipes: tuple[str, ...]) -> Measurements:
    """The gains on this machine's GPU, by the sizes of a group."""
    sizes = [*dict.fromkeys(size for g in groups for size in g.sizes)]
    device = torch.device("cuda", torch.cuda.current_device())
    rows = dict(zip(sizes, measure(sizes, recipes, device), strict=True))

    def gain(g: LayerGroup, text: str) -> float | None:
        return ratio(*(total(((rows[size], 1) for size in g.sizes), each) for each in (None, text)))

    return {g.sizes: {text: gain(g, text) for text in recipes} for g in groups}


def _gain(groups: Sequence[LayerGroup], recipe: str, without: Sequence[LayerGroup] = ()) -> float:
    """How many times as fast all layers are together, those ``without`` a recipe in bf16."""
    times = (g.count * (g.plain if g in without else g.seconds[recipe]) for g in groups)
    return sum(g.count * g.plain for g in groups) / sum(times)


def _slow(groups: Sequence[LayerGroup], recipe: str) -> list[LayerGroup]:
    """The layers that a recipe makes slower, by more than predictions are off."""
    return [g for g in groups if g.gain(recipe) < LEAST]


def _is_narrow(recipe: str) -> bool:
    """Whether an operand has codes of about 4 bits, which is for those who compare the loss."""
    return any(bytes_of_element(side) < NARROW for pair in lpq.recipe(recipe).products.values() for side in pair)


def _policy(recipe: str, skipped: Sequence[str]) -> str | dict[str, Any]:
    if not skipped:
        return recipe
    rules = [{"match": [*skipped], "recipe": "skip"}, {"match": "*", "recipe": recipe}]
    return {"leave": [*LEAVE], "rules": rules}


def _line(
    groups: Sequence[LayerGroup], recipe: str, slow: Sequence[LayerGroup], skipped: Sequence[str], gathers: bool
) -> str | None:
    """The call to paste; None where nothing is gained. ``gathers``: whether it has fewer bytes gathered."""
    if _gain(groups, recipe, slow) <= 1:
        return None
    linear = [g for g in groups if not g.experts()] or groups  # stacks of Hugging Face's are gathered as they are
    widest = max(linear, key=lambda g: g.count * g.plain).sizes
    wide = min(min(size.inputs, size.outputs) for size in widest) >= WIDE
    gathered = ', weights="high_precision"' if gathers and wide else ""
    return f"lpq.convert(model, {jsonlib.dumps(_policy(recipe, skipped), ensure_ascii=False)}{gathered})"


def provenance(card: Gpu) -> str:
    """Say where the rates of a GPU are from."""
    if card.measured:
        return (
            f"The rates of the {card.title} are measured: predictions were within 15 % of the layers in the benchmarks "
            "whose time is the GPU's. Small layers, whose time is the host's, may take more than twice as long."
        )
    share = f"{USUAL_SHARE:.0%} of a data sheet's"
    return f"Nobody measured lpq on the {card.title}: the rates are {share}. `lpq bench` measures yours."


def not_compared(recipes: Mapping[str, Iterable[Recipe]], card: Gpu) -> list[str]:
    """Sentences on recipes and policies whose predictions were compared with no measured layer, and on formats whose
    operands no kernel encodes, as predictions have it."""
    kept = {name: [*each] for name, each in recipes.items()}
    sentences: list[str] = []
    if names := [name for name, each in kept.items() if not all(map(is_compared, each))]:
        sentences.append(
            f"{', '.join(names)}: predicted from counts of bytes and operations; no such layer was measured, and the "
            "gain may be less."
        )
    without = sorted({str(side) for each in kept.values() for one in each for side in encoded_by_torch(one, card.sm)})
    if without:
        sentences.append(
            f"{', '.join(without)}: predicted as if one kernel encoded such operands, which this GPU has not. "
            "PyTorch's operators encode them, of which each reads and writes the tensor, until the plugin has a "
            "KernelSpec for `tile` or `quantize`."
        )
    return sentences


def _reasons(
    card: Gpu,
    recipes: Sequence[str],
    groups: Sequence[LayerGroup],
    best: str,
    slow: Sequence[LayerGroup],
    line: str | None,
) -> list[str]:
    """Sentences on what gains nothing, what to leave out, and what is not in the table."""
    sentences = not_compared({text: [lpq.recipe(text)] for text in recipes}, card)
    encoded = [text for text in recipes if encodes(lpq.recipe(text))]
    bf16 = [text for text in encoded if not native_products(lpq.recipe(text), card.sm)]
    if bf16:
        sentences.append(f"{', '.join(bf16)}: lpq multiplies them in bf16 on this GPU, which saves bytes and no time.")
    uneven = [g.title for g in groups if any(n % ALIGNED for size in g.sizes for line in size.lines for n in line)]
    if uneven and len(bf16) < len(encoded):
        sentences.append(
            f"{', '.join(uneven)}: inputs, outputs or tokens are no multiple of {ALIGNED}, and such products are made "
            "in bf16."
        )
    narrow = [text for text in recipes if _is_narrow(text) and _gain(groups, text) > max(_gain(groups, best), 1)]
    if line is None:
        others = f" but {' and '.join(narrow)}" if narrow else ""
        sentences.append(f"Stay in bf16 here: no recipe{others} saves time for these layers.")
    elif slow:
        sentences.append(f"Leave out {', '.join(g.title for g in slow)}: {best} makes them slower.")
    if line is not None and 'weights="high_precision"' in line:
        sentences.append("Weights are gathered quantized: `weights=None` gathers them in bf16, with the same numbers.")
    if narrow:
        faster = "faster" if line is None else "faster still"
        sentences.append(f"{', '.join(narrow)}: {faster}, with codes of 4 bits; compare the loss before you choose it.")
    return sentences + _of_experts(card, recipes, groups)


def _frozen(model: nn.Module, groups: Sequence[LayerGroup]) -> str | None:
    """Say that layers whose weights are frozen are predicted as others are; None if there are none."""
    trained = {
        plain_name(name)
        for name, module in model.named_modules()
        if any(p.requires_grad and p.dim() > 1 for p in module.parameters())
    }
    frozen = [g.title for g in groups if not trained.issuperset(g.names)]
    if not frozen:
        return None
    named = ", ".join(frozen)
    return f"{named}: predicted as if all were trained. A step of a frozen weight makes two of the three products."


def _too_large(card: Gpu, memory: observe.Memory) -> str | None:
    """Say that a rank's share is more than the memory of the GPU; None if it is not."""
    if memory.total <= card.memory * 2**30:
        return None
    held = f"A rank would hold {memory.total / 2**30:,.0f} GiB before activations"
    return f"{held}, and the {card.title} has {card.memory}: shard over more GPUs (--world)."


def _of_experts(card: Gpu, recipes: Sequence[str], groups: Sequence[LayerGroup]) -> list[str]:
    """Sentences on experts."""
    if not (stacks := [stack for g in groups for stack in g.experts()]):
        return []
    rows = sorted({f"{stack.tokens // stack.experts:,}" for stack in stacks})
    sentences = [
        f"An expert gets {' or '.join(rows)} rows, as many as any other. Experts were measured on an H100 alone, with "
        "512 rows and more."
    ]
    bf16 = [
        text
        for text in recipes
        if native_products(lpq.recipe(text), card.sm) and not native_products(lpq.recipe(text), card.sm, True)
    ]
    if bf16:
        sentences.append(f"{', '.join(bf16)}: this GPU multiplies the rows of experts in bf16.")
    return sentences


def _show(heading: str, groups: Sequence[LayerGroup], recipes: Sequence[str], measured: Measurements) -> None:
    def cell(group: LayerGroup, text: str) -> str:
        gain = measured.get(group.sizes, {}).get(text)
        return f"{group.gain(text):.2f}" + (f" ({in_figures(gain)})" if measured else "")

    rows = [
        (
            g.title, str(g.count), "\n".join(size.weight for size in g.sizes), f"{g.plain * 1e3:.2f}",
            *(cell(g, text) for text in recipes),
        )
        for g in groups
    ]  # fmt: skip
    total = sum(g.count * g.plain for g in groups) * 1e3
    gains = [f"{_gain(groups, text):.2f}" for text in recipes]
    rows.append(("all of them", str(sum(g.count for g in groups)), "", f"{total:.1f}", *gains))
    more = ", in brackets as measured here" if measured else ""
    title = f"{heading}: predicted ms of a layer in bf16, and how many times as fast{more}"
    table(title, ("layers", "count", "inputs x outputs", "bf16", *recipes), rows)


def _show_memory(memories: Mapping[str, observe.Memory], world: int, dtypes: Iterable[str]) -> None:
    unit, size = unit_for(max(m.total for m in memories.values()))
    rows = [("weights, gradients, moments of a rank", *(f"{m.total / size:.2f}" for m in memories.values()))]
    if world > 1:
        gathered = (f"{(m.forward + m.backward) / size:.2f}" for m in memories.values())
        rows.append(("whole weights gathered in a step", *gathered))
    shards = " and ".join(sorted(dtypes))
    table(f"{unit}, with {shards} shards and weights gathered in the form of the recipe", ("", *memories), rows)
