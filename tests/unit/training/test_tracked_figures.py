"""What trackers get from our own loop."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from primus_images.recipes.architecture import OTHER  # noqa: E402
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends.loop import config, report, trackers  # noqa: E402
from primus_images.training.run import ranks  # noqa: E402
from primus_images.training.run.job import Job  # noqa: E402


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("fsdp", "bf16"), ("fsdp", "fp8"), ("megatron", "bf16"), ("megatron", "fp8")],
)
def test_the_mfu_of_a_step_is_a_share_of_the_peak_of_its_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, precision: str
) -> None:
    choices = Choices(backend=backend, precision=precision, gpu="h200")
    job = Job(name="x", recipe=resolve("llama3.1-8b", (), choices), output=tmp_path)
    (tmp_path / "job.json").write_text(ranks.job_file(job))
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(report.torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(report.dist, "get_rank", lambda: 0)
    peak = report.Report(config.read_job(tmp_path), torch.device("cuda"))._peak
    assert peak == trackers.peak_flops(gpu.name, 132, precision)
    assert peak is not None


@pytest.mark.parametrize(("family", "known"), [("llama3", True), (OTHER, False)])
def test_a_model_of_no_family_has_no_flops(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
    known: bool,
) -> None:
    choices = Choices(backend="finetune", gpu="cpu", proxy=True)
    job = Job(name="x", recipe=resolve("llama3.1-8b", (), choices), output=tmp_path)
    (tmp_path / "job.json").write_text(ranks.job_file(job))
    of_rank = config.read_job(tmp_path)
    of_rank = replace(of_rank, model=replace(of_rank.model, family=family))
    monkeypatch.setattr(report.dist, "get_rank", lambda: 0)
    report.Report(of_rank, torch.device("cpu")).step(1, 5.0, 0.5, 0.1)
    assert ("tflops: N/A" in capsys.readouterr().out) is not known
