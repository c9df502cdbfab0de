"""What a target needs of versions.yaml: its pins and extras, and the request of its lock."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from primus_images.errors import InputError, did_you_mean
from primus_images.plan.channel import Choice
from primus_images.plan.target import Target
from primus_images.versions.components import Base, Build, Pin, Versions
from primus_images.versions.lock import BaseRequest, Commit, Request, normalised


def _pins(
    versions: Versions, component: str, target: str, sources: Sequence[str], *, inside: bool = False
) -> list[Pin]:
    """Return the component's pins for ``target``, best channel first; those that name it precede.

    ``inside`` selects the pins of what is part of other components.
    """
    pins = []
    for pin in versions.components[component].pins:
        of_target = not pin.targets or target in pin.targets
        if of_target and pin.channel in sources and bool(pin.inside) == inside:
            pins.append(pin)
    return sorted(pins, key=lambda pin: (sources.index(pin.channel), not pin.targets))


def pins_of(
    versions: Versions,
    target: str,
    sources: Sequence[str],
    arch: str | None,
    places: Mapping[str, str],
) -> dict[str, Pin]:
    """Return component → the pin that ``target`` uses, for the components of ``places``.

    ``places`` gives the place of each component's line in the target file, for errors. ``sources``
    are the channels that may be used, best first. ``arch`` replaces ``{arch}``.
    """
    chosen: dict[str, Pin] = {}
    for component, place in places.items():
        if component not in versions.components:
            hint = did_you_mean(component, versions.components) or "pin it in versions.yaml"
            raise InputError(f"no component is called {component!r}", where=place, hint=hint)
        pins = _pins(versions, component, target, sources)
        if not pins:
            raise InputError(
                f"{component} has no pin for {target} from {', '.join(sources)}",
                where=place,
                hint=f"add one to components.{component}.pins in versions.yaml",
            )
        index = versions.components[component].pins.index(pins[0])
        try:
            chosen[component] = pins[0].resolved(index, arch)
        except ValueError as error:
            raise InputError(f"{component}: {error}", where=place) from None
    return chosen


def inside_of(
    versions: Versions,
    target: str,
    sources: Sequence[str],
    pins: Mapping[str, Pin],
    packages: Collection[str],
) -> dict[str, Pin]:
    """Return component → pin of what the files of ``pins``, or of ``packages``, contain."""
    contained: dict[str, Pin] = {}
    for component, about in versions.components.items():
        if component in pins:
            continue
        for pin in _pins(versions, component, target, sources, inside=True):
            # Parts of the base belong to the base's own channel.
            owners = packages if pin.channel == "debian" else pins
            if pin.inside in owners:
                contained[component] = replace(pin, place=about.pins.index(pin))
                break
    return contained


def extras_of(
    versions: Versions, target: Target, choice: Choice, place: Callable[..., str]
) -> tuple[str, ...]:
    """Return the target's extras. ``place`` gives the place of a key in the target file.

    Raises InputError for a channel that the target does not have, and for an extra that its base
    does not have.
    """
    for channel in target.extras:
        if channel not in target.channels:
            raise InputError(
                f"extras: there is no channel {channel!r} here",
                where=place("extras", channel),
                hint=f"its channels: {', '.join(target.channels)}",
            )
    base = versions.bases.get(choice.base or "")
    extras = target.extras.get(choice.channel, ())
    for index, extra in enumerate(extras):
        if base is None or extra not in base.extras:
            hint = f"define it under bases.{choice.base}.extras in versions.yaml"
            near = did_you_mean(extra, base.extras if base else ())
            raise InputError(
                f"base {choice.base} has no extra {extra!r}",
                where=place("extras", choice.channel, index),
                hint=near or hint,
            )
    return extras


def request_of(
    versions: Versions,
    target: str,
    choice: Choice,
    pins: Mapping[str, Pin],
    extras: Sequence[str] = (),
) -> Request:
    """Return what the target requests of the sources. Raises InputError for an unknown base."""
    base = _base_of(versions, target, choice)
    builds = _builds_of(pins)
    python = ""
    bases: dict[str, BaseRequest] = {}
    if choice.base and base:
        python = base.python_minor
        bases = _base_requests(choice.base, base, builds, extras)
    indexes = _indexes_of(versions, choice.channel)
    indexed: frozenset[str] = frozenset()
    if indexes:
        indexed = _indexed(pins, choice.channel)
    return Request(
        target=target,
        channel=choice.channel,
        python=python,
        bases=bases,
        wheels=_wheels(pins),
        sdists=_versions(pins, "sdist"),
        pure=_pure(pins),
        debs=_debs(pins),
        builds={root: build.wheels for root, build in builds.items() if build.wheels},
        gits=_commits(pins),
        indexes=indexes,
        indexed=indexed,
    )


def _base_of(versions: Versions, target: str, choice: Choice) -> Base | None:
    """Return the base that the channel names, None without one. Raises InputError."""
    if not choice.base:
        return None
    if choice.base not in versions.bases:
        raise InputError(
            f"{target}: no base is called {choice.base!r}",
            hint="bases are defined in versions.yaml",
        )
    return versions.bases[choice.base]


def _builds_of(pins: Mapping[str, Pin]) -> dict[str, Build]:
    """Return the root file system of each build → the build."""
    builds = {}
    for pin in pins.values():
        if pin.source and pin.build:
            builds[build_root(pin.source)] = pin.build
    return builds


def _indexes_of(versions: Versions, channel: str) -> dict[str, str]:
    """Return the name → the address of the channel's own indexes."""
    indexes = {}
    for name, index in versions.indexes.items():
        if index.channel == channel:
            indexes[name] = index.url
    return indexes


def _base_requests(
    name: str, base: Base, builds: Mapping[str, Build], extras: Sequence[str]
) -> dict[str, BaseRequest]:
    """Return the request for the base, then those for what lies over it: builds and extras."""

    def with_more(packages: Sequence[str], over: str | None = None) -> BaseRequest:
        return BaseRequest(
            suite=base.suite,
            python=base.python,
            packages=tuple(dict.fromkeys((*base.packages, *packages))),
            image=base.image,
            over=over,
        )

    requests = {name: with_more(())}
    for root, build in builds.items():
        if build.debs:
            requests[root] = with_more(build.debs)
    for extra in extras:
        requests[extra_root(name, extra)] = with_more(base.extras[extra], over=name)
    return requests


def _versions(pins: Mapping[str, Pin], key: str) -> dict[str, str]:
    """Return package → version of the pins that have ``key``."""
    versions = {}
    for pin in pins.values():
        package = getattr(pin, key)
        if package:
            versions[normalised(package)] = pin.version or ""
    return versions


def _wheels(pins: Mapping[str, Pin]) -> dict[str, str]:
    wheels = _versions(pins, "wheel")
    for pin in pins.values():
        for package in pin.requires:
            wheels.setdefault(normalised(package), "")
    return wheels


def _pure(pins: Mapping[str, Pin]) -> tuple[str, ...]:
    """Return the wheels that are taken without an architecture of their own."""
    return tuple(normalised(pin.wheel) for pin in pins.values() if pin.wheel and pin.pure)


def _debs(pins: Mapping[str, Pin]) -> dict[str, str]:
    """Return Debian package → version. Its name stays as it is: ``libstdc++6`` is one."""
    return {pin.deb: pin.version or "" for pin in pins.values() if pin.deb}


def _indexed(pins: Mapping[str, Pin], channel: str) -> frozenset[str]:
    own = {name: pin for name, pin in pins.items() if pin.channel == channel}
    return frozenset([*_versions(own, "wheel"), *_versions(own, "sdist")])


def _commits(pins: Mapping[str, Pin]) -> dict[str, Commit]:
    commits = {}
    for pin in pins.values():
        if pin.git and pin.package and pin.commit and pin.version:
            commit = Commit(url=pin.git, commit=pin.commit, version=pin.version)
            commits[normalised(pin.package)] = commit
    return commits


def extra_root(base: str, extra: str) -> str:
    """Return the name in the lock of the packages of ``extra`` on top of ``base``."""
    return f"{base} {extra}"


def build_root(package: str) -> str:
    """Return the name in the lock of the root file system that builds ``package``."""
    return f"{normalised(package)} build"
