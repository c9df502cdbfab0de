"""A run finds every kernel of the turbo catalogue already compiled, and a C compiler to launch them with."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import HostError
from primus.files import read_sealed, write_sealed
from primus.gates.finding import Finding, GateReport
from primus.oci.roots import reference
from primus.sandbox.container import Command, RootFs
from primus.sandbox.engines import choose

if TYPE_CHECKING:
    from primus.gates.examined import Examined

_COMMAND = ("primus", "turbo", "check", "--pretend", "--json")


def judge(examined: Examined) -> GateReport | None:
    """Ask the image which kernels it would compile, if its target asks for compiled kernels."""
    image, workspace = examined.image, examined.workspace
    if not image.plan.resolved.target.turbo:
        return None
    root = RootFs(
        layers=tuple(map(reference, image.layers)),
        config=json.loads(image.config),
        blob=workspace.store.blob_path,
        cache=workspace.unpacked,
        name=image.plan.ref,
        config_bytes=image.config,
        manifest=image.manifest,
    )
    return turbo(ask_image(root, image.digest, workspace.facts))


def turbo(answer: Mapping[str, Any]) -> GateReport:
    """Judge the output of ``primus turbo check --json`` inside the image."""
    findings = [
        Finding(
            severity="error",
            message=f"{one['kernel']} is compiled again: {one['function']}, requested by {one['case']}",
        )
        for one in answer["missing"]
    ]
    findings += [Finding(severity="error", message=failure) for failure in answer["failures"]]
    if not answer["kernels"]:
        findings.append(Finding(severity="error", message="no kernel was requested"))
    if not (findings or answer["passed"]):
        findings.append(Finding(severity="error", message="a run leaves files in Triton's own cache"))
    summary = (
        f"{answer['calls']} calls ask for {answer['kernels']} kernels for {answer['arch']}, "
        f"{len(answer['missing'])} of them not there"
    )
    return GateReport(summary=summary, findings=tuple(findings))


def ask_image(root: RootFs, digest: str, cache: Path) -> dict[str, Any]:
    """Run the check in the image. The answer is cached in ``cache`` under the image's ``digest``.

    Raises HostError if the image gives no answer.
    """
    kept = cache / f"turbo-{digest.removeprefix('sha256:')}.json"
    known = read_sealed(kept)
    if isinstance(known, dict):
        return known
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said, Path(os.devnull).open("rb") as nothing:
        command = Command(argv=_COMMAND, entrypoint=False, tty=False)
        code = choose("auto").run(root, command, stdin=nothing, stdout=out, stderr=said)
        out.seek(0)
        said.seek(0)
        try:
            answer: dict[str, Any] = json.loads(out.read())
        except ValueError:
            tail = said.read().decode("utf-8", "replace").strip().splitlines()[-3:]
            raise HostError(
                f"primus turbo check ended with exit code {code} in {root.name}: {' / '.join(tail) or 'no output'}"
            ) from None
    write_sealed(kept, answer)
    return answer
