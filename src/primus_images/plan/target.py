"""images/<target>.yaml: the contents of one image, which fields.yaml describes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from primus_images.schema import WrongValue


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable of the image."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """One image."""

    description: str
    channels: tuple[Literal["amd", "debian", "pypi", "local"], ...]
    components: tuple[str, ...]
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: str | None = None
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpu: str | None = None
    bases: Mapping[str, str] = field(default_factory=dict)
    previews: Mapping[str, str] = field(default_factory=dict)
    environment: tuple[Variable, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    trained_in: tuple[Literal["fp32", "bf16", "fp8", "mxfp8"], ...] = ()
    workdir: str = "/"
    budget_gb: float | None = None
    budgets_gb: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.channels:
            raise WrongValue("channels must name at least one channel", "channels")
        _refuse_repetition(self.channels, "channels")
        _refuse_repetition(self.components, "components")
        _refuse_repetition(self.recipes, "recipes")
        _refuse_repetition([variable.name for variable in self.environment], "environment")
        for channel, extras in self.extras.items():
            _refuse_repetition(extras, "extras", channel)


def _refuse_repetition(names: Sequence[str], *key: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise WrongValue(f"{name} is listed twice in {key[0]}", *key, index)
