"""Real training runs for tests, started as a user would, and the names of failed checks."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

from primus_images.training.judge.checks import Verdict
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome

# Variables of the process that is forked: libraries read them when they are loaded.
SET = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1")
WARM = Path(__file__).with_name("inside") / "warm.py"


class Python:
    """A Python with torch and primus. ``command`` starts it; ``run`` forks one that has imported
    torch.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, *words: str, fault: str = "", timeout: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``words`` with ``fault`` of ``faults/sitecustomize.py``, if it is not empty, in
        place.
        """
        if self._server is None or self._server.poll() is not None:
            environment = os.environ | dict(variable.split("=") for variable in SET)
            words_of_server = [*self.command, "-W", "ignore", str(WARM)]
            self._server = subprocess.Popen(
                words_of_server,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None and stdout is not None
        timer = Timer(timeout, self._server.kill)
        timer.start()
        try:
            stdin.write(
                json.dumps({"words": words, "variables": variables | {"PRIMUS_FAULT": fault}})
                + "\n"
            )
            stdin.flush()
            answer = stdout.readline()
        except BaseException:
            # The next test would read the answer to this one, which a time limit ended.
            self._server.kill()
            raise
        finally:
            timer.cancel()
        assert answer, f"{words} did not end within {timeout} s, or Python does not start"
        ended = json.loads(answer)
        return subprocess.CompletedProcess(words, ended["code"], ended["out"], ended["err"])

    def close(self) -> None:
        if self._server is not None:
            with self._server:
                self._server.communicate()


def started(
    python: Python, job: Job, *words: str, fault: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``job`` with ``primus train`` and ``words``."""
    return python.run(
        "-m", "primus_images.cli.main", *job.arguments(), *words, fault=fault, **variables
    )


def train(python: Python, job: Job, fault: str = "", **variables: str) -> Outcome:
    """Run ``job`` with ``primus train``; one that fails has an outcome, one that cannot start is an
    error.
    """
    ended = started(python, job, "--json", fault=fault, **variables)
    assert ended.returncode in (0, 1), ended.stderr
    return outcome.read(job, ended.returncode)


def failing(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the names of the verdicts that did not pass."""
    return [verdict.name for verdict in verdicts if not verdict.passed]
