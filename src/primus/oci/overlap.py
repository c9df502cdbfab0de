"""Sibling layers never own one path. Two that do are an error that names both owners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primus.errors import CheckFailed


def overlaps(layers: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """One sentence per clash between layers (name, path → ``kind mode uid:gid``), lowest layer first.

    A folder may stand in several layers if kind, mode and owner agree. A file may stand in one only, and no layer
    may put a path below another layer's symbolic link: unpacking would replace the link (``/lib`` on a merged /usr).
    """
    seen: list[tuple[str, Mapping[str, str]]] = []
    merged: dict[str, str] = {}
    links: set[str] = set()
    found: list[str] = []

    def owner(path: str) -> str:
        return next(name for name, paths in seen if path in paths)

    for name, paths in layers:
        first = {path: merged[path] for path in sorted(merged.keys() & paths.keys())}
        for path, known in first.items():
            meta = paths[path]
            if not (meta == known and meta.startswith("dir ")):
                found.append(f"/{path} is in both {owner(path)} ({known}) and {name} ({meta})")
        links.update(path for path, meta in paths.items() if meta.startswith("symlink ") and path not in first)
        merged.update(paths)
        merged.update(first)
        seen.append((name, paths))
    # Folders are few against files, so each is climbed from once.
    bad = {folder: link for folder in {path.rpartition("/")[0] for path in merged} if (link := _link_at(folder, links))}
    if bad:
        below = ((path, bad.get(path.rpartition("/")[0])) for path in merged)
        found += [
            f"/{path} of {owner(path)} lies below the symbolic link /{link} of {owner(link)}"
            for path, link in below
            if link
        ]
    return found


def _link_at(folder: str, links: set[str]) -> str:
    """The nearest of ``links`` at the folder or above it; empty when there is none."""
    while folder and folder not in links:
        folder = folder.rpartition("/")[0]
    return folder


def check_overlap(layers: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Raise CheckFailed with the first clashes, if there are any."""
    found = overlaps(layers)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise CheckFailed(
            "two layers own one path: " + "; ".join(found[:5]) + more,
            hint="let one component own it, or leave the file out of the other",
        )
