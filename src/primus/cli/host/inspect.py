"""Verbs that look into a built image: its gates, its files, its size, and whether it can be built again."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path, PurePosixPath

import zstandard

from primus.cli.host.common import SEVERAL, SINGLE, resolved_target, resolved_targets
from primus.cli.host.publish import PUBLISHED, verify_published
from primus.cli.verb import flag, print_json, verb
from primus.engine.image import Built
from primus.engine.pipeline import Options, build
from primus.gates.check import Gatekeeper, check_image, judge, outcome_text
from primus.gates.examined import examine, rules_hash
from primus.oci.store import Store
from primus.plan.layers import plan_image
from primus.plan.workspace import Workspace
from primus.progress import choose_progress
from primus.release.documents import bill, checkout, cyclonedx, listing
from primus.release.gate_record import gate_record, write_gate_record
from primus.release.licences import licences
from primus.terminal import Screen, Styled, bytes_text

# Folders below this fraction of the image are left out.
_SHARE = 0.005
# A folder that contains this fraction of its parent is shown in its place.
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


@verb(
    *SINGLE,
    flag("--cyclonedx", "print CycloneDX 1.6 instead of SPDX; implies --json"),
    example="primus sbom cpu --json > cpu.spdx.json",
)
def sbom(args: argparse.Namespace) -> int:
    """List the files that a built image is made of, as in its lock, with the licences that they declare.

    --json prints the SPDX 2.3 document, with checksums, licences and package URLs, that `primus publish` stores beside
    the image.
    """
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
    document = bill(examined.image, *checkout(resolved.root), licences(examined.facts))
    # As in the registry: every character that is not ASCII is escaped.
    shown = cyclonedx(document) if args.cyclonedx else document
    print(json.dumps(shown, indent=1) if args.json or args.cyclonedx else listing(document))
    return 0


@verb(
    *SEVERAL,
    PUBLISHED,
    example="primus verify --image registry.example.com/rocm/primus:v26.11-cpu --key cosign.pub",
)
def verify(args: argparse.Namespace) -> int:
    """Rebuild into an empty store from the same downloaded files; compare the digests and run every gate.

    If the digests differ, the first differing layer and file are named, the second store is kept, and the exit code is
    1. The gates are those of `primus check`. With --image, nothing is built: every tampering with the published image,
    its documents or their signatures is named, and so are statements that are void because suite, driver or firmware
    differ.
    """
    if args.image:
        return verify_published(args)
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
        if not failed:
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
    if failed:
        print(f"the second store is {scratch}", file=sys.stderr)
    return 0 if passed else 1


@verb(*SINGLE, example="primus why-size cpu")
def why_size(args: argparse.Namespace) -> int:
    """Show what makes an image large: unpacked bytes per layer and folder, largest first.

    Folders below half a percent of the image are left out.
    """
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
    rows = largest({layer: facts.folders for layer, facts in examined.facts.items()})
    if args.json:
        names = ("layer", "folder", "bytes", "files")
        print_json({"image": resolved.ref, "largest": [dict(zip(names, row, strict=True)) for row in rows]})
        return 0
    total = sum(size for _, folder, size, _ in rows if not folder)
    table = [
        (bytes_text(size), f"{100 * size / max(total, 1):.1f} %", f"  {folder}" if folder else Styled(layer, "bold"))
        for layer, folder, size, _ in rows
    ]
    print("\n".join(Screen.of().table([(bytes_text(total), "", resolved.ref), *table], right=(0, 1))))
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
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream,
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


def largest(layers: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[tuple[str, str, int, int]]:
    """Return layer, folder, bytes and files of each layer (folder ``""``) and each large folder, largest first.

    ``layers`` map each folder to the bytes and number of its own files; the result includes those below it. Folders
    with nearly everything in one subfolder are left out.
    """
    least = _SHARE * sum(size for folders in layers.values() for size, _ in folders.values())
    blocks = []
    for layer, folders in layers.items():
        sums: dict[str, tuple[int, int]] = {"": (0, 0)}
        for path, (size, files) in folders.items():
            for above in {
                "" if str(of) == "." else str(of) for of in (PurePosixPath(path), *PurePosixPath(path).parents)
            }:
                before = sums.get(above, (0, 0))
                sums[above] = before[0] + size, before[1] + files
        above_of = {path: path.rpartition("/")[0] for path in sums}
        lone = {above_of[path] for path, (size, _) in sums.items() if size >= _NEARLY_ALL * sums[above_of[path]][0]}
        shown = [path for path, (size, _) in sums.items() if not path or (size >= max(least, 1) and path not in lone)]
        blocks.append([(layer, path, *sums[path]) for path in sorted(shown, key=lambda path: (-sums[path][0], path))])
    return [row for block in sorted(blocks, key=lambda block: -block[0][2]) for row in block]
