"""Flathead's functions in the place of another package's: all of them, or none.

Every name is resolved and every signature compared before anything is replaced. A function is then replaced in its
home and in every imported module of the package that holds the very same object, since `from utils import f` copies
the reference. Modules imported later find the new one in its home. `remove` puts every stock object back.
"""

import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger("flathead")


@dataclass(frozen=True)
class Site:
    """`owner.name(*parameters)` becomes `new`.

    owner: "package.module" or "package.module:Class". parameters: the names the stock callable takes, in order; of an
    autograd function those of its forward, without ctx. only_here: other modules keep the stock object.
    """

    owner: str
    name: str
    parameters: tuple[str, ...]
    new: Any
    only_here: bool = False

    @property
    def path(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


@dataclass
class Replacement:
    """What of one package is replaced, the versions that was tested with, and whether it is in place now.

    host: its name in messages. package: its import name, which is that of Flathead's extra and integration too.
    built: classes ("module:Class") of which no instance may live when the functions change under it. check: a further
    condition on the host, returning the complaint or None; called last before anything is replaced.
    """

    host: str
    distribution: str
    tested_versions: tuple[str, ...]
    sites: tuple[Site, ...]
    package: str
    built: tuple[str, ...] = ()
    check: Callable[[], str | None] = lambda: None
    _stock: dict[Site, Any] = field(default_factory=dict)  # not empty: in place

    def apply(self) -> None:
        """Errors: ModuleNotFoundError without the host, RuntimeError if it does not fit, is in use, or has this."""
        if self._stock:
            raise RuntimeError(f"{self._us}.apply: expected stock {self.host}, got one replaced already; call remove()")
        version = self.version()
        stock = self._resolve(version)
        for path in self.built:
            if living := _instances(path):
                raise RuntimeError(
                    f"{self._us}: expected no {self.host} trainer yet, got a living {type(living[0]).__name__}: "
                    f"nothing was replaced; import {self._us} before the trainer is built"
                )
        if version not in self.tested_versions:
            tested = ", ".join(self.tested_versions)
            warnings.warn(f"{self._us}: tested with {self.host} {tested}; {version} has the same names", stacklevel=3)
        for site, old in stock.items():
            self._rebind(site, old, site.new)
        self._stock = stock
        names = "; ".join(f"{name} -> {new}" for name, new in self.table())
        log.info("flathead: %s %s: replaced %s", self.host, version, names)

    def remove(self) -> None:
        """Puts every stock object back. Errors: RuntimeError when not in place, or replaced by others since."""
        if not self._stock:
            raise RuntimeError(f"{self._us}.remove: expected {self.host} with Flathead in it, got stock; call apply()")
        for site in self._stock:
            if inspect.getattr_static(_owner(site.owner), site.name) is not site.new:
                raise RuntimeError(f"{self._us}.remove: expected Flathead's {site.path}, got another; undo that first")
        for site, old in self._stock.items():
            self._rebind(site, site.new, old)
        self._stock = {}

    def table(self) -> list[tuple[str, str]]:
        """(name in the host, what stands there now) of everything replaced; empty when not in place."""
        return [(site.path, f"{site.new.__module__}.{site.new.__qualname__}") for site in self._stock]

    def stock(self, name: str) -> Any:
        """What stood at the site of this name."""
        return next(old for site, old in self._stock.items() if site.name == name)

    def version(self) -> str:
        """The host's. Errors: ModuleNotFoundError if it is not installed."""
        if importlib.util.find_spec(self.package) is None:
            raise ModuleNotFoundError(
                f"{self._us}: expected {self.host}, which is not installed; pip install 'flathead[{self.package}]'",
                name=self.package,
            )
        return importlib.metadata.version(self.distribution)

    @property
    def _us(self) -> str:
        return f"flathead.integrations.{self.package}"

    def _resolve(self, version: str) -> dict[Site, Any]:
        """The stock object of every site. Errors: RuntimeError that lists all that does not fit."""
        found = {site: _find(site, self.package) for site in self.sites}
        complaints = [complaint for site, old in found.items() if (complaint := _complaint(site, old))]
        if not complaints and (complaint := self.check()):
            complaints = [complaint]
        if complaints:
            tested = " or ".join(f"{self.distribution}=={one}" for one in self.tested_versions)
            raise RuntimeError(
                f"{self._us}: {self.host} {version} does not fit, nothing was replaced; pip install {tested}. "
                + "; ".join(complaints)
            )
        return found

    def _rebind(self, site: Site, old: Any, new: Any) -> None:
        setattr(_owner(site.owner), site.name, new)
        if site.only_here or ":" in site.owner:
            return
        for name, module in list(sys.modules.items()):
            if module is not None and (name == self.package or name.startswith(f"{self.package}.")):
                for key, value in list(vars(module).items()):  # not getattr: that would make lazy modules import
                    if value is old:
                        setattr(module, key, new)


_MISSING = object()


def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def _find(site: Site, package: str) -> Any:
    try:
        return vars(_owner(site.owner)).get(site.name, _MISSING)
    except (AttributeError, ModuleNotFoundError) as error:
        # What the host itself lacks of other packages is not ours to explain.
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != package:
            raise
        return _MISSING


def _complaint(site: Site, old: Any) -> str | None:
    expected = f"{site.path}: expected ({', '.join(site.parameters)})"
    if old is _MISSING:
        return f"{expected}, got no such name"
    if str(getattr(old, "__module__", "")).startswith("flathead."):
        return f"{site.path}: expected the stock one, got {old.__module__}.{old.__qualname__}: applied already"
    got = parameters_of(old)
    return None if got == site.parameters else f"{expected}, got ({', '.join(got)})"


def parameters_of(stock: Any) -> tuple[str, ...]:
    """Names of the parameters, in order; of an autograd function those of its forward, without ctx."""
    stock = getattr(stock, "__func__", stock)  # of a staticmethod or classmethod
    if isinstance(stock, type) and issubclass(stock, torch.autograd.Function):
        return tuple(inspect.signature(stock.forward).parameters)[1:]
    return tuple(inspect.signature(stock).parameters) if callable(stock) else ()


def _instances(path: str) -> list[Any]:
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None:
        return []
    gc.collect()  # a trainer nobody holds any more may still hang in a cycle
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]
