"""Sibling layers must not contain the same path. If two do, the error names both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primus.errors import CheckFailed


def overlaps(layers: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return one sentence per conflict between layers (name, path → ``kind mode uid:gid``), lowest layer first.

    Several layers may contain a folder if kind, mode and owner agree. Only one may contain a file. No layer may
    contain a path below another layer's symbolic link, because unpacking would replace the link (``/lib`` on a
    merged /usr).
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
    # There are few folders compared with files, so each folder's parents are visited once.
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
    """Return the nearest of ``links`` at the folder or above it; empty if there is none."""
    while folder and folder not in links:
        folder = folder.rpartition("/")[0]
    return folder


def check_overlap(layers: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Raise CheckFailed with the first conflicts, if there are any."""
    found = overlaps(layers)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise CheckFailed(
            "two layers own one path: " + "; ".join(found[:5]) + more,
            hint="let one component own it, or leave the file out of the other",
        )
