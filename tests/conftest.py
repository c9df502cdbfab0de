"""Puts tests/ on the path, so that helpers such as loopback are imported by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
