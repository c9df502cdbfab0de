"""Bytecode of a layer's modules, compiled by the image's own interpreter in the sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from primus.build.part import open_part
from primus.errors import CheckFailed
from primus.jsonfile import read_json
from primus.oci.tar import Entry
from primus.plan.compile_bytecode import is_compiled


def bytecode_entries(
    entries: Sequence[Entry], site: str, scratch: Path, run: Callable[[dict[str, Path], Path, str], None]
) -> Iterator[Entry]:
    """The bytecode of the modules among ``entries`` that lie below ``site``.

    ``run`` starts :data:`primus.plan.source.BYTECODE`. It gets what is mounted where, the folder for /out, and the
    script's argument.
    Raises CheckFailed when the script leaves something that is not bytecode of these modules.
    """
    modules = [e for e in entries if e.path.startswith(site + "/") and is_compiled(e.path)]
    if not modules:
        return
    source, out = scratch / "source", scratch / "out"
    source.mkdir()
    out.mkdir()
    with (source / "modules").open("wb") as stream:
        for entry in modules:
            stream.writelines(entry.chunks())
    index = [(entry.path.removeprefix(site + "/"), entry.size) for entry in modules]
    (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run({"/in": source}, out, f"/{site}")
    rows: Any = read_json(out / "index.json").data
    (source / "modules").unlink()
    sizes = {pack: (out / str(pack)).stat().st_size for pack in {int(row[1]) for row in rows}}
    for path, pack, offset, size in rows:
        if offset + size > sizes[pack]:
            raise CheckFailed(f"the bytecode of {path} was cut short")
        yield Entry(
            path=f"{site}/{path}", size=size, source=functools.partial(open_part, out / str(pack), offset, size)
        )
