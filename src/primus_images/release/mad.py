"""What madengine needs to train the recipes of an image: models.json, a Dockerfile and the script
that it runs.
"""

import json
from pathlib import Path
from typing import Any

from primus_images.compat.translate import table
from primus_images.plan.resolve import ResolvedTarget
from primus_images.recipes.load import Entry, entries
from primus_images.release.documents import form

_SCRIPT = "scripts/primus/run.sh"
_DOCKERFILE = "docker/primus"


def tags_of(recipe: str, backend: str, mode: str) -> list[str]:
    """Return MAD's tags for one way to train a recipe, or one in their style if MAD has none."""
    rows = table("commands")["tags"].items()
    key = (recipe, backend, mode)
    tags = [
        tag
        for tag, row in rows
        if (row["recipe"], row["backend"], row.get("mode", "pretrain")) == key
    ]
    return tags or [f"primus_{backend}_train_{recipe}" + ("" if mode == "pretrain" else f"_{mode}")]


def mad_files(target: ResolvedTarget, image: str) -> dict[str, str]:
    """Return path → text of the files with which madengine trains the recipes of ``target``.

    ``image`` is its name in a registry, with the digest. Every recipe, backend, mode and precision
    that the target's GPU supports is a model; those of an image without a GPU are proxies.
    """
    context: dict[str, str] = {}
    suffix = ""
    if target.arch:
        vendor = "NVIDIA"
        if target.arch.startswith("gfx"):
            vendor = "AMD"
        context = {"gpu_vendor": vendor}
        suffix = f".{vendor.lower()}"
    # madengine calls `git config` in every container, also of models that are not cloned.
    dockerfile = Path(__file__).with_name("mad.Dockerfile").read_text(encoding="utf-8")
    return {
        "models.json": json.dumps(
            [model for entry in entries() for model in _models(entry, target)], indent=2
        )
        + "\n",
        f"{_DOCKERFILE}.ubuntu{suffix}.Dockerfile": dockerfile.format(context=context, image=image),
        _SCRIPT: Path(__file__).with_name("mad.sh").read_text(encoding="utf-8"),
    }


def _models(entry: Entry, target: ResolvedTarget) -> list[dict[str, Any]]:
    if target.gpu:
        precisions = [
            precision for precision, gpus in entry.precisions.items() if target.gpu.name in gpus
        ]
        where = ["--gpu", target.gpu.name]
    else:
        precisions = list(entry.proxy)
        where = ["--gpu", "cpu", "--proxy"]
    tags = tags_of(entry.recipe, entry.backend, entry.mode)
    models = []
    for precision in precisions:
        # The first precision is the one of MAD's tags.
        names = [tag if precision == precisions[0] else f"{tag}_{precision}" for tag in tags]
        choices = ["--backend", entry.backend, "--mode", entry.mode, "--precision", precision]
        other_tags = [*names[1:], target.ref, entry.recipe, entry.backend, entry.mode]
        args = " ".join([entry.recipe, *choices, *where])
        paths = {"dockerfile": _DOCKERFILE, "script": _SCRIPT}
        models.append(
            form("mad", name=names[0], precision=precision, tags=other_tags, args=args, **paths)
        )
    return models
