"""Why a job failed: the exception of the first rank that failed."""

import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.errors import PrimusError
from primus_images.files import text_if_readable, write_file
from primus_images.yamlfile import read_values

_FOLDER = "failures"
_LONGEST = 600
_TABLE: Mapping[str, Any] = read_values(Path(__file__).with_name("failure.yaml")).data
PATTERNS = {name: re.compile(text) for name, text in _TABLE["patterns"].items()}
_ADVICE = {re.compile(row["text"]): row["do"] for row in _TABLE["advice"].values()}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``text`` is the last line of the exception; ``rank`` is None if it is unknown."""

    text: str
    rank: int | None = None

    @property
    def derived(self) -> bool:
        """Whether it only reports that another rank is gone."""
        return bool(PATTERNS["derived"].search(self.text))

    def __str__(self) -> str:
        """Return the text with advice."""
        text = PATTERNS["after_free_memory"].sub("", self.text)
        if self.rank is not None:
            text = f"rank {self.rank}: {text}"
        for pattern, advice in _ADVICE.items():
            if pattern.search(self.text):
                return f"{text} ({advice})"
        return text


# For a job whose files do not contain the cause.
DISK_FULL = Failure(text="No space left on device")
_DISK_FULL = re.compile(_TABLE["advice"]["disk"]["text"])


@contextmanager
def noting(output: Path) -> Iterator[None]:
    """In a rank: note an exception of the block. A fatal signal leaves a :func:`stack_file`."""
    rank = int(os.environ.get("RANK", "0"))
    path = stack_file(output, rank)
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A file per rank, because on the standard error that all ranks share stacks would mix.
            faulthandler.enable(stack.enter_context(path.open("w", encoding="utf-8")))
            stack.callback(faulthandler.disable)
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                note(output, rank, text_of(error))
            raise


def stack_file(output: Path, rank: int) -> Path:
    """Return the file for the stack of a rank that a fatal signal ends. It is empty until then."""
    return output / "cache" / "stacks" / f"rank-{rank}.txt"


def note(output: Path, rank: int, text: str) -> None:
    """Write ``text`` as the failure of ``rank``, with the time, to the job's folder."""
    with suppress(OSError):
        content = json.dumps({"time": time.time(), "rank": rank, "text": text})
        write_file(output / "cache" / _FOLDER / f"{rank}.json", content)


def known(output: Path) -> bool:
    """Return whether a rank of the job, on any of its nodes, has noted its failure."""
    return any((output / "cache" / _FOLDER).glob("*.json"))


def share(output: Path, log: Path, patience: float) -> None:
    """Exchange the failures of a job between its nodes, whose folder is ``output``.

    Notes the ranks that a signal ended here, as this node's ``log`` shows: they cannot, and ranks
    of other nodes only notice that they are gone. Waits up to ``patience`` seconds for a note that
    says more than that.
    """
    noted = {failure.rank for failure in _notes(output)}
    for failure in _signalled(_lines(log)):
        if failure.rank is not None and failure.rank not in noted:
            note(output, failure.rank, failure.text)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and all(failure.derived for failure in _notes(output)):
        time.sleep(0.2)


def text_of(error: BaseException) -> str:
    """Return the last line of the traceback of ``error``, and of the error that it came from."""
    if isinstance(error, PrimusError):
        return " ".join(str(error).split())
    if isinstance(error, SystemExit):
        return str(error.code)
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    text = _last_line("".join(traceback.format_exception_only(error)))
    if first is error:
        return text
    return f"{text}; raised from {_last_line(''.join(traceback.format_exception_only(first)))}"


def _last_line(text: str) -> str:
    """Return the line of an exception's text that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    inner = any("Traceback (most recent call last)" in line for line in lines[1:])
    if inner or any(line.startswith("Original Traceback") for line in lines):
        exceptions = [line for line in lines if PATTERNS["exception"].match(line)]
        last = [*lines, *exceptions][-1]
    # The first line of some messages only announces the rest.
    elif lines and lines[0].endswith(":"):
        last = " ".join(lines[:2])
    else:
        last = "".join(lines[:1])
    return last[:_LONGEST]


def cause(output: Path, exit_code: int, shared: Path | None = None) -> Failure | None:
    """Return the first cause of a job that ended with ``exit_code`` (negative: a signal).

    None if it is 0. ``shared`` is the folder with the notes of all nodes if it is not ``output``. A
    full disk comes first, then the earliest note of a rank that does more than report that another
    one is gone, then a rank or the launcher that a signal ended, then the log's first exception,
    then its last line.
    """
    if exit_code == 0:
        return None
    lines = _lines(output / "log.txt")
    notes = _notes(output) or _notes(shared or output)
    raised = []
    launcher = []
    for line in lines:
        exception = PATTERNS["exception"].match(line.strip())
        if exception:
            raised.append(Failure(text=exception["text"][:_LONGEST]))
        ended = PATTERNS["launcher"].match(line)
        if ended:
            launcher.append(Failure(text=ended["text"]))
    first_hand = [failure for failure in notes if not failure.derived]
    # On a full disk, every writer fails in its own way, and checkpointing wraps all these errors.
    full = [failure for failure in [*first_hand, *raised] if _DISK_FULL.search(failure.text)]
    first_raised = [failure for failure in raised if not failure.derived]
    signalled = _signalled(lines)
    for causes in (full, first_hand, signalled, launcher, first_raised, notes, raised):
        if causes:
            return causes[0]
    return _by_code(exit_code, lines)


def _lines(log: Path) -> list[str]:
    return PATTERNS["colour"].sub("", text_if_readable(log)).splitlines()


def _by_code(exit_code: int, lines: list[str]) -> Failure:
    number = exit_code - 128
    if exit_code < 0:
        number = -exit_code
    with suppress(ValueError):
        return Failure(text=f"ended by signal {number} ({signal.Signals(number).name})")
    ended = PATTERNS["exited"].search("\n".join(lines))
    if ended:
        text = f"ended with exit code {ended['code']}, without an exception"
        return Failure(text=text, rank=int(ended["rank"]))
    written = [line.strip() for line in lines if line.strip()]
    text = f"exit code {exit_code}"
    if written:
        text += f"; the log ends with: {written[-1]}"
    return Failure(text=text[:_LONGEST])


def _notes(output: Path) -> list[Failure]:
    """Return what ranks noted, the earliest first."""
    dated: list[tuple[float, Failure]] = []
    for file in (output / "cache" / _FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(file.read_text(encoding="utf-8"))
            failure = Failure(text=str(content["text"]), rank=int(content["rank"]))
            dated.append((float(content["time"]), failure))
    dated.sort(key=lambda pair: pair[0])
    return [failure for _, failure in dated]


def _signalled(lines: list[str]) -> list[Failure]:
    """Return the ranks that a signal ended, as torchrun reports them."""
    failures = []
    rank: int | None = None
    for line in lines:
        head = PATTERNS["rank"].match(line)
        ended = PATTERNS["signalled"].search(line)
        if head:
            rank = int(head["rank"])
        elif ended and ended["name"] != "SIGTERM":  # torchrun's own
            text = f"ended by signal {ended['number']} ({ended['name']})"
            failures.append(Failure(text=text, rank=rank))
    return failures
