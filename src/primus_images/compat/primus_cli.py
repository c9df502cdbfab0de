"""AMD's ``primus-cli MODE [options] -- COMMAND`` → a run, or commands of primus.

The tables are in ``primus-cli.yaml``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, cast

from primus_images.compat.commands import Request, requested
from primus_images.errors import HostError, InputError, nearest
from primus_images.recipes.setting import Choices
from primus_images.yamlfile import read_values, spell

NAME = "primus-cli"
MODES = ("direct", "container", "slurm")
# AMD's commands of which primus has none, or another one.
COMMANDS = ("train", "benchmark", "preflight", "projection", "node_smoke", "deps", "data")
_SUITES: Mapping[str, None] = {"pretrain": None, "posttrain": None}
_CONFIG: Mapping[str, Any] = {"--config": {}, "--exp": {}}
_NODES = "--nodes="
_POSTTRAIN = re.compile(r"(.+?)_(sft|lora)_posttrain(?:_packed)?\.ya?ml")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What becomes of one option. The comment at the top of ``primus-cli.yaml`` explains it."""

    takes: int = 1
    to: str = ""
    variable: bool = False
    because: str = ""
    refused: str = ""
    hint: str = ""
    values: Mapping[str, Mapping[str, str]] | None = None

    def of_value(self, value: str) -> "Row":
        """Return the row of one of its values. A value without a row keeps the option's own."""
        if self.values is None or value not in self.values:
            return self
        return Row(takes=self.takes, **self.values[value])  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A command line of ``primus-cli``.

    ``options`` are ours for the mode, ``command`` the words after ``--``. ``launcher`` is srun or
    sbatch, with its own ``flags``. ``environment`` are the variables that it sets.
    """

    mode: str = "direct"
    command: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    launcher: str = "srun"
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    says: tuple[str, ...] = ()
    dry_run: bool = False
    help: bool = False

    @property
    def nodes(self) -> str:
        """The number of nodes that it asks Slurm for; "" if it asks for none."""
        if self.mode != "slurm":
            return ""
        asked = [word for word in self.options if word.startswith(_NODES)]
        return asked[-1].removeprefix(_NODES) if asked else ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a command asks for: a ``request`` to train, or ``commands`` of primus in their order.

    ``rest`` are words of the command that may be primus's own options.
    """

    request: Request | None = None
    commands: tuple[tuple[str, ...], ...] = ()
    says: tuple[str, ...] = ()


def parsed(words: Sequence[str]) -> Call:
    """Parse the words after ``primus-cli``. Raises InputError for one that it does not have."""
    rest = list(words)
    call = Call()
    while rest and rest[0] not in MODES and rest[0] not in COMMANDS:
        if not rest[0].startswith("-"):
            _row_of(rest[0], dict.fromkeys(MODES), NAME, "there is no MODE")
        call, rest = _option(call, rest, "any")
        if call.help:
            return call
    if not rest:
        raise InputError("no MODE", where=NAME, hint=f"MODE is {', '.join(MODES)}")
    while rest and rest[0] in MODES:
        call, rest = _mode(replace(call, mode=_outer(call.mode, rest[0])), rest[0], rest[1:])
    asks = "-h" in rest or "--help" in rest
    if _is_stray(rest) and not (call.help or asks):
        raise InputError(
            f"{rest[0]!r} is no option of {call.mode}, and no command",
            where=NAME,
            hint=f"{NAME} {call.mode} [options] -- COMMAND, which is {', '.join(COMMANDS)}",
        )
    if not rest and not call.help:
        raise InputError("no command", where=NAME, hint=f"{NAME} {call.mode} … -- train pretrain …")
    return replace(call, command=tuple(rest), help=call.help or asks)


def _is_stray(rest: Sequence[str]) -> bool:
    """Whether a word that is no command stands before the `--` of the command."""
    return "--" in rest and rest[0].replace("-", "_") not in COMMANDS


def usage() -> Iterator[str]:
    """Yield the lines of ``primus-cli --help``."""
    yield f"usage: {NAME} [--dry-run] MODE [options] -- COMMAND"
    yield ""
    yield "AMD's launcher: each command is translated to one of primus, printed, and run."
    for mode in MODES:
        yield f"{mode}: {' '.join(_table('modes')[mode])}"
    yield ""
    yield "COMMAND:"
    yield "  train pretrain|posttrain --config FILE [--key value …] [--proxy] [--gpu NAME]"
    yield f"  benchmark {'|'.join(_table('benchmark'))}"
    yield "  projection memory|performance|both --config FILE"
    yield f"  preflight [{'] ['.join(_table('preflight')['options'])}]"
    yield f"  node_smoke [{'] ['.join(_table('node_smoke'))}]"


def _outer(outer: str, mode: str) -> str:
    """Return the mode of a command line in which ``mode`` stands inside ``outer``."""
    if mode == "direct":
        return outer
    if outer == "slurm":
        return outer
    return mode


def _mode(call: Call, mode: str, rest: list[str]) -> tuple[Call, list[str]]:
    """Parse the options of a mode up to its command."""
    if mode == "slurm" and rest[:1] in (["srun"], ["sbatch"]):
        call = replace(call, launcher=rest[0])
        rest = rest[1:]
    while rest and rest[0].startswith("-"):
        if rest[0] == "--":
            rest = rest[1:]
            if not rest or not rest[0].startswith("-"):
                break
            # After `--` of a container or of Slurm, options of `direct` may follow.
            mode = "direct"
            if rest[0] in ("-h", "--help"):
                break
            continue
        call, rest = _option(call, rest, mode)
    return call, rest


def _option(call: Call, rest: list[str], mode: str) -> tuple[Call, list[str]]:
    """Parse one option, and return the words after it."""
    word, *rest = rest
    if word in ("-h", "--help", "--version"):
        return replace(call, help=True), rest
    if word == "--dry-run":
        return replace(call, dry_run=True), rest
    rows = {**_table("modes")["any"], **_table("modes").get(mode, {})}
    if mode == "slurm":
        return _slurm_flag(call, word, rest, rows)
    name, value, row, rest = _one(word, rest, rows, f"{NAME} {mode}")
    if row.variable:
        key, equals, text = value.partition("=")
        if not equals:
            raise InputError(
                f"{value!r} sets no variable", where=f"{name} {value}", hint="--env NAME=VALUE"
            )
        return replace(call, environment={**call.environment, key: text}), rest
    if name == "--image":
        call = replace(call, image=value)
    return _with(call, name, value, row), rest


def _with(call: Call, name: str, value: str, row: Row) -> Call:
    if row.refused:
        raise HostError(f"{name}: {row.refused}", hint=row.hint)
    if row.because:
        return replace(call, says=(*call.says, _left_out(name, row)))
    if not row.to:
        return call
    words: tuple[str, ...] = (row.to,)
    if row.takes:
        words = (f"{row.to}={value}",)
    return replace(call, options=(*call.options, *words))


def _left_out(name: str, row: Row) -> str:
    return f"{name} is left out: {row.because}"


def _slurm_flag(
    call: Call, word: str, rest: list[str], rows: Mapping[str, Any]
) -> tuple[Call, list[str]]:
    """Parse one flag of srun or sbatch: ``-N 4``, ``-N4``, ``--nodes 4`` or ``--nodes=4``."""
    name, equals, value = word.partition("=")
    short = word[:2]
    if short in _table("short"):
        name, equals, value = _table("short")[short], word[2:], word[2:]
    raw = [word]
    has_value = rest and not rest[0].startswith("-")
    if not equals and has_value:
        value = rest[0]
        raw.append(value)
        rest = rest[1:]
    if name in rows:
        row = Row(**rows[name])
        if name == "--image":
            return replace(call, image=value), rest
        if row.refused or name in _table("modes")["any"]:
            return _with(call, name, value, row), rest
        call = replace(call, flags=(*call.flags, *raw))
        return _with(call, name, value, row), rest
    passed = name
    if value:
        passed = f"{name}={value}"
    option = f"--sbatch={passed}"
    return replace(call, flags=(*call.flags, *raw), options=(*call.options, option)), rest


def _one(
    word: str, rest: list[str], rows: Mapping[str, Any], where: str
) -> tuple[str, str, Row, list[str]]:
    """Return an option, its value, its row and the words after it. Raises InputError."""
    name, equals, value = word.partition("=")
    row = Row(**_row_of(name, rows, where, "there is no option"))
    if row.takes and not equals:
        if not rest:
            raise InputError(f"{name} needs a value", where=where)
        value, *rest = rest
    return name, value, row.of_value(value), rest


def _read(
    words: Sequence[str], rows: Mapping[str, Any], where: str
) -> Iterator[tuple[str, str, Row]]:
    """Yield each option with its value and its row. Raises InputError for any other word."""
    rest = list(words)
    while rest:
        word, *rest = rest
        name, value, row, rest = _one(word, rest, rows, where)
        yield name, value, row


def _split(words: Sequence[str], rows: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the options that have a row, with their values, and the other words."""
    known: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word, *rest = rest
        if word.partition("=")[0] not in rows:
            others.append(word)
            continue
        name, value, row, rest = _one(word, rest, rows, NAME)
        known.append(name)
        if row.takes:
            known.append(value)
    return known, others


@cache
def _tables() -> dict[str, dict[str, Any]]:
    tables: Any = read_values(Path(__file__).with_name("primus-cli.yaml")).data
    return cast("dict[str, dict[str, Any]]", tables)


def _table(name: str) -> dict[str, Any]:
    return _tables()[name]


def _row_of(word: str, rows: Mapping[str, Any], where: str, lacking: str) -> Any:
    """Return the row of ``word``. Raises InputError, which begins with ``lacking``."""
    if word not in rows:
        raise InputError(
            f"{lacking} {word!r}{nearest(word, rows)}",
            where=where,
            hint=f"there are: {', '.join(rows)}",
        )
    return rows[word]


def work_of(call: Call, environment: Mapping[str, str], *, allow_unmapped: bool = False) -> Work:
    """Translate the command of ``call``.

    ``environment`` are the variables that it finds, beside its own. Raises InputError, or HostError
    with what there is instead.
    """
    command = call.command[0].replace("-", "_")
    words = list(call.command[1:])
    refused = _table("refused").get(command)
    if refused:
        raise HostError(f"{command}: {refused['refused']}", hint=refused["hint"])
    if command == "preflight":
        return _preflight(words)
    if command == "node_smoke":
        return _smoke(words)
    if not words or words[0].startswith("-"):
        raise InputError(f"{command} needs more words", where=NAME, hint=f"{NAME} --help")
    suite, *words = words
    if command == "benchmark":
        return _benchmark(suite, words)
    variables = {**environment, **call.environment}
    if call.nodes:
        variables["NNODES"] = call.nodes
    if command == "projection":
        return _projection(suite, words, variables)
    if command != "train":
        raise InputError(
            f"there is no command {command!r}{nearest(command, COMMANDS)}",
            where=NAME,
            hint=f"there are: {', '.join(COMMANDS)}",
        )
    _row_of(suite, _SUITES, f"train {suite}", "train has no")
    config, words = _config(words)
    known, words = _split(words, _table("train"))
    says = [_left_out(name, row) for name, _, row in _read(known, _table("train"), NAME)]
    if suite == "posttrain":
        request = _posttrained(config, words)
    else:
        request = _pretrained(config, words, variables, allow_unmapped=allow_unmapped)
    return Work(request=replace(request, says=(*says, *request.says)))


def config_of(words: Sequence[str]) -> str:
    """Return the experiment file that the words name with ``--config``; "" if none."""
    known, _ = _split(words, _CONFIG)
    return known[-1] if known else ""


def _config(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the file of ``--config``, and the other words."""
    known, others = _split(words, _CONFIG)
    if not known:
        raise InputError(
            "--config is missing", where=NAME, hint="--config FILE, an experiment file of Primus"
        )
    return known[-1], others


def _pretrained(
    config: str, words: Sequence[str], environment: Mapping[str, str], *, allow_unmapped: bool
) -> Request:
    for folder in PurePosixPath(config).parts:
        row = _table("frameworks").get(folder)
        if row:
            raise HostError(f"{config}: {row['refused']}", hint=row["hint"])
    # What BACKEND of an older script says, the file says itself.
    variables = {**environment, "EXP": config, "BACKEND": ""}
    return requested("run_pretrain.sh", words, variables, allow_unmapped=allow_unmapped)


def _posttrained(config: str, words: Sequence[str]) -> Request:
    """Translate an experiment of Megatron Bridge to fine-tuning."""
    rows = _table("posttrain")
    match = _POSTTRAIN.fullmatch(PurePosixPath(config).name)
    overrides: dict[str, Any] = {}
    if Path(config).is_file():
        trainer = _post_trainer(Path(config))
        model = re.sub(r"\.ya?ml$", "", str(trainer["model"]))
        overrides = dict(trainer.get("overrides") or {})
    elif match:
        model = match[1]
        overrides["peft"] = match[2].replace("sft", "none")
    else:
        raise InputError(
            f"there is no file {config}", where=NAME, hint="--config FILE, an experiment file"
        )
    overrides |= {name.removeprefix("--"): value for name, value in _pairs(words)}
    recipe = _row_of(model, rows["models"], config, "there is no recipe to fine-tune the model")
    peft = spell(overrides.pop("peft", None) or "none")
    mode = _row_of(peft, rows["modes"], f"{config}: peft", "peft cannot be")
    settings, says = _post_settings(overrides, config)
    sized = rows["full"].get(recipe)
    if sized and mode == "full":
        recipe = sized["recipe"]
        settings = [*sized["settings"], *settings]
    says.append(
        "it is trained on the recipe's own text, from random weights; "
        f"`primus finetune WEIGHTS DATA --mode {mode}` takes yours"
    )
    return Request(
        recipe=recipe,
        choices=Choices(backend="finetune", mode=mode, precision="bf16"),
        words=tuple(settings),
        says=tuple(says),
    )


def _post_trainer(path: Path) -> dict[str, Any]:
    content: Any = read_values(path).data
    try:
        trainer: dict[str, Any] = content["modules"]["post_trainer"]
        trainer["model"]
    except (TypeError, KeyError):
        raise InputError(
            "this is no experiment of post-training",
            where=path,
            hint="modules.post_trainer has model and overrides; `train pretrain` takes others",
        ) from None
    return trainer


def _post_settings(overrides: Mapping[str, Any], config: str) -> tuple[list[str], list[str]]:
    """Return the settings of the backend finetune, and sentences about what is left out."""
    rows = _table("posttrain")["keys"]
    settings = []
    says = []
    for key, value in overrides.items():
        if value is None or spell(value) == "null":
            continue
        entry = rows.get(key)
        if entry is None:
            raise InputError(
                f"{key}: no recipe has such a key{nearest(key, rows)}",
                where=config,
                hint=f"there are: {', '.join(rows)}",
            )
        if isinstance(entry, str):
            settings.append(f"{entry}={spell(value)}")
            continue
        row = Row(**entry).of_value(spell(value))
        if row.refused:
            raise InputError(f"{key}: {row.refused}", where=f"{config}: {key}", hint=row.hint)
        if row.to:
            settings.append(row.to)
        if row.because:
            says.append(_left_out(key, row))
    return settings, says


def _projection(suite: str, words: Sequence[str], environment: Mapping[str, str]) -> Work:
    verbs = {"memory": ["fit"], "performance": ["project"], "both": ["fit", "project"]}
    _row_of(suite, verbs, f"projection {suite}", "projection has no")
    config, words = _config(words)
    known, settings = _split(words, _table("projection"))
    request = _pretrained(config, settings, environment, allow_unmapped=False)
    says = []
    for name, value, row in _read(known, _table("projection"), NAME):
        if row.because:
            says.append(_left_out(name, row))
        elif row.to == "--nodes":
            request = replace(request, choices=replace(request.choices, nodes=_whole(value)))
        elif row.to == "--gpu":
            request = replace(request, choices=replace(request.choices, gpu=value))
        else:
            request = replace(request, words=(*request.words, f"{row.to}={value}"))
    gpu = request.choices.gpu or request.gpu_of_path
    request = replace(request, choices=replace(request.choices, gpu=gpu))
    arguments = (request.recipe, *request.choices.words(), *request.words)
    commands = tuple((verb, *arguments) for verb in verbs[suite])
    return Work(commands=commands, says=_once([*says, *request.says]))


def _whole(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise InputError(f"no number of nodes: {text!r}", where=NAME)
    return int(text)


def _benchmark(suite: str, words: Sequence[str]) -> Work:
    row = _row_of(suite, _table("benchmark"), f"benchmark {suite}", "there is no suite")
    if "refused" in row:
        raise HostError(f"benchmark {suite}: {row['refused']}", hint=row["hint"])
    command = list(row["command"])
    values = dict(_pairs(words))
    for name, entry in row.items():
        if name.startswith("--") and name in values:
            chosen = Row(**entry).of_value(values[name])
            if chosen.refused:
                raise HostError(f"{name} {values[name]}: {chosen.refused}", hint=chosen.hint)
    if command[0] == "tune":
        model = values.get("--model", "")
        if not model:
            raise HostError(
                f"benchmark {suite}: GEMMs are those of a recipe, and not of sizes",
                hint="--model NAME, or `primus tune gemm RECIPE`",
            )
        where = f"--model {model}"
        models = _table("gemm models")
        command.append(_row_of(model.lower(), models, where, "there is no recipe for the model"))
    return Work(commands=(tuple(command),), says=(row["because"],))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each ``--key value`` or ``--key=value``. Raises InputError for any other word."""
    rest = list(words)
    while rest:
        word, *rest = rest
        if not word.startswith("--"):
            raise InputError(f"{word!r} belongs to no option", where=NAME, hint="--key value")
        name, equals, value = word.partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value, *rest = rest
        yield name, value


def _preflight(words: Sequence[str]) -> Work:
    rows = _table("preflight")
    says: list[str] = []
    measured = not any(_is_kind(word) for word in words)
    tests: list[str] = []
    for name, value, row in _read(words, rows["options"], f"{NAME} preflight"):
        if name == "--tests":
            tests = value.split(",")
        if name in ("--tests", "--perf-test", "--quick"):
            measured = True
        if row.because:
            says.append(_left_out(name, row))
    for test in tests:
        known = dict.fromkeys([*rows["tests"], *rows["between"]])
        _row_of(test, known, f"--tests {test}", "there is no test")
    here = [test for test in tests if test in rows["tests"]]
    if len(here) < len(tests) or (measured and not tests):
        says.append(f"{rows['refused']}: {rows['hint']}")
    command = ["preflight"]
    if not measured:
        command.append("--quick")
    elif here or not tests:
        command.append("--benchmark")
    return Work(commands=(tuple(command),), says=_once(says))


def _is_kind(word: str) -> bool:
    return word in ("--host", "--gpu", "--network") or word.startswith("--check-")


def _once(says: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences, in which options with the same reason are joined."""
    names: dict[str, list[str]] = {}
    others = []
    for sentence in says:
        name, separator, reason = sentence.partition(" is left out: ")
        if separator:
            names.setdefault(reason, []).append(name)
        else:
            others.append(sentence)
    joined = []
    for reason, options in names.items():
        verb = "is"
        if len(options) > 1:
            verb = "are"
        joined.append(f"{', '.join(options)} {verb} left out: {reason}")
    return (*joined, *others)


def _smoke(words: Sequence[str]) -> Work:
    command = ["preflight"]
    says: list[str] = []
    for name, value, row in _read(words, _table("node_smoke"), f"{NAME} node_smoke"):
        if row.because:
            says.append(_left_out(name, row))
        elif row.takes:
            command += [row.to, value]
        else:
            command.append(row.to)
    return Work(commands=(tuple(command),), says=_once(says))
