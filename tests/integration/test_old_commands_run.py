"""Commands of the older documents, as they are written, run for real: on the proxy, through the
image's own scripts.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = yaml.safe_load(
    (ROOT / "tests" / "fixtures" / "old_commands.yaml").read_text(encoding="utf-8")
)
# One of each script and backend, with the folder that its document changes to.
LINES = {
    ("primus-megatron-v25.7.rst", 276): "Primus",
    ("primus-pytorch-v25.10.rst", 280): "Primus",
    ("primus-examples-readme.md", 81): "Primus",
    ("pytorch-training-v25.2.md", 128): "FluxBenchmark",
    ("pytorch-training-v25.2.md", 168): "torchtitan",
    ("pytorch-training-v25.2.md", 200): "pytorch-training-benchmark",
    ("pytorch-training-v25.3.rst", 341): "MAD/scripts/pytorch-train",
    ("pytorch-training-v25.3.rst", 347): "MAD/scripts/pytorch-train",
}
# By default, this one only shows what it would train: test_cpu_image.py trains in the image, and
# unit tests cover what each of them translates.
QUICK = ("primus-examples-readme.md", 81)


@pytest.fixture(scope="module")
def shell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[str]]:
    """(folder, text) → the command that runs ``text`` there: with PRIMUS_TEST_PYTHON, else in the
    cpu image.
    """
    chosen = os.environ.get("PRIMUS_TEST_PYTHON")
    if chosen is None:
        kit = request.getfixturevalue("cpu_image")
        start = kit.command("run", "cpu", "--project", str(kit.root), "--", "bash", "-c")
        return lambda folder, text: [*start, f"set -o pipefail; cd /workspace/{folder} && {text}"]
    tools = tmp_path_factory.mktemp("bin")
    python = Path(chosen)
    for name, text in (
        ("primus", f'exec {python} -m primus_images.cli.main "$@"'),
        ("python", f'exec {python} "$@"'),
        ("torchrun", f'exec {python} -m torch.distributed.run "$@"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    runs = tmp_path_factory.mktemp("workspace")
    subprocess.run(["cp", "-a", f"{ROOT}/images/workspace/.", runs], check=True)
    head = f"set -o pipefail; export PATH={tools}:$PATH PYTHONPATH={ROOT / 'src'}"
    return lambda folder, text: ["bash", "-c", f"{head}; cd {runs}/{folder} && {text}"]


@pytest.mark.parametrize(
    ("document", "line"),
    [
        pytest.param(*at, id=f"{at[0]}:{at[1]}", marks=() if at == QUICK else pytest.mark.slow)
        for at in LINES
    ],
)
def test_a_documented_command_trains_the_proxy(
    request: pytest.FixtureRequest, shell: Callable[[str, str], list[str]], document: str, line: int
) -> None:
    entry = next(one for one in COMMANDS if (one["document"], one["line"]) == (document, line))
    trains = request.config.getoption("--slow")
    words = " --proxy" if trains else " --proxy --dry-run"
    command = shell(
        LINES[document, line], re.sub(r"( \|& .*)?$", rf"{words}\1", entry["command"], count=1)
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    wanted = entry["resolves"]
    assert (
        f"{wanted['recipe']}: {wanted['backend']}, {wanted['mode']}, {wanted['precision']}, cpu"
        in said
    )
    assert not trains or re.search(r"✓ \d+ steps in \d+ s, loss ", said), said
