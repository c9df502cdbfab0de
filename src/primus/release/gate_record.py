"""Committed findings of the gates in real images: one file per target, for the table of targets in README."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus import __version__
from primus.errors import InputError
from primus.gates.rules.coherence import pinned_packages

if TYPE_CHECKING:
    from primus.gates.check import Outcome
    from primus.gates.examined import Examined

FOLDER = "benchmarks/results"
_BEGIN = "gates-"
_KEYS = {"target", "channel", "lock", "gates", "layers"}


def lock_mark(lock: Path) -> str:
    """Return a hash of the target's lock. A record with another hash is about another image."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()[:16] if lock.exists() else ""


def gate_record(examined: Examined, outcome: Outcome) -> dict[str, Any]:
    """Return the record of one checked image, with its layers."""
    image = examined.image
    resolved = image.plan.resolved
    return {
        "generated": "by `primus check --record`; do not edit",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": f"primus check {resolved.name} --record",
        "versions": {"primus-images": __version__},
        "release": resolved.versions.release,
        "channel": resolved.choice.channel,
        "preview": resolved.choice.preview,
        "arch": resolved.arch,
        "lock": lock_mark(resolved.lock_path),
        **outcome.as_json(),
        "packages": {p.name: p.version for p in pinned_packages(resolved) if p.rocm is not None},
        "layers": [
            {
                "name": action.name,
                "digest": layer.blob.digest,
                "bytes": layer.blob.size,
                "unpacked": layer.unpacked,
                "left_out": asdict(layer.left_out),
            }
            for action, layer in image.rows
        ],
    }


def write_gate_record(root: Path, record: dict[str, Any]) -> Path:
    """Write the record to the repository. Returns the path of the file."""
    path = root / FOLDER / f"{_BEGIN}{record['target']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def load_gate_records(root: Path) -> dict[str, dict[str, Any]]:
    """Return target → record, for all recorded targets. Raises InputError for a file in another format."""
    records = {}
    for path in sorted((root / FOLDER).glob(f"{_BEGIN}*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if lacks := sorted(_KEYS - record.keys()):
                raise KeyError(", ".join(lacks))
            records[str(record["target"])] = record
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            hint = "create it again with primus check --record"
            raise InputError(f"not a record of gates: {error}", where=f"{FOLDER}/{path.name}", hint=hint) from None
    return records
