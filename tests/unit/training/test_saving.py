"""When a checkpoint is due, how it is written, and which are removed."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from primus_images.training.backends.loop import checkpoint  # noqa: E402
from primus_images.training.backends.torchtitan.evaluation import Evaluation  # noqa: E402
from primus_images.training.backends.torchtitan.trainer import Observed  # noqa: E402
from primus_images.training.run import identity  # noqa: E402


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
    checkpoint.rotate(tmp_path, 2, [tmp_path / "checkpoint/step-10"])
    left = sorted(folder.name for folder in (tmp_path / "checkpoint").iterdir())
    assert left == ["step-10", "step-30", "step-40", "step-50"]


class Session:
    """One weight in training, and how often its state was asked for."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(2, 1, bias=False)
        self.model_parts = [self.layer]
        self.asked = 0

    def train(self, value: float) -> None:
        with torch.no_grad():
            self.layer.weight.fill_(value)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"model": self.layer.state_dict()}


class Run:
    """A run of one rank that saves checkpoints, whose disk is as slow as a test wants."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.disk = threading.Event()
        self.disk.set()
        self.session = Session()
        self.lines: list[str] = []
        job: Any = SimpleNamespace(output=output, identity={"backend": "fsdp"})
        report: Any = SimpleNamespace(say=self.lines.append)
        session: Any = self.session
        self.writer = checkpoint.Writer(job, session, report)

    def folder(self, step: int) -> Path:
        return checkpoint.folder_of(self.output, step)

    def saved(self, step: int) -> list[float]:
        """Return the weights in the checkpoint after ``step``."""
        weight = torch.zeros(1, 2)
        dcp.load({"model": {"weight": weight}}, checkpoint_id=self.folder(step))
        return list(weight.flatten().tolist())


@pytest.fixture
def run(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path)
    seal = identity.seal

    def seal_when_written(folder: Path, fields: Any) -> None:
        assert run.disk.wait(20)
        seal(folder, fields)

    monkeypatch.setattr(identity, "seal", seal_when_written)
    yield run
    run.disk.set()


def test_the_run_goes_on_while_a_checkpoint_is_written(run: Run) -> None:
    removed = []
    run.disk.clear()
    run.session.train(1.0)
    run.writer.save(10, {"best": 10})
    run.writer.then(lambda: removed.append(10))
    run.session.train(2.0)
    assert not run.folder(10).exists()
    assert not removed
    assert not run.lines
    run.writer.raise_failure()
    run.disk.set()
    run.writer.wait()
    assert run.saved(10) == [1.0, 1.0]
    assert checkpoint.standing_of(run.folder(10)) == {"best": 10}
    assert identity.saved(run.folder(10)) == {"backend": "fsdp"}
    assert removed == [10]
    assert run.lines[0].startswith(f"saved {run.folder(10)} in ")
    assert "the run waited" in run.lines[0]


def test_one_checkpoint_is_written_after_the_other_and_each_once(run: Run) -> None:
    order = []
    for step in (10, 20, 20, 30):
        run.session.train(float(step))
        run.writer.save(step)
        run.writer.then(lambda: order.append(sorted(run.output.glob("checkpoint/step-*"))[-1].name))
    run.session.train(0.0)
    run.writer.wait()
    assert [run.saved(step)[0] for step in (10, 20, 30)] == [10.0, 20.0, 30.0]
    assert order == ["step-10", "step-20", "step-20", "step-30"]
    assert run.session.asked == 3


def test_a_write_that_fails_ends_the_run_and_removes_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: Path, _fields: Any) -> None:
        raise OSError(28, "No space left on device")

    removed: list[int] = []
    monkeypatch.setattr(identity, "seal", full)
    run.writer.save(10)
    run.writer.then(lambda: removed.append(10))
    with pytest.raises(OSError, match="No space left"):
        run.writer.wait()
    with pytest.raises(OSError, match="No space left"):
        run.writer.raise_failure()
    with pytest.raises(OSError, match="No space left"):
        run.writer.save(20)
    assert not removed
    assert not run.folder(10).exists()


def test_without_room_for_a_copy_the_run_waits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "host_bytes", lambda: 4 * 24.0 - 1)
    removed = []
    run.session.train(1.0)
    run.writer.save(10)
    assert run.saved(10) == [1.0, 1.0]
    run.writer.then(lambda: removed.append(10))
    assert removed == [10]
    assert "waited" not in run.lines[0]


def test_a_copy_of_weights_and_moments_takes_at_most_a_quarter_of_the_host(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = torch.nn.Linear(100, 100)
    frozen.requires_grad_(False)
    # Two weights of 4 bytes, and two moments of each.
    for ranks, least in (("1", 4 * 24), ("2", 4 * 48)):
        monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", ranks)
        for room in (least, least - 1):
            monkeypatch.setattr(checkpoint, "host_bytes", lambda room=room: float(room))
            parts = [*run.session.model_parts, frozen]
            assert checkpoint.host_has_room(parts) == (room == least)


def test_a_complete_checkpoint_of_torchtitan_is_sealed_before_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    complete = tmp_path / "checkpoint/step-2"
    complete.mkdir(parents=True)
    (complete / ".metadata").touch()
    sealed: list[bool] = []
    trainer: Any = Observed.__new__(Observed)
    trainer.job = {"identity": {"backend": "torchtitan"}}
    trainer.output = tmp_path
    trainer.keep = 0
    trainer.evaluation = trainer.saving = None
    trainer.checkpointer = SimpleNamespace(enable=True, save_future=None)
    trainer._save = lambda *_: sealed.append((complete / identity.FILE).exists())
    trainer._save_sealed(3)
    assert sealed == [True]


def test_a_write_of_torchtitan_that_failed_ends_the_run_at_the_next_step() -> None:
    trainer: Any = Observed.__new__(Observed)
    trainer.checkpointer = SimpleNamespace(enable=False)
    trainer._raise_failure()
    written: Future[None] = Future()
    trainer.checkpointer = SimpleNamespace(enable=True, save_future=written)
    trainer._raise_failure()
    written.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        trainer._raise_failure()


def test_the_best_checkpoint_of_torchtitan_stays_until_a_better_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    folders = [checkpoint.folder_of(tmp_path, step) for step in (2, 4, 6, 8)]
    for folder in folders:
        folder.mkdir(parents=True)
    best, _, _, better = folders
    for folder in folders[:-1]:
        (folder / ".metadata").touch()
    evaluation: Any = Evaluation.__new__(Evaluation)
    evaluation._output = tmp_path
    evaluation._former = []
    evaluation.standing = SimpleNamespace(best=best, only_best=lambda _: False)
    trainer: Any = Observed.__new__(Observed)
    trainer.job = {"identity": {"backend": "torchtitan"}}
    trainer.output = tmp_path
    trainer.keep = 1
    trainer.evaluation = evaluation

    def sealed() -> list[str]:
        trainer._seal()
        return [folder.name for folder in identity.complete_checkpoints(tmp_path)]

    assert sealed() == ["step-2", "step-6"]
    (folders[2] / identity.FILE).unlink()
    evaluation.standing.best = better
    evaluation._former = [best]
    assert sealed() == ["step-2", "step-6"], "the better one is being written"
    (better / ".metadata").touch()
    assert sealed() == ["step-8"]
