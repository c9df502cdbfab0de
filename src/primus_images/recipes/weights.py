"""What a ``config.json`` says: that of a folder of weights as settings of a recipe, and where a
recipe differs from its publisher's.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from primus_images.errors import HostError, InputError
from primus_images.files import read_bytes, require_readable
from primus_images.recipes.architecture import Architecture, architecture, size
from primus_images.recipes.family import OTHER, described, families_of, family, uncomputed
from primus_images.recipes.faults import Fault
from primus_images.recipes.load import Entry, beside, entries
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.schema import backends, model_rules
from primus_images.recipes.setting import Setting, Value
from primus_images.recipes.tensors import header, plain_shapes, tensor_files
from primus_images.yamlfile import section, spell

HUB = "hf:"
_MODES = ("full", "lora")
# What describes a model in a repository on the hub, and what the ranks and the checks before them
# read.
_DESCRIBING = ("*.json", "*.jinja", "*.model", "*.txt")
FILES = ("*.safetensors", *_DESCRIBING)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)


def downloaded(name: str, *patterns: str, offline: bool = False) -> Path:
    """Return the folder of ``hf:OWNER/NAME`` with the files that match ``patterns``, downloaded
    once.

    The token is in HF_TOKEN. Raises HostError if the hub does not give them; ``offline`` asks only
    the cache.
    """
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name.removeprefix(HUB),
            allow_patterns=list(patterns),
            local_files_only=offline,
            ignore_patterns=[
                "consolidated*",
                "original/*",
            ],  # copies of the same weights in the vendor's own format
        )
    except ImportError:
        raise HostError(
            f"{name}: huggingface_hub is not installed",
            hint="run this inside a primus image, or name a folder",
        ) from None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:300]
        kind = type(error).__name__
        raise HostError(
            f"{name} cannot be downloaded: {kind}: {reason}",
            hint="check the name hf:OWNER/NAME, the network and HF_ENDPOINT; HF_TOKEN opens "
            "what is not public; a folder needs none",
        ) from error
    return Path(folder)


def folder_of(name: str, *, whole: bool) -> Path:
    """Return the folder of weights ``name``. Those of the hub lack the tensors, unless ``whole`` or
    of no family.
    """
    if name.startswith(HUB):
        folder = downloaded(name, *_DESCRIBING)
    else:
        folder = Path(name)
    if name.startswith(HUB) and (whole or other_family(folder)):
        return downloaded(name, *FILES)
    return folder


def config_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file ``config.json`` of a folder of weights, and its contents.

    Raises InputError if there is none, or if it is not that of a whole, unquantized model. MXFP4
    counts as unquantized.
    """
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}",
            hint="name a folder of safetensors files with their config.json, or hf:OWNER/NAME",
        )
    file = folder / "config.json"
    source = "copy it from the source of the weights"
    if (folder / "adapter_config.json").is_file():  # transformers would add them to their own base
        raise InputError(
            f"{folder} contains LoRA adapters, not a whole model",
            hint="merge them into their base weights with PEFT, and name the folder of the result",
        )
    require_readable(file)
    try:
        content = read_bytes(file)
        if content.startswith(b"\xef\xbb\xbf"):
            raise InputError(
                "the file begins with a byte order mark, which transformers does not read",
                where=file,
                hint="save it as UTF-8 without one",
            )
        config = json.loads(content)
    except FileNotFoundError:
        if (folder / "weights").is_dir():
            raise InputError(
                f"{folder} is a folder of a run, not of weights", hint=f"name {folder}/weights"
            ) from None
        raise InputError(
            f"the weights in {folder} have no config.json, so their model is unknown",
            hint="copy it from the source of the weights",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "config.json cannot be read, or is not JSON", where=str(file), hint=source
        ) from error
    if not isinstance(config, dict):
        raise InputError("config.json is not a mapping", where=str(file))
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            "config.json names no type of model", where=f"{file}: model_type", hint=source
        )
    # Of a model of several parts, the language model is trained.
    if isinstance(text := config.get("text_config"), dict) and "model_type" in text:
        config = config | text
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            if isinstance(config[key], dict):
                method = config[key].get("quant_method", "")
            else:
                method = config[key]
            if method == "mxfp4":
                continue  # its weights are dequantized as they are read
            method_text = method or key
            raise InputError(
                f"the weights are quantized ({method_text}), and only plain weights are trained",
                where=f"{file}: {key}",
                hint="name the weights that they were made from, or dequantize them",
            )
    return file, config


def model_of(folder: Path, name: str) -> dict[str, Setting]:
    """Return a recipe's ``model`` section, without ``hf_repo`` and ``moe.auxiliary_loss``, from
    ``config.json``.

    ``name`` is the recipe's family. Raises InputError, with file and field, if the weights are of
    another one.
    """
    file, config = config_of(folder)
    kind = config["model_type"]
    known = family(name)
    if name not in (*families_of(kind), *fitting_families(kind)):
        raise InputError(
            f"the weights are of type {kind}, and the recipe's family is {name}",
            where=f"{file}: model_type",
            hint="`primus finetune WEIGHTS DATA` picks a recipe for the weights",
        )
    for field in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    ):
        if field not in {**known.defaults, **config}:
            raise InputError(
                f"config.json has no {field}",
                where=str(file),
                hint="copy it from the weights' source",
            )
    settings = {"model.family": Setting(value=name, origin=f"{file}: model_type")}
    fixed = [
        (key, "model_type", only[0])
        for key, only in known.values.items()
        if only[0] != model_rules()[key].default
    ]
    for key, field, value in (*fixed, *described(known, config, file)):
        objection = model_rules()[key].objection(value)
        if objection is not None:
            raise InputError(f"model.{key} {objection}", where=f"{file}: {field}")
        settings[f"model.{key}"] = Setting(value=value, origin=f"{file}: {field}")
    if name == OTHER:
        shapes = chain.from_iterable(
            plain_shapes(header(part)).values() for part in tensor_files(folder)
        )
        settings["model.parameters"] = Setting(
            value=sum(map(math.prod, shapes)), origin=f"{folder}: the tensors"
        )
    return settings


def fitting_families(kind: str) -> list[str]:
    """Return the families with which weights of transformers' ``model_type`` are fine-tuned."""
    tuning = {name for name, backend in backends().items() if set(_MODES) <= set(backend.modes)}
    return [name for name in families_of(kind) if tuning & set(family(name).backends)] or [OTHER]


def other_family(folder: Path) -> dict[str, str]:
    """Return the setting with which weights of no family are fine-tuned; empty for all others."""
    if fitting_families(config_of(folder)[1]["model_type"]) == [OTHER]:
        return {"model.family": OTHER}
    return {}


def nearest_recipe(folder: Path, mode: str | None = None) -> Entry:
    """Return the recipe that fine-tunes a model of the weights' family, and of the size nearest to
    theirs. For a model of no family it is any recipe.

    ``mode`` is ``full`` or ``lora``; None: either. Raises InputError if there is none.
    """
    if mode not in (None, *_MODES):
        raise InputError(
            f"mode {mode!r} does not fine-tune", hint=f"the modes are {' and '.join(_MODES)}"
        )
    _, config = config_of(folder)
    fitting = fitting_families(config["model_type"])
    distances = list[tuple[float, str, Entry]]()
    for entry in entries():
        if fitting != [OTHER]:
            name = entry.architecture.family
        else:
            name = OTHER
        if entry.mode in ((mode,) if mode else _MODES) and not entry.only_proxy and name in fitting:
            model = {key: s.value for key, s in section(model_of(folder, name), "model").items()}
            try:
                distance = abs(math.log(size(architecture(model)).total / entry.size.total))
            except (ValueError, ArithmeticError):
                distance = math.inf  # an impossible size, which the resolution names
            distances.append((distance, entry.recipe, entry))
    if not distances:
        how = ""
        if mode:
            how = f" in mode {mode}"
        raise InputError(
            f"no recipe fine-tunes models of type {config['model_type']}{how}",
            hint="see `primus list`",
        )
    return min(distances, key=lambda row: row[:2])[2]


class Difference(NamedTuple):
    """A field of the recipe's model (without ``model.``) that is not as published.

    ``meant``: it was typed, or the recipe's reason for it names both values.
    """

    key: str
    mine: Any
    theirs: Any
    field: str
    meant: bool


def facts_of(recipe: Recipe) -> Mapping[str, Any] | None:
    """Return ``published/OWNER--NAME.json`` of the recipe's ``model.hf_repo``: facts of its
    ``config.json``.

    ``parameters`` is the number that its files hold. None if there is no such file, or if the model
    is described by the weights that the run starts from.
    """
    repo = recipe.find("model.hf_repo", "")
    origin = recipe.settings["model.family"].origin
    if not repo or not any(origin.startswith(f"{file}:") for file in recipe.files):
        return None
    file = beside(recipe.path, f"published/{repo.replace('/', '--')}.json")
    if not file.is_file():
        return None
    try:
        facts = json.loads(read_bytes(file))
        return {"parameters": int(facts["parameters"]), **facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        error_text = repr(error)[:178]
        raise InputError(
            f"not facts of a model: {error_text}",
            where=file,
            hint="it holds the facts of config.json, and `parameters`",
        ) from None


def differences(recipe: Recipe, facts: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield where the recipe's model is not as published. A proxy has sizes of its own, but the
    same parts.
    """
    model = recipe.architecture
    for key, field, value in described(family(model.family), facts, recipe.path):
        mine = attrgetter(key)(model)
        theirs = value
        setting = recipe.settings.get(f"model.{key}")
        if key == "head_dim":
            mine = model.head_size
            theirs = value or model.hidden_size // max(1, model.heads)
        numeric = not isinstance(theirs, bool | str)
        if mine == theirs or (recipe.get("proxy", bool) and numeric and bool(mine) == bool(theirs)):
            continue
        named = {
            float(number.replace(",", ""))
            for number in _NUMBER.findall(setting.because if setting else "")
        }
        typed = setting is not None and setting.origin.startswith("command line")
        yield Difference(key, mine, theirs, field, typed or (numeric and {mine, theirs} <= named))


def kind_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield the family, if the publisher's model is of another one."""
    known = family(recipe.architecture.family)
    facts = facts_of(recipe)
    repo = recipe.find("model.hf_repo", "")
    if facts is not None and (kind := facts.get("model_type", "")) != known.transformers:
        fitting = [f"model.family={name}" for name in families_of(kind)]
        why = f"{known.name}, but {repo} has model_type = {kind or 'none'} in its config.json"
        yield "model.family", why, (fitting or ["CONTRIBUTING.md says how to add a family"])[0]


def published_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield each field that is not as its publisher says, unless the user or the recipe's reason
    says so.
    """
    facts = facts_of(recipe)
    model = recipe.architecture
    repo = recipe.find("model.hf_repo", "")
    if facts is None:
        return
    known = family(model.family)
    for field, why in uncomputed(known, facts):
        yield "model.hf_repo", f"{field} of {repo}: {why}", None
    apart = list(differences(recipe, facts))
    for one in apart:
        if not one.meant:
            default = one.field not in facts and known.defaults.get(one.field) == one.theirs
            place = "its config.json"
            if default:
                place = f"`defaults` of families/{known.name}.yaml"
            why = f"{spell(one.mine)}, but {repo} has {one.field} = {spell(one.theirs)} in {place}"
            case = ", or a case whose `because` names both"
            if isinstance(one.theirs, bool | str):
                case = ""
            hint = f"model.{one.key}={spell(one.theirs)}{case}"
            yield f"model.{one.key}", why, hint
    typed = any(
        key.startswith("model.") and s.origin.startswith("command line")
        for key, s in recipe.settings.items()
    )
    if (
        not (apart or typed or recipe.get("proxy", bool))
        and (total := size(model).total) != facts["parameters"]
    ):
        why = f"the model has {total:,} parameters, the files of {repo} {facts['parameters']:,}"
        fitting = list(_explanations(recipe, facts["parameters"]))
        if len(fitting) == 1:
            key = fitting[0].partition(" ")[0]
        else:
            key = "model.family"
            if fitting:
                key = "model"
        hint = (
            f"one size is wrong here and in the published file: {' or '.join(fitting)} has "
            "that number"
        )
        yield key, why, hint if fitting else None


def _explanations(recipe: Recipe, parameters: int) -> Iterator[str]:
    """Yield each field of the model, with a value, that alone would make it a model of so many
    parameters.
    """
    sizes = recipe.section("model")
    known = family(recipe.architecture.family)

    def model(key: str, value: Value) -> Architecture:
        return architecture({**sizes, key: value})

    for key, rule in model_rules().items():
        if key == "head_dim":
            value = recipe.architecture.head_size
        else:
            value = sizes.get(key, rule.default)
        if not known.has(key) or known.values.get(key) or not isinstance(value, int):
            continue
        # Newton's method: one step is exact for all fields but the width, of which the number is a
        # square.
        for _ in range(0 if isinstance(value, bool) else 8):
            before = size(model(key, value)).total
            if value > 0 and (slope := size(model(key, value + 1)).total - before):
                value += round((parameters - before) / slope)
        if isinstance(value, bool):
            value = not value
        else:
            value = max(1, value)
        if not any(model(key, value).objections()) and size(model(key, value)).total == parameters:
            yield f"model.{key} = {spell(value)}"


def origin_of_sizes(recipe: Recipe) -> Iterator[str]:
    """Yield in a sentence whether the model is as published; nothing for a proxy."""
    repo = recipe.find("model.hf_repo", "")
    if recipe.get("proxy", bool):
        return
    if facts_of(recipe) is not None:
        yield another_model(recipe) or f"as published by {repo}"
    elif repo:
        yield f"not compared with {repo}: there is no published/{repo.replace('/', '--')}.json"
    else:
        yield "not compared with a publisher: model.hf_repo names none"


def another_model(recipe: Recipe) -> str:
    """Return how the model differs from its publisher's, in a sentence; "" if it does not, or for a
    proxy.
    """
    if recipe.get("proxy", bool):
        facts = None
    else:
        facts = facts_of(recipe)
    rows = ()
    if facts:
        rows = differences(recipe, facts)
    apart = [f"{row.key} {spell(row.mine)}, not {spell(row.theirs)}" for row in rows]
    if apart:
        return f"another model than {recipe.get('model.hf_repo', str)}: {'; '.join(apart)}"
    return ""
