"""Newer versions of what is pinned to a Python index, and moving the pins to them."""

import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
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
from primus_images.versions.components import Component, Pin, Versions
from primus_images.versions.lock import normalised
from primus_images.versions.wheels import fits_together, offered
from primus_images.yamlfile import Document

Place = tuple[str, int]
"""A component, and the number of its pin."""
Moves = Mapping[Place, str]
"""The new versions of pins."""
# The newest versions of a package that are tried; each takes seconds to resolve.
_TRIES = 6


class Outlook(NamedTuple):
    """What one pin could be.

    ``newest`` is the newest version of its index, and ``compatible`` the newest one that fits the
    other pins; None if the pin is at it. ``moves`` are the new versions of all pins that move to
    the compatible one. ``behind`` is the component's reason for an older one, ``error`` tells why a
    source could not be asked.
    """

    component: str
    channel: str
    package: str
    targets: tuple[str, ...]
    pinned: str
    moves: Moves
    compatible: str | None = None
    newest: str | None = None
    behind: str | None = None
    error: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """The new versions by component."""
        return named(self.moves)


def named(moves: Moves) -> dict[str, str]:
    """Return component → new version."""
    return {name: version for (name, _), version in moves.items()}


class Outlooks:
    """Asks the indexes about the pins of a project.

    ``uses`` are the pins from indexes, with their targets.
    """

    def __init__(self, targets: Iterable[ResolvedTarget]) -> None:
        # uv finds its program through it, and Python 3.11's first caller must be alone.
        sysconfig.get_config_vars()
        self.uses: dict[Place, list[ResolvedTarget]] = {}
        self._offers: dict[tuple[str, str, str], set[Version]] = {}
        self._needs: dict[tuple[str, str, str], dict[str, str]] = {}
        for resolved in targets:
            for component, pin in resolved.pins.items():
                if _package(pin):
                    self.uses.setdefault((component, pin.place), []).append(resolved)

    def of(self, place: Place, exact: str | None = None, before: Moves | None = None) -> Outlook:
        """Ask about one pin, after the moves ``before``, which those of the answer contain.

        ``exact`` is taken even if it does not fit, because locking then tells the reason.
        """
        pin = self._pin(place)
        users = self.uses[place]
        outlook = Outlook(
            component=place[0],
            channel=pin.channel,
            package=_package(pin),
            targets=tuple(user.name for user in users),
            pinned=pin.version or "",
            moves={},
            behind=users[0].versions.components[place[0]].behind,
        )
        try:
            if not self._offered(place):
                raise HostError(f"no index lists a file of {outlook.package}")
            if self._leader(users[0], place[0]):
                newest = next(self._newer(place), None)
                outlook = outlook._replace(newest=str(newest) if newest else None)
            for versions in islice(self._steps(place, exact), _TRIES):
                outlook = outlook._replace(newest=outlook.newest or versions[place])
                moves: Moves | None = {**(before or {}), **versions}
                if not exact:
                    moves = self._fit(versions, before or {})
                if moves is not None:
                    return outlook._replace(compatible=versions[place], moves=moves)
        except HostError as error:
            message = error.message
            if outlook.newest and pin.channel != users[0].choice.channel:
                message = f"whether {outlook.newest} fits the others is unknown: {message}"
            return outlook._replace(error=message)
        return outlook

    def as_offered(self, place: Place, version: str) -> str:
        """Return a version as its index writes it: 1.1 for 1.1.0; unchanged if none offers it."""
        for offer in self._offered(place):
            if offer == Version(version):
                return str(offer)
        return version

    def refusal(self, place: Place, version: str) -> str:
        """Return why a pin cannot become ``version``, although an index may offer it."""
        leader = self._leader(self.uses[place][0], place[0])
        offers = {str(offer) for offer in self._offered(place)}
        if version not in offers:
            return f"no index offers {place[0]} {version}"
        if leader:
            user = self.uses[place][0]
            named_version = self._named(user, user.pins, place[0]) or "none"
            return (
                f"{place[0]} {version} does not fit: it follows {leader}, whose wheel names "
                f"{named_version}"
            )
        if _build(Version(version)) != _build(Version(self._pin(place).version or "")):
            return f"{place[0]} {version} is another build than the pinned one"
        return f"{place[0]} {version} does not fit the pins that move with it"

    def _pin(self, place: Place) -> Pin:
        return self.uses[place][0].pins[place[0]]

    def _steps(self, place: Place, exact: str | None) -> Iterator[dict[Place, str]]:
        """Yield the moves to each newer version of a pin, the newest first.

        What must move with it is in them.
        """
        leader = self._leader(self.uses[place][0], place[0])
        if leader:
            yield from self._steps_after(leader, place, exact)
            return
        for version in self._newer(place, exact):
            moves = {place: str(version)}
            train = self._train(place)
            for member in train:
                fitting = self._same_train(self._pin(place), version, member)
                if fitting:
                    moves[member] = str(fitting)
            if moves.keys() >= train:
                yield moves | self._followers(place, str(version))

    def _steps_after(
        self, leader: str, place: Place, exact: str | None
    ) -> Iterator[dict[Place, str]]:
        """Yield the moves of a pin that follows its leader: with the leader's, then alone."""
        user = self.uses[place][0]
        pinned = self._pin(place).version
        above = (leader, user.pins[leader].place)
        alone = {place: self._named(user, user.pins, place[0]) or pinned or ""}
        steps: Iterator[dict[Place, str]] = iter(())
        if above in self.uses:
            steps = self._steps(above, None)
        for moves in chain(steps, [alone]):
            version = moves.get(place, pinned)
            if version != pinned and exact in (None, version):
                yield moves

    def _newer(self, place: Place, exact: str | None = None) -> Iterator[Version]:
        """Yield the newer versions of the same build, the newest first, or only ``exact``."""
        pin = self._pin(place)
        old = Version(pin.version or "")
        order = partial(_order, pin)
        for version in sorted(self._offered(place), key=order, reverse=True):
            if exact:
                wanted = str(version) == exact
            else:
                stable = version.is_prerelease <= old.is_prerelease
                wanted = stable and order(version) > order(old)
            if wanted and _build(version) == _build(old):
                yield version

    def _train(self, place: Place) -> set[Place]:
        """Return the other pins that must move with this one.

        They are those of the same ROCm, or held ones of the same version.
        """
        pin = self._pin(place)
        user = self.uses[place][0]
        components = user.versions.components
        if not components[place[0]].held:
            return set()
        rocm = _rocm_of(pin)
        members = set()
        for name, other in user.pins.items():
            if name == place[0] or not components[name].held or not _package(other):
                continue
            same = _rocm_of(other) == rocm if rocm else other.version == pin.version
            if same:
                members.add((name, other.place))
        return members

    def _same_train(self, pin: Pin, version: Version, member: Place) -> Version | None:
        """Return the newest version of ``member`` that belongs to ``version`` of ``pin``."""
        other = self._pin(member)
        rocm = _rocm(pin, version)
        fitting = []
        for candidate in self._offered(member):
            same = _rocm(other, candidate) == rocm if rocm else candidate == version
            if same:
                fitting.append(candidate)
        return max(fitting, key=partial(_order, other), default=None)

    def _leader(self, user: ResolvedTarget, name: str) -> str | None:
        """Return the component whose wheel names the version of ``name``.

        What is of a ROCm moves with that instead.
        """
        pin = user.pins[name]
        leader = user.versions.components[name].follows
        if leader in user.pins and pin.wheel and not _rocm_of(pin):
            return leader
        return None

    def _followers(self, place: Place, version: str) -> dict[Place, str]:
        """Return the moves of pins that follow this one."""
        moves: dict[Place, str] = {}
        for user in self.uses[place]:
            pins = {**user.pins, place[0]: replace(user.pins[place[0]], version=version)}
            for name, pin in user.pins.items():
                if self._leader(user, name) == place[0]:
                    new = self._named(user, pins, name)
                    if new and new != pin.version:
                        moves[name, pin.place] = new
        return moves

    def _named(self, user: ResolvedTarget, pins: Mapping[str, Pin], name: str) -> str | None:
        """Return the version of ``name`` that its leader's wheel of pip's index names.

        Other builds may name none.
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

    def _fit(self, moves: Moves, before: Moves) -> dict[Place, str] | None:
        """Return ``before`` and ``moves`` with what other held pins become.

        None if they contradict each other, or if a target that uses ``moves`` cannot be resolved.
        """
        result = {**moves, **before}
        contradicts = any(result[place] != version for place, version in moves.items())
        if contradicts or not _allowed(self._versions, result):
            return None
        users = {user.name: user for place in moves for user in self.uses[place]}
        resolved = set()
        for user in users.values():
            pins = _moved_pins(user, result)
            if self._follows_another(user, pins, moves):
                return None
            request = request_of(user.versions, user.name, user.choice, pins, user.extras)
            loose = self._loose(user, pins, moves, result)
            # Targets of one channel often differ in nothing that an index knows.
            key = repr((sorted(request.wheels.items()), sorted(request.provided.items())))
            if key in resolved:
                continue
            resolved.add(key)
            versions = fits_together(request, loose, self._local_builds(loose))
            if versions is None:
                return None
            for wheel, place in loose.items():
                if versions[wheel] != request.wheels[wheel]:
                    result[place] = versions[wheel]
        return result

    @property
    def _versions(self) -> Versions:
        users = next(iter(self.uses.values()))
        return users[0].versions

    def _follows_another(self, user: ResolvedTarget, pins: Mapping[str, Pin], moves: Moves) -> bool:
        """Whether a moved pin, or one with a moved leader, is not what the leader's wheel names."""
        for name, pin in pins.items():
            leader = self._leader(user, name)
            if leader is None:
                continue
            moved = (name, pin.place) in moves or (leader, pins[leader].place) in moves
            if moved and self._named(user, pins, name) not in (None, pin.version):
                return True
        return False

    def _loose(
        self, user: ResolvedTarget, pins: Mapping[str, Pin], moves: Moves, result: Moves
    ) -> dict[str, Place]:
        """Return the wheels that may become newer, with their pins.

        They are other held ones, if a held one moves. A follower needs a leader that may, too.
        """
        components = user.versions.components
        if not any(components[name].held for name, _ in moves):
            return {}
        free = {}
        for name, pin in pins.items():
            held = components[name].held and (name, pin.place) not in result
            if held and pin.wheel and "+" not in (pin.version or ""):
                free[name] = pin
        loose = {}
        for name, pin in free.items():
            if (self._leader(user, name) or name) in free:
                loose[normalised(pin.wheel or "")] = (name, pin.place)
        return loose

    def _local_builds(self, loose: Mapping[str, Place]) -> list[str]:
        """Return constraints that exclude local builds."""
        constraints = []
        for wheel, place in loose.items():
            for version in self._offered(place):
                if version.local:
                    constraints.append(f"{wheel}!={version}")
        return constraints

    def _offered(self, place: Place) -> set[Version]:
        user = self.uses[place][0]
        pin = self._pin(place)
        kind = "wheel" if pin.wheel else "sdist"
        key = (normalised(_package(pin)), kind, pin.channel)
        if key not in self._offers:
            request = user.request
            if pin.channel != user.choice.channel:
                # Only pip's own configuration serves it: a channel's indexes have its own pins.
                request = replace(request, indexes={})
            self._offers[key] = offered(key[0], request, kind)
        return self._offers[key]


def _moved_pins(user: ResolvedTarget, moves: Moves) -> dict[str, Pin]:
    pins = {}
    for name, pin in user.pins.items():
        pins[name] = replace(pin, version=moves.get((name, pin.place), pin.version))
    return pins


def edit(text: str, document: Document, components: Mapping[str, Component], moves: Moves) -> str:
    """Return the text of versions.yaml with the pins moved. Comments and all else stay.

    With a ROCm, what is inside its packages and has its number moves, and so do the tools of
    builds. A build that names a moved pin's package with its version gets the new one.
    """
    lines = text.split("\n")
    moves = dict(moves)
    rocms: dict[str, str] = {}
    for (name, number), version in list(moves.items()):
        pin = components[name].pins[number]
        old = rocm_version(normalised(_package(pin)), pin.version or "")
        new = rocm_version(normalised(_package(pin)), version)
        if old and new:
            rocms[str(old)] = str(new)
            for place in _inside(components, pin.channel, str(old)):
                moves[place] = str(new)
    for (name, number), version in moves.items():
        line, column = document.places["components", name, "pins", number, "version"]
        pinned = components[name].pins[number].version or ""
        before = lines[line - 1][: column - 1]
        after = lines[line - 1][column - 1 :]
        lines[line - 1] = before + after.replace(pinned, version, 1)
    text = "\n".join(lines)
    for package, old_version, new_version in _in_builds(components, moves):
        exact = rf"(?<![\w.-]){re.escape(f'{package}=={old_version}')}(?![\w.+-])"
        text = re.sub(exact, f"{package}=={new_version}", text)
    for old_rocm, new_rocm in rocms.items():
        tool = rf"\b(rocm[a-z-]*)=={re.escape(old_rocm)}\b"
        text = re.sub(tool, rf"\1=={new_rocm}", text)
    return text


def _in_builds(components: Mapping[str, Component], moves: Moves) -> Iterator[tuple[str, str, str]]:
    """Yield package, old and new version of what builds name exactly.

    A version that another pin of the package keeps is not moved.
    """
    kept = set()
    for name, component in components.items():
        for number, pin in enumerate(component.pins):
            if (name, number) not in moves:
                kept.add((_package(pin), pin.version))
    for (name, number), version in moves.items():
        pin = components[name].pins[number]
        if _package(pin) and (_package(pin), pin.version) not in kept:
            yield _package(pin), pin.version or "", version


def _inside(components: Mapping[str, Component], channel: str, version: str) -> Iterator[Place]:
    """Yield the pins of what is inside packages of this ROCm."""
    for name, component in components.items():
        for number, pin in enumerate(component.pins):
            if pin.inside and pin.channel == channel and pin.version == version:
                yield name, number


@contextmanager
def trial(root: Path, text: str) -> Iterator[Project]:
    """Yield the project with another text of versions.yaml, in a folder of its own.

    Write nothing to it.
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
    return rocm.release if rocm else ()


def _rocm_of(pin: Pin) -> tuple[int, ...]:
    return _rocm(pin, Version(pin.version or ""))


def _order(pin: Pin, version: Version) -> tuple[tuple[int, ...], Version, Version]:
    # PEP 440 sorts +rocm10.1 before +rocm7.15.
    return _rocm(pin, version), Version(version.public), version


def _build(version: Version) -> str:
    """Return the local build of a version. A ROCm moves to another one."""
    local = version.local or ""
    return "rocm" if "rocm" in local else local


def _allowed(versions: Versions, moves: Moves) -> bool:
    """Return whether versions.yaml accepts the moves: its components' ``needs``."""
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
