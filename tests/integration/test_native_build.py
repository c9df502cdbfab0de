"""Source → wheel → layer → image, for real: a C extension from PyPI built in the sandbox of a
Debian root; and the same digests by an ordinary user and by Docker, of a target on the same root.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docker_engine import private_dockerd
from test_ordinary_user import NEEDS_USERS, a_user, as_user

from host_tools import needs
from primus_images.files import read_sealed
from project_kit import Kit, lock
from tables import text_of

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
# Root's builds take the layer of this base from the store of the cpu image.
BASE = {
    **yaml.safe_load((REPOSITORY / "versions.yaml").read_text())["bases"]["bookworm"],
    "extras": {},
}
VERSIONS = text_of("versions/native_build.yaml").replace("BASES", json.dumps({"bookworm": BASE}))
TARGET = text_of("images/native.yaml")
LOCK = "images/locks/pypi/native.json"
SMALL = TARGET.replace("psutil", "pyyaml")


def lend_layer(name: str, source: Kit, folder: Path) -> None:
    """Give the store of the project in ``folder`` a layer that ``source`` has built."""
    for record in (source.root / ".primus/store/actions").iterdir():
        data = read_sealed(record)
        if data["name"] == name:
            digests = (data["layer"]["blob"]["digest"], data["layer"]["paths"])
            blobs = [Path("blobs/sha256") / digest.removeprefix("sha256:") for digest in digests]
            for path in (Path("actions") / record.name, *blobs):
                (folder / ".primus/store" / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source.root / ".primus/store" / path, folder / ".primus/store" / path)


@pytest.fixture(scope="module")
def native(cpu_image: Kit) -> Iterator[Kit]:
    """A project that root has built on the cpu image's base, where other users may enter."""
    place = Path(tempfile.mkdtemp(prefix="primus-u-"))
    place.chmod(0o755)
    kit = Kit(place / "project")
    kit.write("versions.yaml", VERSIONS)
    lend_layer("base bookworm", cpu_image, kit.root)
    kit.write("images/native.yaml", TARGET)
    kit.write("images/small.yaml", SMALL)
    lock(kit)
    kit.build("native", "small")
    yield kit
    # In C and beside the next tests, because the unpacked roots of builds have many files.
    subprocess.run(["sh", "-c", 'rm -rf "$0" >/dev/null 2>&1 &', place], check=False)


INSIDE = """\
import importlib.util, json, shutil, sys
import psutil, psutil._common, psutil._psutil_linux as native
note = b"/by/the/pin" in open(native.__file__, "rb").read()
flags = int.from_bytes(open(psutil._common.__cached__, "rb").read(8)[4:], "little")
tools = [shutil.which("tcc"), importlib.util.find_spec("setuptools")]
print(json.dumps([psutil.__version__, native.__file__.rsplit(".", 2)[0], note, flags, tools]))
"""


def test_the_extension_works_in_the_image_and_what_built_it_is_not_there(native: Kit) -> None:
    result = native.primus("run", "native", "--", "python3", "-c", INSIDE)
    assert result.code == 0, result.err
    version, path, note, flags, tools = json.loads(result.out)
    assert (version, path) == (
        "6.1.1",
        "/opt/venv/lib/python3.11/site-packages/psutil/_psutil_linux",
    )
    assert note, "the environment of the pin did not reach the linker"
    assert flags == 3, "the bytecode is not the checked one"
    assert tools == [None, None]
    records = [read_sealed(path) for path in (native.root / ".primus/store/actions").iterdir()]
    (record,) = [record for record in records if "wheel" in record]
    assert (record["kind"], record["wheel"]["file"][:13]) == ("build", "psutil-6.1.1-")
    log = next((native.root / ".primus/logs").glob("build-psutil-*.log")).read_text()
    assert "Building wheel for psutil" in log


def test_a_failed_build_shows_its_log(native: Kit) -> None:
    """The end of the log and its path are in the error."""
    native.write("versions.yaml", VERSIONS.replace("CC:", "CFLAGS: -include no-such-header.h, CC:"))
    result = native.primus("build", "native", timeout=900)
    native.write("versions.yaml", VERSIONS)
    assert result.code == 1
    assert "build psutil ended with exit code 1" in result.err
    assert "'no-such-header.h' not found" in result.err
    assert "full log: " in result.err


def lend_project(kit: Kit, user: str, *bases: str) -> Path:
    """The project, the files that its lock names and what root built of ``bases``, as the user's
    own.
    """
    folder = kit.root.parent / user
    shutil.copytree(kit.root / "images", folder / "images")
    shutil.copy(kit.root / "versions.yaml", folder)
    files = folder / ".primus/files/sha256"
    files.mkdir(parents=True)
    for file in json.loads((kit.root / LOCK).read_text())["files"]:
        shutil.copy(kit.root / ".primus/files/sha256" / file["sha256"], files)
    for base in bases:
        lend_layer(f"base {base}", kit, folder)
    subprocess.run(["chown", "-R", user, folder], check=True)
    return folder


@NEEDS_USERS[0]
@NEEDS_USERS[1]
# A user's mmdebstrap works as long as root's, which the fixture and the cpu image run.
@pytest.mark.parametrize("lent", ["bookworm", pytest.param("", marks=pytest.mark.slow)])
def test_the_digest_is_that_of_root_and_the_image_runs(native: Kit, lent: str) -> None:
    """The base, the compiled extension and all other layers have the same bytes again."""
    with a_user("primus-t2", "--key", "SUB_UID_COUNT=65536") as user:
        folder = lend_project(native, user, "psutil build", *filter(None, [lent]))
        built = as_user(user, folder, "build", "native", "--offline")
        assert built.returncode == 0, built.stderr
        assert built.stdout.splitlines()[-1] == native.build("native").digest
        code = "import os, psutil; print(os.getuid(), psutil.__version__)"
        ran = as_user(user, folder, "run", "native", "--", "python3", "-c", code)
        assert (ran.returncode, ran.stdout) == (0, "0 6.1.1\n"), ran.stderr


@NEEDS_USERS[0]
@NEEDS_USERS[1]
def test_user_without_a_range_of_ids_is_told_the_command(native: Kit) -> None:
    with a_user("primus-t3", "--key", "SUB_UID_COUNT=0", "--key", "SUB_GID_COUNT=0") as user:
        folder = lend_project(native, user)
        built = as_user(user, folder, "build", "native", "--offline")
        assert built.returncode == 3, built.stderr
        assert "usermod --add-subuids" in built.stderr
        assert "Traceback" not in built.stderr


@needs("dockerd")
def test_docker_as_the_sandbox_gives_the_same_digest(
    native: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = native.build("small").digest
    store = native.root / ".primus/store"
    (store / "targets/small.json").unlink()
    for record in (store / "actions").iterdir():
        if (data := read_sealed(record))["kind"] == "wheels" and "psutil" not in data["name"]:
            record.unlink()
    with private_dockerd(tmp_path / "docker") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        again = native.build("small", "--engine", "docker")
    assert again.digest == want
    assert "1 layer built, 3 reused" in again.err


def test_damaged_fetched_file_is_named_and_fetched_again(native: Kit) -> None:
    lock = json.loads((native.root / LOCK).read_text())
    sdist = next(f for f in lock["files"] if f["kind"] == "sdist")
    path = native.root / ".primus/files/sha256" / sdist["sha256"]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.chmod(0o644)
    path.unlink()
    path.write_bytes(data)
    for record in (native.root / ".primus/store/actions").iterdir():
        if read_sealed(record)["name"] in ("build psutil", "psutil"):
            record.unlink()
    (native.root / ".primus/store/targets/native.json").unlink()
    result = native.primus("build", "native")
    assert result.code == 3
    assert f"the fetched {sdist['file']} is damaged" in result.err
    assert native.primus("build", "native").code == 0
