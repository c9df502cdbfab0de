"""A resolved recipe: one flat table of settings, each with its origin."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from primus_images.errors import InputError
from primus_images.files import below, plain
from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.contents import content_of
from primus_images.recipes.digest import digest_of_recipe
from primus_images.recipes.indexed import TOKENS, is_index, named, tokens_of
from primus_images.recipes.load import beside
from primus_images.recipes.mixture import is_mixture, parts_of
from primus_images.recipes.schema import Backend, backends
from primus_images.recipes.setting import CHOICES, WORDS, Choices, Setting, Value
from primus_images.yamlfile import section

# An asset of this name is not a file: its tokens are made from the seed.
MOCK = "mock"
_CORPORA = ("assets.corpus", "eval.corpus")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth", ".pt")

Kind = TypeVar("Kind", str, int, float, bool)


class _Property(Generic[Kind]):
    """The value of a choice, or of a setting that every backend has under the name ``short``."""

    def __init__(self, short: str, default: Kind, doc: str) -> None:
        self._short = short
        self._default: Kind = default
        self.__doc__ = doc

    def __get__(self, recipe: "Recipe", _: type) -> Kind:
        key = self._short
        if key not in CHOICES:
            key = recipe.knows.key(key)
        return recipe.find(key, self._default)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train. Keys of ``settings`` are dotted: ``torchtitan.training.steps``.

    ``overrides`` and ``choices`` are the user's; with both, the same recipe can be resolved again.
    ``precisions`` are all that it supports with this backend in this mode. ``by_path``: the user
    gave a path. ``files`` were read. ``says`` are sentences about how an experiment file was read.
    """

    name: str
    path: Path
    settings: Mapping[str, Setting]
    overrides: tuple[str, ...] = ()
    choices: Choices = field(default_factory=Choices)
    precisions: tuple[str, ...] = ()
    by_path: bool = False
    files: tuple[Path, ...] = ()
    says: tuple[str, ...] = ()

    def get(self, key: str, kind: type[Kind]) -> Kind:
        """Return the value of ``key``. Raises InputError if its type is not ``kind``.

        A whole number is accepted as float.
        """
        setting = self.settings[key]
        value = setting.value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(
                f"{key} must be {WORDS[kind.__name__]}, not {value!r}", where=setting.origin
            )
        return value

    def find(self, key: str, default: Kind) -> Kind:
        """Return the value of ``key``, or ``default`` if the recipe does not set it."""
        if key in self.settings:
            return self.get(key, type(default))
        return default

    def section(self, prefix: str) -> dict[str, Value]:
        """Return all values below ``prefix`` in the recipe's order. Keys omit the prefix."""
        return {key: setting.value for key, setting in section(self.settings, prefix).items()}

    def asset(self, key: str) -> Path | None:
        """Return the path that ``key`` names, or None if it is not a file (``mock``, ``hf:…``).

        ``assets.`` can be omitted. Paths are relative to the recipe; on the command line, first to
        the current folder.
        """
        if "." not in key:
            key = f"assets.{key}"
        name = self.get(key, str)
        if name == MOCK or name.startswith("hf:"):
            return None
        here = plain(Path(name))
        there = beside(self.path, name)
        if key in _CORPORA:
            here = named(here)
            there = named(there)
        if self.settings[key].typed and (here.exists() or not there.exists()):
            return here
        return there

    backend = _Property("backend", "", "The name of the backend.")
    mode = _Property("mode", "", "``pretrain``, ``full`` or ``lora``.")
    precision = _Property(
        "precision", "", "That of matrix products: ``fp32``, ``bf16``, ``fp8`` or ``mxfp8``."
    )
    gpu = _Property("gpu", "", "The GPU generation that the recipe is resolved for, or ``cpu``.")
    steps = _Property("steps", 0, "Optimizer steps of the whole run.")
    seq_len = _Property("seq_len", 0, "Tokens of one sequence.")
    local_batch = _Property("local_batch", 0, "Sequences (or images) per rank and forward pass.")
    seed = _Property("seed", -1, "Seed of weights and data; −1 if none is set.")
    deterministic = _Property(
        "deterministic", False, "Whether the recipe requests deterministic kernels only."
    )

    @property
    def knows(self) -> Backend:
        """The backend's entry in the table of backends."""
        return backends()[self.backend]

    @cached_property
    def architecture(self) -> Architecture:
        """The model's sizes."""
        return architecture(self.section("model"))

    @property
    def global_batch(self) -> int:
        """Sequences (or images) of one optimizer step over all ranks."""
        batch = self.find(self.knows.key("global_batch"), -1)
        if batch > 0:
            return batch
        return self.local_batch * self.data_parallel

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return self.global_batch // (self.local_batch * self.data_parallel)

    @property
    def checkpoint_interval(self) -> int:
        """The steps between two checkpoints; 0 if none are written by steps."""
        return self.find(self.knows.key("checkpoint"), 0)

    @property
    def checkpoint_minutes(self) -> float:
        """The minutes between two checkpoints; 0 if none are written by time."""
        return self.find("saving.minutes", 0.0)

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.get("ranks", int) * self.get("nodes", int)

    def degree(self, kind: str) -> int:
        """Return a parallel degree: ``tp``, ``pp``, ``cp``, ``ep`` or ``replicas``."""
        key = self.knows.degrees.get(kind)
        if key:
            return self.find(f"{self.backend}.{key}", 1)
        return 1

    @property
    def data_parallel(self) -> int:
        """The number of ranks with different data: world size ÷ (TP · PP · CP)."""
        return self.world_size // math.prod(self.degree(kind) for kind in ("tp", "pp", "cp"))

    @property
    def unsharded(self) -> bool:
        """Whether ranks share layers (TP, PP), and none is left to shard weights over."""
        shards = self.data_parallel // self.degree("replicas") * self.degree("cp")
        return shards == 1 and self.degree("tp") * self.degree("pp") > 1

    @property
    def weights(self) -> Path | None:
        """The folder of the weights to start from; None if they are random or come from the hub."""
        name = self.find(f"{self.backend}.weights", "random")
        if name == "random" or name.startswith("hf:"):
            return None
        return Path(name)

    @cached_property
    def asset_digests(self) -> Mapping[str, str]:
        """Asset → sha256 over the names and bytes of its files; empty if it is no file."""
        digests = {}
        for key in sorted(self.section("assets")):
            root = self.asset(key)
            digests[key] = ""
            if root is not None:
                digests[key] = _digest(root, without=_WEIGHTS if key == "tokenizer" else ())
                if key == "corpus" and is_mixture(str(root)):
                    digests[key] = _digest_of_mixture(root, digests[key])
        return digests

    @property
    def digest(self) -> str:
        """sha256 over values and assets. Equal digests mean equal training."""
        values = {key: setting.value for key, setting in self.settings.items()}
        return digest_of_recipe(values, self.asset_digests)


def _digest_of_mixture(file: Path, own: str) -> str:
    """Return sha256 over a mixture, of digest ``own``, and its corpora; "" if one is no file."""
    hasher = hashlib.sha256(own.encode())
    for part in parts_of(file):
        if part.name.startswith("hf:"):
            return ""
        hasher.update(_digest(Path(part.name), ()).encode())
    return hasher.hexdigest()


def _digest(root: Path, without: Sequence[str]) -> str:
    """Return sha256 over the files below ``root``, without those with these suffixes."""
    if root.is_dir():
        files = sorted(path for path in below(root) if path.is_file())
        names = {file: file.relative_to(root).as_posix() for file in files}
    else:
        names = {root: "."}
        if is_index(root):
            names[tokens_of(root)] = TOKENS
    hasher = hashlib.sha256()
    for file, name in names.items():
        if file.suffix not in without:
            hasher.update(f"{name} {content_of(file)}\n".encode())
    return hasher.hexdigest()
