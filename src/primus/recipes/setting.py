"""One setting of a recipe, and the choices that decide which settings hold."""

from __future__ import annotations

from dataclasses import dataclass

from primus.yamlfile import Scalar

__all__ = ["CHOICES", "WORDS", "Asked", "Scalar", "Setting", "Value"]

# How a type is called in a sentence to a person.
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "None": "null",
}
# What decides which cases of a recipe hold; each is an option of the command line too.
CHOICES = ("backend", "mode", "precision", "gpu", "nodes", "proxy")

Value = Scalar | list[Scalar]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user chooses apart from single settings. None: the recipe's default, or what the machine has."""

    backend: str | None = None
    mode: str | None = None
    precision: str | None = None
    gpu: str | None = None
    nodes: int | None = None
    proxy: bool | None = None

    def words(self) -> list[str]:
        """The options that ask for the same again."""
        named = [f"--{name}={value}" for name in CHOICES[:-1] if (value := getattr(self, name)) is not None]
        return named if self.proxy is None else [*named, "--proxy" if self.proxy else "proxy=false"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value and its origin: ``file:line:col``, or the words of the command line that set it.

    ``because`` is the reason that the recipe gives, where sources disagree.
    """

    value: Value
    origin: str
    because: str = ""
