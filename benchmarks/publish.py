"""What publishing takes and sends when nothing changed, or one component: `python -m
benchmarks.publish [GIGABYTES]`.

The image has three components of random bytes. Its registry is Debian's docker-registry on
127.0.0.1, whose access log says what was sent. `skopeo copy` of the same image from the same store
and of each document is the other side. A publish is timed as a process of its own
(`benchmarks/publish_once.py`), and beside it what such a process takes to start and to import.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measure import PRIMUS, machine, run
from primus_images.release.registry import Repository

RESULT = Path(__file__).parent / "results/publish.json"
_PARTS = ("alpha", "beta", "gamma")
_REPEATS = 9
_PORT = 5077
NAME = f"127.0.0.1:{_PORT}/rocm/primus"
# Other work of the machine must not count, on either side.
FIRST = ("chrt", "--fifo", "1") if os.geteuid() == 0 else ()
_PARTS_OF_OURS = (
    [sys.executable, "-c", "pass"],
    [sys.executable, "-c", "import benchmarks.publish_once"],
)


def make_project(root: Path, gigabytes: float) -> None:
    """Write a project whose target ``demo`` has three components of random bytes."""
    pins = "".join(
        f"  {part}:\n    name: {part}\n    pins:\n      - "
        f"{{path: parts/{part}, to: /opt/{part}, channel: local}}\n"
        for part in _PARTS
    )
    head = "release: v26.11\ncreated: 2026-11-20\nbases: {}\ncomponents:\n"
    texts = {
        "versions.yaml": head + pins,
        "images/demo.yaml": "description: random\nchannels: [local]\n",
    }
    texts["images/demo.yaml"] += f"components: [{', '.join(_PARTS)}]\ncommand: [sh]\n"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for part in _PARTS:
        (root / "parts" / part).mkdir(parents=True)
        with (root / "parts" / part / "blob").open("wb") as file:
            random = Random(part)
            for _ in range(int(gigabytes * 1e9 / len(_PARTS) / (1 << 24)) + 1):
                file.write(random.randbytes(1 << 24))


@contextmanager
def registry(folder: Path) -> Iterator[Path]:
    """Run a registry, and yield its access log."""
    config, log = folder / "config.yml", folder / "log"
    storage = f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}"
    config.write_text(
        f"version: 0.1\n{storage}\nhttp: {{addr: '127.0.0.1:{_PORT}'}}\n", encoding="utf-8"
    )
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*FIRST, "docker-registry", "serve", str(config)], stdout=file, stderr=file
        )
    try:
        time.sleep(2)
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _sent(log: str) -> tuple[set[str], list[str]]:
    """Return the digests of the blobs that were sent, and the references of the manifests."""
    blobs = re.findall(
        r'"PUT /v2/\S+/blobs/uploads/\S*digest=(sha256)(?:%3A|:)([0-9a-f]{64})\S* HTTP', log
    )
    return {":".join(pair) for pair in blobs}, re.findall(r'"PUT /v2/\S+/manifests/(\S+) HTTP', log)


def copies(image: str, folder: Path) -> list[list[str]]:
    """Return the commands by which skopeo copies what is attached to the image, one at a time."""
    commands = []
    for number, entry in enumerate(Repository(NAME).referrers(image)):
        there = f"docker://{NAME}@{entry['digest']}"
        here = f"oci:{folder}:d{number}"
        words = ["skopeo", "copy", "--quiet"]
        subprocess.run([*words, "--src-tls-verify=false", there, here], check=True)
        commands.append([*words, "--dest-tls-verify=false", here, there])
    return commands


def main(gigabytes: float) -> None:
    """Measure, and write the results."""
    with TemporaryDirectory(prefix="primus-publish-") as name:
        root = Path(name) / "project"
        make_project(root, gigabytes)
        build = [*PRIMUS, "build", "demo", "--project", str(root)]
        run(build)
        ours = [sys.executable, "-m", "benchmarks.publish_once", str(root), NAME]
        source = f"oci:{root / '.primus/store'}:v26.11-demo"
        theirs = [
            "skopeo",
            "copy",
            "--quiet",
            "--dest-tls-verify=false",
            source,
            f"docker://{NAME}:by-skopeo",
        ]
        with registry(Path(name)) as log:
            first = run(ours)
            run(theirs)
            documents = copies(json.loads(first.lines[-1])["digest"], Path(name) / "documents")
            rounds = []
            for _ in range(_REPEATS):
                seconds = [run([*FIRST, *command]).seconds for command in (ours, theirs)]
                seconds.append(sum(run([*FIRST, *command]).seconds for command in documents))
                seconds += [run([*FIRST, *command]).seconds for command in _PARTS_OF_OURS]
                rounds.append(seconds)
            size = log.stat().st_size
            nothing = json.loads(run(ours).lines[-1])
            same = _sent(log.read_text(encoding="utf-8")[size:])
            (root / "parts/beta/more").write_text("more\n", encoding="utf-8")
            text = (root / "versions.yaml").read_text(encoding="utf-8")
            (root / "versions.yaml").write_text(text.replace("v26.11", "v26.12"), encoding="utf-8")
            run(build)
            size = log.stat().st_size
            changed = run(ours)
            done = json.loads(changed.lines[-1])
            blobs, manifests = _sent(log.read_text(encoding="utf-8")[size:])
        before, after = json.loads(first.lines[-1]), done
        layers = blobs & {*after["layers"]}
        result = {
            "generated": f"python -m benchmarks.publish {gigabytes:g}",
            "machine": machine(),
            "bytes": before["bytes"],
            "nothing changed": {
                "publish_s": round(median(ours for ours, *_ in rounds), 3),
                "documents": len(documents),
                "skopeo_s": round(median(theirs for _, theirs, *_ in rounds), 3),
                "skopeo of documents_s": round(median(rest for _, _, rest, *_ in rounds), 3),
                "ratio to image and documents": round(
                    median(ours / (theirs + rest) for ours, theirs, rest, *_ in rounds), 2
                ),
                "ratio to the image alone": round(
                    median(ours / theirs for ours, theirs, *_ in rounds), 2
                ),
                "of publish_s: start of Python": round(median(start for *_, start, _ in rounds), 3),
                "of publish_s: imports": round(
                    median(imports - start for *_, start, imports in rounds), 3
                ),
                "of publish_s: checks and requests": round(
                    median(ours - imports for ours, *_, imports in rounds), 3
                ),
                "rounds": [[round(seconds, 3) for seconds in row] for row in rounds],
                "blobs sent": len(same[0]),
                "manifests sent": len(same[1]),
                "new": nothing["new"],
            },
            "one component changed": {
                "seconds": round(changed.seconds, 2),
                "bytes of layers sent": done["bytes_sent"],
                "layers sent": len(layers),
                "layers that differ": len({*after["layers"]} - {*before["layers"]}),
                "configs sent": len(blobs & {after["config"]}),
                "documents": len(done["attached"]),
                "other blobs sent": len(blobs - layers - {after["config"]}),
                "manifests sent": manifests,
            },
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else 3.0)
