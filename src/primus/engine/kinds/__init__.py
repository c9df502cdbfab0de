"""The kinds of action. To add one, add its name to :data:`primus.plan.action.Kind`, and its functions here."""

from __future__ import annotations

from collections.abc import Mapping

from primus.engine.kinds import debs, files, kernels, wheels
from primus.engine.workshop import Kind

KINDS: Mapping[str, Kind] = {
    "image": Kind(files.adopt),
    "debs": Kind(debs.make, debs.prepare),
    "kernels": Kind(kernels.make, kernels.prepare),
    "wheels": Kind(wheels.make, wheels.prepare),
    "files": Kind(files.make),
    "build": Kind(wheels.build, wheels.prepare),
}
