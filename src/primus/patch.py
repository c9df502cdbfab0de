"""Replace a function of a library, but only while it is what the replacement was written for.

A new version may move a function or change its parameters. The replacement would then do nothing, or something else.
"""

from __future__ import annotations

import inspect
from typing import Any

from primus.errors import HostError


def replace(owner: Any, name: str, stand_in: Any, *, takes: str | None = None) -> Any:
    """Put ``stand_in`` in the place of ``owner.name`` and return what was there.

    ``stand_in`` gets the signature of what it replaces, so that a second replacement finds what the first one found.

    ``takes`` are the names of its parameters when the replacement was written, such as ``"module, factor"``; None for
    what has no signature (values, classes, functions written in C).

    Raises HostError when ``owner`` has no such name, or when it takes other parameters.
    """
    place = f"{getattr(owner, '__module__', None) or ''}.{owner.__name__}".lstrip(".")
    found = getattr(owner, name, None)
    if found is None:
        raise _changed(place, f"has no {name}")
    if takes is not None:
        signature = inspect.signature(found)
        if (seen := ", ".join(signature.parameters)) != takes:
            raise _changed(place, f"has {name}({seen})")
        stand_in.__signature__ = signature
    setattr(owner, name, stand_in)
    return found


def _changed(place: str, what: str) -> HostError:
    return HostError(
        f"{place} {what}, which is not what primus replaces",
        hint=f"use the version of {place.partition('.')[0]} that versions.yaml pins",
    )
