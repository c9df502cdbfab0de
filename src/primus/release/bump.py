"""Newer versions of what is pinned to a Python index, and moving the pins to them."""

import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from primus.errors import HostError
from primus.gates.rules.coherence import rocm_version
from primus.plan.project import Project
from primus.plan.resolve import ResolvedTarget
from primus.plan.target import request_of
from primus.versions.components import Component, Pin
from primus.versions.lock import normalised
from primus.versions.wheels import fits_together, offered
from primus.yamlfile import Document

Place = tuple[str, int]
"""A component, and the number of its pin."""
# The newest versions of a package that are tried; each takes seconds to resolve.
_TRIES = 6
_FLAVOUR = re.compile(r"cpu|cu(?=[0-9])|rocm|$")


class Outlook(NamedTuple):
    """What one pin could be. ``newest`` is the newest version of its index, and ``compatible`` the newest one that fits
    the other pins; None if the pin is at it. ``moves`` are the new versions of all pins that move to the compatible
    one. ``error`` tells why a source could not be asked.
    """

    component: str
    channel: str
    package: str
    targets: tuple[str, ...]
    pinned: str
    moves: Mapping[Place, str]
    compatible: str | None = None
    newest: str | None = None
    error: str = ""


class Outlooks:
    """Asks the indexes about the pins of a project. ``uses`` are the pins from indexes, with their targets."""

    def __init__(self, targets: Iterable[ResolvedTarget]) -> None:
        # uv finds its program through it, and Python 3.11's first caller must be alone.
        sysconfig.get_config_vars()
        self.uses: dict[Place, list[ResolvedTarget]] = {}
        self._offers: dict[tuple[str, str, str], set[Version]] = {}
        for resolved in targets:
            for component, pin in resolved.pins.items():
                if pin.wheel or pin.sdist:
                    self.uses.setdefault((component, pin.place), []).append(resolved)

    def of(self, place: Place, wanted: str | None = None) -> Outlook:
        """Ask about one pin. ``wanted`` is taken even if it does not fit, because locking then tells the reason."""
        pin, targets = self._pin(place), tuple(user.name for user in self.uses[place])
        outlook = Outlook(component=place[0], channel=pin.channel, package=_package(pin), targets=targets,
                          pinned=pin.version or "", moves={})  # fmt: skip
        try:
            for versions in islice(self._steps(place, wanted), _TRIES):
                outlook = outlook._replace(newest=outlook.newest or versions[place])
                if (moves := versions if wanted else self._fit(versions)) is not None:
                    return outlook._replace(compatible=versions[place], moves=moves)
        except HostError as error:
            return outlook._replace(error=error.message)
        return outlook

    def _pin(self, place: Place) -> Pin:
        return self.uses[place][0].pins[place[0]]

    def _steps(self, place: Place, wanted: str | None) -> Iterator[dict[Place, str]]:
        pin = self._pin(place)
        old = Version(pin.version or "")
        for version in sorted(self._offered(place), key=partial(_order, pin), reverse=True):
            newer = _order(pin, version) > _order(pin, old) and version.is_prerelease <= old.is_prerelease
            if not (str(version) == wanted if wanted else newer and _flavour(version) == _flavour(old)):
                continue
            rocm, moves = _rocm(pin, version), {place: str(version)}
            for member in self._train(place):
                own = self._pin(member)
                fits = [v for v in self._offered(member) if (_rocm(own, v) == rocm if rocm else v == version)]
                moves |= {member: str(max(fits, key=partial(_order, own)))} if fits else {}
            if moves.keys() >= self._train(place):
                yield moves

    def _train(self, place: Place) -> set[Place]:
        """Return the other pins that must move with this one: of the same ROCm, or held ones of the same version."""
        pin, user = self._pin(place), self.uses[place][0]
        held = {name: other for name, other in user.pins.items() if user.versions.components[name].held}
        rocm = _rocm(pin, Version(pin.version or ""))
        return {
            (name, other.place)
            for name, other in held.items()
            if place[0] in held and name != place[0] and (other.wheel or other.sdist)
            if (_rocm(other, Version(other.version or "")) == rocm if rocm else other.version == pin.version)
        }

    def _fit(self, moves: Mapping[Place, str]) -> dict[Place, str] | None:
        """Return ``moves`` with what other held pins become, or None if a target that uses them cannot be resolved."""
        result, done = dict(moves), set()
        held = any(self.uses[place][0].versions.components[place[0]].held for place in moves)
        for user in {user.name: user for place in moves for user in self.uses[place]}.values():
            pins = {
                name: replace(pin, version=result.get((name, pin.place), pin.version))
                for name, pin in user.pins.items()
            }
            chosen = user.choice
            request = request_of(user.versions, user.name, chosen.channel, chosen.base, pins, user.extras)
            loose = {
                normalised(pin.wheel): (name, pin.place)
                for name, pin in pins.items()
                if pin.wheel and user.versions.components[name].held and "+" not in (pin.version or "")
                if held and (name, pin.place) not in result
            }
            # Targets of one channel often differ in nothing that an index knows.
            if (key := repr((sorted(request.wheels.items()), sorted(request.provided.items())))) in done:
                continue
            done.add(key)
            if (versions := fits_together(request, loose)) is None:
                return None
            result |= {place: versions[name] for name, place in loose.items() if versions[name] != request.wheels[name]}
        return result

    def _offered(self, place: Place) -> set[Version]:
        user, pin = self.uses[place][0], self._pin(place)
        key = (normalised(_package(pin)), "wheel" if pin.wheel else "sdist", user.choice.channel)
        if key not in self._offers:
            self._offers[key] = offered(key[0], user.request, key[1])
        return self._offers[key]


def edit(text: str, document: Document, components: Mapping[str, Component], moves: Mapping[Place, str]) -> str:
    """Return the text of versions.yaml with the pins moved. Comments and all else stay.

    With a ROCm, what is inside its packages and has its number moves, and so do the tools of builds.
    """
    lines, every, tools = text.split("\n"), dict(moves), {}
    for (name, number), version in moves.items():
        pin = components[name].pins[number]
        old, new = (str(rocm_version(normalised(_package(pin)), v) or "") for v in (pin.version or "", version))
        if old and new:
            tools[old] = new
            inside = ((n, i, p) for n, c in components.items() for i, p in enumerate(c.pins) if p.inside)
            every |= {(n, i): new for n, i, p in inside if p.channel == pin.channel and p.version == old}
    for (name, number), version in every.items():
        line, column = document.places["components", name, "pins", number, "version"]
        before, after = lines[line - 1][: column - 1], lines[line - 1][column - 1 :]
        lines[line - 1] = before + after.replace(components[name].pins[number].version or "", version, 1)
    text = "\n".join(lines)
    for old, new in tools.items():
        text = re.sub(rf"\b(rocm[a-z-]*)=={re.escape(old)}\b", rf"\1=={new}", text)
    return text


@contextmanager
def trial(root: Path, text: str) -> Iterator[Project]:
    """Yield the project with another text of versions.yaml, in a folder of its own. Write nothing to it."""
    with tempfile.TemporaryDirectory(prefix="primus-bump-") as name:
        folder = Path(name)
        (folder / "versions.yaml").write_text(text, encoding="utf-8")
        for part in ("images", "recipes"):
            (folder / part).symlink_to(root / part)
        yield Project.find(folder)


def _package(pin: Pin) -> str:
    return pin.wheel or pin.sdist or ""


def _rocm(pin: Pin, version: Version) -> tuple[int, ...]:
    rocm = rocm_version(normalised(_package(pin)), str(version))
    return rocm.release if rocm else ()


def _order(pin: Pin, version: Version) -> tuple[str | tuple[int, ...] | Version, ...]:
    # PEP 440 sorts +rocm10.1 before +rocm7.15.
    return _rocm(pin, version), Version(version.public), version


def _flavour(version: Version) -> str:
    return _FLAVOUR.search(version.local or "")[0]  # type: ignore[index]  # it matches the end
