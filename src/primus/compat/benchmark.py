"""The benchmark commands of the v25.2 and v25.3 documents and MAD's tags → a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from primus.compat.request import Request
from primus.compat.tables import commands
from primus.compat.words import options
from primus.errors import InputError, nearest
from primus.recipes.setting import Choices

_LETTERS = {"-t": "mode", "-m": "model", "-p": "precision", "-s": "seq_len"}
# Options of train_fsdp.py, with its own spelling.
_FSDP = ("batch_size", "num_iteration", "grad_accumlate_pre_steps", "reduce_pre_steps", "enable_fp8", "enable_compile")
_MICRO_STEPS = 8


def report(words: Sequence[str]) -> Request:
    """Translate ``pytorch_benchmark_report.sh -t MODE -m MODEL -p PRECISION -s SEQ``. Raises InputError."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        letter = rest.pop(0)
        if letter not in _LETTERS or not rest:
            what = f"{letter} needs a value" if letter in _LETTERS else f"there is no option {letter!r}"
            raise InputError(what, where="pytorch_benchmark_report.sh", hint="-t MODE -m MODEL -p BF16|FP8 -s LENGTH")
        given[_LETTERS[letter]] = rest.pop(0)
    for letter, name in (("-t", "mode"), ("-m", "model")):
        if name not in given:
            raise InputError(f"{letter} is missing", where="pytorch_benchmark_report.sh")
    table = commands()["report"]
    mode = table["modes"][_one_of(given["mode"], table["modes"], "-t")]
    model = _one_of(given["model"], table["models"], "-m")
    precision = table["precisions"][_one_of(given.get("precision", "bf16").lower(), table["precisions"], "-p")]
    what = table["models"][model]
    seq_len = given.get("seq_len")
    if seq_len is not None and not seq_len.isdecimal():
        raise InputError(f"the sequence length must be a whole number, not {seq_len!r}", where=f"-s {seq_len}")
    if mode not in what["backends"]:
        offered = ", ".join(word for word, kind in table["modes"].items() if kind in what["backends"])
        raise InputError(f"{model} has no {given['mode']}", where=f"-t {given['mode']}", hint=f"there are: {offered}")
    backend = what["backends"][mode]
    # For FLUX, the page's "pretrain" fine-tunes all weights.
    flux = backend == "flux"
    says = table["says"].get(f"{model} {given['mode']} {precision}")
    return Request(
        recipe=what["recipe"],
        choices=Choices(backend=backend, mode="full" if flux else mode, precision=precision),
        words=(f"{backend}.training.seq_len={seq_len}",) if seq_len and not flux else (),
        says=(says,) if says else (),
        benchmark=(model, given["mode"]),
    )


def fsdp(words: Sequence[str], environment: Mapping[str, str]) -> Request:
    """Translate ``train_fsdp.py CONFIG FAMILY …``, which torchrun starts on all ranks. Raises InputError."""
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise InputError(
            "the first two arguments must be a configuration and a model family", where="train_fsdp.py",
            hint="train_fsdp.py configs/llama-3.1-8b-8k.json llama --batch_size 3",
        )  # fmt: skip
    table = commands()["configs"]
    config, family = words[0].removeprefix("./"), words[1]
    what = table[_one_of(config, table, "train_fsdp.py")]
    if family != what["family"]:
        raise InputError(f"{config} is of the family {what['family']}, not {family!r}", where="train_fsdp.py")
    given = {}
    for one in options(words[2:]):
        if one.key not in (*_FSDP, "seed"):
            raise InputError(f"there is no option --{one.key}" + nearest(one.key, _FSDP), where="train_fsdp.py")
        given[one.key] = one
    count = {name: one.value for name, one in given.items() if name not in ("enable_fp8", "enable_compile")}
    for name, value in count.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError("must be a whole number of at least 1", where=given[name].where)
    ranks = _ranks(environment.get("WORLD_SIZE") or "8")
    micro = int(str(count.get("grad_accumlate_pre_steps", _MICRO_STEPS)))
    settings: dict[str, object] = {"ranks": ranks, "fsdp.training.seq_len": what["seq_len"]}
    says = []
    if "batch_size" in count:
        batch = int(str(count["batch_size"]))
        settings["fsdp.training.micro_batch_size"] = batch
        settings["fsdp.training.global_batch_size"] = batch * micro * ranks
    if "num_iteration" in count:
        iterations = int(str(count["num_iteration"]))
        if iterations % micro:
            raise InputError(
                f"must be a multiple of the {micro} that make one step", where=given["num_iteration"].where
            )
        settings["fsdp.training.steps"] = iterations // micro
        says.append(f"an iteration of train_fsdp.py is one of the {micro} micro-batches of a step here")
    if "seed" in count:
        settings["fsdp.training.seed"] = count["seed"]
    if "reduce_pre_steps" in count:
        says.append("reduce_pre_steps is left out: the loss of every step is logged")
    flags = {
        name: _flag(given[name].value, given[name].where) for name in ("enable_fp8", "enable_compile") if name in given
    }
    if "enable_compile" in flags:
        settings["fsdp.training.compile"] = str(flags["enable_compile"]).lower()
    return Request(
        recipe=what["recipe"],
        choices=Choices(backend="fsdp", mode="pretrain", precision="fp8" if flags.get("enable_fp8") else "bf16"),
        words=tuple(f"{key}={value}" for key, value in settings.items()),
        says=tuple(says),
    )


def program(name: str, words: Sequence[str]) -> Request:
    """Translate a command that names no model: FluxBenchmark's ``launcher.py``, torchtitan's ``run_llama_train.sh``."""
    if words:
        raise InputError(
            f"{words[0]!r} is not supported here", where=name,
            hint=f"primus train {commands()['programs'][name]['recipe']} takes settings as key=value",
        )  # fmt: skip
    what = commands()["programs"][name]
    return Request(
        recipe=what["recipe"], choices=Choices(backend=what["backend"], mode=what["mode"], precision=what["precision"])
    )


def tag(words: Sequence[str]) -> Request:
    """Translate ``madengine run --tags TAG …``. Its other options concern containers and are ignored."""
    rest = list(words)
    if rest[:1] != ["run"] or "--tags" not in rest or rest[-1] == "--tags":
        raise InputError("only `madengine run --tags TAG` is supported", where="madengine")
    name = rest[rest.index("--tags") + 1]
    table = commands()["tags"]
    what = table[_one_of(name, table, "--tags")]
    says = (what["says"],) if "says" in what else ()
    return Request(
        recipe=what["recipe"], choices=Choices(backend=what["backend"], mode=what.get("mode", "pretrain")), says=says
    )


def _one_of(word: str, known: Mapping[str, Any], where: str) -> str:
    """Return ``word`` as the table spells it, ignoring case. Raises InputError if it is not in the table."""
    found = next((name for name in known if name.lower() == word.lower()), None)
    if found is None:
        raise InputError(
            f"there is no {word!r}" + nearest(word, known), where=where, hint=f"there are: {', '.join(known)}"
        )
    return found


def _ranks(text: str) -> int:
    """Return ``WORLD_SIZE`` as a number. Raises InputError if it is none."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise InputError(f"WORLD_SIZE must be a whole number of at least 1, not {text[:40]!r}", where="train_fsdp.py")
    return int(text)


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError("must be True or False", where=where)
    return value
