"""The plan of a job on several nodes: mesh, batch and tokens per step. Printed before anything is
submitted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import gpu_bytes, predict
from primus_images.recipes.setting import CHOICES
from primus_images.refusals import refusal
from primus_images.yamlfile import read_values

# Patterns of secrets, which must not be written to a script or manifest: Hugging Face, W&B, GitHub,
# AWS, bearer tokens.
_SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|\b[0-9a-f]{40}\b|Bearer \S+"
)
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS)$", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTIONS: Any = read_values(Path(__file__).with_name("options.yaml")).data


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved recipe, and the arguments of ``primus train`` that start it on each node.

    ``options`` are more of these arguments. ``rate`` is the measured tokens (or images) per second
    and GPU; 0: the recipe's reference.
    """

    recipe: Recipe
    options: tuple[str, ...] = ()
    rate: float = 0.0

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return self.recipe.get("nodes", int)

    @property
    def ranks(self) -> int:
        """The number of processes on each machine; on GPUs, each has one."""
        return self.recipe.get("ranks", int)

    @cached_property
    def memory(self) -> float | None:
        """The predicted peak in bytes per GPU; None for a CPU."""
        if self.recipe.gpu != CPU:
            return predict(self.recipe).peak
        return None

    @property
    def resumable(self) -> int:
        """An attempt continues from a checkpoint before this step (any, for epochs). A judged run
        begins at step 1.
        """
        if "--judge" in self.options:
            return 0
        if "epochs" in self.recipe.settings:
            return 2**62
        return self.recipe.steps

    @property
    def checkpoint_interval(self) -> int:
        """The steps between two checkpoints; 0 if none are written."""
        return self.recipe.find(self.recipe.knows.key("checkpoint"), 0)

    @cached_property
    def step_seconds(self) -> float | None:
        """The seconds of a step at the rate measured for the recipe on one node; None if none was
        measured.
        """
        rate = self.rate or self.recipe.find("validation.throughput", 0.0)
        if self.recipe.architecture.of_images:
            unit = 1
        else:
            unit = self.recipe.seq_len
        if rate:
            return self.recipe.global_batch * unit / (rate * self.recipe.world_size)
        return None

    def warnings(self, limit: float | None = None) -> list[str]:
        """Return sentences about a job that does not fit its options. ``limit``: the seconds that
        it may run.
        """
        if "epochs" in self.recipe.settings:
            return []
        steps = self.recipe.steps
        every = self.checkpoint_interval
        key = self.recipe.knows.key("checkpoint")
        sentences = []
        if every >= steps:
            sentences.append(refusal("late_checkpoint", every=every, steps=steps, key=key).message)
        if limit is None or self.step_seconds is None:
            return sentences
        needed = self.step_seconds * steps
        if needed > limit:
            then = "the job never ends"
            if 0 < every < steps:
                then = "the job is cut off and continues from a checkpoint"
            sentences.append(
                f"{steps} steps take about {span(needed)}, and the limit is {span(limit)}: {then}"
            )
        elif needed < limit / 4:
            whole = span(limit)
            sentences.append(
                f"{steps} steps take about {span(needed)} of the {whole}: --train-for {whole} "
                "uses them"
            )
        return sentences

    @property
    def mesh(self) -> dict[str, int]:
        """Parallel degrees above 1: data, replicas, tensor, pipeline, context, expert."""
        degrees = {kind: self.recipe.degree(kind) for kind in ("replicas", "tp", "pp", "cp", "ep")}
        return {"dp": self.recipe.data_parallel} | {
            kind: degree for kind, degree in degrees.items() if degree > 1
        }

    @cached_property
    def command(self) -> tuple[str, ...]:
        """The arguments after ``primus``; a node adds its own --output and --resume-from.

        Every choice is explicit, so that it does not depend on what a node detects.
        """
        recipe = self.recipe
        chosen = [f"--{name}={recipe.get(name, str)}" for name in CHOICES[:4]]
        proxy = "proxy=false"
        if recipe.get("proxy", bool):
            proxy = "--proxy"
        words = [word for word in recipe.overrides if not word.startswith("proxy=")]
        # A file of the user is mounted at the same path.
        if recipe.by_path:
            name = str(recipe.path)
        else:
            name = recipe.name
        command = ("train", name, *chosen, f"--nodes={self.nodes}", *self.options, proxy, *words)
        refuse_secrets(
            command, "export it in the shell that starts the job, and leave it out of the settings"
        )
        return command

    def document(self) -> dict[str, Any]:
        """Return the plan for JSON output; sizes in tokens, memory in bytes."""
        recipe = self.recipe
        return {
            "recipe": recipe.name,
            "backend": recipe.backend,
            "mode": recipe.mode,
            "precision": recipe.precision,
            "gpu": recipe.gpu,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks,
            "world_size": recipe.world_size,
            "mesh": self.mesh,
            "global_batch": recipe.global_batch,
            "accumulation": recipe.accumulation,
            "tokens_per_step": recipe.global_batch * recipe.seq_len,
            "steps": None if "epochs" in recipe.settings else recipe.steps,
            "checkpoint_interval": self.checkpoint_interval,
            "memory_bytes_per_gpu": self.memory,
        }

    def lines(self) -> list[str]:
        """Return the plan as text, one line per subject."""
        recipe = self.recipe
        mesh = " × ".join(f"{name} {degree}" for name, degree in self.mesh.items())
        unit = "sequences"
        if recipe.architecture.of_images:
            unit = "images"
        if unit == "images":
            tokens = ""
        else:
            tokens = f", {recipe.global_batch * recipe.seq_len:,} tokens"
        has = gpu_bytes(recipe.gpu)
        of = ""
        if has:
            of = f" of {has / 2**30:.0f}"
        memory = "not predicted"
        if self.memory is not None:
            memory = f"{self.memory / 2**30:.1f}{of} GiB per GPU, predicted"
        every = self.checkpoint_interval
        seconds = self.step_seconds
        return [
            f"{recipe.name}: {recipe.backend}, {recipe.mode}, {recipe.precision}, {recipe.gpu}",
            f"nodes        {self.nodes} × {self.ranks} ranks = {recipe.world_size}",
            f"mesh         {mesh}",
            f"step         {recipe.global_batch:,} {unit}{tokens}; gradient accumulation "
            f"{recipe.accumulation}",
            f"memory       {memory}",
            *(
                [f"time         {recipe.steps} steps in about {span(seconds * recipe.steps)}"]
                if seconds and "epochs" not in recipe.settings
                else []
            ),
            f"checkpoints  every {every} steps"
            if every
            else (
                "checkpoints  none: a restarted job begins at step 1 "
                f"({recipe.knows.key('checkpoint')}=N writes them)"
            ),
        ]


def bash(name: str, variables: Mapping[str, object], command: str) -> str:
    """Return the script ``NAME.sh`` of this package after what it reads: variables, and
    ``run_ranks``, its command.
    """
    texts = (
        Path(__file__).with_name(f"{part}.sh").read_text(encoding="utf-8")
        for part in ("attempt", name)
    )
    head = [f"{key}={value}" for key, value in variables.items()]
    return "\n".join([*head, f"run_ranks() {{ exec {command}; }}", *texts])


def span(seconds: float) -> str:
    """Return a duration in its largest unit, as ``--train-for`` reads it: ``90m``, ``12h`` or
    ``2d``.
    """
    unit, size = next(
        (pair for pair in (("d", 86400), ("h", 3600), ("m", 60)) if seconds >= 2 * pair[1]),
        ("s", 1),
    )
    return f"{seconds / size:.3g}{unit}"


def vendor(gpu: str) -> str:
    """Return ``amd`` or ``nvidia``; empty for ``cpu``."""
    if gpu == CPU:
        return ""
    return arch_of(generation(gpu)).vendor


def refuse_unfit(options: Mapping[str, object], job: str) -> None:
    """Raise InputError for an option that does not match its pattern below ``job`` in
    ``options.yaml``.

    An empty text is no option, and always matches.
    """
    for field, pattern, message, hint in _OPTIONS[job]:
        several = options[field]
        for word in map(str, several if isinstance(several, tuple) else filter(None, [several])):
            if not re.fullmatch(pattern, word):
                raise InputError(message.format(word), hint=hint)


def refuse_secrets(words: Sequence[str], hint: str) -> None:
    """Raise InputError if a word looks like a secret, because other people can read scripts and
    manifests.

    ``hint`` tells how to pass a secret instead.
    """
    for word in words:
        name, equals, value = word.partition("=")
        if _SECRET.search(word) or (
            equals and value and _NAME.fullmatch(name) and _SECRET_NAME.search(name)
        ):
            if equals:
                shown = name[:40]
            else:
                shown = f"{word[:6]}…"
            raise InputError(
                f"{shown}: this looks like a secret, and others can read job files", hint=hint
            )
