import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.image import train
from primus_images.cli.main import main
from primus_images.cli.verb import parser_of
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve as resolve_target
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.release.mad import mad_files
from primus_images.report import html, sheets
from primus_images.report.run import NoResult, read
from primus_images.training.judge import suite
from primus_images.training.judge.record import RecordedImage
from primus_images.training.run import identity
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome, RunResult, write_stop
from proof_kit import FACTS, H200, finished_run, series_of, verdicts

# As madengine writes it.
PERF = (
    "model,n_gpus,nnodes,gpus_per_node,training_precision,pipeline,args,tags,docker_file,base_docker,docker_sha,"
    "docker_image,git_commit,machine_name,deployment_type,launcher,gpu_architecture,performance,metric,"
    "relative_change,status,build_duration,test_duration,dataname,data_provider_type,data_size,"
    "data_download_duration,build_number,additional_docker_run_options"
)
ROOT = Path(__file__).parents[3]
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A folder as `primus train` leaves it, made by the functions that make it there."""
    return lambda name, **choices: finished_run(tmp_path / name, **choices)


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def test_perf_csv_has_madengines_columns(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    paths = [
        make("good"),
        make("bad", passed=False, speed=12345678.0),
        make("cpu", facts={"device": "cpu"}),
    ]
    assert main(["report", *map(str, paths), "--out", str(out)]) == 0
    assert (out / "perf.csv").read_text().splitlines()[0] == PERF
    good, bad, cpu = rows(out / "perf.csv")
    assert {key: value for key, value in good.items() if value} == {
        "model": "llama3.1-8b",
        "n_gpus": "8",
        "nnodes": "1",
        "gpus_per_node": "8",
        "training_precision": "bf16",
        "args": (
            "train llama3.1-8b --backend=torchtitan --mode=pretrain --precision=bf16 --gpu=h200"
        ),
        "tags": "torchtitan,pretrain",
        "deployment_type": "local",
        "launcher": "torchrun",
        "gpu_architecture": "sm_90",
        "performance": "9000",
        "metric": "tok_per_s_per_gpu",
        "status": "SUCCESS",
        "test_duration": "61.5",
        "dataname": good["dataname"],
    }
    # Neither 12,345,678 nor 1.2e7: madengine reads neither.
    assert (bad["status"], bad["performance"]) == ("FAILURE", "12345700")
    assert cpu["gpu_architecture"] == ""


def test_a_run_says_what_it_trained_on_and_where_it_goes_on(make: Make) -> None:
    folder = make("run")
    (folder / "cache").mkdir(exist_ok=True)
    (folder / "cache/train.tokens").write_bytes(bytes(4 * 3000))
    (folder / "cache/train.ends").write_bytes(bytes(8 * 2))
    for step in (2, 10, 12):
        place = folder / f"checkpoint/step-{step}"
        place.mkdir(parents=True)
        if step <= 10:  # the run was killed while it wrote the last one
            (place / ".metadata").write_bytes(b"tensors")
            identity.seal(place, {"backend": "fsdp"})
    job = json.loads((folder / "job.json").read_text())
    job |= {"resume_from": "/runs/first/checkpoint/step-5", "global_batch": 32}
    job["started"] = "2026-11-30T17:52:07+02:00"
    job["host"] = "gpu-07"
    (folder / "job.json").write_text(json.dumps(job))
    facts = json.loads((folder / "facts.json").read_text())
    facts |= {"parameters": 1_235_814_400, "versions": {"torch": "2.13.0", "numpy": "2.4"}}
    (folder / "facts.json").write_text(json.dumps(facts))
    lines = [{"step": 1, "loss": 4.0, "eval_loss": 3.5, "tokens": 4096}]
    lines.append({"step": 2, "loss": 3.0, "eval_loss": None, "tokens": 8192})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = replace(read(folder), summary=replace(read(folder).summary, eval_loss=3.5))
    figures = dict(html.figures([run]))
    wanted = {
        "Global batch": "32",
        "Parameters": "1,235,814,400",
        "Text": "2 documents, 3,000 tokens",
        "Tokens seen": "8,192",
        "Evaluation loss, least": "3.5000 at step 1",
        "Resumed from": "first/checkpoint/step-5",
        "Newest checkpoint": "checkpoint/step-10",
        "Started": "2026-11-30 15:52 UTC",
        "Host": "gpu-07",
        "Versions": "torch 2.13.0",
    }
    assert figures | wanted == figures


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (29.6, "30 s"),
        (300, "300 s"),
        (400, "400 s (0 h 7 min)"),
        (93_540, "93,540 s (25 h 59 min)"),
    ],
)
def test_a_long_run_has_its_hours(make: Make, seconds: float, shown: str) -> None:
    run = replace(read(make("run")), seconds=seconds, started="yesterday")
    figures = dict(html.figures([run]))
    assert figures["Whole job"] == shown
    assert "Started" not in figures


def test_a_run_of_an_older_version_lacks_these_figures(make: Make) -> None:
    folder = make("run", facts={"device": "cpu"})
    job = json.loads((folder / "job.json").read_text())
    job.pop("global_batch", None)
    job.pop("started", None)
    job.pop("host", None)
    job.pop("resume_from", None)
    (folder / "job.json").write_text(json.dumps(job))
    names = [name for name, *_ in html.figures([read(folder)])]
    absent = {"Started", "Host", "Global batch", "Text", "Resumed from", "Newest checkpoint"}
    assert not absent & set(names)


@pytest.mark.parametrize(("later", "seconds"), [(90.0, 90.0), (0.0, 0.0), (-90.0, 0.0)])
def test_a_run_that_has_not_ended_took_as_long_as_it_logged(
    later: float, seconds: float, make: Make
) -> None:
    folder = make("going")
    (folder / "result.json").unlink()
    os.utime(folder / "job.json", (1e9, 1e9))
    # A copied folder may have the times of the copies.
    os.utime(folder / "metrics.jsonl", (1e9 + later, 1e9 + later))
    run = read(folder)
    assert (run.passed, run.seconds) == (False, seconds)


@pytest.mark.parametrize(("nodes", "shown"), [(1, "16"), (2, "16 on 2 nodes")])
def test_nodes_are_named_where_there_are_several(nodes: int, shown: str, make: Make) -> None:
    run = replace(read(make("one")), nodes=nodes, ranks=16)
    assert ("Ranks", shown) in html.figures([run])


def test_the_gpus_of_a_node_are_the_ranks_over_the_nodes(make: Make) -> None:
    run = replace(read(make("one")), nodes=2, ranks=16)
    row = sheets.perf_row(run)
    assert (row["n_gpus"], row["nnodes"], row["gpus_per_node"]) == ("16", "2", "8")


def test_the_benchmark_csv_is_that_of_the_script(make: Make, tmp_path: Path) -> None:
    flux = Choices(backend="flux", mode="full", gpu="mi300x", precision="bf16")
    paths = [
        make("one"),
        make("two", speed=9900.0),
        make("failed", passed=False),
        make(
            "flux",
            recipe="flux.1-dev",
            choices=flux,
            speed=3.25 * 1536,
            facts={"device": "cuda", "gpu": "AMD Instinct MI300X", "gpu_units": 304},
        ),
    ]
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/perf_llama3.1-8b.csv").read_text()
    local = read(paths[0]).local_batch
    assert text.splitlines()[:4] == [
        "model,performance,metric,mode,precision,batch_size,seq_len,device,num_gpus",
        f"llama3.1-8b,9000,tok_per_s_per_gpu,pretrain,BF16,{local},8192,H200,8",
        f"llama3.1-8b,521.23,TFLOPS_per_gpu,pretrain,BF16,{local},8192,H200,8",
        f"llama3.1-8b,47.5,GPU_memory_usage,pretrain,BF16,{local},8192,H200,8",
    ]
    assert text.count("model,") == 1
    assert [row["performance"] for row in rows(tmp_path / "out/perf_llama3.1-8b.csv")[6:]] == [
        "",
        "",
        "",
    ]
    images, tflops, _ = rows(tmp_path / "out/perf_flux.1-dev.csv")
    assert (images["metric"], images["performance"], images["device"]) == (
        "FPS_per_GPU",
        "3.25",
        "MI300X",
    )
    assert tflops["metric"] == "TFLOPS_per_GPU"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [
            f"{tag} {key}" for key, _ in attrs if key in ("src", "href") or key.startswith("on")
        ]
        self.outside += [tag] if tag in ("link", "iframe", "img") else []
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_compares_runs_and_takes_nothing_from_outside(make: Make, tmp_path: Path) -> None:
    paths = [
        make("before"),
        make("after", speed=9900.0),
        make("<b>bad</b>"[:3] + "ad", passed=False),
    ]
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "out")]) == 0
    page = Page(text := (tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert (page.outside, page.open) == ([], [])
    charts = [json.loads(words) for words in page.words if words.startswith('{"title"')]
    assert [chart["title"] for chart in charts] == [
        "Loss",
        "Throughput",
        "MFU",
        "TFLOP/s",
        "Memory",
        "Gradient norm",
    ]
    assert [[line["colour"] for line in chart["lines"]] for chart in charts] == [[0, 1, 2]] * 6
    assert "+10.0 %" in page.words
    assert "46.8 % / 52.7 % of 989 TFLOP/s BF16" in page.words
    assert "finite: loss <b>is</b> NaN at step 3" in page.words
    assert "<b>" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def test_a_record_is_read_like_a_folder(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(name="base", recipe=resolve("llama3.1-8b", (), H200), output=tmp_path / "base")
    outcome = Outcome(
        job=job,
        exit_code=0,
        series=series_of(9000.0),
        facts=FACTS,
        run=RunResult(exit_code=0, seconds=61.5),
    )
    made = suite.record(
        [job],
        {"base": outcome},
        verdicts(True),
        suite.Place(
            target="h200",
            gpu="NVIDIA H200",
            made="2026-11-20T00:00:00Z",
            image=RecordedImage(ref="h200", manifest="sha256:12"),
        ),
    )
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/record.json").write_text(json.dumps(made.as_json()))
    folder = make("train")
    of_folder, of_record = read(folder), read(tmp_path / "evidence")
    assert of_record.summary == of_folder.summary
    assert of_record.summary.mfu is not None
    assert of_record.summary.mfu.peak_tflops == 989
    assert of_record.series == of_folder.series
    assert of_record.label == "h200 llama3.1-8b"
    assert (
        main(
            [
                "report",
                str(tmp_path / "evidence/record.json"),
                "--out",
                str(tmp_path / "out"),
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["runs"][0]["tokens_per_second"] == 9000.0
    assert all(Path(file).is_file() for file in said["files"])
    assert rows(tmp_path / "out/perf.csv")[0]["docker_sha"] == "sha256:12"


def test_runs_of_one_name_are_told_apart(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make("run")
    shutil.copytree(first, tmp_path / "other/run")
    assert (
        main(["report", str(first), str(tmp_path / "other/run"), "--out", str(tmp_path / "out")])
        == 0
    )
    assert "✓ run (1)  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"metrics.jsonl": ""}, "the run logged no step"),
        ({"metrics.jsonl": '{"step": 1, "lo'}, "metrics.jsonl:1"),
        ({"metrics.jsonl": '{"step": 1, "loss": "low"}\n'}, "not a file that primus wrote"),
        ({"metrics.jsonl": "[1]\n"}, "not a file that primus wrote"),
        ({"metrics.jsonl": None}, "the run logged no step"),
        ({"result.json": None, "metrics.jsonl": None}, "the run logged no step"),
        ({"result.json": "{}"}, "'exit_code' is missing"),
        ({"result.json": '{"exit_code": 0}'}, "passed is missing"),
        (
            {
                "result.json": '{"exit_code": 0, "passed": true, "seconds": 1, '
                '"verdicts": [3], "summary": null}'
            },
            "verdicts must be a mapping with name, passed",
        ),
        ({"job.json": "\x00"}, "not JSON"),
        ({"job.json": None}, "contains no job.json"),
        (
            {
                "job.json": '{"settings": {}, "recipe": {"name": "x", "overrides": []}, '
                '"backend": "jax"}'
            },
            "not a file that primus wrote",
        ),
        (
            {"metrics.jsonl": '{"step": 1, "loss": 1' + "0" * 400 + "}"},
            "not a file that primus wrote",
        ),
        ({"job.json": "[" * 100_000}, "nested too deeply"),
    ],
)
def test_a_broken_run_is_a_sentence(
    broken: dict[str, str | None],
    says: str,
    make: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make("run")
    for name, text in broken.items():
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_text(text)
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_of_several_runs_those_without_a_step_are_left_out(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, failed, running = make("good"), make("failed"), make("running")
    (failed / "metrics.jsonl").write_text("")
    (running / "result.json").unlink()
    (running / "metrics.jsonl").write_text(
        (running / "metrics.jsonl").read_text() + '{"step": 16, "lo'
    )
    words = ["report", str(failed), str(good), str(running), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "✓ good" in said.out
    assert f"left out: {failed}: the run logged no step" in said.err
    assert "– running" in said.out
    assert (read(running).summary.steps, read(running).summary.last_loss) == (15, 5.0)
    assert main([*words[:2], *words[-2:]]) == 2, "nothing is left"


def test_a_report_inside_a_container_says_how_to_keep_it(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "primus_images.cli.image.report.lost_warning",
        lambda folder: f"{folder} is inside the container",
    )
    assert main(["report", str(make("run")), "--out", str(tmp_path / "out")]) == 0
    assert f"primus: {tmp_path / 'out'} is inside the container" in capsys.readouterr().err


def test_too_many_runs_and_a_system_folder(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make("run"))
    out = ["--out", str(tmp_path / "out")]
    assert main(["report", *[folder] * 9, *out]) == 2
    assert "9 runs are too many\n  → compare at most 8" in capsys.readouterr().err
    assert main(["report", folder, "--out", "/proc/report"]) == 2
    assert "--out: /proc/report belongs to the system" in capsys.readouterr().err


# JSON values of other types; one number is infinite, one text holds what no file and no terminal
# can show.
HOSTILE = ("null", "-1", "1e999", '"\\u0000\\ud800\\u001b[2J"', f'"{"x" * 5000}"', "[1]", "{}")


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The place of each value in a document; of a list, the first one's."""
    yield place
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield from _places(one, (*place, key))


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", ["job.json", "result.json", "facts.json", "metrics.jsonl"])
def test_a_mutated_run_is_reported_or_refused(
    name: str, hostile: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = make("run"), tmp_path / "out"
    whole = (folder / name).read_text(encoding="utf-8")
    first, _, rest = whole.partition("\n") if name == "metrics.jsonl" else (whole, "", "")
    places = [
        place
        for place in _places(json.loads(first))
        if place[:1] != ("settings",) or "nodes" in place
    ]
    for place in places:
        document: Any = {"": json.loads(first)}
        holder: Any = document
        for key in ("", *place)[:-1]:
            holder = holder[key]
        holder[("", *place)[-1]] = "HERE"
        text = json.dumps(document[""]).replace('"HERE"', hostile)
        (folder / name).write_text(f"{text}\n{rest}", encoding="utf-8")
        assert main(["report", str(folder), "--out", str(out)]) in (0, 2), place
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said
        assert "\x1b" not in said


@pytest.mark.parametrize("kept", [True, False])
def test_the_old_script_appends_its_rows(
    kept: bool,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, here = make("run"), tmp_path / "scripts/pytorch-train"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    file = here.parent / "perf_Llama-3.1-8B.csv"
    if not kept:
        file.mkdir()

    def trained(options: train.TrainOptions) -> int:
        if options.output and not options.dry_run:
            shutil.copytree(folder, options.output, dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(train, "train", trained)
    words = ["compat", "pytorch_benchmark_report.sh"]
    words += ["-t", "pretrain", "-m", "llama-3.1-8b", "-p", "BF16", "-s", "8192"]
    assert main(words) == 0
    if kept:
        assert main(words) == 0
    else:
        assert "Is a directory" in capsys.readouterr().err
        (file,) = here.glob(f"runs/*/{file.name}")
    lines = file.read_text().splitlines()
    assert lines[0] == ",".join(sheets.COLUMNS["benchmark"])
    assert lines[1].startswith("Llama-3.1-8B,9000,tok_per_s_per_gpu,pretrain,BF16,")
    if kept:
        assert lines[4:] == lines[1:4]
    assert len(lines) == (7 if kept else 4)
    assert main([*words, "--dry-run"]) == 0
    assert file.read_text().splitlines() == lines


# As madengine 2 looks for it in the log.
FIGURE = r"performance:\s+([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[,]?\s+([^\s,]+)"


@pytest.mark.parametrize(
    ("name", "tag", "precision"),
    [
        ("mi300x", "primus_pyt_train_llama-3.1-8b", "bf16"),
        ("mi355x", "primus_pyt_train_llama-3.1-8b_fp8", "fp8"),
        ("cpu", "primus_pyt_train_llama-3.1-8b", "fp32"),
        ("cpu", "primus_pyt_train_deepseek-v3-16b", "fp32"),
        ("h200", "primus_finetune_train_llama3.1-8b_lora", "bf16"),
    ],
)
def test_madengine_trains_every_recipe_of_a_target(name: str, tag: str, precision: str) -> None:
    target = resolve_target(Project(ROOT), name)
    files = mad_files(target, "rocm/primus@sha256:00")
    models = {
        word: model
        for model in json.loads(files["models.json"])
        for word in (model["name"], *model["tags"])
    }
    assert (
        models[tag]["training_precision"] == precision
        and f"--precision {precision}" in models[tag]["args"]
    )
    assert {*target.target.recipes} - {"llama3-proxy"} <= models.keys()
    assert main(["train", *models[tag]["args"].split(), "--dry-run"]) == 0
    for model in models.values():
        assert parser_of("train").parse_args(model["args"].split())
        assert (
            any(path.startswith(model["dockerfile"] + ".") for path in files)
            and model["scripts"] in files
        )
    (dockerfile,) = (text for path, text in files.items() if path.endswith(".Dockerfile"))
    vendor = {"cpu": "{}", "h200": "{'gpu_vendor': 'NVIDIA'}"}.get(name, "{'gpu_vendor': 'AMD'}")
    assert dockerfile.startswith(f"# CONTEXT {vendor}\nARG BASE_DOCKER=rocm/primus@sha256:00\n")


@pytest.mark.parametrize("failing", ["", "train", "report"])
def test_madengine_finds_the_figure_of_a_run_that_passes(
    failing: str, make: Make, tmp_path: Path
) -> None:
    run = make("run")
    assert main(["report", str(run), "--out", str(tmp_path / "made")]) == 0
    program = (
        f'#!/bin/sh\n[ "$1" != "{failing}" ] || exit 1\n[ $1 = train ] || cp -r '
        f'{tmp_path}/made "$4"\n'
    )
    (tmp_path / "primus").write_text(program)
    (tmp_path / "primus").chmod(0o755)
    script = mad_files(resolve_target(Project(ROOT), "cpu"), "")["scripts/primus/run.sh"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script, "run.sh", "llama3.1-8b"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(FIGURE, done.stdout)
    assert (done.returncode, match and match.groups()) == (
        (1, None) if failing else (0, ("9000", "tok_per_s_per_gpu"))
    )


def test_a_gain_compares_runs_of_one_recipe_only(make: Make) -> None:
    first = read(make("run"))
    assert first.summary.tokens_per_second
    assert html._gain(replace(first), first) == 0
    assert html._gain(replace(first, recipe="another"), first) is None
    assert html._gain(first, first) is None


def test_a_run_whose_first_line_is_not_whole_has_no_step(make: Make) -> None:
    folder = make("run")
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5')
    with pytest.raises(NoResult, match="the run logged no step"):
        read(folder)


def resumed(first: Path, folder: Path, step: int, steps: range) -> None:
    """Let ``folder`` be a run of ``steps`` that was resumed from a checkpoint of ``first``."""
    job = json.loads((folder / "job.json").read_text())
    job["resume_from"] = str(first / f"checkpoint/step-{step}")
    (folder / "job.json").write_text(json.dumps(job))
    lines = [{"step": number, "loss": 1.0, "seconds": number - steps.start + 1} for number in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_resumed_run_has_one_history(make: Make, tmp_path: Path) -> None:
    first, second, third = make("first"), make("second"), make("third")
    resumed(Path("/none"), first, 0, range(1, 8))
    resumed(first, second, 5, range(6, 10))
    # Both were moved: the path of the checkpoint is no more.
    resumed(Path("/gone/second"), third, 8, range(9, 12))
    assert read(first).resumed_after == ()
    run = read(third)
    assert [step["step"] for step in run.series] == list(range(1, 12))
    assert [step["seconds"] for step in run.series] == list(range(1, 12))
    assert run.resumed_after == (5, 8)
    assert ("Curves", "steps 1 to 11, resumed after 5, 8") in html.figures([run])
    page = html.comparison([run])
    assert json.loads(page.partition('id="steps">')[2].partition("<")[0])["third"]["resumed"] == [
        5,
        8,
    ]
    shutil.rmtree(first)
    alone = read(second)
    assert [step["step"] for step in alone.series] == list(range(6, 10))
    assert alone.resumed_after == ()


@pytest.mark.parametrize("damage", ["[1]\n", '{"step": 1, "lo', '{"loss": 1}\n'])
def test_a_damaged_former_run_leaves_the_resumed_one_alone(damage: str, make: Make) -> None:
    first, second = make("first"), make("second")
    resumed(first, second, 5, range(6, 10))
    (first / "metrics.jsonl").write_text(damage)
    assert [step["step"] for step in read(second).series] == list(range(6, 10))


def test_a_run_that_resumes_from_itself_is_read(make: Make) -> None:
    folder = make("first")
    resumed(folder, folder, 5, range(1, 8))
    assert len(read(folder).series) == 7


@pytest.mark.parametrize(
    ("signal", "said"),
    [
        ("SIGTERM", "was stopped by SIGTERM after step 15"),
        ("", "logged no more after step 15: it is still running, or was killed"),
    ],
)
def test_a_run_that_was_stopped_did_not_fail(
    signal: str, said: str, make: Make, tmp_path: Path
) -> None:
    folder = make("run")
    (folder / "result.json").unlink()
    if signal:
        write_stop(signal, folder)
    run = read(folder)
    assert run.stopped == said
    assert not run.passed
    assert all(verdict.skipped for verdict in run.verdicts)
    words = Page(html.comparison([run])).words
    assert f" {said}." in words
    assert "✗" not in words


def test_settings_that_differ_are_first(make: Make) -> None:
    runs = [read(make("one")), read(make("two"))]
    length = "torchtitan.training.seq_len"
    settings = {**runs[1].settings, length: "43", "more_of_it": "1"}
    runs[1] = replace(runs[1], settings=settings)
    differing, common = html.configuration(runs)
    assert differing == [(length, "8192", "43"), ("more_of_it", "—", "1")]
    names = [name for name, _ in common]
    assert "torchtitan.training.steps" in names
    assert len(names) > 20
    page = html.comparison(runs)
    assert "more_<wbr>of_it" not in page, "too short a word is not broken"
    assert "primus train llama3.1-8b --backend=torchtitan" in page
    assert page.index("more_of_it") < page.index("torchtitan.<wbr>training.<wbr>steps")


def test_a_run_names_its_image_and_commit(make: Make) -> None:
    folder = make("run")
    job = json.loads((folder / "job.json").read_text())
    job |= {"image": {"release": "v26.11", "target": "h200"}, "commit": "0123456789ab"}
    (folder / "job.json").write_text(json.dumps(job))
    figures = dict(html.figures([read(folder)]))
    assert (figures["Image"], figures["Commit"]) == ("v26.11 h200", "0123456789ab")
