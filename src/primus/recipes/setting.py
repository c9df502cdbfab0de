"""One setting of a recipe, and the choices that determine which settings apply."""

from __future__ import annotations

from dataclasses import dataclass

from primus.yamlfile import Scalar

# Names of types in messages.
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "None": "null",
}
# The choices that determine which cases of a recipe apply. Each is also a command-line option.
CHOICES = ("backend", "mode", "precision", "gpu", "nodes", "proxy")

Value = Scalar | list[Scalar]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The user's choices. None stands for the recipe's default, or for what the machine has."""

    backend: str | None = None
    mode: str | None = None
    precision: str | None = None
    gpu: str | None = None
    nodes: int | None = None
    proxy: bool | None = None

    def words(self) -> list[str]:
        """Return the command-line options for the same choices."""
        named = [f"--{name}={value}" for name in CHOICES[:-1] if (value := getattr(self, name)) is not None]
        return named if self.proxy is None else [*named, "--proxy" if self.proxy else "proxy=false"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value and its origin: ``file:line:col``, or the command-line argument that set it.

    ``because`` is the reason that the recipe gives for a value on which sources disagree.
    """

    value: Value
    origin: str
    because: str = ""
