"""The steps of a proof: what each runs, what it needs, and how long it takes.

``steps.yaml`` has them as data. Here they become commands for one target and one machine.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.recipes import load
from primus_images.recipes.choose import supported
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import USABLE, fits, gpu_bytes, predict
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices
from primus_images.turbo.optimizations import importable
from primus_images.yamlfile import read_values

_GIB = 2**30
_TABLE: Any = read_values(Path(__file__).with_name("steps.yaml")).data
# One GPU holds this many layers of the 8B model, with float32 states and room for activations.
_LAYERS = 4
_CHOICES = ("recipe", "backend", "mode", "precision")
_PUBLISHED = "docs/site/published.yaml"
_INSIDE = "/out"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is proven, and where.

    ``gpus`` is the number of GPUs of this machine. ``locked`` is whether channel ``channel``, the
    target's best one, has a lock. With ``here``, there is no image, and this Python runs what
    would run in it. ``root`` has the machine's files. Steps write to ``work``, a folder.
    """

    project: Path
    target: str
    gpu: str
    channel: str
    locked: bool
    gpus: int
    here: bool
    root: Path
    work: Path
    engine: str = "auto"

    @property
    def ranks(self) -> int:
        """The ranks of a training run: as many as there are GPUs."""
        return max(1, self.gpus)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: a command that is repeated as it is typed.

    ``minutes`` is an estimate. A step that is ``inside`` runs in the image. If it is a ``run``, its
    training run is in the folder of its name. ``empties`` is a folder of compiled kernels.
    ``expected`` are figures to compare with: ``predicted_gib``, ``published``.
    """

    name: str
    title: str
    minutes: float
    command: tuple[str, ...]
    needs: str = ""
    inside: bool = False
    run: bool = False
    empties: str = ""
    expected: Mapping[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Seconds after which the step is ended."""
        return 60 * (3 * self.minutes + 1)

    def typed(self, setting: Setting) -> tuple[str, ...]:
        """Return the command as a user types it in the checkout."""
        if not self.inside or setting.here:
            return self.command
        gpus = "none"
        if setting.gpus and setting.root == Path("/"):
            gpus = "all"
        words = ["primus", "run", setting.target, "--engine", setting.engine, "--gpus", gpus]
        words += ["--shm-size", "16g", "-v", f"{setting.work}:{_INSIDE}", "--"]
        return (*words, *self.command)


def steps_of(setting: Setting) -> list[Step]:
    """Return all steps in the order of their worth, which is that in which they run."""
    steps: dict[str, Step] = {}
    for row in _TABLE["steps"]:
        for each in _rows(row, setting):
            step = _step(each, setting)
            if step is not None:
                steps.setdefault(step.name, step)
    return list(steps.values())


def chosen(steps: Sequence[Step], minutes: float) -> list[Step]:
    """Return the steps whose estimates fit into ``minutes``, each with what it needs."""
    taken: list[Step] = []
    names: set[str] = set()
    for step in steps:
        spent = sum(each.minutes for each in taken)
        if spent + step.minutes > minutes or not {step.needs} <= {"", *names}:
            continue
        taken.append(step)
        names.add(step.name)
    return taken


def _rows(row: Mapping[str, Any], setting: Setting) -> Iterator[Mapping[str, Any]]:
    """Yield a row of the table, or those that it stands for."""
    kind = row.get("each")
    if kind == "published":
        for cell in published(setting):
            yield {**row, **cell}
    elif kind == "proxies" and setting.here:
        yield from _proxies(row, setting)
    elif kind is None:
        yield row


def published(setting: Setting) -> list[dict[str, Any]]:
    """Return the rows of AMD's documents for one node of this GPU, each recipe's choices once."""
    path = setting.project / _PUBLISHED
    if not path.is_file():
        return []
    rows = []
    for cell in read_values(path).data["cells"]:
        if setting.gpu in cell["gpus"] and cell["nodes"] == 1 and "with" not in cell:
            rows.append(cell)
    return rows


def _proxies(row: Mapping[str, Any], setting: Setting) -> Iterator[Mapping[str, Any]]:
    for recipe in _TABLE["proxies"]:
        for backend, mode in supported(load.read(load.find(recipe)).settings):
            choices = Choices(backend=backend, mode=mode, gpu=setting.gpu, proxy=True)
            try:
                resolve(recipe, ("ranks=1",), choices)
            except InputError:  # its layout needs several GPUs
                continue
            name = f"proxy-{recipe}-{backend}-{mode}"
            words = f"primus train {recipe} --proxy --gpu {{gpu}} --backend {backend} --mode {mode}"
            words += " --ranks 1 --steps 10 --judge --output {work}/{name} --json"
            yield {
                "name": name,
                "title": f"{recipe} by {backend} ({mode}) trains as the reference does",
                "minutes": row["minutes"],
                "image": True,
                "run": True,
                "command": words,
            }


def _step(row: Mapping[str, Any], setting: Setting) -> Step | None:
    """Return the step of a row; None for one that this setting cannot have."""
    # A training run of a recipe is one in the image, unless its row says otherwise.
    inside = bool(row.get("image", "recipe" in row))
    if setting.here and not inside and not row.get("here"):
        return None
    expected: dict[str, float] = {}
    if "recipe" in row:
        recipe, words = _fitting(row, setting)
        if recipe is None:
            return None
        name = row["recipe"]
        expected = _expected(recipe, row, setting)
        row = {
            **row,
            "name": "-".join([*(row[key] for key in _CHOICES), *words]).replace("=", "-"),
            "title": " ".join([f"{name} trains by {row['backend']} in {row['precision']}", *words]),
            "command": f"{_TABLE['training']} {shlex.join(words)}",
            "needs": "build",
            "run": True,
        }
    needs = row.get("needs", "")
    if setting.here and needs == "build":
        needs = ""
    return Step(
        name=row["name"],
        title=row["title"],
        minutes=row["minutes"],
        command=_words(row, setting, inside=inside),
        needs=needs,
        inside=inside,
        run=row.get("run", False),
        empties=row.get("empties", ""),
        expected=expected,
    )


def _words(row: Mapping[str, Any], setting: Setting, *, inside: bool) -> tuple[str, ...]:
    """Return the words of a row's command."""
    work = str(setting.work)
    python = shlex.quote(sys.executable)
    if inside and not setting.here:
        work = _INSIDE
        python = "python3"
    lock = f"--channel {setting.channel}"
    if setting.locked:
        lock = "--check"
    values = {
        **row,
        "target": setting.target,
        "gpu": setting.gpu,
        "ranks": setting.ranks,
        "root": shlex.quote(str(setting.root)),
        "work": shlex.quote(work),
        "python": python,
        "lock": lock,
        "first": f"--backend {_backend(setting)} model.layers={_LAYERS}",
    }
    return tuple(shlex.split(row["command"].format(**values)))


def _backend(setting: Setting) -> str:
    """Return the first backend for pretraining that the image, or this Python, has."""
    for name in ("torchtitan", "megatron"):
        if not setting.here or all(map(importable, backends()[name].packages)):
            return name
    return "fsdp"


def _fitting(row: Mapping[str, Any], setting: Setting) -> tuple[Recipe | None, tuple[str, ...]]:
    """Return the recipe of a row if it trains on this number of GPUs, and words to add.

    The words are the row's ``settings``. A row with ``layers`` may have that many layers if the
    whole model does not fit.
    """
    memory = gpu_bytes(setting.gpu)
    settings = row.get("settings", "").format(ranks=setting.ranks).split()
    attempts = [tuple(settings)]
    if "layers" in row:
        attempts.append((*settings, f"model.layers={row['layers']}"))
    choices = Choices(
        backend=row["backend"], mode=row["mode"], precision=row["precision"], gpu=setting.gpu
    )
    for words in attempts:
        try:
            recipe = resolve(row["recipe"], (f"ranks={setting.ranks}", *words), choices)
        except InputError:
            continue
        if memory and fits(predict(recipe), USABLE * memory):
            return recipe, words
    return None, ()


def _expected(recipe: Recipe, row: Mapping[str, Any], setting: Setting) -> dict[str, float]:
    """Return the predicted memory of a run, and what AMD publishes as its speed."""
    figures = {"predicted_gib": predict(recipe).peak / _GIB}
    for cell in published(setting):
        measured = cell.get("measured", {}).get(setting.gpu)
        if measured and all(cell[key] == row[key] for key in _CHOICES):
            figures["published"] = measured
    return figures
