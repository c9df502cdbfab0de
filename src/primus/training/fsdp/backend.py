"""The rules of plain FSDP: those of our own loop."""

from primus.training.backend import Rules

RULES = Rules()
