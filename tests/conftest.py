"""Puts tests/ on the path, so that helpers such as loopback are imported by name."""

import signal
import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# A shell that starts a job in the background lets it ignore Ctrl-C, and its children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option for all golden files."""
    parser.addoption("--regenerate-golden", action="store_true", help="write the golden files anew")


# Deadlines measure the machine, not the code: two busy cores break them.
hypothesis.settings.register_profile("primus", deadline=None)
hypothesis.settings.load_profile("primus")
