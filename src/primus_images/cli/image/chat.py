"""Talk to a model that a run exported, on this machine."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from primus_images.cli.verb import Options, answer as printed, note
from primus_images.errors import HostError, InputError
from primus_images.terminal import harmless
from primus_images.training.text.rows import first_line
from primus_images.turbo.optimizations import importable

_PACKAGES = ("torch", "transformers", "peft")

# What shows a part of an answer as soon as it is written.
Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Options):
    """The options of ``chat``."""

    run: Path
    system: str | None
    max_tokens: int


class Model(Protocol):
    """A model that answers."""

    @property
    def chats(self) -> bool:
        """Whether it has a chat template; otherwise, it continues text."""

    def reply(self, turns: list[dict[str, str]], max_tokens: int, show: Show) -> str:
        """Return the answer to ``turns``, of at most ``max_tokens`` tokens.

        Its parts are shown while they are written.
        """


def chat(options: ChatOptions) -> int:
    """Talk to the model that a run trained: each line of input is a question."""
    folder = weights_of(options.run)
    for package in _PACKAGES:
        if not importable(package):
            raise HostError(
                f"{package} is not installed", hint="run `primus chat` in a container of an image"
            )
    note(options, f"primus: loading {folder}")
    model = _loaded(folder)
    if options.system and not model.chats:
        raise InputError(
            f"{folder} has no chat template, so it takes no --system",
            hint="leave it out: the model continues text",
        )
    if sys.stdin.isatty():
        note(options, "primus: a question a line; Ctrl-D ends")
    pairs = []
    for question, reply in _conversation(model, options):
        pairs.append({"question": question, "answer": reply})
    return printed(options, {"folder": str(folder), "turns": pairs}, [])


def weights_of(run: Path) -> Path:
    """Return the folder of weights that ``run`` is, or that it has. Raises InputError if none."""
    for folder in (run, run / "weights"):
        for name in ("config.json", "adapter_config.json"):
            if (folder / name).is_file():
                return folder
    if not run.is_dir():
        raise InputError(f"there is no folder {run}", hint="name a run, or a folder of weights")
    hint = "name a run that exported weights, such as one of `primus finetune`"
    if (run / "checkpoint").is_dir():
        hint = f"`primus export {run} DIR` writes those of its checkpoint; then `primus chat DIR`"
    raise InputError("the folder has no exported weights", where=run, hint=hint)


def _conversation(model: Model, options: ChatOptions) -> Iterator[tuple[str, str]]:
    """Yield each question and its answer, which is shown as it is written."""
    turns: list[dict[str, str]] = []
    if options.system:
        turns.append({"role": "system", "content": options.system})
    for question in _questions():
        if not model.chats:
            turns = []
        turns.append({"role": "user", "content": question})
        show: Show = _show
        if options.json:
            show = _hide
        reply = model.reply(turns, options.max_tokens, show)
        turns.append({"role": "assistant", "content": reply})
        show("\n")
        yield question, reply


def _questions() -> Iterator[str]:
    """Yield the lines of standard input that are not blank."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(text: str) -> None:
    print(harmless(text), end="", flush=True)


def _hide(_text: str) -> None:
    pass


def _loaded(folder: Path) -> Model:
    # Seam "torch": no other verb of this module needs it in this process.
    from primus_images.training.backends.finetune.talk import Talk

    try:
        return Talk(folder)
    except Exception as error:  # transformers and PEFT raise many kinds
        raise InputError(
            f"the weights cannot be loaded: {first_line(error)}",
            where=folder,
            hint="name a folder that transformers (for adapters: PEFT) can load",
        ) from error
