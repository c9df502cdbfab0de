"""The portions in which modules are compiled, and their bytecode."""

import json
import marshal
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from typing import Any

import pytest

from primus_images.plan import compile_bytecode
from primus_images.plan.compile_bytecode import packs


@pytest.mark.parametrize("sizes", [[], [3], [4, 5, 6], [10, 1, 9, 1, 10], [0, 0, 25, 0, 1]])
def test_portions_hold_every_module_once_and_begin_where_the_last_one_ended(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_bytecode, "PACK", 10)
    index = [(f"m{number}.py", size) for number, size in enumerate(sizes)]
    portions = list(packs(index))
    assert [number for number, _, _ in portions] == list(range(len(portions)))
    every_module = []
    for _, _, modules in portions:
        every_module += modules
    assert every_module == index
    end = 0
    for _, begin, modules in portions:
        assert begin == end
        of_modules = [size for _, size in modules]
        end += sum(of_modules)
        # Each is full with its last module; only the last portion may be smaller.
        assert sum(of_modules[:-1]) < 10
        assert sum(of_modules) >= 10 or modules is portions[-1][2]


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders /in and /out of the script."""

    def opened(path: str, *words: Any, **options: Any) -> Any:
        return (tmp_path / path.removeprefix("/")).open(*words, **options)

    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(compile_bytecode, "open", opened, raising=False)
    monkeypatch.setattr(sys, "argv", ["compile", "/opt/site"])
    return tmp_path


SOURCES = {"a.py": b"x = 1\n", "broken.py": b"x = (\n", "sub/b.py": b"y = '\\d'\n"}


@pytest.mark.filterwarnings("error")
def test_each_valid_module_is_compiled_for_its_place_in_the_image(sandbox: Path) -> None:
    (sandbox / "in/modules").write_bytes(b"".join(SOURCES.values()))
    index = [[path, len(source)] for path, source in SOURCES.items()]
    (sandbox / "in/index.json").write_text(json.dumps(index))
    compile_bytecode.main()
    rows = json.loads((sandbox / "out/index.json").read_text())
    data = (sandbox / "out/0").read_bytes()
    names = [cache_from_source("a.py"), cache_from_source("sub/b.py")]
    assert [row[0] for row in rows] == names
    assert [row[1] for row in rows] == [0, 0]
    assert [row[2] for row in rows] == [0, rows[0][3]]
    assert rows[0][3] + rows[1][3] == len(data)
    for name, row in zip(("a.py", "sub/b.py"), rows, strict=True):
        bytecode = data[row[2] : row[2] + row[3]]
        assert bytecode[:4] == MAGIC_NUMBER
        # A checked hash: an edit of the source takes effect.
        assert int.from_bytes(bytecode[4:8], "little") == 3
        assert bytecode[8:16] == source_hash(SOURCES[name])
        code = marshal.loads(bytecode[16:])
        assert code.co_filename == f"/opt/site/{name}"


@pytest.mark.parametrize(
    ("path", "compiled"),
    [
        ("torch/a.py", True),
        ("a.py", True),
        ("test.py", True),
        ("torch/test/a.py", False),
        ("tests/a.py", False),
        ("testing/a.py", True),
        ("torch/a.pyi", False),
    ],
)
def test_tests_of_libraries_get_no_bytecode(path: str, compiled: bool) -> None:
    assert compile_bytecode.is_compiled(path) is compiled


def test_interned_constants_are_equal_and_of_one_object_each() -> None:
    text = "".join(["a", "b c"])
    value = (text, frozenset([text]), slice(None, text, 2), 1, None)
    again = compile_bytecode.interned(value)
    assert again == value
    assert again[0] is sys.intern(text)  # type: ignore[index]
    code = compile("def f(a=('x y',)):\n return 'x y'\n", "f.py", "exec")
    assert compile_bytecode.interned(code) == code
    assert marshal.loads(compile_bytecode.serialized(code)) == code


def test_each_kind_of_constant_keeps_its_kind() -> None:
    fresh = "".join(["x ", "y"])
    for value in ((fresh, 1), frozenset([fresh]), slice(fresh, fresh, fresh), fresh):
        again = compile_bytecode.interned(value)
        assert type(again) is type(value)
        assert again == value
    text: Any = compile_bytecode.interned((fresh, 1))
    parts: Any = compile_bytecode.interned(slice(fresh, 1, None))
    assert text[0] is sys.intern(fresh)
    assert parts.start is sys.intern(fresh)
    assert (parts.stop, parts.step) == (1, None)


def test_code_that_marshals_second_version_cannot_hold_is_interned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = compile("a = 'x y'\n", "f.py", "exec")
    whole = marshal.dumps

    def dumps(value: Any, *version: int) -> bytes:
        if version:
            raise ValueError("unmarshallable object")
        return whole(value)

    monkeypatch.setattr(marshal, "dumps", dumps)
    assert marshal.loads(compile_bytecode.serialized(code)) == code


def test_many_modules_are_compiled_by_several_processes(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_bytecode, "PACK", 1)
    pooled = []

    class Pool:
        def __init__(self, **options: Any) -> None:
            pooled.append(options)

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def imap(self, function: Any, work: Any) -> Any:
            return map(function, work)

    monkeypatch.setattr(compile_bytecode.multiprocessing, "Pool", Pool)
    for count, expected in ((2, []), (3, [{"maxtasksperchild": 8}])):
        (sandbox / "in/modules").write_bytes(b"x = 1\n" * count)
        index = [[f"m{number}.py", 6] for number in range(count)]
        (sandbox / "in/index.json").write_text(json.dumps(index))
        compile_bytecode.main()
        rows = json.loads((sandbox / "out/index.json").read_text())
        assert [row[1] for row in rows] == list(range(count))
        assert pooled == expected
