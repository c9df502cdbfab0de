"""Wheels as layers: what pip would have laid out, checked against pip itself."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from primus.errors import CheckFailed, HostError
from primus.images.prefix import Prefix
from primus.images.tar import Entry
from primus.images.wheel import wheel_entries

PREFIX = Prefix(python=f"{sys.version_info.major}.{sys.version_info.minor}")
NAME = "Demo_Pkg-1.0-py3-none-any.whl"


def make_wheel(folder: Path) -> Path:
    """A wheel with every scheme, a script of each kind and an executable file."""
    path = folder / NAME
    data = "Demo_Pkg-1.0.data"
    info = "Demo_Pkg-1.0.dist-info"
    files = {
        "demo/__init__.py": "def main():\n    print('hello from demo')\n",
        "demo/bin/tool": "#!/bin/sh\n",
        f"{data}/purelib/pure.py": "x = 1\n",
        f"{data}/platlib/plat.py": "y = 2\n",
        f"{data}/scripts/old-style": "#!python\nprint('old')\n",
        f"{data}/scripts/shell": "#!/bin/sh\necho shell\n",
        f"{data}/headers/demo.h": "#define X\n",
        f"{data}/data/share/demo/readme": "data\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: Demo_Pkg\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nDemo-Run = demo:main\n[other]\nx = y\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name == "demo/bin/tool" else 0o100644) << 16
            archive.writestr(entry, text)
        rows = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
        archive.writestr(f"{info}/RECORD", rows)
    return path


def lay_out(entries: list[Entry], root: Path) -> None:
    for entry in entries:
        target = root / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(entry.chunks()))
        target.chmod(entry.mode)


@pytest.fixture
def laid(tmp_path: Path) -> Path:
    lay_out(list(wheel_entries(make_wheel(tmp_path), NAME, PREFIX)), tmp_path / "root")
    return tmp_path / "root"


def test_every_scheme_lands_where_pip_puts_it(laid: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        tmp_path / "venv",
        "install",
        "-q",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run([*install, tmp_path / NAME], check=True, capture_output=True)
    names = {"demo", "pure.py", "plat.py", "old-style", "shell", "Demo-Run", "demo.h", "readme", "tool"}

    def found(root: Path) -> set[str]:
        return {str(p.relative_to(root)) for p in root.rglob("*") if p.name in names and p.is_file()}

    ours = {p.removeprefix("opt/venv/") for p in found(laid)}
    assert ours == found(tmp_path / "venv")
    assert len(ours) == 8


def test_scripts_run_with_the_images_interpreter(laid: Path) -> None:
    script = (laid / "opt/venv/bin/Demo-Run").read_text()
    assert script.startswith("#!/opt/venv/bin/python3\n")
    assert (laid / "opt/venv/bin/old-style").read_text().startswith("#!/opt/venv/bin/python3\n")
    assert (laid / "opt/venv/bin/shell").read_text() == "#!/bin/sh\necho shell\n"
    site = laid / PREFIX.site
    run = subprocess.run(
        [sys.executable, laid / "opt/venv/bin/Demo-Run"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "hello from demo\n"


def test_modes(laid: Path) -> None:
    site = laid / PREFIX.site
    assert (site / "demo/bin/tool").stat().st_mode & 0o777 == 0o755
    assert (site / "demo/__init__.py").stat().st_mode & 0o777 == 0o644
    assert (laid / "opt/venv/bin/shell").stat().st_mode & 0o777 == 0o755


def test_record_lists_every_file_once(laid: Path) -> None:
    site = laid / PREFIX.site
    rows = (site / "Demo_Pkg-1.0.dist-info/RECORD").read_text().splitlines()
    paths = [(site / row.split(",")[0]).resolve() for row in rows]
    files = {p.resolve() for p in laid.rglob("*") if p.is_file()}
    assert set(paths) == files
    assert len(paths) == len(files)


def test_not_a_wheel_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"not a zip")
    with pytest.raises(HostError, match="is not a wheel"):
        list(wheel_entries(path, "x.whl", PREFIX))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "")
    with pytest.raises(HostError, match="is not a wheel"):
        list(wheel_entries(path, "x.whl", PREFIX))


def test_path_that_escapes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    make_wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../etc/passwd", "root")
    with pytest.raises(HostError, match="leaves its folder"):
        list(wheel_entries(path, NAME, PREFIX))


def test_a_folder_left_out_is_not_in_the_record_either(tmp_path: Path) -> None:
    entries = list(wheel_entries(make_wheel(tmp_path), NAME, PREFIX, without=("demo",)))
    whole = {e.path for e in wheel_entries(make_wheel(tmp_path), NAME, PREFIX)}
    assert whole - {e.path for e in entries} == {f"{PREFIX.site}/demo/__init__.py", f"{PREFIX.site}/demo/bin/tool"}
    (record,) = [b"".join(e.chunks()).decode() for e in entries if e.path.endswith("/RECORD")]
    assert "demo/__init__.py" not in record
    assert "pure.py" in record
    path = make_wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("demo/binary.py", "")
    inner = {e.path for e in wheel_entries(path, NAME, PREFIX, without=("demo/bin",))}
    assert inner - whole == {f"{PREFIX.site}/demo/binary.py"}
    assert whole - inner == {f"{PREFIX.site}/demo/bin/tool"}


def test_a_folder_to_leave_out_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=f"{NAME} has no folder demo/b to leave out"):
        list(wheel_entries(make_wheel(tmp_path), NAME, PREFIX, without=("demo", "demo/b")))
