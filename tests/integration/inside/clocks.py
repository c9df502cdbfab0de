"""Run by Python with torch. What a step's seconds include: neither evidence, nor less than its own
work on a GPU that is still computing when the evidence begins. Nothing is left out twice.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import nn

from primus_images.training.backends.loop.report import Report
from primus_images.training.backends.loop.train import _Loop
from primus_images.training.judge.witness import Witness
from primus_images.training.run.recompute import Repeated

SECONDS = 0.1


def work_on_a_gpu_counts_for_its_step() -> None:
    report = Report.__new__(Report)
    report._device = torch.device("cuda")
    report.start()
    began = report._since
    work = [SECONDS, 2 * SECONDS]  # of the step, and of the evidence

    def wait(_device: torch.device) -> None:
        time.sleep(work.pop(0))

    with patch("torch.cuda.synchronize", wait), report.off_the_clock():
        pass
    left_out = report._since - began
    assert not work
    assert 2 * SECONDS <= left_out < 3 * SECONDS, left_out


def what_is_computed_twice_is_left_out_once() -> None:
    report = Report.__new__(Report)
    report._device = torch.device("cpu")
    report.start()
    began = report._since
    model = nn.Linear(2, 2)
    repeated = Repeated([model], torch.optim.SGD(model.parameters()), 2, report.off_the_clock)
    loop = _Loop.__new__(_Loop)
    loop._job = None  # type: ignore[assignment]
    loop._witness = None
    loop._repeated = repeated

    def slow() -> dict[str, torch.Tensor]:
        time.sleep(SECONDS)
        return {}

    loop._report = report
    with patch.object(repeated, "_sums_of_state", slow):
        loop.prove(1)
    left_out = report._since - began
    assert SECONDS <= left_out < 2 * SECONDS, left_out


def writing_the_seconds_counts_as_evidence(folder: Path) -> None:
    witness = Witness(folder, [nn.Linear(2, 2)], 0)
    write = Path.write_text

    def slow(path: Path, text: str, encoding: str) -> int:
        time.sleep(SECONDS)
        return write(path, text, encoding=encoding)

    with patch.object(Path, "write_text", slow), witness.busy(3):
        pass
    assert witness._seconds[3] >= SECONDS, witness._seconds
    assert witness._busy == witness._seconds[3]


if __name__ == "__main__":
    work_on_a_gpu_counts_for_its_step()
    what_is_computed_twice_is_left_out_once()
    with TemporaryDirectory() as name:
        writing_the_seconds_counts_as_evidence(Path(name))
