"""``from_pretrained`` and ``save_pretrained`` with ``LpqConfig``, on a CPU and without a download."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import llama
import pytest
import safetensors.torch as safetensors
import torch
from forking import python
from llama import STEPS, TWO_STAGES, codes, decoded, examples, losses, trainer, transformers
from support.comparing import equal_states
from torch import Tensor

import lpq
from lpq.checkpoint.errors import CheckpointError, CheckpointWarning, MissingPlugin
from lpq.integrations.transformers import LpqCallback
from lpq.integrations.transformers_config import LpqConfig, LpqQuantizer
from lpq.optim import MasterWeights
from lpq.recipes import RecipeError
from lpq.registry.errors import UnknownRecipe

pytestmark = pytest.mark.filterwarnings("ignore::lpq.tensor.quantized_tensor.PrecisionWarning")
BATCH = {name: torch.stack([example[name] for example in examples(4)]) for name in ("input_ids", "labels")}


def load(path: Path, config: LpqConfig | None = None, **options: Any) -> Any:
    given = options if config is None else {"quantization_config": config, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **given)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary model's directory."""
    path = tmp_path_factory.mktemp("plain")
    llama.llama().save_pretrained(path)
    return path


def a_step(model: Any) -> tuple[Tensor, Tensor]:
    """Train one step; return the loss and the logits."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if any(isinstance(weight, lpq.QuantizedTensor) for weight in model.parameters()):
        optimizer = MasterWeights(optimizer, keep=False)
    out = model(**BATCH)
    out.loss.backward()
    optimizer.step()
    return out.loss.detach(), out.logits.detach()


def recipes(model: Any) -> dict[str, Any]:
    return {name: m.schedule for name, m in model.named_modules() if isinstance(m, lpq.nn.Linear)}


def same(a: Any, b: Any) -> bool:
    """Whether all tensors and all recipes are the same."""
    return (
        equal_states(decoded(a), decoded(b))
        and equal_states(codes(a), codes(b))
        and recipes(a) == recipes(b)
        and not a.training
    )


# ---------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("mxfp8", {}),
        ("nvfp4", {"weights": "high_precision"}),
        ("fp8-current", {"weights": "quantized", "include": "all"}),
        ("fp8-delayed", {}),
        (TWO_STAGES, {"steps": 6}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_loaded_and_converted(policy: Any, options: dict[str, Any], dtype: torch.dtype, plain: Path) -> None:
    model = load(plain, LpqConfig(policy, **options), dtype=dtype)
    ordinary = load(plain, dtype=dtype)
    names = {name: tensor.shape for name, tensor in ordinary.state_dict().items()}
    other = lpq.convert(load(plain, dtype=dtype), policy, **options)
    assert same(model, other)
    assert str(lpq.report(model)) == str(lpq.report(other))
    state = model.state_dict()
    assert {name: state[name].shape for name in names} == names
    assert all("_amax" in name for name in state.keys() - names.keys())
    torch.manual_seed(0)
    (loss, logits), exact = a_step(model), a_step(ordinary)
    torch.manual_seed(0)
    expected = a_step(other)
    assert torch.equal(loss, expected[0])
    assert torch.equal(logits, expected[1])
    assert not torch.equal(logits, exact[1])
    assert same(model, other)


def test_weights_that_files_lack_are_drawn_alike(plain: Path, tmp_path: Path) -> None:
    state = safetensors.load_file(plain / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    torch.manual_seed(1)
    model = load(tmp_path, LpqConfig("mxfp8"))
    torch.manual_seed(1)
    assert same(model, lpq.convert(load(tmp_path), "mxfp8"))


def test_it_may_be_cast(plain: Path) -> None:
    model = load(plain, LpqConfig("mxfp8"))
    assert model.bfloat16().half().float().lm_head.weight.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- training and saving


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "weights"), [("mxfp8", None), ("nvfp4", "high_precision"), ("mxfp8", "quantized")])
def test_the_trainer_takes_it_and_what_it_saves_is_loaded_again(
    policy: str, weights: Any, plain: Path, tmp_path: Path
) -> None:
    done = trainer(load(plain, LpqConfig(policy, weights=weights)), tmp_path / "a", LpqCallback(), max_steps=2)
    done.train()
    other = trainer(lpq.convert(load(plain), policy, weights=weights), tmp_path / "b", LpqCallback(), max_steps=2)
    other.train()
    assert losses(done) == losses(other)
    assert equal_states(decoded(done.model), decoded(other.model))
    done.model.eval()
    saved = tmp_path / "a" / "checkpoint-2"
    said = json.loads((saved / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "lpq"
    assert said["weights"] == weights
    assert lpq.policy(said["policy"]) == lpq.policy(policy)
    if weights == "quantized":
        with pytest.warns(CheckpointWarning, match=r"encoding these again.*lpq\.checkpoint keeps the codes"):
            again = load(saved)
    else:
        again = load(saved)
        assert same(again, done.model)
    assert equal_states(decoded(again), decoded(done.model))  # so it is with this format
    assert recipes(again) == recipes(done.model)
    done.model.save_pretrained(tmp_path / "c")
    again.save_pretrained(tmp_path / "d")
    files = [safetensors.load_file(tmp_path / name / "model.safetensors") for name in "cd"]
    assert equal_states(files[0], decoded(done.model))
    assert equal_states(*files)
    assert (tmp_path / "c" / "config.json").read_bytes() == (tmp_path / "d" / "config.json").read_bytes()


def test_what_layers_remembered_is_loaded_again(plain: Path, tmp_path: Path) -> None:
    model = load(plain, LpqConfig("fp8-delayed"))
    a_step(model)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    again = load(tmp_path)
    assert same(again, model)
    histories = [t for name, t in again.state_dict().items() if name.endswith("x_amax_history")]
    assert len(histories) == 7
    assert all(t.any() for t in histories)


def test_what_layers_remembered_is_loaded_without_the_head_and_with_another(plain: Path, tmp_path: Path) -> None:
    """As the weights are, whichever of the two was saved."""
    model = load(plain, LpqConfig("fp8-delayed"))
    a_step(model)
    model.save_pretrained(tmp_path / "head")
    base = transformers.AutoModel.from_pretrained(tmp_path / "head")
    assert same(base, model.model)
    assert base.layers[0].mlp.up_proj.x_amax_history.any()
    base.save_pretrained(tmp_path / "base")
    assert same(load(tmp_path / "base").model, model.model)


@pytest.mark.parametrize("how", ["calibrated", "converted anew"])
def test_the_configuration_is_that_of_the_model_as_it_is_now(how: str, plain: Path, tmp_path: Path) -> None:
    """Control: a copy of the configuration describes what was loaded."""
    model = load(plain, LpqConfig("nvfp4"))
    before = copy.deepcopy(model.config)
    if how == "calibrated":
        lpq.calibrate(model, [BATCH])
    else:
        lpq.convert(model, "mxfp8", weights="high_precision")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert recipes(again) == recipes(model) != recipes(load(plain, LpqConfig("nvfp4")))
    assert equal_states(dict(again.state_dict()), dict(model.state_dict()))
    with torch.no_grad():
        assert torch.equal(again(**BATCH).logits, model.eval()(**BATCH).logits)
    assert before.quantization_config.to_dict()["policy"] == LpqConfig("nvfp4").to_dict()["policy"]
    assert pickle.loads(pickle.dumps(model.config)).quantization_config.policy == LpqConfig("nvfp4").policy


def test_a_policy_whose_length_the_trainer_gives(plain: Path, tmp_path: Path) -> None:
    model = load(plain, LpqConfig(TWO_STAGES, steps="later"))
    model.save_pretrained(tmp_path / "a")
    done = trainer(load(tmp_path / "a"), tmp_path / "b", LpqCallback())
    done.train()
    layer = done.model.model.layers[0].mlp.up_proj
    assert done.state.global_step == STEPS
    assert layer.recipe == lpq.recipe("mxfp8")


# ---------------------------------------------------------------------------------------------- readers without lpq


def test_transformers_without_lpq_warns_and_loads_the_weights(plain: Path, tmp_path: Path) -> None:
    model = load(plain, LpqConfig("nvfp4", weights="quantized"))
    model.save_pretrained(tmp_path)
    read = tmp_path / "read.safetensors"
    done = python(
        "import sys, transformers, safetensors.torch as s\n"
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        f"s.save_file(m.state_dict(), {str(read)!r})\n"
        "print(type(m.model.layers[0].mlp.up_proj).__module__, 'lpq.integrations' in sys.modules)"
    )
    assert done.out.split() == ["torch.nn.modules.linear", "False"]
    assert "Unknown quantization type, got lpq" in done.err
    assert equal_states(safetensors.load_file(read), decoded(model))


# ---------------------------------------------------------------------------------------------- what is refused


def test_wrong_configurations_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UnknownRecipe, match=r"'mxfp9'.* did you mean 'mxfp8'"):
        LpqConfig("mxfp9")
    with pytest.raises(ValueError, match="weights='stored': choose from None, high_precision, quantized"):
        LpqConfig("mxfp8", weights="stored")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks=0"):
        LpqConfig("mxfp8", weights="quantized", ranks=0)
    with pytest.raises(ValueError, match=r"ranks=2 is for weights that are prepared, .* add weights='quantized'"):
        LpqConfig("mxfp8", ranks=2)
    with pytest.raises(ValueError, match="include='lm_head'"):
        LpqConfig("mxfp8", include="lm_head")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"formats": {"fp3": {"plugin": "fp3", "distribution": "lpq-fp3", "version": "1.2"}}}, MissingPlugin,
         r"format fp3, which came with plugin fp3 \(lpq-fp3 1\.2\) and is not installed here: pip install lpq-fp3"),
        ({"weights": "stored"}, ValueError, "weights='stored': choose from"),
        ({"policy": "mxfp8"}, CheckpointError, r"has 'policy' of type str, not dict: pass LpqConfig\("),
        ({"policy": {"rules": [{"match": "*", "recipe": "mxfp9"}]}}, RecipeError, r"rule 1: .*'mxfp9'.*'mxfp8'"),
        ({"steps": None, "policy": None}, CheckpointError, "has 'policy' of type NoneType"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(changed: dict[str, Any], error: Any, words: str, plain: Path, tmp_path: Path) -> None:
    model = load(plain, LpqConfig("mxfp8"))
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load(tmp_path)


def test_another_configuration_than_the_files_is_warned_of(plain: Path, tmp_path: Path) -> None:
    load(plain, LpqConfig("mxfp8")).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        model = load(tmp_path, LpqConfig("nvfp4"))
    assert model.model.layers[0].mlp.up_proj.recipe == lpq.recipe("mxfp8")


def test_a_model_that_is_spread_over_devices_is_refused(plain: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spread = {"model": "cpu", "lm_head": "disk"}
        with pytest.raises(ValueError, match=r"device_map spreads the model over \['cpu', 'disk'\].*FSDP2"):
            load(plain, LpqConfig("mxfp8"), device_map=spread, offload_folder=tmp_path)
    assert same(load(plain, LpqConfig("mxfp8"), device_map="cpu"), lpq.convert(load(plain), "mxfp8"))


def test_transformers_4_is_refused_since_it_does_not_tell_which_files_it_loads(plain: Path) -> None:
    """It would load a model without what its layers remembered."""
    quantizer = LpqQuantizer(LpqConfig("fp8-delayed"))
    with pytest.raises(ImportError, match=rf"LpqConfig needs transformers 5: {re.escape(transformers.__version__)} "):
        quantizer.preprocess_model(model=load(plain), device_map=None, use_kernels=False)
