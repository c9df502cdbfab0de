"""Write a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write"]


def write(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` is either as before or complete; makes its folder. OSError as any write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id: containers on several nodes that share the folder may have the same.
    waiting = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        waiting.write_text(text, encoding="utf-8")
        waiting.replace(path)
    except BaseException:
        waiting.unlink(missing_ok=True)
        raise
