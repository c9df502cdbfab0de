"""Reading a folder that somebody sent: who signed it, and what the repository keeps of it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus_images.errors import CheckFailed, InputError
from primus_images.files import below, sha256_of
from primus_images.release.prove.folder import FORMAT, PREDICATE, RESULT, STATEMENT
from primus_images.release.statement import Trust, payload
from primus_images.schema import read_json


def verified(folder: Path, trust: Trust | None) -> str:
    """Return by whom the folder is signed, as a sentence.

    Raises CheckFailed for a wrong signature or a file that differs from the signed one, and
    InputError if the folder is signed and ``trust`` does not say by whom.
    """
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise InputError(f"{path} is a link, which `primus prove` never writes")
    bundle = folder / STATEMENT
    if not bundle.is_file():
        if trust:
            raise CheckFailed(f"{folder} is not signed: it has no {STATEMENT}")
        return "not signed: nothing shows who made it, or that it is unchanged"
    if trust is None:
        raise InputError(
            f"{folder} is signed: by whom must it be?",
            hint="--key cosign.pub, or --identity NAME --issuer URL",
        )
    data = bundle.read_bytes()
    rejected = trust.rejects(data, PREDICATE)
    if rejected:
        raise CheckFailed(f"{folder}: {rejected}")
    signed = {row["name"]: row["digest"]["sha256"] for row in payload(data)["subject"]}
    for name, sha256 in _files(folder).items():
        if signed.pop(name, None) != sha256:
            raise CheckFailed(f"{folder / name} is not the file that was signed")
    for name in signed:
        raise CheckFailed(f"{folder / name} was signed, and is missing")
    return f"signed by {trust.key or trust.identity}, and unchanged"


def _files(folder: Path) -> dict[str, str]:
    files = {}
    for path in below(folder):
        if path.name != STATEMENT:
            files[str(path.relative_to(folder))] = sha256_of(path)
    return files


def kept(folder: Path) -> dict[str, Any]:
    """Return what the repository keeps of a folder.

    These are the row of the table of targets, measured beside predicted memory, speeds, compiled
    kernels, and problems that may become known issues. Raises InputError if it is none of ours.
    """
    path = folder / RESULT
    if not path.is_file():
        raise InputError(f"there is no {RESULT} in {folder}", hint="name what `primus prove` wrote")
    content = read_json(path).data
    try:
        if content["format"] != FORMAT:
            raise InputError(
                f"format {content['format']}, and this version reads {FORMAT}", where=path
            )
        return _kept(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"not a file that `primus prove` wrote: {json.dumps(str(error))}", where=path
        ) from None


def _number(value: Any) -> float | None:
    """Return a figure of a file that somebody sent. Raises TypeError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{str(value)[:40]} is no number")
    return value


def _kept(content: Mapping[str, Any]) -> dict[str, Any]:
    memory = []
    speeds = []
    first = []
    problems = []
    states: dict[str, str] = {}
    for row in content["steps"]:
        states[row["name"]] = row["state"]
        if row["reason"] and row["state"] != "left out":
            problems.append({"step": row["name"], "state": row["state"], "what": row["reason"]})
        if row["first_step"] is not None:
            counted = {"step": row["name"], "seconds": _number(row["first_step"])}
            counted["kernels"] = _number(row["kernels"])
            first.append(counted)
        if not row["expected"] or row["state"] != "passed":
            continue
        summary = row["document"]["summary"]
        predicted = _number(row["expected"]["predicted_gib"])
        measured = _number(summary["memory_gib"])
        error = None
        if measured and predicted:
            error = round(predicted / measured - 1, 3)
        memory.append(
            {"cell": row["name"], "predicted_gib": predicted, "measured_gib": measured}
            | {"error": error}
        )
        speeds.append(
            {
                "cell": row["name"],
                "tokens_per_second": _number(summary["tokens_per_second"]),
                "tflops_non_causal": _number(summary["tflops_non_causal"]),
                "published": _number(row["expected"].get("published")),
            }
        )
    return {
        "support": {
            "target": content["target"],
            "channel": content["channel"],
            "release": content["release"],
            "date": content["made"],
            **content["machine"],
            "passed": sum(state == "passed" for state in states.values()),
            "steps": len(states),
        },
        "states": states,
        "memory": memory,
        "speeds": speeds,
        "first_steps": first,
        "problems": problems,
        "versions": content["versions"],
    }
