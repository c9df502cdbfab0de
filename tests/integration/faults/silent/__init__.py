"""Faults that training survives in silence, one file for each mechanism. The reference must name
each.
"""

from importlib import import_module
from pkgutil import iter_modules

from silent.registry import SILENT, Silent

__all__ = ["SILENT", "Silent"]

for module in iter_modules(__path__):
    import_module(f"silent.{module.name}")
