"""Rebuild into an empty store from the same downloaded files; compare the digests and run every gate.

If the digests differ, the first differing layer and file are named, and the exit code is 1. The gates are those of
`primus check`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import zstandard

from primus.cli.host.common import add_project_options, add_targets, resolved_targets
from primus.engine.image import Built
from primus.engine.pipeline import Options, build
from primus.gates.check import Gatekeeper, check_image, outcome_text
from primus.gates.examined import rules_hash
from primus.oci.store import Store
from primus.plan.workspace import Workspace
from primus.progress import choose_progress
from primus.terminal import Screen

EXAMPLE = "primus verify cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus verify``."""
    add_targets(parser)
    add_project_options(parser)
    parser.add_argument("--keep", action="store_true", help="keep the second store if it differs")


def run(args: argparse.Namespace) -> int:
    """Build again into an empty store, compare the digests and run the gates. Returns 0, or 1 on a difference."""
    targets, workspace = resolved_targets(args)
    options = Options(rehash=True, quiet=args.json)
    built = build(targets, workspace, options, gates=Gatekeeper, rules=rules_hash())
    plans, first = [plan for plan, _ in built], [image for _, image in built]
    workspace.folder.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=workspace.folder))
    failed: dict[str, str] = {}
    try:
        # The second build has its own store but shares downloads and unpacked layers. It hashes local files again.
        twin = Workspace(Store(scratch / "store"), workspace.folder)
        second = [image for _, image in build(targets, twin, Options(quiet=args.json))]
        for image, rebuilt in zip(first, second, strict=True):
            if (where := _first_difference((workspace.store, image), (twin.store, rebuilt))) is not None:
                failed[image.target] = where
    finally:
        if not (failed and args.keep):
            shutil.rmtree(scratch, ignore_errors=True)
    with choose_progress(args.json) as progress:
        outcomes = {plan.target: check_image(plan, workspace, progress) for plan in plans}
    passed = not failed and all(outcome.passed for outcome in outcomes.values())
    if args.json:
        rows = [
            {
                "target": b.target,
                "digest": b.digest,
                "difference": failed.get(b.target),
                "gates": outcomes[b.target].as_json()["gates"],
            }
            for b in first
        ]
        print(json.dumps({"images": rows, "passed": passed}))
    else:
        for image in first:
            verdict = f"differs: {failed[image.target]}" if image.target in failed else "both builds are identical"
            print(f"{image.ref} {image.digest}: {verdict}")
            print(outcome_text(outcomes[image.target], Screen.of()).partition("\n")[2])
        if failed and args.keep:
            print(f"the second store is {scratch}", file=sys.stderr)
    return 0 if passed else 1


def _first_difference(first: tuple[Store, Built], second: tuple[Store, Built]) -> str | None:
    """Return one sentence that names the first difference between the images, or None if they have the same bytes."""
    (store_a, a), (store_b, b) = first, second
    if a.digest == b.digest:
        return None
    for line_a, line_b in zip_longest(a.layers, b.layers):
        if line_a is None or line_b is None or line_a.name != line_b.name:
            return f"layers differ: {getattr(line_a, 'name', 'none')} against {getattr(line_b, 'name', 'none')}"
        if line_a.digest != line_b.digest:
            path = _first_path(_members(store_a, line_a.digest), _members(store_b, line_b.digest))
            return f"layer {line_a.name}: " + (path or "the same files, compressed to other bytes")
    return "the layers are the same, config or manifest differ"


def _first_path(members_a: Iterator[tuple[str, str]], members_b: Iterator[tuple[str, str]]) -> str | None:
    for a, b in zip_longest(members_a, members_b):
        if a != b:
            if a is None or b is None or a[0] != b[0]:
                return f"/{(a or b)[0]} is in one only"
            return f"/{a[0]}: {a[1]} against {b[1]}"
    return None


def _members(store: Store, digest: str) -> Iterator[tuple[str, str]]:
    with (
        store.blob_path(digest).open("rb") as raw,
        _plain(raw) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            content = ""
            if member.isreg() and (data := archive.extractfile(member)):
                content = "sha256 " + hashlib.file_digest(data, "sha256").hexdigest()[:12]  # type: ignore[arg-type]
            yield (
                member.name,
                f"type {member.type.decode()} mode {member.mode:o} owner {member.uid}:{member.gid} "
                f"time {member.mtime} size {member.size} {member.linkname} {content}".strip(),
            )


def _plain(raw: IO[bytes]) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(raw)
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
