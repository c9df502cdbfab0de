"""``primus verify``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from primus.cli.host.common import resolved_targets
from primus.display import choose_progress
from primus.engine.difference import first_difference
from primus.engine.image import Options
from primus.engine.schedule import build_images
from primus.gates.admit import Gatekeeper
from primus.gates.check import check_image, outcome_text
from primus.oci.store import Store
from primus.plan.locking import plan_images
from primus.plan.workspace import Workspace
from primus.terminal import Screen


def run(args: argparse.Namespace) -> int:
    """Build again into an empty store, compare the digests and run the gates. Returns 0, or 1 on a difference."""
    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats, locked=True, quiet=args.json)
    first = build_images(plans, workspace, gates=Gatekeeper, options=Options(locked=True, rehash=True, quiet=args.json))
    workspace.folder.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=workspace.folder))
    failed: dict[str, str] = {}
    try:
        # The second build has its own store but shares downloads and unpacked layers. It hashes local files again.
        twin = Workspace(Store(scratch / "store"), workspace.folder)
        again = plan_images(targets, twin.stats, locked=True)
        second = build_images(again, twin, gates=None, options=Options(locked=True, quiet=args.json))
        for one, other in zip(first, second, strict=True):
            if (where := first_difference((workspace.store, one), (twin.store, other))) is not None:
                failed[one.target] = where
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
