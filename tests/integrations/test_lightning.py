"""Lightning's Trainer on a CPU: a model that its plugin converts, a policy that follows its steps, and checkpoints."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import boring
import llama
import pytest
import torch
from boring import REVERSED, STEPS, TWO_STAGES, Boring, batches, fit, loader
from support.comparing import equal_states
from torch import Tensor

import lpq
from lpq.checkpoint import CheckpointError
from lpq.integrations.lightning import LpqCallback, LpqPrecision

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lpq.tensor.quantized_tensor.PrecisionWarning"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|Checkpoint directory|litlogger|LeafSpec|TreeSpec).*"),
]


def by_hand(policy: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train as a loop of one's own does."""
    model = lpq.convert(Boring(), policy, steps=STEPS, **options)
    optimizer = model.configure_optimizers()
    for step, batch in enumerate(batches() * 3):
        lpq.set_step(model, step)
        model.training_step(batch, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.losses, copy.deepcopy(model.state_dict())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A run of two stages that was not interrupted, and where its checkpoints are."""
    out = tmp_path_factory.mktemp("run")
    model = Boring()
    fit(out, model, TWO_STAGES, steps="later")
    return model, out


def test_a_run_is_the_run_of_a_loop_to_the_bit(run: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = run
    losses, state = by_hand(TWO_STAGES)
    assert model.losses == losses
    assert len(set(losses)) == STEPS
    assert equal_states(model.state_dict(), state)
    assert model.recipes == [lpq.recipe("fp8-delayed")] * 3 + [lpq.recipe("mxfp8")] * 3
    plain = Boring()
    boring.trainer(tmp_path).fit(plain, loader())
    assert plain.losses != losses


@pytest.mark.parametrize("policy", [TWO_STAGES, REVERSED], ids=["delayed first", "delayed last"])
@pytest.mark.parametrize("step", [2, 4])
def test_a_run_goes_on_bit_for_bit(step: int, policy: Any, tmp_path: Path) -> None:
    """Where the later stage remembers, the model must be in it before the checkpoint is loaded."""
    done, resumed = Boring(), Boring()
    fit(tmp_path / "a", done, policy, steps="later")
    fit(tmp_path / "b", resumed, policy, steps="later", resume=tmp_path / "a" / f"step={step}.ckpt")
    assert resumed.losses == done.losses[step:]
    assert resumed.recipes == done.recipes[step:]
    assert equal_states(resumed.state_dict(), done.state_dict())
    histories = [t for name, t in done.state_dict().items() if name.endswith("amax_history")]
    assert bool(histories) == (policy is REVERSED)
    assert all(t.any() for t in histories)


def test_stored_weights_with_masters_go_on_bit_for_bit(tmp_path: Path) -> None:
    recipe = "fp8-current"  # what its weights decode to is not encoded to the same bits
    done, resumed = Boring(masters=True), Boring(masters=True)
    fit(tmp_path / "a", done, recipe, weights="quantized")
    checkpoint = tmp_path / "a" / "step=2.ckpt"
    fit(tmp_path / "b", resumed, recipe, weights="quantized", resume=checkpoint)
    assert resumed.losses == done.losses[2:]
    assert len(llama.codes(done)) > 2
    assert equal_states(llama.codes(resumed), llama.codes(done))
    assert not equal_states(llama.codes(lpq.convert(Boring(), recipe, weights="quantized")), llama.codes(done))


def test_another_policy_or_another_length_is_refused(run: tuple[Any, Path], tmp_path: Path) -> None:
    given = run[1] / "step=4.ckpt"
    with pytest.raises(CheckpointError, match=r"(?s)another policy than.*LpqCallback\(any_policy=True\)"):
        fit(tmp_path, Boring(), "mxfp8", resume=given)
    with pytest.raises(CheckpointError, match=f"for {STEPS + 2} steps"):
        fit(tmp_path, Boring(), TWO_STAGES, steps="later", resume=given, max_steps=STEPS + 2)
    with pytest.raises(TypeError, match="LpqCallback: any_policy='no': it is True or False"):
        LpqCallback(any_policy="no")
    other = Boring()
    fit(tmp_path, other, "mxfp8", resume=given, callback=LpqCallback(any_policy=True, report=False))
    assert len(other.losses) == 2


def test_a_checkpoint_that_only_lightning_can_read_loses_no_state(tmp_path: Path) -> None:
    fit(tmp_path / "a", Boring(), REVERSED, steps="later")
    path = tmp_path / "a" / "step=4.ckpt"
    torch.save({**torch.load(path), "odd": re.compile("x").sub}, path)
    for ready in (False, True):
        model = lpq.convert(Boring(), REVERSED, steps=STEPS)
        if ready:
            lpq.set_step(model, 4)
        again = boring.trainer(tmp_path / "b", None, LpqCallback(report=False))
        if ready:
            again.fit(model, loader(), ckpt_path=path, weights_only=False)
            assert model.recipes == [lpq.recipe("fp8-delayed")] * 2
        else:
            with pytest.raises(CheckpointError, match=r"were not loaded.*lpq\.set_step\(model, step\)"):
                again.fit(model, loader(), ckpt_path=path, weights_only=False)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_what_is_not_converted_has_lightnings_precision(precision: str, tmp_path: Path) -> None:
    model = Boring()
    made = fit(tmp_path, model, "mxfp8", precision=precision, device="cpu")
    true = precision == "bf16-true"
    assert made.precision == precision
    assert model.dtypes == ({torch.bfloat16} if true else {torch.bfloat16, torch.float32})
    assert {p.dtype for p in model.parameters()} == ({torch.bfloat16} if true else {torch.float32})
    assert len(lpq.report(model).converted) == 2
    with pytest.raises(ValueError, match="precision='16-true' is none of 32-true"):
        LpqPrecision("mxfp8", precision="16-true")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_are_watched_and_the_report_is_printed(
    micro_batches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, callback = Boring(), LpqCallback(watch=2, layers="net.0")
    options = {"max_steps": STEPS // micro_batches, "accumulate_grad_batches": micro_batches}
    fit(tmp_path, model, "mxfp8", callback=callback, **options)
    assert "net.{0,2} (2 Linear): mxfp8" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "numerics.jsonl").read_text().splitlines()]
    steps = sorted({line["step"] for line in lines if "step" in line})
    assert steps == ([0, 2, 4] if micro_batches == 1 else [0, 2])
    assert {line["layer"] for line in lines if "layer" in line} == {"net.0"}
    unwatched = Boring()
    fit(tmp_path / "b", unwatched, "mxfp8", **options)
    assert model.losses == unwatched.losses


def test_a_step_that_fails_while_it_is_watched_ends_the_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, callback = Boring(), LpqCallback(report=False, watch=1)
    wrong = loader([*batches(), torch.randn(32, 65)])
    with pytest.raises(ValueError, match="its last dimension must be 64"):
        boring.trainer(tmp_path, LpqPrecision("mxfp8"), callback).fit(model, wrong)
    assert {one.step for one in lpq.observe.Readings.read(tmp_path / "numerics.jsonl").readings()} == {0, 1}
    again = Boring()
    made = fit(tmp_path / "b", again, "mxfp8", callback=callback)
    assert callback.numerics is not None
    # A rank that fails alone may save a checkpoint, and the folder is asked for on all ranks together.
    monkeypatch.setattr(type(made), "log_dir", property(lambda _: pytest.fail("the others wait")))
    callback.on_save_checkpoint(made, again, {})
    assert {one.step for one in callback.numerics.readings()} == set(range(STEPS))


def test_layers_that_the_model_multiplies_past_are_warned_of(tmp_path: Path) -> None:
    model = Boring()
    model.net[0] = llama.ReadsWeights(model.net[0])
    with pytest.warns(UserWarning, match=r"reads the weights of these .*: net\.0\.inner\. "):
        fit(tmp_path, model, "mxfp8")


def test_fabric_trains_a_converted_model() -> None:
    fabric = boring.lightning.Fabric(accelerator="cpu", devices=1)
    model = lpq.convert(Boring(), "mxfp8")
    wrapped, optimizer = fabric.setup(model.net, model.configure_optimizers())
    losses = []
    for batch in batches() * 3:
        loss = (wrapped(batch) - batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == by_hand("mxfp8")[0]


def test_the_classes_are_lightnings_under_their_own_names() -> None:
    assert issubclass(LpqPrecision, boring.lightning.pytorch.plugins.Precision)
    assert issubclass(LpqCallback, boring.lightning.pytorch.Callback)
    assert LpqCallback is lpq.integrations.lightning.LpqCallback
    assert (LpqPrecision.__name__, LpqPrecision.__module__) == ("LpqPrecision", "lpq.integrations.lightning")
    with pytest.raises(AttributeError, match="no attribute 'LpqCallbacks'"):
        lpq.integrations.lightning.LpqCallbacks  # noqa: B018
