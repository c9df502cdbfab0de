"""The commands and programs of a page, which are run as they are written."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the shell commands ("sh") and programs ("python") of a page, but for ``docker``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(sh|python)\n(.*?)^```", text, re.M | re.S)
    # It opens the shell in which the others run.
    return [(kind, block) for kind, block in found if not block.startswith("docker ")]


def run(kind: str, block: str, stdin: str = "") -> str:
    """Run a block in this folder, and return what it prints. Raises CalledProcessError."""
    words = ["-c", block]
    if kind == "sh":
        words = ["-m", "primus_images.cli.main", *block.split()[1:]]
    return subprocess.run(
        [sys.executable, *words], input=stdin, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
