"""The layout of the package compressed-tensors: a group of layers for each scheme, and a list of ignored layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lpq.engines.patterns import read_patterns
from lpq.engines.siblings import EXPERTS
from lpq.registry import Described, Group, Inputs, Layout, LayoutError, Scheme
from lpq.registry.showing import brief

CONFIG = "quantization_config"
METHOD = "compressed-tensors"
MIXED = "mixed-precision"
DENSE = "dense"
"""The format of weights without a mask beside them."""
KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
"""The keys in which schemes differ; the other keys describe calibration."""
DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
"""The values that the package has where none is given."""
REGEX = "re:"
ANY = "Linear"
"""The target of all linear layers."""


class CompressedTensors(Layout):
    """A scheme's ``config`` is its entry in ``config_groups``: ``format``, ``weights`` and ``input_activations``."""

    def files(self, groups: Sequence[Group], left: Sequence[str]) -> dict[str, dict[str, Any]]:
        # transformers decodes all experts by the first group
        groups = sorted(groups, key=lambda group: not any(map(EXPERTS.fullmatch, group.layers)))
        formats = [group.config["format"] for group in groups]
        one = len(groups) == 1
        entries = {
            f"group_{i}": {"targets": [ANY] if one else [*group.layers], **group.config}
            for i, group in enumerate(groups)
        }
        config = {
            "quant_method": METHOD,
            "format": formats[0] if len({*formats}) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": entries,
            "ignore": [*left],
        }
        return {"config.json": {CONFIG: config}}

    def read(self, files: Mapping[str, Mapping[str, Any]], schemes: Sequence[Scheme]) -> Described | None:
        config = files.get("config.json", {}).get(CONFIG)
        if not isinstance(config, Mapping) or config.get("quant_method") != METHOD:
            return None
        ignored, groups = config.get("ignore") or [], config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise LayoutError(f"config.json: its config_groups are {brief(groups)}, and no groups of layers")
        _refuse_more(config)
        is_ignored = _matcher(ignored)
        groups_and_schemes = [(_targets(name, group), _scheme(name, group, schemes)) for name, group in groups.items()]
        general = [scheme for targets, scheme in groups_and_schemes if ANY in targets]
        exact = [(_matcher(targets), scheme) for targets, scheme in groups_and_schemes]
        for name, group in groups.items():
            _check_format(name, group.get("format") or config.get("format"), _scheme(name, group, schemes)[0])

        def described(layer: str) -> tuple[Scheme, Inputs | None] | None:
            if is_ignored(layer):
                return None
            return next(iter([*(scheme for is_target, scheme in exact if is_target(layer)), *general]), None)

        return described


def _refuse_more(config: Mapping[str, Any]) -> None:
    """Refuse files in which this part of the JSON changes the meaning of tensors."""
    sparsity = config.get("sparsity_config") or {}
    sparse = sparsity.get("format", DENSE) if isinstance(sparsity, Mapping) else sparsity
    if sparse != DENSE:
        raise LayoutError(f"config.json: its weights are sparse ({brief(sparse)}), and lpq reads dense ones")
    transform = config.get("transform_config")
    if transform.get("config_groups") if isinstance(transform, Mapping) else transform:
        raise LayoutError(
            f"config.json: its transform_config is {brief(transform)}, so weights were rotated and their inputs are to "
            "be as well, which lpq does not do"
        )


def _check_format(name: str, name_in_file: Any, scheme: Scheme) -> None:
    """Refuse a name of a weight format that does not belong to this scheme; files of old releases have no name."""
    formats = {config["format"] for config in (scheme.config, *(i.config for i in scheme.inputs)) if "format" in config}
    if name_in_file not in (None, MIXED, *formats):
        raise LayoutError(
            f"config.json: the format of its {name} is {brief(name_in_file)}, and {scheme.title} lies as "
            f"{sorted(formats)}"
        )


def _targets(name: str, group: Any) -> list[str]:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise LayoutError(f"config.json: its {name} has no targets, which are a list of layers")
    return targets


def _matcher(patterns: Any) -> Callable[[str], bool]:
    """Whether one of these names and regular expressions matches a layer."""
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise LayoutError(f"config.json: {brief(patterns)} are no names or patterns of layers")
    names = {*patterns}
    expressions = read_patterns(text.removeprefix(REGEX) for text in patterns if text.startswith(REGEX))
    return lambda layer: layer in names or any(expression.match(layer) for expression in expressions)


def _scheme(name: str, group: Mapping[str, Any], schemes: Sequence[Scheme]) -> tuple[Scheme, Inputs | None]:
    weights, activations = group.get("weights"), group.get("input_activations")
    if outputs := group.get("output_activations"):
        raise LayoutError(
            f"config.json: engines encode the outputs of its {name} ({brief(outputs)}), which no recipe of lpq does"
        )
    scheme = next((s for s in schemes if _same(s.config["weights"], weights)), None)
    if scheme is None:
        raise LayoutError(f"config.json: no format that is installed has weights as in its {name}: {brief(weights)}")
    if not activations:
        return scheme, None
    inputs = next((i for i in scheme.inputs if _same(i.config["input_activations"], activations)), None)
    if inputs is None:
        raise LayoutError(f"config.json: no format that is installed has inputs as in its {name}: {brief(activations)}")
    return scheme, inputs


def _same(ours: Mapping[str, Any], theirs: Any) -> bool:
    if not isinstance(theirs, Mapping):
        return False
    mine, other = _completed(ours), _completed(theirs)
    return all(mine.get(key) == other.get(key) for key in KEYS)


def _completed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with those that are not there, as the package takes them."""
    values = {**DEFAULTS, **{key: value for key, value in arguments.items() if value is not None}}
    size = values.pop("group_size", None)
    grouped = type(size) is int and size > 0
    strategy = {"strategy": "group" if grouped else "tensor" if size is None else "channel"}
    return {**strategy, **values, **({"group_size": size} if grouped else {})}
