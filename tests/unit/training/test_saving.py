"""When a checkpoint is due, and which are removed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from primus_images.training.backends.loop import checkpoint  # noqa: E402


def test_a_checkpoint_is_due_by_steps_or_by_the_clock_of_the_first_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    asked = []
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checkpoint.dist, "broadcast", lambda tensor, _: asked.append(tensor))
    device = torch.device("cpu")
    never = checkpoint.Schedule(0, 0.0, device)
    assert not any(never.due(step, last=step == 100) for step in range(1, 101))
    by_steps = checkpoint.Schedule(40, 0.0, device)
    saved = [step for step in range(1, 101) if by_steps.due(step, last=step == 100)]
    assert saved == [40, 80, 100]
    assert not asked
    by_time = checkpoint.Schedule(0, 35.0, device)
    saved = []
    for step in range(1, 101):
        now[0] += 1.0
        if by_time.due(step, last=step == 100):
            saved.append(step)
    assert saved == [40, 80, 100]
    assert len(asked) == 9  # after every tenth step but the last


def test_only_the_newest_complete_checkpoints_and_the_best_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30, 40, 50):
        (tmp_path / f"checkpoint/step-{step}").mkdir(parents=True)
    broken = tmp_path / "checkpoint/step-30"
    monkeypatch.setattr(checkpoint.identity, "complete", lambda folder: folder != broken)
    checkpoint.rotate(tmp_path, 0)
    assert len(list((tmp_path / "checkpoint").iterdir())) == 5
    checkpoint.rotate(tmp_path, 2, tmp_path / "checkpoint/step-10")
    left = sorted(folder.name for folder in (tmp_path / "checkpoint").iterdir())
    assert left == ["step-10", "step-30", "step-40", "step-50"]
