"""Trackers hold what ``metrics.jsonl`` holds: by their own libraries, which write to files."""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends.loop import config, evaluation, report  # noqa: E402
from primus_images.training.run import logs, metrics, ranks  # noqa: E402
from primus_images.training.run.job import Job  # noqa: E402

EVALUATED = evaluation.Losses(whole=5.25, by_corpus={"prose": 4.0, "code-2": 9.0})
FACTS = {"device": "cpu"}


def read_tensorboard(output: Path) -> dict[str, float]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = events.EventAccumulator(str(output / "tensorboard"))
    record.Reload()
    return {name: record.Scalars(name)[-1].value for name in record.Tags()["scalars"]}


def records_of(file: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B, which is a log as LevelDB has them, after 7 bytes."""
    data = file.read_bytes()
    place = 7
    record = b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # the rest of a block
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(output: Path) -> dict[str, float]:
    """Return the last figures of the file that ``wandb sync`` uploads."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = (output / "wandb").glob("offline-run-*/*.wandb")
    figures: dict[str, float] = {}
    for data in records_of(file):
        record = messages.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            figures[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return {key: value for key, value in figures.items() if not key.startswith("_")}


def read_mlflow(output: Path) -> dict[str, float]:
    client = pytest.importorskip("mlflow").MlflowClient((output / "mlflow").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'primus'")
    (run,) = client.search_runs([experiment.experiment_id])
    return dict(run.data.metrics)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose environment the trackers have."""
    choices = Choices(gpu="cpu", backend="fsdp", proxy=True)
    job = Job(name="x", recipe=resolve("llama3.1-8b", (), choices), output=tmp_path)
    (tmp_path / "cache").mkdir()
    for name, value in ranks.environment(job, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "read"),
    [("tensorboard", read_tensorboard), ("wandb", read_wandb), ("mlflow", read_mlflow)],
)
def test_a_tracker_has_the_names_and_figures_of_the_metrics(
    name: str,
    read: Callable[[Path], Mapping[str, float]],
    output: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(name)
    choices = Choices(gpu="cpu", backend="fsdp", proxy=True)
    recipe = resolve("llama3.1-8b", [f"{name}=true"], choices)
    job = Job(name="x", recipe=recipe, output=output)
    (output / "job.json").write_text(ranks.job_file(job))
    (output / "cache/eval.tokens").touch()
    made = report.Report(config.read_job(output), torch.device("cpu"))
    capfd.readouterr()
    for step in (1, 2):
        made.step(step, 7.5 / step, 0.25, 1e-3)
        standing = evaluation.Standing(output, 0, None)
        standing.record(step, EVALUATED)
        standing.announce(step, EVALUATED, made.say, made.track)
    (output / "log.txt").write_text(capfd.readouterr().out)
    made.end()
    row = metrics.rows(logs.read_run(output), recipe, FACTS)[-1]
    known = {key: value for key, value in row.items() if value is not None and key != "step"}
    tracked = dict(read(output))
    assert tracked.pop("eval_perplexity") == pytest.approx(math.exp(5.25))
    assert tracked.keys() == known.keys()
    for key, value in known.items():
        # The log rounds memory and tokens/s, from which FLOP/s follow; TensorBoard has 32 bits.
        assert tracked[key] == pytest.approx(value, rel=0.02), key
    assert {
        "eval_loss_of/prose",
        "eval_loss_of/code-2",
        "lr",
        "tokens",
        "seconds",
    } <= tracked.keys()
