"""The plugins of this process, each loaded when it is first asked for, and cached values that are derived from them.

Derived values are cached through ``cached``; ``refresh`` and ``register`` empty these caches. Any thread may look up
and register at any time: a result belongs to the time before or to the time after, and is never a mixture.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, ParamSpec, TypeVar

import pluggy

from lpq.registry import hookspecs
from lpq.registry.errors import (
    ImportStringError,
    PluginError,
    PluginHidden,
    PluginMissing,
    UnknownFormat,
    UnknownRecipe,
    suggestion,
    words,
)
from lpq.registry.loader import HERE, HOOKS, OWN, Kind, PluginInfo, PluginSource, installed, load, owns, resolve
from lpq.registry.showing import brief, pip

LOAD_PLUGINS = "LPQ_LOAD_PLUGINS"

P = ParamSpec("P")
T = TypeVar("T")


class Registry:
    """The plugins of one process. ``LPQ_LOAD_PLUGINS`` is read when it is made."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._places = _places()
        self._sources = installed()
        self._setting = os.environ.get(LOAD_PLUGINS)
        self._allowed: set[str] | None = None
        if self._setting is not None:
            self._allowed = {name.strip() for name in self._setting.split(",")} - {""}
            for name in self._allowed:
                self._sources.setdefault(name, [])
        self._plugins: dict[str, PluginInfo] = {}
        self.lock = threading.RLock()

    def _look_again(self) -> None:
        """Take in newly installed packages, and try plugins again that could not be used. Loaded plugins stay."""
        if (places := _places()) == self._places:
            return
        self._places = places
        importlib.invalidate_caches()
        new = {name: sources for name, sources in installed().items() if not self._sources.get(name)}
        broken = [name for name, plugin in self._plugins.items() if plugin.error is not None]
        for name in broken:
            del self._plugins[name]
        self._sources |= new
        if new or broken:
            _REMEMBERED.clear()

    def plugin(self, name: str) -> PluginInfo:
        """The plugin with this entry-point name. It is imported on the first call."""
        with self.lock:
            if name not in self._plugins:
                try:
                    self._plugins[name] = load(self._source(name), self._manager)
                except PluginError as error:
                    self._plugins[name] = PluginInfo(
                        name=name, distribution=error.distribution, version=error.version, error=error
                    )
            return self._plugins[name]

    def plugins(self) -> tuple[PluginInfo, ...]:
        """All plugins, lpq's own first."""
        with self.lock:
            self._look_again()
            return tuple(sorted(self._every(), key=lambda plugin: not plugin.builtin))

    def _every(self) -> list[PluginInfo]:
        return [self.plugin(name) for name in sorted(self._sources)]

    def provider(self, name: str, kind: Kind) -> PluginInfo:
        """The plugin with this format or recipe. Only plugins whose namespace fits the name are imported."""
        with self.lock:
            self._look_again()
            owners = sorted((owner for owner in self._sources if owns(owner, name, kind)), key=len, reverse=True)
            for owner in owners:
                if name in getattr(self.plugin(owner), kind):
                    return self.plugin(owner)
            for owner in owners:
                if (error := self.plugin(owner).error) is not None:
                    raise error.with_traceback(None)
            if kind == "formats" and any(name in p.recipes for p in self.plugins()):
                raise UnknownFormat(
                    f"{brief(name)} is a recipe and no format: it stands alone, or after a key of a recipe, and "
                    f"without parentheses; `lpq explain {name}` shows the quantizers that it stands for"
                )
            names = [n for p in self.plugins() for n in ([p.name] if p.error else getattr(p, kind))]
            unknown = UnknownFormat if kind == "formats" else UnknownRecipe
            raise unknown(
                f"there is no {kind[:-1]} {brief(name)} here: {suggestion(name, names)} "
                f"(`lpq {kind}` lists them; each name begins with the name of its plugin)"
            )

    def loaded(self) -> tuple[PluginInfo, ...]:
        """The plugins that are imported already."""
        with self.lock:
            return tuple(self._plugins.values())

    def imported(self, plugin: PluginInfo, string: str) -> Any:
        """The object that an import string of this plugin's specs names."""
        try:
            return resolve(string)
        except ImportStringError as error:
            with self.lock:
                source = self._source(plugin.name)
            raise source.import_error(string, error.__cause__ or error) from error

    def convert_module(self, module: Any, fqn: str, recipe: Any) -> Any:
        """Call ``lpq_convert_module`` of all usable plugins. This is done for each layer: ``plugins()``, once before,
        looks for new ones."""
        with self.lock:
            self._every()
            hook = self._manager.hook.lpq_convert_module
            try:
                return hook(module=module, fqn=fqn, recipe=recipe)
            except PluginError:
                raise  # it names the plugin at fault already
            except Exception as error:
                culprit = _raised_in(error, hook.get_hookimpls())
                if culprit not in self._sources:
                    raise  # no plugin's
                source = self._source(culprit)
                what = f"the module {fqn!r}" if fqn else "the model itself"
                cause = f"its lpq_convert_module raised {words(error)}, for {what} ({type(module).__name__})"
                raise source.error(cause, source.other_version) from error

    def register(self, plugin: object, name: str) -> PluginInfo:
        """Take a module, or any object with hooks, as plugin ``name``; it replaces an earlier one."""
        with self.lock:
            for source in self._sources.get(name, ()):
                if source.distribution != HERE:
                    raise source.error("it is installed, and its name cannot be taken", "choose another name")
            source_here = PluginSource(name, HERE, "", getattr(plugin, "__name__", name), lambda: plugin)
            if isinstance(plugin, str):
                raise source_here.error(
                    f"{brief(plugin)} is a text", "import the module, and register the module itself"
                )
            if isinstance(plugin, type) and any(
                inspect.isfunction(inspect.getattr_static(plugin, hook, None)) for hook in HOOKS
            ):
                remedy = f"register an object of it, as {plugin.__name__}(), or make its hooks static methods"
                raise source_here.error(f"{plugin.__name__} is a class whose hooks take self", remedy)
            self._forget(name)
            self._sources[name] = [source_here]
            info = self.plugin(name)
            if info.error is not None:
                self._forget(name)
                raise info.error.with_traceback(None)
            _REMEMBERED.clear()  # what its own hooks looked up was found without it
            return info

    def _forget(self, name: str) -> None:
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)
        self._sources.pop(name, None)
        self._plugins.pop(name, None)
        _REMEMBERED.clear()

    def _source(self, name: str) -> PluginSource:
        """The one distribution that provides a plugin; an error, if there is none or more than one."""
        sources, setting = self._sources[name], f"{LOAD_PLUGINS}={self._setting}"
        everyone = self._allowed is None or name in self._allowed
        usable = [source for source in sources if everyone or source.distribution in (OWN, HERE)]
        if len(usable) == 1:
            return usable[0]
        origins = " and ".join(f"{source.distribution} {source.version}" for source in usable or sources)
        if usable:
            removable = [source.distribution for source in usable if source.distribution != OWN]
            remedy = pip("uninstall", removable, "uninstall all of them but one")
            raise PluginError(name, origins, "", "they bring plugins of the same name", remedy)
        if sources:
            remedy = f"add {name} to {LOAD_PLUGINS}, or unset it"
            raise PluginHidden(name, origins, "", f"{setting} leaves it out", remedy)
        inside = [plugin for plugin, sources in self._sources.items() if any(s.distribution == name for s in sources)]
        if inside:
            remedy = f"{name} is a distribution: name its plugin, {' or '.join(sorted(inside))}, in {LOAD_PLUGINS}"
        else:
            remedy = f"install the distribution that brings it, or take it out of {LOAD_PLUGINS}"
        raise PluginMissing(name, "not installed", "", f"{setting} names it", remedy)


def _places() -> list[tuple[str, int | None]]:
    """The folders in which Python looks for distributions, and when each changed last: a few microseconds each."""
    folders: list[tuple[str, int | None]] = []
    for place in sys.path:
        try:
            folders.append((place, os.stat(place or ".").st_mtime_ns))
        except OSError:
            folders.append((place, None))
    return folders


def _raised_in(error: Exception, implementations: Sequence[pluggy.HookImpl]) -> str | None:
    """The name of the plugin whose hook raised: the owner of the innermost frame that runs a plugin's code.

    pluggy does not report it. A decorated hook counts as the decorated function, as decorators are shared.
    """
    code = {getattr(inspect.unwrap(i.function), "__code__", None): i.plugin_name for i in implementations}
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((code[ran] for ran in reversed(frames) if ran in code), None)


_MAKING = threading.RLock()


class _Remembered(dict[object, Any]):
    """Results by the function that found them."""

    def __missing__(self, key: object) -> object:
        return self.setdefault(key, object())


_REMEMBERED = _Remembered()
"""The ``cached`` functions, each with its results; and the ``epoch``."""
FEW = 512
"""How many answers of a function are kept that has one for each shape."""


@functools.cache
def _registry() -> Registry:
    return Registry()


def default() -> Registry:
    """The registry of this process, made on first use."""
    with _MAKING:  # two threads would make one each, and registrations in all but one would be lost
        return _registry()


def refresh() -> None:
    """Forget all plugins, also those that were registered by hand: the next lookup reads the metadata again.

    For a plugin that was installed in another version; one that is new is found without it. A module that was imported
    stays imported.
    """
    importlib.invalidate_caches()
    with _MAKING:
        _registry.cache_clear()
    _REMEMBERED.clear()


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """``functools.cache`` of ``function``, whose results derive from the registry: emptied when the plugins change."""
    return _forgotten(function, None, None)


def cached_few(function: Callable[P, T], under: Callable[[], object] | None = None) -> Callable[P, T]:
    """As ``cached``, for results of each shape: only the last few are kept.

    Args:
        function: A function of arguments that have a hash.
        under: Returns a setting on which results depend, too; None: there is none.
    """
    return _forgotten(function, FEW, under)


def _forgotten(function: Callable[P, T], most: int | None, under: Callable[[], object] | None) -> Callable[P, T]:
    keyed: Callable[..., T] = function if under is None else lambda _, *args, **kwargs: function(*args, **kwargs)

    @functools.wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> T:
        results = _REMEMBERED.get(keyed)
        if results is None:
            results = _REMEMBERED[keyed] = functools.lru_cache(most)(keyed)
        result: T = results(*args, **kwargs) if under is None else results(under(), *args, **kwargs)  # type: ignore[arg-type]
        return result

    return remembered


epoch: Callable[[], object] = functools.partial(getitem, _REMEMBERED, "epoch")
"""Returns an object that changes as soon as results that are derived from the registry are dropped."""
