"""One rank of a Megatron job: ``python -m primus_images.training.backends.megatron.entry
OUTPUT_FOLDER``.
"""

import os
import sys
import warnings
from pathlib import Path

from primus_images.training.backends.loop.config import RankJob, read_job
from primus_images.training.run.failure import noting


def main(folder: str) -> None:
    """Train the job in the output folder ``folder``. Raises the errors of Megatron."""
    if not read_job(Path(folder)).config.get("torch_fsdp2"):
        # Kernels then start in the order of their launches, which overlapping tensor-parallel
        # communication requires. FSDP2's collectives would wait for the computation.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # The facts of the run list what is not installed, so Megatron's dozen lines on standard error
    # are not needed.
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex|Apex is not installed")
    import torch

    if not torch.cuda.is_available():
        from primus_images.training.backends.megatron import cpu

        cpu.patch_torch()
    from primus_images.training.backends.loop import data, process, train

    def run(job: RankJob, device: torch.device) -> None:
        from primus_images.training.backends.loop.evaluation import Evaluation
        from primus_images.training.backends.megatron.session import MegatronSession

        session = MegatronSession(job, device)
        evaluation = None
        if job.evaluation:
            evaluation = Evaluation(job, session, data.held_out(job))
        train.run(job, device, session, data.text(job), evaluation)

    process.main(folder, run)


if __name__ == "__main__":
    with noting(Path(sys.argv[1])):
        main(sys.argv[1])
