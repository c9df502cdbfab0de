"""Each library name has one owner.

The library that a process loads first serves all callers of its name, and the other owner's callers
crash. An upstream image crashed because two components shipped a ``libmha_bwd.so`` of their own.
"""

from primus_images.gates.contents import owner_of
from primus_images.gates.examined import Examined, Finding, GateReport


def judge(examined: Examined) -> GateReport:
    """Return one warning per library name that two owners ship, with all its paths."""
    # Name of a library → owner → layer and path of the first file.
    places: dict[str, dict[str, tuple[str, str]]] = {}
    count = 0
    for layer, facts in examined.facts.items():
        for library in facts.libraries:
            if library.names:
                count += 1
            owner = owner_of(layer, library.path)
            for name in library.names:
                owners = places.setdefault(name, {})
                owners.setdefault(owner, (layer, library.path))
    names_at: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, owners in sorted(places.items()):
        if len(owners) > 1:
            paths = tuple(owners.values())
            names_at.setdefault(paths, []).append(name)
    findings = []
    for (first, *others), names in names_at.items():
        layer, path = first
        beside = ", ".join(f"{other_layer} as /{other}" for other_layer, other in others)
        shared = " and ".join(names)
        message = (
            f"{shared} is also in {beside}: a process that loads both gets one of them for both"
        )
        findings.append(Finding("warning", message, layer, path))
    return GateReport(summary=f"{count} shared libraries", findings=findings)
