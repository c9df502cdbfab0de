"""Publish a built image with its evidence."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from primus.cli.host.common import SEVERAL, SOURCE, resolved_target, resolved_targets
from primus.cli.verb import JSON, answer, flag, folder, group, new_file, option, path, verb
from primus.errors import InputError
from primus.gates.examined import Examined, examine
from primus.plan.layers import plan_image
from primus.plan.resolve import ResolvedTarget
from primus.progress import choose_progress
from primus.release import policy
from primus.release.documents import bill, checkout, licences
from primus.release.policy import audit as look_up, load_accepted, openvex
from primus.release.publish import Ready, finish, move_tag, prepare, publish as upload
from primus.release.registry import Repository, require_repository
from primus.release.statement import Signer, Trust, requests
from primus.release.verification import verified_text, verify_image
from primus.schema import read_json
from primus.terminal import counted

_POLICY = "policy.yaml"
_TO = option("--to", default="", metavar="REPOSITORY", help="registry and path, without a tag (required)")
_SIGNER = (
    option("--key", metavar="KEY", help="sign with cosign: key file or key service; password in COSIGN_PASSWORD"),
    flag("--keyless", "sign with cosign by your identity instead, which enters the public transparency log"),
)

PUBLISHED = group(
    "a published image; needs cosign and the registry only",
    option("--image", metavar="REF", help="check the image's signatures, evidence and bytes in its registry"),
    option("--key", metavar="KEY", help="public key of its signatures: file or key service"),
    option("--identity", metavar="NAME", help="who signed it without a key, as cosign's --certificate-identity"),
    option("--issuer", metavar="URL", help="who vouches for that identity"),
    option("--policy", type=path, metavar="FILE", help="policy.yaml: what the image must have"),
)


@verb(
    *SEVERAL,
    _TO,
    flag("--preview", "publish as -preview: no validation on the GPU is needed, and the coverage gate may fail"),
    option("--records", type=folder, metavar="DIR", help="validation records (default: out/validation)"),
    option("--policy", type=path, metavar="FILE", help=f"what a release needs (default: {_POLICY})"),
    *_SIGNER,
    option("--sign-later", type=folder, metavar="DIR", help="push without the tag; `primus sign DIR` signs"),
    flag("--dry-run", "check and print only; contact no registry"),
    example="primus publish cpu --to registry.example.com/rocm/primus --dry-run",
)
def publish(args: argparse.Namespace) -> int:
    """Publish a built image with its evidence: bill of materials, provenance, gates, lock and validations.

    An image is refused, with all reasons and exit code 1, if it fails a gate, was not validated, or its commit is not
    clean. The tag of a release is never moved. The last line is the image name with its digest.
    """
    _check_repository(args.to, f"nox -s publish-{(args.target or ['TARGET'])[0]} -- --to docker.io/rocm/primus")
    targets, workspace = resolved_targets(args)
    for resolved in targets:
        if (chosen := resolved.choice).preview and not args.preview:
            print(f"! {resolved.name} is a preview of channel {chosen.channel}: {chosen.preview}", file=sys.stderr)
            print(f"  → {chosen.reason}; --preview publishes the preview", file=sys.stderr)
    if args.sign_later and (args.key or args.keyless):
        raise InputError("--sign-later leaves the signing to `primus sign`", hint="leave out --key and --keyless")
    signer = _signer(args)
    file = args.policy or targets[0].root / _POLICY
    rules = policy.load(file) if args.policy or file.exists() else policy.Policy()
    records = (args.records or targets[0].root / "out" / "validation").absolute()
    done: list[dict[str, Any]] = []
    with choose_progress(args.json) as progress:
        plans = [plan_image(resolved, workspace.stats) for resolved in targets]
        every = [
            prepare(plan, workspace, records=records, policy=rules, preview=args.preview, progress=progress)
            for plan in plans
        ]
        refused = any(ready.objections for ready in every)
        if not refused and not args.dry_run:
            later = args.sign_later
            done = [upload(r, workspace.store, args.to, progress, signer=signer, later=later) for r in every]
    lines = [line for ready in every if refused or args.dry_run for line in _judgement(ready, args.to)]
    for image in done:
        sizes = f"{image['bytes_sent'] / 1e6:.1f} of {image['bytes'] / 1e6:.1f} MB"
        sent = f"sent {sizes}" if image["new"] else "already published"
        lines.append(f"{image['ref']}: {sent}, {len(image['attached'])} documents attached")
        if image["to_sign"] and not args.json:
            print(f"! not signed and not tagged: run `primus sign {args.sign_later} --key KEY`", file=sys.stderr)
        lines.append(f"{args.to}@{image['digest']}")
    judged = []
    for ready in every:
        row = {"tag": ready.tag, "digest": ready.image.digest, "objections": ready.objections}
        judged.append({**row, "documents": [document.name for document in ready.documents]})
    answer(args, {"published": done, "judged": judged, "passed": not refused}, lines)
    return 1 if refused else 0


@verb(
    option("tag", metavar="TAG", help="tag that moves, such as latest-cpu"),
    option("release", metavar="RELEASE", help="published release that it shall name, such as v26.11-cpu"),
    _TO,
    JSON,
    example="primus tag latest-cpu v26.11-cpu --to registry.example.com/rocm/primus",
)
def tag(args: argparse.Namespace) -> int:
    """Move a tag to a published release, forwards after a publish or back to an earlier one.

    Tags of releases (v26.11-cpu) never move; all others may: latest-cpu, v26.11. Nothing is sent but the tag.
    """
    _check_repository(args.to, "primus tag latest-cpu v26.11-cpu --to docker.io/rocm/primus")
    before, digest = move_tag(Repository(args.to), args.tag, args.release)
    line = f"{args.to}:{args.tag}: {before or 'new'} → {digest} ({args.release})"
    answer(args, {"tag": f"{args.to}:{args.tag}", "old": before, "new": digest}, [line])
    return 0


def _check_repository(name: str, example: str) -> None:
    if not name:
        raise InputError("--to is missing: it names the repository to publish to", hint=example)
    require_repository(name, "--to")


@verb(
    option("folder", type=path, metavar="DIR", help="folder that `primus publish --sign-later` wrote"),
    *_SIGNER,
    JSON,
    example="primus sign to-sign --key cosign.key",
)
def sign(args: argparse.Namespace) -> int:
    """Sign the evidence of published images, attach it to them in the registry, and set their tags.

    Needs cosign, the registry and the key, but no project: images are built and validated on machines without the key.
    """
    if (signer := _signer(args)) is None:
        raise InputError("--key or --keyless is missing: who signs?", hint="--key cosign.key")
    done = []
    for ref, subject, about in requests(args.folder):
        name, _, tag = ref.rpartition(":")
        there = Repository(name)
        done.append({"ref": ref, "digest": subject["digest"], "signed": finish(there, tag, subject, about, signer)})
    lines = (f"{row['ref']}: {row['signed']} statements signed\n{row['ref']}@{row['digest']}" for row in done)
    answer(args, {"signed": done}, lines)
    return 0


def verify_published(args: argparse.Namespace) -> int:
    """Run `primus verify --image`."""
    if args.target or args.all:
        raise InputError("--image names a published image; a target is built from this project", hint="name one")
    if bool(args.key) == bool(args.identity and args.issuer):
        raise InputError("who must have signed it? Name --key, or --identity and --issuer", hint="--key cosign.pub")
    trust = Trust(key=args.key, identity=args.identity, issuer=args.issuer)
    trust.check("--key")
    rules = policy.load(args.policy) if args.policy else None
    with choose_progress(args.json) as progress:
        result = verify_image(args.image, trust, policy=rules, say=progress.say)
    answer(args, {**asdict(result), "passed": result.passed}, [verified_text(args.image, result)])
    return 0 if result.passed else 1


@verb(
    option("what", metavar="SBOM|TARGET", help="SPDX file of `primus sbom --json`, or a built image"),
    *SOURCE,
    option("--osv", type=path, metavar="PATH", required=True, help="OSV data: file, folder or all.zip"),
    option("--accepted", type=path, metavar="FILE", help="accepted ones, with reason and date"),
    option("--vex", type=new_file(".json"), metavar="FILE", help="write the result as OpenVEX"),
    JSON,
    example="primus audit cpu --osv osv/ --accepted accepted.yaml",
)
def audit(args: argparse.Namespace) -> int:
    """Look up the packages of an image in OSV data of PyPI and Debian, without a network.

    An accepted vulnerability needs a reason and the day of its next review. Exit code 1 if another one is found, or if
    a review is late.
    """
    file = Path(args.what)
    if file.is_file():
        bom: Any = read_json(file).data
    else:
        args.target = args.what
        resolved, examined = examined_target(args)
        bom = bill(examined.image, *checkout(resolved.root), licences(examined.facts))
    findings, today = look_up(bom, args.osv, load_accepted(args.accepted)), datetime.now(tz=UTC)
    if args.vex and not findings:
        print("! no vulnerability, so no VEX is written: OpenVEX needs a statement", file=sys.stderr)
    elif args.vex:
        vex = openvex(findings, str(bom.get("name", "image")), today.strftime("%Y-%m-%dT%H:%M:%SZ"))
        args.vex.write_text(json.dumps(vex, indent=1) + "\n", encoding="utf-8")
    unsafe = [finding for finding in findings if finding.is_open(today.date())]
    lines = [f"{'✗' if finding in unsafe else '–'} {finding.sentence(today.date())}" for finding in findings]
    verdict = f"{'FAILED' if unsafe else 'passed'}: {counted(len(unsafe), 'finding')} to act on"
    document = {"findings": [asdict(finding) for finding in findings], "passed": not unsafe}
    answer(args, document, [*lines, f"{verdict}, {len(findings) - len(unsafe)} accepted"])
    return 1 if unsafe else 0


def examined_target(args: argparse.Namespace) -> tuple[ResolvedTarget, Examined]:
    """Resolve the requested target, and examine the layers of its image. Raises InputError if it is not built."""
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        return resolved, examine(plan_image(resolved, workspace.stats), workspace, progress)


def _signer(args: argparse.Namespace) -> Signer | None:
    if args.key and args.keyless:
        raise InputError("--key and --keyless exclude each other")
    return Signer(key=args.key) if args.key or args.keyless else None


def _judgement(ready: Ready, repository: str) -> Iterator[str]:
    sign = "✗" if ready.objections else "✓"
    yield f"{sign} {repository}:{ready.tag}  {ready.image.digest}  {ready.image.size / 1e6:.1f} MB"
    yield from (f"    ✗ {objection}" for objection in ready.objections)
    yield from (f"    + {document.name}" for document in ready.documents)
