"""axolotl's own plugin manager and configuration, with a small Llama, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama
import pytest

import lpq
from lpq.integrations.transformers import LpqCallback

base: Any = pytest.importorskip("axolotl.integrations.base", reason="needs axolotl, which `make test-loops` brings")
pytestmark = pytest.mark.slow
PLUGIN = "lpq.integrations.axolotl.LpqPlugin"


@pytest.fixture
def manager() -> Iterator[Any]:
    found = base.PluginManager.get_instance()
    found.register(PLUGIN)
    yield found
    found.plugins.pop(PLUGIN)


def configuration(**keys: Any) -> Any:
    from axolotl.utils.dict import DictDefault

    return DictDefault({"plugins": [PLUGIN], **keys})


def test_the_model_is_converted_before_adapters_and_trains_by_its_policy(manager: Any, tmp_path: Path) -> None:
    assert type(manager.plugins[PLUGIN]).__mro__[2] is base.BasePlugin
    cfg = configuration(lpq_policy=llama.TWO_STAGES)
    model = llama.llama()
    manager.post_model_build(cfg, model)
    trained = llama.trainer(model, tmp_path / "a")
    callbacks = manager.add_callbacks_post_trainer(cfg, trained)
    assert [type(callback) for callback in callbacks] == [LpqCallback]
    trained.add_callback(callbacks[0])
    trained.train()
    by_hand = llama.trainer(llama.converted(llama.TWO_STAGES), tmp_path / "b", LpqCallback())
    by_hand.train()
    assert llama.losses(trained) == llama.losses(by_hand)
    assert len(set(llama.losses(trained))) == llama.STEPS


def test_the_keys_are_in_axolotls_schema(manager: Any) -> None:
    from pydantic import ValidationError

    import lpq.integrations.axolotl as integration

    assert manager.get_input_args() == ["lpq.integrations.axolotl.LpqArgs"]
    given = integration.LpqArgs(lpq_policy="mxfp8", lpq_weights="high_precision", lpq_ranks=2)
    assert given.lpq_policy == "mxfp8"
    assert integration.LpqArgs(lpq_policy={"rules": []}).lpq_fuse is None
    with pytest.raises(ValidationError, match="lpq_ranks"):
        integration.LpqArgs(lpq_ranks="two")


def test_weights_and_export_are_passed_on(manager: Any, tmp_path: Path) -> None:
    cfg = configuration(lpq_policy="mxfp8", lpq_weights="quantized", lpq_export=str(tmp_path / "served"))
    model = llama.llama()
    manager.post_model_build(cfg, model)
    assert llama.codes(model)
    manager.post_train(cfg, model)
    assert list((tmp_path / "served").glob("*.safetensors"))


def test_a_policy_must_be_given(manager: Any) -> None:
    model = llama.llama()
    with pytest.raises(ValueError, match="needs lpq_policy"):
        manager.post_model_build(configuration(), model)
    with pytest.raises(ValueError, match=r"lpq\.convert"):
        lpq.report(model)
