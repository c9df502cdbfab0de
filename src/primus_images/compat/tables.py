"""The tables of this package."""

from functools import cache
from pathlib import Path
from typing import Any, cast

from primus_images.yamlfile import read_values


@cache
def table(name: str) -> dict[str, Any]:
    """Return the contents of ``NAME.yaml`` of this package."""
    return cast("dict[str, Any]", read_values(Path(__file__).with_name(f"{name}.yaml")).data)
