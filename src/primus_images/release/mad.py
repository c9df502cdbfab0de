"""What madengine needs to train the recipes of an image.

It needs models.json, a Dockerfile, and the script that the Dockerfile's image runs.
"""

import json
from pathlib import Path
from typing import Any

from primus_images.compat.tables import table
from primus_images.plan.resolve import ResolvedTarget
from primus_images.recipes.load import Entry, entries

_SCRIPT = "scripts/primus/run.sh"
_DOCKERFILE = "docker/primus"
# As in the commands of AMD's documentation.
_EIGHT_HOURS = 28800


def tags_of(recipe: str, backend: str, mode: str) -> list[str]:
    """Return MAD's tags for one way to train a recipe, or one in their style if MAD has none."""
    tags = []
    for tag, row in table("commands")["tags"].items():
        trains = (row["recipe"], row["backend"], row.get("mode", "pretrain"))
        if trains == (recipe, backend, mode):
            tags.append(tag)
    if tags:
        return tags
    suffix = "" if mode == "pretrain" else f"_{mode}"
    return [f"primus_{backend}_train_{recipe}{suffix}"]


def mad_files(target: ResolvedTarget, image: str) -> dict[str, str]:
    """Return path → text of the files with which madengine trains the recipes of ``target``.

    ``image`` is its name in a registry, with the digest. Every recipe, backend, mode and precision
    that the target's GPU supports is a model; those of an image without a GPU are proxies.
    """
    context: dict[str, str] = {}
    suffix = ""
    if target.arch:
        vendor = "AMD" if target.arch.startswith("gfx") else "NVIDIA"
        context = {"gpu_vendor": vendor}
        suffix = f".{vendor.lower()}"
    models = []
    for entry in entries():
        models += _models(entry, target)
    # madengine calls `git config` in every container, also of models that are not cloned.
    dockerfile = Path(__file__).with_name("mad.Dockerfile").read_text(encoding="utf-8")
    return {
        "models.json": json.dumps(models, indent=2) + "\n",
        f"{_DOCKERFILE}.ubuntu{suffix}.Dockerfile": dockerfile.format(context=context, image=image),
        _SCRIPT: Path(__file__).with_name("mad.sh").read_text(encoding="utf-8"),
    }


def _models(entry: Entry, target: ResolvedTarget) -> list[dict[str, Any]]:
    if target.gpu:
        gpu = target.gpu.name
        precisions = [name for name, gpus in entry.precisions.items() if gpu in gpus]
        device = f"--gpu {gpu}"
    else:
        precisions = list(entry.proxy)
        device = "--gpu cpu --proxy"
    tags = tags_of(entry.recipe, entry.backend, entry.mode)
    models = []
    for precision in precisions:
        names = tags
        # The first precision is the one of MAD's tags.
        if precision != precisions[0]:
            names = [f"{tag}_{precision}" for tag in tags]
        choices = f"--backend {entry.backend} --mode {entry.mode} --precision {precision}"
        models.append(
            {
                "name": names[0],
                "url": "",
                "dockerfile": _DOCKERFILE,
                "dockercontext": "./docker",
                "scripts": _SCRIPT,
                "data": "",
                "n_gpus": "-1",
                "owner": "",
                "training_precision": precision,
                "tags": [*names[1:], target.ref, entry.recipe, entry.backend, entry.mode],
                "timeout": _EIGHT_HOURS,
                "args": f"{entry.recipe} {choices} {device}",
            }
        )
    return models
