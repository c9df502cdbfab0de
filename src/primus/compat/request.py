"""What an old command asks for, in our own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from primus.recipes.setting import Asked

__all__ = ["Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run: a recipe, its choices, and ``key=value`` words in order.

    ``says`` are sentences for the user: what differs from the old command, and why. ``environment`` is what the ranks
    are given on top. ``gpu_of_path`` is the generation that a documented path was made for: settings follow the
    machine's own GPU, and this one only where nothing is started and there is none. ``benchmark`` is the model and the
    mode in the command's words, where it wrote a CSV of them.
    """

    recipe: str
    asked: Asked = field(default_factory=Asked)
    words: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_of_path: str | None = None
    benchmark: tuple[str, str] | None = None

    def train(self) -> list[str]:
        """The words after ``primus train`` that ask for the same."""
        return [self.recipe, *self.asked.words(), *self.words]
