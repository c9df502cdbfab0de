"""Run by Python with torch. The tutorial of pre-training, as it is written."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pages

with TemporaryDirectory() as name:
    os.chdir(name)
    printed = [pages.run(kind, block) for kind, block in pages.blocks("pretraining.md")]
    assert any("79 documents in text" in text for text in printed), "primus data"
    first, second = (
        json.loads(Path(f"runs/{run}/result.json").read_text())["summary"]
        for run in ("text", "more")
    )
    assert first["last_loss"] < 0.9 * first["first_loss"], first
    # The second run goes on where the first one ended.
    assert second["first_loss"] < 1.1 * first["last_loss"], second
    assert second["eval_loss"] < first["eval_loss"], second
    assert printed[-1].startswith("The statement"), printed[-1]
