"""Withdrawn releases: a signed statement in the registry, and a file that a checkout keeps.

The statement is attached to the image, which stays where it is: who has its digest can still pull
it, and is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from primus_images.files import write_file
from primus_images.schema import build_typed
from primus_images.yamlfile import read_values

FILE = "withdrawn.yaml"
_HEAD = "# Written by `primus withdraw`; commit it, so that every checkout knows.\n"


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """Why an image was withdrawn, when (ISO 8601), and the release to use instead, if any."""

    reason: str
    date: str
    successor: str | None = None
    digest: str | None = None

    @property
    def sentence(self) -> str:
        """What users of the image are told."""
        text = f"withdrawn on {self.date}: {self.reason}"
        if self.successor:
            text += f"; use {self.successor} instead"
        return text

    @property
    def predicate(self) -> dict[str, Any]:
        """What the signed statement says."""
        content = {"reason": self.reason, "date": self.date}
        if self.successor:
            content["successor"] = self.successor
        return content


def withdrawal_text(predicates: Sequence[Any]) -> str:
    """Return what signed statements say of a withdrawal; empty without one."""
    withdrawal = latest_withdrawal(predicates)
    return withdrawal.sentence if withdrawal else ""


def latest_withdrawal(predicates: Sequence[Any]) -> Withdrawal | None:
    """Return the latest of the withdrawals in signed statements; None without one."""
    stated = []
    for predicate in predicates:
        words = predicate if isinstance(predicate, dict) else {}
        withdrawal = Withdrawal(
            reason=" ".join(str(words.get("reason") or "for no stated reason").split()),
            date=str(words.get("date") or "an unknown day"),
            successor=str(words["successor"]) if words.get("successor") else None,
        )
        stated.append(withdrawal)
    return max(stated, key=lambda one: (one.date, one.sentence), default=None)


def withdrawals(root: Path) -> dict[str, Withdrawal]:
    """Return the withdrawn images of a project by name. Raises InputError for a damaged file."""
    path = root / FILE
    if not path.exists():
        return {}
    data: Any = read_values(path).data
    entries = data if isinstance(data, dict) else {"the file": data}
    return {
        str(name): build_typed(Withdrawal, entry, f"{path}: {name}")
        for name, entry in entries.items()
    }


def remember(root: Path, name: str, withdrawal: Withdrawal) -> Path:
    """Add a withdrawn image to the file of a project. Returns the path of the file."""
    known: Mapping[str, Withdrawal] = {**withdrawals(root), name: withdrawal}
    content = {}
    for other, entry in known.items():
        content[other] = {**entry.predicate, "digest": entry.digest}
    text = yaml.safe_dump(content, sort_keys=True, allow_unicode=True, width=100)
    write_file(root / FILE, _HEAD + text)
    return root / FILE
