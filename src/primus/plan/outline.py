"""A plan as text and as JSON: which layers are reused, which are built, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.oci.store import Store
from primus.plan.action import Action, ImagePlan
from primus.terminal import PLAIN, Screen, Styled, bytes_text

if TYPE_CHECKING:
    from primus.plan.explain import Change

_REASONS = 2  # The number of reasons listed beside a layer; `primus explain` lists all.


def outline(store: Store, plan: ImagePlan) -> list[dict[str, Any]]:
    """Return one row per layer: name, kind, key, ``build`` or ``reuse``, and the known bytes.

    ``bytes`` is the compressed size of a layer in the store, else the size of the files it is made from.
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


def outline_text(
    plan: ImagePlan,
    rows: Sequence[Mapping[str, Any]],
    found: Sequence[Change] | None,
    screen: Screen = PLAIN,
    *,
    full: bool = True,
) -> str:
    """Return the layers as text: ``+`` to build, with the reason, ``=`` to reuse; then their number and bytes.

    ``found`` are the changes since the last build, None if there was none. Without ``full``, layers to reuse are
    only counted, and so are all layers of an image that was never built.
    """
    build = [r for r in rows if r["do"] == "build"]
    reuse = [r for r in rows if r["do"] == "reuse"]
    shown = rows if full else build if found is not None else []
    lines = screen.table(
        [
            (
                Styled("+", "green") if row in build else Styled("=", "dim"),
                row["name"],
                row["kind"],
                bytes_text(row["bytes"]) if row["bytes"] else "",
                _origin(row, found),
            )
            for row in shown
        ],
        right=(3,),
        indent="  ",
    )
    for change in found or ():
        if change.action == "image":
            lines += screen.wrap(change.text(), f"  {screen.paint('~', 'yellow')} ", "    ")
    what = f"{len(build)} to build from {bytes_text(sum(r['bytes'] for r in build))}" if build else "nothing to build"
    count = f"{what}, {len(reuse)} to reuse ({bytes_text(sum(r['bytes'] for r in reuse))})"
    if found is None:
        count = f"not built yet: {count}"
    ref = screen.paint(plan.ref, "bold")
    if full:
        return "\n".join([ref, *lines, *screen.wrap(count, "  ")])
    return "\n".join([*screen.wrap(count, f"{ref}: ", "    "), *lines])


def _origin(row: Mapping[str, Any], found: Sequence[Change] | None) -> str:
    """Return a layer's digest, or what it is made from and why."""
    if row["digest"]:
        return str(row["digest"])[7:19]
    words = [f"from {row['inputs']} file{'s' if row['inputs'] > 1 else ''}"] if row["inputs"] else []
    if found is not None:
        own = [change.text() for change in found if change.action == row["name"]]
        words += own[:_REASONS] or ["its layer is not in the store, or a layer that it needs changes"]
        words += [f"and {len(own) - _REASONS} more changes: primus explain"] if len(own) > _REASONS else []
    return "; ".join(words)
