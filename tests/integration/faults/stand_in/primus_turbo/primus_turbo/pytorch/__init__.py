"""The package's parts, as in Primus Turbo."""

from primus_turbo.pytorch import core, modules, ops  # noqa: F401
