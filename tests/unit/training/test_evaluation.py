"""Evaluations: of each corpus of a mixture, and which checkpoints of the best ones stay."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, init_device_mesh  # noqa: E402

from primus_images.files import sha256_of  # noqa: E402
from primus_images.training.backends.loop import checkpoint, evaluation  # noqa: E402
from primus_images.training.backends.loop.data import Documents  # noqa: E402
from primus_images.training.run import logs  # noqa: E402
from primus_images.training.text.tokens import mix, stored  # noqa: E402

# Name of a corpus → the first token of its documents, which a made-up loss is.
CORPORA = {"prose": [2, 4, 6], "code": [9], "empty": []}


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, whose held-out text is a mixture."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for number, firsts in enumerate(CORPORA.values()):
        documents = [[first, 1, 1] for first in firsts]
        if not documents:
            documents = [[7]]  # it has no label
        np.asarray(documents, np.uint32).tofile(cache / f"eval-{number}.tokens")
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        ends.tofile(cache / f"eval-{number}.ends")
    parts = [(f"eval-{number}", 1.0) for number in range(len(CORPORA))]
    mix(cache, parts, "eval", list(CORPORA))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    return tmp_path


class Session:
    """A model whose loss of every label is the first token of its document."""

    data_rank = 0

    def loss(self, batch: Mapping[str, Any]) -> Any:
        counts = (batch["labels"] >= 0).sum(1)
        return (batch["input_ids"][:, 0] * counts).sum().float()

    def total(self, value: Any) -> Any:
        return value


def evaluated(output: Path, **job: Any) -> evaluation.Evaluation:
    training = SimpleNamespace(micro_batch_size=2)
    about: Any = SimpleNamespace(
        output=output,
        evaluation={"patience": 0, "every": 1},
        resume_from=None,
        training=training,
        data_parallel=1,
        **job,
    )
    session: Any = Session()
    return evaluation.Evaluation(about, session, Documents(stored(output / "cache", "eval"), 8, 1))


def improving(output: Path, monkeypatch: pytest.MonkeyPatch) -> evaluation.Evaluation:
    """Return what evaluates twice, the second time with a lower loss."""
    made = evaluated(output)
    losses = iter([3.0, 2.0])
    monkeypatch.setattr(made, "_losses", lambda: evaluation.Losses(whole=next(losses)))
    return made


class Report:
    """What a run tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tracked: dict[str, float] = {}

    def say(self, line: str) -> None:
        self.lines.append(line)

    def track(self, figures: Mapping[str, float], _step: int) -> None:
        self.tracked = dict(figures)


class Writer(checkpoint.Writer):
    """Saves empty checkpoints."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def save(self, step: int, _standing: Any = None) -> None:
        checkpoint.folder_of(self._output, step).mkdir(parents=True)

    def then(self, work: Callable[[], None]) -> None:
        work()


def test_each_corpus_has_its_loss_and_the_total_is_that_of_all_labels(output: Path) -> None:
    report: Any = Report()
    made = evaluated(output)
    assert not made.run(3, report, Writer(output))
    assert report.tracked.pop("eval_perplexity") == pytest.approx(np.exp(5.25))
    assert report.tracked == {
        "eval_loss": 5.25,
        "eval_loss_of/prose": 4.0,
        "eval_loss_of/code": 9.0,
    }
    assert made.loss() == 5.25, "of the mixture in one pass"
    assert "of each corpus after step 3: prose 4.00000, code 9.00000" in report.lines[1]
    step = "step:  3  loss:  6.0  grad_norm:  0.8  memory: 1GiB(1%)  tps: 9  tflops: 1  mfu: N/A\n"
    (output / "log.txt").write_text(step + "\n".join(report.lines) + "\n")
    series = logs.read_run(output)
    assert not series.problems
    assert series.steps[0].eval_loss == 5.25
    assert series.steps[0].eval_by_corpus == {"prose": 4.0, "code": 9.0}


def test_one_corpus_has_one_loss(output: Path) -> None:
    for file in (output / "cache").glob("eval.c*"):
        file.unlink()
    made = evaluated(output)
    assert made._losses() == evaluation.Losses(whole=5.25)
    made._standing.record(1, made._losses())
    assert json.loads((output / "eval.jsonl").read_text()) == {"step": 1, "eval_loss": "5.25"}


@pytest.mark.parametrize("due", [False, True])
def test_a_former_best_checkpoint_stays_if_it_was_due(
    *, due: bool, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report: Any = Report()
    writer = Writer(output)
    made = improving(output, monkeypatch)
    made.run(3, report, writer)
    if due:
        made.spare(3)
    made.run(7, report, writer)
    left = sorted(folder.name for folder in (output / "checkpoint").iterdir())
    assert left == ["step-3"] * due + ["step-7"]


def test_a_former_best_checkpoint_that_is_gone_ends_no_run(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report: Any = Report()
    writer = Writer(output)
    made = improving(output, monkeypatch)
    made.run(3, report, writer)
    checkpoint.folder_of(output, 3).rmdir()
    made.run(7, report, writer)
    assert [folder.name for folder in (output / "checkpoint").iterdir()] == ["step-7"]


def test_the_best_of_an_earlier_run_stays(output: Path) -> None:
    standing = evaluation.Standing(output, 0, None)
    assert not standing.only_best(output.parent / "earlier/checkpoint/step-4")
    assert standing.only_best(output / "checkpoint/step-4")


def test_a_resumed_run_knows_the_best_of_the_run_before(output: Path, tmp_path: Path) -> None:
    tokens = output / "cache/eval.tokens"
    tokens.write_bytes(b"the same text")
    resumed = tmp_path / "earlier/checkpoint/step-4"
    best = resumed.with_name("step-2")
    resumed.mkdir(parents=True)
    best.mkdir()
    fields = {"text": sha256_of(tokens), "best": 2, "least": "1.5", "worse": 1}
    (resumed / "evaluation.json").write_text(json.dumps(fields))
    standing = evaluation.Standing(output, 0, resumed)
    assert standing.best == best
    assert not standing.add(5, 1.75)
    assert standing.best == best
    assert standing.add(6, 1.25)
    assert standing.best == output / "checkpoint/step-6"


def test_a_line_of_torchtitan_is_a_single_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks write to the same pipe: the end of a line would be that of another's."""
    own = "primus_images.training.backends.torchtitan.evaluation"
    module = pytest.importorskip(own, exc_type=ImportError)
    parts: list[str] = []
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    stream = SimpleNamespace(write=parts.append, flush=lambda: None)
    monkeypatch.setattr("sys.stdout", stream)
    module._say("evaluation after step 2")
    assert list(filter(None, parts)) == ["evaluation after step 2\n"]


def test_an_evaluation_of_torchtitan_leaves_the_model_as_it_was() -> None:
    own = "primus_images.training.backends.torchtitan.evaluation"
    module = pytest.importorskip(own, exc_type=ImportError)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        model.register_buffer("tokens_per_expert", torch.tensor([3.0, 5.0]))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with module._evaluating([model]):
            assert not model.training
            model(torch.ones(1, 4))
            assert not isinstance(model[0].weight, DTensor), "gathered"
            model.tokens_per_expert += 1
        assert model.training
        assert isinstance(model[0].weight, DTensor), "sharded"
        assert model.tokens_per_expert.tolist() == [3.0, 5.0]
    finally:
        dist.destroy_process_group()
