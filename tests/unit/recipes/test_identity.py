"""A checkpoint is taken up by the run it belongs to, and by no other unless that is asked for."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.recipes.load import folder as recipes
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.recipes.tensors import header
from primus_images.training.run import identity
from primus_images.training.run.job import step_of, steps
from proof_kit import kept

CELLS = [
    ("llama3.1-8b", "torchtitan", "pretrain"),
    ("llama3.1-8b", "megatron", "pretrain"),
    ("llama3.1-8b", "fsdp", "pretrain"),
    ("llama3.1-8b", "finetune", "full"),
    ("llama3.1-8b", "finetune", "lora"),
    ("flux.1-dev", "flux", "pretrain"),
]


def proxy(
    *words: str, backend: str = "fsdp", mode: str = "pretrain", name: str = "llama3.1-8b"
) -> Recipe:
    return resolve(name, words, Choices(backend=backend, mode=mode, gpu="cpu", proxy=True))


def rewrite(folder: Path, **changed: object) -> None:
    content = json.loads((folder / identity.FILE).read_text())
    (folder / identity.FILE).write_text(json.dumps(content | changed))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(("name", "backend", "mode"), CELLS)
def test_the_same_run_goes_on_and_may_train_otherwise(
    tmp_path: Path, name: str, backend: str, mode: str
) -> None:
    recipe = proxy(backend=backend, mode=mode, name=name)
    folder = kept(tmp_path / "step-5", recipe)
    identity.check(folder, recipe)
    identity.check(folder, proxy("steps=40", "lr=0.0001", backend=backend, mode=mode, name=name))
    with pytest.raises(InputError, match=r"seed was .*, and is 7 now"):
        identity.check(folder, proxy("seed=7", backend=backend, mode=mode, name=name))


def test_a_checkpoint_from_before_a_field_of_models_resumes(tmp_path: Path) -> None:
    folder, fields = kept(tmp_path / "step-5", proxy()), identity.of(proxy())
    for field, works in {"model.sinks": True, "model.layers": False}.items():
        rewrite(folder, identity={key: value for key, value in fields.items() if key != field})
        if works:
            identity.check(folder, proxy())
        else:
            with pytest.raises(InputError, match=f"{field} was 0, and is 3 now"):
                identity.check(folder, proxy())


@pytest.mark.parametrize(
    ("words", "field", "told"),
    [
        (["model.layers=3"], "model.layers", "model.layers was 4, and is 3 now"),
        (["model.rope_theta=10000.0"], "model.rope_theta", "model.rope_theta was"),
        (["model.rope_scaling.factor=2.0"], "model.rope_scaling.factor", "is 2.0 now"),
        (["assets.corpus={tmp}/corpus.jsonl"], "assets.corpus", "assets.corpus was sha256:"),
        (["assets.tokenizer={tmp}/tokenizer"], "assets.tokenizer", "assets.tokenizer was sha256:"),
        (["assets.corpus=mock"], "assets.corpus", 'is "mock" now'),
        (["data.column=body"], "data.column", 'was "", and is "body" now'),
        (["training.seq_len=64"], "seq_len", "seq_len was 128, and is 64 now"),
        (["training.global_batch_size=32"], "global_batch", "global_batch was 16, and is 32 now"),
    ],
)
def test_a_difference_is_refused_unless_it_is_named(
    tmp_path: Path, words: list[str], field: str, told: str
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "another"}\n')
    shutil.copytree(recipes() / "assets/tokenizer", tmp_path / "tokenizer")
    with (tmp_path / "tokenizer/tokenizer.json").open("a") as file:
        file.write(" ")
    folder = kept(tmp_path / "step-5", proxy("model.layers=4"))
    same = [] if field == "model.layers" else ["model.layers=4"]
    other = proxy(*same, *(word.format(tmp=tmp_path) for word in words))
    with pytest.raises(InputError) as refused:
        identity.check(folder, other)
    assert told in refused.value.message
    assert refused.value.hint == f"to resume anyway: --accept-change {field}"
    for accepted in (field, field.partition(".")[0], "all"):
        identity.check(folder, other, ["seed", accepted])


def test_files_in_linked_folders_are_part_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/linked").symlink_to("../shards")
    (tmp_path / "corpus/itself").symlink_to("../corpus")
    digests = set()
    for text in ("a", "b"):
        (tmp_path / "shards/part.txt").write_text(text)
        digests.add(proxy(f"assets.corpus={tmp_path}/corpus").asset_digests["corpus"])
    assert len(digests) == 2


@pytest.mark.parametrize("accepted", [[], ["all"]])
def test_another_backend_never_fits(tmp_path: Path, accepted: list[str]) -> None:
    folder = kept(tmp_path / "step-5", proxy())
    with pytest.raises(InputError, match='backend was "fsdp", and is "finetune" now') as refused:
        identity.check(folder, proxy(backend="finetune", mode="full"), accepted)
    assert "--accept-change" not in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (
            lambda folder: (folder / "__0_0.distcp").write_bytes(b"x"),
            "__0_0.distcp has 1 of 1,200 bytes",
        ),
        (lambda folder: (folder / ".metadata").write_bytes(b"y" * 900), ".metadata has changed"),
        (lambda folder: (folder / identity.FILE).write_text("{"), "recipe.json cannot be read"),
        (
            lambda folder: (folder / identity.FILE).write_text("[]"),
            "recipe.json was not written by primus",
        ),
        (
            lambda folder: (folder / identity.FILE).write_bytes(b"\xff\xfe"),
            "recipe.json cannot be read",
        ),
        (
            lambda folder: (folder / identity.FILE).write_text("[" * 100_000),
            "recipe.json cannot be read",
        ),
        (lambda folder: pipe(folder / identity.FILE), "recipe.json cannot be read"),
        (
            lambda folder: rewrite(folder, files={".metadata": "900"}),
            "recipe.json was not written by primus",
        ),
        (
            lambda folder: rewrite(folder, files={".metadata": None}),
            "recipe.json was not written by primus",
        ),
    ],
)
def test_a_damaged_checkpoint_is_a_sentence(tmp_path: Path, damage: object, told: str) -> None:
    kept(tmp_path / "step-3", proxy())
    folder = kept(tmp_path / "step-5", proxy())
    damage(folder)  # type: ignore[operator]
    with pytest.raises(InputError, match="the checkpoint is damaged") as refused:
        identity.check(folder, proxy(), ["all"])
    assert told in refused.value.message
    assert f"--resume-from {tmp_path}/step-3" in (refused.value.hint or "")


def test_a_backend_may_delete_old_checkpoints_while_new_ones_are_sealed_and_listed(
    tmp_path: Path,
) -> None:
    stale: SimpleQueue[Path | None] = SimpleQueue()

    def purge() -> None:
        while (folder := stale.get()) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(1) as pool:
        purging = pool.submit(purge)
        try:
            for step in range(1, 1001):
                (folder := tmp_path / f"step-{step}").mkdir()
                for name in ("__0_0.distcp", ".metadata"):
                    (folder / name).touch()
                if (
                    step % 8 == 0
                ):  # those in between were saved in the background, and are sealed late
                    for old in steps(tmp_path)[
                        :-1
                    ]:  # some of them a second time, as torchtitan does
                        stale.put(old)
                    identity.complete(tmp_path / f"step-{step - 4}")
                    identity.seal_newest(tmp_path, {"seed": 1})
                    assert identity.complete(folder)
        finally:
            stale.put(None)
        purging.result()
    assert [path.name for path in steps(tmp_path) if identity.complete(path)] == ["step-1000"]


def test_the_hint_names_no_checkpoint_that_is_damaged_too(tmp_path: Path) -> None:
    kept(tmp_path / "step-1", proxy())
    for name in ("step-3", "step-10"):
        (kept(tmp_path / name, proxy()) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(InputError) as refused:
        identity.check(tmp_path / "step-10", proxy())
    assert refused.value.hint == f"--resume-from {tmp_path}/step-1 appears to be intact"


@pytest.mark.parametrize("name", ["step-4", "step-6"])
def test_a_renamed_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """The step of our own loop follows from the name, so another name would be another place in the
    data.
    """
    folder = kept(tmp_path / "step-5", proxy()).rename(tmp_path / name)
    with pytest.raises(
        InputError, match=f"the folder is named {name}, but the checkpoint is of step 5"
    ):
        identity.check(folder, proxy(), ["all"])


@pytest.mark.parametrize(
    ("backend", "words", "told"),
    [
        ("megatron", ["ranks=1"], "layout.ranks was 2, and is 1 now"),
        ("megatron", ["tp=2"], "layout.tp was 1, and is 2 now"),
    ],
)
def test_a_layout_that_the_backend_cannot_load_is_refused(
    tmp_path: Path, backend: str, words: list[str], told: str
) -> None:
    folder = kept(tmp_path / "step-5", proxy(backend=backend))
    other = proxy(*words, backend=backend)
    with pytest.raises(InputError, match=told):
        identity.check(folder, other)
    with pytest.raises(InputError, match=told) as refused:
        identity.check(folder, other, ["all"])
    assert "cannot be resumed with another layout" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "name", ["step-04", "step-²", "step-٤", "step--4", "step-", "step-" + "9" * 5000]
)
def test_only_a_plain_number_names_a_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not named step-N"):
        step_of(tmp_path / name)


def test_of_a_run_the_newest_complete_checkpoint_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step-2", "step-9", "step-10", "step-12"):
        kept(tmp_path / "checkpoint" / name, proxy())
    (tmp_path / "checkpoint/step-12/recipe.json").unlink()
    (tmp_path / "checkpoint/step-²").mkdir()
    words = [
        "train",
        "llama3.1-8b",
        "--backend",
        "fsdp",
        "--gpu",
        "cpu",
        "--proxy",
        "--resume-from",
        str(tmp_path),
    ]
    assert main([*words, "steps=20", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "steps 11–20" in said.out
    assert "step-10 is used; incomplete: step-12" in said.err


def test_one_that_says_nothing_of_itself_is_taken_when_asked_for(tmp_path: Path) -> None:
    folder = kept(tmp_path / "step-5", proxy())
    (folder / identity.FILE).unlink()
    with pytest.raises(
        InputError, match=r"has no recipe\.json, which says what it was trained from"
    ):
        identity.check(folder, proxy())
    identity.check(folder, proxy(), ["all"])


def test_the_command_refuses_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path / "checkpoint" / "step-5", proxy())
    words = [
        "train",
        "llama3.1-8b",
        "--backend",
        "fsdp",
        "--gpu",
        "cpu",
        "--proxy",
        "--resume-from",
        str(tmp_path),
    ]
    assert main([*words, "model.layers=7"]) == 2
    assert "model.layers was" in capsys.readouterr().err
    assert main([*words, "--accept-change", "model.layer"]) == 2
    assert "there is no such field; did you mean 'model.layers'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 100, "not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors file"),
        (
            (
                text := json.dumps(
                    {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
                ).encode()
            )
            and len(text).to_bytes(8, "little") + text + b"\0" * 8,
            "truncated",
        ),
    ],
)
def test_a_damaged_weights_file_is_a_sentence(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=told):
        header(tmp_path / "model.safetensors")
