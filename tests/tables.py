"""Tables of ``fixtures/tables.yaml``: rows of tests that are data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_TABLES: dict[str, list[Any]] = yaml.safe_load(
    (Path(__file__).parent / "fixtures/tables.yaml").read_text(encoding="utf-8")
)


def table_of(name: str) -> list[Any]:
    """Return the rows of the test ``name``, for ``parametrize``."""
    return _TABLES[name]
