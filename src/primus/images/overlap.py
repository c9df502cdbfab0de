"""Sibling layers never own one path. Two that do are an error that names both owners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primus.errors import CheckFailed

__all__ = ["check_overlap", "overlaps"]


def overlaps(layers: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """One sentence per clash between layers (name, path → ``kind mode uid:gid``), lowest layer first.

    A folder may stand in several layers if kind, mode and owner agree. A file may stand in one only, and no layer
    may put a path below another layer's symbolic link: unpacking would replace the link (``/lib`` on a merged /usr).
    """
    owner: dict[str, tuple[str, str]] = {}
    links: dict[str, str] = {}
    found: list[str] = []
    for name, paths in layers:
        for path, meta in paths.items():
            if path not in owner:
                owner[path] = (name, meta)
                if meta.startswith("symlink "):
                    links[path] = name
                continue
            other, known = owner[path]
            if not (meta == known and meta.startswith("dir ")):
                found.append(f"/{path} is in both {other} ({known}) and {name} ({meta})")
    if links:
        for path, (name, _) in owner.items():
            parent = path.rpartition("/")[0]
            while parent:
                if parent in links:
                    found.append(f"/{path} of {name} lies below the symbolic link /{parent} of {links[parent]}")
                    break
                parent = parent.rpartition("/")[0]
    return found


def check_overlap(layers: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Raise CheckFailed with the first clashes, if there are any."""
    found = overlaps(layers)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise CheckFailed(
            "two layers own one path: " + "; ".join(found[:5]) + more,
            hint="let one component own it, or leave the file out of the other",
        )
