"""Runs inside the image's own interpreter: compile every module below /in to bytecode below /out, reproducibly.

Started as a script in a sandbox with nothing but the standard library. ``argv[1]`` is where the modules will lie in
the image, for tracebacks. Checked hashes, not times, tie bytecode to source: layers carry no times, and a user who
edits a module in a container still gets what he wrote. ``marshal`` version 2, since newer ones flag references by
reference count, which differs from run to run (python/cpython#78274).
"""

import marshal
import multiprocessing
import os
import sys
import warnings
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash

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
        out.write(MAGIC_NUMBER + CHECKED_HASH + source_hash(source) + marshal.dumps(code, 2))


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
