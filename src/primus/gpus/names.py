"""The names in the table of GPU generations, for callers that need nothing else of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

from primus.yamlfile import read

TABLE_FILE = Path(__file__).with_name("generations.yaml")


@cache
def generation_names() -> tuple[str, ...]:
    """Return the names of all generations. The rest of the table is not checked, which would take twice as long."""
    data = cast("dict[str, Any]", read(TABLE_FILE, f"{TABLE_FILE.parent.name}/{TABLE_FILE.name}").data)
    return tuple(one["name"] for one in data["generations"])
