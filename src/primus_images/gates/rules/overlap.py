"""Each library name has one owner.

The library that a process loads first serves all callers of its name, and the other owner's callers
crash. An upstream image crashed because two components shipped a ``libmha_bwd.so`` of their own.
"""

from primus_images.gates.contents import owner_of
from primus_images.gates.examined import Examined, Finding, GateReport


def judge(examined: Examined) -> GateReport:
    """Return one warning per library name that two owners ship, with all its paths."""
    places: dict[str, dict[str, tuple[str, str]]] = {}
    count = 0
    for layer, facts in examined.facts.items():
        for library in facts.libraries:
            count += bool(library.names)
            for name in library.names:
                places.setdefault(name, {}).setdefault(
                    owner_of(layer, library.path), (layer, library.path)
                )
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name in sorted(places):
        if len(places[name]) > 1:
            groups.setdefault(tuple(places[name].values()), []).append(name)
    findings = []
    for ((layer, path), *others), names in groups.items():
        beside = ", ".join(f"{other} as /{where}" for other, where in others)
        message = (
            f"{' and '.join(names)} is also in {beside}: a process that loads both gets "
            "one of them for both"
        )
        findings.append(Finding(severity="warning", layer=layer, path=path, message=message))
    return GateReport(summary=f"{count} shared libraries", findings=tuple(findings))
