"""A plan as people and scripts read it: which layers are reused, which are built, and how many bytes that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from primus.images.action import Action, ImagePlan
from primus.images.store import Store

__all__ = ["bytes_text", "outline", "outline_text"]


def outline(store: Store, plan: ImagePlan) -> list[dict[str, Any]]:
    """One row per layer: name, kind, key, ``build`` or ``reuse``, and the bytes known of it.

    ``bytes`` is the compressed layer when it is in the store, else the size of the files it is made from.
    """
    rows = []
    for action in plan.layers:
        layer = store.layer(action.key)
        rows.append(
            {
                "name": action.name,
                "kind": action.kind,
                "key": action.key,
                "do": "reuse" if layer else "build",
                "bytes": layer.blob.size if layer else _source_bytes(action),
                "digest": layer.blob.digest if layer else None,
                "inputs": len(action.files) or len(action.tree),
            }
        )
    return rows


def _source_bytes(action: Action) -> int:
    tree = (Path(action.root) / name for name, kind, _ in action.tree if kind != "link")
    return sum(f.size for f in action.files) + sum(path.stat().st_size for path in tree)


def outline_text(plan: ImagePlan, rows: list[dict[str, Any]]) -> str:
    """The rows as text, with a last line that counts them."""
    width = max((len(r["name"]) for r in rows), default=0)
    lines = [f"{plan.ref}"]
    for row in rows:
        sign = "=" if row["do"] == "reuse" else "+"
        size = bytes_text(row["bytes"]) if row["bytes"] else ""
        note = row["digest"][7:19] if row["digest"] else f"from {row['inputs']} files" if row["inputs"] else ""
        lines.append(f"  {sign} {row['name']:<{width}}  {row['kind']:<6} {size:>9}  {note}".rstrip())
    build = [r for r in rows if r["do"] == "build"]
    reuse = [r for r in rows if r["do"] == "reuse"]
    if build:
        lines.append(
            f"  {len(build)} to build from {bytes_text(sum(r['bytes'] for r in build))}, "
            f"{len(reuse)} to reuse ({bytes_text(sum(r['bytes'] for r in reuse))})"
        )
    else:
        lines.append(f"  nothing to build, {len(reuse)} to reuse ({bytes_text(sum(r['bytes'] for r in reuse))})")
    return "\n".join(lines)


def bytes_text(amount: int) -> str:
    """Bytes in decimal units, as registries count them."""
    value, unit = float(amount), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
