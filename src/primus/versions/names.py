"""Names of Python packages."""

from __future__ import annotations

import re


def normalised(name: str) -> str:
    """Normalize the name of a Python package as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()
