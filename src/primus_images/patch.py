"""Replacing a function of a library, only if it is the one that the replacement was written for.

A new version may move a function or change its parameters. Without this check, the replacement
would have no effect, or a wrong one.
"""

import inspect
from typing import Any

from primus_images.errors import HostError, PrimusError


def replace(owner: Any, name: str, stand_in: Any, *, takes: str | None = None) -> Any:
    """Replace ``owner.name`` by ``stand_in`` and return the original.

    ``stand_in`` gets the signature of the original, so that a second replacement sees the same as
    the first.

    ``takes`` are the names of the original's parameters, such as ``"module, factor"``; None if it
    has no signature (values, classes, functions written in C). Raises HostError if ``owner`` has no
    such name, or if the parameters differ.
    """
    place = f"{getattr(owner, '__module__', None) or ''}.{owner.__name__}".lstrip(".")
    original = getattr(owner, name, None)
    if original is None:
        raise _changed(place, f"has no {name}")
    if takes is not None:
        signature = inspect.signature(original)
        parameters = ", ".join(signature.parameters)
        if parameters != takes:
            raise _changed(place, f"has {name}({parameters})")
        stand_in.__signature__ = signature
    setattr(owner, name, stand_in)
    return original


def _changed(place: str, difference: str) -> PrimusError:
    library = place.partition(".")[0]
    return HostError(
        f"{place} {difference}, which is not what primus replaces",
        hint=f"use the version of {library} that versions.yaml pins",
    )
