"""Verbs that look into the store: an image's gates, files and size, whether it can be built again; what can go."""

import argparse
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path, PurePosixPath

import zstandard

from primus.cli.host.common import SEVERAL, SINGLE, SOURCE, open_project, resolved_targets
from primus.cli.host.publish import PUBLISHED, examined_target, verify_published
from primus.cli.verb import JSON, answer, flag, several, verb
from primus.engine.pipeline import Options, build
from primus.engine.upkeep import find_waste, remove
from primus.errors import InputError, did_you_mean
from primus.gates.check import judge, outcome_text
from primus.gates.examined import examine
from primus.oci.store import Store
from primus.plan.action import Composed
from primus.plan.layers import plan_image, plan_images
from primus.plan.project import Workspace
from primus.progress import choose_progress
from primus.release.documents import bill, checkout, cyclonedx, licences, listing
from primus.terminal import Screen, Styled, bytes_text

# Folders below this fraction of the image are left out.
_SHARE = 0.005
# A folder that contains this fraction of its parent is shown in its place.
_NEARLY_ALL = 0.99


@verb(*SEVERAL, example="primus check cpu")
def check(args: argparse.Namespace) -> int:
    """Run every gate on a built image, using the contents of its layers.

    Exit code 1 if a gate fails. Layers are read once; findings are cached until the layer or a rule changes.
    """
    targets, workspace = resolved_targets(args)
    with choose_progress(args.json) as progress:
        plans = [plan_image(resolved, workspace.stats) for resolved in targets]
        outcomes = [judge(examine(plan, workspace, progress)) for plan in plans]
    passed = all(outcome.passed for outcome in outcomes)
    document = {"images": [outcome.as_json() for outcome in outcomes], "passed": passed}
    answer(args, document, ["\n\n".join(outcome_text(outcome, Screen.of()) for outcome in outcomes)])
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
    resolved, examined = examined_target(args)
    document = bill(examined.image, *checkout(resolved.root), licences(examined.facts))
    # As in the registry: every character that is not ASCII is escaped.
    shown = cyclonedx(document) if args.cyclonedx else document
    print(json.dumps(shown, indent=1) if args.json or args.cyclonedx else listing(document))
    return 0


@verb(*SEVERAL, PUBLISHED, example="primus verify --image registry.example.com/rocm/primus:v26.11-cpu --key cosign.pub")
def verify(args: argparse.Namespace) -> int:
    """Rebuild into an empty store from the same downloaded files; compare the digests and run every gate.

    If the digests differ, the first differing layer and file are named, the second store is kept, and the exit code is
    1. With --image, nothing is built: every tampering with the published image, its documents or their signatures is
    named, and so are void statements.
    """
    if args.image:
        return verify_published(args)
    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats)
    first = [built.image for built in build(plans, workspace, Options(rehash=True, quiet=args.json))]
    workspace.folder.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=workspace.folder))
    failed: dict[str, str] = {}
    try:
        # The second build has its own store but shares downloads and unpacked layers. It hashes local files again.
        twin = Workspace(Store(scratch / "store"), workspace.folder)
        second = [
            built.image
            for built in build(plan_images(targets, twin.stats), twin, Options(quiet=args.json, judge=False))
        ]
        for image, rebuilt in zip(first, second, strict=True):
            if image.digest != rebuilt.digest:
                failed[image.plan.resolved.name] = _difference((workspace.store, image), (twin.store, rebuilt))
    finally:
        if not failed:
            shutil.rmtree(scratch, ignore_errors=True)
    with choose_progress(args.json) as progress:
        outcomes = [judge(examine(image.plan, workspace, progress)) for image in first]
    passed = not failed and all(outcome.passed for outcome in outcomes)
    rows, lines = [], []
    for image, outcome in zip(first, outcomes, strict=True):
        target, difference = image.plan.resolved.name, failed.get(image.plan.resolved.name)
        row = {"target": target, "digest": image.digest, "difference": difference}
        rows.append({**row, "gates": outcome.as_json()["gates"]})
        verdict = f"differs: {difference}" if difference else "both builds are identical"
        lines += [f"{image.plan.ref} {image.digest}: {verdict}", outcome_text(outcome, Screen.of()).partition("\n")[2]]
    answer(args, {"images": rows, "passed": passed}, lines)
    if failed and not args.json:
        print(f"the second store is {scratch}", file=sys.stderr)
    return 0 if passed else 1


@verb(*SINGLE, example="primus why-size cpu")
def why_size(args: argparse.Namespace) -> int:
    """Show what makes an image large: unpacked bytes per layer and folder, largest first.

    Folders below half a percent of the image are left out.
    """
    resolved, examined = examined_target(args)
    rows = largest({layer: facts.folders for layer, facts in examined.facts.items()})
    names = ("layer", "folder", "bytes")
    document = {"image": resolved.ref, "largest": [dict(zip(names, row, strict=True)) for row in rows]}
    total = sum(size for _, folder, size in rows if not folder)
    table = [
        (bytes_text(size), f"{100 * size / max(total, 1):.1f} %", f"  {folder}" if folder else Styled(layer, "bold"))
        for layer, folder, size in rows
    ]
    answer(args, document, Screen.of().table([(bytes_text(total), "", resolved.ref), *table], right=(0, 1)))
    return 0


@verb(
    several("--image", "also remove this image, for example v26.10-cpu", "NAME"),
    flag("--caches", "also remove all downloaded files, unpacked layers and caches"),
    flag("--dry-run", "show what would be removed"),
    *SOURCE,
    JSON,
    example="primus clean --dry-run",
)
def clean(args: argparse.Namespace) -> int:
    """Free disk space: remove what no image, lock or last build needs.

    Images keep their layers and names. A removed file is made or downloaded again when something needs it.
    """
    project = open_project(args)
    store = project.workspace.store
    with project.workspace.alone():
        names = store.images()
        for name in args.image:
            if name not in names:
                hint = did_you_mean(name, names) or "images: " + (", ".join(sorted(names)) or "none")
                raise InputError(f"the store has no image called {name!r}", hint=hint)
        waste = find_waste(project.workspace, project.locked_files(), without=args.image, caches=args.caches)
        if not args.dry_run:
            for name in set(args.image):
                store.untag(name)
            remove(waste)
    size = sum(item.size for item in waste)
    rows = [{"kind": item.kind, "number": len(item.paths), "bytes": item.size} for item in waste]
    document = {"removed": not args.dry_run, "images": sorted(set(args.image)), "waste": rows, "bytes": size}
    table = [(item.kind, f"{len(item.paths):,}", bytes_text(item.size)) for item in waste]
    total = f"{'would free' if args.dry_run else 'freed'} {bytes_text(size)}" if waste else "nothing to remove"
    head = ("what", "number", "size") if waste else ()
    answer(args, document, [*Screen.of().table(table, head=head, right=(1, 2)), total])
    return 0


def _difference(first: tuple[Store, Composed], second: tuple[Store, Composed]) -> str:
    (store_a, a), (store_b, b) = first, second
    for (action, layer), (_, rebuilt) in zip(a.rows, b.rows, strict=True):
        if layer.blob.digest != rebuilt.blob.digest:
            members = (_members(store_a, layer.blob.digest), _members(store_b, rebuilt.blob.digest))
            for old, new in zip_longest(*members, fillvalue=dict[str, object]()):
                if keys := [key for key in {**old, **new} if old.get(key) != new.get(key)]:
                    changed = ", ".join(f"{key} {old.get(key)} against {new.get(key)}" for key in keys)
                    return f"layer {action.name}: /{old.get('name') or new['name']}: {changed}"
            return f"layer {action.name}: the same files, compressed to other bytes"
    return "the layers are the same, config or manifest differ"


def _members(store: Store, digest: str) -> Iterator[dict[str, object]]:
    with (
        store.blob_path(digest).open("rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            data = archive.extractfile(member) if member.isreg() else None
            content = {"sha256": hashlib.file_digest(data, "sha256").hexdigest()} if data else {}  # type: ignore[arg-type]
            yield {**member.get_info(), **content}


def largest(layers: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str, int]]:
    """Return layer, folder and bytes of each layer (folder ``""``) and each large folder, largest first.

    ``layers`` map each folder to the bytes of its own files; the result includes those below it. Folders with nearly
    everything in one subfolder are left out.
    """
    least = max(1, _SHARE * sum(sum(folders.values()) for folders in layers.values()))
    blocks = []
    for layer, folders in layers.items():
        sums = Counter[str]()
        for path, size in folders.items():
            sums.update({str(above): size for above in (PurePosixPath(path), *PurePosixPath(path).parents)})
        parents = {path: str(PurePosixPath(path).parent) for path in sums if path != "."}
        lone = {above for path, above in parents.items() if sums[path] >= _NEARLY_ALL * sums[above]}
        rows = [(layer, path, sums[path]) for path in parents if sums[path] >= least and path not in lone]
        blocks.append([(layer, "", sums["."]), *sorted(rows, key=lambda row: (-row[2], row[1]))])
    return [row for block in sorted(blocks, key=lambda block: -block[0][2]) for row in block]
