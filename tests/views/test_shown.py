"""What a prompt, a notebook and ``help`` show of lpq's objects."""

from __future__ import annotations

import html
import pydoc
import re
from pathlib import Path
from pkgutil import resolve_name

import torch
from support.small_models import converted

import lpq
from lpq.nn.coverage import Coverage


def test_a_prompt_and_a_notebook_show_the_same_text() -> None:
    model = converted("fp8-current", 64, 64)
    calibrated = lpq.calibrate(model, [torch.ones(16, 64)], progress=False)
    for shown in (lpq.report(model), calibrated):
        assert repr(shown) == str(shown)
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
    assert repr(lpq.report(model)).splitlines()[1].startswith("1 converted, 0 left alone")
    tensor = lpq.quantizer("mxfp8").quantize(torch.ones(16, 32))
    assert html.unescape(tensor._repr_html_()) == f"<pre>{tensor!r}</pre>"


def test_what_has_a_text_for_people_has_it_in_a_notebook() -> None:
    """Each class that a page of the API describes. A record of many fields is a long line otherwise."""
    pages = "".join(page.read_text() for page in (Path(lpq.__file__).parents[1] / "docs/api").glob("*.md"))
    found = [resolve_name(name) for name in re.findall(r"^::: (\S+)", pages, re.M)]
    classes = [one for one in found if isinstance(one, type) and not issubclass(one, BaseException)]
    ours = {cls: [part for part in cls.__mro__ if part.__module__.startswith("lpq.")] for cls in classes}
    texts = {cls for cls, parts in ours.items() if any("__str__" in vars(part) for part in parts)}
    assert {lpq.engines.Exported, lpq.checkpoint.Info, lpq.observe.Numerics, lpq.observe.Culprits} <= texts
    assert {cls for cls in texts if not hasattr(cls, "_repr_html_")} == set()
    made = Coverage()
    assert made._repr_html_() == f"<pre>{html.escape(str(made))}</pre>"


def test_recipes_and_policies_are_shown_as_what_makes_them() -> None:
    rules = {"rules": [{"match": "*.<b>", "recipe": "nvfp4", "until": 0.5}, {"match": "*", "recipe": "mxfp8"}]}
    recipe, policy = lpq.recipe("mxfp8"), lpq.policy(rules)
    assert eval(repr(recipe), {"lpq": lpq}) == recipe
    assert eval(repr(policy), {"lpq": lpq}) == policy
    for shown in (recipe, policy):
        assert shown._repr_html_() == f"<pre>{html.escape(shown.to_toml())}</pre>"
    assert "<b>" not in policy._repr_html_()


def test_help_describes_fields() -> None:
    core, registry = lpq.core, lpq.registry
    for cls in (core.Stat, core.Buffer, core.StateBuffer, registry.KernelSpec, registry.FormatSpec):
        shown = pydoc.plain(pydoc.render_doc(cls))
        fields = cls.__doc__ or ""
        assert "Fields:" in shown
        assert all(f"    {name}: " in fields for name in cls.__dataclass_fields__), cls
    assert "One buffer of a storage class." in (core.Buffer.__doc__ or "")
    assert "Columns are padded to a multiple of this" in pydoc.plain(pydoc.render_doc(core.Buffer))
