"""Tuning GEMMs with PyTorch's TunableOp, whose results a stand-in writes here."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from primus_images.cli.image import train
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.tuning import gemm
from primus_images.tuning.gemm import Key

SHAPE = "GemmTunableOp_BFloat16_TN,tn_{m}_2048_4096_ld_4096_4096_{m}"
# As `python -c PROGRAM SHAPES`: it writes where PyTorch would, to the name with the device's
# number.
STAND_IN = """#!/bin/sh
out=$(printf %s "$PYTORCH_TUNABLEOP_FILENAME" | sed 's/%d/0/')
switches=$PYTORCH_TUNABLEOP_ENABLED$PYTORCH_TUNABLEOP_TUNING
echo "$HIP_VISIBLE_DEVICES $(grep -c . "$3") $switches" >> {ledger}
grep -q {broken} "$3" && {{ echo "RuntimeError: no device" >&2; exit 1; }}
{{ echo "Validator,PT_VERSION,{version}"; sed 's/$/,Gemm_Hipblaslt_7,0.5/' "$3"; }} > "$out"
"""


def stand_in(folder: Path, broken: str = "nothing", version: str = "2.11.0") -> str:
    path = folder / "python"
    path.write_text(STAND_IN.format(ledger=folder / "ledger", broken=broken, version=version))
    path.chmod(0o755)
    return str(path)


def key(version: str = "2.11.0", recipe: str = "r") -> Key:
    return Key(pytorch=version, arch="gfx942", recipe=recipe)


def shapes(count: int) -> list[str]:
    return [SHAPE.format(m=256 * number) for number in range(1, count + 1)]


def test_shapes_of_all_devices_are_read_once_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a0.csv").write_text(
        "\n".join([*shapes(3), "other,line"]) + "\n" + SHAPE.format(m=9)[:40]
    )
    (tmp_path / "a1.csv").write_text("\n".join(f"{one},more" for one in shapes(4)) + "\n")
    assert gemm.read_shapes(tmp_path) == shapes(4)
    with pytest.raises(InputError, match=f"no GEMM is recorded in {tmp_path}/none"):
        gemm.read_shapes(tmp_path / "none")


def test_every_shape_is_measured_once_on_all_gpus(tmp_path: Path) -> None:
    found = gemm.measure(shapes(100), tmp_path / "work", ["0", "1", "2"], stand_in(tmp_path))
    assert [row.rpartition(",Gemm")[0] for row in found[1]] == shapes(100)
    assert found[0] == ["Validator,PT_VERSION,2.11.0"]
    ledger = [line.split() for line in (tmp_path / "ledger").read_text().splitlines()]
    assert sum(int(count) for _, count, _ in ledger) == 100
    assert {gpu for gpu, *_ in ledger} <= {"0", "1", "2"}
    assert {how for *_, how in ledger} == {"11"}
    # Again: nothing is measured twice.
    assert gemm.measure(shapes(100), tmp_path / "work", ["0"], stand_in(tmp_path)) == found
    assert len((tmp_path / "ledger").read_text().splitlines()) == len(ledger)
    # One shape more: its part alone.
    gemm.measure(shapes(101), tmp_path / "work", ["0"], stand_in(tmp_path))
    assert len((tmp_path / "ledger").read_text().splitlines()) == len(ledger) + 1


def test_a_failure_says_why_and_keeps_the_rest(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="16 GEMMs on GPU 0: RuntimeError: no device"):
        gemm.measure(
            shapes(40), tmp_path / "work", ["0"], stand_in(tmp_path, broken=f"tn_{256 * 20}_")
        )
    before = len((tmp_path / "ledger").read_text().splitlines())
    assert len(gemm.measure(shapes(40), tmp_path / "work", ["0"], stand_in(tmp_path))[1]) == 40
    assert len((tmp_path / "ledger").read_text().splitlines()) == before + 1


def test_a_kill_loses_no_finished_shape(tmp_path: Path) -> None:
    program, work, ledger = stand_in(tmp_path), tmp_path / "work", tmp_path / "ledger"
    call = (
        "from pathlib import Path; from primus_images.tuning import gemm; "
        f"gemm.measure({shapes(160)!r}, Path({str(work)!r}), ['0', '1'], {program!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", call], start_new_session=True)
    while len(list(work.glob("part-?.csv"))) < 3 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    parts = len(list(work.glob("part-?.csv")))
    before = len(ledger.read_text().splitlines())
    _, rows = gemm.measure(shapes(160), work, ["0"], program)
    assert [row.rpartition(",Gemm")[0] for row in rows] == shapes(160)
    assert len(ledger.read_text().splitlines()) <= before + 10 - parts


def test_a_result_is_used_with_its_key_alone(tmp_path: Path) -> None:
    place = gemm.Place(tmp_path)
    with pytest.raises(InputError, match="the stage `tune` creates it"):
        gemm.check(place, key())
    validators, rows = gemm.measure(shapes(3), tmp_path / "w", ["0"], stand_in(tmp_path))
    gemm.merge(place, key(), [*validators, *rows])
    environment = gemm.check(place, key())
    assert environment["PYTORCH_TUNABLEOP_TUNING"] == "0"
    for device in (0, 7):
        file = Path(environment["PYTORCH_TUNABLEOP_FILENAME"].replace("%d", str(device)))
        assert file.read_text().splitlines()[0] == "Validator,PT_VERSION,2.11.0"
        assert len(file.read_text().splitlines()) == 4
    for other, said in (
        (key("2.12.0"), "pytorch 2.11.0 instead of 2.12.0"),
        (key(recipe="x"), "other settings"),
    ):
        with pytest.raises(InputError, match=said):
            gemm.check(place, other)
    place.key.write_text("[1]")
    with pytest.raises(InputError, match="has no valid key"):
        gemm.check(place, key())


def test_a_gemm_without_a_solution_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "part.csv"
    written.write_text("Validator,PT_VERSION,2\nGemmTunableOp,nt_1\nGemmTunableOp,nt_2,x,0.5\n")
    monkeypatch.setattr(gemm, "_part", lambda *_: written)
    validators, rows = gemm.measure(["GemmTunableOp,nt_1", "GemmTunableOp,nt_2"], tmp_path, ["0"])
    assert validators == ["Validator,PT_VERSION,2"]
    assert rows == ["GemmTunableOp,nt_2,x,0.5"]


@pytest.mark.parametrize("backend", ["torchtitan", "megatron", "fsdp"])
def test_a_result_of_one_node_holds_for_more(backend: str) -> None:
    def digest(nodes: int, *words: str) -> str:
        recipe = resolve("llama3.1-8b", words, Choices(gpu="mi300x", nodes=nodes, backend=backend))
        return Key.of(recipe, "2.11.0", "gfx942").digest

    assert digest(1) == digest(4)
    assert digest(1) != digest(1, "local_batch=1")


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_reads_the_gemms_of_its_settings(
    changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolve("llama3.1-8b", (), Choices(gpu="mi300x", backend="fsdp"))
    place = gemm.Place(gemm.folder_of("llama3.1-8b", tmp_path))
    gemm.merge(place, key(), [SHAPE])
    monkeypatch.setattr(gemm, "key_here", lambda _: key(recipe="other" if changed else "r"))
    monkeypatch.setenv("PYTORCH_TUNABLEOP_VERBOSE", "1")
    if changed:
        with pytest.raises(InputError, match="other settings of the recipe"):
            train._read_tuned_gemms(recipe, tmp_path)
        return
    train._read_tuned_gemms(recipe, tmp_path)
    assert os.environ["PYTORCH_TUNABLEOP_FILENAME"] == str(place.tuned)
    assert os.environ["PYTORCH_TUNABLEOP_TUNING"] == "0"
    assert "PYTORCH_TUNABLEOP_VERBOSE" not in os.environ
    for name in ("ENABLED", "TUNING", "FILENAME"):
        monkeypatch.delenv(f"PYTORCH_TUNABLEOP_{name}")


def test_a_key_is_of_the_pytorch_and_the_gpu_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    recipe = resolve("llama3.1-8b", (), Choices(gpu="mi300x", backend="fsdp"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    found = gemm.key_here(recipe)
    assert (found.pytorch, found.arch) == ("2.11.0", "gfx942")
    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(HostError, match="PyTorch is not installed here"):
        gemm.key_here(recipe)
    with pytest.raises(InputError, match="tunes GEMMs of GPUs only"):
        gemm.key_here(resolve("llama3.1-8b", (), Choices(gpu="cpu", proxy=True)))
