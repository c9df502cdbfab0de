"""Runs inside the image's own interpreter: compile every module below /in to bytecode below /out, reproducibly.

Started as a script in a sandbox with nothing but the standard library. ``argv[1]`` is where the modules will lie in
the image, for tracebacks. Checked hashes, not times, tie bytecode to source: layers carry no times, and a user who
edits a module in a container still gets what he wrote.
"""

import marshal
import multiprocessing
import os
import sys
import warnings
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from types import CodeType

CHECKED_HASH = (3).to_bytes(4, "little")


def compile_one(path: str) -> None:
    """Compile one module; one that is not valid for this Python (templates, tests of parsers) stays source only."""
    with open("/in/" + path, "rb") as stream:
        source = stream.read()
    try:
        code = compile(source, os.path.join(sys.argv[1], path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OverflowError):
        return
    target = "/out/" + cache_from_source(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as out:
        out.write(MAGIC_NUMBER + CHECKED_HASH + source_hash(source) + serialized(code))


def serialized(code: CodeType) -> bytes:
    """The code's bytes, the same in every run. ``marshal`` version 2 where it can: newer ones flag references by
    reference count, and strings by whether something interned them (python/cpython#78274). Since Python 3.14 code
    holds slices, which version 2 has no form for: then every string is interned, and reading the bytes back first
    gives each object the reference count that the bytes imply.
    """
    try:
        return marshal.dumps(code, 2)
    except ValueError:
        return marshal.dumps(marshal.loads(marshal.dumps(interned(code))))  # type: ignore[arg-type]


def interned(value: object) -> object:
    """The constant with all strings in it interned."""
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


def main() -> None:
    """Compile all modules, with as many processes as there are processors."""
    warnings.simplefilter("ignore")
    paths = [
        os.path.relpath(os.path.join(folder, name), "/in")
        for folder, _, names in os.walk("/in")
        for name in names
        if name.endswith(".py")
    ]
    if len(paths) < 50:
        for path in paths:
            compile_one(path)
        return
    # The compiler keeps the memory of the largest module it met; short-lived workers give it back.
    with multiprocessing.Pool(maxtasksperchild=8) as pool:
        pool.map(compile_one, sorted(paths), chunksize=8)


if __name__ == "__main__":
    main()
