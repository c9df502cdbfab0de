"""Images of a registry, with a stand-in for skopeo."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from primus.errors import HostError, InputError
from primus.versions.lock import LockedFile
from primus.versions.registry import dpkg_status, resolve_image

IMAGE = "r.example/image@sha256:" + "0" * 64


@pytest.fixture
def skopeo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that runs as skopeo. Its last argument is ``dir:FOLDER``."""
    script = tmp_path / "bin" / "skopeo"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return script


def status_of(folder: Path, layer: bytes) -> str:
    """dpkg's status in an image with one layer, which skopeo has copied."""
    file = LockedFile(kind="layer", name="x-01", version="", file="x.tar.gz", size=len(layer), sha256="1" * 64)
    (folder / file.sha256).write_bytes(layer)
    return dpkg_status(IMAGE, "amd64", (file,), folder)


def tar(text: bytes = b"Package: x\n", **fields: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("./var/lib/dpkg/status")
        member.size = len(text)
        for name, value in fields.items():
            setattr(member, name, value)
        archive.addfile(member, io.BytesIO(text))
    return out.getvalue()


@pytest.mark.usefixtures("skopeo")
def test_the_packages_of_an_image_are_read(tmp_path: Path) -> None:
    assert status_of(tmp_path, gzip.compress(tar())) == "Package: x\n"


@pytest.mark.usefixtures("skopeo")
@pytest.mark.parametrize(
    "layer",
    [
        b"no gzip at all",
        gzip.compress(b"no tar at all"),
        gzip.compress(tar(), 0)[:600],
        gzip.compress(tar())[:60] + bytes(60),
        gzip.compress(tar(pax_headers={"GNU.sparse.map": "abc", "GNU.sparse.size": "1"})),
        gzip.compress(tar(b"", type=b"L")[:512] * 3000),
    ],
    ids=["no gzip", "no tar", "short", "damaged", "sparse", "chain"],
)
def test_a_layer_that_is_no_archive_is_named(tmp_path: Path, layer: bytes) -> None:
    with pytest.raises(InputError, match=f"layer sha256:{'1' * 64} of r.example/image@.* is not a gzip-compressed tar"):
        status_of(tmp_path, layer)


OCI = "application/vnd.oci.image.layer.v1.tar"


def layers_of(script: Path, manifest: object) -> tuple[LockedFile, ...]:
    """The layers of an image with this manifest."""
    data = json.dumps(manifest).encode()
    (script.parent / "manifest").write_bytes(data)
    script.write_text(f"#!/bin/sh\ncat {script.parent}/manifest\n")
    return resolve_image("based", f"r.example/image@sha256:{hashlib.sha256(data).hexdigest()}", "amd64")


def test_the_layers_of_a_manifest_are_locked_lowest_first(skopeo: Path) -> None:
    rows = [{"mediaType": f"{OCI}+gzip", "digest": f"sha256:{n * 64}", "size": 7} for n in "12"]
    files = layers_of(skopeo, {"layers": rows})
    assert [(f.kind, f.name, f.sha256[0], f.size, f.base) for f in files] == [
        ("layer", "image-01", "1", 7, "based"),
        ("layer", "image-02", "2", 7, "based"),
    ]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"layers": [{}]}, "damaged manifest"),
        ({"layers": ["a"]}, "damaged manifest"),
        ({"manifests": [{"platform": 3}]}, "damaged manifest"),
        ({"layers": [{"mediaType": f"{OCI}+gzip", "digest": "sha256:0", "size": "x"}]}, "damaged manifest"),
        ({"manifests": [{"platform": {"os": "linux", "architecture": "amd64"}}]}, "damaged manifest"),
        ({"manifests": [{"platform": {"os": "linux", "architecture": "arm64"}}]}, "has no image for linux/amd64"),
        ({"layers": [{"mediaType": f"{OCI}+zstd"}]}, "has a layer of type"),
        ({"schemaVersion": 1, "fsLayers": []}, "is not an image with layers, but schema 1"),
        ([], "is not a manifest"),
    ],
)
def test_a_manifest_without_usable_layers_is_a_sentence(skopeo: Path, manifest: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layers_of(skopeo, manifest)


def test_other_bytes_than_the_digest_are_refused(skopeo: Path) -> None:
    skopeo.write_text("#!/bin/sh\necho '{}'\n")
    with pytest.raises(HostError, match="sent different bytes"):
        resolve_image("based", IMAGE, "amd64")


@pytest.mark.parametrize(
    ("log", "reason", "hint"),
    [
        (
            'level=fatal msg="reading manifest: \\"x\\": connection refused"',
            'reading manifest: "x": connection refused',
            "check the network",
        ),
        ('level=fatal msg="unauthorized: authentication required"', "unauthorized", "skopeo login r.example"),
        ('level=debug msg="Too many requests: sleeping"', "its rate limit is reached", "skopeo login r.example"),
        ("", "skopeo failed", "mirror"),
    ],
)
def test_a_failure_has_skopeos_own_words_and_a_next_step(skopeo: Path, log: str, reason: str, hint: str) -> None:
    (skopeo.parent / "log").write_text(log)
    skopeo.write_text(f"#!/bin/sh\ncat {skopeo.parent}/log >&2\nexit 1\n")
    with pytest.raises(HostError) as caught:
        resolve_image("based", IMAGE, "amd64")
    assert caught.value.message.startswith(f"the registry of r.example/image does not answer: {reason}")
    assert hint in (caught.value.hint or "")
