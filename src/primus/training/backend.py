"""What a backend does outside its ranks: one class of rules, with the behaviour of our own loop as the default.

The folder of each backend has a module ``backend`` that defines ``RULES``. Facts that need no code are in
``recipes/backends.yaml``. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from primus.errors import InputError
from primus.recipes.mesh import Fault
from primus.recipes.recipe import MOCK, Recipe

if TYPE_CHECKING:
    from primus.training.job import Job

# The precision of matrix products in a dtype of torch.
DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16"}


class Rules:
    """The rules of a backend that trains text with our own loop. Other backends override what differs.

    ``memory`` names the module that predicts memory, a :class:`primus.recipes.rules.MemoryModel`. With
    ``divides_documents``, every data-parallel rank needs a document of its own.
    """

    memory = "primus.training.loop.memory"
    divides_documents = False

    def precision(self, recipe: Recipe) -> str:
        """Return the precision of the linear layers' matrix products, derived from the backend's own settings."""
        if recipe.find(f"{recipe.backend}.training.fp8", "none") != "none":
            return "fp8"
        dtype = recipe.find(f"{recipe.backend}.training.dtype", "bfloat16")
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        """Return whether torch.compile compiles the model's blocks."""
        return recipe.find(f"{recipe.backend}.training.compile", False)

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Return what the recipe asks for and the backend does not compute: key, reason and remedy."""
        return ()

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return why the reference cannot repeat such a run of this backend, in a sentence, or None."""
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether the reference can repeat what each block computes."""
        return not self.compiled(recipe) and recipe.degree("cp") == 1

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the fields of the ranks' layout that a resumed run must share with the one that saved."""
        return {}

    def files(self, job: Job) -> Mapping[str, str]:
        """Return name → text of the files that the ranks read besides ``job.json``."""
        return {}

    def arguments(self, job: Job) -> list[str]:
        """Return the command-line arguments of each rank."""
        return [str(job.output)]

    def check_data(self, recipe: Recipe) -> None:
        """Read a sample of the corpus. Raises InputError, with file and line, if the ranks could not read it."""
        path, tokenizer = recipe.asset("corpus"), recipe.asset("tokenizer")
        where = recipe.settings["assets.tokenizer"].origin
        if recipe.get("assets.tokenizer", str) == MOCK and recipe.get("assets.corpus", str) != MOCK:
            raise InputError(
                "assets.tokenizer is mock, but the corpus is text", where=where,
                hint="set assets.tokenizer=FOLDER to tokenize the corpus, or assets.corpus=mock for synthetic tokens",
            )  # fmt: skip
        if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
            raise InputError(
                f"{tokenizer} has no tokenizer.json", where=where,
                hint="set assets.tokenizer to a folder that contains tokenizer.json",
            )  # fmt: skip
        if path is not None:
            # Seam "data": only a job reads its corpus.
            from primus.training import corpus

            column = recipe.find("data.column", "") or None
            given = corpus.Corpus(path=path, column=column, tokenizer=tokenizer)
            corpus.check(given, ranks=recipe.data_parallel if self.divides_documents else 1)

    def check_weights(self, recipe: Recipe) -> None:
        """Raise InputError if the initial weights are missing, damaged or of another model."""
