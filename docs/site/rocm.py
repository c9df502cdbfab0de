"""What pages of ROCm's documentation take from a file of data: the image, its components, and the
models by group.
"""

import json
from pathlib import Path
from typing import Any

from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.recipes.experiments.translate import table
from primus_images.recipes.load import Entry, entries
from primus_images.release.mad import tags_of


def rocm_data(root: Path) -> dict[str, str]:
    """Return path in the site → JSON for each backend, in the form of ROCm's
    ``…-benchmark-models.yaml``.

    Templates read ``docker`` or ``dockers``, their ``components``, and ``model_groups`` with
    ``mad_tag``. Those of 2026 also read the ``train_tags`` of each GPU.
    """
    project = Project(root)
    targets = [resolve(project, name) for name in project.target_names()]
    instinct = [
        target for target in targets if target.gpu and target.arch and target.arch.startswith("gfx")
    ]
    dockers = [
        {
            "pull_tag": f"{project.versions.image.name}:{project.versions.release}-{target.name}",
            "target": target.name,
            "components": {
                name: pin.version or "of this project" for name, pin in target.pins.items()
            },
        }
        for target in instinct
    ]
    gpus = [target.name for target in instinct]
    every: dict[str, list[Entry]] = {}
    for entry in entries():
        if not entry.only_proxy:
            every.setdefault(entry.backend, []).append(entry)
    return {
        f"primus-{backend}-benchmark-models.json": json.dumps(
            {"docker": dockers[0], "dockers": dockers, "model_groups": _groups(some, gpus)},
            indent=1,
            ensure_ascii=False,
        )
        for backend, some in every.items()
    }


def _groups(some: list[Entry], gpus: list[str]) -> list[dict[str, Any]]:
    stems = table("models")["recipes"]
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in some:
        models = groups.setdefault(entry.architecture.family, {})
        model = models.setdefault(
            entry.recipe,
            {
                "model": entry.description,
                "mad_tag": tags_of(entry.recipe, entry.backend, entry.mode)[-1],
                "config_name": entry.path.name,
                "precision": ", ".join(precision.upper() for precision in entry.precisions),
                "train_tags": {},
            },
        )
        # MAD's tags name files of Primus, whose names some recipes have.
        stem = next(
            (
                name
                for name, recipe in stems.get(entry.backend, {}).items()
                if recipe == entry.recipe
            ),
            None,
        )
        for precision, able in (
            entry.precisions.items() if stem and entry.mode == "pretrain" else ()
        ):
            for gpu in (name.upper() for name in able if name in gpus):
                tag = f"primus_train/{entry.backend}_{gpu}_{stem}-{precision.upper()}-pretrain"
                model["train_tags"].setdefault(gpu, []).append(tag)
    return [
        {"group": name, "tag": name.lower(), "models": list(models.values())}
        for name, models in groups.items()
    ]
