"""AMD's ``primus-cli``: the command lines of its README, quick start and user guide."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.compat.primus_cli import parsed, usage, work_of
from primus_images.errors import InputError, PrimusError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices

ROOT = Path(__file__).resolve().parents[3]
LINES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests/fixtures/primus_cli.yaml").read_text(encoding="utf-8")
)
LLAMA = "examples/megatron/configs/MI300X/llama2_7B-BF16-pretrain.yaml"


def words_of(line: dict[str, Any]) -> list[str]:
    """The words after ``primus-cli``."""
    words = shlex.split(line.get("spelt", line["command"]))
    return words[words.index("primus-cli") + 1 :]


def without_settings(arguments: tuple[str, ...] | list[str]) -> str:
    return " ".join(word for word in arguments if word.startswith("--") or "=" not in word)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["command"][-80:])
def test_every_line_of_the_documents_is_translated_or_refused(line: dict[str, Any]) -> None:
    if "refused" in line:
        with pytest.raises(PrimusError, match=re.escape(line["refused"])):
            work_of(parsed(words_of(line)), {})
        return
    call = parsed(words_of(line))
    if call.help:
        assert line["runs"] == "help"
        return
    work = work_of(call, {})
    if not work.request:
        assert line["runs"] == "; ".join(map(without_settings, work.commands))
        return
    assert line["runs"] == without_settings(work.request.arguments())
    # What it asks for can be resolved on the GPU that the path names.
    choices = Choices(**{**vars(work.request.choices), "gpu": work.request.gpu_of_path or "mi355x"})
    resolve(work.request.recipe, work.request.words, choices)


def test_nine_in_ten_lines_run() -> None:
    run = [line for line in LINES if "runs" in line]
    assert len(LINES) > 160
    assert len(run) >= 0.9 * len(LINES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "no MODE"),
        (("direct",), "no command"),
        (("driect", "--", "train"), "there is no MODE 'driect'; did you mean 'direct'?"),
        (("direct", "--volme", "x", "--", "train"), "there is no option '--volme'"),
        (("container", "--imag", "x", "--", "train"), "did you mean '--image'?"),
        (("direct", "--", "tran", "pretrain"), "there is no command 'tran'; did you mean 'train'?"),
        (("direct", "--", "train"), "train needs more words"),
        (("direct", "--", "train", "pretrain"), "--config is missing"),
        (("direct", "--", "train", "evaluate", "--config", "x"), "train has no 'evaluate'"),
        (("direct", "--", "train", "pretrain", "--config"), "--config needs a value"),
        (("direct", "--", "benchmark", "gem"), "there is no suite 'gem'; did you mean 'gemm'?"),
        (("direct", "--", "benchmark", "rccl", "--op", "broadcast"), "only all-reduce"),
        (("direct", "--", "preflight", "--hosts"), "did you mean '--host'?"),
        (("direct", "--", "preflight", "--tests", "gem"), "there is no test 'gem'"),
        (("direct", "--env", "A", "--", "preflight"), "'A' sets no variable"),
        (("direct", "--patch", "x.sh", "--", "preflight"), "nothing is patched"),
        (("direct", "--script", "x.py", "--", "preflight"), "other scripts are not started"),
        (("direct", "--", "projection", "speed", "--config", LLAMA), "projection has no 'speed'"),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(PrimusError) as caught:
        work_of(parsed(words), {})
    assert sentence in str(caught.value)


def test_a_file_of_post_training_becomes_fine_tuning(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    overrides = {"peft": "lora", "train_iters": 9, "finetune_lr": 1e-4, "seq_length": 1024}
    trainer = {"framework": "megatron_bridge", "model": "qwen3_8b.yaml", "overrides": overrides}
    file.write_text(yaml.safe_dump({"modules": {"post_trainer": trainer}}))
    words = ("direct", "--", "train", "posttrain", "--config", str(file))
    request = work_of(parsed(words), {}).request
    assert request
    assert (request.recipe, request.choices.backend, request.choices.mode) == (
        "qwen3-8b",
        "finetune",
        "lora",
    )
    choices = Choices(**{**vars(request.choices), "gpu": "mi300x"})
    recipe = resolve(request.recipe, request.words, choices)
    assert recipe.steps == 9
    assert recipe.seq_len == 1024
    with pytest.raises(InputError, match="tensor_model_parallel_size"):
        work_of(parsed((*words, "--tensor_model_parallel_size", "2")), {})
    file.write_text("modules: {pre_trainer: {}}\n")
    with pytest.raises(InputError, match="no experiment of post-training"):
        work_of(parsed(words), {})


def test_help_names_every_command() -> None:
    text = "\n".join(usage())
    for word in ("pretrain", "posttrain", "gemm", "memory", "--host", "node_smoke", "--volume"):
        assert word in text


def test_a_word_before_the_command_is_no_option() -> None:
    words = ["slurm", "srun", "-N", "2", "...", "--", "train", "pretrain", "--config", "x.yaml"]
    with pytest.raises(InputError, match=r"'\.\.\.' is no option of slurm"):
        parsed(words)
