"""Verbs that look into a built image: its gates, its files, its size, and whether it can be built again."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import zstandard

from primus.cli.host.common import SEVERAL, SINGLE, resolved_target, resolved_targets
from primus.cli.verb import flag, option, print_json, verb, whole
from primus.engine.image import Built, compose
from primus.engine.pipeline import Options, build
from primus.errors import InputError
from primus.gates.check import Gatekeeper, check_image, judge, outcome_text
from primus.gates.examined import examine, rules_hash
from primus.oci.store import Store
from primus.plan.layers import plan_image
from primus.plan.workspace import Workspace
from primus.progress import choose_progress
from primus.release.documents import bill, checkout, listing
from primus.release.gate_record import gate_record, write_gate_record
from primus.terminal import PLAIN, Screen, bytes_text

# Folders below this fraction of the image are summed up.
_SHARE = 0.005
# A folder that contains this fraction of its parent is not shown as a level.
_NEARLY_ALL = 0.99


@verb(
    *SEVERAL,
    flag("--record", "save the findings for README's table of targets"),
    example="primus check cpu",
)
def check(args: argparse.Namespace) -> int:
    """Run every gate on a built image, using the contents of its layers.

    The gates check ROCm versions, GPU code for the target's architecture, kernel files of other GPUs, versions against
    the lock, duplicate library names, secrets and unwanted files, and the size budget. Exit code 1 if a gate fails.
    Layers are read once; findings are cached until the layer or a rule changes.
    """
    targets, workspace = resolved_targets(args)
    outcomes = []
    with choose_progress(args.json) as progress:
        for resolved in targets:
            examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
            outcomes.append(judge(examined))
            if args.record:
                path = write_gate_record(resolved.root, gate_record(examined, outcomes[-1]))
                progress.say(f"→ {path.name}")
    passed = all(outcome.passed for outcome in outcomes)
    if args.json:
        print_json({"images": [outcome.as_json() for outcome in outcomes], "passed": passed})
    else:
        print("\n\n".join(outcome_text(outcome, Screen.of()) for outcome in outcomes))
    return 0 if passed else 1


@verb(*SINGLE, example="primus sbom cpu --json > cpu.spdx.json")
def sbom(args: argparse.Namespace) -> int:
    """List the files that a built image is made of, as in its lock.

    --json prints the SPDX 2.3 document, with checksums and package URLs, that `primus publish` stores beside the image.
    """
    resolved, workspace = resolved_target(args)
    image = compose(workspace.store, plan_image(resolved, workspace.stats))
    if image is None:
        raise InputError(
            f"{resolved.ref} is not built from the current versions.yaml", hint=f"primus build {resolved.name}"
        )
    document = bill(image, *checkout(resolved.root))
    # As in the registry: every character that is not ASCII is escaped.
    print(json.dumps(document, indent=1) if args.json else listing(document))
    return 0


@verb(*SEVERAL, flag("--keep", "keep the second store if it differs"), example="primus verify cpu")
def verify(args: argparse.Namespace) -> int:
    """Rebuild into an empty store from the same downloaded files; compare the digests and run every gate.

    If the digests differ, the first differing layer and file are named, and the exit code is 1. The gates are those of
    `primus check`.
    """
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
                "target": image.target,
                "digest": image.digest,
                "difference": failed.get(image.target),
                "gates": outcomes[image.target].as_json()["gates"],
            }
            for image in first
        ]
        print_json({"images": rows, "passed": passed})
        return 0 if passed else 1
    for image in first:
        verdict = f"differs: {failed[image.target]}" if image.target in failed else "both builds are identical"
        print(f"{image.ref} {image.digest}: {verdict}")
        print(outcome_text(outcomes[image.target], Screen.of()).partition("\n")[2])
    if failed and args.keep:
        print(f"the second store is {scratch}", file=sys.stderr)
    return 0 if passed else 1


@verb(
    *SINGLE,
    option("--depth", type=whole(least=0), default=2, metavar="N", help="depth of folders to show (default: 2)"),
    example="primus why-size cpu --depth 4",
)
def why_size(args: argparse.Namespace) -> int:
    """Show what makes an image large: unpacked bytes per layer and folder, largest first."""
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
    layers = [(layer, facts.folders) for layer, facts in examined.facts.items()]
    tree = size_tree(examined.image.plan.ref, layers, args.depth)
    if args.json:
        print_json(tree.as_json())
    else:
        print(size_text(tree, Screen.of()))
    return 0


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


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A layer or folder with everything below it; ``path`` is relative to the parent branch."""

    path: str
    size: int
    files: int
    branches: tuple[Branch, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the branch as JSON data."""
        return {
            "path": self.path,
            "bytes": self.size,
            "files": self.files,
            "below": [branch.as_json() for branch in self.branches],
        }


def size_tree(name: str, layers: Iterable[tuple[str, Mapping[str, tuple[int, int]]]], depth: int = 3) -> Branch:
    """Return the image as a tree; ``layers`` map each folder to the bytes and number of its files.

    ``depth`` counts levels below a layer. A folder with nearly everything in one subfolder is not a level: the
    branch gets the inner folder's path and the size of both.
    """
    tops = tuple(_branch(layer, _nested(folders), depth) for layer, folders in layers)
    return Branch(
        path=name,
        size=sum(t.size for t in tops),
        files=sum(t.files for t in tops),
        branches=_ordered(tops),
    )


class _Node:
    def __init__(self) -> None:
        self.size = 0
        self.files = 0
        self.below: dict[str, _Node] = {}


def _nested(folders: Mapping[str, tuple[int, int]]) -> _Node:
    root = _Node()
    for path, (size, files) in folders.items():
        node = root
        node.size, node.files = node.size + size, node.files + files
        for part in filter(None, path.split("/")):
            node = node.below.setdefault(part, _Node())
            node.size, node.files = node.size + size, node.files + files
    return root


def _branch(path: str, node: _Node, depth: int) -> Branch:
    branches = []
    for name, child in node.below.items() if depth > 0 else ():
        below, label = child, name
        while largest := max(below.below.items(), key=lambda item: item[1].size, default=None):
            if largest[1].size < _NEARLY_ALL * below.size:
                break
            label, below = f"{label}/{largest[0]}", largest[1]
        inner = _branch(label, below, depth - 1)
        branches.append(replace(inner, size=child.size, files=child.files))
    return Branch(path=path, size=node.size, files=node.files, branches=_ordered(branches))


def _ordered(branches: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda b: (-b.size, b.path)))


def size_text(tree: Branch, screen: Screen = PLAIN) -> str:
    """Return the tree as text. Folders below half a percent of the image are summed up."""
    lines: list[str] = []
    least = tree.size * _SHARE

    def draw(branch: Branch, indent: int) -> None:
        share = f"{100 * branch.size / tree.size:5.1f} %" if tree.size else ""
        head = f"{bytes_text(branch.size):>9} {share}  {'  ' * indent}"
        lines.extend(screen.wrap(branch.path, head, " " * (len(head) + 2)))
        shown = [b for b in branch.branches if b.size >= least and b.size]
        for below in shown:
            draw(below, indent + 1)
        rest = branch.size - sum(b.size for b in shown)
        if rest and shown:
            lines.append(f"{bytes_text(rest):>9}          {'  ' * (indent + 1)}(smaller)")

    draw(tree, 0)
    return "\n".join(lines)
