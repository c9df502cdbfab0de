"""Puts tests/ on the path, so that helpers such as loopback are imported by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option for all golden files."""
    parser.addoption("--regenerate-golden", action="store_true", help="write the golden files anew")
