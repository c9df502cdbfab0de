"""Images of a registry, with a stand-in for skopeo."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from primus_images.errors import HostError, InputError
from primus_images.versions.lock import LockedFile
from primus_images.versions.remotes import resolve_image

OCI = "application/vnd.oci.image.layer.v1.tar"
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


def resolved(
    script: Path, layer: bytes = b"", **fields: object
) -> tuple[tuple[LockedFile, ...], str]:
    """The image that skopeo copies, with one layer; ``fields`` are of its manifest."""
    files = script.parent / "files"
    files.mkdir()
    sha256 = hashlib.sha256(layer).hexdigest()
    row = {"mediaType": f"{OCI}+gzip", "digest": f"sha256:{sha256}", "size": len(layer)}
    (files / sha256).write_bytes(layer)
    (files / "manifest.json").write_text(json.dumps({"layers": [row], **fields}))
    script.write_text(
        f'#!/bin/sh\nfor last in "$@"; do :; done\ncp {files}/* "${{last#dir:}}" 2>/dev/null || '
        f"true\n"
    )
    return resolve_image("based", IMAGE)


def tar(text: bytes = b"Package: x\n", **fields: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("./var/lib/dpkg/status")
        member.size = len(text)
        for name, value in fields.items():
            setattr(member, name, value)
        archive.addfile(member, io.BytesIO(text))
    return out.getvalue()


def test_layers_and_packages_of_an_image_are_read(skopeo: Path) -> None:
    layer = gzip.compress(tar())
    ((file,), status) = resolved(skopeo, layer)
    assert (file.kind, file.name, file.sha256, file.size) == (
        "layer",
        "image-01",
        hashlib.sha256(layer).hexdigest(),
        len(layer),
    )
    assert status == "Package: x\n"


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
def test_a_layer_that_is_no_archive_is_named(skopeo: Path, layer: bytes) -> None:
    with pytest.raises(
        InputError, match=r"layer sha256:\w{64} of r\.example/image@.* is not a gzip-compressed tar"
    ):
        resolved(skopeo, layer)


def test_an_image_without_usable_layers_is_a_sentence(skopeo: Path) -> None:
    with pytest.raises(InputError, match="has a layer of type"):
        resolved(skopeo, layers=[{"mediaType": f"{OCI}+zstd"}])


def test_an_old_manifest_is_a_sentence(skopeo: Path) -> None:
    with pytest.raises(InputError, match="is not an image with layers"):
        resolved(skopeo, layers=[], fsLayers=[])


@pytest.mark.parametrize(
    ("log", "reason", "hint"),
    [
        (
            'level=fatal msg="reading manifest: \\"x\\": connection refused"',
            'reading manifest: "x": connection refused',
            "check the network",
        ),
        (
            'level=fatal msg="unauthorized: authentication required"',
            "unauthorized",
            "skopeo login r.example",
        ),
        (
            'level=fatal msg="initiating layer upload: received unexpected HTTP status: 500'
            ' Internal Server Error"',
            "initiating",
            "disk and log",
        ),
        (
            'level=debug msg="Too many requests: sleeping"',
            "its rate limit is reached",
            "skopeo login r.example",
        ),
        (
            'level=fatal msg="Manifest does not match provided manifest digest sha256:0"',
            "Manifest does not",
            "mirror",
        ),
        (
            'level=fatal msg="Error parsing manifest for image: json: x"',
            "Error parsing",
            "check that r.example/image is an image",
        ),
        ("", "skopeo failed", "mirror"),
    ],
)
def test_a_failure_has_skopeos_own_words_and_a_next_step(
    skopeo: Path, log: str, reason: str, hint: str
) -> None:
    (skopeo.parent / "log").write_text(log)
    skopeo.write_text(f"#!/bin/sh\ncat {skopeo.parent}/log >&2\nexit 1\n")
    with pytest.raises(HostError) as caught:
        resolve_image("based", IMAGE)
    verb = "fails" if "500" in log else "sends no image" if "anifest " in log else "does not answer"
    assert caught.value.message.startswith(f"the registry of r.example/image {verb}: {reason}")
    assert hint in (caught.value.hint or "")
