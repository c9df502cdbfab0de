"""The plan of a job on several nodes, which is printed before anything is submitted."""

import re
from collections.abc import Iterable, Mapping, Sequence
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

    ``options`` are more of these arguments.
    """

    recipe: Recipe
    options: tuple[str, ...] = ()

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
        if self.recipe.gpu == CPU:
            return None
        return predict(self.recipe).peak

    @property
    def resumable(self) -> int:
        """An attempt continues from a checkpoint before this step.

        For epochs, it is any; a judged run begins at step 1.
        """
        if "--judge" in self.options:
            return 0
        if "epochs" in self.recipe.settings:
            return 2**62
        return self.recipe.steps

    def warning(self) -> str | None:
        """Return a sentence about checkpoints that the job never writes."""
        interval = self.recipe.checkpoint_interval
        if "epochs" in self.recipe.settings or interval < self.recipe.steps:
            return None
        return (
            f"a checkpoint is due every {interval} steps, and the job ends at step "
            f"{self.recipe.steps}: {self.recipe.knows.key('checkpoint')} or --steps"
        )

    @property
    def mesh(self) -> dict[str, int]:
        """Parallel degrees above 1: data, replicas, tensor, pipeline, context, expert."""
        degrees = {"dp": self.recipe.data_parallel}
        for kind in ("replicas", "tp", "pp", "cp", "ep"):
            if self.recipe.degree(kind) > 1:
                degrees[kind] = self.recipe.degree(kind)
        return degrees

    @cached_property
    def command(self) -> tuple[str, ...]:
        """The arguments after ``primus``; a node adds its own --output and --resume-from.

        Every choice is explicit, so that it does not depend on what a node detects.
        """
        recipe = self.recipe
        name = recipe.name
        if recipe.by_path:
            # A file of the user is mounted at the same path.
            name = str(recipe.path)
        choices = [f"--{choice}={recipe.get(choice, str)}" for choice in CHOICES[:4]]
        proxy = "proxy=false"
        if recipe.get("proxy", bool):
            proxy = "--proxy"
        words = [word for word in recipe.overrides if not word.startswith("proxy=")]
        command = ("train", name, *choices, f"--nodes={self.nodes}", *self.options, proxy, *words)
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
            "checkpoint_interval": self.recipe.checkpoint_interval,
            "checkpoint_minutes": self.recipe.checkpoint_minutes,
            "memory_bytes_per_gpu": self.memory,
        }

    def lines(self) -> list[str]:
        """Return the plan as text, one line per subject."""
        recipe = self.recipe
        mesh = " × ".join(f"{name} {degree}" for name, degree in self.mesh.items())
        batch = f"{recipe.global_batch:,} images"
        if not recipe.architecture.of_images:
            tokens = recipe.global_batch * recipe.seq_len
            batch = f"{recipe.global_batch:,} sequences, {tokens:,} tokens"
        lines = [
            f"{recipe.name}: {recipe.backend}, {recipe.mode}, {recipe.precision}, {recipe.gpu}",
            f"nodes        {self.nodes} × {self.ranks} ranks = {recipe.world_size}",
            f"mesh         {mesh}",
            f"step         {batch}; gradient accumulation {recipe.accumulation}",
            f"memory       {self._memory_line()}",
        ]
        return [*lines, f"checkpoints  {self._checkpoints()}"]

    def _checkpoints(self) -> str:
        if self.recipe.checkpoint_interval:
            return f"every {self.recipe.checkpoint_interval} steps"
        if self.recipe.checkpoint_minutes:
            return f"every {self.recipe.checkpoint_minutes:.3g} minutes"
        key = self.recipe.knows.key("checkpoint")
        return f"none: a restarted job begins at step 1 ({key}=N writes them)"

    def _memory_line(self) -> str:
        if self.memory is None:
            return "not predicted"
        gib = f"{self.memory / 2**30:.1f}"
        whole = gpu_bytes(self.recipe.gpu)
        if whole:
            gib = f"{gib} of {whole / 2**30:.0f}"
        return f"{gib} GiB per GPU, predicted"


def bash(name: str, variables: Mapping[str, object], command: str) -> str:
    """Return the script ``NAME.sh`` of this package, with what it reads before it.

    It reads ``variables``, and calls ``run_ranks``, which is ``command``.
    """
    folder = Path(__file__).parent
    lines = [f"{key}={value}" for key, value in variables.items()]
    lines.append(f"run_ranks() {{ exec {command}; }}")
    for part in ("attempt", name):
        lines.append((folder / f"{part}.sh").read_text(encoding="utf-8"))
    return "\n".join(lines)


def vendor(gpu: str) -> str:
    """Return ``amd`` or ``nvidia``; empty for ``cpu``."""
    if gpu == CPU:
        return ""
    return arch_of(generation(gpu)).vendor


def refuse_unfit(options: Mapping[str, object], job: str) -> None:
    """Raise InputError for an option that does not match its pattern in ``options.yaml``.

    The patterns are those of ``job``. An empty text is no option, and always matches.
    """
    for field, pattern, message, hint in _OPTIONS[job]:
        value = options[field]
        words: Iterable[object] = ()
        if isinstance(value, tuple):
            words = value
        elif value:
            words = (value,)
        for word in words:
            if not re.fullmatch(pattern, str(word)):
                raise InputError(message.format(str(word)), hint=hint)


def refuse_secrets(words: Sequence[str], hint: str) -> None:
    """Raise InputError if a word looks like a secret: others can read scripts and manifests.

    ``hint`` tells how to pass a secret instead.
    """
    for word in words:
        name, equals, value = word.partition("=")
        named = value and _NAME.fullmatch(name) and _SECRET_NAME.search(name)
        if not named and not _SECRET.search(word):
            continue
        shown = f"{word[:6]}…"
        if equals:
            shown = name[:40]
        raise InputError(
            f"{shown}: this looks like a secret, and others can read job files", hint=hint
        )
