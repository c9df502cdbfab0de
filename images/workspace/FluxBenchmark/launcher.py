"""A command of older documents; other names of this file are other commands."""

import sys
from pathlib import Path

from primus_images.cli.main import main

sys.exit(main(["compat", Path(sys.argv[0]).name, *sys.argv[1:]]))
