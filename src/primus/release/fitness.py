"""May this image be published? Pure: evidence in, objections out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Evidence", "objections"]

# Runs that one of the records must hold: a quick one proves neither that a run can be repeated nor resumed.
_RUNS = {"base", "repeat", "resume", "accumulation"}
# What makes a preview a preview: Debian's ROCm has no code for some GPUs. No other gate is forgiven.
_FORGIVEN = "coverage"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a built image when it is to be published.

    ``content`` is the config's digest, ``preview`` the reason why the image is no release ("" where it is one),
    ``gpu`` the GPU generation it is for, ``recipes`` what the target names to be trained, ``records`` those of
    validations, of whatever image. ``commit`` is the repository's; ``edited`` are files that differ from it.
    """

    content: str
    preview: str
    gpu: str | None
    recipes: Sequence[str]
    failed_gates: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    commit: str | None
    edited: Sequence[str]


def objections(evidence: Evidence, *, preview: bool) -> tuple[str, ...]:
    """Why the image may not be published, a sentence each; empty when it may.

    A release for a GPU must have passed its validations on that GPU. With ``preview`` it is not called a release: then
    a CPU will do, the coverage gate may fail, and the repository may be edited.
    """
    found = []
    if evidence.preview and not preview:
        found.append(f"it is a preview: {evidence.preview}")
    found += [f"gate {gate} fails" for gate in evidence.failed_gates if not (preview and gate == _FORGIVEN)]
    found += _of_validation(evidence, preview)
    if not preview:
        if evidence.commit is None:
            found.append("the commit it was built from is not known: this is no git repository")
        elif evidence.edited:
            found.append(f"files differ from commit {evidence.commit[:12]}: {_some(evidence.edited)}")
    return tuple(found)


def _of_validation(evidence: Evidence, preview: bool) -> list[str]:
    if not evidence.recipes:
        return ["its target names no recipe to validate it with"]
    mine = [r for r in evidence.records if r["image"]["content"] == evidence.content and _passed(r, preview)]
    where = ""
    if evidence.gpu and not preview:
        mine = [record for record in mine if record["gpu"] == evidence.gpu]
        if not mine:
            return [
                f"nothing was trained in this image on {evidence.gpu}: a run on a CPU is no pass for the GPU "
                "(primus validate, on a machine with that GPU)"
            ]
        where = f" on {evidence.gpu}"
    trained = {record["recipe"]["name"] for record in mine}
    found = []
    if lacking := [name for name in evidence.recipes if name not in trained]:
        found.append(f"{_some(lacking)} did not pass a validation in this image{where} (primus validate --suite quick)")
    if not any({job["name"] for job in record["jobs"] if job["ran"]} >= _RUNS for record in mine):
        found.append(f"no validation in this image{where} ran again, resumed and split its batch (primus validate)")
    return found


def _passed(record: Mapping[str, Any], preview: bool) -> bool:
    if not preview:
        return record["passed"] is True
    failed = {verdict["name"] for verdict in record["verdicts"] if not verdict["passed"]}
    ran = all(job["ran"] for job in record["jobs"])
    return bool(record["verdicts"]) and ran and failed <= {f"gate {_FORGIVEN}"}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
