"""What tests read from ``fixtures``: rows that are data, of ``tables.yaml``, and texts."""

from pathlib import Path
from typing import Any

import yaml

FIXTURES = Path(__file__).parent / "fixtures"


def text_of(name: str) -> str:
    """Return the text of a file of ``fixtures``."""
    return (FIXTURES / name).read_text(encoding="utf-8")


_TABLES: dict[str, Any] = yaml.safe_load(text_of("tables.yaml"))


def table_of(name: str) -> Any:
    """Return the table ``name``: the rows of a test, for ``parametrize``, or a mapping."""
    return _TABLES[name]
