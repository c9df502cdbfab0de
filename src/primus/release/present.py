"""The current pins in the form of a published release, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from primus.release.history import Release

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget
    from primus.versions.components import Pin, Versions

IMAGE = "rocm/primus"
# This name always means the pins, even if the history has a release with the name of the pinned one.
FILE = "versions.yaml"
# The one target without a GPU.
_NO_GPU = "cpu"


def present_names(versions: Versions, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the names that :func:`present` accepts: those of the release, of each target and of the file."""
    return (versions.release, FILE, *(f"{versions.release}-{target}" for target in targets))


def present(
    versions: Versions, targets: Mapping[str, ResolvedTarget], name: str, gpu_arch: Mapping[str, str]
) -> Release:
    """Return the pins of versions.yaml as a release: all of them, or those of one target (``v26.11-cpu``)."""
    name = versions.release if name == FILE else name
    wanted = name.removeprefix(versions.release).removeprefix("-")
    shown = [targets[wanted]] if wanted else [*targets.values()]
    components: dict[str, str | None] = {}
    python = _python(shown)
    if python is not None:
        components["python"] = python
    if wanted:
        every = {**targets[wanted].pins, **targets[wanted].inside}
        components |= {_key(c): _version(pin) for c, pin in every.items()}
    else:
        components |= {_key(c): _versions(item.pins) for c, item in versions.components.items()}
    names = [one.name for one in shown]
    gpus = tuple(name for name in names if name != _NO_GPU)
    return Release(
        image=IMAGE,
        tag=name,
        date=versions.created,
        date_kind="created",
        gpus=gpus,
        gfx=tuple(dict.fromkeys(gpu_arch[g] for g in gpus if g in gpu_arch)),
        components=components,
        # The published tables call ROCm's wheels ``rocm_sdk``.
        locked={**_locked(shown), **({"rocm_sdk": core} if (core := components.get("rocm_sdk_core")) else {})},
        notes=(f"The current pins of versions.yaml for {', '.join(names) or 'no target'}.",),
        pinned=True,
    )


def _locked(targets: Iterable[ResolvedTarget]) -> dict[str, str]:
    """Return the versions of unpinned packages (dependencies) in the targets' locks."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in targets:
        for file in one.lock.of("wheel") if one.lock else ():
            found.setdefault(_key(file.name), {}).setdefault(file.version, []).append(one.name)
    return {name: _listed(versions) for name, versions in found.items()}


def _listed(versions: Mapping[str, list[str]]) -> str:
    if len(versions) == 1:
        return next(iter(versions))
    return ", ".join(f"{version} ({', '.join(names)})" for version, names in versions.items())


def _key(component: str) -> str:
    return component.replace("-", "_")


def _version(pin: Pin) -> str:
    return pin.version if pin.version is not None else f"{pin.path} of this repository"


def _versions(pins: Iterable[Pin]) -> str:
    """Return every pinned version, with the targets or the channel that use it if there are several versions."""
    pins = list(pins)
    several = len({pin.channel for pin in pins}) > 1
    takers: dict[str, list[str]] = {}
    for pin in pins:
        rest = f"channel {pin.channel}" if several else "every other target"
        takers.setdefault(_version(pin), []).extend(pin.targets or (rest,))
    if len(takers) == 1:
        return next(iter(takers))
    return ", ".join(f"{version} ({', '.join(dict.fromkeys(names))})" for version, names in takers.items())


def _python(targets: Iterable[ResolvedTarget]) -> str | None:
    found: dict[str, list[str]] = {}
    for one in targets:
        base = one.choice.base
        if base is not None:
            found.setdefault(one.versions.bases[base].python, []).append(one.name)
    if len(found) <= 1:
        return next(iter(found), None)
    return ", ".join(f"{version} ({', '.join(names)})" for version, names in found.items())
