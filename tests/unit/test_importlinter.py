from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_image_has_every_module_that_its_own_import() -> None:
    pins = yaml.safe_load((ROOT / "versions.yaml").read_text())["components"]["primus"]["pins"]
    included = next(pin["include"] for pin in pins if pin["path"] == "src/primus")
    source = ROOT / "src" / "primus"
    files = [
        file for name in included for file in ([source / name] if name[-3:] == ".py" else (source / name).rglob("*.py"))
    ]
    missing = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                path = name.replace(".", "/").removeprefix("primus/")
                # The host's verbs are asked for where they are.
                if not name.startswith("primus.") or name == "primus.cli.host":
                    continue
                if not any(path + ".py" == one or f"{path}/".startswith(f"{one}/") for one in included):
                    missing.add(f"{file.relative_to(source)}: {name}")
    assert missing == set()
