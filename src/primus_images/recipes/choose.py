"""Choosing and checking the backend, mode, precision and GPU of a recipe."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from primus_images.errors import InputError, nearest
from primus_images.gpus import detect
from primus_images.gpus.table import arch_of, generation, load_table, words_for
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import CHOICES, Choices, Setting, Settings
from primus_images.yamlfile import Scalar

# A proxy tests code. The small rounding errors of fp32 allow tight checks.
PROXY_PRECISION = "fp32"
CPU = "cpu"
PRECISIONS = ("fp32", "bf16", "fp8", "mxfp8")
MULTI = "multi"
_MOST_NODES = 65_536
# What a case can depend on besides the choices.
LENGTH = "seq_len"

# (backend, mode) → precisions.
Cells: TypeAlias = Mapping[tuple[str, str], tuple[str, ...]]


def choose(
    settings: Settings, choices: Choices, path: Path, *, sized: bool = False
) -> dict[str, Setting]:
    """Return every choice as a setting with its origin.

    ``settings`` are those that do not depend on a choice. ``sized``: the model has the sizes of its
    initial weights, which may be small enough for a CPU. Raises InputError for a combination that
    the recipe does not support, or a precision that the GPU does not.
    """
    cells = supported(settings)
    if not cells:
        raise InputError(
            "the recipe supports no backend",
            where=f"{path}:1:1",
            hint="add a section such as supports: {torchtitan: {pretrain: [bf16]}}",
        )
    _check_defaults(settings, cells)
    proxy = _proxy(settings, choices)
    backend = _pick("backend", choices.backend, settings, _once([name for name, _ in cells]))
    mode = _mode(settings, choices, cells, backend)
    # A wrong word is named before a machine that lacks the GPU.
    gpu = _gpu(choices, settings)
    if gpu.value == CPU and proxy.value is not True and not sized:
        raise InputError(
            f"{path.stem} at full size is not trained on a CPU",
            where=gpu.origin,
            hint="--proxy trains a small model; `primus show`, `primus fit` and --dry-run need "
            "only --gpu NAME",
        )
    offered = list(cells[str(backend.value), str(mode.value)])
    defaults = settings
    if proxy.value is True or gpu.value == CPU:
        offered = _once([PROXY_PRECISION, *offered])
        usual = Setting(value=PROXY_PRECISION, origin="that of a proxy, or of a CPU")
        defaults = {"default.precision": usual}
    decided = f" with backend {backend.value}, mode {mode.value}"
    precision = _pick("precision", choices.precision, defaults, offered, decided)
    _check_precision(precision, str(gpu.value), str(backend.value))
    nodes = _nodes(settings, choices, is_proxy=proxy.value is True)
    return dict(zip(CHOICES, (backend, mode, precision, gpu, nodes, proxy), strict=True))


def _once(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _check_defaults(settings: Settings, cells: Cells) -> None:
    offered: dict[str, list[str]] = {"backend": [], "mode": [], "precision": []}
    for (backend, mode), precisions in cells.items():
        offered["backend"].append(backend)
        offered["mode"].append(mode)
        offered["precision"] += precisions
    for choice, words in offered.items():
        default = settings.get(f"default.{choice}")
        if default is not None and default.value not in words:
            raise InputError(
                f"default.{choice} is {default.value!r}, which the recipe does not support",
                where=default.origin,
                hint=f"supports names {', '.join(_once(words))}",
            )


def _proxy(settings: Settings, choices: Choices) -> Setting:
    if choices.proxy is None:
        return settings.get("default.proxy") or Setting(value=False, origin="default")
    origin = "--proxy"
    if not choices.proxy:
        origin = "command line: proxy=false"
    return Setting(value=choices.proxy, origin=origin)


def _mode(settings: Settings, choices: Choices, cells: Cells, backend: Setting) -> Setting:
    modes = [mode for name, mode in cells if name == backend.value]
    others = [name for name, mode in cells if mode == choices.mode]
    if choices.mode not in modes and others:
        raise InputError(
            f"backend {backend.value} does not support mode {choices.mode!r} with this recipe",
            where=f"--mode {choices.mode}",
            hint=f"--backend {' or '.join(others)} supports it",
        )
    return _pick("mode", choices.mode, settings, modes, f" with backend {backend.value}")


def _pick(
    choice: str, word: str | None, settings: Settings, offered: list[str], decided: str = ""
) -> Setting:
    """Return the user's ``word``, else the recipe's default, else the first that is offered."""
    if word in offered:
        return Setting(value=word, origin=f"--{choice} {word}")
    if word is not None:
        raise InputError(
            f"{choice} {word!r} is not supported by this recipe{decided}{nearest(word, offered)}",
            where=f"--{choice} {word}",
            hint=f"there are: {', '.join(offered)}",
        )
    default = settings.get(f"default.{choice}")
    if default is not None and default.value in offered:
        return default
    return Setting(value=offered[0], origin="the first that the recipe supports")


def _gpu(choices: Choices, settings: Settings) -> Setting:
    if choices.gpu is not None:
        origin = f"--gpu {choices.gpu}"
        among("GPU", choices.gpu, values_of("gpu"), origin)
        return Setting(value=choices.gpu, origin=origin)
    if "default.gpu" in settings:
        return settings["default.gpu"]
    machine = detect.detect()
    if not machine.names:
        return Setting(value=CPU, origin="this machine has no GPU")
    if not machine.generation:
        raise InputError(
            f"the GPUs of this machine cannot be identified: {machine.sentence()}",
            hint="choose the settings with --gpu NAME",
        )
    return Setting(value=machine.generation, origin="the GPUs of this machine")


def _nodes(settings: Settings, choices: Choices, *, is_proxy: bool) -> Setting:
    nodes = Setting(value=1, origin="default")
    if choices.nodes is not None:
        nodes = Setting(value=choices.nodes, origin=f"--nodes {choices.nodes}")
    elif not is_proxy:
        nodes = settings.get("default.nodes", nodes)
    if not isinstance(nodes.value, int) or not 1 <= nodes.value <= _MOST_NODES:
        raise InputError(
            f"nodes must be at least 1 and at most {_MOST_NODES:,}", where=nodes.origin
        )
    return nodes


def computes(gpu: str, precision: str, backend: str) -> bool:
    """Whether ``backend`` supports ``precision`` on ``gpu`` (a generation or ``cpu``)."""
    if gpu == CPU:
        return precision in backends()[backend].cpu
    return precision == "fp32" or precision in arch_of(generation(gpu)).dtypes


def _check_precision(precision: Setting, gpu: str, backend: str) -> None:
    word = str(precision.value)
    if computes(gpu, word, backend):
        return
    if gpu == CPU:
        message = f"{backend} does not compute {word} on a CPU"
        hint = f"on a CPU: {', '.join(backends()[backend].cpu)}"
    else:
        able = [row.name for row in load_table().generations if computes(row.name, word, backend)]
        message = f"{gpu} ({generation(gpu).arch}) does not compute {word}"
        hint = f"those that do: {', '.join(able)}"
    raise InputError(message, where=precision.origin, hint=hint)


def supported(settings: Settings) -> Cells:
    """Return the cells of the recipe's section ``supports``, in its order."""
    cells: dict[tuple[str, str], tuple[str, ...]] = {}
    for key, setting in settings.items():
        if not key.startswith("supports."):
            continue
        _, backend, mode, *_ = (*key.split("."), "")
        among("backend", backend, list(backends()), setting.origin)
        if not mode:
            raise InputError(
                f"{key} must be a mapping such as {{pretrain: [fp32]}}", where=setting.origin
            )
        among("mode", mode, list(backends()[backend].modes), setting.origin)
        words = [str(word) for word in items_of(setting)]
        for word in words:
            among("precision", word, list(PRECISIONS), setting.origin)
        if not words:
            raise InputError(f"{key} names no precision", where=setting.origin)
        cells[backend, mode] = tuple(words)
    return cells


def items_of(setting: Setting) -> list[Scalar]:
    """Return the items of a list, or the one value."""
    if isinstance(setting.value, list):
        return setting.value
    return [setting.value]


def among(kind: str, word: str, offered: list[str], where: str) -> None:
    """Raise InputError, with the most similar name, if ``word`` is not in ``offered``."""
    if word not in offered:
        raise InputError(
            f"there is no {kind} {word!r} here{nearest(word.lower(), offered)}",
            where=where,
            hint=f"there are: {', '.join(offered)}",
        )


def check_choice(choice: str, setting: Setting) -> None:
    """Raise InputError if there is no such choice, or if ``setting`` is none of its values."""
    _require_choice(choice, CHOICES, setting)
    if isinstance(setting.value, list):
        raise InputError(f"{choice} must be one word", where=setting.origin)
    if choice == "nodes" and not _is_positive(setting.value):
        raise InputError(
            f"nodes must be a whole number of at least 1, not {setting.value!r}",
            where=setting.origin,
        )
    if choice in _NAMED:
        among(choice, str(setting.value), values_of(choice), setting.origin)
    _check_proxy(choice, setting.value, setting.origin)


def check_condition(choice: str, setting: Setting) -> None:
    """Raise InputError if ``setting`` is no condition of a case.

    It may name several values, a sequence length, ``multi`` for a number of nodes, and an
    architecture or a vendor for GPUs.
    """
    where = setting.origin
    _require_choice(choice, (*CHOICES, LENGTH), setting)
    for word in items_of(setting):
        if choice == "nodes" and word != MULTI and not _is_positive(word):
            raise InputError(
                f"nodes must be a whole number of at least 1 or {MULTI}, not {word!r}", where=where
            )
        if choice == LENGTH and type(word) is not int:
            raise InputError(f"{LENGTH} must be a whole number, not {word!r}", where=where)
        if choice in _NAMED:
            among(choice, str(word), [*values_of(choice), *_groups(choice)], where)
        _check_proxy(choice, word, where)


# Choices whose values are names.
_NAMED = ("backend", "mode", "precision", "gpu")


def _require_choice(choice: str, names: Sequence[str], setting: Setting) -> None:
    if choice not in names:
        raise InputError(
            f"there is no choice {choice!r}{nearest(choice, names)}",
            where=setting.origin,
            hint=f"choices: {', '.join(names)}",
        )


def _check_proxy(choice: str, word: object, where: str) -> None:
    if choice == "proxy" and not isinstance(word, bool):
        raise InputError(f"proxy must be true or false, not {word!r}", where=where)


def _is_positive(word: object) -> bool:
    return type(word) is int and word > 0


def _groups(choice: str) -> list[str]:
    """Return the architectures and vendors of GPUs."""
    if choice != "gpu":
        return []
    words: set[str] = set()
    for name in values_of("gpu"):
        words |= words_for(name) - {name}
    return sorted(words)


@cache
def values_of(choice: str) -> list[str]:
    """Return every value that some recipe accepts for a backend, mode, precision or gpu."""
    if choice == "gpu":
        return [CPU, *(gpu.name for gpu in load_table().generations)]
    if choice == "precision":
        return list(PRECISIONS)
    if choice == "backend":
        return list(backends())
    modes: list[str] = []
    for backend in backends().values():
        modes += backend.modes
    return _once(modes)
