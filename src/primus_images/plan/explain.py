"""What a build would do, and why: the layers to build, download and reuse, and the inputs that
changed since the last build, old → new, with their lines.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from primus_images.oci.store import Store
from primus_images.plan.action import Action, ImagePlan, stored, tree_record
from primus_images.terminal import PLAIN, Screen, Styled, bytes_text

_REASONS = 2  # The number of reasons listed beside a layer; `primus explain` lists all.


class Change(NamedTuple):
    """One input that differs; ``old`` or ``new`` is None if it does not exist on that side."""

    action: str
    input: str
    old: str | None
    new: str | None
    where: str = ""

    def text(self) -> str:
        """The change without the action's name."""
        place = ""
        if self.where:
            place = f"  ({self.where})"
        old = "nothing"
        if self.old is not None:
            old = _short(self.old)
        new = "removed"
        if self.new is not None:
            new = _short(self.new)
        return f"{self.input}: {old} → {new}{place}"


def _short(value: str) -> str:
    return re.sub(r"(?<![^ :])([0-9a-f]{12})[0-9a-f]{52}(?![^ ])", r"\1", value)


def changes(record: Mapping[str, Any] | None, plan: ImagePlan) -> list[Change]:
    """Return the differences between the last build's record and the plan; empty if there is
    nothing to do.

    Changes of a local tree are listed by file. Actions that are rebuilt only because of an action
    they need are left out: only the cause is listed.
    """
    try:
        return list(_changes((record or {})["inputs"], tree_record(plan)))
    except (AttributeError, IndexError, KeyError, TypeError):
        # Treat a record written by another version as missing.
        return [Change(action="image", input=plan.ref, old=None, new="its first build")]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name in {**new["actions"], **old["actions"]}:
        before = old["actions"].get(name)
        after = new["actions"].get(name)
        if before is None or after is None:
            what = "layer"
            if (after or before)["kind"] == "build":
                what = "build"
            where = next(
                (str(where) for _, where in (after or {"inputs": {}})["inputs"].values() if where),
                "",
            )
            yield Change(
                action=name, input=what, old=_summary(before), new=_summary(after), where=where
            )
        elif before["key"] != after["key"]:
            yield from _inputs(name, before, after)
    for part in ("config", "annotations"):
        yield from _values("image", part, old[part], new[part])


def _summary(action: Mapping[str, Any] | None) -> str | None:
    if action is None:
        return None
    return ", ".join(
        f"{n} {_short(v[0])}" for n, v in list(action["inputs"].items())[:3] if n != "assembler"
    )


def _inputs(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for key in sorted({*before["inputs"], *after["inputs"]}):
        old, old_where = before["inputs"].get(key, (None, ""))
        new, new_where = after["inputs"].get(key, (None, ""))
        if old == new:
            continue
        files = list(_values(name, key, before["tree"], after["tree"], "/"))
        if files and str(new or old).startswith("tree:"):
            yield from files
        else:
            yield Change(
                action=name, input=key, old=old, new=new, where=str(new_where if new else old_where)
            )


def _values(
    action: str, part: str, old: Mapping[str, Any], new: Mapping[str, Any], separator: str = " "
) -> Iterator[Change]:
    for key in sorted({*old, *new}):
        before = old.get(key)
        after = new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _values(action, f"{part}.{key}", before, after)
        else:
            sides = [None if value is None else str(value) for value in (before, after)]
            yield Change(action=action, input=f"{part}{separator}{key}", old=sides[0], new=sides[1])


def lost(store: Store, plan: ImagePlan) -> list[Change]:
    """Return what of the plan the store no longer has: its layers, or else the image."""
    layers = [action.name for action in plan.layers if store.layer(action.key) is None]
    names = layers or ([] if stored(store, plan) else ["image"])
    return [Change(action=name, input=plan.ref, old="in the store", new=None) for name in names]


def explain_text(
    plan: ImagePlan, changed: Sequence[Change], store: Store, screen: Screen = PLAIN
) -> str:
    """Return the changes as text, then the layers that a build would create."""
    if not changed:
        return f"{plan.ref}: nothing to do"
    lines = [f"{screen.paint(plan.ref, 'bold')}:"]
    for change in changed:
        lines += screen.wrap(f"{change.action}: {change.text()}", "  ", "      ")
    names = ", ".join(action.name for action in plan.layers if store.layer(action.key) is None)
    what = names or "no layer, only config and manifest"
    return "\n".join([*lines, *screen.wrap(f"to build: {what}", "  ", "      ")])


def outline(store: Store, plan: ImagePlan) -> list[dict[str, Any]]:
    """Return one row per layer: name, kind, key, ``build`` or ``reuse``, and the known bytes.

    ``bytes`` is the compressed size of a layer in the store, else the size of the files that it is
    made from.
    """
    rows = []
    for action in plan.layers:
        layer = store.layer(action.key)
        row = {
            "name": action.name,
            "kind": action.kind,
            "key": action.key,
            "do": "reuse" if layer else "build",
            "bytes": layer.blob.size if layer else _source_bytes(action),
            "digest": layer.blob.digest if layer else None,
            "inputs": len(action.files) or len(action.tree),
        }
        rows.append(row)
    return rows


def _source_bytes(action: Action) -> int:
    tree = (Path(action.root) / name for name, kind, _ in action.tree if kind != "link")
    return sum(file.size for file in action.files) + sum(path.stat().st_size for path in tree)


def outline_text(
    plan: ImagePlan,
    rows: Sequence[Mapping[str, Any]],
    changed: Sequence[Change] | None,
    screen: Screen = PLAIN,
    *,
    full: bool = True,
) -> str:
    """Return the layers as text: ``+`` to build, with the reason, and ``=`` to reuse.

    Then follow their number and bytes.

    ``changed`` are the changes since the last build, None if there was none. Without ``full``,
    layers to reuse are only counted, and so are all layers of an image that was never built.
    """
    build = [row for row in rows if row["do"] == "build"]
    reuse = [row for row in rows if row["do"] == "reuse"]
    signs = {"build": Styled("+", "green"), "reuse": Styled("=", "dim")}
    if full:
        shown = rows
    elif changed is not None:
        shown = build
    else:
        shown = []
    table = []
    for row in shown:
        size = ""
        if row["bytes"]:
            size = bytes_text(row["bytes"])
        table.append((signs[row["do"]], row["name"], row["kind"], size, _origin(row, changed)))
    lines = screen.table(table, right=(3,), indent="  ")
    for change in changed or ():
        if change.action == "image":
            lines += screen.wrap(change.text(), f"  {screen.paint('~', 'yellow')} ", "    ")
    what = "nothing to build"
    if build:
        what = f"{len(build)} to build from {bytes_text(sum(r['bytes'] for r in build))}"
    count = f"{what}, {len(reuse)} to reuse ({bytes_text(sum(r['bytes'] for r in reuse))})"
    if changed is None:
        count = f"not built yet: {count}"
    ref = screen.paint(plan.ref, "bold")
    if full:
        return "\n".join([ref, *lines, *screen.wrap(count, "  ")])
    return "\n".join([*screen.wrap(count, f"{ref}: ", "    "), *lines])


def _origin(row: Mapping[str, Any], changed: Sequence[Change] | None) -> str:
    if row["digest"]:
        return str(row["digest"])[7:19]
    if row["inputs"]:
        words = [f"from {row['inputs']} file{'s' if row['inputs'] > 1 else ''}"]
    else:
        words = []
    if changed is not None:
        reasons = [change.text() for change in changed if change.action == row["name"]]
        words += reasons[:_REASONS] or [
            "its layer is not in the store, or a layer that it needs changes"
        ]
        more = len(reasons) - _REASONS
        words += [f"and {more} more changes: primus explain"] if more > 0 else []
    return "; ".join(words)
