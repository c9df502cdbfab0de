"""An experiment file as the source of a recipe: the one door through which all commands read it.

With Primus's presets at hand, everything is as Primus merges it. Without them, the experiment is
the recipe of its model with the file's overrides.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from primus_images.errors import InputError, alike
from primus_images.files import read_bytes
from primus_images.recipes import load
from primus_images.recipes.architecture import architecture
from primus_images.recipes.experiments import models
from primus_images.recipes.experiments.presets import (
    Argument,
    Experiment,
    is_experiment,
    read_experiment,
)
from primus_images.recipes.experiments.translate import Translation, keys, table, translate
from primus_images.recipes.family import family
from primus_images.recipes.schema import backend_rules, backends
from primus_images.recipes.setting import Setting, Value
from primus_images.yamlfile import section, spell

# If it is set, what no recipe can express is left out.
ALLOW_UNMAPPED = "PRIMUS_ALLOW_UNMAPPED"
_TOKENIZER = "assets.tokenizer"
_CORPUS = "assets.corpus"
# A recipe of the same model has these from its publisher.
_RANKS = 8


@dataclass(kw_only=True)
class Imported:
    """What an experiment becomes.

    ``recipe`` is the name of the recipe of the same model, or "". ``model`` are its fields, without
    the prefix ``model.``; those of the recipe alone if ``experiment.root`` is None. ``says`` are
    sentences for the user.
    """

    experiment: Experiment
    backend: str
    recipe: str
    done: Translation
    model: dict[str, Value] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)


def least_nodes(backend: str, settings: Mapping[str, Value]) -> int:
    """Return the least number of nodes of eight GPUs that the layout of ``settings`` needs."""
    degrees = {}
    for kind, key in backends()[backend].degrees.items():
        value = settings.get(f"{backend}.{key}", 1)
        degrees[kind] = value if isinstance(value, int) and value > 0 else 1
    stages = degrees.get("pp", 1)
    parts = stages * degrees.get("tp", 1) * degrees.get("cp", 1)
    for nodes in range(1, 4096):
        world = nodes * _RANKS
        if world % parts == 0 and world // stages % degrees.get("ep", 1) == 0:
            return nodes
    return 1


def read(path: Path) -> load.Source:
    """Read a recipe file or an experiment file. Raises InputError with the place."""
    if not is_experiment(path):
        return load.read(path)
    return source_of(import_experiment(path))


def import_experiment(
    path: Path, environment: Mapping[str, str] = os.environ, *, allow_unmapped: bool = False
) -> Imported:
    """Translate an experiment.

    Raises InputError for a framework, a model or a key that is not here. With ``allow_unmapped``,
    keys that no recipe can express are in ``done.unmapped``.
    """
    # A framework that is not here has no presets, either.
    backend = backend_of(path, environment)
    experiment = read_experiment(path, environment)
    stem = experiment.model.removesuffix(".yaml").removesuffix(".yml")
    row = table("models")["recipes"][backend].get(stem.removesuffix("-fp8"), "")
    recipe = row if isinstance(row, str) else row["recipe"]
    _refuse_post_training(experiment, recipe)
    arguments = list(experiment.arguments.values())
    defaults: dict[str, Value] = {}
    precision = "bf16"
    if experiment.root is None:
        _require_recipe(experiment, backend, recipe)
        if not isinstance(row, str):
            defaults = dict(row["settings"])
        if stem.endswith("-fp8"):
            precision = "fp8"
    odd = models.strange(experiment.arguments)
    if odd and experiment.root is not None:
        raise InputError(f"{odd[0]}: no family here computes it", where=odd[1])
    if _predicts_more(experiment):
        arguments.remove(experiment.arguments["mtp_num_layers"])
    done = translate(backend, arguments, defaults, precision, whole=True)
    if not environment.get(ALLOW_UNMAPPED) and not allow_unmapped:
        done.refuse_unmapped()
    if odd:
        raise InputError(f"{odd[0]}: no family here computes it", where=odd[1])
    imported = Imported(experiment=experiment, backend=backend, recipe=recipe, done=done)
    if experiment.root is None:
        _change_model(imported)
    else:
        imported.model = _whole_model(imported)
    _settle_tokenizer(imported)
    _settle_recomputation(done)
    _settle_sharding(done)
    _settle_warmup(imported)
    _settle_stages(imported)
    _add_sentences(imported)
    return imported


def _add_sentences(imported: Imported) -> None:
    """Add what the user has to know of the translation."""
    experiment = imported.experiment
    done = imported.done
    if experiment.root is None:
        imported.says.append(
            f"Primus's presets are not here: what {experiment.path.name} does not set is as in the "
            f"recipe {imported.recipe}"
        )
    if _predicts_more(experiment):
        imported.says.append("the model's layer for multi-token prediction is left out")
    if experiment.unread:
        imported.says.append(f"nothing reads {', '.join(experiment.unread)}")
    if _lacks_text(imported):
        imported.says.append(
            "mock_data is false, but the file names no text: the run trains on made-up text, "
            "unless assets.corpus=PATH names yours"
        )
    summary = done.summary()
    if summary:
        imported.says.append(summary)
    for argument, why in done.unmapped:
        imported.says.append(f"{argument.key} is left out: {why}")


def _lacks_text(imported: Imported) -> bool:
    """Whether the file asks for real text, which Primus would download, and names none."""
    arguments = imported.experiment.arguments
    mock = arguments.get("mock_data") or arguments.get("training.mock_data")
    return _CORPUS not in imported.done.settings and mock is not None and mock.value is False


def _predicts_more(experiment: Experiment) -> bool:
    """Whether the preset of the model has a layer for multi-token prediction."""
    argument = experiment.arguments.get("mtp_num_layers")
    return argument is not None and argument.level == "model" and bool(argument.value)


def backend_of(path: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the backend of the experiment ``path``. Raises InputError with the place."""
    return _backend(read_experiment(path, environment, alone=True))


def _backend(experiment: Experiment) -> str:
    known = table("models")["recipes"]
    framework = experiment.framework
    if framework in known:
        return framework
    reason = table("models")["frameworks"].get(framework)
    where = experiment.places["framework"]
    if reason:
        raise InputError(f"the framework {framework}: {reason}", where=where)
    raise InputError(
        f"there is no framework {framework!r}{alike(framework, known)}",
        where=where,
        hint=f"there are: {', '.join(known)}",
    )


def _refuse_post_training(experiment: Experiment, recipe: str) -> None:
    is_tuning = experiment.trainer == "post_trainer" or "sft" in experiment.config
    if is_tuning:
        raise InputError(
            f"post-training by {experiment.framework} is not here; models are fine-tuned by the "
            "backend finetune",
            where=experiment.places["config"],
            hint=_of_fine_tuning(recipe),
        )


def _of_fine_tuning(recipe: str) -> str:
    """Return what fine-tunes the model of a recipe, as far as it can be."""
    weights = "WEIGHTS"
    modes = ["full", "lora"]
    if recipe:
        settings = load.read(load.find(recipe)).settings
        modes = [mode for mode in modes if f"supports.finetune.{mode}" in settings]
        if "model.hf_repo" in settings:
            weights = f"hf:{settings['model.hf_repo'].value}"
    if not modes:
        return f"the backend finetune does not train {recipe}; `primus list` shows what it trains"
    options = ", or ".join(f"--mode {mode}" for mode in modes)
    return f"primus finetune {weights} DATA {options}"


def _require_recipe(experiment: Experiment, backend: str, recipe: str) -> None:
    if not recipe:
        known = table("models")["recipes"][backend]
        raise InputError(
            f"the preset of the model {experiment.model!r} is not here, and no recipe has this "
            f"model{alike(experiment.model.partition('.y')[0], known)}",
            where=experiment.places["model"],
            hint="name a checkout of Primus, which has the preset: --primus-root DIR, or "
            "PRIMUS_ROOT=DIR",
        )
    if experiment.config.removesuffix(".yaml") != "pre_trainer":
        raise InputError(
            f"{experiment.config} is not Primus's own pre_trainer.yaml",
            where=experiment.places["config"],
            hint="write what it sets under overrides, or name the checkout that has it: "
            "--primus-root DIR",
        )


def _change_model(imported: Imported) -> None:
    """Set the fields of the recipe's model that the file's keys change."""
    done = imported.done
    if imported.backend != "megatron" or not done.of_model:
        return
    settings = section(load.read(load.find(imported.recipe)).settings, "model")
    values: dict[str, Value] = {key: setting.value for key, setting in settings.items()}
    values |= section(done.settings, "model")
    before: dict[str, Argument] = {}
    for key, value in models.of_architecture(architecture(values)).items():
        before[key] = Argument(key=key, value=value, where=imported.recipe, level="model")
    named = {key: one for key, one in done.of_model.items() if one.value is not None}
    usual = models.of_megatron(before)
    for key, value in models.of_megatron({**before, **named}).items():
        if usual.get(key) != value:
            done.settings[f"model.{key}"] = value


def _whole_model(imported: Imported) -> dict[str, Value]:
    """Return the model that the presets and the file describe, with its family."""
    experiment = imported.experiment
    arguments = experiment.arguments
    first = ""
    if imported.recipe:
        settings = load.read(load.find(imported.recipe)).settings
        first = str(settings["model.family"].value)
    if imported.backend == "megatron":
        model = models.of_megatron(imported.done.of_model)
        tokenizer = _text(arguments, "tokenizer_model")
        rows = _number(arguments, "vocab_size") or models.vocabulary(tokenizer)
    else:
        where = experiment.places["model"]
        model = models.of_flavor(
            _text(arguments, "model.name"), _text(arguments, "model.flavor"), where
        )
        layers = _number(arguments, "model.n_layers")
        if layers:
            model["layers"] = layers
        tokenizer = _text(arguments, "model.hf_assets_path")
        rows = int(str(model["vocab_size"]))
        first = str(model.pop("family"))
    if not rows:
        lacking = "the model has neither vocab_size nor a tokenizer"
        if tokenizer:
            lacking = f"the vocabulary of the tokenizer {tokenizer!r} is not known here"
        raise InputError(
            lacking,
            where=experiment.places["model"],
            hint="give the rows of the embedding under overrides: vocab_size: 32000",
        )
    model["vocab_size"] = rows
    known = models.family_of(model, imported.backend, first)
    if known is None:
        lacking = ", ".join(models.obstacles(model, imported.backend)[:4])
        raise InputError(
            f"no family that {imported.backend} computes here has {lacking}",
            where=experiment.places["model"],
            hint="other values under overrides, or another backend",
        )
    published = _published(imported.recipe, tokenizer, known.name)
    length = imported.done.settings.get(backends()[imported.backend].key("seq_len"), 0)
    longest = _number(arguments, "max_position_embeddings") or int(str(model.get("max_seq_len", 0)))
    if published:
        model["hf_repo"] = published
        longest = _published_length(published) or longest
    longest = max(longest, length if isinstance(length, int) else 0)
    return {"family": known.name, **model, "max_seq_len": longest}


def _text(arguments: Mapping[str, Argument], key: str) -> str:
    if key in arguments and isinstance(arguments[key].value, str):
        return str(arguments[key].value)
    return ""


def _number(arguments: Mapping[str, Argument], key: str) -> int:
    if key in arguments and type(arguments[key].value) is int:
        return int(str(arguments[key].value))
    return 0


def _published(recipe: str, tokenizer: str, family_name: str) -> str:
    """Return the published model that this one is compared with; "" if none is of its family."""
    names = [tokenizer]
    if recipe:
        settings = load.read(load.find(recipe)).settings
        if "model.hf_repo" in settings:
            names.insert(0, str(settings["model.hf_repo"].value))
    for name in names:
        if _facts(name).get("model_type") == family(family_name).transformers:
            return name
    return ""


def _facts(repo: str) -> Mapping[str, object]:
    file = load.folder() / "published" / f"{repo.replace('/', '--')}.json"
    if not repo or not file.is_file():
        return {}
    facts: Mapping[str, object] = json.loads(read_bytes(file))
    return facts


def _published_length(repo: str) -> int:
    length = _facts(repo).get("max_position_embeddings")
    if isinstance(length, int):
        return length
    return 0


def _settle_tokenizer(imported: Imported) -> None:
    """Take a preset's tokenizer only with text that the file names."""
    done = imported.done
    corpus = done.settings.get(_CORPUS, "mock")
    source = done.sources.get(_TOKENIZER)
    if corpus == "mock" and source is not None and source.level != "override":
        del done.settings[_TOKENIZER]


def _settle_recomputation(done: Translation) -> None:
    """Recompute all layers instead of chosen ones, and nothing if that is the number of layers."""
    method = "megatron.model.recompute_method"
    if "recompute_layer_ids" in done.left_out and method not in done.settings:
        done.settings[method] = "uniform"
        done.settings["megatron.model.recompute_num_layers"] = 1
    if done.settings.get("megatron.model.recompute_num_layers") != 0:
        return
    for name in ("granularity", "method", "num_layers"):
        done.settings.pop(f"megatron.model.recompute_{name}", None)


def _settle_sharding(done: Translation) -> None:
    """Leave out what presets say of Megatron's buffers, which torch FSDP2 does not have."""
    if not done.settings.get("megatron.torch_fsdp2"):
        return
    for key, source in done.sources.items():
        of_buffers = key.startswith("megatron.ddp.") and key != "megatron.ddp.grad_reduce_in_fp32"
        if of_buffers and source.level != "override":
            done.settings.pop(key, None)


def _settle_stages(imported: Imported) -> None:
    """Give the first and the last stage fewer layers where stages cannot have equally many."""
    done = imported.done
    key = "megatron.model.num_layers_in_{}_pipeline_stage"
    stages = done.settings.get("megatron.model.pipeline_model_parallel_size", 1)
    layers = imported.model.get("layers")
    layout = "megatron.model.pipeline_model_parallel_layout"
    written = [key.format("first"), key.format("last"), layout]
    if not isinstance(stages, int) or not isinstance(layers, int) or stages < 2:
        return
    if layers % stages == 0 or any(name in done.settings for name in written):
        return
    middle = -(-layers // stages)
    ends = layers - middle * (stages - 2)
    if ends < 2:
        return
    done.settings[key.format("first")] = ends - ends // 2
    done.settings[key.format("last")] = ends // 2
    imported.says.append(
        f"{layers} layers on {stages} stages: {ends - ends // 2} on the first, {ends // 2} on the "
        f"last, {middle} on each other"
    )


def _settle_warmup(imported: Imported) -> None:
    """End torchtitan's warm-up with the run, as torchtitan does."""
    done = imported.done
    steps = done.settings.get("torchtitan.training.steps")
    warmup = done.settings.get("torchtitan.lr_scheduler.warmup_steps")
    if isinstance(steps, int) and isinstance(warmup, int) and 0 < steps < warmup:
        done.settings["torchtitan.lr_scheduler.warmup_steps"] = steps
        imported.says.append(f"the warm-up of {warmup} steps ends with the run, after {steps}")


def source_of(imported: Imported) -> load.Source:
    """Return the recipe of an experiment as files would say it."""
    base = _base(imported)
    backend = imported.backend
    experiment = imported.experiment
    place = f"{experiment.path}:1:1"
    settings = dict(base.settings)
    precision = str(imported.done.precision or "bf16")
    offered = [word for word in ("bf16", "fp8", "mxfp8") if word != precision]
    usual = {
        "name": experiment.name,
        "description": _description(imported),
        f"supports.{backend}.pretrain": [precision, *offered],
        "default.backend": backend,
        "default.mode": "pretrain",
        "default.precision": precision,
        "default.nodes": least_nodes(backend, imported.done.settings),
    }
    for key, value in usual.items():
        settings[key] = Setting(value=value, origin=place)  # type: ignore[arg-type]
    cases = list(base.cases)
    for key, value in imported.model.items():
        origin = experiment.places["model"]
        argument = imported.done.of_model.get(models.KEYS.get(key, ""))
        if argument is not None and argument.value is not None:
            origin = argument.where
        settings[f"model.{key}"] = Setting(value=value, origin=origin, deliberate=True)
    if imported.model:
        small = models.proxy(imported.model)
        cases.append(_case({"proxy": ("true",)}, _settings(small, "model.", place)))
    whole, batch = _of_run(imported, base)
    full = {"backend": (backend,), "proxy": ("false",)}
    cases.append(_case(full, whole))
    if batch:
        # It is that of the whole job, whatever the number of nodes.
        cases.append(_case({**full, "nodes": ("1", "multi")}, batch))
    files = (experiment.path, *base.files)
    return load.Source(settings=settings, cases=cases, files=files, says=tuple(imported.says))


def _base(imported: Imported) -> load.Source:
    shared = [load.folder() / "shared" / f"{name}.yaml" for name in ("data", imported.backend)]
    if imported.model:
        return load.read_all(shared)
    return load.read_all([*shared, load.find(imported.recipe)])


def _description(imported: Imported) -> str:
    title = imported.experiment.model.removesuffix(".yaml")
    if imported.recipe:
        path = load.find(imported.recipe)
        title = str(load.read(path).settings["description"].value)
    return f"{title} as {imported.experiment.path.name} has it"


def _of_run(imported: Imported, base: load.Source) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return the settings of the full run, and apart from them the global batch."""
    done = imported.done
    written = set(base.settings)
    for case in base.cases:
        written.update(case.settings)
    whole: dict[str, Setting] = {}
    batch: dict[str, Setting] = {}
    for key, value in done.settings.items():
        if key not in written and _is_preset_s_default(imported, key):
            continue
        origin = f"{imported.experiment.path}:1:1"
        if key in done.sources:
            origin = done.sources[key].where
        setting = Setting(value=value, origin=origin, deliberate=True)
        if key == backends()[imported.backend].key("global_batch"):
            batch[key] = setting
        else:
            whole[key] = setting
    if imported.model:
        whole |= _nulls(imported, written)
    return whole, batch


def _is_preset_s_default(imported: Imported, key: str) -> bool:
    """Whether a preset sets ``key`` to the backend's own default."""
    # A long run gets a schedule unless it has one.
    if ".training." in key or ".lr_scheduler." in key:
        return False
    source = imported.done.sources.get(key)
    if source is None or source.level == "override":
        return False
    rule = backend_rules(imported.backend).get(key.removeprefix(f"{imported.backend}."))
    return rule is not None and rule.default == imported.done.settings[key]


def _nulls(imported: Imported, written: Collection[str]) -> dict[str, Setting]:
    """Return the nulls for native keys of the model that are ``written`` in shared files."""
    nulls = {}
    for argument in imported.experiment.arguments.values():
        name = f"{imported.backend}.model.{argument.key}"
        is_native = argument.key not in keys(imported.backend)
        if argument.value is None and is_native and name in written:
            nulls[name] = Setting(value=None, origin=argument.where)
    return nulls


def _settings(values: Mapping[str, Value], prefix: str, origin: str) -> dict[str, Setting]:
    settings = {}
    for key, value in values.items():
        settings[f"{prefix}{key}"] = Setting(value=value, origin=origin)
    return settings


def _case(when: Mapping[str, tuple[str, ...]], settings: Mapping[str, Setting]) -> load.Case:
    return load.Case(when=dict(when), settings=dict(settings))


def text_of(imported: Imported, *, nodes: int, compared: bool) -> str:
    """Return the experiment as the text of a recipe file for a number of ``nodes``.

    Unless it is ``compared`` with its publisher's, the model gets no ``model.hf_repo``.
    """
    source = source_of(imported)
    base = _base(imported)
    experiment = imported.experiment
    uses = [f"shared/{name}.yaml" for name in ("data", imported.backend)]
    if not imported.model:
        uses.append(f"{imported.recipe}.yaml")
    lines = [
        f"# Imported from {experiment.path.name} by `primus import-exp`.",
        f"uses: [{', '.join(uses)}]",
    ]
    written = dict(source.settings)
    written["default.nodes"] = Setting(value=nodes, origin="")
    if imported.model and not compared:
        written.pop("model.hf_repo", None)
    for key, setting in written.items():
        if base.settings.get(key) != setting:
            lines.append(f"{key}: {spell(setting.value)}")
    lines.append("cases:")
    for case in source.cases[len(base.cases) :]:
        conditions = []
        for choice, words in case.when.items():
            shown = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
            conditions.append(f"{choice}: {shown}")
        if case.settings:
            lines.append(f"  - when: {{{', '.join(conditions)}}}")
            lines.append(f"    because: {spell(_because(imported))}")
            lines += [f"    {key}: {spell(one.value)}" for key, one in case.settings.items()]
    for key, because in imported.done.left_out.items():
        lines.append(f"# {key} is left out: {because}")
    for argument, _ in imported.done.unmapped:
        lines.append(f"# not expressible: {argument.key}: {spell(argument.value)}")
    return "\n".join(lines) + "\n"


def _because(imported: Imported) -> str:
    return f"{imported.experiment.path.name} has it so."
