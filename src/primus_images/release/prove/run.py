"""Running the steps of a proof: each in a process, with a limit, and none stops the others.

``work/state/NAME.json`` keeps how a step ended. A step that passed is not run again as long as its
key is the same, which covers its command, the code, the pins, the lock and the machine. What was
interrupted has no such file.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import primus_images
from primus_images.errors import HostError, InputError
from primus_images.files import below, json_if_readable, sha256_of, text_if_readable, write_file
from primus_images.gpus.detect import detect
from primus_images.programs import tracked
from primus_images.release.prove.steps import Setting, Step
from primus_images.schema import build_typed
from primus_images.training.run import logs

PASSED, FAILED, LACKING, LEFT_OUT = "passed", "failed", "lacking", "left out"
_KERNELS = (".hsaco", ".co", ".cubin", ".so")
_POLL_S = 0.3
_GRACE_S = 20.0
_LAST_BYTES = 60_000
_MOST_PROBLEMS = 20
_ENDED_BY_USER = (130, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step ended: its ``state``, and the ``reason`` unless it passed.

    ``document`` is what its command printed as JSON. ``first_step`` is the number of seconds from
    the command to the first step of training, and ``kernels`` the number that were compiled.
    """

    name: str
    state: str
    key: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    reason: str = ""
    document: Any = None
    first_step: float | None = None
    kernels: int | None = None
    made: str = ""
    kept: bool = field(default=False, compare=False)

    @property
    def passed(self) -> bool:
        """Whether the step shows what it shall show."""
        return self.state == PASSED


def run_all(
    steps: Sequence[Step], setting: Setting, minutes: float, tell: Callable[[str], None]
) -> Iterator[dict[str, Outcome]]:
    """Run the steps in their order. After each, yield name → outcome of all of them.

    A step whose estimate exceeds what is left of ``minutes`` is left out. Raises KeyboardInterrupt.
    """
    began = time.monotonic()
    same = _digest([_code(setting), _pins(setting), asdict(detect(setting.root))])
    outcomes = {}
    for step in steps:
        outcomes[step.name] = Outcome(name=step.name, state=LEFT_OUT, reason="it is not reached")
    for number, step in enumerate(steps, 1):
        head = f"[{number}/{len(steps)}] {step.title}"
        remaining = minutes - (time.monotonic() - began) / 60
        outcome = _without_running(step, setting, outcomes, same, remaining)
        if outcome is None:
            tell(f"▸ {head}: about {step.minutes:g} min, {remaining:.0f} min are left")
            named = _problems(outcomes[steps[0].name].document)
            outcome = _run(step, setting, _key(step, setting, same), named)
            _write(outcome, setting)
        tell(f"{mark(outcome.state)} {head}: {_ending(outcome)}")
        outcomes[step.name] = outcome
        yield outcomes


def mark(state: str) -> str:
    """Return the sign of a state."""
    return {PASSED: "✓", FAILED: "✗"}.get(state, "–")


def log_of(step: Step, setting: Setting) -> Path:
    """Return the file of what a step printed to standard error."""
    return setting.work / "logs" / f"{step.name}.txt"


def _ending(outcome: Outcome) -> str:
    if outcome.kept:
        return f"passed before, on {outcome.made}"
    if outcome.passed:
        return f"passed in {outcome.seconds / 60:.1f} min"
    return f"{outcome.state}: {outcome.reason}"


def _without_running(
    step: Step, setting: Setting, outcomes: Mapping[str, Outcome], same: str, remaining: float
) -> Outcome | None:
    """Return the outcome of a step that is not run; None for one that is."""
    if step.needs and not outcomes[step.needs].passed:
        reason = f"it needs the step {step.needs}, which did not pass"
        return Outcome(name=step.name, state=LEFT_OUT, reason=reason)
    earlier = _read(step, setting)
    if earlier and earlier.passed and earlier.key == _key(step, setting, same):
        return earlier
    if step.minutes > remaining:
        reason = f"it takes about {step.minutes:g} min, and {max(0, remaining):.0f} min are left"
        return Outcome(name=step.name, state=LEFT_OUT, reason=reason)
    return None


def _state_file(name: str, setting: Setting) -> Path:
    return setting.work / "state" / f"{name}.json"


def _read(step: Step, setting: Setting) -> Outcome | None:
    content = json_if_readable(_state_file(step.name, setting))
    try:
        outcome = build_typed(Outcome, {**content, "kept": True}, step.name)
    except (InputError, TypeError, ValueError):
        return None
    if step.run and not (setting.work / step.name).is_dir():
        return None
    return outcome


def _write(outcome: Outcome, setting: Setting) -> None:
    content = asdict(outcome)
    del content["kept"]
    write_file(_state_file(outcome.name, setting), json.dumps(content, ensure_ascii=False) + "\n")


def _key(step: Step, setting: Setting, same: str) -> str:
    lock = ""
    if step.needs or step.name == "build":
        locks = sorted(setting.project.glob(f"images/locks/*/{setting.target}.json"))
        lock = _digest([sha256_of(path) for path in locks])
    words = step.typed(setting)
    if step.name == "lock":
        words = words[:3]  # A lock that was made is only compared.
    return _digest([words, lock, same])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _code(setting: Setting) -> str:
    """Return the hash of this package and of the recipes."""
    digest = hashlib.sha256()
    for folder in (Path(primus_images.__file__).parent, setting.project / "recipes"):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(folder)} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _pins(setting: Setting) -> list[str]:
    names = ("versions.yaml", f"images/{setting.target}.yaml")
    return [sha256_of(setting.project / name) for name in names]


def _run(step: Step, setting: Setting, key: str, named: Sequence[str]) -> Outcome:
    """Run a step that is not to be kept from before.

    ``named`` are the problems of the machine that the first step named. A step with no other
    problems passes: a low limit of open files does not make a GPU compute wrong.
    """
    output = setting.work / step.name
    kernels = setting.work / "kernels"
    if step.name.startswith("first-step"):
        kernels = setting.work / "kept"
    before: set[Path] = set()
    if step.run:
        shutil.rmtree(output, ignore_errors=True)
        if step.empties:
            shutil.rmtree(setting.work / step.empties, ignore_errors=True)
        before = _kernels(kernels)
    log = log_of(step, setting)
    log.parent.mkdir(parents=True, exist_ok=True)
    _state_file(step.name, setting).unlink(missing_ok=True)
    began = time.monotonic()
    printed = log.with_suffix(".out")
    with log.open("wb") as errors, printed.open("wb") as document:
        code, first_step = _process(step, setting, errors, document)
    text = text_if_readable(printed, _LAST_BYTES * 1000)
    printed.unlink()
    content = _document(text)
    state = _state(code)
    problems = _problems(content)
    if state == FAILED and problems and set(problems) <= set(named):
        state = PASSED
    reason = ""
    if state != PASSED:
        printed_last = text_if_readable(log, _LAST_BYTES) + text[-2000:]
        reason = _reason(code, step, problems, printed_last)
    compiled = None
    if step.run:
        compiled = len(_kernels(kernels) - before)
    return Outcome(
        name=step.name,
        state=state,
        key=key,
        seconds=round(time.monotonic() - began, 1),
        exit_code=code,
        reason=reason,
        document=content,
        first_step=first_step,
        kernels=compiled,
        made=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    )


def _state(code: int | None) -> str:
    if code == 0:
        return PASSED
    if code == HostError.exit_code:
        return LACKING
    return FAILED


def _process(step: Step, setting: Setting, errors: Any, document: Any) -> tuple[int | None, Any]:
    """Run the command of a step. Returns its exit code, None at its limit, and the seconds to the
    first step of training.
    """
    words = list(step.typed(setting))
    if words[0] == "primus":
        words[:1] = [sys.executable, "-P", "-m", "primus_images.cli.main"]
    # A run that went on after this command was killed would hold the GPUs of the next one.
    words[:0] = ["setpriv", "--pdeathsig=TERM"]
    environment = {**os.environ, "PRIMUS_NO_BANNER": "1", "PYTHONPATH": _python_path()}
    began = time.monotonic()
    first_step = None
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=document,
        stderr=errors,
        cwd=setting.project,
        env=environment,
        start_new_session=True,
    )
    with tracked(process):
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            seconds = time.monotonic() - began
            if step.run and first_step is None and _has_step(setting.work / step.name):
                first_step = round(seconds, 1)
            if seconds > step.limit:
                _end(process)
                return None, first_step
    if process.returncode in _ENDED_BY_USER:
        raise KeyboardInterrupt
    return process.returncode, first_step


def _python_path() -> str:
    """Return where a step finds modules: this command's own code first, whichever is installed."""
    source = str(Path(primus_images.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    if not path:
        return source
    return f"{source}{os.pathsep}{path}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a command remove its container, and kill it if it does not end."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def _has_step(folder: Path) -> bool:
    try:
        return bool(logs.read_run(folder).steps)
    except (OSError, ValueError, InputError):
        return False


def _kernels(folder: Path) -> set[Path]:
    if not folder.is_dir():
        return set()
    return {path for path in below(folder) if path.suffix in _KERNELS}


def _document(text: str) -> Any:
    """Return the JSON document that a command printed; None if it printed none."""
    start = re.search(r"^[\[{]", text, re.MULTILINE)
    if start is None:
        return None
    try:
        return json.loads(text[start.start() :])
    except ValueError:
        return None


def _reason(code: int | None, step: Step, problems: Sequence[str], text: str) -> str:
    """Return the sentence that tells why a step did not pass."""
    if code is None:
        return f"it did not end within {step.limit / 60:.0f} min, and was ended"
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        shown = list(problems[:_MOST_PROBLEMS])
        if more > 0:
            shown.append(f"and {more} more")
        return "; ".join(shown)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        sentence = re.match(r"primus [\w-]+: (.+)", line)
        if sentence:
            hint = lines[lines.index(line) + 1 :][:1]
            return " ".join([sentence[1], *(word for word in hint if word.startswith("→"))])
    if lines:
        return f"exit code {code}: {lines[-1][:300]}"
    return f"exit code {code}, and it printed nothing"


def _problems(document: Any) -> list[str]:
    """Return the problems that a command names in its document, the cause of its end first."""
    problems = []
    if isinstance(document, dict):
        cause = document.get("refused") or document.get("cause")
        if cause:
            problems.append(cause)
    for row in _rows_of(document):
        problem = _problem_of(row)
        if problem:
            problems.append(problem)
    if isinstance(document, dict):
        faults = document.get("faults") or {}
        problems += [f"{name}: {fault}" for name, fault in faults.items()]
    return list(dict.fromkeys(problems))


def _problem_of(row: Mapping[str, Any]) -> str:
    """Return the sentence of a finding, verdict or gate that did not pass; empty if it did."""
    failed = row.get("passed") is False and not row.get("skipped")
    if not failed and row.get("level") not in ("failed", "slow"):
        return ""
    name = row.get("check") or row.get("name") or row.get("gate")
    sentence = row.get("message") or row.get("reason") or row.get("summary")
    if name and sentence:
        return f"{name}: {sentence}"
    return ""


def _rows_of(document: Any) -> list[dict[str, Any]]:
    """Return the findings, verdicts and gates in a document, however deep."""
    rows: list[dict[str, Any]] = []
    if isinstance(document, list):
        for each in document:
            if isinstance(each, dict):
                rows.append(each)
            rows += _rows_of(each)
    elif isinstance(document, dict):
        for each in document.values():
            rows += _rows_of(each)
    return rows
