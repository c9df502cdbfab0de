"""Why a job failed or hangs: the exception of the first rank that failed, or the rank that the
others wait for.
"""

import faulthandler
import json
import os
import re
import shlex
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
from primus_images.training.run.processes import processes
from primus_images.yamlfile import read_values

_FOLDER = "failures"
_LONGEST = 600
_TABLE: Mapping[str, Any] = read_values(Path(__file__).with_name("failure.yaml")).data
_PATTERNS = {name: re.compile(text) for name, text in _TABLE["patterns"].items()}
_DERIVED = _PATTERNS["derived"]
_EXCEPTION = _PATTERNS["exception"]
_DISK_FULL = re.compile(_TABLE["advice"]["disk"]["text"])


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``text`` is the last line of the exception; ``rank`` is None if unknown. As text, it includes
    advice.
    """

    text: str
    rank: int | None = None

    def __str__(self) -> str:
        who = ""
        if self.rank is not None:
            who = f"rank {self.rank}: "
        rows = _TABLE["advice"].values()
        advice = next((f" ({row['do']})" for row in rows if re.search(row["text"], self.text)), "")
        return f"{who}{_PATTERNS['after_free_memory'].sub('', self.text)}{advice}"


# For a job whose files do not contain the cause.
DISK_FULL = Failure(text="No space left on device")


@contextmanager
def noting(output: Path) -> Iterator[None]:
    """In a rank: note an exception of the block in the job's folder. A fatal signal leaves a
    :func:`stack_file`.
    """
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
    """Return whether a rank of the job, on any of its nodes, has written its failure to the job's
    folder.
    """
    return any((output / "cache" / _FOLDER).glob("*.json"))


def share(output: Path, log: Path, patience: float) -> None:
    """Exchange the failures of a job between its nodes, whose folder is ``output``; ``log`` is this
    node's.

    Notes the ranks that a signal ended here, since they cannot, and ranks of other nodes only
    notice that they are gone. Waits up to ``patience`` seconds for a note that says more than that.
    """
    noted = {failure.rank for failure in _notes(output)}
    for failure in _signalled(_lines(log)):
        if failure.rank is not None and failure.rank not in noted:
            note(output, failure.rank, failure.text)
    deadline = time.monotonic() + patience
    while (
        all(_DERIVED.search(failure.text) for failure in _notes(output))
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)


def text_of(error: BaseException) -> str:
    """Return the last line of the traceback of ``error``, with the error that it was raised from."""
    if isinstance(error, PrimusError):
        return " ".join(str(error).split())
    if isinstance(error, SystemExit):
        return str(error.code)
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    texts = [
        _last_line("".join(traceback.format_exception_only(each)))
        for each in dict.fromkeys((error, first))
    ]
    return "; raised from ".join(texts)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("Traceback (most recent call last)" in line for line in lines[1:]) or any(
        line.startswith("Original Traceback") for line in lines
    ):
        exceptions = [line for line in lines if _EXCEPTION.match(line)]
        return (exceptions[-1] if exceptions else lines[-1])[:_LONGEST]
    # The first line of some messages only announces the rest.
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])[:_LONGEST]


def cause(output: Path, exit_code: int, shared: Path | None = None) -> Failure | None:
    """Return the first cause of a job that ended with ``exit_code`` (negative: a signal); None if
    it is 0.

    ``shared`` is the folder with the notes of all nodes if it is not ``output``. A full disk comes
    first, then the earliest note of a rank that does more than report that another one is gone,
    then a rank or the launcher that a signal ended, then the log's first exception, then its last
    line.
    """
    if exit_code == 0:
        return None
    lines = _lines(output / "log.txt")
    notes = _notes(output) or _notes(shared or output)
    first_hand = [noted for noted in notes if not _DERIVED.search(noted.text)]
    raised = [
        Failure(text=match["text"][:_LONGEST])
        for line in lines
        if (match := _EXCEPTION.match(line.strip()))
    ]
    first = [failure for failure in raised if not _DERIVED.search(failure.text)]
    # On a full disk, every writer fails in its own way, and checkpointing wraps all these errors.
    full = [failure for failure in [*first_hand, *raised] if _DISK_FULL.search(failure.text)]
    launcher = [
        Failure(text=match["text"])
        for line in lines
        if (match := _PATTERNS["launcher"].match(line))
    ]
    causes = [*full, *first_hand, *_signalled(lines), *launcher, *first, *notes, *raised]
    if causes:
        return causes[0]
    return _by_code(exit_code, lines)


def _lines(log: Path) -> list[str]:
    return [_PATTERNS["colour"].sub("", line) for line in text_if_readable(log).splitlines()]


def _by_code(exit_code: int, lines: list[str]) -> Failure:
    if exit_code < 0:
        number = -exit_code
    else:
        number = exit_code - 128
    with suppress(ValueError):
        return Failure(text=f"ended by signal {number} ({signal.Signals(number).name})")
    ended = _PATTERNS["exited"].search("\n".join(lines))
    if ended:
        return Failure(
            text=f"ended with exit code {ended['code']}, without an exception",
            rank=int(ended["rank"]),
        )
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = f"exit code {exit_code}" + (f"; the log ends with: {last_line}" if last_line else "")
    return Failure(text=text[:_LONGEST])


def _notes(output: Path) -> list[Failure]:
    dated = []
    for file in (output / "cache" / _FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(file.read_text(encoding="utf-8"))
            dated.append(
                (
                    float(content["time"]),
                    Failure(text=str(content["text"]), rank=int(content["rank"])),
                )
            )
    return [failure for _, failure in sorted(dated, key=lambda pair: pair[0])]


def _signalled(lines: list[str]) -> Iterator[Failure]:
    rank: int | None = None
    for line in lines:
        match = _PATTERNS["rank"].match(line)
        if match:
            rank = int(match["rank"])
        elif (match := _PATTERNS["signalled"].search(line)) and match[
            "name"
        ] != "SIGTERM":  # torchrun's own
            yield Failure(text=f"ended by signal {match['number']} ({match['name']})", rank=rank)


def end_ranks(launcher: int, output: Path, seconds: float) -> dict[int, str]:
    """End all ranks below the process ``launcher`` with SIGABRT, on which Python prints the stack.

    A stopped rank cannot print: it is noted as hung, and killed. Returns the command of each other
    rank.
    """
    commands: dict[int, str] = {}
    for pid, (parent, state) in processes().items():
        if parent != launcher or (rank := _rank(pid)) is None:
            continue
        if state in "TtD":
            what = "waiting for a disk or a device"
            if state in "Tt":
                what = "stopped (SIGSTOP, or a debugger)"
            note(output, rank, f"hung: no progress for {seconds:g} s; its process is {what}")
        with suppress(OSError):  # it has just ended
            if state not in "TtD":
                commands[rank] = shlex.join(
                    Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
                )
            os.kill(pid, signal.SIGKILL if state in "Tt" else signal.SIGABRT)
    return commands


def stacks(output: Path) -> dict[int, str]:
    """Return rank → the stack that it wrote when a fatal signal ended it, innermost frame first."""
    texts = {}
    for file in stack_file(output, 0).parent.glob("rank-*.txt"):
        with suppress(OSError, ValueError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text:
                texts[int(file.stem.removeprefix("rank-"))] = text
    return dict(sorted(texts.items()))


def name_hung(output: Path, seconds: float, commands: Mapping[int, str]) -> list[int]:
    """Return the ranks that did not wait for others, as their stacks show, and record each in the
    job's folder.

    If none shows it, these are the ranks without a stack, of those whose ``commands`` were ended.
    """
    places = dict[int, str]()
    written = stacks(output)
    for rank, text in written.items():
        # Other threads can come first. The main thread is the one that receives the signal.
        frames = list(
            _PATTERNS["frame"].finditer(text.partition("Current thread 0x")[2].partition("\n\n")[0])
        )
        if frames and not any(_PATTERNS["waiting"].search(frame["file"]) for frame in frames):
            top = frames[0]
            places[rank] = f"it is in {top['function']} ({Path(top['file']).name}:{top['line']})"
    if places:
        silent = {}
    else:
        silent = {rank: commands[rank] for rank in sorted(commands.keys() - written.keys())}
    places |= {
        rank: f"it left no stack; its command: {command[:200]}" for rank, command in silent.items()
    }
    for rank, place in places.items():
        note(output, rank, f"hung: no progress for {seconds:g} s; {place}")
    return list(places)


def _rank(pid: int) -> int | None:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(
            (int(word.removeprefix(b"RANK=")) for word in words if word.startswith(b"RANK=")), None
        )
    return None
