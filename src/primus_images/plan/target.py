"""images/<target>.yaml: the contents of one image (fields.yaml describes them), and its
requirements for the pins.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from primus_images.errors import InputError, did_you_mean
from primus_images.schema import WrongValue
from primus_images.versions.components import Pin, Versions
from primus_images.versions.lock import BaseRequest, Commit, Request, normalised


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable of the image."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """One image."""

    description: str
    channels: tuple[Literal["amd", "debian", "pypi", "local"], ...]
    components: tuple[str, ...]
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: str | None = None
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpu: str | None = None
    bases: Mapping[str, str] = field(default_factory=dict)
    previews: Mapping[str, str] = field(default_factory=dict)
    environment: tuple[Variable, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    trained_in: tuple[Literal["fp32", "bf16", "fp8", "mxfp8"], ...] = ()
    workdir: str = "/"
    budget_gb: float | None = None
    budgets_gb: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.channels:
            raise WrongValue("channels must name at least one channel", "channels")
        lists: dict[tuple[str, ...], tuple[str, ...]] = {
            ("channels",): self.channels,
            ("components",): self.components,
            ("recipes",): self.recipes,
            ("environment",): tuple(variable.name for variable in self.environment),
            **{("extras", channel): extras for channel, extras in self.extras.items()},
        }
        for key, listed in lists.items():
            for index, name in enumerate(listed):
                if name in listed[:index]:
                    raise WrongValue(f"{name} is listed twice in {key[0]}", *key, index)
        if ".." in self.workdir.split("/"):
            raise WrongValue(f"workdir must not contain '..', as in {self.workdir!r}", "workdir")
        budgets = [(("budgets_gb", channel), budget) for channel, budget in self.budgets_gb.items()]
        for key, budget in [(("budget_gb",), self.budget_gb), *budgets]:
            if budget is not None and budget <= 0:
                raise WrongValue(f"the budget must be more than 0 GB, not {budget:g}", *key)


def _pins(
    versions: Versions, component: str, name: str, sources: Sequence[str], *, inside: bool = False
) -> list[Pin]:
    """Return the pins of a component for target ``name`` from ``sources`` (channels), best first. A
    pin that names the target takes precedence over a pin for all targets. ``inside``: those of
    parts of other components.
    """
    fits = [
        pin
        for pin in versions.components[component].pins
        if bool(pin.inside) == inside
        and pin.channel in sources
        and (not pin.targets or name in pin.targets)
    ]
    return sorted(fits, key=lambda pin: (sources.index(pin.channel), not pin.targets))


def pins_of(
    versions: Versions,
    name: str,
    sources: Sequence[str],
    arch: str | None,
    where: Mapping[str, str],
) -> dict[str, Pin]:
    """Return component → the pin that target ``name`` uses, for the components of ``where``, in
    their order.

    ``where`` gives the place of each component's line in the target file, for errors. ``sources``
    are the channels that may be used, best first. ``arch`` replaces ``{arch}``.
    """
    result: dict[str, Pin] = {}
    for component, place in where.items():
        if component not in versions.components:
            hint = did_you_mean(component, versions.components) or "pin it in versions.yaml"
            raise InputError(f"no component is called {component!r}", where=place, hint=hint)
        pins = _pins(versions, component, name, sources)
        if not pins:
            sources_text = ", ".join(sources)
            raise InputError(
                f"{component} has no pin for {name} from {sources_text}",
                where=place,
                hint=f"add one to components.{component}.pins in versions.yaml",
            )
        try:
            result[component] = pins[0].resolved(
                versions.components[component].pins.index(pins[0]), arch
            )
        except ValueError as error:
            raise InputError(f"{component}: {error}", where=place) from None
    return result


def inside_of(
    versions: Versions,
    name: str,
    sources: Sequence[str],
    pins: Mapping[str, Pin],
    packages: Collection[str],
) -> dict[str, Pin]:
    """Return component → pin of what is part of the files of the target's components (``pins``) or
    of its base's ``packages``.
    """
    result: dict[str, Pin] = {}
    for component in versions.components.keys() - pins.keys():
        for pin in _pins(versions, component, name, sources, inside=True):
            # Parts of the base belong to the base's own channel.
            if component not in result and pin.inside in (
                packages if pin.channel == "debian" else pins
            ):
                result[component] = replace(
                    pin, place=versions.components[component].pins.index(pin)
                )
    return {
        component: result[component] for component in versions.components if component in result
    }


def extras_of(
    versions: Versions, target: Target, channel: str, base: str | None, where: Callable[..., str]
) -> tuple[str, ...]:
    """Return the target's extras on ``channel``. ``where`` gives the place of a key in the target
    file.

    Raises InputError for an unknown channel, and for an extra that ``base`` does not have.
    """
    unknown = next((name for name in target.extras if name not in target.channels), None)
    if unknown:
        channels = ", ".join(target.channels)
        raise InputError(
            f"extras: there is no channel {unknown!r} here",
            where=where("extras", unknown),
            hint=f"its channels: {channels}",
        )
    if base and base in versions.bases:
        defined = versions.bases[base].extras
    else:
        defined = {}
    chosen = target.extras.get(channel, ())
    for index, extra in enumerate(chosen):
        if extra not in defined:
            hint = (
                did_you_mean(extra, defined)
                or f"define it under bases.{base}.extras in versions.yaml"
            )
            place = where("extras", channel, index)
            raise InputError(f"base {base} has no extra {extra!r}", where=place, hint=hint)
    return chosen


def request_of(
    versions: Versions,
    name: str,
    channel: str,
    base: str | None,
    pins: Mapping[str, Pin],
    extras: Sequence[str] = (),
) -> Request:
    """Return what the target requests of the sources: the input of its lock. Raises InputError for
    an unknown base.
    """
    if base and base not in versions.bases:
        raise InputError(
            f"{name}: no base is called {base!r}", hint="bases are defined in versions.yaml"
        )
    root = None
    if base:
        root = versions.bases[base]
    builds = {build_root(p.source): p.build for p in pins.values() if p.source and p.build}
    indexes = {n: index.url for n, index in versions.indexes.items() if index.channel == channel}
    bases: dict[str, BaseRequest] = {}
    if root and base:
        whole = BaseRequest(
            suite=root.suite, python=root.python, packages=root.packages, image=root.image
        )
        more = {base: (), **{name: build.debs for name, build in builds.items() if build.debs}}
        more |= {extra_root(base, extra): root.extras[extra] for extra in extras}
        bases = {
            n: whole._replace(packages=tuple(dict.fromkeys((*root.packages, *more[n]))))
            for n in more
        }
        bases |= {
            name: bases[name]._replace(over=base)
            for name in (extra_root(base, extra) for extra in extras)
        }
    wheels = {normalised(p.wheel): p.version or "" for p in pins.values() if p.wheel}
    requires = [normalised(name) for p in pins.values() for name in p.requires]
    return Request(
        target=name,
        channel=channel,
        python=".".join(root.python.split(".")[:2]) if root else "",
        bases=bases,
        wheels=wheels | {name: "" for name in requires if name not in wheels},
        sdists={normalised(p.sdist): p.version or "" for p in pins.values() if p.sdist},
        pure=tuple(normalised(p.wheel) for p in pins.values() if p.wheel and p.pure),
        debs={p.deb: p.version or "" for p in pins.values() if p.deb},
        builds={root: build.wheels for root, build in builds.items() if build.wheels},
        gits={
            normalised(p.package): Commit(url=p.git, commit=p.commit, version=p.version)
            for p in pins.values()
            if p.git and p.package and p.commit and p.version
        },
        indexes=indexes,
        indexed=frozenset(
            normalised(package)
            for p in pins.values()
            if indexes and p.channel == channel and (package := p.wheel or p.sdist)
        ),
    )


def extra_root(base: str, extra: str) -> str:
    """Return the name in the lock of the packages of ``extra`` on top of ``base``."""
    return f"{base} {extra}"


def build_root(package: str) -> str:
    """Return the name in the lock of the root file system that builds ``package``."""
    return f"{normalised(package)} build"
