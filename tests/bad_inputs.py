"""Run the bad inputs of ``fixtures/bad_inputs.yaml`` and judge what is said. Needs primus alone, so
images run it, too.

As a script: run all of them, print one JSON object, name → what is wrong with the answer.
Those for verbs of the host alone are left out.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

INPUTS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "fixtures" / "bad_inputs.yaml").read_text(encoding="utf-8")
)
# Texts that are too long to write down. Each alias of the bomb doubles what the one before holds.
_LONG = {
    "{long}": "a" * 300,
    "{digits}": "ranks: " + "9" * 5000,
    "ranks={many digits}": "ranks=" + "9" * 5000,
    "name={long}": "name=" + "a" * 300,
    "{digits in JSON}": '{"a": ' + "9" * 5000 + "}",
    "{brackets}": "[" * 400_000,
    "{keys}": "".join(f"k{n}: 1\n" for n in range(40_000)),
    "{huge}": "# " + "x" * 3_000_000,
    "{dashes}": "- " * 200_000,
    "{deep}": "name: " + "{a: " * 5000 + "1" + "}" * 5000,
    "{bomb}": "a0: &a0 {k: 1, l: 2}\n"
    + "".join(f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}\n" for n in range(1, 40)),
}
_STANDING = (
    "HF_TOKEN",
    "EXP",
    "BACKEND",
    "NNODES",
    "GPUS_PER_NODE",
    "PRIMUS_HIPBLASLT_TUNING_STAGE",
)


def fault(given: Mapping[str, Any], folder: Path) -> str | None:
    """Run one bad input in the empty ``folder``; what is wrong with the answer, None when it is as
    it should be.
    """
    from primus_images.cli.main import main

    for name, text in given.get("files", {}).items():
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_text(_LONG.get(text, text), encoding="utf-8")
    for name in given.get("pipes", ()):
        os.mkfifo(folder / name)
    for name, target in given.get("links", {}).items():
        (folder / name).symlink_to(target)
    for name, digits in given.get("hex", {}).items():
        (folder / name).write_bytes(bytes.fromhex(digits))
    variables = {
        name: value for name, value in os.environ.items() if name not in _STANDING
    } | given.get("env", {})
    out, error = io.StringIO(), io.StringIO()
    with _inside(folder), mock.patch.dict(os.environ, variables, clear=True):
        began = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = main([_LONG.get(word, word) for word in given["run"]])
            except Exception as crash:  # noqa: BLE001  # the others are run all the same
                return f"it crashes: {crash!r:.200}"
        took = time.process_time() - began
    said = error.getvalue()
    if code != 2:
        return f"exit code {code}: {said}"
    if not re.search(given["says"], said, re.DOTALL) or given.get("where", "") not in said:
        return f"it says {said}"
    if re.search("Traceback|usage:|verysecret", said) or len(said) > 4000:
        return f"no sentence: {said[:4000]}"
    # The first one imports the most: half a second, and more than one on cores that others use.
    return None if took < 3 else f"{took:.1f} s"


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    faults = {}
    for one in (given for given in INPUTS if not given.get("host")):
        with tempfile.TemporaryDirectory() as empty:
            faults[one["name"]] = fault(one, Path(empty))
    json.dump(faults, sys.stdout)
