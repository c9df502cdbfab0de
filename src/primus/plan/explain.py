"""Why a build would do something: the inputs that changed since the last build, old → new, with their lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primus.oci.store import Store
from primus.plan.action import ImagePlan, tree_record
from primus.terminal import PLAIN, Screen


@dataclass(frozen=True, kw_only=True)
class Change:
    """One input that differs; ``old`` or ``new`` is None if it does not exist on that side."""

    action: str
    input: str
    old: str | None
    new: str | None
    where: str = ""

    def __str__(self) -> str:
        return f"{self.action}: {self.text()}"

    def text(self) -> str:
        """The change without the action's name."""
        place = f"  ({self.where})" if self.where else ""
        old = short(self.old) if self.old is not None else "nothing"
        new = short(self.new) if self.new is not None else "removed"
        return f"{self.input}: {old} → {new}{place}"


def short(value: str) -> str:
    """Return the value with hashes shortened to 12 digits."""
    words = []
    for word in value.split(" "):
        head, colon, digits = word.rpartition(":")
        known = len(digits) == 64 and all(c in "0123456789abcdef" for c in digits)
        words.append(f"{head}{colon}{digits[:12]}" if known else word)
    return " ".join(words)


def changes(state: Mapping[str, Any] | None, plan: ImagePlan) -> list[Change]:
    """Return the differences between the last build's record and the plan; empty if there is nothing to do.

    Changes of a local tree are listed by file. Actions that are rebuilt only because of an action they need are
    left out: only the cause is listed.
    """
    try:
        return _changes((state or {})["inputs"], tree_record(plan))
    except (AttributeError, IndexError, KeyError, TypeError):
        # Treat a record written by another version as missing.
        return [Change(action="image", input=plan.ref, old=None, new="its first build")]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    found: list[Change] = []
    for name in (*new["actions"], *(n for n in old["actions"] if n not in new["actions"])):
        before, after = old["actions"].get(name), new["actions"].get(name)
        if before is None or after is None:
            kind = (after or before)["kind"]
            found.append(
                Change(
                    action=name,
                    input="layer" if kind != "build" else "build",
                    old=_summary(before),
                    new=_summary(after),
                    where=_where(after) if after else "",
                )
            )
        elif before["key"] != after["key"]:
            found += _inputs(name, before, after)
    for part in ("config", "annotations"):
        found += _values(part, old[part], new[part])
    return found


def _summary(action: Mapping[str, Any] | None) -> str | None:
    if action is None:
        return None
    return ", ".join(f"{n} {short(v[0])}" for n, v in list(action["inputs"].items())[:3] if n != "assembler")


def _where(action: Mapping[str, Any]) -> str:
    return next((str(v[1]) for v in action["inputs"].values() if v[1]), "")


def _inputs(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    found = []
    for key in sorted({*before["inputs"], *after["inputs"]}):
        old, new = before["inputs"].get(key), after["inputs"].get(key)
        if (old and old[0]) == (new and new[0]):
            continue
        files = _values(key, before["tree"], after["tree"]) if before["tree"] or after["tree"] else []
        if files and str((new or old)[0]).startswith("tree:"):
            found += [
                Change(action=name, input=c.input.replace(" ", "/", 1), old=c.old, new=c.new, where=c.where)
                for c in files
            ]
            continue
        found.append(
            Change(
                action=name,
                input=key,
                old=old[0] if old else None,
                new=new[0] if new else None,
                where=str((new or old)[1]),
            )
        )
    return found


def _values(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    found: list[Change] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += _values(f"{part}.{key}", before, after)
        else:
            found.append(
                Change(
                    action="image",
                    input=f"{part} {key}",
                    old=None if before is None else str(before),
                    new=None if after is None else str(after),
                )
            )
    return found


def explain_text(plan: ImagePlan, found: Sequence[Change], store: Store, screen: Screen = PLAIN) -> str:
    """Return the changes as text, then the layers that a build would create."""
    if not found:
        return f"{plan.ref}: nothing to do"
    build = [a.name for a in plan.layers if store.layer(a.key) is None]
    lines = [f"{screen.paint(plan.ref, 'bold')}:"]
    for change in found:
        lines += screen.wrap(str(change), "  ", "      ")
    what = ", ".join(build) if build else "no layer, only config and manifest"
    return "\n".join([*lines, *screen.wrap(f"to build: {what}", "  ", "      ")])
