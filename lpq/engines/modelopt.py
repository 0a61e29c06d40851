"""The layout of NVIDIA's ModelOpt: an algorithm for all layers, or a table with one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lpq.registry import Described, Group, Inputs, Layout, LayoutError, Scheme
from lpq.registry.showing import brief

CONFIG, LEGACY = "config.json", "hf_quant_config.json"
"""Engines read either, and some releases need the older one."""
METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
ALGORITHM, SIZE = "quant_algo", "group_size"
PRODUCER = {"name": METHOD, "version": "0.47.0"}
"""The producer in these files: some readers need its name and version."""


class ModelOpt(Layout):
    """A scheme's ``config`` has ``quant_algo``, ``group_size`` if it has blocks, ``weights`` and ``input_activations``.

    Without ``quant_algo`` no algorithm of ModelOpt's has inputs in high precision beside such weights.
    """

    def files(self, groups: Sequence[Group], left: Sequence[str]) -> dict[str, dict[str, Any]]:
        for group in groups:
            if ALGORITHM not in group.config:
                raise LayoutError(
                    f"{group.scheme.title}: the layout 'modelopt' has a place for such weights only where inputs are "
                    f"encoded, too, with a scale that is known, and of {brief([*group.layers])} it is not: call "
                    "lpq.calibrate first, or give input_amax={…}, or use another recipe or layout"
                )
        sizes = {group.config[SIZE] for group in groups if SIZE in group.config}
        algorithms = {group.config[ALGORITHM] for group in groups}
        one = groups[0].config[ALGORITHM] if len(algorithms) == 1 else MIXED
        size = {SIZE: min(sizes)} if sizes else {}  # the common algorithm; a mixture lists an algorithm for each layer
        own = [{key: group.config[key] for key in (ALGORITHM, SIZE) if key in group.config} for group in groups]
        layers = {layer: config for group, config in zip(groups, own, strict=True) for layer in group.layers}
        mixed = {"quantized_layers": layers} if one == MIXED else {}
        entries = {
            f"group_{i}": {
                **{key: group.config[key] for key in ("input_activations", "weights") if key in group.config},
                "targets": ["Linear"] if one != MIXED else [*group.layers],
            }
            for i, group in enumerate(groups)
        }
        config = {
            "config_groups": entries, "ignore": [*left], ALGORITHM: one, **size, **mixed, "producer": PRODUCER,
            "quant_method": METHOD,
        }  # fmt: skip
        legacy = {ALGORITHM: one, "kv_cache_quant_algo": None, **size, "exclude_modules": [*left], **mixed}
        return {CONFIG: {"quantization_config": config}, LEGACY: {"producer": PRODUCER, "quantization": legacy}}

    def read(self, files: Mapping[str, Mapping[str, Any]], schemes: Sequence[Scheme]) -> Described | None:
        config = files.get(CONFIG, {}).get("quantization_config")
        if not isinstance(config, Mapping) or config.get("quant_method") != METHOD:
            legacy = files.get(LEGACY, {})
            if config is not None or not isinstance(legacy.get("quantization"), Mapping):
                return None
            config = legacy["quantization"]
        exclusions = config.get("ignore") or config.get("exclude_modules") or []
        layers = config.get("quantized_layers")
        if config.get(ALGORITHM) != MIXED:
            one = _algorithm(config.get(ALGORITHM), schemes)
        elif isinstance(layers, Mapping) and all(isinstance(entry, Mapping) for entry in layers.values()):
            table = {name: _algorithm(entry.get(ALGORITHM), schemes) for name, entry in layers.items()}
        else:
            raise LayoutError(f"config.json: a mixture has a table of quantized_layers, and not {brief(layers)}")

        def described(layer: str) -> tuple[Scheme, Inputs | None] | None:
            if config[ALGORITHM] == MIXED:
                return table.get(layer)
            return None if any(fnmatchcase(layer, str(pattern)) for pattern in exclusions) else one

        return described


def _algorithm(algorithm: Any, schemes: Sequence[Scheme]) -> tuple[Scheme, Inputs | None]:
    """The algorithm with this name; programs differ in capitals."""
    for scheme in schemes:
        for inputs in (None, *scheme.inputs):
            config = Group(scheme, inputs, ()).config
            if isinstance(algorithm, str) and config.get(ALGORITHM, "").upper() == algorithm.upper():
                return scheme, inputs
    raise LayoutError(f"no installed format is the one that the files call {ALGORITHM}={brief(algorithm)}")
