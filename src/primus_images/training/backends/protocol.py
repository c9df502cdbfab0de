"""What a backend does before its ranks start: it checks data and weights, and writes files.

What it computes from a recipe alone is in ``primus_images.recipes.rules``. Nothing here needs
torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from primus_images.errors import InputError
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.weights import config_of
from primus_images.training.backends import text
from primus_images.training.backends.finetune import backend as finetune
from primus_images.training.backends.flux import backend as flux
from primus_images.training.backends.torchtitan import render as torchtitan
from primus_images.training.run.job import Job


def _check_initial(recipe: Recipe) -> None:
    """Check the weights that torchtitan or Megatron start from.

    Unlike transformers, these have one activation.
    """
    folder = finetune.source_of(recipe.find(f"{recipe.backend}.weights", "random"), offline=False)
    if recipe.find(torchtitan.INITIAL, False):
        folder = recipe.asset("tokenizer")
    if folder is None:
        return
    finetune.check(folder, recipe.architecture)
    file, config = config_of(folder)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise InputError(
            f"{recipe.backend} computes SiLU, and hidden_act of the weights is {activation}",
            where=f"{file}: hidden_act",
            hint="--backend finetune computes it",
        )


def _no_check(_recipe: Recipe) -> None:
    """Accept every recipe."""


def _no_tokens(_job: Job, _shared: Path | None, _progress: text.Progress) -> None:
    """Write nothing: the data are no text."""


def _no_files(_job: Job) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The start of one backend's runs. The defaults are those of our own loop on text.

    The checks raise InputError if the data or weights are missing, damaged, or not the recipe's.
    ``tokenize`` writes the tokens for the ranks to the job's ``cache``, and takes and keeps them in
    a folder that runs share. ``files`` returns name → text of the files that the ranks read besides
    ``job.json``.
    """

    check_data: Callable[[Recipe], None] = text.check
    tokenize: Callable[[Job, Path | None, text.Progress], None] = text.tokenize
    check_weights: Callable[[Recipe], None] = _no_check
    files: Callable[[Job], Mapping[str, str]] = _no_files


BACKENDS: Mapping[str, Backend] = {
    "torchtitan": Backend(check_weights=_check_initial, files=torchtitan.files),
    "megatron": Backend(check_weights=_check_initial),
    "finetune": Backend(check_weights=finetune.check_weights),
    "flux": Backend(
        check_data=flux.check_data, tokenize=_no_tokens, check_weights=flux.check_weights
    ),
    "fsdp": Backend(),
}


def backend_of(recipe: Recipe) -> Backend:
    """Return the recipe's backend."""
    return BACKENDS[recipe.backend]
