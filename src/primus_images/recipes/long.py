"""What a long run has besides a recipe, whose defaults are those of a short one.

A recipe is tried in some fifty steps: it saves nothing, and its learning rate hardly falls. A run
of more steps gets checkpoints by time, and one that pre-trains gets a schedule in shares of the
run. What the user sets, or a recipe that is the user's own, stays.
"""

from collections.abc import Iterator

from primus_images.recipes.load import folder
from primus_images.recipes.schema import Backend
from primus_images.recipes.setting import Setting, Settings, Value

# A run of more steps is long.
SHORT = 500
_MINUTES = 30.0
_KEPT = 3
_WARMUP = 100
_LEAST_RATE = 0.1


def settings_of_long_run(backend: Backend, settings: Settings, typed: Settings) -> Settings:
    """Return the settings that a long run gets; none for a short one.

    ``typed`` are the user's words among ``settings``.
    """
    steps = _steps(settings.get(backend.key("steps")))
    if steps <= SHORT:
        return {}
    added: dict[str, Setting] = {}
    if not _saves(backend, settings):
        added["saving.minutes"] = _setting(_MINUTES, "what is not saved is lost if a run fails")
    by_time = "saving.minutes" in {*settings, *added}
    if by_time and not {"saving.keep", "torchtitan.checkpoint.keep_latest_k"} & settings.keys():
        added["saving.keep"] = _setting(_KEPT, "more checkpoints fill the disk of a long run")
    if str(settings["mode"].value) == "pretrain":
        for key, value in _schedule(backend, settings, steps):
            if _is_default(key, settings, typed):
                why = "a rate that warms up over 1 % of the run, and falls to 10 % by a cosine"
                added[key] = _setting(value, why)
    return added


def _setting(value: Value, because: str) -> Setting:
    return Setting(value=value, origin=f"a run of more than {SHORT} steps", because=because)


def _saves(backend: Backend, settings: Settings) -> bool:
    """Whether the user, or the recipe, says when to save, also if it is never."""
    return backend.key("checkpoint") in settings or "saving.minutes" in settings


def _schedule(backend: Backend, settings: Settings, steps: int) -> Iterator[tuple[str, Value]]:
    if backend.least_share:
        yield f"{backend.name}.{backend.least_share}", _LEAST_RATE
    else:
        rate = _number(settings.get(backend.key("lr")))
        yield f"{backend.name}.{backend.least_rate}", rate * _LEAST_RATE
    yield f"{backend.name}.{backend.schedule}", "cosine"
    yield f"{backend.name}.{backend.warmup}", max(1, steps // _WARMUP)


def _is_default(key: str, settings: Settings, typed: Settings) -> bool:
    """Whether ``key`` has no value, or that of a recipe that primus brings."""
    if key in typed:
        return False
    return key not in settings or settings[key].origin.startswith(str(folder()))


def _steps(setting: Setting | None) -> int:
    # Another value than a whole number, such as `.inf`, is refused after this.
    if setting is None or not isinstance(setting.value, int):
        return 0
    return setting.value


def _number(setting: Setting | None) -> float:
    if setting is None or not isinstance(setting.value, int | float):
        return 0.0
    return float(setting.value)
