"""The picker's data: what every way to train takes on every GPU, from the functions of primus show,
fit and launch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from docs.site.measured import rates
from primus_images.errors import PrimusError
from primus_images.gpus.table import generation, load_table
from primus_images.launch.plan import vendor
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve as resolve_target
from primus_images.recipes.architecture import readable
from primus_images.recipes.load import Entry, entries
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import USABLE, fits, gpu_bytes, largest_batch, predict
from primus_images.recipes.setting import Choices

MACHINES = (1, 2, 4, 8, 16)
_GIB = 2**30
_KEEP = '--shm-size 16g -v "$PWD/runs:/workspace/runs"'
# What a container needs for the GPUs of each vendor, and nothing else.
DOCKER = {
    "amd": (
        "docker run --rm --device /dev/kfd --device /dev/dri "
        '--group-add "$(stat -c %g /dev/kfd)" --group-add "$(stat -c %g /dev/dri/renderD128)" '
        + _KEEP
    ),
    "nvidia": f"docker run --rm --gpus all {_KEEP}",
}


def picker(root: Path) -> dict[str, str]:
    """Return path in the site → text: the data, as JSON and as a script that pages opened from a
    disk can read.
    """
    text = json.dumps(document(root), ensure_ascii=False, separators=(",", ":"))
    return {"picker.json": text, "_static/picker-data.js": f"window.PRIMUS = {text};\n"}


def document(root: Path) -> dict[str, Any]:
    """Return the data. A row of ``runs`` has the batch of a GPU and of a step, the length of a
    sequence, the GiB of a GPU, whether they fit, the largest batch (on one machine), the error of
    the GiB in % and the number of steps. A text is the reason why there is no such run.
    """
    project = Project(root)
    all_entries = [entry for entry in entries() if not entry.only_proxy]
    (file,) = (root / "benchmarks/golden").glob("*-cpu.json")
    curves = json.loads(file.read_text("utf-8"))["curves"]
    return {
        "release": project.versions.release,
        "gpus": {name: _gpu(project, name) for name in load_table().imaged},
        "machines": MACHINES,
        "models": {
            e.recipe: f"{e.description} ({readable(e.size.total)} parameters)" for e in all_entries
        },
        "ways": [_way(entry, curves) for entry in all_entries],
        "rates": [asdict(rate) for rate in rates(root)],
        "docker": DOCKER,
    }


def _gpu(project: Project, name: str) -> dict[str, Any]:
    gpu, target = generation(name), resolve_target(project, name)
    preview = target.choice.preview
    return {
        "title": gpu.title,
        "vendor": vendor(name),
        "gib": round((gpu_bytes(name) or 0) / _GIB),
        "image": f"{target.versions.image.name}:{target.ref}",
        "issues": [str(issue) for issue in target.known_issues],
        "status": f"The image is a preview: {preview}." if preview else "",
    }


def _way(entry: Entry, curves: Mapping[str, object]) -> dict[str, Any]:
    runs: dict[str, Any] = {}
    for precision, able in entry.precisions.items():
        for gpu in filter(load_table().imaged.__contains__, able):
            for nodes in MACHINES:
                runs[f"{precision} {gpu} {nodes}"] = _run(entry, precision, gpu, nodes)
    judged = f"{entry.recipe}-{entry.backend}-{entry.mode}" in curves
    return {
        "model": entry.recipe,
        "backend": entry.backend,
        "mode": entry.mode,
        "judged": judged,
        "runs": runs,
    }


def _run(entry: Entry, precision: str, gpu: str, nodes: int) -> list[Any] | str:
    try:
        choices = Choices(
            backend=entry.backend, mode=entry.mode, precision=precision, gpu=gpu, nodes=nodes
        )
        recipe = resolve(entry.recipe, (), choices)
    except PrimusError as error:
        return str(error).partition("\n")[0]
    memory, available = predict(recipe), USABLE * (gpu_bytes(gpu) or 0)
    state = (
        "does not fit"
        if not fits(memory, available)
        else "tight"
        if memory.peak > available
        else "fits"
    )
    return [
        recipe.local_batch,
        recipe.global_batch,
        recipe.seq_len,
        round(memory.peak / _GIB, 1),
        state,
        largest_batch(recipe, available) if nodes == 1 else None,
        round(recipe.knows.memory_error * 100),
        recipe.steps,
    ]
