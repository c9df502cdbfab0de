"""``build``: build a component's source into a wheel in the sandbox. A ``wheels`` action then uses the wheel."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from primus.engine.workshop import Wheel, Workshop, own_code
from primus.errors import CheckFailed
from primus.plan.action import Action
from primus.plan.scripts import ORDER


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check that the sandbox can run the script."""
    shop.prepare_sandbox()


def make(action: Action, shop: Workshop, scratch: Path) -> Wheel:
    """Run the build script without network on a read-only source. The script must write one wheel to /out."""
    (source,) = action.files
    inside, out = f"/in/{source.file}", scratch / "out"
    shop.run_isolated(
        action,
        ["/bin/sh", "-c", str(action.spec["script"]), "wheel", inside, str(action.spec["python"])],
        inputs={
            inside: shop.file(source),
            "/in/order/sitecustomize.py": own_code(action, "sorted folders", ORDER, scratch),
        },
        outputs=out,
        env={**_environment(action.job_bytes), **cast("Mapping[str, str]", action.spec["environment"])},
        what=action.name,
    )
    wheels = [path for path in out.glob("*.whl") if path.is_file() and not path.is_symlink()]
    if len(wheels) != 1:
        names = ", ".join(sorted(w.name for w in wheels)) or "none"
        raise CheckFailed(f"{action.name} must build one wheel, but built {names}", where=str(shop.log(action)))
    with wheels[0].open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    wheel = Wheel(file=wheels[0].name, sha256=sha256, size=wheels[0].stat().st_size)
    shop.files.put(wheels[0], sha256)
    return wheel


def _environment(job_bytes: int) -> dict[str, str]:
    """Return the environment of every build. It allows as many compiler processes as cores and memory permit."""
    (line,) = [m for m in Path("/proc/meminfo").read_text().splitlines() if m.startswith("MemAvailable:")]
    memory = 1024 * int(line.split()[1])
    jobs = str(max(1, min(len(os.sched_getaffinity(0)), memory // max(job_bytes, 1))))
    return {
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAX_JOBS": jobs,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONPATH": "/in/order",
    }
