"""The portable tuning with PyTorch's TunableOp. A stand-in writes the results here; on GPUs PyTorch does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.errors import CheckFailed, InputError
from primus.tuning import tunableop
from primus.tuning.store import Key

SHAPE = "GemmTunableOp_BFloat16_TN,tn_{m}_2048_4096_ld_4096_4096_{m}"
# As `python -c PROGRAM SHAPES`: it writes where PyTorch would, to the name with the device's number.
STAND_IN = """#!/bin/sh
out=$(printf %s "$PYTORCH_TUNABLEOP_FILENAME" | sed 's/%d/0/')
echo "$HIP_VISIBLE_DEVICES $(grep -c . "$3") $PYTORCH_TUNABLEOP_ENABLED$PYTORCH_TUNABLEOP_TUNING" >> {ledger}
grep -q {broken} "$3" && {{ echo "RuntimeError: no device" >&2; exit 1; }}
{{ echo "Validator,PT_VERSION,{version}"; sed 's/$/,Gemm_Hipblaslt_7,0.5/' "$3"; }} > "$out"
"""


def stand_in(folder: Path, broken: str = "nothing", version: str = "2.11.0") -> str:
    path = folder / "python"
    path.write_text(STAND_IN.format(ledger=folder / "ledger", broken=broken, version=version))
    path.chmod(0o755)
    return str(path)


def key(version: str = "2.11.0", recipe: str = "r") -> Key:
    return Key(library="pytorch", version=version, arch="gfx942", recipe=recipe)


def shapes(count: int) -> list[str]:
    return [SHAPE.format(m=256 * number) for number in range(1, count + 1)]


def test_shapes_of_all_devices_are_read_once_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a0.csv").write_text("\n".join([*shapes(3), "other,line"]) + "\n" + SHAPE.format(m=9)[:40])
    (tmp_path / "a1.csv").write_text("\n".join(f"{one},more" for one in shapes(4)) + "\n")
    assert tunableop.read_shapes(tmp_path) == shapes(4)
    with pytest.raises(InputError, match=f"no GEMM is recorded in {tmp_path}/none"):
        tunableop.read_shapes(tmp_path / "none")


def test_every_shape_is_measured_once_on_all_gpus(tmp_path: Path) -> None:
    found = tunableop.measure(shapes(100), tmp_path / "work", ["0", "1", "2"], stand_in(tmp_path))
    assert [row.rpartition(",Gemm")[0] for row in found.rows] == shapes(100)
    assert found.validators == ("Validator,PT_VERSION,2.11.0",)
    assert found.changed == 100
    ledger = [line.split() for line in (tmp_path / "ledger").read_text().splitlines()]
    assert sum(int(count) for _, count, _ in ledger) == 100
    assert {gpu for gpu, *_ in ledger} <= {"0", "1", "2"}
    assert {how for *_, how in ledger} == {"11"}
    # Again: nothing is measured twice.
    assert tunableop.measure(shapes(100), tmp_path / "work", ["0"], stand_in(tmp_path)) == found
    assert len((tmp_path / "ledger").read_text().splitlines()) == len(ledger)
    # One shape more: its part alone.
    tunableop.measure(shapes(101), tmp_path / "work", ["0"], stand_in(tmp_path))
    assert len((tmp_path / "ledger").read_text().splitlines()) == len(ledger) + 1


def test_a_failure_says_why_and_keeps_the_rest(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="16 GEMMs on GPU 0: RuntimeError: no device"):
        tunableop.measure(shapes(40), tmp_path / "work", ["0"], stand_in(tmp_path, broken=f"tn_{256 * 20}_"))
    before = len((tmp_path / "ledger").read_text().splitlines())
    assert len(tunableop.measure(shapes(40), tmp_path / "work", ["0"], stand_in(tmp_path)).rows) == 40
    assert len((tmp_path / "ledger").read_text().splitlines()) == before + 1


def test_results_of_two_versions_are_not_mixed(tmp_path: Path) -> None:
    tunableop.measure(shapes(16), tmp_path / "work", ["0"], stand_in(tmp_path))
    with pytest.raises(CheckFailed, match="of 2 versions of PyTorch"):
        tunableop.measure(shapes(32), tmp_path / "work", ["0"], stand_in(tmp_path, version="2.12.0"))


def test_a_result_is_used_with_its_key_alone(tmp_path: Path) -> None:
    place = tunableop.Place.of("recipes/llama2-7b.yaml", tmp_path)
    with pytest.raises(InputError, match="the stage `tune` creates it"):
        tunableop.check(place, key())
    tunableop.merge(place, key(), tunableop.measure(shapes(3), tmp_path / "w", ["0"], stand_in(tmp_path)))
    environment = tunableop.check(place, key())
    assert environment["PYTORCH_TUNABLEOP_TUNING"] == "0"
    for device in (0, 7):
        file = Path(environment["PYTORCH_TUNABLEOP_FILENAME"].replace("%d", str(device)))
        assert file.read_text().splitlines()[0] == "Validator,PT_VERSION,2.11.0"
        assert len(file.read_text().splitlines()) == 4
    for other, said in ((key("2.12.0"), "pytorch 2.11.0 instead of 2.12.0"), (key(recipe="x"), "other settings")):
        with pytest.raises(InputError, match=said):
            tunableop.check(place, other)
    place.key.write_text("[1]")
    with pytest.raises(InputError, match="has no valid key"):
        tunableop.check(place, key())


def test_the_command_measures_and_refuses_another_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    program = stand_in(tmp_path)
    real = tunableop.measure
    monkeypatch.setattr(
        "primus.cli.image.tune.tunableop.measure", lambda found, work, gpus: real(found, work, gpus, program)
    )
    place = tunableop.Place.of("llama2-7b", tmp_path / "out")
    place.shapes.mkdir(parents=True)
    (place.shapes / "tunableop_untuned_node0_gpu0.csv").write_text("\n".join(shapes(5)) + "\n")
    words = ["tune", "gemm", "llama2-7b", "--gpu", "mi300x", "--engine", "tunableop", "--folder", str(tmp_path / "out")]
    assert main([*words, "--stage", "tune", "--workers", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["shapes"]) == 5
    assert json.loads(place.key.read_text())["pytorch"] == "2.11.0"
    assert main([*words, "--stage", "use", "seq_len=1024"]) == 2
    assert "was measured with other settings of the recipe" in capsys.readouterr().err
    assert main([*words, "--stage", "tune", "--bench", "x"]) == 2
    assert "--bench cannot be used with --engine tunableop" in capsys.readouterr().err


def test_a_dump_records_and_does_not_tune(tmp_path: Path) -> None:
    place = tunableop.Place.of("llama2-7b", tmp_path)
    environment = tunableop.dumping(place, "3")
    assert environment["PYTORCH_TUNABLEOP_RECORD_UNTUNED"] == "1"
    assert environment["PYTORCH_TUNABLEOP_TUNING"] == "0"
    assert Path(environment["PYTORCH_TUNABLEOP_UNTUNED_FILENAME"]).parent == place.shapes
