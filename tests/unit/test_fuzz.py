"""Every reader of bytes that others wrote: whatever they are, it reads them or refuses them with
one kind of error.

CI reads about 500 damaged inputs. ``PRIMUS_FUZZ=10000`` reads that many for each reader, as a
nightly run does.
"""

import io
import json
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings, strategies as st
from requests.adapters import BaseAdapter

from primus_images import files
from primus_images.engine.kinds.wheels import wheel_entries
from primus_images.errors import PrimusError
from primus_images.gpucode.bundles import bundles_in
from primus_images.gpucode.elf import read_elf
from primus_images.oci.layer import walk, write_layer
from primus_images.oci.store import MANIFEST_TYPE, Blob, Store
from primus_images.oci.tar import Entry
from primus_images.plan.skeleton import Prefix
from primus_images.plan.stats import StatIndex
from primus_images.recipes.assets import vocabulary
from primus_images.recipes.experiments.source import import_experiment
from primus_images.recipes.load import parse
from primus_images.recipes.tensors import header
from primus_images.recipes.weights import config_of
from primus_images.release.artifact import Document, artifact
from primus_images.release.registry import Repository
from primus_images.report.run import read_all
from primus_images.system import nodes
from primus_images.training.run import identity
from primus_images.versions.lock import dumps, load, loads

ROOT = Path(__file__).parents[2]
PREFIX = Prefix(python="3.11")


def wheel() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {
            "demo/__init__.py": "x = 1\n" * 40,
            "d-1.dist-info/WHEEL": "Wheel-Version: 1.0\n",
            "d-1.data/scripts/run": "#!python\n",
            "d-1.dist-info/RECORD": "demo/__init__.py,,\n",
            "d-1.dist-info/entry_points.txt": "[console_scripts]\nrun = demo:main\n",
        }.items():
            archive.writestr(name, text)
    return data.getvalue()


def tensors() -> bytes:
    head = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(16)


class Registry(BaseAdapter):
    """Answers every request with the same bytes, and with them in its headers."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:  # type: ignore[override]
        answer = requests.Response()
        answer.status_code, answer.raw, answer.url = 200, io.BytesIO(self.data), str(request.url)
        answer.request, answer.connection = request, self  # type: ignore[attr-defined]
        head = self.data[:60].decode("latin-1").split("\n")[0]
        answer.headers = requests.structures.CaseInsensitiveDict(
            {"Docker-Content-Digest": head, "Location": head}
        )
        return answer

    def close(self) -> None:
        pass


def of_registry(data: bytes, _: Path) -> None:
    repository = Repository("localhost:1/a/b")
    repository._session.mount("http://", Registry(data))
    for call in (
        lambda: repository.digest("v1"),
        repository.check_uploads,
        lambda: [repository.document(one) for one in repository.referrers("sha256:" + "0" * 64)],
    ):
        try:
            call()
        except PrimusError:
            continue


def of_store(data: bytes, folder: Path) -> None:
    store = Store(folder / "store")
    store.prepare()
    (folder / "store/index.json").write_bytes(data)
    try:
        store.images()
        store.names("v1", Blob.of(b"{}", MANIFEST_TYPE))
    finally:
        store.reset_index()
    for room in ("actions", "targets"):
        (folder / f"store/{room}").mkdir(exist_ok=True)
        (folder / f"store/{room}/k.json").write_bytes(files.seal(data))
        store.record(room, "k")
    store.layer("k")


def of_stats(data: bytes, folder: Path) -> None:
    (folder / "stats.json").write_bytes(files.seal(data))
    StatIndex(folder / "stats.json").sha256(str(folder / "known"))


def of_layer(data: bytes, folder: Path) -> None:
    (folder / "layer").write_bytes(data)
    for compression in ("tar+gzip", "tar+zstd"):
        blob = Blob(
            digest="sha256:" + "0" * 64, size=len(data), media_type=f"application/x.{compression}"
        )
        for member in walk(blob, folder / "layer"):
            if member.kind == "file":
                next(iter(member.chunks), b"")


def of_run(data: bytes, folder: Path) -> None:
    for name in ("metrics.jsonl", "result.json", "facts.json", "log.txt", "job.json", "proof.json"):
        (folder / name).write_bytes(data)
    read_all([folder])


def of_checkpoint(data: bytes, folder: Path) -> None:
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "recipe.json",
        "sealed.json",
        ".metadata",
    ):
        (folder / name).write_bytes(data)
    for call in (
        lambda: header(folder / "model.safetensors"),
        lambda: identity.fingerprint(folder),
        lambda: identity.saved(folder),
        lambda: identity.complete(folder),
        lambda: config_of(folder),
        lambda: vocabulary(folder),
    ):
        try:
            call()
        except PrimusError:
            continue


def of_gpu_code(data: bytes, _: Path) -> None:
    # Gates turn this one error into a warning.
    with suppress(ValueError):
        [*bundles_in(io.BytesIO(data), 0, len(data))]
    with suppress(ValueError):
        read_elf(io.BytesIO(data))


def to_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def call(data: bytes, folder: Path) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return call


def layer(folder: Path) -> bytes:
    store = Store(folder / "seed")
    store.prepare()
    made = write_layer(store, [Entry(path="a/b", source=b"text" * 99, size=396)])
    return store.blob_path(made.blob.digest).read_bytes()


def lock(_: Path) -> bytes:
    whole = load(ROOT / "images/locks/pypi/cpu.json")
    assert whole
    return dumps(replace(whole, files=whole.files[:3])).encode()


NODE = nodes.Node(name="a", gpus=("x",), driver="1", findings=())
IMAGE = {"mediaType": MANIFEST_TYPE, "digest": "sha256:" + "0" * 64, "size": 2}
ENTRY = {**IMAGE, "annotations": {"org.opencontainers.image.ref.name": "v1"}}
INDEX = json.dumps({"schemaVersion": 2, "manifests": [ENTRY], "layers": [IMAGE]}).encode()
TEXTS = ("recipes/llama3.1-8b.yaml", "tests/fixtures/old_commands.yaml")
# Reader → a sound input, and what reads it.
READERS: dict[str, tuple[Callable[[Path], bytes], Callable[[bytes, Path], object]]] = {
    "wheel": (
        lambda _: wheel(),
        to_file(
            "w.whl",
            lambda path: [
                b"".join(e.chunks()) for e in wheel_entries(path, "d-1-py3-none-any.whl", PREFIX)
            ],
        ),
    ),
    "registry": (lambda _: INDEX, of_registry),
    "artifact": (
        lambda _: artifact(Document(media_type="a/b", name="n", data=b"{}"), IMAGE),
        of_registry,
    ),
    "store": (lambda _: INDEX, of_store),
    "stats": (
        lambda folder: json.dumps({str(folder / "known"): [0, 1, 2, 3, "0" * 64]}).encode(),
        of_stats,
    ),
    "layer": (layer, of_layer),
    "lock": (lock, lambda data, _: loads(data, "lock")),
    "recipe": (
        lambda _: (ROOT / TEXTS[0]).read_bytes(),
        lambda data, _: parse(data.decode("utf-8", "replace"), "r.yaml"),
    ),
    "experiment": (
        lambda _: (ROOT / TEXTS[1]).read_bytes()[:2000],
        to_file("e.yaml", lambda path: import_experiment(path, {})),
    ),
    "node": (lambda _: json.dumps(NODE.document()).encode(), to_file("n.json", nodes.read)),
    "run": (lambda _: b'{"exit_code": 0, "step": 1, "loss": 2.0, "summary": {"steps": 1}}', of_run),
    "checkpoint": (lambda _: tensors(), of_checkpoint),
    "model": (
        lambda _: (
            b'{"architectures": ["A"], "hidden_size": 8, "model": {"vocab": {"a": 1}}, '
            b'"weight_map": {}}'
        ),
        of_checkpoint,
    ),
    "GPU code": (
        lambda _: b"\x7fELF\x02\x01\x01" + bytes(57) + b"__CLANG_OFFLOAD_BUNDLE__" + bytes(40),
        of_gpu_code,
    ),
}
# A change: where (a share of the length), how many bytes go, what comes.
ODD = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"-1",
    b"9" * 400,
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"1e999",
    b"[" * 3000,
    b"\xed\xa0\x80",
    b"\n",
)
CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 40) | st.just(10**6),
        st.sampled_from(ODD) | st.binary(max_size=8),
    ),
    min_size=1,
    max_size=6,
)
EXAMPLES = int(os.environ.get("PRIMUS_FUZZ", "36"))


def changed(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for share, gone, new in changes:
        at = int(share * len(data))
        data = data[:at] + new + data[at + gone :]
    return data


@pytest.mark.parametrize("reader", list(READERS))
def test_no_bytes_end_in_a_traceback(reader: str, tmp_path: Path) -> None:
    seed, read = READERS[reader]
    (tmp_path / "known").touch()
    sound = seed(tmp_path)

    @settings(
        max_examples=EXAMPLES, deadline=5000, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(changes=CHANGES)
    def fuzz(changes: list[tuple[float, int, bytes]]) -> None:
        try:
            read(changed(sound, changes), tmp_path)
        except PrimusError as error:
            assert len(error.message) < 2000
            assert "Traceback" not in error.message

    fuzz()
