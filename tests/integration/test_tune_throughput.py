"""`primus tune throughput` with real training runs on a CPU."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

# Without a limit of its own, a model that does not fit would take the machine's memory first.
LIMITED = """\
import resource, sys
from primus_images.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
sys.exit(main(sys.argv[1:]))
"""


def words(folder: Path, *more: str) -> list[str]:
    return [
        "tune",
        "throughput",
        "llama3-proxy",
        "--gpu",
        "cpu",
        "ranks=1",
        "--steps",
        "3",
        "--warmup",
        "1",
        "--folder",
        str(folder),
        *more,
    ]


def test_a_start_that_does_not_fit_into_memory_is_said_to(python: Python, tmp_path: Path) -> None:
    large = words(tmp_path, "model.vocab_size=500000", "training.local_batch_size=8")
    ended = python.run("-c", LIMITED, *large)
    assert ended.returncode == 1, ended.stderr
    assert "the recipe's own settings failed" in ended.stderr
    assert "can't allocate memory" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow  # 12 runs, two minutes
def test_a_search_goes_on_after_an_interruption_and_its_file_trains(
    python: Python, tmp_path: Path
) -> None:
    file = tmp_path / "tuned.yaml"
    command = [
        *python.command,
        "-m",
        "primus_images.cli.main",
        *words(tmp_path / "kept", "training.local_batch_size=2", "--output", str(file), "--json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        while first.poll() is None and len(list(tmp_path.glob("kept/*/*/*-0.json"))) < 2:
            time.sleep(0.5)
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 130
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("kept/*/*/*-0.json")}
    assert len(before) >= 2
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before, (
        "finished runs are not repeated"
    )
    found = json.loads(ended.stdout)
    assert len(found["runs"]) >= 4
    assert all(run["tokens_per_second"] > 0 and not run["reason"] for run in found["runs"])
    assert found["better"] == file.exists()
    if found["winner"]:
        assert len(found["winner_tokens_per_second"]) == len(found["start_tokens_per_second"]) == 3
    if file.exists():
        train = [
            "train",
            str(file),
            "--gpu",
            "cpu",
            "--steps",
            "2",
            "--output",
            str(tmp_path / "run"),
        ]
        ended = subprocess.run(
            [*python.command, "-m", "primus_images.cli.main", *train],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
