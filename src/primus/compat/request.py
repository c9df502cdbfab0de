"""The run that an old command asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from primus.errors import InputError
from primus.recipes.setting import Choices

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def switched_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether the variable ``name`` switches something on. InputError for a value that is neither on nor off."""
    text = environment.get(name, "")
    if text.lower() not in (*_ON, *_OFF):
        raise InputError(f"must be 1 or 0, not {text!r}", where=f"{name}={text}")
    return text.lower() in _ON


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run: a recipe, its choices, and ``key=value`` words in order.

    ``says`` are sentences for the user about differences from the old command. ``environment`` holds additional
    variables for the ranks. ``gpu_of_path`` is the GPU generation in a documented path. It is used only with --dry-run
    on a machine without a GPU; otherwise the machine's GPU decides. ``benchmark`` is the model and mode as the command
    names them, if the command writes a CSV.
    """

    recipe: str
    choices: Choices = field(default_factory=Choices)
    words: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_of_path: str | None = None
    benchmark: tuple[str, str] | None = None

    def train(self) -> list[str]:
        """Return the equivalent arguments of ``primus train``."""
        return [self.recipe, *self.choices.words(), *self.words]
