"""The digest of a resolved recipe, and what a record says of the recipe that has it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from primus_images.recipes.setting import Value


def digest_of_recipe(values: Mapping[str, Value], assets: Mapping[str, str]) -> str:
    """Return the digest of a recipe by its resolved values and the digests of its assets."""
    return hashlib.sha256(json.dumps([values, dict(assets)], sort_keys=True).encode()).hexdigest()


def misstated(about: Mapping[str, Any]) -> str:
    """Return what a record says wrongly of its recipe; "" if nothing is wrong.

    The recipe's name and choices are among the settings that it hashes. Raises what damaged JSON
    raises.
    """
    settings = about["settings"]
    digest = about["sha256"]
    if "assets" in about and digest != digest_of_recipe(settings, about["assets"]):
        return f"its settings are not those of recipe {digest[:12]}"
    for key in ("name", "backend", "mode", "precision", "gpu"):
        # A recipe given by path is called by it.
        by_path = key == "name" and "/" in about["name"]
        if about[key] != settings[key] and not by_path:
            return (
                f"it is of another recipe: its {key} is {settings[key]}, and it says {about[key]}"
            )
    return ""
