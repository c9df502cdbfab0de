"""Where the optimizations are that a job asked for; they need Triton, which other jobs do without."""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["optimized"]


def optimized() -> SimpleNamespace:
    """The modules ``attention``, ``loss`` and ``sharded`` of :mod:`primus.turbo`."""
    from primus.turbo import attention, loss, sharded

    return SimpleNamespace(attention=attention, loss=loss, sharded=sharded)
