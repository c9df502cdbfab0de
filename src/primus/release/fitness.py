"""Whether an image may be published: a pure function from evidence to objections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The runs that at least one record must contain. A quick suite proves neither that runs repeat nor that they resume.
_RUNS = {"base", "repeat", "resume", "accumulation"}
# The only gate that a preview may fail: Debian's ROCm has no code for some GPUs.
_FORGIVEN = "coverage"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence about a built image.

    ``content`` is the digest of its config. ``preview`` is the reason why it is a preview; empty for a release. ``gpu``
    is the GPU generation that it is for. ``recipes`` are those that its target names. ``records`` are all validation
    records, also of other images. ``commit`` is that of the repository, and ``edited`` are files that differ from it.
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
    """Return the reasons why the image may not be published, one sentence each; empty if it may.

    A release for a GPU must have passed its validations on that GPU. With ``preview``, a CPU is sufficient, the
    coverage gate may fail, and files of the repository may be edited.
    """
    found = []
    if evidence.preview and not preview:
        found.append(f"it is a preview: {evidence.preview}")
    found += [f"gate {gate} fails" for gate in evidence.failed_gates if not (preview and gate == _FORGIVEN)]
    found += _of_validation(evidence, preview)
    if not preview:
        if evidence.commit is None:
            found.append("the commit it was built from is unknown: this is not a git repository")
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
                f"nothing was trained in this image on {evidence.gpu}, and a run on a CPU does not count for the GPU "
                "(run primus validate on a machine with that GPU)"
            ]
        where = f" on {evidence.gpu}"
    trained = {record["recipe"]["name"] for record in mine}
    found = []
    if lacking := [name for name in evidence.recipes if name not in trained]:
        found.append(f"{_some(lacking)} did not pass a validation in this image{where} (primus validate --suite quick)")
    if not any({job["name"] for job in record["jobs"] if job["ran"]} >= _RUNS for record in mine):
        found.append(
            f"no validation in this image{where} repeated a run, resumed it and split its batch (primus validate)"
        )
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
