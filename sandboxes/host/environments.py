"""The environments that a host serves: loaded once, described once; those that cannot be loaded, with their cause."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from envfarm.core import plugins
from envfarm.core.environment import Environment, description
from envfarm.core.episode import EnvironmentInfo
from envfarm.core.errors import ConfigError, FarmError, IsolationError
from envfarm.core.sandbox import Isolation
from envfarm.tools.schema import catalogue_hash, schemas
from sandboxes.host.results import exception_text
from sandboxes.isolation.levels import reached
from sandboxes.isolation.surroundings import MACHINE, Surroundings

log = logging.getLogger(__name__)


class Loaded:
    """An environment class under the name by which this host serves it.

    ``refusal``: why no episode of it can open here: it runs code and the isolation that it asks for cannot be had, or
    it is for another image.
    """

    def __init__(self, name: str, cls: type[Environment], surroundings: Surroundings = MACHINE) -> None:
        self.name = name
        self.cls = cls
        self.limits = cls.limits
        tools = schemas(cls)
        isolation, self.refusal = _reached(cls, surroundings)
        self.isolation = isolation
        self.executes = _executes(cls)
        wanted = cls.profile.image
        if wanted != surroundings.image and (wanted or self.executes):  # code that runs nothing sees no image
            self.refusal = _wrong_image(name, wanted, surroundings.image)
        self.has_progress = cls.progress is not Environment.progress
        self.info = EnvironmentInfo(
            name=name,
            version=cls.version,
            description=description(cls),
            tools=tools,
            limits=cls.limits,
            reward=cls.reward,
            system_prompt=cls.system_prompt,
            catalogue=catalogue_hash(tools),
            isolation=isolation,
            profile=cls.profile,
        )


class Environments:
    """What a host was asked to serve. ``broken`` has one sentence per name that could not be loaded."""

    def __init__(self, names: Iterable[str], surroundings: Surroundings = MACHINE) -> None:
        self.image = surroundings.image  # whose files commands see; empty: the host's own system
        self._loaded: dict[str, Loaded] = {}
        self._broken: dict[str, str] = {}
        for name in dict.fromkeys(names):
            try:
                self._loaded[name] = Loaded(name, plugins.environment(name), surroundings)
            except FarmError as error:
                self._broken[name] = str(error)
            except BaseException as error:  # the import of user code may raise anything, SystemExit included
                if isinstance(error, KeyboardInterrupt):
                    raise
                log.warning("environment %r cannot be loaded", name, exc_info=True)
                self._broken[name] = exception_text(error)

    @property
    def loaded(self) -> list[Loaded]:
        """What can be run, sorted by name."""
        return [self._loaded[name] for name in sorted(self._loaded)]

    @property
    def infos(self) -> list[EnvironmentInfo]:
        """What can be run, sorted by name."""
        return [loaded.info for loaded in self.loaded]

    @property
    def broken(self) -> list[str]:
        """``name: cause`` of every environment that could not be loaded."""
        return [f"{name}: {cause}" for name, cause in sorted(self._broken.items())]

    def get(self, name: str) -> Loaded:
        """The environment called ``name``. Raises :class:`ConfigError` with its cause, or with what there is."""
        found = self._loaded.get(name)
        if found is not None:
            return found
        if name in self._broken:
            raise ConfigError(f"environment {name!r} could not be loaded: {self._broken[name]}")
        there = ", ".join(sorted(self._loaded)) or "none"
        raise ConfigError(f"this host does not serve environment {name!r} (it serves: {there})")


def _wrong_image(name: str, wanted: str, there: str) -> str:
    has = f"shows the image {there!r}" if there else "has no image"
    wants = f"asks for the image {wanted!r}" if wanted else "asks for the host's own system"
    return (
        f"environment {name!r} {wants}, and this host {has}: "
        "use a gateway whose backend makes hosts of that image, or another image in the environment's profile"
    )


def _executes(cls: type[Environment]) -> bool:
    # A function shows only in what it makes whether that runs code; classes and instances show it themselves.
    declared = (toolset if hasattr(toolset, "executes") else toolset() for toolset in cls.toolsets)
    return cls.executes or any(toolset.executes for toolset in declared)


def _reached(cls: type[Environment], surroundings: Surroundings) -> tuple[Isolation, str]:
    """The level that ``exec`` reaches, and why an environment that needs more cannot be opened."""
    try:
        return reached(cls.profile.isolation, surroundings), ""
    except IsolationError as error:
        return Isolation.NONE, f"environment {cls.name!r}: {error}" if _executes(cls) else ""
