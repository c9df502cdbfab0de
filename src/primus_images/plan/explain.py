"""What a build would do, and why: the layers to build and reuse, and the inputs that changed."""

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
        old = "nothing" if self.old is None else _short(self.old)
        new = "removed" if self.new is None else _short(self.new)
        place = f"  ({self.where})" if self.where else ""
        return f"{self.input}: {old} → {new}{place}"


def _short(value: str) -> str:
    return re.sub(r"(?<![^ :])([0-9a-f]{12})[0-9a-f]{52}(?![^ ])", r"\1", value)


def changes(record: Mapping[str, Any] | None, plan: ImagePlan) -> list[Change]:
    """Return the differences between the last build's record and the plan.

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
            yield _whole(name, before, after)
        elif before["key"] != after["key"]:
            yield from _inputs(name, before, after)
    for part in ("config", "annotations"):
        yield from _values("image", part, old[part], new[part])


def _whole(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Change:
    """Return the change of an action that is new, or is gone."""
    product = "build" if (after or before or {})["kind"] == "build" else "layer"
    lines = [str(where) for _, where in after["inputs"].values() if where] if after else []
    return Change(
        action=name,
        input=product,
        old=_summary(before),
        new=_summary(after),
        where=next(iter(lines), ""),
    )


def _summary(action: Mapping[str, Any] | None) -> str | None:
    if action is None:
        return None
    first = list(action["inputs"].items())[:3]
    return ", ".join(f"{name} {_short(row[0])}" for name, row in first if name != "assembler")


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
            where = str(new_where if new else old_where)
            yield Change(action=name, input=key, old=old, new=new, where=where)


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
            yield Change(
                action=action,
                input=f"{part}{separator}{key}",
                old=None if before is None else str(before),
                new=None if after is None else str(after),
            )


def lost(store: Store, plan: ImagePlan) -> list[Change]:
    """Return what of the plan the store no longer has: its layers, or else the image."""
    names = _absent(store, plan)
    if not names and not stored(store, plan):
        names = ["image"]
    return [Change(action=name, input=plan.ref, old="in the store", new=None) for name in names]


def _absent(store: Store, plan: ImagePlan) -> list[str]:
    return [action.name for action in plan.layers if store.layer(action.key) is None]


def explain_text(
    plan: ImagePlan, changed: Sequence[Change], store: Store, screen: Screen = PLAIN
) -> str:
    """Return the changes as text, then the layers that a build would create."""
    if not changed:
        return f"{plan.ref}: nothing to do"
    lines = [f"{screen.paint(plan.ref, 'bold')}:"]
    for change in changed:
        lines += screen.wrap(f"{change.action}: {change.text()}", "  ", "      ")
    layers = ", ".join(_absent(store, plan)) or "no layer, only config and manifest"
    return "\n".join([*lines, *screen.wrap(f"to build: {layers}", "  ", "      ")])


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
    size = sum(file.size for file in action.files)
    for name, kind, _ in action.tree:
        if kind != "link":
            size += Path(action.root, name).stat().st_size
    return size


def outline_text(
    plan: ImagePlan,
    rows: Sequence[Mapping[str, Any]],
    changed: Sequence[Change] | None,
    screen: Screen = PLAIN,
    *,
    full: bool = True,
) -> str:
    """Return the layers as text: ``+`` to build, with the reason, and ``=`` to reuse.

    Then follow their number and bytes. ``changed`` are the changes since the last build, None if
    there was none. Without ``full``, layers to reuse are only counted, and so are all layers of an
    image that was never built.
    """
    build = [row for row in rows if row["do"] == "build"]
    shown: Sequence[Mapping[str, Any]] = rows
    if not full:
        shown = [] if changed is None else build
    signs = {"build": Styled("+", "green"), "reuse": Styled("=", "dim")}
    table = []
    for row in shown:
        size = bytes_text(row["bytes"]) if row["bytes"] else ""
        table.append((signs[row["do"]], row["name"], row["kind"], size, _origin(row, changed)))
    lines = screen.table(table, right=(3,), indent="  ")
    for change in changed or ():
        if change.action == "image":
            lines += screen.wrap(change.text(), f"  {screen.paint('~', 'yellow')} ", "    ")
    bytes_to_build = sum(row["bytes"] for row in build)
    bytes_to_reuse = sum(row["bytes"] for row in rows) - bytes_to_build
    count = "nothing to build"
    if build:
        count = f"{len(build)} to build from {bytes_text(bytes_to_build)}"
    count += f", {len(rows) - len(build)} to reuse ({bytes_text(bytes_to_reuse)})"
    if changed is None:
        count = f"not built yet: {count}"
    ref = screen.paint(plan.ref, "bold")
    if full:
        return "\n".join([ref, *lines, *screen.wrap(count, "  ")])
    return "\n".join([*screen.wrap(count, f"{ref}: ", "    "), *lines])


def _origin(row: Mapping[str, Any], changed: Sequence[Change] | None) -> str:
    """Return where a layer is, or from how many files and why it is built."""
    if row["digest"]:
        return str(row["digest"])[7:19]
    words = []
    if row["inputs"]:
        words.append(f"from {row['inputs']} file{'s' if row['inputs'] > 1 else ''}")
    if changed is not None:
        reasons = [change.text() for change in changed if change.action == row["name"]]
        unknown = "its layer is not in the store, or a layer that it needs changes"
        words += reasons[:_REASONS] or [unknown]
        more = len(reasons) - _REASONS
        if more > 0:
            words.append(f"and {more} more changes: primus explain")
    return "; ".join(words)
