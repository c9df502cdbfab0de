"""Updating vendored files of other projects from their pinned packages."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from primus.errors import CheckFailed, HostError
from primus.yamlfile import read

VENDORED = Path("src/primus/report/uplot/vendored.yaml")


def hashes(pins: Path) -> dict[Path, str]:
    """Return each vendored file next to the file ``pins``, with its expected sha256."""
    files = read(pins).data["files"]  # type: ignore[index, call-overload]
    return {pins.with_name(Path(name).name): str(sha256) for name, sha256 in files.items()}  # type: ignore[union-attr]


def refresh(pins: Path) -> list[str]:
    """Download the npm package and write every vendored file. Returns the names of the files.

    Raises HostError if npm is missing or its registry does not answer, CheckFailed if the package has other bytes.
    """
    data = read(pins).data
    assert isinstance(data, dict)
    npm = shutil.which("npm")
    if npm is None:
        raise HostError("npm is missing", hint="install it (Debian and Ubuntu call the package npm)")
    with tempfile.TemporaryDirectory(prefix="primus-vendor-") as folder:
        name = f"{data['package']}@{data['version']}"
        command = [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", folder, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode != 0:
            words = (done.stderr.strip() or f"npm ended with {done.returncode}").splitlines()
            raise HostError(f"npm could not fetch {name}: {words[0]}", hint="check npm's registry and the network")
        (archive,) = Path(folder).glob("*.tgz")
        found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != data["integrity"]:
            raise CheckFailed(f"{name} has integrity {found}, not {data['integrity']}", where=str(pins))
        with tarfile.open(archive) as tar:
            for member, sha256 in data["files"].items():  # type: ignore[union-attr]
                stream = tar.extractfile(f"package/{member}")
                content = stream.read() if stream else b""
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise CheckFailed(f"{member} of {name} does not have the pinned sha256", where=str(pins))
                pins.with_name(Path(member).name).write_bytes(content)
    return [str(path) for path in hashes(pins)]
