"""Newer versions of what is pinned to a Python index, and moving the pins to them."""

import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from primus_images.errors import HostError
from primus_images.gates.rules.coherence import rocm_version
from primus_images.plan.project import Project
from primus_images.plan.request import request_of
from primus_images.plan.resolve import ResolvedTarget
from primus_images.versions.components import Component, Pin
from primus_images.versions.lock import normalised
from primus_images.versions.wheels import fits_together, offered
from primus_images.yamlfile import Document

Place = tuple[str, int]
"""A component, and the number of its pin."""
# The newest versions of a package that are tried; each takes seconds to resolve.
_TRIES = 6


class Outlook(NamedTuple):
    """What one pin could be. ``newest`` is the newest version of its index, and ``compatible`` the
    newest one that fits the other pins; None if the pin is at it. ``moves`` are the new versions of
    all pins that move to the compatible one. ``behind`` is the component's reason for an older one,
    ``error`` tells why a source could not be asked.
    """

    component: str
    channel: str
    package: str
    targets: tuple[str, ...]
    pinned: str
    moves: Mapping[Place, str]
    compatible: str | None = None
    newest: str | None = None
    behind: str | None = None
    error: str = ""


class Outlooks:
    """Asks the indexes about the pins of a project. ``uses`` are the pins from indexes, with their
    targets.
    """

    def __init__(self, targets: Iterable[ResolvedTarget]) -> None:
        # uv finds its program through it, and Python 3.11's first caller must be alone.
        sysconfig.get_config_vars()
        self.uses: dict[Place, list[ResolvedTarget]] = {}
        self._offers: dict[tuple[str, str, str], set[Version]] = {}
        self._needs: dict[tuple[str, str, str], dict[str, str]] = {}
        for resolved in targets:
            for component, pin in resolved.pins.items():
                if pin.wheel or pin.sdist:
                    self.uses.setdefault((component, pin.place), []).append(resolved)

    def of(
        self, place: Place, exact: str | None = None, before: Mapping[Place, str] | None = None
    ) -> Outlook:
        """Ask about one pin, after the moves ``before``, which those of the answer contain.

        ``exact`` is taken even if it does not fit, because locking then tells the reason.
        """
        pin = self._pin(place)
        users = self.uses[place]
        targets = tuple(user.name for user in users)
        behind = users[0].versions.components[place[0]].behind
        outlook = Outlook(
            component=place[0],
            channel=pin.channel,
            package=_package(pin),
            targets=targets,
            pinned=pin.version or "",
            moves={},
            behind=behind,
        )
        try:
            if not self._offered(place):
                raise HostError(f"no index lists a file of {outlook.package}")
            if self._leader(users[0], place[0]):
                outlook = outlook._replace(
                    newest=next((str(version) for version in self._newer(place)), None)
                )
            for versions in islice(self._steps(place, exact), _TRIES):
                outlook = outlook._replace(newest=outlook.newest or versions[place])
                if exact:
                    moves = {**(before or {}), **versions}
                else:
                    moves = self._fit(versions, before or {})
                if moves is not None:
                    return outlook._replace(compatible=versions[place], moves=moves)
        except HostError as error:
            return outlook._replace(error=error.message)
        return outlook

    def _pin(self, place: Place) -> Pin:
        return self.uses[place][0].pins[place[0]]

    def _steps(self, place: Place, exact: str | None) -> Iterator[dict[Place, str]]:
        pin = self._pin(place)
        user = self.uses[place][0]
        leader = self._leader(user, place[0])
        if leader:
            above = (leader, user.pins[leader].place)
            steps = ()
            if above in self.uses:
                steps = self._steps(above, None)
            now = {place: self._named(user, user.pins, place[0]) or pin.version or ""}
            several = (
                moves
                for moves in chain(steps, [now])
                if moves.get(place, pin.version) != pin.version
            )
            yield from (moves for moves in several if exact in (None, moves[place]))
            return
        for version in self._newer(place, exact):
            rocm = _rocm(pin, version)
            moves = {place: str(version)}
            for member in self._train(place):
                own = self._pin(member)
                fits = [
                    v
                    for v in self._offered(member)
                    if (_rocm(own, v) == rocm if rocm else v == version)
                ]
                moves |= {member: str(max(fits, key=partial(_order, own)))} if fits else {}
            if moves.keys() >= self._train(place):
                yield moves | self._followers(place, str(version))

    def _newer(self, place: Place, exact: str | None = None) -> Iterator[Version]:
        pin = self._pin(place)
        old = Version(pin.version or "")
        for version in sorted(self._offered(place), key=partial(_order, pin), reverse=True):
            newer = (
                _order(pin, version) > _order(pin, old)
                and version.is_prerelease <= old.is_prerelease
            )
            if _build(version) == _build(old) and (str(version) == exact if exact else newer):
                yield version

    def _train(self, place: Place) -> set[Place]:
        """Return the other pins that must move with this one: of the same ROCm, or held ones of the
        same version.
        """
        pin = self._pin(place)
        user = self.uses[place][0]
        held = {
            name: other for name, other in user.pins.items() if user.versions.components[name].held
        }
        rocm = _rocm(pin, Version(pin.version or ""))
        return {
            (name, other.place)
            for name, other in held.items()
            if place[0] in held and name != place[0] and (other.wheel or other.sdist)
            if (
                _rocm(other, Version(other.version or "")) == rocm
                if rocm
                else other.version == pin.version
            )
        }

    def _leader(self, user: ResolvedTarget, name: str) -> str | None:
        """Return the component whose wheel names the version of ``name``. What is of a ROCm moves
        with that instead.
        """
        pin = user.pins[name]
        leader = user.versions.components[name].follows
        if leader in user.pins and pin.wheel and not _rocm(pin, Version(pin.version or "")):
            return leader
        return None

    def _followers(self, place: Place, version: str) -> dict[Place, str]:
        moves: dict[Place, str] = {}
        for user in self.uses[place]:
            pins = {**user.pins, place[0]: replace(user.pins[place[0]], version=version)}
            for name, pin in user.pins.items():
                if (
                    self._leader(user, name) == place[0]
                    and (new := self._named(user, pins, name)) != pin.version
                ):
                    moves |= {(name, pin.place): new} if new else {}
        return moves

    def _named(self, user: ResolvedTarget, pins: Mapping[str, Pin], name: str) -> str | None:
        """Return the version of ``name`` that its leader's wheel of pip's index names. Other builds
        may name none.
        """
        leader = self._leader(user, name) or ""
        package = normalised(pins[leader].loaded_as(leader))
        version = Version(pins[leader].version or "").public
        key = (package, version, user.request.python)
        if key not in self._needs:
            request = replace(
                user.request,
                wheels={package: version},
                sdists={},
                gits={},
                debs={},
                builds={},
                pure=(),
            )
            self._needs[key] = fits_together(request, (), ()) or {}
        return self._needs[key].get(normalised(pins[name].wheel or ""))

    def _fit(
        self, moves: Mapping[Place, str], before: Mapping[Place, str]
    ) -> dict[Place, str] | None:
        """Return ``before`` and ``moves`` with what other held pins become.

        None if they contradict each other, or if a target that uses ``moves`` cannot be resolved.
        """
        result = {**moves, **before}
        done = set()
        if any(result[place] != version for place, version in moves.items()) or not _allowed(
            self.uses, result
        ):
            return None
        held = any(self.uses[place][0].versions.components[place[0]].held for place in moves)
        for user in {user.name: user for place in moves for user in self.uses[place]}.values():
            pins = {
                name: replace(pin, version=result.get((name, pin.place), pin.version))
                for name, pin in user.pins.items()
            }
            request = request_of(user.versions, user.name, user.choice, pins, user.extras)
            led = {name: leader for name in pins if (leader := self._leader(user, name))}
            for name, leader in led.items():
                moved = {(name, pins[name].place), (leader, pins[leader].place)} & moves.keys()
                if moved and self._named(user, pins, name) not in (None, pins[name].version):
                    return None
            free = {
                name: normalised(pin.wheel)
                for name, pin in pins.items()
                if pin.wheel
                and user.versions.components[name].held
                and "+" not in (pin.version or "")
                if held and (name, pin.place) not in result
            }
            loose = {
                w: (name, pins[name].place)
                for name, w in free.items()
                if led.get(name, name) in free
            }
            # Targets of one channel often differ in nothing that an index knows.
            key = repr((sorted(request.wheels.items()), sorted(request.provided.items())))
            if key in done:
                continue
            done.add(key)
            builds = [
                f"{n}!={v}" for n, place in loose.items() for v in self._offered(place) if v.local
            ]
            versions = fits_together(request, loose, builds)
            if versions is None:
                return None
            result |= {
                place: versions[name]
                for name, place in loose.items()
                if versions[name] != request.wheels[name]
            }
        return result

    def _offered(self, place: Place) -> set[Version]:
        user = self.uses[place][0]
        pin = self._pin(place)
        key = (normalised(_package(pin)), "wheel" if pin.wheel else "sdist", user.choice.channel)
        if key not in self._offers:
            self._offers[key] = offered(key[0], user.request, key[1])
        return self._offers[key]


def edit(
    text: str, document: Document, components: Mapping[str, Component], moves: Mapping[Place, str]
) -> str:
    """Return the text of versions.yaml with the pins moved. Comments and all else stay.

    With a ROCm, what is inside its packages and has its number moves, and so do the tools of
    builds.
    """
    lines = text.split("\n")
    every = dict(moves)
    tools = {}
    for (name, number), version in moves.items():
        pin = components[name].pins[number]
        old, new = (
            str(rocm_version(normalised(_package(pin)), v) or "")
            for v in (pin.version or "", version)
        )
        if old and new:
            tools[old] = new
            inside = (
                (n, i, p) for n, c in components.items() for i, p in enumerate(c.pins) if p.inside
            )
            every |= {
                (n, i): new for n, i, p in inside if p.channel == pin.channel and p.version == old
            }
    for (name, number), version in every.items():
        line, column = document.places["components", name, "pins", number, "version"]
        before = lines[line - 1][: column - 1]
        after = lines[line - 1][column - 1 :]
        lines[line - 1] = before + after.replace(
            components[name].pins[number].version or "", version, 1
        )
    text = "\n".join(lines)
    for old, new in tools.items():
        text = re.sub(rf"\b(rocm[a-z-]*)=={re.escape(old)}\b", rf"\1=={new}", text)
    return text


@contextmanager
def trial(root: Path, text: str) -> Iterator[Project]:
    """Yield the project with another text of versions.yaml, in a folder of its own. Write nothing
    to it.
    """
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
    if rocm:
        return rocm.release
    return ()


def _order(pin: Pin, version: Version) -> tuple[str | tuple[int, ...] | Version, ...]:
    # PEP 440 sorts +rocm10.1 before +rocm7.15.
    return _rocm(pin, version), Version(version.public), version


def _build(version: Version) -> str:
    # A ROCm moves to another one.
    if "rocm" in (version.local or ""):
        return "rocm"
    return version.local or ""


def _allowed(uses: Mapping[Place, Sequence[ResolvedTarget]], moves: Mapping[Place, str]) -> bool:
    """Return whether versions.yaml accepts the moves: its components' ``needs``."""
    versions = next(iter(uses.values()))[0].versions
    components = dict(versions.components)
    for (name, number), version in moves.items():
        pins = list(components[name].pins)
        pins[number] = replace(pins[number], version=version)
        components[name] = replace(components[name], pins=tuple(pins))
    try:
        replace(versions, components=components)
    except ValueError:
        return False
    return True
