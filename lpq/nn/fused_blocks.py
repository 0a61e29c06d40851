"""Blocks of other libraries that lpq computes as one function: known by what they compute, and not by their class.

A block is tried on a few rows, with stand-ins for its layers. If it calls the first with its input and the last with an
activation of their outputs, such as ``silu(gate) * up`` or ``gelu(up)``, to the bit and by as many functions of torch,
and returns what the last returns, or a dropout of it, ``mlp`` may stand for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from inspect import signature
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq.nn.adopted_norms import AdoptedNorm, adopt, norm_of, release
from lpq.nn.extended import Extension, check_extended, class_before, extend, restore
from lpq.nn.first_argument import Model, check_model
from lpq.nn.followed_norms import followers, norms_in
from lpq.nn.fused_experts import FusedExperts, Gate, activated, why_as_before
from lpq.nn.fused_mlp import HOOKED, SwiGLU, mlp, why_apart, why_changed
from lpq.nn.halves import activate
from lpq.nn.names import plain_name
from lpq.nn.norm_groups import REPLACED as REPLACED_SINCE
from lpq.nn.norms import AUTOCAST, NO_WEIGHT, EncodingNorm
from lpq.nn.reports import Entry
from lpq.nn.residual_layers import ResidualLayer, extend_residual, release_residual, who_adds
from lpq.nn.stand_ins import Read, StandIn, Trial, aside, numbers
from lpq.nn.stateful_layer import StatefulLayer
from lpq.nn.undoing import undone_if_refused
from lpq.operations.source import ACTIVATIONS
from lpq.registry.showing import listed
from lpq.torch_private.hooks import has_hooks

FUSED = "lpq_fuses"
"""An attribute of models whose blocks ``fuse`` has looked at."""
ONE_FUNCTION = "its layers are one function, with encoded operands between them"
ENCODES = "it encodes its output, once, for the layers that take it"
IN_RUNS = "it encodes its output in {} runs, one for each format that layers behind it take"
SERVES = ", and hands it to others in high precision, from {}"
LATER = "backward makes the column operand for {} anew"
KEPT = "x.save=input has no effect for {}, as {}"
ONE_KERNEL = "one kernel computes its activation; gate and up are one layer, and operands are encoded as before"
OTHER = "its forward is neither down(act(gate(x)) * up(x)) nor down(act(up(x))) alone, with a SiLU, GELU or ReLU"
DROPS = "a dropout stands before its last layer, and may drop elements in a later pass if it drops none now"
RAISES = "it does not run on a few rows by itself, which would show what it computes: it raises {}"
DRAWS = "it calls up before gate, and fused these would draw each other's random numbers"
SIZES = "in_features", "out_features"
"""The attributes of a linear layer."""
TOKENS = 2**14
"""Tokens of a sequence, of which each rank has whole blocks, as far as that can be."""
REPLACED = "its forward was replaced on the object"
SINCE = "lpq.fuse has not looked at it as it is now: call lpq.fuse again"
COMPILED = "; compiled code computes it as before, and the compiler fuses it in its own way"
"""The end of a note."""


class BlockParts(NamedTuple):
    """The children of a block, by name."""

    before: tuple[str, ...]
    """Gate and up, or up alone, or one layer whose outputs are gate and up."""
    down: str
    activation: str
    behind: str | None
    """A dropout of what the last layer returns; None: there is none."""
    halves: bool
    """Whether one layer makes gate and up."""
    up_first: bool
    """Whether up is called before gate."""
    children: dict[str, nn.Module]
    """All of them, as they were when the block was fused."""
    reads: tuple[Read, ...]
    """The attributes that its forward read then, of the block and of its activation."""


class FusedBlock(Extension, nn.Module):
    """A block that is computed as one function where its layers allow it; see ``mlp``."""

    lpq_parts: BlockParts
    lpq_unfit: str | None = None
    """Why it was computed as before in its last pass, whatever its layers are, if it was."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the class before does."""
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or _why_changed(self) is not None:
            return super().forward(*args, **kwargs)  # of the class before
        *before, down = layers_of(self)
        activation, behind, halves = self.lpq_parts[2:5]
        act = ACTIVATIONS[activation]
        self.__dict__["lpq_unfit"] = AUTOCAST if act.is_high else None
        y = down(activate(before[0](args[0]), act)) if halves else mlp(args[0], before, down, act)
        return y if behind is None else self.lpq_parts.children[behind](y)


def layers_of(block: FusedBlock) -> tuple[nn.Module, ...]:
    """Gate, if there is one, up and down."""
    return tuple(block.lpq_parts.children[name] for name in (*block.lpq_parts.before, block.lpq_parts.down))


def _why_changed(block: FusedBlock) -> str | None:
    """Why ``mlp`` no longer stands for a block, whatever its layers are; None if it does."""
    before, down, _, behind, _, up_first, children, reads = block.lpq_parts
    if "forward" in vars(block):
        return REPLACED_SINCE
    if up_first and any(_draws(children[name]) for name in before):
        return DRAWS
    return why_changed(block, children, (*before, down, behind), reads)


def _draws(layer: nn.Module) -> bool:
    """Whether a pass of a layer draws random numbers."""
    return isinstance(layer, StatefulLayer) and layer.passes.plan is not None and layer.passes.plan.stochastic


def fuse(model: Model) -> Model:
    """Compute blocks of a converted model as one function each, where encoded operands may go from layer to layer.

    A block of Llama, ``down(silu(gate(x)) * up(x))``, is found by what it computes. So is a norm whose output goes to
    layers of lpq: it encodes the output for them. Results and gradients stay the same to the bit, but for the
    order of some sums: of a norm's kernels on a GPU, and of gradients that autograd adds where a tensor goes elsewhere,
    too. Classes, parameters, hooks and the keys of the state dict stay.
    A pass in which something stands between the layers, such as a hook of one of them, runs as before. ``lpq.report``
    lists the fused blocks, and says of others why they are not. Returns the model.

    Args:
        model: A converted model, or a part of it. A model may be fused again, after layers were replaced.
    """
    check_model(model)
    if not is_converted(model):
        raise ValueError("the model was not converted: call lpq.convert(model, …) before lpq.fuse(model)")
    with undone_if_refused(model):
        model.__dict__[FUSED] = True
        for module in list(model.modules()):
            if isinstance(module, FusedExperts):
                module.gate = _gate(module)
            if isinstance(module, FusedBlock) and _why_changed(module) not in (None, REPLACED_SINCE):
                _release(module)
            if isinstance(module, EncodingNorm) and module.block is not None and not module.in_block():
                release(module)
            parts = find_parts(module)
            if isinstance(parts, BlockParts):
                extend(module, FusedBlock)
                module.__dict__["lpq_parts"] = parts
        known = cache(norm_of)
        for module in list(model.modules()):
            norms = norms_in(module, known)
            for name, result in followers(module, norms, known).items():
                norm = norms[name]
                if isinstance(norm, EncodingNorm) and norm.consumers:
                    if not norm.places or "forward" in vars(norm):
                        continue  # its author has named the layers, or the forward that calls ours would lose it
                    release(norm)
                    known.cache_clear()
                if not isinstance(result, str) and (found := known(norm)) is not None:
                    layers = tuple(place[-1][2] for place in result.places)
                    adopt(norm, found, layers, *result)  # type: ignore[arg-type]
            extend_residual(module)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether a model has layers of lpq."""
    return any(isinstance(module, StatefulLayer) for module in model.modules())


def unfuse(model: Model) -> Model:
    """Give the blocks and norms that ``fuse`` changed their former classes, and return the model.

    Args:
        model: The model that ``fuse`` got, or a part of it.
    """
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, FusedBlock | ResidualLayer | AdoptedNorm):
            check_extended(module)
            if "forward" in vars(module):
                raise RuntimeError(
                    f"{name or 'the model'}: {REPLACED} since, and may call what lpq.fuse made: take that away before. "
                    "accelerate.hooks.remove_hook_from_module leaves a forward there: `del module.forward` ends it"
                )
    for module in list(model.modules()):
        module.__dict__.pop(FUSED, None)
        if isinstance(module, FusedExperts):
            vars(module).pop("gate", None)
        if isinstance(module, FusedBlock):
            _release(module)
        if isinstance(module, ResidualLayer):
            release_residual(module)
        if isinstance(module, EncodingNorm) and module.places:
            release(module)
    return model


def _release(block: FusedBlock) -> None:
    restore(block, "lpq_parts", "lpq_unfit")


def find_parts(module: nn.Module) -> BlockParts | str | None:
    """The parts of a block that can be fused, though perhaps not with the layers that it has, as where one has an
    adapter; the reason why another block with two or three such layers cannot; None for a module that is no such block,
    or is fused already."""
    children = {name: m for name, m in module._modules.items() if m is not None}
    own = [name for name, m in children.items() if next(m.parameters(), None) is not None]
    if len(own) not in (2, 3) or isinstance(module, FusedBlock | SwiGLU | torch.jit.ScriptModule):
        return None
    if not all(isinstance(getattr(children[name], size, None), int) for name in own for size in SIZES):
        return None  # an adapter has the sizes of the layer that is in it
    orders = [names for names in permutations(own) if _fit(*(children[name] for name in names))]
    if orders and "forward" in vars(module):
        return REPLACED
    reasons = []
    for *before, down in orders:
        result = _activation(module, before, down)
        if isinstance(result, str):
            reasons.append(result)
        elif result is not None:
            if any(has_hooks(m) for name, m in children.items() if name not in (*own, result[1])):
                return HOOKED
            activation, behind, up_first, reads = result
            halves = _makes_halves([children[name] for name in before], children[down])
            return BlockParts((*before,), down, activation, behind, halves, up_first, dict(module._modules), reads)  # type: ignore[arg-type]
    return OTHER if OTHER in reasons else next(iter(reasons), None)


def _fit(*layers: Any) -> bool:
    """Whether layers have the sizes of gate, if there is one, up and down."""
    *before, down = layers
    outputs = down.in_features * (2 if _makes_halves(before, down) else 1)
    return all((up.in_features, up.out_features) == (down.out_features, outputs) for up in before)


def _makes_halves(before: Sequence[Any], down: Any) -> bool:
    """Whether one layer makes gate and up."""
    return len(before) == 1 and before[0].out_features == 2 * down.in_features


def notes(model: nn.Module) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The fused blocks of a model, and the other blocks with the reason why they are not fused."""
    fused: list[Entry] = []
    apart: list[Entry] = []
    sums = who_adds(model)
    for name, module, reason in _blocks(model):
        kind, note = type(module).__name__, ONE_FUNCTION
        if isinstance(module, FusedBlock):
            kind, note = module.lpq_bases[1].__name__, ONE_KERNEL if module.lpq_parts.halves else ONE_FUNCTION
        elif isinstance(module, EncodingNorm | FusedExperts):
            note = ONE_KERNEL if isinstance(module, FusedExperts) else _runs(module, name)
            later = [] if isinstance(module, FusedExperts) else _made_later(module, name)
            note = "; ".join(filter(None, (note, *later, sums.get(id(module)))))
        if reason is None and "forward" in vars(module):
            reason = REPLACED_SINCE
        note += COMPILED * _was_traced(module)
        (fused if reason is None else apart).append(Entry(name, kind, reason or note))
    return tuple(fused), tuple(apart)


def _runs(norm: EncodingNorm, name: str) -> str:
    """The runs of a norm of this name, and why there are several."""
    groups, layers = norm.groups, norm.consumers
    block, _, _ = name.rpartition(".")
    note = ENCODES
    if len(groups) > 1:
        takers = [[layers[i].qualified_name.removeprefix(f"{block}.") for i in group.at] for group in groups]
        runs = [f"{group.plan.x} for {listed(names)}" for group, names in zip(groups, takers, strict=True)]
        note = f"{IN_RUNS.format(len(groups))}: {', and '.join(runs)}"
    others = norm.serves_others or sum(len(group.at) for group in groups) < len(layers)
    return note + SERVES.format("the same run" if len(groups) == 1 else "the first of them") * others


def _made_later(norm: EncodingNorm, name: str) -> list[str]:
    """Notes on ``x.save=input`` of layers behind a norm of this name."""
    notes, (block, _, _) = [], name.rpartition(".")
    for group in norm.groups:
        layers = [norm.consumers[i] for i in group.at]
        asked = [layer for layer in layers if layer.passes.plan is not None and layer.passes.plan.keeps_input]
        whose = listed([layer.qualified_name.removeprefix(f"{block}.") for layer in asked])
        if asked and group.later and all(layer.layouts is None for layer in layers):
            notes.append(LATER.format(whose))
        elif asked and "x" in group.plan.remembered:
            notes.append(KEPT.format(whose, f"x={group.plan.x} remembers statistics"))
        elif asked:
            why = "ranks share out the layers" if group.later else "others keep the column operand that these take, too"
            notes.append(KEPT.format(whose, why))
    return notes


def _was_traced(module: nn.Module) -> bool:
    """Whether a compiler has traced a pass of a block or a norm."""
    if isinstance(module, EncodingNorm):
        return module.lpq_traced
    return any(layer.passes.traced for layer in module.modules() if isinstance(layer, StatefulLayer))


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Every block with its name, and the reason why it is not fused."""
    looked_at: list[str] = []
    gathered = _gathered(model)
    why: dict[int, str] = {}
    """The reasons of norms, which the block around them knows."""
    known = cache(norm_of)
    for own_name, module in model.named_modules():
        name = plain_name(own_name)
        if FUSED in vars(module):
            looked_at.append(f"{name}." if name else "")
        if isinstance(module, FusedBlock):
            *before, down = layers_of(module)
            why_not = None if module.lpq_parts.halves else why_apart(before, down, gathered)
            yield name, module, _why_changed(module) or why_not or _in_last_pass(module.lpq_unfit)
        elif isinstance(module, SwiGLU) and type(module).forward is SwiGLU.forward:
            yield name, module, why_apart((module.gate_proj, module.up_proj), module.down_proj, gathered)
        elif isinstance(module, EncodingNorm) and module.consumers:
            yield name, module, _why_plain(module, name, gathered)
        elif not any(f"{name}.".startswith(prefix) for prefix in looked_at):
            continue
        elif id(module) in why:
            yield name, module, why[id(module)]
        elif isinstance(module, FusedExperts):
            yield name, module, why_as_before(module)
        elif (parts := find_parts(module)) is not None:
            yield name, module, parts if isinstance(parts, str) else SINCE
        else:
            children = norms_in(module, known).items()
            norms = {own: norm for own, norm in children if not (isinstance(norm, EncodingNorm) and norm.consumers)}
            for own, result in followers(module, norms, known).items():
                why[id(norms[own])] = result if isinstance(result, str) else SINCE


def _why_plain(norm: EncodingNorm, name: str, gathered: Collection[nn.Module]) -> str | None:
    """Why a norm encodes nothing. A layer is called by its name in the block, by which norms of all blocks share a
    line."""
    weight: Any = norm._parameters.get("weight")
    if weight is None:
        return NO_WEIGHT
    device = "cpu" if weight.is_meta else weight.device
    like = torch.empty((), dtype=weight.dtype, device=device).expand(1, TOKENS, weight.shape[0])
    reason = norm.why_not(like if any(layer.layouts is not None for layer in norm.consumers) else like[0, :1], gathered)
    block, _, _ = name.rpartition(".")
    for layer in norm.consumers if reason is not None and block else ():
        own = layer.qualified_name
        reason = reason and reason.replace(f"layer {own},", f"layer {own.removeprefix(f'{block}.')},")
    return reason or _in_last_pass(norm.why_unfit)


def _in_last_pass(why: str | None) -> str | None:
    return None if why is None else f"in its last pass: {why}"


def _gathered(model: nn.Module) -> Collection[nn.Module]:
    """The modules whose parameters FSDP2 shards, and gathers for each pass, and nothing else shares out."""
    if not any(hasattr(p, "device_mesh") for p in model.parameters()):
        return ()
    from lpq.torch_private.fsdp import outermost, sites

    return {module for module, site in sites(outermost(model)).items() if not site.is_parallel}


def _activation(
    module: nn.Module, before: Sequence[str], down: str
) -> tuple[str, str | None, bool, tuple[Read, ...]] | str | None:
    """The activation with which the forward of a block is ``mlp``, the name of the dropout behind, whether up is called
    before gate, and the attributes by which the forward decided; the reason why it is not ``mlp``, or does not run on a
    few rows; None if it does not run and is no MLP as far as can be seen, as attention or a list of layers."""
    with aside():
        x, y, dropped, *outputs = numbers(len(before) + 3)
        if _makes_halves([module._modules[name] for name in before], module._modules[down]):
            outputs = [torch.cat(numbers(2), -1)]
        tensors = [t.clone().requires_grad_() * 1 for t in outputs]
        results = dict.fromkeys((name for name, m in module._modules.items() if type(m) is nn.Dropout), dropped)
        results |= zip((*before, down), (*tensors, y), strict=True)
        calls, trial = list[tuple[str, Any]](), Trial(grads=True)
        stand_ins = {name: StandIn(name, t, calls) for name, t in results.items()}
        try:
            like = trial.copy(module, lambda parent, name, _: stand_ins.get(name) if parent is module else None)
            with trial:
                out = class_before(module).forward(like, x)
        except Exception as error:  # other code's, which may raise anything on such an input
            begun = _begins_mlp(module, before, down, calls, x)
            return RAISES.format(type(error).__name__) if begun else None
        if trial.shows_little() or not all(map(torch.equal, tensors, outputs)):
            return OTHER
        if any(given is not y and given is not dropped for name, given in calls if results[name] is dropped):
            return DROPS
        behind = next((name for name, _ in calls if results[name] is dropped), None)
        inputs, names = dict(calls), [*before, down] if behind is None else [*before, down, behind]
        if sorted(name for name, _ in calls) != sorted(names) or any(inputs[name] is not x for name in before):
            return OTHER
        activation = _named(inputs[down], trial, tensors) if out is results[names[-1]] else None
        return OTHER if activation is None else (activation, behind, calls[0][0] != before[0], trial.of(module))


def _begins_mlp(
    module: nn.Module, before: Sequence[str], down: str, calls: Sequence[tuple[str, Any]], x: Tensor
) -> bool:
    """Whether a forward that raised begins as an MLP does: its first layers were called with its input, and the last
    was not. If it called no layer, a forward of one argument counts whose layers have sizes of an MLP alone: attention
    takes more, or the layers of q, k and v are alike, and a list of layers has no forward."""
    inputs = [(name, given) for name, given in calls if name in (*before, down)]
    if inputs:
        return sorted(name for name, _ in inputs) == sorted(before) and all(given is x for _, given in inputs)
    parameters = signature(class_before(module).forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    last: Any = module._modules[down]
    widens = last.in_features != last.out_features
    return len(needed) == 2 and widens and not _makes_halves([module._modules[name] for name in before], last)


def _gate(experts: FusedExperts) -> Gate | None:
    """The activation of experts; None if it is another one."""
    with aside():
        halves, trial = torch.cat(numbers(2), -1).requires_grad_() * 1, Trial(grads=True)
        try:
            like = trial.copy(experts, lambda *_: None, type(experts))
            with trial:
                rows = activated(like, halves)
        except Exception:  # other code's, which may raise anything on such an input
            return None
        name = None if trial.shows_little() else _named(rows, trial, [halves])
        return None if name is None else Gate(name, dict(experts._modules), trial.of(experts))  # type: ignore[arg-type]


def _named(output: Any, trial: Trial, outputs: Sequence[Tensor]) -> str | None:
    """The name of the activation of these outputs of layers, which the functions of a trial computed; its gradients are
    compared, too."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return None
    (dy,), whole = numbers(1), outputs[0].shape == output.shape
    dy = dy[..., :1].expand_as(output)
    for name, activation in ACTIVATIONS.items():
        inputs = [t.detach().requires_grad_() for t in outputs]
        with Trial(grads=True) as own:
            expected = activation.compute(*(inputs if whole else inputs[0].chunk(2, dim=-1)))
        if (trial.count, trial.attribute_reads) == (own.count, own.attribute_reads) and torch.equal(output, expected):
            grads = torch.autograd.grad(output, outputs, dy, retain_graph=True)
            if all(map(torch.equal, grads, torch.autograd.grad(expected, inputs, dy))):
                return name
    return None
