"""The versions that files of the image state are those of the lock and of versions.yaml.

A difference means that the image has other bytes than were pinned.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from packaging.version import InvalidVersion, Version

from primus_images import __version__
from primus_images.gates.contents import Kind, Stated
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.plan.resolve import ResolvedTarget
from primus_images.versions.lock import upstream

_PLURALS = {"wheel": "wheels", "deb": "debs", "header": "headers", "library": "libraries"}


def judge(examined: Examined) -> GateReport:
    """Compare what the files of the image state with the lock and the pins."""
    plan = examined.image.plan
    resolved = plan.resolved
    lock = plan.resolved.lock
    # The packages of a registry's image are locked as layers, not individually.
    imported = {action.name for action in plan.layers if action.kind == "image"}
    if lock:
        wheels = {f.name: f.version for f in lock.python_packages}
    else:
        wheels = {}
    if "primus" in resolved.pins:
        wheels["primus-images"] = __version__
    items = ((layer, facts.stated) for layer, facts in examined.facts.items())
    return versions_inside(
        [
            (layer, [i for i in stated if layer not in imported or i.kind != "deb"])
            for layer, stated in items
        ],
        wheels=wheels,
        debs={f.name: f.version for f in resolved.debs},
        components=_own_versions(resolved),
        inside={component: pin.inside or "" for component, pin in resolved.inside.items()},
    )


def _own_versions(resolved: ResolvedTarget) -> dict[str, str]:
    """Return component → version that a header or a library must state.

    A component that is part of another one may be pinned by the version of its holder, if its
    makers publish no other. Then nothing is compared.
    """
    debs = {f.name: upstream(f.version) for f in resolved.debs}
    holders = {**debs, **{component: pin.version for component, pin in resolved.pins.items()}}
    inside = {
        c: p.version for c, p in resolved.inside.items() if p.version != holders.get(p.inside or "")
    }
    return {
        c: version
        for c, version in (*((c, p.version) for c, p in resolved.pins.items()), *inside.items())
        if version
    }


def versions_inside(
    layers: Iterable[tuple[str, Iterable[Stated]]],
    *,
    wheels: Mapping[str, str],
    debs: Mapping[str, str],
    components: Mapping[str, str] | None = None,
    inside: Mapping[str, str] | None = None,
) -> GateReport:
    """Return one error per difference, with both versions.

    ``wheels`` and ``debs`` are the lock's, name → version. ``components`` are pins (``rccl`` →
    version), which are compared with headers and libraries. A component without its own pin is
    noted, so that its version is on record. ``inside`` maps components without their own files to
    their holder; if no header and no library states their version, this is noted, too.
    """
    pins = components or {}
    locked: dict[Kind, Mapping[str, str]] = {
        "wheel": wheels,
        "deb": debs,
        "header": pins,
        "library": pins,
    }
    seen: dict[Kind, dict[str, str]] = {"wheel": {}, "deb": {}, "header": {}, "library": {}}
    findings: list[Finding] = []

    def find(layer: str, item: Stated, message: str, *, note: bool = False) -> None:
        severity: Literal["note", "error"] = "note" if note else "error"
        findings.append(Finding(severity=severity, layer=layer, path=item.path, message=message))

    for layer, stated in layers:
        for item in stated:
            expected = locked[item.kind].get(item.name)
            before = seen[item.kind].get(item.name)
            seen[item.kind][item.name] = item.version
            if item.kind in ("header", "library") and expected is None:
                by = f"{item.name} {item.version} by its {item.kind}"
                find(layer, item, f"{by}; no pin says which it must be", note=True)
            elif expected is None:
                find(
                    layer,
                    item,
                    f"{item.name} {item.version} is in the image, the lock has no such {item.kind}",
                )
            elif not _same(item.kind, item.version, expected):
                where = "in the lock"
                if item.kind in ("header", "library"):
                    where = "in versions.yaml"
                find(layer, item, f"{item.name} is {item.version} in the image, {expected} {where}")
            elif item.kind == "wheel" and before is not None:
                find(
                    layer,
                    item,
                    f"{item.name} is in the image twice, as {before} and {item.version}",
                )
    for kind in ("wheel", "deb"):
        for name in sorted(set(locked[kind]) - set(seen[kind])):
            message = f"{name} {locked[kind][name]} is in the lock, the image has no such {kind}"
            findings.append(Finding(severity="error", message=message))
    for name in sorted(set(inside or {}) - set(seen["header"]) - set(seen["library"])):
        message = (
            f"{name} is pinned inside {(inside or {})[name]}, and no file of it states a version"
        )
        findings.append(Finding(severity="note", message=message))
    counted = ", ".join(
        f"{len(names)} {_PLURALS[kind] if len(names) != 1 else kind}"
        for kind, names in seen.items()
        if names
    )
    return GateReport(summary=counted or "no versions stated", findings=tuple(findings))


def _same(kind: Kind, stated: str, locked: str) -> bool:
    if kind in ("header", "library"):
        # A pin may contain more than three numbers, such as a commit or a build.
        numbers = stated.split(".")
        return re.split(r"[.+~-]", locked)[: len(numbers)] == numbers
    if kind == "wheel":
        # PEP 440 treats `1.0-1`, `1.0.post1` and `1.0.POST1` as the same version.
        try:
            return Version(stated) == Version(locked)
        except InvalidVersion:
            return stated == locked
    return stated == locked
