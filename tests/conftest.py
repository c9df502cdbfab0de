"""Puts tests/ on the path, so that helpers such as loopback are imported by name, and the
repository for docs.site.
"""

import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

# Tests compare what a plain shell shows, whatever this one exports: a width, a terminal, output
# without a buffer.
for name in ("COLUMNS", "TERM", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)

# The tests start primus thousands of times, and compiling its modules anew takes longer than most
# of those runs. The bytecode lies outside the source tree, because a note of a build names the
# engine's folders.
os.environ.setdefault(
    "PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
)
# A worker inherits the variable, but tests of bytecode compare paths with this interpreter's.
sys.pycache_prefix, sys.dont_write_bytecode = None, True

# A shell that starts a job in the background lets it ignore Ctrl-C, and its children would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is written anew, and whether the long runs run."""
    parser.addoption("--regenerate-golden", action="store_true", help="write the golden files anew")
    parser.addoption(
        "--slurm-events", default="1", metavar="N", help="repetitions of each event in a Slurm job"
    )
    parser.addoption(
        "--slurm-seed", default="1", metavar="N", help="seed for the moments of these events"
    )
    parser.addoption("--pairs", default="5", metavar="N", help="pairs of commands at once")
    parser.addoption("--pair-seed", default="1", metavar="N", help="seed for these pairs")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a parameter of bytes by its argument, not by the bytes.

    Packed files contain the time, and two workers must name their tests alike.
    """
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow unless it is asked for."""
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name each failure when it happens: a session of 20 minutes that is cut off reports nothing at
    its end.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(reporter))


class _Failures:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            what = next(
                (line[1:].strip() for line in lines if line.startswith("E ")),
                lines[-1] if lines else "",
            )
            self.reporter.write_line(
                f"\n{report.nodeid}: {report.when} failed: {what[:300]}", red=True
            )


# Deadlines measure the machine, not the code: two busy cores break them.
hypothesis.settings.register_profile("primus", deadline=None)
hypothesis.settings.load_profile("primus")
