"""Wheels as layers: what pip would have laid out, checked against pip itself."""

import marshal
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path

import pytest

from primus_images.engine.kinds.wheels import bytecode_entries, wheel_entries
from primus_images.errors import CheckFailed, InputError
from primus_images.oci.tar import Entry
from primus_images.plan.skeleton import BYTECODE as SCRIPT, Prefix

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
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
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
    command = [
        sys.executable,
        *["-m", "pip", "--python", "venv", "install", "-q", "--no-index", "--no-compile"],
        NAME,
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    names = {
        "demo",
        "pure.py",
        "plat.py",
        "old-style",
        "shell",
        "Demo-Run",
        "demo.h",
        "readme",
        "tool",
    }

    def found(root: Path) -> set[str]:
        return {
            str(p.relative_to(root)) for p in root.rglob("*") if p.name in names and p.is_file()
        }

    ours = {p.removeprefix("opt/venv/") for p in found(laid)}
    assert ours == found(tmp_path / "venv")
    assert len(ours) == 8
    site = laid / PREFIX.site
    for path in (site / "demo/bin/tool", laid / "opt/venv/bin/shell"):
        assert path.stat().st_mode & 0o777 == 0o755
    assert (site / "demo/__init__.py").stat().st_mode & 0o777 == 0o644


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
    with pytest.raises(InputError, match="cannot be used"):
        list(wheel_entries(path, "x.whl", PREFIX))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "")
    with pytest.raises(InputError, match="cannot be used"):
        list(wheel_entries(path, "x.whl", PREFIX))


# Offsets in the central directory's header of a file: flags, compression method, size.
@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (8, b"\1\0", "is encrypted"),
        (10, (99).to_bytes(2, "little"), "is not supported"),
        (24, b"\xff\xff\xff\xff", "cannot be used"),
        (24, b"\xfe\xff\xff\xff", "cannot be used"),
        (42, b"\xff\xff\xff\xff", "is damaged"),
    ],
    ids=["encrypted", "method 99", "zip64 without sizes", "absurd size", "zip64 without offset"],
)
def test_a_hostile_archive_is_a_sentence_that_names_the_wheel(
    tmp_path: Path, offset: int, value: bytes, words: str
) -> None:
    path = make_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2") + offset
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(InputError, match=re.escape(NAME)) as caught:
        for entry in wheel_entries(path, NAME, PREFIX):
            list(entry.chunks())
    assert words in caught.value.message


def test_a_folder_left_out_is_not_in_the_record_either(tmp_path: Path) -> None:
    entries = list(wheel_entries(make_wheel(tmp_path), NAME, PREFIX, without=("demo",)))
    whole = {e.path for e in wheel_entries(make_wheel(tmp_path), NAME, PREFIX)}
    assert whole - {e.path for e in entries} == {
        f"{PREFIX.site}/demo/__init__.py",
        f"{PREFIX.site}/demo/bin/tool",
    }
    (record,) = [b"".join(e.chunks()).decode() for e in entries if e.path.endswith("/RECORD")]
    assert "demo/__init__.py" not in record
    assert "pure.py" in record
    path = make_wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("demo/binary.py", "")
    inner = {e.path for e in wheel_entries(path, NAME, PREFIX, without=("demo/bin",))}
    assert inner - whole == {f"{PREFIX.site}/demo/binary.py"}
    assert whole - inner == {f"{PREFIX.site}/demo/bin/tool"}
    with pytest.raises(CheckFailed, match=f"{NAME} has no folder demo/b to leave out"):
        list(wheel_entries(make_wheel(tmp_path), NAME, PREFIX, without=("demo", "demo/b")))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("damage", ["bytes", "end", "header"])
def test_a_damaged_file_is_an_error_that_names_the_wheel(
    tmp_path: Path, damage: str, compression: int
) -> None:
    path = make_wheel(tmp_path)
    with zipfile.ZipFile(path, "a", compression) as archive:
        archive.writestr("demo/data", random.Random(1).randbytes(100_000))
        start = archive.getinfo("demo/data").header_offset
    whole = bytearray(path.read_bytes())
    if damage != "end":
        whole[start + (5000 if damage == "bytes" else 0)] ^= 1
        path.write_bytes(whole)
    (entry,) = [e for e in wheel_entries(path, NAME, PREFIX) if e.path.endswith("demo/data")]
    if damage == "end":
        path.write_bytes(whole[: start + 5000])
    with pytest.raises(
        InputError, match=rf"the wheel {NAME} cannot be used: demo/data in it is damaged"
    ):
        list(entry.chunks())


def test_bytecode_is_that_of_the_interpreter_and_tests_have_none(tmp_path: Path) -> None:
    """Through the script as the sandbox runs it, with enough modules for several packs and
    processes.
    """
    sources = {f"pkg/m{i}.py": f"x = {i}\n" + "y = 'some text'\n" * 8000 for i in range(12)}
    sources |= {
        "pkg/bad.py": "def :\n",
        "pkg/tests/test_a.py": "z = 1\n",
        "pkg/testing/a.py": "z = 2\n",
    }
    entries = [Entry(path=f"site/{p}", size=len(s), source=s.encode()) for p, s in sources.items()]
    entries.append(Entry(path="bin/other.py", size=1, source=b"\n"))

    def run(inputs: Mapping[str, Path], outputs: Path) -> None:
        script = inputs["/compile.py"].read_text().replace('"/in/', f'"{inputs["/in"]}/')
        (tmp_path / "compile.py").write_text(script.replace('"/out/', f'"{outputs}/'))
        subprocess.run([sys.executable, "-I", str(tmp_path / "compile.py"), "/site"], check=True)

    made = list(bytecode_entries(entries, "site", tmp_path, SCRIPT, run))
    lay_out(entries + made, tmp_path / "root")
    compiled = {f"site/{p}" for p in sources} - {"site/pkg/bad.py", "site/pkg/tests/test_a.py"}
    assert {e.path for e in made} == {cache_from_source(p) for p in compiled}
    for path in compiled:
        data = (tmp_path / "root" / cache_from_source(path)).read_bytes()
        source = (tmp_path / "root" / path).read_bytes()
        assert data[:16] == MAGIC_NUMBER + b"\3\0\0\0" + source_hash(source)
        code = marshal.loads(data[16:])
        assert code.co_filename == f"/{path}"
        assert code == compile(source, f"/{path}", "exec", dont_inherit=True)


def test_bytecode_that_was_cut_short_is_no_bytecode(tmp_path: Path) -> None:
    def run(inputs: Mapping[str, Path], outputs: Path) -> None:
        (outputs / "0").write_bytes(b"1234")
        (outputs / "index.json").write_text('[["m.pyc", 0, 0, 5]]')

    with pytest.raises(CheckFailed, match=r"bytecode of m.pyc was cut short"):
        list(
            bytecode_entries(
                [Entry(path="site/m.py", size=1, source=b"\n")], "site", tmp_path, SCRIPT, run
            )
        )


@pytest.mark.parametrize(
    "line", ["../run = demo:main", "run = demo", "run = demo:main()", "run = demo main:x"]
)
def test_an_entry_point_that_is_no_name_of_a_function_is_refused(tmp_path: Path, line: str) -> None:
    path = make_wheel(tmp_path)
    whole = zipfile.ZipFile(path)
    files = {info: whole.read(info) for info in whole.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in files.items():
            is_list = info.filename.endswith("entry_points.txt")
            archive.writestr(info, f"[console_scripts]\n{line}\n" if is_list else data)
    with pytest.raises(InputError, match="is not NAME = MODULE:FUNCTION"):
        list(wheel_entries(path, NAME, PREFIX))
