"""From metadata to one plugin's specs, or to the one error with the reason why there are none.

``installed`` reads metadata and imports nothing. ``load`` imports one plugin, calls its hooks and checks the answers;
whatever goes wrong in there becomes a ``PluginError``, so that no plugin can break another.
"""

from __future__ import annotations

import functools
import site
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import pluggy

from lpq.registry import hookspecs
from lpq.registry.errors import ImportStringError, PluginError, near_names, suggestion, words
from lpq.registry.operations import TABLE
from lpq.registry.plugin_faults import fault, meant, nested, title, why_no_name
from lpq.registry.showing import brief, pip
from lpq.registry.specs import (
    API_VERSION,
    BACKENDS,
    OLDEST_API_VERSION,
    OPERATIONS,
    FormatSpec,
    KernelSpec,
    LayoutSpec,
    RecipeSpec,
)

GROUP = "lpq.plugins"
OWN = "lpq"
HERE = "registered in this process"
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("lpq_"))
SEPARATORS = {"formats": "_", "recipes": "-_", "layouts": "-_"}

Kind = Literal["formats", "recipes", "layouts"]
Spec = TypeVar("Spec", FormatSpec, RecipeSpec, KernelSpec, LayoutSpec)
Named = TypeVar("Named", FormatSpec, RecipeSpec, LayoutSpec)


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """One plugin: its source, and its specs or the reason why it cannot be used."""

    name: str
    distribution: str
    version: str
    formats: Mapping[str, FormatSpec] = field(default_factory=dict)
    recipes: Mapping[str, RecipeSpec] = field(default_factory=dict)
    kernels: tuple[KernelSpec, ...] = ()
    layouts: Mapping[str, LayoutSpec] = field(default_factory=dict)
    error: PluginError | None = None

    @property
    def builtin(self) -> bool:
        """Whether it ships with lpq."""
        return self.distribution == OWN

    @property
    def title(self) -> str:
        """Its name in messages: ``plugin acme (acme-formats 1.2)``."""
        return f"plugin {self.name} ({f'{self.distribution} {self.version}'.strip()})"

    @property
    def status(self) -> str:
        """``ok``, ``broken``, ``hidden`` (by ``LPQ_LOAD_PLUGINS``) or ``missing`` (named there only)."""
        return self.error.status if self.error else "ok"


@dataclass(frozen=True)
class PluginSource:
    """The place that a plugin comes from; known before it is imported."""

    name: str
    distribution: str
    version: str
    module: str
    load: Callable[[], object]

    @property
    def other_version(self) -> str:
        """The remedy where the plugin itself is at fault."""
        if self.distribution == HERE:
            return "fix it and register it again"
        newer = pip("install --upgrade", [self.distribution], "install another version of what brings it")
        return f"correct it if it is yours; otherwise {newer}, or report it to its authors"

    def error(self, cause: str, remedy: str) -> PluginError:
        return PluginError(self.name, self.distribution, self.version, cause, remedy)

    def import_error(self, what: str, error: BaseException | None) -> PluginError:
        """The error of a plugin whose import string ``what`` cannot be imported."""
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            if package == OWN:
                cause = f"{what} needs the module {error.name}, which this lpq does not have"
                return self.error(cause, f"{self.other_version}, for lpq as it is now")
            own = self.module.partition(".")[0]
            if package != own:
                cause = f"{what} needs the module {error.name}, which is not installed"
                remedy = pip("install", [package], "install what brings that module")
                if near := near_names(package, [own]):
                    cause, remedy = f"{cause} ({near})", f"correct it if it is yours; otherwise {remedy}"
                return self.error(cause, remedy)
        by_itself = isinstance(error, ImportStringError)  # it says what cannot be imported
        cause = str(error) if by_itself else f"importing {what} raised {words(error)}{meant(error)}"
        return self.error(cause, self.other_version)


def installed() -> dict[str, list[PluginSource]]:
    """The plugins in the metadata of all distributions, by entry-point name. Two of one name are a clash.

    A distribution that is on the path twice counts once, as it does for ``import``.
    """
    sources: dict[str, list[PluginSource]] = {}
    for entry in metadata.entry_points(group=GROUP):
        assert entry.dist is not None, "an entry point that was discovered belongs to a distribution"
        module = entry.value.partition(":")[0].strip()
        source = PluginSource(entry.name, *_origin(entry.dist), module, functools.partial(_imported, entry))
        sources.setdefault(entry.name, []).append(source)
    return sources


def _origin(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version of a distribution, in words where its metadata is lost: its plugin may work all the same."""
    try:
        fields = distribution.metadata
        name, version = (fields[key] or "" for key in ("Name", "Version"))
    except Exception:  # some versions of Python raise where there is no metadata
        name = version = ""
    return name or f"a distribution without metadata in {distribution.locate_file('')}", version


def _imported(entry: metadata.EntryPoint) -> object:
    """Import what an entry point names. Python takes any text for one, and its own error is of its insides."""
    if entry.pattern.match(entry.value) is None:
        raise ImportStringError(f"its entry point is {brief(entry.value)}: it must name a module, as 'package.module'")
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name != entry.module.partition(".")[0] or not _take_in_editable(entry.dist):
            raise
        return entry.load()


def _take_in_editable(distribution: metadata.Distribution | None) -> bool:
    """Run what an editable installation of it has Python run when it starts, if it was installed since then. Return
    whether there is such a thing."""
    files = (distribution and distribution.files) or ()
    links = [Path(str(file.locate())) for file in files if file.suffix == ".pth"]
    for link in links:
        site.addpackage(str(link.parent), link.name, {*sys.path})
    return bool(links)


def owns(plugin: str, name: str, kind: Kind) -> bool:
    """Whether a format or recipe with this name lies in the namespace of the plugin."""
    return name == plugin or name.startswith(tuple(plugin + separator for separator in SEPARATORS[kind]))


def resolve(string: str) -> Any:
    """Import what an import ``string``, ``"package.module:attribute"``, names."""
    module, colon, attribute = str(string).partition(":")  # a class that was given itself is refused in words, too
    if not (module and colon and attribute):
        package, _, name = str(string).rpartition(".")
        right = "package.module:attribute" if colon or not (package and name) else f"{package}:{name}"
        raise ImportStringError(f"{string!r} is not an import string: write it as {right!r}")
    try:
        return attrgetter(attribute)(_by_torchs_defaults(module, lambda: import_module(module)))
    except (Exception, SystemExit) as error:
        raise ImportStringError(f"{string!r} cannot be imported: {words(error)}{meant(error)}") from error


def _by_torchs_defaults(module: str, load: Callable[[], Any]) -> Any:
    """Import a module by torch's own defaults, whatever a program set, so that tables in it have the same numbers."""
    torch: Any = sys.modules.get("torch")
    if torch is None or module in sys.modules:  # where another thread imports it, Python waits for that
        return load()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.device("cpu"):
            return load()
    finally:
        if before != torch.float32:  # else it may be another thread's, which imports, too
            torch.set_default_dtype(before)


def load(source: PluginSource, manager: pluggy.PluginManager) -> PluginInfo:
    """Import a plugin, register its hooks, read its specs; or raise ``PluginError``, with no hook left."""
    try:
        plugin = _by_torchs_defaults(source.module, source.load)
    except (Exception, SystemExit) as error:
        raise source.import_error(source.module, error) from error
    try:
        _register(source, plugin, manager)
        return _read(source, manager)
    except (Exception, SystemExit) as error:
        if manager.has_plugin(source.name):
            manager.unregister(name=source.name)
        if isinstance(error, PluginError):
            raise
        raise source.error(f"reading its specs raised {words(error)}", source.other_version) from error


def _register(source: PluginSource, plugin: object, manager: pluggy.PluginManager) -> None:
    """Hand the hooks of a plugin to pluggy, which checks their names and arguments."""
    twin = manager.get_name(plugin)
    if twin is not None:
        raise source.error(f"it is the same module as plugin {twin}", "give each entry point its own module")
    try:
        manager.register(plugin, source.name)
    except pluggy.PluginValidationError as error:
        remedy = "give the hook the arguments that lpq.registry.hookspecs gives it"
        raise source.error(" ".join(str(error).split()), remedy) from error
    implemented = [caller.name for caller in manager.get_hookcallers(plugin) or ()]
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = next(name for name in implemented if name not in HOOKS)
        remedy = f"rename it ({suggestion(unknown, HOOKS)})"
        raise source.error(f"it implements {unknown}, which is not a hook", remedy) from error
    if not set(implemented) & set(HOOKS):
        remedy = f"decorate one of {', '.join(HOOKS)} with @lpq.registry.hookimpl"
        raise source.error("it implements no hook", remedy)


def _read(source: PluginSource, manager: pluggy.PluginManager) -> PluginInfo:
    """The specs of a registered plugin, checked."""
    formats = _by_name(source, "formats", _answers(source, manager, "lpq_register_formats", FormatSpec))
    recipes = _by_name(source, "recipes", _answers(source, manager, "lpq_register_recipes", RecipeSpec))
    layouts = _by_name(source, "layouts", _answers(source, manager, "lpq_register_layouts", LayoutSpec))
    kernels = [kernel for spec in formats.values() for kernel in _own_kernels(source, spec)]
    kernels += _answers(source, manager, "lpq_register_kernels", KernelSpec)
    for kernel in kernels:
        _check_kernel(source, kernel)
    return PluginInfo(
        name=source.name,
        distribution=source.distribution,
        version=source.version,
        formats=formats,
        recipes=recipes,
        kernels=tuple(kernels),
        layouts=layouts,
    )


def _answers(source: PluginSource, manager: pluggy.PluginManager, hook: str, kind: type[Spec]) -> list[Spec]:
    """The specs that this plugin returns from a hook, checked. A call through pluggy would drop a None."""
    specs: list[Spec] = []
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin_name != source.name:
            continue
        try:
            answer = implementation.function()
        except (Exception, SystemExit) as error:
            raise source.error(f"{hook} raised {words(error)}", source.other_version) from error
        own = [answer] if isinstance(answer, kind) else answer
        if not isinstance(own, Sequence) or not all(isinstance(spec, kind) for spec in own):
            raise source.error(f"{hook} returned {answer!r}", f"return a {kind.__name__} or a list of them")
        for spec in nested(tuple(own)):
            _check_version(source, spec)
        if (wrong := fault(tuple(own))) is not None:
            raise source.error(*wrong)
        specs += own
    return specs


def _check_version(source: PluginSource, spec: object) -> None:
    version = getattr(spec, "api_version", None)
    if isinstance(version, int) and not OLDEST_API_VERSION <= version <= API_VERSION:
        older = source.distribution if version < API_VERSION else OWN
        cause = f"{title(spec)} is for plugin interface {version}, and this lpq has {API_VERSION}"
        raise source.error(cause, pip("install --upgrade", [older], f"upgrade {older}"))


def _check_kernel(source: PluginSource, kernel: KernelSpec) -> None:
    """Raise for a misspelt field: such a kernel would never run, and nobody would notice."""
    what = title(kernel)
    for field_name, choices in (("op", OPERATIONS), ("backend", BACKENDS)):
        value = getattr(kernel, field_name)
        if value not in choices:
            raise source.error(f"{what} has {field_name}={value!r}", f"change it ({suggestion(value, choices)})")
    operation = TABLE[kernel.op]
    counts = operation.formats
    if len(kernel.formats) not in counts:
        remedy = f"name {' or '.join(map(str, counts))}, as in KernelSpec(formats=('acme',{' ...' * (counts[-1] - 1)}))"
        raise source.error(f"{what} has formats={kernel.formats!r}, and its op is {kernel.op}", remedy)
    for field_name in ("min_sm", "max_sm"):
        value = getattr(kernel, field_name)
        if value is not None and value < 10:
            raise source.error(f"{what} has {field_name}={value!r}", "write a compute capability of 9.0 as 90")
    if not kernel.device.isidentifier():
        raise source.error(f"{what} has device={kernel.device!r}", "name a type of device, as 'cuda', without a number")
    if kernel.rounds and not operation.rounds:
        able = " and ".join(name for name, row in TABLE.items() if row.rounds)
        raise source.error(f"{what} has rounds=True, and its op is {kernel.op}", f"only {able} round")
    for field_name in ("bind", "several"):
        if getattr(kernel, field_name) is not None and getattr(operation, field_name) is None:
            able = ", ".join(name for name, row in TABLE.items() if getattr(row, field_name) is not None)
            cause = f"{what} has {field_name}={getattr(kernel, field_name)!r}, and its op is {kernel.op}"
            raise source.error(cause, f"leave it out: nothing calls it but for {able}")


def _by_name(source: PluginSource, kind: Kind, specs: Sequence[Named]) -> dict[str, Named]:
    by_name: dict[str, Named] = {}
    for spec in specs:
        if not owns(source.name, spec.name, kind):
            allowed = " or ".join([source.name, *(f"{source.name}{sep}*" for sep in SEPARATORS[kind])])
            raise source.error(
                f"it registers {spec.name!r}, outside its namespace",
                f"name it {allowed}, or name the entry point after it",
            )
        aliases: tuple[str, ...] = getattr(spec, "aliases", ())
        if why := next(filter(None, map(why_no_name, (spec.name, *aliases))), None):
            raise source.error(why, "use letters, digits, '_', '-' and '.', and no word that means something")
        if spec.name in by_name:
            raise source.error(f"it registers {spec.name!r} twice", "give each its own name")
        by_name[spec.name] = spec
    return by_name


def _own_kernels(source: PluginSource, spec: FormatSpec) -> list[KernelSpec]:
    """The kernels that a format lists; kernels that name no format are for this format."""
    kernels: list[KernelSpec] = []
    for kernel in spec.kernels:
        formats = kernel.formats or (spec.name,) * (TABLE[kernel.op].formats[0] if kernel.op in TABLE else 1)
        if spec.name not in formats:
            raise source.error(
                f"format {spec.name} lists kernel {kernel.impl}, which is for {', '.join(formats)}",
                "return kernels for other formats from lpq_register_kernels",
            )
        kernels.append(replace(kernel, formats=formats))
    return kernels
