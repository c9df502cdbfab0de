"""The module that lets a build see folders in one order, in a Python of its own."""

import json
import subprocess
import sys
from pathlib import Path

from primus_images.plan.skeleton import ORDER

PROGRAM = """\
import json, os, sys
folder = sys.argv[1]
os.chdir(folder)
with os.scandir(folder) as entries:
    first = next(entries).name
    rest = [entry.name for entry in entries]
entries = os.scandir()
here = [entry.name for entry in entries]
entries.close()
walked = [files for _, _, files in os.walk(folder)]
print(json.dumps([os.listdir(folder), os.listdir(), [first, *rest], here, walked]))
"""


def test_folders_are_listed_in_sorted_order(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(40)]
    for name in sorted(names, key=lambda name: name[::-1]):
        (tmp_path / name).touch()
    program = f"exec(open({str(ORDER)!r}).read())\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(tmp_path)], capture_output=True, check=True
    )
    assert json.loads(done.stdout) == [names, names, names, names, [names]]
