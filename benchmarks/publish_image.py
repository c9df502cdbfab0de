"""What publishing a real image takes when nothing changed: `python -m benchmarks.publish_image
PROJECT TARGET [RESULT]`.

PROJECT is a clone in which the target is built and validated, as a release needs it. The command
`primus publish` runs in turn with `skopeo copy` of the image from the same store, and of each
document. skopeo copies one image at a time, so each document is a process. The registry is Debian's
docker-registry on 127.0.0.1.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.measure import PRIMUS, machine
from benchmarks.publish import FIRST, NAME, copies, registry
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve

RESULTS = Path(__file__).parent / "results"
_REPEATS = 12
# What a publish imports: its own modules and requests, and then the libraries of the bills.
_MODULES = "import primus_images.cli.host.publish"
_LIBRARIES = f"{_MODULES}, cyclonedx.output.json, spdx_tools.spdx.jsonschema.document_converter"


def main(folder: str, target: str, name_of_result: str = "publish-cpu") -> None:
    """Measure, and write the results."""
    root = Path(folder).resolve()
    ref = resolve(Project(root), target).ref
    ours = [*FIRST, *PRIMUS, "publish", target, "--to", NAME, "--project", str(root), "--json"]
    store = f"oci:{root / '.primus/store'}:{ref}"
    there = f"docker://{NAME}:by-skopeo"
    theirs = [*FIRST, "skopeo", "copy", "--quiet", "--dest-tls-verify=false", store, there]
    with TemporaryDirectory(prefix="primus-publish-") as name, registry(Path(name)):
        first = _published(_timed(ours).text)
        _timed(theirs)
        documents = copies(first["digest"], Path(name) / "documents")
        rounds = []
        for _ in range(_REPEATS):
            publish_s = _timed(ours).seconds
            image_s = _timed(theirs).seconds
            documents_s = sum(_timed([*FIRST, *command]).seconds for command in documents)
            modules_s = _timed([*FIRST, sys.executable, "-c", _MODULES]).seconds
            libraries_s = _timed([*FIRST, sys.executable, "-c", _LIBRARIES]).seconds
            rounds.append((publish_s, image_s, documents_s, modules_s, libraries_s))
        last = _published(_timed(ours).text)
    both = [publish_s / (image_s + rest) for publish_s, image_s, rest, *_ in rounds]
    alone = [publish_s / image_s for publish_s, image_s, *_ in rounds]
    result = {
        "generated": f"python -m benchmarks.publish_image PROJECT {target} {name_of_result}",
        "machine": machine(),
        "image": ref,
        "bytes": last["bytes"],
        "bytes sent": last["bytes_sent"],
        "documents": len(documents),
        "publish_s": round(median(row[0] for row in rounds), 3),
        "skopeo of the image_s": round(median(row[1] for row in rounds), 3),
        "skopeo of the documents_s": round(median(row[2] for row in rounds), 3),
        "ratio to image and documents": round(median(both), 2),
        "ratio to the image alone": round(median(alone), 2),
        "of publish_s: start and imports": round(median(row[3] for row in rounds), 3),
        "of publish_s: libraries of bills of materials": round(
            median(row[4] - row[3] for row in rounds), 3
        ),
        "rounds": [[round(seconds, 3) for seconds in row] for row in rounds],
    }
    text = json.dumps(result, indent=1) + "\n"
    (RESULTS / f"{name_of_result}.json").write_text(text, encoding="utf-8")
    print(text)


class _Ended(NamedTuple):
    """A command that succeeded: what it took, and what it printed."""

    seconds: float
    text: str


def _timed(command: Sequence[str]) -> _Ended:
    """Run a command. It writes nothing that counts, so no write of an earlier one has to end."""
    start = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return _Ended(time.perf_counter() - start, done.stdout)


def _published(text: str) -> dict[str, Any]:
    """Return what `primus publish --json` says of the image."""
    answer: dict[str, Any] = json.loads(text)["published"][0]
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
