"""registries.conf, read by skopeo and by us: real registries, one of which mirrors the other."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from amd_channel import registry
from host_tools import needs
from loopback import make_certificate
from primus_images.errors import HostError, InputError, PrimusError
from primus_images.oci.store import MANIFEST_TYPE, canonical_json, digest_of
from primus_images.release.artifact import EMPTY, Document
from primus_images.release.registry import Repository

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo", "openssl")]

NAME = "registry.example/rocm/primus"


def manifest(word: str) -> bytes:
    """A small manifest that names where it is."""
    config = {"mediaType": "application/json", "digest": digest_of(EMPTY), "size": len(EMPTY)}
    content = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": []}
    return canonical_json({**content, "annotations": {"place": word}})


EVERYWHERE = manifest("everywhere")


@dataclass
class Places:
    """Ports: the registry, its mirror, and a mirror with TLS whose certificate nobody knows."""

    origin: int
    mirror: int
    secure: int
    certificate: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    root = tmp_path_factory.mktemp("mirrors")
    certificate = make_certificate(root / "server.pem")
    with (
        registry(root / "origin") as origin,
        registry(root / "mirror") as mirror,
        registry(root / "secure", certificate=certificate) as secure,
    ):
        for word, port in (("origin", origin), ("mirror", mirror)):
            there = Repository(f"127.0.0.1:{port}/rocm/primus")
            there.upload(digest_of(EMPTY), EMPTY)
            there.tag("v1", manifest(word))
            there.tag("both", EVERYWHERE)
        Repository(f"127.0.0.1:{origin}/rocm/primus").tag("new", manifest("origin"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(certificate))
            there = Repository(f"127.0.0.1:{secure}/rocm/primus")
            there.upload(digest_of(EMPTY), EMPTY)
            there.tag("v1", manifest("secure"))
        yield Places(origin, mirror, secure, certificate)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    return tmp_path


def configure(home: Path, places: Places, text: str, name: str = "registries.conf") -> None:
    ports = {"ORIGIN": places.origin, "MIRROR": places.mirror, "SECURE": places.secure}
    for word, port in ports.items():
        text = text.replace(word, f"127.0.0.1:{port}")
    path = home / ".config/containers" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def asked_by_skopeo(reference: str) -> bytes | None:
    """The manifest that skopeo reads; None if it fails."""
    words = ["skopeo", "inspect", "--raw", f"docker://{NAME}{reference}"]
    done = subprocess.run(words, capture_output=True, check=False, env={**os.environ})
    return done.stdout if done.returncode == 0 else None


def asked_by_us(reference: str) -> bytes | None:
    try:
        return Repository.to_read(NAME).manifest(reference[1:])
    except PrimusError:
        return None


TABLE = '[[registry]]\nprefix = "registry.example"\nlocation = "ORIGIN"\ninsecure = true\n'
MIRROR = '[[registry.mirror]]\nlocation = "MIRROR"\ninsecure = true\n'
SECURE = '[[registry.mirror]]\nlocation = "SECURE"\n'
DEAD = '[[registry.mirror]]\nlocation = "127.0.0.1:1"\ninsecure = true\n'
LONGER = (
    '[[registry]]\nprefix = "registry.example/rocm"\nlocation = "MIRROR/rocm"\ninsecure = true\n'
)
OTHER = '[[registry]]\nprefix = "registry.exam"\nlocation = "MIRROR"\ninsecure = true\n'
SUBDOMAINS = '[[registry]]\nprefix = "*.example"\nlocation = "MIRROR"\ninsecure = true\n'
DIGEST = f"@{digest_of(EVERYWHERE)}"
# A configuration, what is asked for, and who answers.
ROWS: dict[str, tuple[str, str, str]] = {
    "another location": (TABLE, ":v1", "origin"),
    "a mirror": (TABLE + MIRROR, ":v1", "mirror"),
    "a mirror that lacks it": (TABLE + MIRROR, ":new", "origin"),
    "a mirror that is dead": (TABLE + DEAD, ":v1", "origin"),
    "two mirrors, one dead": (TABLE + DEAD + MIRROR, ":v1", "mirror"),
    "a digest": (TABLE + MIRROR, DIGEST, "everywhere"),
    "nothing has it": (TABLE + MIRROR, ":v9", ""),
    "a mirror for digests": (TABLE + "mirror-by-digest-only = true\n" + MIRROR, ":v1", "origin"),
    "a mirror that is for digests": (
        TABLE + MIRROR + 'pull-from-mirror = "digest-only"\n',
        ":v1",
        "origin",
    ),
    "a mirror for tags": (TABLE + MIRROR + 'pull-from-mirror = "tag-only"\n', ":v1", "mirror"),
    "a mirror whose certificate nobody knows": (TABLE + SECURE, ":v1", "origin"),
    "a mirror that needs no certificate": (TABLE + SECURE + "insecure = true\n", ":v1", "secure"),
    "blocked, but for its mirror": (TABLE + "blocked = true\n" + MIRROR, ":v1", "mirror"),
    "a mirror that is blocked": (
        TABLE + MIRROR + '[[registry]]\nlocation = "MIRROR"\nblocked = true\n',
        ":v1",
        "origin",
    ),
    "the longest prefix": (TABLE + LONGER, ":v1", "mirror"),
    "part of a name": (TABLE + OTHER, ":v1", "origin"),
    "subdomains": (SUBDOMAINS, ":v1", "mirror"),
    "subdomains and the name": (SUBDOMAINS + TABLE, ":v1", "origin"),
    "one prefix twice": (TABLE + TABLE.replace("ORIGIN", "MIRROR"), ":v1", "origin"),
    "no TOML": ("[[registry]\n", ":v1", ""),
    "no location": ('[[registry]]\nprefix = "registry.example"\n', ":v1", ""),
    "a mirror without location": (TABLE + "[[registry.mirror]]\ninsecure = true\n", ":v1", ""),
    "a scheme": (TABLE.replace('"ORIGIN"', '"http://ORIGIN"'), ":v1", ""),
    "a flag that is a word": (TABLE.replace("true", '"yes"'), ":v1", ""),
    "a number": (TABLE.replace('"ORIGIN"', "7"), ":v1", ""),
    "a word for mirrors": (TABLE + 'mirror = "MIRROR"\n', ":v1", ""),
}


@pytest.mark.parametrize("row", ROWS)
def test_we_read_where_skopeo_reads(home: Path, places: Places, row: str) -> None:
    text, reference, place = ROWS[row]
    configure(home, places, text)
    expected = manifest(place) if place else None
    assert asked_by_us(reference) == expected
    assert asked_by_skopeo(reference) == expected


def test_a_blocked_registry_is_not_asked(home: Path, places: Places) -> None:
    name = f"127.0.0.1:{places.origin}/rocm/primus"
    configure(home, places, '[[registry]]\nlocation = "ORIGIN"\nblocked = true\n')
    with pytest.raises(InputError, match="is blocked"):
        Repository.to_read(name)
    words = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}:v1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "is blocked" in done.stderr


def test_a_later_file_counts(home: Path, places: Places) -> None:
    configure(home, places, TABLE)
    configure(home, places, TABLE + MIRROR, "registries.conf.d/50.conf")
    assert asked_by_us(":v1") == asked_by_skopeo(":v1") == manifest("mirror")
    configure(home, places, TABLE, "registries.conf.d/60.conf")
    assert asked_by_us(":v1") == asked_by_skopeo(":v1") == manifest("origin")
    configure(home, places, TABLE + MIRROR, "registries.conf.d/70.txt")
    assert asked_by_us(":v1") == asked_by_skopeo(":v1") == manifest("origin")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TABLE + "blocked = true\n", r"registries\.conf: the registry of .* is blocked"),
        ("a = \n", r"registries\.conf:1:\d+: it is not TOML: Invalid value"),
        ("registry = 7\n", r"`registry` is not a list of tables"),
        ('registry = ["a"]\n', r"`registry` is not a list of tables"),
        ('[[registry]]\nprefix = "a"\n', r"a `registry` has no `location`"),
        (TABLE + "[[registry.mirror]]\n", r"a mirror of registry\.example has no `location`"),
        (TABLE.replace("true", "1"), r"`insecure` is 1"),
        (TABLE + MIRROR + 'pull-from-mirror = "x"\n', r"`pull-from-mirror` of .* is 'x'"),
    ],
)
def test_a_damaged_file_is_named(home: Path, places: Places, text: str, sentence: str) -> None:
    configure(home, places, text)
    for use in (Repository.to_read, Repository):
        with pytest.raises(InputError, match=sentence) as refused:
            use(NAME)
        assert refused.value.hint


def test_who_writes_asks_the_registry_itself(home: Path, places: Places) -> None:
    """skopeo pushes to the name that it was given; a mirror may be behind."""
    name = f"127.0.0.1:{places.origin}/rocm/primus"
    configure(home, places, '[[registry]]\nlocation = "ORIGIN"\ninsecure = true\n' + MIRROR)
    assert Repository(name).manifest("v1") == manifest("origin")
    assert Repository.to_read(name).manifest("v1") == manifest("mirror")
    target = home / "image"
    target.mkdir()
    (target / "manifest.json").write_bytes(manifest("pushed"))
    shutil.copy(target / "manifest.json", target / "version")
    (target / "version").write_text("Directory Transport Version: 1.1\n")
    (target / digest_of(EMPTY)[7:]).write_bytes(EMPTY)
    words = ["skopeo", "copy", "--quiet", f"dir:{target}", f"docker://{name}:pushed"]
    subprocess.run(words, check=True, capture_output=True)
    assert Repository(name).manifest("pushed") == manifest("pushed")
    mirror = Repository(f"127.0.0.1:{places.mirror}/rocm/primus")
    assert mirror.manifest("pushed") is None


def test_statements_come_from_the_registry_unless_it_is_silent(
    home: Path, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = {
        "mediaType": MANIFEST_TYPE,
        "digest": digest_of(EVERYWHERE),
        "size": len(EVERYWHERE),
    }
    documents = {}
    for word, port in (("registry", places.origin), ("mirror", places.mirror)):
        documents[word] = Document(media_type="text/plain", name="x", data=word.encode())
        Repository(f"127.0.0.1:{port}/rocm/primus").attach([documents[word]], subject)
    configure(home, places, TABLE + MIRROR)
    there = Repository.to_read(NAME)
    assert there.documents(subject["digest"]) == [documents["registry"]]
    configure(home, places, (TABLE + MIRROR).replace("ORIGIN", "127.0.0.1:1"))
    there = Repository.to_read(NAME)
    assert there.documents(subject["digest"]) == [documents["mirror"]]
    assert "both" in there.tags()
    assert f"its mirror 127.0.0.1:{places.mirror}/rocm/primus lists" in capsys.readouterr().err
    configure(home, places, TABLE.replace("ORIGIN", "127.0.0.1:1") + DEAD)
    with pytest.raises(HostError, match=rf"the registry of {NAME} does not answer"):
        Repository.to_read(NAME).documents(subject["digest"])
