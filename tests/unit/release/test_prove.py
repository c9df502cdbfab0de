"""`primus prove`: what runs, what a kill leaves, what is named, and what leaves the machine."""

import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.main import main
from primus_images.errors import CheckFailed, InputError
from primus_images.files import below
from primus_images.gpus.detect import DetectedGpus
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release.prove import folder as sent, read, run
from primus_images.release.prove.read import kept, verified
from primus_images.release.prove.scrub import Scrubber
from primus_images.release.prove.steps import Setting, Step, chosen, steps_of
from project_kit import alive, until
from prove_kit import outcomes_of, setting_of, step_of, written
from stand_in_machine import make_machine, write_all

ROOT = Path(__file__).parents[3]


# The steps


@pytest.mark.parametrize("target", ["mi300x", "mi325x", "mi350x", "mi355x", "h200"])
def test_every_generation_has_its_steps_and_they_begin_with_the_machine(
    tmp_path: Path, target: str
) -> None:
    steps = steps_of(setting_of(tmp_path, target, here=False))
    names = [step.name for step in steps]
    assert names[:4] == ["machine", "lock", "build", "gates"]
    assert len(names) == len(set(names))
    for step in steps:
        assert not any("{" in word for word in step.command), step
        assert target in " ".join(step.command), step
    cells = [step for step in steps if step.expected]
    assert any(step.name.startswith("llama3.1-8b-torchtitan-pretrain-bf16") for step in cells)
    assert all(step.expected["predicted_gib"] > 0 for step in cells)


def test_without_a_container_nothing_asks_for_one(tmp_path: Path) -> None:
    for step in steps_of(setting_of(tmp_path)):
        words = step.typed(setting_of(tmp_path))
        assert words[1] not in ("run", "build", "check", "lock", "validate"), words
        assert step.needs != "build"


def test_a_step_of_the_image_is_typed_with_its_container(tmp_path: Path) -> None:
    setting = setting_of(tmp_path, here=False, root=Path("/"))
    step = next(step for step in steps_of(setting) if step.name == "driver")
    words = " ".join(step.typed(setting))
    assert words.startswith("primus run mi300x --engine auto --gpus all")
    assert f"-v {tmp_path / 'work'}:/out -- primus preflight" in words


def test_published_figures_are_those_of_the_gpu(tmp_path: Path) -> None:
    flux = [s for s in steps_of(setting_of(tmp_path)) if s.name.startswith("flux.1-dev")]
    assert [step.expected["published"] for step in flux] == [4.51]


def test_the_least_worth_is_left_out(tmp_path: Path) -> None:
    steps = [step_of("a", ""), step_of("b", "", minutes=5), step_of("c", "", needs="b")]
    assert [step.name for step in chosen(steps, 7)] == ["a", "b", "c"]
    assert [step.name for step in chosen(steps, 3)] == ["a"], "c needs b"
    done = outcomes_of(steps, setting_of(tmp_path), minutes=3)
    assert done["b"].state == "left out" and "about 5 min" in done["b"].reason
    assert done["c"].state == "left out" and "needs the step b" in done["c"].reason


# Failures


def test_each_failure_is_named_and_none_stops_the_others(tmp_path: Path) -> None:
    says = "import sys; print('primus build: the disk is full\\n  → free some', file=sys.stderr)"
    problems = {"findings": [{"level": "slow", "check": "NUMA", "message": "pages move"}]}
    steps = [
        step_of("full", f"{says}; sys.exit(3)"),
        step_of("raises", "raise ValueError('broken kernel')"),
        step_of("machine", f"print({json.dumps(problems)!r}); raise SystemExit(1)"),
        step_of("killed", "import os; os.kill(os.getpid(), 9)"),
        step_of("hangs", "import time; time.sleep(60)", minutes=-0.33),
        step_of("fine", "print('{\"passed\": true}')"),
    ]
    done = outcomes_of(steps, setting_of(tmp_path))
    assert done["full"].state == "lacking"
    assert done["full"].reason == "the disk is full → free some"
    assert done["raises"].reason == "exit code 1: ValueError: broken kernel"
    assert done["machine"].reason == "NUMA: pages move"
    assert done["killed"].reason == "exit code -9, and it printed nothing"
    assert done["hangs"].reason.startswith("it did not end within")
    assert done["fine"].passed and done["fine"].document == {"passed": True}


def test_a_step_finds_the_modules_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_caller.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import json, of_the_caller, primus_images; print(json.dumps(primus_images.__file__))"
    done = outcomes_of([step_of("imports", code)], setting_of(tmp_path))
    assert done["imports"].passed, done["imports"].reason


def test_what_the_first_step_names_fails_no_other(tmp_path: Path) -> None:
    files = {"level": "slow", "check": "ulimits", "message": "only 20000 open files"}
    wrong = {"level": "failed", "check": "GPU 3", "message": "computes wrong"}
    steps = []
    for name, rows in (("machine", [files]), ("speed", [files]), ("burn-in", [files, wrong])):
        printed = json.dumps({"findings": rows})
        steps.append(step_of(name, f"print({printed!r}); raise SystemExit(1)"))
    done = outcomes_of(steps, setting_of(tmp_path))
    assert done["machine"].reason == "ulimits: only 20000 open files"
    assert done["speed"].passed
    assert "GPU 3: computes wrong" in done["burn-in"].reason


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ({"refused": "no GPU", "cause": "another"}, "no GPU"),
        ({"cause": "rank 1 hangs"}, "rank 1 hangs"),
        ({"a": {"b": [{"name": "loss", "passed": False, "reason": "rises"}]}}, "loss: rises"),
        ([{"gate": "size", "passed": False, "summary": "too large"}], "size: too large"),
        ([{"check": "disk", "level": "slow", "message": "is slow"}], "disk: is slow"),
        ({"faults": {"kernel": "wrong"}}, "kernel: wrong"),
        # These are no problems, or have no name.
        ([{"name": "loss", "passed": False, "skipped": True, "reason": "x"}], ""),
        ([{"check": "disk", "level": "ok", "message": "is fast"}], ""),
        ([{"name": "loss", "passed": True, "reason": "falls"}], ""),
        ([{"level": "failed", "message": "nameless"}], ""),
        ("primus train: the disk is full\n  → free some\nlast", "the disk is full → free some"),
        ("primus train: the disk is full\nlast", "the disk is full"),
        ("", "exit code 1, and it printed nothing"),
    ],
)
def test_the_reason_of_a_failure_is_what_the_command_says(
    printed: Any, reason: str, tmp_path: Path
) -> None:
    text = printed if isinstance(printed, str) else json.dumps(printed)
    step = step_of("a", f"print({text!r}); raise SystemExit(1)")
    outcome = outcomes_of([step], setting_of(tmp_path))["a"]
    assert outcome.state == "failed"
    assert outcome.reason == (reason or f"exit code 1: {text}")


def test_many_problems_are_named_once_and_counted(tmp_path: Path) -> None:
    rows = [{"name": f"cell {n % 30}", "reason": "no", "passed": False} for n in range(60)]
    done = outcomes_of(
        [step_of("suite", f"print({json.dumps(json.dumps(rows))}); raise SystemExit(1)")],
        setting_of(tmp_path),
    )
    assert done["suite"].reason.startswith("cell 0: no; cell 1: no; ")
    assert done["suite"].reason.endswith("; cell 19: no; and 10 more")


def test_a_run_is_timed_to_its_first_step_and_its_kernels_are_counted(tmp_path: Path) -> None:
    setting = setting_of(tmp_path)
    line = "step:  1  loss:  2.5  grad_norm:  1.0  memory: 1.00GiB(1.00%)  tps: 10  tflops: 1.0"
    code = (
        "import pathlib, time; out = pathlib.Path('work/trained'); out.mkdir(parents=True);"
        "(out / 'log.txt').write_text('[titan] 2026-11-29 07:00:00,000 - root - INFO - "
        f"{line} mfu: 1.00%\\n'); kept = pathlib.Path('work/kernels'); kept.mkdir(exist_ok=True);"
        "(kept / 'a.hsaco').touch(); (kept / 'a.json').touch(); time.sleep(0.5)"
    ).replace("work/", f"{setting.work}/")
    step = replace(step_of("trained", code), run=True)
    done = outcomes_of([step], setting)["trained"]
    assert done.passed
    assert done.kernels == 1
    assert done.first_step is not None and 0 < done.first_step < 10


# Files below the folder of the third GPU, or below that of the machine, and what is said of them.
FAULTS = {
    "ras/umc_err_count": ("ue: 2\nce: 0", "GPU 2: 2 uncorrected errors"),
    "ras/gpu_vram_bad_pages": ("0x1 : 0x1000 : R", "GPU 2: 1 memory pages are retired"),
    "current_link_speed": ("2.5 GT/s PCIe", "GPU 2: speed 2.5"),
    "mem_info_vram_used": ("161061273600", "GPU 2: 150.0 of 192.0 GiB"),
    "power_dpm_force_performance_level": ("low", "the performance level of a GPU is low"),
    "current_compute_partition": ("CPX", "the compute partition of a GPU is CPX"),
    "hwmon/hwmon4/power1_cap": ("375000000", "GPU 2: 375 of 750 W"),
    "/proc/sys/kernel/numa_balancing": ("1", "the kernel moves pages between NUMA nodes"),
    "/proc/cmdline": ("quiet", "it translates each transfer of a GPU"),
    "/opt/rocm/.info/version": ("7.2.0", "it does not support ROCm 7.2"),
    "/sys/module/amdgpu/version": ("6.12.12", "amdgpu 6.12.12 is of ROCm"),
    "/proc/self/limits": ("Max open files 1024 4096 files\n", "only 1024 open files"),
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": ("powersave", "is powersave"),
}


@pytest.mark.parametrize("gpu", ["mi300x", "mi325x", "mi350x", "mi355x"])
def test_all_faults_of_a_machine_are_named_at_once_and_the_rest_goes_on(
    tmp_path: Path, gpu: str
) -> None:
    setting = setting_of(tmp_path, gpu)
    make_machine(setting.root, gpu)
    card = setting.root / "sys/class/drm/renderD130/device"
    sound = steps_of_machine(setting)
    assert outcomes_of(sound, setting)["machine"].passed
    write_all(card, {"hwmon/hwmon4/power1_cap_default": "750000000"})
    for name, (text, _) in FAULTS.items():
        folder = card
        if name.startswith("/"):
            folder = setting.root
        write_all(folder, {name: text})
    # One of eight GPUs hangs: its driver took it away.
    shutil.rmtree(setting.root / "sys/class/kfd/kfd/topology/nodes/9")
    (setting.root / "dev/dri/renderD131").unlink()
    done = outcomes_of(sound, setting)
    reason = done["machine"].reason
    for _, said in FAULTS.values():
        assert said in reason, reason
    assert "8 GPUs are on the PCI bus, and 7 can be used" in reason
    assert done["after"].passed, "the rest is completed"


def steps_of_machine(setting: Setting) -> list[Step]:
    machine = next(step for step in steps_of(setting) if step.name == "machine")
    return [machine, step_of("after", "")]


# Interruptions

# Ends the command that runs it, once, at the place that the test chose.
KILLER = """
import os, signal, sys
from pathlib import Path
root, name = Path(sys.argv[1]), sys.argv[2]
with (root / "ran.txt").open("a") as file:
    file.write(name + " ")
if name == (root / "kill.txt").read_text() and not (root / "killed").exists():
    (root / "killed").touch()
    os.kill(os.getppid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("place", list("abcdefghij"))
def test_killed_anywhere_it_goes_on_where_it_was(tmp_path: Path, place: str) -> None:
    (tmp_path / "kill.txt").write_text(place)
    steps = []
    for name in "abcdefghij":
        step = step_of(name, KILLER)
        steps.append(replace(step, command=(*step.command, str(tmp_path), name)))
    child = multiprocessing.get_context("fork").Process(
        target=outcomes_of, args=(steps, setting_of(tmp_path))
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    done = outcomes_of(steps, setting_of(tmp_path))
    assert all(outcome.passed for outcome in done.values())
    ran = (tmp_path / "ran.txt").read_text().split()
    assert ran == sorted([*"abcdefghij", place]), "only the interrupted step runs twice"


def test_the_step_of_a_killed_command_does_not_go_on(tmp_path: Path) -> None:
    code = "import os, pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1]);"
    code += "(folder / 'pid').write_text(str(os.getpid()));"
    code += "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    step = step_of("trains", code)
    step = replace(step, command=(*step.command, str(tmp_path)))
    child = multiprocessing.get_context("fork").Process(
        target=outcomes_of, args=([step], setting_of(tmp_path))
    )
    child.start()
    child.join(60)
    pid = int((tmp_path / "pid").read_text())
    assert until(lambda: not alive(pid), 20)


def test_what_failed_runs_again_and_what_changed_too(tmp_path: Path) -> None:
    setting = setting_of(tmp_path)
    broken = [step_of("a", "print('{}')"), step_of("b", "raise SystemExit(1)")]
    assert not outcomes_of(broken, setting)["b"].passed
    repaired = [broken[0], step_of("b", "")]
    done = outcomes_of(repaired, setting)
    assert done["a"].kept and done["b"].passed and not done["b"].kept
    other = replace(setting, target="mi325x")
    assert not outcomes_of(repaired, other)["a"].kept, "other pins"
    state = setting.work / "state/a.json"
    state.write_text("{")
    assert not outcomes_of(repaired, setting)["a"].kept, "a damaged file is none"


def test_ctrl_c_in_a_step_ends_the_command(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        outcomes_of([step_of("a", "raise SystemExit(130)")], setting_of(tmp_path))
    assert not (tmp_path / "work/state/a.json").exists()


# The folder


def test_nothing_of_the_machine_or_its_user_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = os.uname().nodename
    texts = [
        f"cannot read {tmp_path}/rows/data.bin, /home/jane.doe/novel.txt and /mnt/corp/x.py:3",
        f"host {host}: connected to 10.20.30.40:22, fe80::1ff:fe23:4567:890a, 0c:42:a1:00:11:22",
        "token=abc123secret https://jane:pw@git.corp.example/x.git jane@corp.example",
        "plain-text-of-a-token pypi.corp.example hf_AbCdEfGhIjKlMnOpQr jane.doe",
        'File "/home/jane.doe/venv/lib/python3.12/site-packages/torch/nn/modules.py", line 3',
    ]
    code = f"import sys; texts = {texts!r}; print(*texts, sep='\\n', file=sys.stderr);"
    code += (
        "import json; print(json.dumps({'cause': texts[0], 'deep': [{'a': texts}]})); sys.exit(1)"
    )
    record = written(tmp_path, [step_of("leaks", code)], monkeypatch)
    everything = "".join(path.read_text() for path in below(record))
    for word in (
        str(tmp_path), "novel", "corp", "10.20", "4567", "0c:42", "abc123", "plain-text", "pw@",
        "hf_Ab", "jane", str(ROOT), str(Path.home()) + "/",
    ):  # fmt: skip
        assert word not in everything, word
    assert f" {host}:" not in everything
    assert "…/torch/nn/modules.py" in everything, "what failed stays readable"
    assert {path.name for path in below(record)} == {
        "index.html", "leaks.html", "leaks.txt", "result.json",
    }  # fmt: skip


def test_versions_and_paths_of_images_stay() -> None:
    text = "ROCm 7.1.0-1, amdgpu 6.16.6, torch 2.12.0+rocm10.0.0, /dev/kfd, /usr/bin/ld, 12:30:05"
    assert Scrubber({}, {}).text(text) == text


def test_the_folder_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, sys; sys.stderr.write('x' * 99 + '\\n' * 90000);"
        "print(json.dumps({'rows': ['y' * 100] * 10000, 'facts': 'z' * 1000000})); sys.exit(1)"
    )
    record = written(tmp_path, [step_of(f"s{number}", code) for number in range(8)], monkeypatch)
    assert sum(path.stat().st_size for path in below(record)) < 2_000_000
    assert "left_out" in (record / "result.json").read_text()


def test_a_failed_step_has_a_page_with_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('the last line', file=sys.stderr); sys.exit(1)"
    record = written(tmp_path, [step_of("a", ""), step_of("bad", code)], monkeypatch)
    page = (record / "bad.html").read_text()
    assert "the last line" in page and "sys.exit(1)" in page and "megatron-core" in page
    assert not (record / "a.html").exists()
    assert 'href="bad.html"' in (record / "index.html").read_text()
    assert "1 of 2 steps passed" in (record / "index.html").read_text()


def test_read_gives_what_the_repository_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = {"tokens_per_second": 9000.0, "tflops_non_causal": 480.0, "memory_gib": 100.0}
    code = f"print('''{json.dumps({'summary': summary})}''')"
    cell = replace(step_of("cell", code), expected={"predicted_gib": 110.0, "published": 4.5})
    bad = step_of("bad", "raise ValueError('fault of a kernel')")
    record = written(tmp_path, [cell, bad], monkeypatch)
    content = kept(record)
    assert content["support"]["passed"] == 1 and content["support"]["target"] == "mi300x"
    assert content["memory"][0]["error"] == 0.1
    assert content["speeds"][0]["published"] == 4.5
    assert "fault of a kernel" in content["problems"][0]["what"]
    assert verified(record, None).startswith("not signed")
    (record / "result.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match="not a file that"):
        kept(record)


class _Trust:
    key, identity, issuer = "cosign.pub", None, None

    def rejects(self, bundle: bytes, kind: str) -> str:
        if kind == sent.PREDICATE and bundle.startswith(b'{"dsse'):
            return ""
        return "its signature is not by cosign.pub"


def test_a_changed_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    def sign(content: object) -> bytes:
        text = base64.b64encode(json.dumps(content).encode()).decode()
        return json.dumps({"dsseEnvelope": {"payload": text}}).encode()

    record = written(tmp_path, [step_of("a", "")], monkeypatch, sign)
    assert "unchanged" in verified(record, _Trust())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by whom"):
        verified(record, None)
    result = record / "result.json"
    text = result.read_text()
    result.write_text(text.replace("passed", "Passed"))
    with pytest.raises(CheckFailed, match=r"result.json is not the file that was signed"):
        verified(record, _Trust())  # type: ignore[arg-type]
    result.write_text(text)
    (record / "logs/a.txt").unlink()
    with pytest.raises(CheckFailed, match="was signed, and is missing"):
        verified(record, _Trust())  # type: ignore[arg-type]
    (record / sent.STATEMENT).write_text("other")
    with pytest.raises(CheckFailed, match="its signature is not by"):
        verified(record, _Trust())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens_per_second", "fast"),
        ("memory_gib", []),
        ("tflops_non_causal", float("nan")),
        ("tokens_per_second", None),
    ],
)
def test_what_somebody_edited_gives_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: object,
) -> None:
    summary = {"tokens_per_second": 9.0, "tflops_non_causal": 4.0, "memory_gib": 1.0}
    text = json.dumps({"summary": summary})
    step = replace(step_of("cell", f"print({text!r})"), expected={"predicted_gib": 1.0})
    record = written(tmp_path, [step], monkeypatch)
    content = json.loads((record / "result.json").read_text())
    content["steps"][0]["document"]["summary"][key] = value
    (record / "result.json").write_text(json.dumps(content))
    code = 2
    if value is None:
        code = 0
    assert main(["prove", "--read", str(record)]) == code
    (record / "link").symlink_to("/")
    assert main(["prove", "--read", str(record)]) == 2
    assert "is a link" in capsys.readouterr().err


def test_the_marks_of_states() -> None:
    assert [run.mark(state) for state in ("passed", "failed", "lacking")] == ["✓", "✗", "–"]


@pytest.mark.parametrize("value", [True, "1", [1], float("nan"), float("inf")])
def test_what_is_no_number_in_a_file_that_was_sent_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is no number"):
        read._number(value)
    assert [read._number(number) for number in (None, 1, 0.5)] == [None, 1, 0.5]


@pytest.mark.parametrize(
    ("count", "sentence"), [(8, "8 × NVIDIA H200"), (1, "1 of 8 × NVIDIA H200")]
)
def test_a_record_says_how_many_of_the_gpus_were_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, sentence: str
) -> None:
    monkeypatch.setattr(sent, "detect", lambda _: DetectedGpus(names=("NVIDIA H200",) * 8))
    setting = setting_of(tmp_path, gpus=count)
    proof = sent.Proof(
        steps=[], outcomes={}, setting=setting, resolved=resolve(Project(ROOT), "mi300x")
    )
    content = sent.write(tmp_path / "record", proof, None)
    assert content["machine"]["gpus"] == sentence
