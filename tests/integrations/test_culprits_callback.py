"""The callback that finds the layer which takes a Trainer's run off its course."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama
import pytest
import torch
from llama import STEPS, converted, losses, trainer, transformers
from support.comparing import equal_states
from torch import Tensor

import lpq
from lpq.checkpoint import CheckpointError
from lpq.integrations.transformers import LpqCallback
from lpq.integrations.transformers_culprits import CulpritsCallback
from lpq.observe import Course, NumericsError

pytestmark = pytest.mark.slow

STATIC = "x=fp8(static=True), w=fp8, dy=fp8(dtype=e5m2)"


class OffAt(Course):
    """A course that is left in one step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def off(self, loss: float, norm: float | None = None) -> str | None:
        self.left -= 1
        return "planted" if self.left == -1 else super().off(loss, norm)


def planted(policy: str = "mxfp8") -> Any:
    """A model in which a layer gets huge inputs that do not count, as their weights are 0 and stay so."""
    net = converted(policy)
    layer = net.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight[:, ::16] = 0
    layer.weight.requires_grad_(False)

    def plant(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        x[..., ::16] = 1e6
        return (x,)

    layer.register_forward_pre_hook(plant)
    return net


def test_a_planted_layer_is_found_and_promoted(tmp_path: Path) -> None:
    """The step that is replayed goes on as it would, and the layer is in bf16 for as many steps as were asked for."""
    finds = CulpritsCallback(course=OffAt(2), most=1)
    done, alone = (
        trainer(planted(), tmp_path, LpqCallback(), finds),
        trainer(planted(), tmp_path / "alone", LpqCallback()),
    )
    with pytest.warns(UserWarning, match=r"(?s)step 3: planted.*model.layers.0.mlp.up_proj"):
        done.train()
    alone.train()
    assert [*finds.found] == [3]  # as the Trainer's log counts
    assert losses(done) == losses(alone)
    assert equal_states(done.model.state_dict(), alone.model.state_dict())
    promotes = CulpritsCallback(course=OffAt(2), most=1, promote=2)
    helped = trainer(planted(), tmp_path / "helped", LpqCallback(), promotes)
    with pytest.warns(UserWarning, match=r"They are in bf16 in steps 4 to 5"):
        helped.train()
    assert losses(helped)[:3] == losses(alone)[:3]
    assert losses(helped)[3] != losses(alone)[3]
    layer = helped.model.model.layers[0].mlp.up_proj
    assert [layer.schedule.at(step) == lpq.recipe("bf16") for step in range(STEPS)] == [True] * 5 + [False]
    assert layer.recipe == lpq.recipe("mxfp8")

    place = str(tmp_path / "helped" / "checkpoint-4")
    with pytest.raises(CheckpointError, match=r"the checkpoint has, for 6 steps:") as refused:
        trainer(planted(), tmp_path / "helped", LpqCallback()).train(resume_from_checkpoint=place)
    its_own = str(refused.value).partition("6 steps:")[2].partition("the model has")[0]
    (tmp_path / "policy.toml").write_text(its_own)
    resumed = trainer(planted(str(tmp_path / "policy.toml")), tmp_path / "helped", LpqCallback(), CulpritsCallback())
    resumed.train(resume_from_checkpoint=place)
    assert losses(resumed) == losses(helped)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_jump_that_bf16_has_as_well_promotes_nothing(parts: int, tmp_path: Path) -> None:
    """The head, which is in bf16, makes the loss jump. The words have one loss, however many parts a step has."""

    class Jumps(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 4:
                with torch.no_grad():
                    model.lm_head.weight.mul_(40)

    finds = CulpritsCallback(course=Course(window=4, least=2, loss=30), promote=2)
    jumps = trainer(converted("nvfp4"), tmp_path, LpqCallback(), Jumps(), finds, gradient_accumulation_steps=parts)
    with pytest.warns(UserWarning, match=r"(?s)step 5: the loss is .*, where.*no layer's format is the cause") as got:
        jumps.train()
    said = next(str(one.message) for one in got if "no layer's format" in str(one.message))
    step, replayed = (float(re.search(words, said)[1]) for words in (r"the loss is ([\d.]+)", r"\nloss ([\d.]+)"))
    assert step == pytest.approx(replayed, rel=1e-3)
    assert "They are in bf16" not in said
    assert [*finds.found] == [5]
    assert finds.found[5].found == ()
    recipes = {m.schedule.at(5) for m in jumps.model.modules() if isinstance(m, lpq.nn.Layer)}
    assert recipes == {lpq.recipe("nvfp4")}


def test_a_nan_that_stays_is_replayed_once(tmp_path: Path) -> None:
    """And a later one again, if a step between them was on the course."""
    off = {1, 2, 3, 5}

    class Off(Course):
        step = -1

        def off(self, loss: float, norm: float | None = None) -> str | None:
            self.step += 1
            return super().off(float("nan") if self.step in off else loss, norm)

    finds = CulpritsCallback(course=Off(), most=1, replays=2)
    with pytest.warns(UserWarning, match=r"(?s)step 2: the loss is nan.*are not replayed again"):
        trainer(planted(), tmp_path, LpqCallback(), finds).train()
    assert [*finds.found] == [2, 6]


@pytest.mark.parametrize("promote", [0, 2])
def test_a_step_that_is_no_number_is_done_again_where_layers_are_promoted(promote: int, tmp_path: Path) -> None:
    """A step of two parts. Without that its weights are NaN from then on."""
    net = converted("mxfp8")
    layer = net.model.layers[0].mlp.up_proj
    steps, norms = [-1], list[float]()

    class Looks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def plant(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * 1e38 * 1e2 if steps[-1] == 2 and layer.recipe == lpq.recipe("mxfp8") else args[0],)

    layer.register_forward_pre_hook(plant)
    finds = CulpritsCallback(course=(course := Course()), promote=promote, most=1)
    done = trainer(net, tmp_path, LpqCallback(), finds, Looks(), gradient_accumulation_steps=2, max_grad_norm=0.5)
    with pytest.warns(UserWarning, match=r"(?s)step 3: the (loss|gradient norm) is nan.*up_proj"):
        done.train()
    assert all(bool(p.isfinite().all()) for p in net.parameters()) == bool(promote)
    assert norms[2] == pytest.approx(0.5, rel=1e-4) or not promote  # clipped as the others
    assert len(course.state_dict()["losses"]) == (STEPS if promote else 2)  # it is on the course


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_a_scaler_of_losses_leaves_out_is_not_done_again(scaled: bool) -> None:
    """Its gradients are scaled, or known not to be finite. Control: without a scaler it is done again."""
    net, state = converted("mxfp8"), SimpleNamespace(global_step=0, stateful_callbacks={})
    layer, optimizer = net.model.layers[0].mlp.up_proj, SimpleNamespace()
    if scaled:
        optimizer.scaler = SimpleNamespace(get_scale=lambda: 8.0)
    layer.register_forward_pre_hook(
        lambda _, args: args[0] * (1e38 * 1e2 if layer.recipe == lpq.recipe("mxfp8") else 1.0)
    )
    finds = CulpritsCallback(promote=2, most=1)
    finds.on_train_begin(None, state, None, net)
    finds.on_step_begin(None, state, None, net)
    (net(**{name: value[None] for name, value in llama.examples(1)[0].items()}).loss * 8 ** int(scaled)).backward()
    with pytest.warns(UserWarning, match=r"(?s)step 1: the (loss|gradient norm) is nan.*up_proj"):
        finds.on_pre_optimizer_step(SimpleNamespace(max_grad_norm=0.0), state, None, net, optimizer=optimizer)
    assert bool(layer.weight.grad.isfinite().all()) != scaled


class Notes(Course):
    """A course that notes what each step has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float | None]] = []

    def off(self, loss: float, norm: float | None = None) -> str | None:
        self.seen.append((loss, norm))
        return super().off(loss, norm)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "activation_checkpointing": True}])
def test_norms_are_compared_as_they_are_before_clipping(options: dict[str, Any], tmp_path: Path) -> None:
    """To the bit the norms that the Trainer logs, and so are the losses, of all parts of a step. A resumed run goes on
    with the course."""
    notes = Notes()
    options = {"max_grad_norm": 1e-3, **options}
    whole = trainer(converted(), tmp_path, LpqCallback(), CulpritsCallback(course=notes), **options)
    whole.train()
    logged = [(one["loss"], one["grad_norm"]) for one in whole.state.log_history if "loss" in one]
    assert min(norm for _, norm in logged) > 1e-2
    assert notes.seen == logged
    again = Notes()
    resumed = trainer(converted(), tmp_path, LpqCallback(), CulpritsCallback(course=again), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.seen == notes.seen[4:]
    assert again.state_dict() == notes.state_dict()
    options["restore_callback_states_from_checkpoint"] = True
    anew = trainer(converted(), tmp_path, LpqCallback(), CulpritsCallback(course=Notes()), **options)
    with pytest.raises(NumericsError, match=r"had a course= of its own, which .* cannot make again: leave that out"):
        anew.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_loss_that_the_model_does_not_return_is_refused(tmp_path: Path) -> None:
    smooth = trainer(converted(), tmp_path, CulpritsCallback(), label_smoothing_factor=0.1)
    with pytest.raises(
        NumericsError, match=r"no backward of step 0 came from a loss that the model returned.*have the"
    ):
        smooth.train()


@pytest.mark.parametrize("added", [0.0, 100.0])
def test_a_term_beside_the_loss_of_the_model_is_told(added: float, tmp_path: Path) -> None:
    """No replay has it. Control: without it the replay has the numbers of the step."""

    class Adds(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            output = model(**inputs)
            loss = output.loss + added * output.logits.square().mean()
            return (loss, output) if return_outputs else loss

    done = trainer(converted(), tmp_path, LpqCallback(), CulpritsCallback(course=OffAt(2), most=1), cls=Adds)
    with pytest.warns(UserWarning, match=r"(?s)step 3: planted.*not replayed again") as got:
        done.train()
    said = next(str(one.message) for one in got if "planted" in str(one.message))
    assert ("The gradient norm of the replay is " in said) == bool(added)
    assert ("training adds terms to the loss" in said) == bool(added)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [(STATIC, r"has static scales, which it would not have any more behind a promotion"), (None, "was not converted")],
    ids=["static", "plain"],
)
def test_layers_that_cannot_be_promoted_are_refused_where_the_run_begins(recipe: Any, says: str) -> None:
    """Not in the step that makes the run promote them. Without ``promote`` they are replayed."""
    net, state = llama.llama() if recipe is None else converted(recipe), SimpleNamespace(stateful_callbacks={})
    state.global_step = 0
    CulpritsCallback().on_train_begin(None, state, None, net)
    with pytest.raises(ValueError, match=says):
        CulpritsCallback(promote=2).on_train_begin(None, state, None, net)


@pytest.mark.parametrize("static", ["*.up_proj", "*.o_proj"])
def test_a_layer_that_cannot_be_promoted_is_left_out_in_words(static: str, tmp_path: Path) -> None:
    """Where it is the culprit, it stays; another one is promoted beside it."""
    net = planted({"rules": [{"match": static, "recipe": STATIC}, {"match": "*", "recipe": "mxfp8"}]})
    lpq.calibrate(net, [one["input_ids"][None] for one in llama.examples(1)])
    finds = CulpritsCallback(course=OffAt(2), most=1, promote=2)
    done = trainer(net, tmp_path, LpqCallback(), finds)
    with pytest.warns(UserWarning, match="no promotion reaches") as got:
        done.train()
    said = [str(one.message) for one in got if "no promotion reaches model.layers.0." in str(one.message)]
    assert "Other layers are promoted" in said[0]
    assert finds.found[3].found[0].layer == "model.layers.0.mlp.up_proj"
    up = net.model.layers[0].mlp.up_proj
    stays = static == "*.up_proj"
    assert len(said) == 1 + stays
    assert (up.schedule.at(4) == lpq.recipe("bf16")) is not stays


def test_a_course_that_is_loaded_takes_the_place_of_its_steps() -> None:
    saved, used = Course(), Course()
    for _ in range(12):
        saved.leaves(1.0, 1.0)
        used.leaves(100.0, 100.0)
    for _ in range(2):
        used.load_state_dict(saved.state_dict())
        assert used.state_dict() == saved.state_dict()
    for state in ({}, None, {"losses": None, "norms": [], "left": False}, {**saved.state_dict(), "norms": ["1"]}):
        with pytest.raises(
            NumericsError, match=r"Course: .* is not what state_dict\(\) of a course returns: load that"
        ):
            used.load_state_dict(state)  # type: ignore[arg-type]
    assert used.state_dict() == saved.state_dict()
    assert used.why(60.0, 1.0) == saved.why(60.0, 1.0) is not None


def test_a_run_leaves_its_course() -> None:
    course = Course(window=20)
    assert all(course.off(4 - i / 100, 1 + (i % 3) / 10) is None for i in range(30))
    assert course.off(3.6, 1.1) is None
    assert course.off(float("nan")) == "the loss is nan"
    assert course.off(3.6, float("inf")) == "the gradient norm is inf"
    assert (course.off(9.0, 1.0) or "").startswith("the loss is 9, where the last 20 steps had about")
    assert (course.off(3.6, 8.0) or "").startswith("the gradient norm is 8, and was about 1.1")
    assert Course().off(100.0) is Course().off(3.0, 50.0) is None
    steps = [1.0, float("nan"), float("inf"), 1.0, float("nan")]
    assert [course.leaves(3.6, norm) for norm in steps] == [
        None, "the gradient norm is nan", None, None, "the gradient norm is nan"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="window=5 looks back to fewer steps than least=10 asks for"):
        Course(window=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": -3}, "Course: window=-3: it is a whole number from 2 on"),
        ({"least": True}, "Course: least=True: it is a whole number from 2 on"),
        ({"loss": "x"}, "Course: loss='x': it is a number from 0 on"),
        ({"norm": -1.0}, "Course: norm=-1.0: it is a number from 0 on"),
    ],
)
def test_a_course_that_is_none_is_refused(options: Any, says: str) -> None:
    with pytest.raises(NumericsError, match=says):
        Course(**options)


@pytest.mark.parametrize("step", [(None,), ("x",), (True,), (torch.ones(()),), (1.0, "x"), (1.0, torch.ones(()))])
def test_a_step_of_a_course_has_numbers(step: Any) -> None:
    """A tensor would keep the graph of the step."""
    course = Course()
    for take in (course.leaves, course.off, course.why):
        with pytest.raises(NumericsError, match=r"Course: the .* is .*: give a number, as loss\.item\(\) of a tensor"):
            take(*step)
    assert course.state_dict() == Course().state_dict()


@pytest.mark.parametrize(
    "options", [{"promote": "x"}, {"promote": -1}, {"promote": True}, {"course": 3}, {"least": "x"}, {"most": 0}]
)
def test_options_of_the_callback_are_checked_where_it_is_made(options: Any) -> None:
    with pytest.raises(NumericsError, match=rf"CulpritsCallback: {next(iter(options))}=.*: it is"):
        CulpritsCallback(**options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        CulpritsCallback(foo=1)
