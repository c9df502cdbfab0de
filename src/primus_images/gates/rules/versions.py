"""The versions that files of the image state are those of the lock and of versions.yaml.

A difference means that the image has other bytes than were pinned.
"""

import re
from collections.abc import Iterable, Mapping

from packaging.version import InvalidVersion, Version

from primus_images import __version__
from primus_images.gates.contents import Kind, Stated
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.plan.resolve import ResolvedTarget
from primus_images.versions.lock import upstream

_PLURALS = {"wheel": "wheels", "deb": "debs", "header": "headers", "library": "libraries"}
_OF_COMPONENTS = ("header", "library")


def judge(examined: Examined) -> GateReport:
    """Compare what the files of the image state with the lock and the pins."""
    plan = examined.image.plan
    resolved = plan.resolved
    # The packages of a registry's image are locked as layers, not individually.
    imported = {action.name for action in plan.layers if action.kind == "image"}
    layers = []
    for layer, facts in examined.facts.items():
        stated = facts.stated
        if layer in imported:
            stated = [item for item in stated if item.kind != "deb"]
        layers.append((layer, stated))
    wheels = {}
    if resolved.lock:
        wheels = {file.name: file.version for file in resolved.lock.python_packages}
    if "primus" in resolved.pins:
        wheels["primus-images"] = __version__
    debs = {file.name: file.version for file in resolved.debs}
    return versions_inside(layers, wheels=wheels, debs=debs, components=_pinned(resolved))


def _pinned(resolved: ResolvedTarget) -> dict[str, str]:
    """Return component → version that a header or a library must state.

    A component that is part of another one may be pinned by the version of its holder, if its
    makers publish no other. Then nothing is compared.
    """
    holders = {file.name: upstream(file.version) for file in resolved.debs}
    versions = {}
    for component, pin in resolved.pins.items():
        if pin.version:
            versions[component] = holders[component] = pin.version
    for component, pin in resolved.inside.items():
        if pin.version and pin.version != holders.get(pin.inside or ""):
            versions[component] = pin.version
    return versions


def versions_inside(
    layers: Iterable[tuple[str, Iterable[Stated]]],
    *,
    wheels: Mapping[str, str],
    debs: Mapping[str, str],
    components: Mapping[str, str] | None = None,
) -> GateReport:
    """Return one error per difference, with both versions.

    ``wheels`` and ``debs`` are the lock's, name → version. ``components`` are pins (``rccl`` →
    version), which are compared with headers and libraries. A component without its own pin is
    noted, so that its version is on record.
    """
    pins = components or {}
    expected: dict[Kind, Mapping[str, str]] = {
        "wheel": wheels,
        "deb": debs,
        "header": pins,
        "library": pins,
    }
    seen: dict[Kind, dict[str, str]] = {kind: {} for kind in expected}
    findings = []
    for layer, stated in layers:
        for item in stated:
            if item.kind == "vendored":  # its owner was locked
                continue
            known = seen[item.kind]
            finding = _difference(
                layer, item, expected[item.kind].get(item.name), known.get(item.name)
            )
            if finding:
                findings.append(finding)
            known[item.name] = item.version
    for kind in ("wheel", "deb"):
        for name in sorted(expected[kind].keys() - seen[kind].keys()):
            version = expected[kind][name]
            message = f"{name} {version} is in the lock, the image has no such {kind}"
            findings.append(Finding("error", message))
    counts = []
    for kind, names in seen.items():
        if len(names) == 1:
            counts.append(f"1 {kind}")
        elif names:
            counts.append(f"{len(names)} {_PLURALS[kind]}")
    return GateReport(summary=", ".join(counts) or "no versions stated", findings=findings)


def _difference(
    layer: str, item: Stated, pinned: str | None, earlier: str | None
) -> Finding | None:
    """Return what is wrong with a stated version, of which another file stated ``earlier``."""
    name = f"{item.name} {item.version}"
    of_component = item.kind in _OF_COMPONENTS
    if pinned is None and of_component:
        message = f"{name} by its {item.kind}; no pin says which it must be"
        return Finding("note", message, layer, item.path)
    if pinned is None:
        message = f"{name} is in the image, the lock has no such {item.kind}"
    elif not _same(item.kind, item.version, pinned):
        where = "versions.yaml" if of_component else "the lock"
        message = f"{item.name} is {item.version} in the image, {pinned} in {where}"
    elif item.kind == "wheel" and earlier is not None:
        message = f"{item.name} is in the image twice, as {earlier} and {item.version}"
    else:
        return None
    return Finding("error", message, layer, item.path)


def _same(kind: Kind, stated: str, pinned: str) -> bool:
    if kind in _OF_COMPONENTS:
        # A pin may contain more than three numbers, such as a commit or a build.
        numbers = stated.split(".")
        return re.split(r"[.+~-]", pinned)[: len(numbers)] == numbers
    if kind == "wheel":
        # PEP 440 treats `1.0-1`, `1.0.post1` and `1.0.POST1` as the same version.
        try:
            return Version(stated) == Version(pinned)
        except InvalidVersion:
            return stated == pinned
    return stated == pinned
