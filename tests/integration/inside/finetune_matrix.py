"""Run by Python with torch. What ``finetune`` accepts, as a user starts it: kinds of models × modes
× packed or not × evaluated or not.

Each cell trains a tiny model, exports it, and loads it with transformers (and PEFT) alone in a
fresh process: its logits are those of the weights in the run's checkpoint. Or it is refused before
the start. Arguments: ``every``, or the numbers of cells; ``--write FILE`` keeps the result.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import warm
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from primus_images.recipes.load import folder as recipes
from primus_images.training.backends.finetune import conversion, entry, initial
from primus_images.training.backends.finetune.backend import FinetuneConfig
from primus_images.training.backends.loop import weights
from primus_images.training.backends.loop.config import read_job

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Name → transformers' type of model, and its further settings.
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("llama", {}),
    "tied output": ("llama", {"tie_word_embeddings": True}),
    "biases": ("qwen2", {}),
    "sliding window": ("mistral", {"sliding_window": 16}),
    "tied, windows in a pattern": ("gemma3_text", {"sliding_window": 16, "head_dim": 16}),
    "experts": ("mixtral", EXPERTS),
    "MXFP4": ("gpt_oss", {**EXPERTS, "head_dim": 16}),
    "no family": ("granite", {"logits_scaling": 8.0}),
    "layers elsewhere": ("gpt2", {}),
    "renamed tensors": ("granitemoe", EXPERTS),
}
MODES = ("full", "lora", "lora merged", "lora FP8")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The largest difference of logits, as a share of the largest logit.
TOLERANCE = 2e-5
# Cells of CI: most kinds, and each mode and switch, are in one of them.
SOME = (14, 18, 40, 55, 81, 103, 123, 132, 145)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination."""

    kind: str
    mode: str
    packed: bool
    evaluated: bool

    def words(self) -> Iterator[str]:
        """Yield the words of the command that depend on the cell."""
        yield f"--mode={self.mode.split()[0]}"
        yield f"packing={str(self.packed).lower()}"
        if self.mode == "lora merged":
            yield "export=merged"
        if self.mode == "lora FP8":
            yield "--precision=fp8"
        if self.evaluated:
            yield from ("eval.fraction=0.25", "eval.every=1")


CELLS = [
    Cell(kind=kind, mode=mode, packed=packed, evaluated=evaluated)
    for kind, mode, packed, evaluated in product(KINDS, MODES, (False, True), (False, True))
]


def made(kind: str, where: Path) -> Path:
    """Return the folder of weights of a kind, which is made once."""
    folder = where / kind.replace(" ", "-")
    if folder.exists():
        return folder
    name, more = KINDS[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **more))
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "MXFP4":
        quantize(folder)
    for file in (recipes() / "assets/tokenizer").iterdir():
        shutil.copy(file, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def quantize(folder: Path) -> None:
    """Give the experts random values in MXFP4, as gpt-oss has them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def train(cell: Cell, source: Path, chats: Path, output: Path, ranks: int) -> str:
    """Run a cell as a user does. Returns the sentence that refuses it, or nothing."""
    words = ["-m", "primus_images.cli.main", "finetune", str(source), str(chats)]
    words += ["--output", str(output), "--steps=3", "seq_len=64", "local_batch=2", "lr=1e-3"]
    words += ["checkpoint=1", f"--ranks={ranks}", *cell.words()]
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, errors="replace", check=False
    )
    assert ended.returncode in (0, 2), ended.stderr[-2000:]
    if ended.returncode == 0:
        return ""
    assert not (output / "log.txt").exists(), f"it is refused after the start: {ended.stderr}"
    return ended.stderr.strip().splitlines()[0]


def exported_step(output: Path) -> int:
    """Return the step whose weights are exported: the best evaluation, or the last step."""
    best, step = float("inf"), 3
    file = output / "eval.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        if float(row["eval_loss"]) < best:
            best, step = float(row["eval_loss"]), row["step"]
    return step


@torch.no_grad()
def trained_logits(output: Path, source: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the weights in the run's checkpoint, in the model that was trained."""
    # This process computes on the CPU in float32, which GPU kernels do not.
    job = replace(read_job(output), turbo=())
    model = entry._model(job, job.section(FinetuneConfig), source)
    weights.materialize(model, torch.device("cpu"))
    model.causal.tie_weights()
    files = conversion.files_of(source, model.causal, job.model)
    initial.init(model, job.training.seed, files, 1.0 - job.model.norm_offset)
    checkpoint = output / f"checkpoint/step-{exported_step(output)}"
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {}
    for name, metadata in saved.items():
        if name.startswith("model."):
            state[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    assert state, "the checkpoint has no weights"
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inner = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    model.load_state_dict(inner, strict=False)
    after = model.state_dict()
    assert inner.keys() <= after.keys(), "the checkpoint has other names"
    assert any(not torch.equal(before[name], after[name]) for name in inner), "nothing was trained"
    return model.eval().causal(tokens).logits


STOCK = """
import json, sys
from pathlib import Path
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
for line in sys.stdin:
    folder, base, logits = map(Path, json.loads(line))
    AutoTokenizer.from_pretrained(folder)
    adapters = (folder / "adapter_config.json").exists()
    source = base if adapters else folder
    options = {}
    if "quantization_config" in (source / "config.json").read_text():
        options = {"quantization_config": Mxfp4Config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).float()
    if adapters:
        model = PeftModel.from_pretrained(model, folder)
    wanted, tokens = torch.load(logits)
    with torch.no_grad():
        gap = (model.eval()(tokens).logits - wanted).abs().max() / wanted.abs().max()
    print(json.dumps([str(folder), float(gap)]), flush=True)
assert not any(name.startswith("primus") for name in sys.modules)
"""


def gaps(pairs: list[list[str]]) -> dict[str, float]:
    """Return the gap between the logits of each exported folder and those that are wanted."""
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    # By way of `env`, the process is no fork of this one.
    command = ["env", sys.executable, "-W", "ignore", "-c", STOCK]
    ended = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return dict(map(json.loads, ended.stdout.splitlines()))


def main(numbers: list[int], where: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the row of each cell."""
    chats = where / "chats.jsonl"
    with chats.open("w", encoding="utf-8") as file:
        for number in range(24):
            question = {"role": "user", "content": f"How much is {number} and one?"}
            answer = {"role": "assistant", "content": f"It is {number + 1}." * (1 + number % 3)}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    tokens = torch.arange(8, 56)[None]
    rows, pairs = [], []
    for number in numbers:
        cell = CELLS[number]
        began = time.monotonic()
        source, output = made(cell.kind, where), where / f"runs/{number}"
        row: dict[str, Any] = {"number": number, **vars(cell), "ranks": ranks}
        row["refused"] = train(cell, source, chats, output, ranks).replace(str(where), "")
        if not row["refused"]:
            wanted = trained_logits(output, source, tokens)
            torch.save((wanted, tokens), output / "logits")
            pairs.append([str(output / "weights"), str(source), str(output / "logits")])
            shutil.rmtree(output / "checkpoint")
        row["seconds"] = round(time.monotonic() - began, 1)
        print(row, flush=True)
        rows.append(row)
    measured = gaps(pairs)
    for row in rows:
        if not row["refused"]:
            row["gap"] = measured[str(where / f"runs/{row['number']}/weights")]
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", nargs="+", help="every, some, or numbers")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # CUDA does not start in a fork
        warm.warm()
    chosen = {"every": list(range(len(CELLS))), "some": list(SOME)}.get(
        options.cells[0], [int(word) for word in options.cells if word.isdigit()]
    )
    with TemporaryDirectory() as name:
        result = main(chosen, Path(name), options.ranks)
    for row in result:
        row.pop("seconds")
    far = [row for row in result if row.get("gap", 0.0) > TOLERANCE]
    refused = [row for row in result if row["refused"]]
    print(f"{len(result)} cells, {len(refused)} refused, {len(far)} with other logits")
    if options.write:
        options.write.write_text(json.dumps({"cells": result}, indent=1) + "\n", encoding="utf-8")
    assert not far, far
