"""Odd weights and configs: trained as transformers loads them, with the same logits, or refused
with the place.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from cases import here, try_all
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mxfp4Config,
)

from primus_images.errors import InputError
from primus_images.recipes.architecture import Architecture
from primus_images.recipes.family import OTHER
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.recipes.weights import config_of, fitting_families, nearest_recipe
from primus_images.training.backends.finetune import backend, conversion, export, initial, models
from primus_images.training.backends.loop import weights

TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
FOREIGN = Architecture(family=OTHER)
Q, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
Tensors = dict[str, Any]


@cache
def plain(kind: str) -> Path:
    torch.manual_seed(1)
    kinds = TABLE["own"] | TABLE["foreign"] | TABLE["no adapters"]
    sizes = TABLE["sizes"] | kinds.get(kind, {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for name in dict(model.named_buffers()).keys() & model.state_dict().keys():
        model.get_buffer(name).uniform_(-0.1, 0.1)
    folder = Path(mkdtemp())
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def written(where: Path, row: Mapping[str, Any]) -> Path:
    """The weights and config.json that a row of the table describes."""
    folder, source = where / "w", plain(row.get("kind", "llama"))
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name, value in row.items():
        if name in CHANGES:
            CHANGES[name](tensors, value)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    keys = (
        {"rope_parameters": None, "rope_scaling": row["rope"], "rope_theta": 500000.0}
        if "rope" in row
        else {}
    )
    config = json.loads((source / "config.json").read_text()) | keys | row.get("config", {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ours(folder: Path) -> Any:
    """What a run would train: the model with its weights, or InputError."""
    words = [f"weights={folder}", "assets.tokenizer=mock", "assets.corpus=mock", "seq_len=64"]
    kind = config_of(folder)[1]["model_type"]
    # No recipe of these families fine-tunes all weights yet; the backend does.
    own = folder.parent / "own.yaml"
    own.write_text(TABLE["own recipe"].format(family=kind, bias=str(kind == "qwen2").lower()))
    name = str(own) if kind in ("mistral", "qwen2") else nearest_recipe(folder).recipe
    words += [f"model.family={OTHER}"] if fitting_families(kind) == [OTHER] else []
    recipe = resolve(name, words, Choices(backend="finetune", mode="full", gpu="cpu"))
    backend.check_weights(recipe)
    causal = models.causal_model(recipe.architecture, "sdpa", folder)
    weights.materialize(causal, torch.device("cpu"))
    causal.tie_weights()
    files = conversion.files_of(folder, causal, recipe.architecture)
    initial.init(models.FineTuned(causal, 64), 1, files)
    layers = models.layers_of(causal, has_formula=recipe.architecture.has_formula)
    assert len(layers) == recipe.architecture.layers, "it is not sharded by layers"
    return causal.eval()


def theirs(folder: Path) -> Any:
    """What transformers loads if it objects to nothing, or None."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, local_files_only=True
        )
    except Exception:  # noqa: BLE001 - it raises many kinds
        return None
    return None if any(report.values()) or hasattr(model, "hf_quantizer") else model.eval()


def add(tensors: Tensors, shapes: Mapping[str, list[int]]) -> None:
    tensors |= {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def cast(tensors: Tensors, parts: Mapping[str, str]) -> None:
    for dtype, part in parts.items():
        tensors |= {
            name: t.to(getattr(torch, dtype)) for name, t in tensors.items() if part in name
        }


def without(tensors: Tensors, part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


def renamed(tensors: Tensors, parts: Mapping[str, str]) -> None:
    for old, new in parts.items():
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)


def copied(tensors: Tensors, names: Mapping[str, str]) -> None:
    tensors |= {new: tensors[old].clone() for new, old in names.items()}


def scaled(tensors: Tensors, end: str) -> None:
    for name in [name for name in tensors if name.endswith(end)]:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}


def transposed(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].T


def packed(tensors: Tensors, ends: list[str]) -> None:
    for name in [name for name in tensors if name.endswith(tuple(ends))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            256, (experts, rows, columns // 32, 16), dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            118, 122, (experts, rows, columns // 32), dtype=torch.uint8
        )


CHANGES: dict[str, Callable[[Tensors, Any], None]] = {
    change.__name__: change
    for change in (add, cast, without, renamed, copied, scaled, transposed, packed)
}


def check_same(case: str, where: Path) -> None:
    folder = written(where, TABLE["same"][case])
    wanted, model = theirs(folder), ours(folder)
    state = model.state_dict()
    for key, tensor in wanted.state_dict().items():
        assert torch.equal(state[key], tensor), key
    tokens = torch.arange(48).reshape(1, -1) * 7 % 1024
    torch.testing.assert_close(model(tokens).logits, wanted(tokens).logits, rtol=0, atol=0)


def check_foreign(case: str, where: Path) -> None:
    """Trained with transformers' own logits, and exported as transformers and PEFT load it."""
    folder, tokens = plain(case), torch.arange(96).reshape(2, -1) * 7 % 1024
    model, wanted = ours(folder), theirs(folder)
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in wanted.state_dict().items())
    logits = wanted(tokens).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(models.WholeLogits(model, 64)(tokens, tokens), loss, rtol=0, atol=0)
    export.write(models.WholeLogits(model, 64), where / "whole", state, None)
    torch.testing.assert_close(theirs(where / "whole")(tokens).logits, logits, rtol=0, atol=0)
    lora = models.WholeLogits(models.adapted(model, backend.LoraConfig(rank=4)), 64)
    weights.materialize(lora, torch.device("cpu"))
    initial.init(lora, 1, conversion.files_of(folder, lora.causal, FOREIGN))
    added = {name: p for name, p in lora.model.named_parameters() if p.requires_grad}
    for name, parameter in added.items():
        torch.nn.init.normal_(parameter.data, 0, 0.1 if ".lora_B." in name else 1.0)
    export.write(lora, where / "adapters", added, None)
    again = PeftModel.from_pretrained(wanted, where / "adapters")
    torch.testing.assert_close(again(tokens).logits, lora.model(tokens).logits, rtol=0, atol=1e-5)
    assert float((lora.model(tokens).logits - logits).abs().max()) > 1e-3


def check_part(case: str, where: Path) -> None:
    """The language model of a model of several parts is trained, and exported alone."""
    sizes = {
        "text_config": TABLE["sizes"] | TABLE["own"]["gemma3_text"],
        "vision_config": TABLE["vision"],
    }
    torch.manual_seed(1)
    wanted = Gemma3ForConditionalGeneration(Gemma3Config(**sizes, image_token_index=7)).eval()
    wanted.save_pretrained(where / "w")
    if case == "names as published":
        file = where / "w/model.safetensors"
        names = {f"model.{part}": part for part in ("vision_tower", "multi_modal_projector")}
        tensors = load_file(file)
        renamed(tensors, names | {"model.language_model.": "language_model.model."})
        save_file(tensors, file, {"format": "pt"})
    model, tokens = ours(where / "w"), torch.arange(8, 48)[None]
    assert torch.equal(model(tokens).logits, wanted(tokens).logits)
    export.write(models.FineTuned(model, 64), where / "out", model.state_dict(), None)
    assert torch.equal(theirs(where / "out")(tokens).logits, model(tokens).logits)


def check_several_parts(case: str, where: Path) -> None:
    """As :func:`check_part`, of models that no family has; or it is refused."""
    row = TABLE["several parts"][case]
    config = AutoConfig.for_model(
        case,
        text_config=TABLE["sizes"] | row["text"],
        vision_config=TABLE["vision"] | row["vision"],
        **row.get("config", {}),
    )
    torch.manual_seed(1)
    wanted = AutoModelForImageTextToText.from_config(config).eval()
    wanted.save_pretrained(where / "w")
    if "words" in row:
        refused(where / "w", row["words"])
        return
    model, tokens = ours(where / "w"), torch.arange(8, 48)[None]
    torch.testing.assert_close(model(tokens).logits, wanted(tokens).logits, rtol=0, atol=0)


def check_packed(case: str, where: Path) -> None:
    """gpt-oss as published: experts in MXFP4 are dequantized as transformers does it."""
    folder = written(where, TABLE["packed"][case])
    dequantized = Mxfp4Config(dequantize=True)
    wanted = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantized).float()
    model = ours(folder)
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in wanted.state_dict().items())
    export.write(models.WholeLogits(model, 64), where / "out", state, None)
    (where / "new").touch()
    for file in (where / "out").iterdir():
        assert file.stat().st_mode == (where / "new").stat().st_mode, f"{file} is for its owner"
    assert torch.equal(
        theirs(where / "out")(torch.arange(48)[None]).logits, model(torch.arange(48)[None]).logits
    )


def refused(folder: Path, words: str) -> None:
    try:
        ours(folder)
    except InputError as error:
        assert str(folder) in str(error.where), error.where
        assert re.search(words, str(error)), error
    else:
        raise AssertionError("it was trained")


def check_refused(case: str, where: Path) -> None:
    row = TABLE["refused"][case]
    folder = written(where, row)
    refused(folder, row["words"])
    assert (theirs(folder) is not None) == row.get("loads", False), "transformers"


def sharded(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, half in enumerate((names[::2], names[1::2])):
        save_file(
            {name: tensors[name] for name in half},
            folder / f"part-{number}.safetensors",
            {"format": "pt"},
        )
    rows = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": rows})
    )


def stale(folder: Path) -> None:
    """An index of other weights beside the whole file."""
    whole = (folder / "model.safetensors").read_bytes()
    sharded(folder)
    for part in folder.glob("part-*"):
        save_file({n: t * 0 for n, t in load_file(part).items()}, part, {"format": "pt"})
    (folder / "model.safetensors").write_bytes(whole)


def old_shards(folder: Path) -> None:
    sharded(folder)
    save_file({"x": torch.ones(1)}, folder / "part-9.safetensors", {"format": "pt"})


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def shard(folder: Path) -> None:
        sharded(folder)
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return shard


def linked(folder: Path) -> None:
    """As in the hub's cache."""
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")


FILES = {
    "sharded": sharded,
    "stale": stale,
    "old shards": old_shards,
    "linked": linked,
    "an index that names another part": index(
        lambda names: names.update({Q: names[EMBEDDING], EMBEDDING: names[Q]})
    ),
    "an index that leaves a tensor out": index(lambda names: names.pop(Q)),
    "an index of a tensor that is nowhere": index(
        lambda names: names.update({"ghost.weight": names[Q]})
    ),
}
PART, INDEX = "part-0.safetensors", "model.safetensors.index.json"
# name → the file, its change, words of the sentence
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut": (PART, lambda data: data[:-2], "truncated"),
    "more behind it": (PART, lambda data: data + b"more", "damaged"),
    "a cut header": (PART, lambda data: data[:9], "damaged"),
    "another dtype": (PART, lambda data: data.replace(b"BF16", b"F32 ", 1), "F32 "),
    "another shape": (PART, lambda data: data.replace(b"[96,64]", b"[96,65]", 1), "damaged"),
    "a pointer of Git LFS": (
        PART,
        lambda _: b"version https://git-lfs.github.com/spec/v1",
        "git lfs pull",
    ),
    "a byte order mark": ("config.json", lambda data: b"\xef\xbb\xbf" + data, "is not JSON"),
    "a cut index": (INDEX, lambda data: data[:-5], "index of the weights cannot be read"),
    "an absent part": (INDEX, lambda data: data.replace(b"part-1", b"part-7"), "lack part-7"),
    "half of the tensors": (
        INDEX,
        lambda data: data.replace(b"part-1", b"part-0"),
        "the weights lack",
    ),
}


def check_no_adapters(case: str, where: Path) -> None:
    """Refused before the start, unless all weights are trained."""
    folder = written(where, {"kind": case})
    backend.check(folder, FOREIGN)
    try:
        backend.check(folder, FOREIGN, [])
    except InputError as error:
        assert "each would have its own adapter" in error.message
    else:
        raise AssertionError("its shared layers get adapters")
    backend.check(folder, FOREIGN, ["in_proj"])


def check_files(case: str, where: Path) -> None:
    folder = written(where, {})
    FILES[case](folder)
    state = ours(folder).state_dict()
    for key, tensor in theirs(folder).state_dict().items():
        assert torch.equal(state[key], tensor), key


def check_damaged(case: str, where: Path) -> None:
    folder = written(where, {})
    sharded(folder)
    file, spoil, words = DAMAGED[case]
    (folder / file).write_bytes(spoil((folder / file).read_bytes()))
    refused(folder, words)


def check_a_process_of_its_own(_case: str, where: Path) -> None:
    """As a run refuses. All other cases check the weights in this process."""
    backend.subprocess = run
    row = TABLE["refused"]["a bias"]
    refused(written(where, row), row["words"])


run = backend.subprocess
backend.subprocess = SimpleNamespace(run=here)
try_all(
    (
        (check_foreign, TABLE["foreign"]),
        (check_packed, TABLE["packed"]),
        (check_several_parts, TABLE["several parts"]),
        (check_part, ["", "names as published"]),
        (check_same, TABLE["same"]),
        (check_refused, TABLE["refused"]),
        (check_no_adapters, TABLE["no adapters"]),
        (check_files, FILES),
        (check_damaged, DAMAGED),
        (check_a_process_of_its_own, ["a bias"]),
    )
)
