"""Choosing and checking the backend, mode, precision and GPU of a recipe. Unsupported combinations
are errors.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from primus_images.errors import InputError, nearest
from primus_images.gpus import detect
from primus_images.gpus.table import arch_of, generation, load_table, words_for
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import CHOICES, Choices, Setting

# A proxy tests code. The small rounding errors of fp32 allow tight checks.
PROXY_PRECISION = "fp32"
CPU = "cpu"
PRECISIONS = ("fp32", "bf16", "fp8", "mxfp8")
MULTI = "multi"
_MOST_NODES = 65_536
# What a case can depend on besides the choices.
LENGTH = "seq_len"


def choose(
    settings: Mapping[str, Setting], choices: Choices, path: Path, *, sized: bool = False
) -> dict[str, Setting]:
    """Return every choice as a setting with its origin. ``settings`` are those that do not depend
    on a choice.

    ``sized``: the model has the sizes of its initial weights, which may be small enough for a CPU.
    Raises InputError for a combination that the recipe does not support, or a precision that the
    GPU does not.
    """
    cells = supported(settings)
    if not cells:
        raise InputError(
            "the recipe supports no backend",
            where=f"{path}:1:1",
            hint="add a section such as supports: {torchtitan: {pretrain: [bf16]}}",
        )
    _check_defaults(settings, cells)
    proxy = settings.get("default.proxy") or Setting(value=False, origin="default")
    if choices.proxy is not None:
        proxy = Setting(
            value=choices.proxy, origin="--proxy" if choices.proxy else "command line: proxy=false"
        )
    backend = _pick(
        "backend", choices.backend, settings, list(dict.fromkeys(b for b, _ in cells)), {}
    )
    modes = [mode for b, mode in cells if b == backend.value]
    if choices.mode not in (None, *modes) and (
        others := [b for b, m in cells if m == choices.mode]
    ):
        where = f"--mode {choices.mode}"
        names = " or ".join(others)
        raise InputError(
            f"backend {backend.value} does not support mode {choices.mode!r} with this recipe",
            where=where,
            hint=f"--backend {names} supports it",
        )
    mode = _pick("mode", choices.mode, settings, modes, {"backend": backend})
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
        offered = list(dict.fromkeys([PROXY_PRECISION, *offered]))
        defaults = {}
    precision = _pick(
        "precision", choices.precision, defaults, offered, {"backend": backend, "mode": mode}
    )
    _check_precision(precision, str(gpu.value), str(backend.value))
    nodes = Setting(value=1, origin="default")
    if choices.nodes is not None:
        nodes = Setting(value=choices.nodes, origin=f"--nodes {choices.nodes}")
    elif proxy.value is not True:
        nodes = settings.get("default.nodes", nodes)
    if not isinstance(nodes.value, int) or not 1 <= nodes.value <= _MOST_NODES:
        raise InputError(
            f"nodes must be at least 1 and at most {_MOST_NODES:,}", where=nodes.origin
        )
    return dict(zip(CHOICES, (backend, mode, precision, gpu, nodes, proxy), strict=True))


def _check_defaults(
    settings: Mapping[str, Setting], cells: Mapping[tuple[str, str], Sequence[str]]
) -> None:
    kinds, modes = zip(*cells, strict=True)
    offered = {"backend": kinds, "mode": modes, "precision": tuple(chain(*cells.values()))}
    for what, names in offered.items():
        default = settings.get(f"default.{what}")
        if default is not None and default.value not in names:
            supported = ", ".join(dict.fromkeys(names))
            raise InputError(
                f"default.{what} is {default.value!r}, which the recipe does not support",
                where=default.origin,
                hint=f"supports names {supported}",
            )


def _pick(
    what: str,
    value: str | None,
    settings: Mapping[str, Setting],
    offered: list[str],
    decided: Mapping[str, Setting],
) -> Setting:
    if value in offered:
        return Setting(value=value, origin=f"--{what} {value}")
    if value is not None:
        context = ""
        if decided:
            context = " with " + ", ".join(f"{name} {s.value}" for name, s in decided.items())
        message = (
            f"{what} {value!r} is not supported by this recipe{context}{nearest(value, offered)}"
        )
        raise InputError(
            message, where=f"--{what} {value}", hint=f"there are: {', '.join(offered)}"
        )
    default = settings.get(f"default.{what}")
    if default is not None and default.value in offered:
        return Setting(value=default.value, origin=default.origin)
    return Setting(value=offered[0], origin="the first that the recipe supports")


def _gpu(choices: Choices, settings: Mapping[str, Setting]) -> Setting:
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


def computes(gpu: str, precision: str, backend: str) -> bool:
    """Whether ``backend`` supports ``precision`` on ``gpu`` (a generation or ``cpu``)."""
    return precision in (
        backends()[backend].cpu if gpu == CPU else ("fp32", *arch_of(generation(gpu)).dtypes)
    )


def _check_precision(precision: Setting, gpu: str, backend: str) -> None:
    kind = str(precision.value)
    if computes(gpu, kind, backend):
        return
    message = f"{backend} does not compute {kind} on a CPU"
    hint = f"on a CPU: {', '.join(backends()[backend].cpu)}"
    if gpu != CPU:
        able = [row.name for row in load_table().generations if computes(row.name, kind, backend)]
        message = f"{gpu} ({generation(gpu).arch}) does not compute {kind}"
        hint = f"those that do: {', '.join(able)}"
    raise InputError(message, where=precision.origin, hint=hint)


def supported(settings: Mapping[str, Setting]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (backend, mode) → precisions from the recipe's section ``supports``, in its order."""
    cells: dict[tuple[str, str], tuple[str, ...]] = {}
    for key, setting in settings.items():
        if key.startswith("supports."):
            _, backend, mode = (*key.split("."), "", "")[:3]
            if isinstance(setting.value, list):
                value = setting.value
            else:
                value = [setting.value]
            among("backend", backend, list(backends()), setting.origin)
            if not mode and backend in backends():
                raise InputError(
                    f"{key} must be a mapping such as {{pretrain: [fp32]}}", where=setting.origin
                )
            among("mode", mode, list(backends()[backend].modes), setting.origin)
            for word in value:
                among("precision", str(word), list(PRECISIONS), setting.origin)
            if not value:
                raise InputError(f"{key} names no precision", where=setting.origin)
            cells[backend, mode] = tuple(map(str, value))
    return cells


def among(what: str, word: str, offered: list[str], where: str) -> None:
    """Raise InputError, with the most similar name, if ``word`` is not in ``offered``."""
    if word not in offered:
        near = nearest(word.lower(), offered)
        offered_text = ", ".join(offered)
        raise InputError(
            f"there is no {what} {word!r} here{near}",
            where=where,
            hint=f"there are: {offered_text}",
        )


def check_choice(choice: str, setting: Setting, *, condition: bool = False) -> None:
    """Raise InputError if there is no such choice, or if ``setting`` is none of its values.

    The ``condition`` of a case may name several values, a sequence length, ``multi`` for a number
    of nodes, and an architecture or a vendor for GPUs.
    """
    where = setting.origin
    if choice not in (names := (*CHOICES, LENGTH) if condition else CHOICES):
        names_text = ", ".join(names)
        raise InputError(
            f"there is no choice {choice!r}{nearest(choice, names)}",
            where=where,
            hint=f"choices: {names_text}",
        )
    if isinstance(setting.value, list) and not condition:
        raise InputError(f"{choice} must be one word", where=where)
    for word in setting.value if isinstance(setting.value, list) else [setting.value]:
        whole = isinstance(word, int) and not isinstance(word, bool)
        if choice == "proxy" and not isinstance(word, bool):
            raise InputError(f"proxy must be true or false, not {word!r}", where=where)
        if (
            choice == "nodes"
            and not (whole and int(str(word)) > 0)
            and not (condition and word == MULTI)
        ):
            kind = f"a whole number of at least 1{f' or {MULTI}' if condition else ''}"
            raise InputError(f"nodes must be {kind}, not {word!r}", where=where)
        if choice == LENGTH and not whole:
            raise InputError(f"{LENGTH} must be a whole number, not {word!r}", where=where)
        if choice in CHOICES[:4]:
            offered = values_of(choice)
            wider = ()
            if condition:
                wider = {group for value in offered for group in words_for(value)} - {*offered}
            among(choice, str(word), [*offered, *sorted(wider)], where)


@cache
def values_of(choice: str) -> list[str]:
    """Return every value that some recipe accepts for ``choice`` (backend, mode, precision or gpu)."""
    if choice == "gpu":
        return [CPU, *(gpu.name for gpu in load_table().generations)]
    if choice == "precision":
        return list(PRECISIONS)
    modes = dict.fromkeys(mode for backend in backends().values() for mode in backend.modes)
    return list(modes if choice == "mode" else backends())
