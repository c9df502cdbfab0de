"""Compile every module in /in to bytecode in /out, reproducibly. Runs in the image's own
interpreter.

Runs as a script in a sandbox and uses the standard library only. ``argv[1]`` is the modules' folder
in the image, for tracebacks. Bytecode is tied to its source by checked hashes, not by times: layers
have no times, and if a user edits a module in a container, the edit takes effect.

Modules are packed, many to a file, because creating and removing a file for each would cost as much
as compiling it. /in/modules contains their concatenated sources, /in/index.json lists ``[path,
size]`` of each, and /out/index.json lists ``[path, pack, offset, size]`` of each compiled module in
/out/PACK.
"""

import json
import marshal
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from types import CodeType

CHECKED_HASH = (3).to_bytes(4, "little")
# Source bytes of one pack: a quarter of a second's work.
PACK = 1 << 18
TESTS = frozenset(("test", "tests"))


def is_compiled(path: str) -> bool:
    """Whether ``path`` gets bytecode; the builder calls this, too. Tests of libraries, a sixth of
    all modules, get none, because training never imports them.
    """
    *folders, name = path.split("/")
    return name.endswith(".py") and TESTS.isdisjoint(folders)


def compile_pack(work: tuple[int, int, list[tuple[str, int]]]) -> list[tuple[str, int, int, int]]:
    """Compile the modules of pack ``number``, whose sources begin at ``offset``, and return their
    rows of the index.

    A module that is not valid for this Python (templates, tests of parsers) gets no bytecode.
    """
    number, offset, modules = work
    rows = []
    at = 0
    with open("/in/modules", "rb") as sources, open(f"/out/{number}", "wb") as out:
        sources.seek(offset)
        for path, size in modules:
            source = sources.read(size)
            try:
                code = compile(source, os.path.join(sys.argv[1], path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError, OverflowError):
                continue
            data = MAGIC_NUMBER + CHECKED_HASH + source_hash(source) + serialized(code)
            out.write(data)
            rows.append((cache_from_source(path), number, at, len(data)))
            at += len(data)
    return rows


def serialized(code: CodeType) -> bytes:
    """Serialize the code to the same bytes in every run.

    Uses ``marshal`` version 2 if possible. Newer versions flag references by reference count, and
    strings by whether they happen to be interned (python/cpython#78274). Since Python 3.14, code
    contains slices, which version 2 cannot represent. In this case every string is interned, and
    reading the bytes back first gives each object the reference count that the bytes imply.
    """
    try:
        return marshal.dumps(code, 2)
    except ValueError:
        return marshal.dumps(marshal.loads(marshal.dumps(interned(code))))  # type: ignore[arg-type]


def interned(value: object) -> object:
    """Return the constant with all its strings interned."""
    if type(value) is str:
        return sys.intern(value)
    if type(value) is tuple:
        return tuple([interned(item) for item in value])
    if type(value) is frozenset:
        return frozenset([interned(item) for item in value])
    if type(value) is slice:
        return slice(interned(value.start), interned(value.stop), interned(value.step))
    if type(value) is CodeType:
        constants = tuple([interned(constant) for constant in value.co_consts])
        return value.replace(co_consts=constants, co_filename=sys.intern(value.co_filename))
    return value


def packs(index: list[tuple[str, int]]) -> Iterator[tuple[int, int, list[tuple[str, int]]]]:
    """Yield the modules in portions of about PACK bytes, as arguments of :func:`compile_pack`."""
    number = 0
    begin = 0
    at = 0
    modules: list[tuple[str, int]] = []
    for path, size in index:
        modules.append((path, size))
        at += size
        if at - begin >= PACK:
            yield number, begin, modules
            number = number + 1
            begin = at
            modules = []
    if modules:
        yield number, begin, modules


def main() -> None:
    """Compile all modules, with as many processes as there are processors."""
    warnings.simplefilter("ignore")
    with open("/in/index.json", encoding="utf-8") as stream:
        work = list(packs([(path, size) for path, size in json.load(stream)]))
    if len(work) < 3:
        rows = [row for pack in work for row in compile_pack(pack)]
    else:
        # A process keeps the memory of the largest module it compiled; short-lived workers return
        # it.
        with multiprocessing.Pool(maxtasksperchild=8) as pool:
            rows = [row for done in pool.imap(compile_pack, work) for row in done]
    with open("/out/index.json", "w", encoding="utf-8") as stream:
        json.dump(rows, stream)


if __name__ == "__main__":
    main()
