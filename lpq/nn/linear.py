"""Linear: an ``nn.Linear`` whose three GEMMs multiply quantized operands.

    fprop  y = x.row · w.row        dgrad  dx = dy.row · w.col        wgrad  dw = dy.col · x.col

Forward encodes ``x`` and ``w`` in both directions and keeps for backward the two operands that backward multiplies, not
the high-precision input. State that lives across steps is read in forward and moves in backward only, so that
evaluation leaves it alone and activation checkpointing, which runs forward twice, computes the same numbers twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lpq import recipes, registry
from lpq.core import QuantizedTensor, Quantizer, Storage, encode_operands, gemm, remember
from lpq.core.derive import rounds_stochastically
from lpq.core.exact import serves
from lpq.core.quantize import as_matrix
from lpq.core.quantizer import Direction
from lpq.core.seeds import draw_seeds
from lpq.core.tensor import operand_tensors
from lpq.nn import recomputed
from lpq.nn.accumulation import Accumulate, is_summed, sum_in_place
from lpq.nn.exported import forward_of
from lpq.nn.held import HeldWeight, as_it_is
from lpq.nn.memories import Memory, check_names, memories
from lpq.nn.refusals import check, check_memories
from lpq.nn.saved import Saved
from lpq.recipes.gemms import TENSORS

if TYPE_CHECKING:
    from lpq.distributed.gather import Gather
    from lpq.nn.stages import Stages
    from lpq.recipes import Recipe, RecipeLike, Schedule

DIRECTIONS: tuple[Direction, Direction] = ("row", "col")
State = dict[str, Tensor]
Product = tuple[Quantizer, Quantizer]
"""What quantizes the two operands of a product."""


@dataclass(frozen=True)
class Plan:
    """What one layer does with its three tensors."""

    x: Quantizer
    w: Quantizer
    dy: Quantizer
    fast: tuple[bool, bool, bool]
    """For fprop, dgrad and wgrad: whether a kernel may sum in less than fp32."""
    stochastic: bool
    """Whether anything is rounded with random bits."""
    memories: tuple[Memory, ...]
    """The buffers in which quantizers remember."""
    fprop: Product | None = None
    """The product, if one of its operands can be made for it without being encoded; dgrad and wgrad likewise."""
    dgrad: Product | None = None
    wgrad: Product | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """The plan that a recipe makes. Gradients are summed exactly unless it says otherwise."""
        fast = (recipe.fprop.fast_accumulate, recipe.dgrad.fast_accumulate, recipe.wgrad.fast_accumulate)
        tensors = (recipe.x, recipe.w, recipe.dy)
        stochastic = any(map(rounds_stochastically, tensors))
        of = [product if any(map(_made_exactly, product)) else None for product in recipe.products.values()]
        asked = (fast[0] is not False, fast[1] is True, fast[2] is True)
        return cls(*tensors, asked, stochastic, memories(recipe), *of)

    def __post_init__(self) -> None:
        for quantizer in (self.x, self.w, self.dy):
            quantizer.ready()


class _Multiply(torch.autograd.Function):
    """The three GEMMs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        dtype: torch.dtype,
        states: dict[str, State],
        seeds: dict[str, Tensor],
        held: HeldWeight | None,
        measured: list[Tensor],
        accumulate: Accumulate | None,
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        state_x, state_w = states.get("x"), states.get("w")
        exact = plan.fprop is not None and serves(*plan.fprop, x), False
        x_row, x_col, x_stats = encode_operands(
            plan.x, x, col=needs_dw, state=state_x, seed=seeds.get("x"), exact=exact
        )
        w_col: Storage | None
        w_stats: list[Tensor]
        if held is not None:
            w_row, w_col, w_stats = held.row, held.col, []
        else:
            w_row, w_col, w_stats = weight_operands(
                plan.w, weight, col=needs_dx, state=state_w, seed=seeds.get("w"), exact=exact
            )
            w_stats = w_stats or measured
        assert x_row is not None
        y = gemm(x_row, w_row, bias=bias, dtype=dtype, fast_accumulate=plan.fast[0])
        kept_x, kept_w = (x_col if needs_dw else None), (w_col if needs_dx else None)
        tensors = [*_tensors(kept_x), *_tensors(kept_w), *x_stats, *w_stats]
        seed, seen = seeds.get("dy"), recomputed.seen(states) if states else None
        ctx.save_for_backward(*tensors, *[t for t in (seed, seen) if t is not None])
        ctx.seen = seen.tolist() if seen is not None else None
        ctx.plan, ctx.states = plan, states
        ctx.kept_x, ctx.kept_w = _described(kept_x), _described(kept_w)
        ctx.stats = len(x_stats), len(w_stats)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype if bias is not None else None
        ctx.accumulates = (weight, accumulate) if accumulate is not None else None
        # Of its buffers autograd does not count what is written: that happens inside of operators.
        watched = needs_dx and isinstance(weight, QuantizedTensor) and not torch.compiler.is_compiling()
        ctx.stored = (weight, as_it_is(weight)) if watched else None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True: a layer with a recipe has no second derivative, as it does not keep its input. "
                "Leave that out, or have the policy leave the layer in high precision"
            )
        if ctx.stored is not None and as_it_is(ctx.stored[0]) != ctx.stored[1]:
            raise RuntimeError(
                f"a weight of {[*ctx.stored[0].shape]} that is stored quantized was written to after forward, and "
                "backward needs it as it was: write to it after backward"
            )
        plan: Plan = ctx.plan
        saved = list(ctx.saved_tensors)
        if ctx.seen is not None:
            recomputed.compare(ctx.seen, saved.pop())
        x_col, saved = _take(ctx.kept_x, saved)
        w_col, saved = _take(ctx.kept_w, saved)
        x_stats, w_stats = saved[: ctx.stats[0]], saved[ctx.stats[0] : sum(ctx.stats)]
        seed = saved[sum(ctx.stats)] if len(saved) > sum(ctx.stats) else None
        dx = dw = db = None
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        if needs_dx or needs_dw:
            state = ctx.states.get("dy")
            exact = (
                needs_dx and plan.dgrad is not None and serves(*plan.dgrad, dy),
                needs_dw and plan.wgrad is not None and serves(*plan.wgrad, dy),
            )
            dy_row, dy_col, dy_stats = encode_operands(
                plan.dy, dy, row=needs_dx, col=needs_dw, state=state, seed=seed, exact=exact
            )
            if needs_dx:
                assert dy_row is not None
                assert w_col is not None
                dx = gemm(dy_row, w_col, dtype=x_dtype, fast_accumulate=plan.fast[1])
            if needs_dw:
                assert dy_col is not None
                assert x_col is not None
                sum_so_far = None
                if ctx.accumulates is not None and is_summed(ctx.next_functions[1][0]):
                    sum_so_far = sum_in_place(*ctx.accumulates)
                w_dtype = w_dtype if sum_so_far is None else sum_so_far.dtype
                dw = gemm(dy_col, x_col, dtype=w_dtype, fast_accumulate=plan.fast[2])
                if sum_so_far is not None:
                    sum_so_far.add_(dw)
                    dw = None
            if state is not None:
                remember(plan.dy, state, dy_stats, row=needs_dx, col=needs_dw)
            if "x" in ctx.states:
                remember(plan.x, ctx.states["x"], x_stats, col=needs_dw)
            if "w" in ctx.states and w_stats:
                remember(plan.w, ctx.states["w"], w_stats, col=needs_dx)
        if needs_db:
            db = dy.sum(0).to(b_dtype)
        return dx, dw, db, None, None, None, None, None, None, None


def _made_exactly(side: Quantizer) -> bool:
    """Whether the format has kernels, for any hardware, that make an operand for a product without encoding it."""
    return bool(registry.kernels("exact_tile", (registry.format_of(type(side)).name,)))


def weight_operands(
    quantizer: Quantizer,
    weight: Tensor,
    *,
    col: bool = True,
    state: State | None = None,
    seed: Tensor | None = None,
    exact: tuple[bool, bool] = (False, False),
) -> tuple[Storage, Storage | None, list[Tensor]]:
    """The operands of a weight, which may be stored quantized already. ``exact`` as for ``encode_operands``."""
    if isinstance(weight, QuantizedTensor):
        stored = [_stored_operand(quantizer, weight, d) for d in (DIRECTIONS if col else DIRECTIONS[:1])]
        return stored[0], stored[1] if col else None, []
    operands = encode_operands(quantizer, weight, col=col, state=state, seed=seed, exact=exact)
    assert operands.row is not None
    return operands.row, operands.col, operands.measured


def _stored_operand(quantizer: Quantizer, weight: QuantizedTensor, direction: Direction) -> Storage:
    side = quantizer.side(direction)
    rows, cols = weight.shape
    shape = (rows, cols) if direction == "row" else (cols, rows)
    tensors = operand_tensors(weight, direction, side.text)
    return side.storage.wrap(tensors, side, shape, weight.dtype)


def _tensors(operand: Storage | None) -> list[Tensor]:
    return operand.tensors() if operand is not None else []


def _described(operand: Storage | None) -> tuple[Quantizer, tuple[int, int], torch.dtype] | None:
    return (operand.quantizer, operand.shape, operand.dtype) if operand is not None else None


def _take(described: Any, saved: list[Tensor]) -> tuple[Storage | None, list[Tensor]]:
    if described is None:
        return None, saved
    quantizer, shape, dtype = described
    count = len(quantizer.layout)
    return quantizer.storage.wrap(saved[:count], quantizer, shape, dtype), saved[count:]


class Layer(Saved):
    """``y = x Wᵀ + b`` with the three GEMMs of ``recipe``, for a class of modules that has ``weight`` and ``bias`` and
    does the same in high precision: a subclass of this and of that class. With ``recipe=None`` it is that class.

    The state dict has the keys of that class. A recipe that remembers statistics across steps (delayed scaling) adds
    its buffers, ``x_…``, ``w_…`` and ``dy_…``. A checkpoint without them loads too, and starts them afresh; those of
    another recipe say nothing here, and are left out.
    """

    bias: nn.Parameter
    in_features: int
    out_features: int
    transposed: ClassVar[bool] = False
    """Whether the weight is ``Wᵀ``, ``[in_features, out_features]``."""
    kind: ClassVar[str] = "lpq.nn.Linear"
    """The class in messages."""
    _recipe: Recipe | None
    _plan: Plan | None
    _held: HeldWeight | None
    schedule: Schedule | None
    """Which recipe holds at which step, when a policy says so; see ``lpq.set_step``."""
    stages: Stages | None
    """The step of the model, if the schedule has several recipes."""
    place: str
    """Its name in the model that was converted, for error messages."""
    accumulate: Accumulate | None
    """Where backward adds the gradient of the weight, in place: to ``weight.grad``, if it is there, or to
    ``weight.main_grad``, in the dtype that it has. None: it is handed to autograd, as it is always where
    ``torch.autograd.grad`` asks for it."""

    def begin(self) -> None:
        """Have what a layer has, and no recipe yet."""
        self._recipe, self._plan, self._held, self.schedule = None, None, None, None
        self.gathering, self.accumulate, self.stages, self.place = None, None, None, ""

    # ------------------------------------------------------------------------------ the recipe

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; assign a name, a string or a ``Recipe`` to change it. Weights and optimizer state stay."""
        return self._recipe

    @recipe.setter
    def recipe(self, source: RecipeLike | None) -> None:
        recipe = recipes.recipe(source) if source is not None else None
        if recipe == self._recipe:
            return
        plan = None
        if recipe is not None:
            plan = Plan.of(recipe)
            check_names(self, recipe, self.memories(), self.title)
        for name in self.memories():
            delattr(self, name)
        self._recipe, self._plan = recipe, plan
        if self.gathering is not None:
            self.gathering.alike = False
        for tensor in TENSORS if plan is not None else ():
            for key, memory in getattr(plan, tensor).new_state(self.weight.device).items():
                self.register_buffer(f"{tensor}_{key}", memory)

    def _states(self) -> dict[str, State]:
        """The state of each tensor that has one, by the names its quantizer knows."""
        states: dict[str, State] = {}
        for name, tensor, key in self._plan.memories if self._plan is not None else ():
            states.setdefault(tensor, {})[key] = getattr(self, name)
        return states

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None, "stages": None}  # nobody would release a copy's, or step it

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of what is loaded from a pickle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.claim_weight()

    @property
    def title(self) -> str:
        """What messages call it."""
        kind = f"{self.kind}({self.in_features}, {self.out_features})"
        return f"layer {self.place}, {kind}" if self.place else kind

    # ------------------------------------------------------------------------------ running it

    def forward(self, input: Tensor) -> Tensor:
        if self.stages is not None:
            self.stages.check(self)
        if self._plan is None:
            return super().forward(input)  # type: ignore[no-any-return]  # of the class beside this one
        weight: Tensor = self.weight.t() if self.transposed else self.weight
        check(self, input, weight)
        x = as_matrix(input)
        device = input.device.type
        if not input.is_meta and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):  # it has no more to say, and would slow every operation
                return self._multiply(input, x, weight, dtype)
        return self._multiply(input, x, weight, input.dtype)

    def _multiply(self, input: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._plan is not None
        seeds = {}
        if self._plan.stochastic:
            seeds = dict(zip(TENSORS, draw_seeds(x, weight, len(TENSORS)).unbind(), strict=True))
        states = self._states()
        if states:
            check_memories(self, states)
            recomputed.check(self, states)
        measured = self._gathered("w" in states)
        multiply: Any = forward_of(_Multiply) if torch.compiler.is_exporting() else _Multiply.apply
        y: Tensor = multiply(
            x, weight, self.bias, self._plan, dtype, states, seeds, self.held_weight(), measured, self.accumulate
        )
        # Not a view to autograd: what a module returns may be changed in place.
        return y if input.dim() == 2 else torch.ops.aten._unsafe_view(y, (*input.shape[:-1], self.out_features))

    # ------------------------------------------------------------------------------ being sharded

    def weight_quantizer(self) -> Quantizer | None:
        """What quantizes the weight at this step; None: nothing does."""
        return self._plan.w if self._plan is not None else None

    def weight_state(self) -> State | None:
        """What the quantizer remembers of the weight across steps."""
        return self._states().get("w")

    def memories(self) -> dict[str, Tensor]:
        """All that the layer's quantizers remember across steps, by the names of the buffers."""
        return {name: getattr(self, name) for name, *_ in (self._plan.memories if self._plan is not None else ())}

    def weight_gather(self) -> Gather:
        """How the weight is gathered; FSDP2 asks for it, once it shards the layer."""
        if self.gathering is None:
            raise RuntimeError(f"{self.title}: its weight was prepared by lpq.convert(…, weights=…) for another layer")
        return self.gathering.of(self)

    def _gathered(self, remembers: bool) -> list[Tensor]:
        """Forward begins: say whether it runs again, and get what was measured of a weight that was gathered."""
        if self.gathering is None:
            return []
        gather = self.gathering.find(self)
        if gather is None:
            return []
        if not torch.compiler.is_compiling():
            gather.note(recomputed.runs_again())
        return [s for s in gather.stats if s is not None] if remembers else []

    # ------------------------------------------------------------------------------ holding an encoded weight

    def hold_weight(self) -> None:
        """Encode the weight now, for every pass until ``release_weight``."""
        if self._plan is None:
            return
        if hasattr(self.weight, "device_mesh"):
            raise ValueError(
                f"{self.title}: hold_weights is for weights that are not sharded; FSDP2 keeps gathered ones for "
                "several passes after set_reshard_after_backward(False)"
            )
        state = self._states().get("w")
        with torch.no_grad():
            weight: Tensor = self.weight.t() if self.transposed else self.weight
            row, col, stats = weight_operands(self._plan.w, weight, state=state)
            if state is not None and stats:  # of one that is stored quantized nothing is measured
                remember(self._plan.w, state, stats)
        assert col is not None
        found, memory = as_it_is(self.weight), self.weight.detach()
        self._held = HeldWeight(row, col, self.weight, self._plan.w, found, memory)

    def release_weight(self) -> None:
        self._held = None

    @property
    def held(self) -> HeldWeight | None:
        """The encoded weight, from ``hold_weight`` to ``release_weight``, whether it is out of date or not."""
        return self._held

    def held_weight(self) -> HeldWeight | None:
        """The same, refused if it is out of date. A compiled pass does not look."""
        held = self._held
        if held is None or torch.compiler.is_compiling():
            return held
        if self._plan is not None and not held.is_of(self.weight, self._plan.w):
            raise RuntimeError(
                f"{self.title}: the weight was changed while its encoded form is held, or has another format now; "
                "leave lpq.hold_weights before the optimizer's step, and before another recipe"
            )
        return held

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self._recipe.title if self._recipe else None}"


class Linear(Layer, nn.Linear):
    """``nn.Linear`` with the three GEMMs of ``recipe``; see ``Layer``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike | None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.begin()
        self.recipe = recipe

    @classmethod
    def adopt(cls, module: nn.Linear, recipe: RecipeLike | None) -> Self:
        """Turn this very ``nn.Linear`` into a ``Linear``: parameters, hooks and references to it stay."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.begin()
        module.recipe = recipe
        return module
