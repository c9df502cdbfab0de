"""The kinds of action, one module each.

To add a kind, add its name to :data:`primus.plan.action.Kind`, and a module here with the two functions of
:class:`primus.engine.workshop.Kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from primus.engine.kinds import build, debs, files, image, kernels, wheels

if TYPE_CHECKING:
    from primus.engine.workshop import Kind

KINDS: Mapping[str, Kind] = {
    "image": image,
    "debs": debs,
    "kernels": kernels,
    "wheels": wheels,
    "files": files,
    "build": build,
}
