"""Access to the optimizations of :mod:`primus.turbo`, which are imported on first use, because they need Triton."""

from __future__ import annotations

from types import SimpleNamespace


def optimized() -> SimpleNamespace:
    """Return the modules ``attention``, ``loss`` and ``sharded`` of :mod:`primus.turbo`."""
    from primus.turbo import attention, loss, sharded

    return SimpleNamespace(attention=attention, loss=loss, sharded=sharded)
