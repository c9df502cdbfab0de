from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.errors import CheckFailed, InputError
from primus.recipes.recipe import Choices
from primus.recipes.resolve import resolve
from primus.tuning import bench, store
from primus.tuning.shapes import read_shapes

REAL_BENCH = os.environ.get("PRIMUS_TEST_HIPBLASLT_BENCH", "")
CALL = (
    "hipblaslt-bench --api_method c -m {m} -n 8192 -k 4096 --lda 4096 --ldb 4096 --ldc {m} --ldd {m} --stride_a 0 "
    "--stride_b 0 --stride_c 0 --stride_d 0 --alpha 1.000000 --beta 0.000000 --transA T --transB N --batch_count 1 "
    "--scaleA 0 --scaleB 0 --a_type bf16_r --b_type bf16_r --c_type bf16_r --d_type bf16_r --compute_type f32_r "
    "--rotating 0 --algo_method index --solution_index -2147220478 --activation_type none"
)
# What the program does: it says who ran what, writes the tuned solution, prints a table with the time per call.
BENCH = """#!/bin/sh
for word in "$@"; do case "$before" in -m) m=$word;; --algo_method) how=$word;; esac; before=$word; done
{pause}
case "$m" in {broken}) echo "error: no solution" >&2; exit 3;; esac
if [ "$how" = all ]; then
    printf 'Git Version: {version}\\nT,N,1,%s,8192,4096,77\\n' "$m" > "$HIPBLASLT_TUNING_FILE"
    echo "$m $HIP_VISIBLE_DEVICES" >> {ledger}
    us=50
else
    us=100
fi
echo "hipBLASLt git version: {version}"
echo "[0]:transA,transB,batch_count,m,n,k,hipblaslt-Gflops,us"
echo "    T,N,1,$m,8192,4096,$us"1"000,$us.5"
"""


def program(folder: Path, *, broken: str = "never", pause: str = ":", version: str = "abc") -> Path:
    path = folder / "bench"
    text = BENCH.format(broken=broken, pause=pause, ledger=folder / "ledger", version=version)
    path.write_text(text.replace('$us"1"000', "1000"))
    path.chmod(0o755)
    return path


def dumped(folder: Path, sizes: range, repeats: int = 1) -> store.Folder:
    made = store.Folder.of("llama2-7b", folder)
    made.shapes.mkdir(parents=True, exist_ok=True)
    made.dump("0").write_text("".join((CALL.format(m=m) + "\n") * repeats for m in sizes))
    return made


def words(folder: Path, bench_path: Path, *more: str) -> list[str]:
    return [
        "tune", "gemm", "llama2-7b", "--gpu", "mi300x", "--stage", "tune", "--folder", str(folder), "--bench",
        str(bench_path), "--workers", "8", "--hipblaslt", "1.0", *more,
    ]  # fmt: skip


def test_shapes_are_counted_and_ordered_by_their_work(tmp_path: Path) -> None:
    lines = (
        [CALL.format(m=256)] * 3
        + [CALL.format(m=4096)]
        + [CALL.format(m=512).replace("--rotating 0", "--rotating 512")]
    )
    torn = [CALL.format(m=64)[:60], CALL.format(m=64)[:80] + CALL.format(m=64), "some other line", CALL.format(m=0)]
    (tmp_path / "a.txt").write_text("\n".join(lines + torn) + "\n" + CALL.format(m=32))
    (tmp_path / "b.txt").write_text(CALL.format(m=512) + "\n")
    shapes, unread = read_shapes(tmp_path)
    assert [(dict(one.options)["-m"], one.count) for one in shapes] == [("4096", 1), ("512", 2), ("256", 3)]
    assert unread == 5
    assert shapes[0].flops == 2 * 4096 * 8192 * 4096
    assert not {"--rotating", "--solution_index", "--algo_method"} & set(shapes[0].words)
    assert shapes[0].words[shapes[0].words.index("--alpha") + 1] == "1.000000"
    with pytest.raises(InputError, match=f"no GEMM is logged in {tmp_path}/none"):
        read_shapes(tmp_path / "none")


def test_tuning_measures_every_shape_once_and_reports_the_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dumped(tmp_path / "out", range(256, 256 + 20), repeats=3)
    assert main(words(tmp_path / "out", program(tmp_path), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["shapes"]) == 20
    assert found["gemm_speedup"] == pytest.approx(100.5 / 50.5)
    rows = folder.tuned.read_text().splitlines()
    assert rows[0] == "Git Version: abc"
    assert sorted(rows[1:]) == sorted(f"T,N,1,{m},8192,4096,77" for m in range(256, 276))
    ledger = [line.split() for line in (tmp_path / "ledger").read_text().splitlines()]
    assert len(ledger) == 20
    assert len({gpu for _, gpu in ledger}) > 1
    # Nothing is left to do.
    assert main(words(tmp_path / "out", program(tmp_path))) == 0
    assert len((tmp_path / "ledger").read_text().splitlines()) == 20


def test_a_shape_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    shapes, _ = read_shapes(dumped(tmp_path / "out", range(256, 276)).dump("0").parent)
    with pytest.raises(CheckFailed, match=r"1 of 20 shapes could not be measured.*260 × 8192 × 4096.*no solution"):
        bench.measure(shapes, tmp_path / "work", str(program(tmp_path, broken="260")), ["0", "1"])
    assert len(bench.results(shapes, tmp_path / "work")[0]) == 19
    bench.measure(shapes, tmp_path / "work", str(program(tmp_path)), ["0", "1"])
    assert bench.results(shapes, tmp_path / "work")[1] == []
    assert len((tmp_path / "ledger").read_text().splitlines()) == 20


def test_all_stages_print_one_document(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(tmp_path / "out", range(256, 258))
    (tmp_path / "train").write_text("#!/bin/sh\necho '{}'\n")
    (tmp_path / "train").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "train"))
    given = words(tmp_path / "out", program(tmp_path), "--json")
    given[given.index("tune", 1)] = "all"
    assert main(given) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["shapes"]) == 2
    assert err.count("{}") == 2


@pytest.mark.parametrize(("shapes", "most_kills"), [(100, 5), pytest.param(1000, 50, marks=pytest.mark.slow)])
def test_kills_lose_no_shape_and_tune_none_twice(
    shapes: int, most_kills: int, tmp_path: Path, figures: Callable[..., None]
) -> None:
    sizes = range(1000, 1000 + shapes)
    folder = dumped(tmp_path / "out", sizes)
    command = [sys.executable, "-m", "primus.cli.main", *words(tmp_path / "out", program(tmp_path))]
    chance, kills = random.Random(7), 0
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        done = len(list(folder.root.rglob("*.search.txt")))
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if kills < most_kills:
            # Wait until it works, so that a slow machine is killed at work, too.
            until = time.monotonic() + 20
            goal = done + chance.randrange(0, 16)
            while len(list(folder.root.rglob("*.search.txt"))) <= goal and time.monotonic() < until:
                time.sleep(0.01)
                if process.poll() is not None:
                    break
            os.kill(process.pid, signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
            continue
        assert process.wait() == 0
        break
    assert kills == most_kills
    runs = Counter(line.split()[0] for line in (tmp_path / "ledger").read_text().splitlines())
    assert set(runs.values()) == {1}
    assert set(runs) == {str(m) for m in sizes}
    rows = folder.tuned.read_text().splitlines()
    assert len(rows) == len(set(rows)) == shapes + 1
    if shapes == 1000:
        twice = sum(count > 1 for count in runs.values())
        figures(
            "tuning", shapes=shapes, workers=8, kills=kills, measured=len(runs), lost=shapes - len(runs), twice=twice
        )


def test_two_tunings_of_one_folder_do_not_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dumped(tmp_path / "out", range(256, 260))
    with bench.alone(folder.root / "gemm_tune" / "work"):
        assert main(words(tmp_path / "out", program(tmp_path))) == 3
    assert "another process tunes" in capsys.readouterr().err


def test_results_of_two_builds_are_not_merged(tmp_path: Path) -> None:
    shapes, _ = read_shapes(dumped(tmp_path / "out", range(256, 258)).dump("0").parent)
    bench.measure(shapes[:1], tmp_path / "work", str(program(tmp_path)), ["0"])
    bench.measure(shapes, tmp_path / "work", str(program(tmp_path, version="def")), ["0"])
    recipe = resolve("llama2-7b", (), Choices(gpu="mi300x"))
    with pytest.raises(CheckFailed, match="2 builds of hipBLASLt"):
        store.merge(
            store.Folder(root=tmp_path / "a"),
            store.Key.of(recipe, "1", "gfx942"),
            bench.results(shapes, tmp_path / "work")[0],
        )


def test_a_file_of_another_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dumped(tmp_path / "out", range(256, 258))
    assert main(words(tmp_path / "out", program(tmp_path))) == 0
    recipe = resolve("llama2-7b", ("steps=7", "seed=3"), Choices(gpu="mi300x"))
    key = store.Key.of(recipe, "1.0", "gfx942")
    assert store.check(folder, key) == folder.tuned  # the number of steps changes no GEMM
    other = resolve("llama2-7b", ("training.micro_batch_size=1",), Choices(gpu="mi300x", backend="megatron"))
    of_others = [store.Key.of(recipe, "1.1", "gfx942"), store.Key.of(recipe, "1.0", "gfx950")]
    for wrong in (*of_others, store.Key.of(other, "1.0", "gfx942")):
        with pytest.raises(InputError, match="was measured with"):
            store.check(folder, wrong)
    use = ["tune", "gemm", "llama2-7b", "--gpu", "mi355x", "--stage", "use", "--folder", str(tmp_path / "out")]
    assert main([*use, "--hipblaslt", "1.0"]) == 2
    assert "was measured with arch gfx942 instead of gfx950" in capsys.readouterr().err
    folder.key.unlink()
    with pytest.raises(InputError, match="has no valid key"):
        store.check(folder, key)


def test_a_slower_shape_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dumped(tmp_path / "out", range(256, 258))
    assert main(words(tmp_path / "out", program(tmp_path))) == 0
    rows = json.loads(folder.times.read_text())
    rows[0]["best_us"] = 40.0
    (tmp_path / "before.json").write_text(json.dumps(rows))
    assert main(words(tmp_path / "out", program(tmp_path), "--against", str(tmp_path / "before.json"))) == 1
    assert "50.5 µs, was 40.0" in capsys.readouterr().out
    again = words(tmp_path / "out", program(tmp_path), "--against", str(tmp_path / "before.json"), "--tolerance", "0.5")
    assert main(again) == 0


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--bench", "/nothing"], 3, "not installed"),
        (["--bench", __file__], 2, "is not executable"),
        (["--against", "/nothing"], 2, "no times"),
        (["--folder", __file__], 2, "is not a folder"),
    ],
)
def test_what_is_missing_is_said(
    more: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dumped(tmp_path / "out", range(256, 258))
    assert main(words(tmp_path / "out", program(tmp_path), *more)) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers", "0"], "a whole number of at least 1, not '0'"),
        (["--dump-steps", "0"], "a whole number of at least 1, not '0'"),
        (["--tolerance", "nan"], "a number of at least 0, not 'nan'"),
        (["--tolerance", "-1"], "a number of at least 0, not '-1'"),
        (["--tolerance", "ten"], "a number of at least 0, not 'ten'"),
    ],
)
def test_numbers_out_of_range_are_refused(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words(tmp_path / "out", program(tmp_path), *more))
    assert message in capsys.readouterr().err


def test_a_missing_baseline_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    folder = dumped(tmp_path / "out", range(256, 258))
    assert main(words(tmp_path / "out", program(tmp_path), "--against", str(tmp_path / "absent.json"))) == 2
    assert not folder.times.exists()


def test_without_a_log_the_stage_that_makes_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path / "out", program(tmp_path))) == 2
    assert "--stage dump" in capsys.readouterr().err


def test_the_documented_stage_2_tunes_in_the_documented_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = dumped(tmp_path / "output/tune_hipblaslt", range(256, 260))
    program(tmp_path).rename(tmp_path / "hipblaslt-bench")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("primus.cli.image.tune.Host.component", lambda self, name: "1.0")
    monkeypatch.setattr("primus.cli.image.tune._gpus", lambda workers: ["0", "1"])
    monkeypatch.setenv("PRIMUS_HIPBLASLT_TUNING_STAGE", "2")
    monkeypatch.setenv("PRIMUS_GPU", "mi300x")
    monkeypatch.setenv("EXP", "examples/megatron/configs/llama2_7B-pretrain.yaml")
    assert main(["compat", "run_pretrain.sh"]) == 0
    assert folder.tuned == tmp_path / "output/tune_hipblaslt/llama2-7b/gemm_tune/tune_hipblas_gemm_results.txt"
    assert len(folder.tuned.read_text().splitlines()) == 5


@pytest.mark.slow
@pytest.mark.skipif(not REAL_BENCH, reason="PRIMUS_TEST_HIPBLASLT_BENCH names no hipblaslt-bench")
def test_the_real_program_accepts_the_command_lines(tmp_path: Path) -> None:
    """It reads its options before it looks for a GPU, and refuses one that it does not know by name."""
    shapes, _ = read_shapes(dumped(tmp_path, range(128, 129)).dump("0").parent)
    said = tmp_path / "said"
    wrapper = tmp_path / "bench"
    wrapper.write_text(f'#!/bin/sh\n"{REAL_BENCH}" "$@" >> {said} 2>&1 || echo "exit code $?" >> {said}\n')
    wrapper.chmod(0o755)
    bench.measure(shapes, tmp_path / "out", str(wrapper), ["0"])
    # Twice: the solution that hipBLASLt chooses, and the search.
    assert said.read_text().count("no ROCm-capable device") == 2, said.read_text()

    refused = subprocess.run([REAL_BENCH, "--no-such-option"], capture_output=True, text=True, check=False)
    assert "--no-such-option is not defined" in refused.stdout + refused.stderr
    # It looks at the words after some options only when it has a GPU.
    options = subprocess.run([REAL_BENCH, "--help"], capture_output=True, text=True, check=False).stdout
    assert "Options: heuristic, all, index" in options
    assert "Set to -1 to get all solutions" in options
