"""One rank of torchtitan: ``python -m primus_images.training.backends.torchtitan.entry FOLDER``.

torchtitan's own trainer trains, with the model and the documents of the recipe (``job.json`` in the
output folder). :mod:`trainer` records what ran.
"""

import json
import sys
from pathlib import Path

import torch

from primus_images.training.backends import gloo
from primus_images.training.backends.loop.process import keep_graphs
from primus_images.training.backends.torchtitan import cpu, render, spec, tied
from primus_images.training.backends.torchtitan.trainer import observed_trainer
from primus_images.training.run.failure import noting


def main(folder: Path) -> None:
    """Train the job in ``folder``. torchtitan reads ``sys.argv`` itself, and raises errors."""
    job = json.loads((folder / "job.json").read_text())
    gloo.choose_store(folder)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.patch_torch()
    if job["config"].get("compile.enable"):
        keep_graphs()
    if job["turbo"]:
        from primus_images.training.backends.torchtitan import turbo

        turbo.patch(job["turbo"])
    if job["model"].get("tied_embeddings"):
        tied.patch()
    spec.register(job)

    from torchtitan.train import main as train

    train(observed_trainer(job))
    if on_cpu:
        gloo.leave()


if __name__ == "__main__":
    output = Path(sys.argv[1])
    sys.argv[1:] = ["--job.config_file", str(output / render.FILE)]
    with noting(output):
        main(output)
