"""Strategic merge patches of Kubernetes: what ``primus launch k8s --patch`` does to manifests.

A mapping of the patch is merged, ``null`` removes a key, and a list replaces the list, except those
whose items have a key of their own, such as the containers of a pod: their items are merged by it,
and ``$patch: delete`` removes one. kubectl does the same in ``kubectl patch --local``, but is not
needed to print manifests.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from primus_images.errors import InputError, did_you_mean
from primus_images.launch.plan import refuse_secrets
from primus_images.yamlfile import parse, read_text

# The lists whose items are merged → the key that names an item, as the API's schema has them.
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    # Of a container, and of a Service.
    "ports": ("containerPort", "port"),
    "resourceClaims": ("name",),
}
_DIRECTIVE = "$patch"


def patched(objects: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Return the objects with the patches of a file merged into them.

    The file has one or more YAML documents. Each names its ``kind``, and may leave it out for the
    Job. Raises InputError, with the place, for anything else.
    """
    text = read_text(path)
    hint = "remove it: --hf-token-secret NAME passes a token"
    refuse_secrets(text.split(), hint)
    by_kind = {made["kind"]: made for made in objects}
    for part in text.split("\n---\n"):
        patch = parse(part.removeprefix("---\n"), str(path), typed=True).data
        if patch is None:
            continue
        if not isinstance(patch, dict):
            raise InputError("a patch is a mapping, as a manifest is", where=path)
        kind = patch.get("kind", "Job")
        if kind not in by_kind:
            hint = did_you_mean(str(kind), by_kind) or f"kinds: {', '.join(by_kind)}"
            raise InputError(f"the job has no object of kind {kind!r}", where=path, hint=hint)
        by_kind[kind] = _merged(by_kind[kind], patch, str(path))
    return list(by_kind.values())


def _merged(made: dict[str, Any], patch: dict[str, Any], where: str) -> dict[str, Any]:
    merged = dict(made)
    if patch.get(_DIRECTIVE) == "replace":
        merged = {}
    for key, change in patch.items():
        if key == _DIRECTIVE:
            continue
        before = merged.get(key)
        if change is None:
            merged.pop(key, None)
        elif isinstance(change, dict):
            merged[key] = _merged(before if isinstance(before, dict) else {}, change, where)
        elif isinstance(change, list) and key in _KEYS:
            merged[key] = _merged_items(before or [], change, key, where)
        else:
            merged[key] = change
    return merged


def _merged_items(
    made: Sequence[dict[str, Any]], patch: Sequence[Any], key: str, where: str
) -> list[dict[str, Any]]:
    items = {_name_of(item, key, where): item for item in made}
    for change in patch:
        name = _name_of(change, key, where)
        if change.get(_DIRECTIVE) == "delete":
            items.pop(name, None)
        else:
            items[name] = _merged(items.get(name, {}), change, where)
    return list(items.values())


def _name_of(item: Any, key: str, where: str) -> object:
    """Return what names an item of the list ``key``."""
    if isinstance(item, dict):
        for field in _KEYS[key]:
            if field in item:
                return item[field]
    needed = " or ".join(_KEYS[key])
    raise InputError(f"each item of {key} needs {needed}, which names it", where=where)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a literal block, which people can review."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if "\n" in text:
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def manifest_text(objects: Sequence[dict[str, Any]]) -> str:
    """Return the objects as documents of YAML."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=100)
