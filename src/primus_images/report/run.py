"""Reading a finished run from the folder of a job or from the record of a validation."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.files import read_bytes
from primus_images.recipes.schema import backends
from primus_images.schema import build, build_typed, parse_json, read_json
from primus_images.training.judge import checks
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import Record
from primus_images.training.run import identity
from primus_images.training.run.metrics import Summary, of_rows
from primus_images.training.run.outcome import RESULT_FILE, STOPPED, RunResult
from primus_images.training.text import tokens

_NOT_OURS = "name the folder of a `primus train`, or the record.json of a `primus validate`"

# The run, "checkpoint" and the step.
_SHOWN_PARTS = 3

_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The data of one run.

    ``series`` has one mapping per step. ``product`` is the GPU name that torch reports; it is empty
    on a CPU. ``documents`` and ``tokens`` are those of the text that it trains on, ``checkpoint``
    its newest one, and ``resumed_from`` that of the run before it. The steps of that run, if it is
    there, are the first ones of ``series``; ``resumed_after`` are the last ones of such runs.
    ``stopped`` says how a run without a result ended, and ``started`` when it began, as ISO 8601
    has it. ``host`` is the name of the machine, the first of several. ``settings`` are all that the
    run resolved.
    Figures that an older version did not write are missing.
    """

    label: str
    recipe: str
    backend: str
    mode: str
    precision: str
    ranks: int
    nodes: int
    local_batch: int
    seq_len: int
    corpus: str
    arguments: tuple[str, ...]
    product: str
    passed: bool
    seconds: float
    verdicts: tuple[Verdict, ...]
    summary: Summary
    series: tuple[Mapping[str, float | None], ...]
    image: Mapping[str, str] = field(default_factory=dict)
    global_batch: int = 0
    parameters: int = 0
    documents: int = 0
    tokens: int = 0
    checkpoint: str = ""
    resumed_from: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    resumed_after: tuple[int, ...] = ()
    stopped: str = ""
    started: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        steps = [step["step"] or 0 for step in self.series]
        least = min(self.ranks, self.nodes, self.local_batch, self.seq_len, *steps)
        if least < 1:
            raise ValueError(f"{least} is not a whole number of at least 1")

    @property
    def unit(self) -> str:
        """What rates refer to: one ``GPU``, or one ``rank`` on a CPU."""
        if self.product:
            return "GPU"
        return "rank"


class NoResult(InputError):
    """The folder of a run without a step."""


def read_all(paths: Sequence[Path]) -> tuple[tuple[Run, ...], tuple[NoResult, ...]]:
    """Read the runs and give each a unique label.

    Of several, those without a result are left out, with the reasons. Raises InputError as
    :func:`read`, and if no run remains.
    """
    runs: list[Run] = []
    left_out: list[NoResult] = []
    for path in paths:
        try:
            runs.append(read(path))
        except NoResult as error:
            left_out.append(error)
    if not runs:
        raise left_out[0]
    labels = [run.label for run in runs]
    for index, label in enumerate(labels):
        if labels.count(label) > 1:
            runs[index] = replace(runs[index], label=f"{label} ({index + 1})")
    return tuple(runs), tuple(left_out)


def read(path: Path) -> Run:
    """Read one run. If it has not ended, these are its steps so far, and no check has passed.

    Raises InputError if it does not exist, is not a run of primus, or has no step.
    """
    if not path.exists():
        raise InputError(f"there is no {path}", hint=_NOT_OURS)
    if path.is_dir() and (path / "record.json").is_file():
        path = path / "record.json"
    if path.is_dir() and not (path / "job.json").is_file():
        raise InputError(f"{path} contains no job.json", hint=_NOT_OURS)
    try:
        if path.is_dir():
            data = _job(path)
        else:
            data = _recorded(path)
        run = build_typed(Run, data, str(path))
    except (InputError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(
            f"not a file that primus wrote: {_reason(error)}", where=str(path), hint=_NOT_OURS
        ) from None
    if not run.series:
        raise NoResult("the run logged no step", where=str(path), hint="see its log.txt")
    return run


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, TypeError | IndexError | AttributeError):
        return "a field has another type than primus writes"
    return str(error)


def _recorded(path: Path) -> Any:
    record = Record.of(_json(path).data, str(path))
    return json.loads(json.dumps(_of_record(record)))


def _job(folder: Path) -> dict[str, Any]:
    job = _json(folder / "job.json").data
    recipe = job["recipe"]
    facts = {}
    if (folder / "facts.json").is_file():
        facts = _json(folder / "facts.json").data
    ended = (folder / RESULT_FILE).is_file()
    steps = _steps(folder / "metrics.jsonl", whole=ended)
    if ended:
        outcome = _outcome(folder)
    else:
        warmup = job["settings"]["validation.warmup_steps"]["value"]
        outcome = _unfinished(folder, steps, warmup)
    earlier, places = _history(folder)
    _later(steps, earlier)
    settings = {key: entry["value"] for key, entry in job["settings"].items()}
    if job.get("evaluation"):  # a tenth of the steps if it was not set
        settings.setdefault("eval.every", job["evaluation"]["every"])
    return {
        "label": str(_readable(folder.resolve().name)),
        "recipe": recipe["name"],
        "arguments": ["train", recipe["name"], *recipe["overrides"]],
        "ranks": job["world_size"],
        "global_batch": job.get("global_batch", 0),
        "resumed_from": "/".join(Path(job.get("resume_from") or "").parts[-_SHOWN_PARTS:]),
        "image": _texts(job.get("image", {})),
        "commit": job.get("commit", ""),
        "started": str(_readable(job.get("started", ""))),
        "host": str(_readable(job.get("host", ""))),
        "resumed_after": places,
        **_written(folder),
        **outcome,
        **_common(job, settings, facts, [*earlier, *steps]),
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts: those of text as they are, others as JSON."""
    texts = {}
    for key, value in values.items():
        texts[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return texts


def _history(folder: Path, known: Sequence[Path] = ()) -> tuple[list[Any], list[int]]:
    """Return the steps of the runs that the one in ``folder`` goes on from, and where each ended.

    There are none if they are not there, or cannot be read.
    """
    job = _json(folder / "job.json").data
    checkpoint = Path(job.get("resume_from") or "")
    number = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if not number:
        return [], []
    former = checkpoint.parents[1]
    if not (former / "job.json").is_file():  # both were moved, as from a container
        former = folder.resolve().parent / former.name
    known = [*known, folder.resolve()]
    if former.resolve() in known:
        return [], []
    try:
        steps, places = _history(former, known)
        ended = (former / RESULT_FILE).is_file()
        own = _steps(former / "metrics.jsonl", whole=ended)
        _later(own, steps)
        last = int(number[1])
        steps = [step for step in [*steps, *own] if step["step"] <= last]
    except (InputError, OSError, ValueError, TypeError, LookupError, AttributeError):
        return [], []
    if not steps:
        return [], []
    return steps, [*places, last]


def _later(steps: Sequence[Any], earlier: Sequence[Any]) -> None:
    """Let the seconds of ``steps`` go on from those of ``earlier`` ones."""
    passed = 0.0
    if earlier:
        passed = earlier[-1].get("seconds") or 0.0
    for step in steps:
        if step.get("seconds") is not None:
            step["seconds"] += passed


def _written(folder: Path) -> dict[str, Any]:
    """Return what a run wrote beside its figures: the text that it trains on, and checkpoints."""
    checkpoints = identity.complete_checkpoints(folder)
    newest = ""
    if checkpoints:
        newest = str(_readable(f"checkpoint/{checkpoints[-1].name}"))
    documents, count = tokens.counts(folder / "cache")
    return {"documents": documents, "tokens": count, "checkpoint": newest}


def _steps(metrics: Path, *, whole: bool) -> list[Any]:
    """Return the steps of a run. Unless it is ``whole``, the last line may be incomplete."""
    if not metrics.is_file():
        return []
    text = read_bytes(metrics)
    if not whole:
        text = text[: text.rfind(b"\n") + 1]
    steps = []
    for number, line in enumerate(text.splitlines(), 1):
        step = _readable(parse_json(line, f"{metrics}:{number}").data)
        if isinstance(step, dict):
            step.pop("data_hash", None)  # it is no figure
        steps.append(step)
    return steps


def _outcome(folder: Path) -> dict[str, Any]:
    result = _json(folder / RESULT_FILE)
    whole = build(RunResult, result)
    if whole.passed is None or whole.summary is None:
        raise KeyError("passed")
    return {key: result.data[key] for key in ("passed", "seconds", "verdicts", "summary")}


def _unfinished(folder: Path, steps: Sequence[Any], warmup: int) -> dict[str, Any]:
    after = "before its first step"
    if steps:
        after = f"after step {steps[-1]['step']}"
    name = _json(folder / STOPPED).data["signal"] if (folder / STOPPED).is_file() else ""
    stopped = f"logged no more {after}: it is still running, or was killed"
    if name:
        stopped = f"was stopped by {name} {after}"
    verdict = checks.skipped(Verdict("exit code", False, ""), f"the run {stopped}")
    start = folder / "job.json"
    last = start
    if steps:
        last = folder / "metrics.jsonl"
    seconds = last.stat().st_mtime - start.stat().st_mtime
    return {
        "passed": False,
        "verdicts": [asdict(verdict)],
        "summary": asdict(of_rows(steps, warmup)),
        "seconds": max(0.0, seconds),
        "stopped": stopped,
    }


def of_record(record: Record) -> Run:
    """Return the run of a validation's record, whose first job ran."""
    return build_typed(Run, json.loads(json.dumps(_of_record(record))), "record")


def _of_record(record: Record) -> dict[str, Any]:
    if not record.jobs:
        raise ValueError("jobs is empty")
    recipe = record.recipe
    base = record.jobs[0]
    return {
        "label": f"{record.target} {recipe.name}",
        "recipe": recipe.name,
        "arguments": base.command[1:],
        "ranks": recipe.ranks,
        "passed": record.passed,
        "seconds": base.seconds or 0.0,
        "verdicts": [asdict(verdict) for verdict in record.verdicts],
        "summary": record.measurements,
        "image": asdict(record.image),
        **_common(asdict(recipe), recipe.settings, record.facts, base.steps),
    }


def _common(
    what: Mapping[str, Any],
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    backend = backends()[what["backend"]]
    missing = dict.fromkeys(("loss", "grad_norm", "tokens_per_second"))
    if facts.get("gpu"):
        steps = [{**step, "tflops": step.get("tflops_non_causal")} for step in steps]
    return {
        **{key: what[key] for key in ("backend", "mode", "precision")},
        "nodes": settings["nodes"],
        "local_batch": settings[backend.key("local_batch")],
        "seq_len": settings[backend.key("seq_len")],
        "corpus": settings.get("assets.corpus", ""),
        "product": facts.get("gpu", ""),
        "parameters": facts.get("parameters", 0),
        "versions": facts.get("versions", {}),
        "settings": _texts(settings),
        "series": [{**missing, **step, "step": step["step"]} for step in steps],
    }


def _readable(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _readable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_readable(value) for value in data]
    if isinstance(data, str):
        return _UNREADABLE.sub("\N{REPLACEMENT CHARACTER}", data)
    return data


def _json(path: Path) -> Any:
    document = read_json(path)
    if not isinstance(document.data, dict):
        raise InputError("not a JSON object", where=str(path))
    return replace(document, data=_readable(document.data))
