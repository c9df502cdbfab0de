"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` is either as before or complete."""
    # Not the process id: containers on several nodes that share the folder may have the same.
    waiting = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    waiting.write_text(text, encoding="utf-8")
    waiting.replace(path)
