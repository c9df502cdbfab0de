"""Why a recipe or a run is refused: the sentences of ``refusals.yaml``, with what they are about."""

from collections.abc import Mapping
from pathlib import Path

from primus.errors import HostError, InputError, PrimusError
from primus.yamlfile import read_values

_TEXTS: Mapping[str, Mapping[str, str]] = read_values(Path(__file__).with_name("refusals.yaml")).data


def refusal(name: str, where: object = None, /, **values: object) -> PrimusError:
    """Return the error ``name`` of the file, or other place, ``where``; its texts contain ``values``."""
    row = _TEXTS[name]
    kind, hint = HostError if "lacks" in row else InputError, row.get("hint", "").format(**values)
    return kind(row["why"].format(**values), where=None if where is None else str(where), hint=hint or None)
