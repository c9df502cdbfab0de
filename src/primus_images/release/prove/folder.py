"""The folder that is sent back: pages, ``result.json``, logs, and a signed statement about them.

Everything in it went through the scrubber. Its size is limited by that of each part.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.files import below, sha256_of, text_if_readable, write_file
from primus_images.gpus.detect import DetectedGpus, detect
from primus_images.oci.store import canonical_json
from primus_images.plan.resolve import ResolvedTarget
from primus_images.release.git import checkout
from primus_images.release.hardware import cpu_model
from primus_images.release.prove.run import LEFT_OUT, PASSED, Outcome, log_of, mark
from primus_images.release.prove.scrub import Scrubber
from primus_images.release.prove.steps import Setting, Step
from primus_images.report import html
from primus_images.report.run import Run, read_all

FORMAT = 1
RESULT = "result.json"
PAGE = "index.html"
STATEMENT = "statement.sigstore.json"
PREDICATE = "urn:primus-images:prove:1"
_LAST_LINES = 40
_LOG_BYTES = 60_000
_DOCUMENT_BYTES = 200_000
# What the pages show of a run is read from its folder.
_LONG_KEYS = ("series", "facts", "settings", "argv", "gates", "jobs", "environment")
_HERE = ("torch", "triton", "transformers", "torchtitan", "torchao", "megatron-core", "peft")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The steps of a proof, and name → how each ended."""

    steps: Sequence[Step]
    outcomes: Mapping[str, Outcome]
    setting: Setting
    resolved: ResolvedTarget


def write(
    folder: Path, proof: Proof, sign: Callable[[Mapping[str, Any]], bytes] | None
) -> dict[str, Any]:
    """Write the folder anew. Returns the content of its ``result.json``.

    ``sign`` returns the signed envelope of a statement.
    """
    setting = proof.setting
    scrubber = Scrubber({setting.work: "WORK", setting.project: "."})
    shutil.rmtree(folder, ignore_errors=True)
    content = scrubber.value(_content(proof))
    write_file(folder / RESULT, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    rows = content["steps"]
    for step, row in zip(proof.steps, rows, strict=True):
        if row["state"] == LEFT_OUT:
            continue
        log = scrubber.text(text_if_readable(log_of(step, setting), _LOG_BYTES))
        write_file(folder / "logs" / f"{step.name}.txt", log)
        if row["state"] != PASSED:
            lines = log.splitlines()[-_LAST_LINES:]
            page = html.rendered(
                "proof_step.html", step=row, versions=content["versions"], lines=lines
            )
            write_file(folder / f"{step.name}.html", page)
    runs = _runs(proof, scrubber)
    series = {run.label: run.series for run in runs}
    page = html.rendered(
        "proof.html",
        title=f"{content['target']}: what {content['machine']['gpus']} showed",
        proof=content,
        runs=runs,
        figures=html.figures(runs),
        series=series,
        cells=[row for row in rows if row["expected"]],
        first=[row for row in rows if row["first_step"]],
    )
    write_file(folder / PAGE, page)
    if sign:
        (folder / STATEMENT).write_bytes(sign(statement(folder, content)))
    return dict(content)


def statement(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the in-toto statement about all files of a folder."""
    subjects = []
    for path in sorted(below(folder)):
        if path.name != STATEMENT:
            name = str(path.relative_to(folder))
            subjects.append({"name": name, "digest": {"sha256": sha256_of(path)}})
    predicate = {key: content[key] for key in ("format", "made", "target", "release", "machine")}
    predicate["states"] = {row["name"]: row["state"] for row in content["steps"]}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": predicate,
    }


def _gpus(count: int, machine: DetectedGpus) -> str:
    """Return the GPUs of the machine, and how many of them were used if not all."""
    if 0 < count < len(machine.names):
        return f"{count} of {machine.sentence()}"
    return machine.sentence()


def _content(proof: Proof) -> dict[str, Any]:
    setting = proof.setting
    machine = detect(setting.root)
    rows = []
    for step in proof.steps:
        outcome = proof.outcomes[step.name]
        row = asdict(outcome)
        del row["key"], row["kept"]
        row["document"] = _compact(outcome.document)
        row |= {
            "title": step.title,
            "mark": mark(outcome.state),
            "minutes": step.minutes,
            "command": shlex.join(step.typed(setting)),
            "expected": dict(step.expected),
        }
        rows.append(row)
    return {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "target": setting.target,
        "gpu": setting.gpu,
        "release": proof.resolved.ref,
        "channel": proof.resolved.choice.channel,
        "here": setting.here,
        "machine": {
            "gpus": _gpus(setting.gpus, machine),
            "generation": machine.generation,
            "driver": machine.driver,
            "firmware": machine.firmware,
            "cpu": cpu_model(),
            "kernel": os.uname().release,
        },
        "versions": _versions(setting, proof.resolved),
        "steps": rows,
    }


def _versions(setting: Setting, resolved: ResolvedTarget) -> dict[str, str]:
    versions = {"commit": checkout(setting.project).version, "python": platform.python_version()}
    if setting.here:
        for name in _HERE:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return versions
    for name, pin in resolved.pins.items():
        if pin.version:
            versions[name] = pin.version
    return versions


def _compact(value: Any) -> Any:
    """Return a document without its long parts."""
    short = _without_long(value)
    size = len(canonical_json(short))
    if size > _DOCUMENT_BYTES:
        return {"left_out": f"{size:,} bytes"}
    return short


def _without_long(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_long(each) for key, each in value.items() if key not in _LONG_KEYS}
    if isinstance(value, list):
        return [_without_long(each) for each in value]
    return value


def _runs(proof: Proof, scrubber: Scrubber) -> list[Run]:
    """Return the training runs for the charts: at most as many as have a colour of their own."""
    folders = []
    for step in proof.steps:
        folder = proof.setting.work / step.name
        ran = proof.outcomes[step.name].state != LEFT_OUT
        if step.run and ran and (folder / "job.json").is_file():
            folders.append(folder)
    try:
        runs, _ = read_all(folders[: html.MOST_RUNS])
    except (InputError, IndexError):
        return []
    shown = []
    for run in runs:
        words = tuple(scrubber.text(word) for word in run.arguments)
        label = scrubber.text(run.label)
        corpus = scrubber.text(run.corpus)
        shown.append(replace(run, label=label, corpus=corpus, arguments=words, verdicts=()))
    return shown
