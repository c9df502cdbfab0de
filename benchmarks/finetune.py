"""Compare `primus finetune` with TRL on one machine: the same model, chats and tokens a step.

    python -m benchmarks.finetune OUT.json --model llama3.2-1b --variants trl trl-compile primus

Each run is a process of its own, from the command to its end, and the variants alternate. A variant
named trl is TRL as it comes; the words after it change one of its documented settings each: `plain`
turns gradient checkpointing off, `compile` is torch_compile, `liger` its kernels, `flash4` Flash
Attention 4. On several GPUs, TRL shards by FSDP2. The weights are random and made by this program,
as are the chats, because speed depends on neither. A ratio is that of the medians over the runs.
"""

import argparse
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "torchao",
    "flash-attn-4",
    "liger-kernel",
)
# Sizes of published models; `layers` of the command line overrides the number of layers.
SIZES: dict[str, dict[str, Any]] = {
    "llama3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SPECIAL = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|pad|>",
)
LORA_RANK = 16
LORA_ALPHA = 32
# Options that the process of TRL gets as well.
TRL_OPTIONS = (
    "model",
    "layers",
    "mode",
    "sequences",
    "micro",
    "ranks",
    "length",
    "chats",
    "steps",
)
# The first steps compile and warm up.
WARMUP_STEPS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--what", default="")
    parser.add_argument("--model", choices=SIZES, default="llama3.2-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mode", choices=("full", "lora"), default="full")
    parser.add_argument("--variants", nargs="+", default=["trl", "trl-plain-compile", "primus"])
    parser.add_argument("--primus", default="", help="more words of the command `primus finetune`")
    parser.add_argument("--sequences", type=int, default=8, help="packed sequences a step")
    parser.add_argument("--micro", type=int, default=8, help="packed sequences a pass of TRL")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a packed sequence")
    parser.add_argument("--chats", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240, help="seconds that one run may take")
    parser.add_argument("--until", type=float, default=3600, help="seconds after which none begins")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/primus-finetune"))
    parser.add_argument("--trl", metavar="VARIANT", help="run TRL in this process, for the above")
    options = parser.parse_args()
    weights, chats = inputs_of(options)
    if options.trl:
        run_trl(options, weights, chats)
        return 0
    compare(options, weights, chats)
    return 0


def inputs_of(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folder of weights and the file of chats, which are made once."""
    name = options.model + (f"-{options.layers}" if options.layers else "")
    weights = options.folder / name
    chats = options.folder / f"chats-{options.chats}.jsonl"
    make_model(weights, options.model, options.layers)
    make_chats(chats, options.chats)
    return weights, chats


def make_chats(file: Path, count: int) -> None:
    """Write ``count`` chats of one to three turns, whose lengths vary as people's do."""
    if file.exists():
        return
    random_state = random.Random(0)
    words = ["".join(random_state.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(4000)]
    lines = []
    for _ in range(count):
        messages = []
        for _ in range(random_state.randint(1, 3)):
            for role, middle in (("user", 30), ("assistant", 110)):
                length = max(3, round(random_state.lognormvariate(0, 0.6) * middle))
                content = " ".join(random_state.choices(words, k=length))
                messages.append({"role": role, "content": content})
        lines.append(json.dumps({"messages": messages}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_model(folder: Path, name: str, layers: int | None) -> None:
    """Write random BF16 weights and a word tokenizer, as transformers saves them."""
    if (folder / "config.json").exists():
        return
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = dict(SIZES[name])
    if layers:
        sizes["num_hidden_layers"] = layers
    chats = folder.parent / "chats-6000.jsonl"
    make_chats(chats, 6000)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(chats)], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token="<|eot_id|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    )
    config = LlamaConfig(**sizes, bos_token_id=0, eos_token_id=3, pad_token_id=4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)


def compare(options: argparse.Namespace, weights: Path, chats: Path) -> None:
    """Run all variants in alternation, and write the file after every run."""
    began = time.monotonic()
    document: dict[str, Any] = {"results": []}
    if options.out.exists():
        document = json.loads(options.out.read_text())
    for _ in range(options.repeats):
        for variant in options.variants:
            if time.monotonic() - began > options.until:
                print(f"no time for {variant}", flush=True)
                continue
            row = run_variant(variant, options, weights, chats)
            document["results"].append(row)
            print(json.dumps(row), flush=True)
            write(options, document)


def write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the results with what they were measured on, and the medians of each variant."""
    from benchmarks.gpu import host

    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    document |= {
        "what": options.what or document.get("what", ""),
        "date": time.strftime("%Y-%m-%d"),
        "host": host(),
        "versions": versions,
    }
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in document["results"]:
        if row["exit_code"] == 0:
            groups.setdefault((row["model"], row["mode"], row["variant"]), []).append(row)
    document["medians"] = [
        {
            "model": model,
            "mode": mode,
            "variant": variant,
            "runs": len(rows),
            "tokens_per_second": round(median(row["tokens_per_second"] for row in rows)),
            "memory_gib": median(row["memory_gib"] for row in rows),
            "first_step_seconds": median(row["first_step_seconds"] for row in rows),
        }
        for (model, mode, variant), rows in groups.items()
    ]
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run_variant(
    variant: str, options: argparse.Namespace, weights: Path, chats: Path
) -> dict[str, Any]:
    """Run one variant in a process. Returns its figures."""
    output = options.folder / f"run-{variant}-{time.time_ns()}"
    if variant.startswith("primus"):
        command = primus_command(variant, options, weights, chats, output)
    else:
        command = [sys.executable]
        if options.ranks > 1:
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
        command += ["-m", "benchmarks.finetune", str(options.out), "--trl", variant]
        for word in TRL_OPTIONS:
            value = getattr(options, word)
            if value is not None:
                command += [f"--{word}", str(value)]
        command += ["--folder", str(options.folder)]
    environment = dict(os.environ)
    environment["PRIMUS_BENCHMARK_OUTPUT"] = str(output)
    began = time.time()
    log = options.folder / f"{output.name}.log"
    first_step = None
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None:
            if first_step is None and has_content(output / "metrics.jsonl"):
                first_step = time.time() - began
            if time.time() - began > options.limit:
                process.terminate()
            time.sleep(0.05)
    code = process.returncode
    row: dict[str, Any] = {
        "model": weights.name,
        "mode": options.mode,
        "variant": variant,
        "command": shlex.join(["primus", *command[3:]])
        if variant.startswith("primus")
        else variant,
        "exit_code": code,
        "seconds": round(time.time() - began, 1),
    }
    if code == 0:
        figures = primus_figures if variant.startswith("primus") else trl_figures
        row |= figures(output)
        row["first_step_seconds"] = round(first_step or float("nan"), 1)
    else:
        row["log"] = log.read_text(errors="replace")[-800:]
        if (output / "log.txt").exists():
            row["log"] += (output / "log.txt").read_text(errors="replace")[-1500:]
    return row


def primus_command(
    variant: str, options: argparse.Namespace, weights: Path, chats: Path, output: Path
) -> list[str]:
    """Return the command `primus finetune` with its defaults; `primus-off` is without turbo, and
    `primus-fp8` multiplies in FP8.
    """
    words = [str(weights), str(chats), "--mode", options.mode, "--steps", str(options.steps)]
    if variant == "primus-off":
        words += ["--turbo", "off"]
    if variant == "primus-fp8":
        words += ["--precision", "fp8"]
    words += [
        "packing=true",
        f"global_batch={options.sequences}",
        f"seq_len={options.length}",
        "finetune.save_weights=false",
        "--no-preflight",
        "--ranks",
        str(options.ranks),
        "--output",
        str(output),
        "--compile-cache",
        str(options.folder / "compile-cache"),
        *shlex.split(options.primus),
    ]
    return [sys.executable, "-m", "primus_images.cli.main", "finetune", *words]


def primus_figures(output: Path) -> dict[str, Any]:
    result = json.loads((output / "result.json").read_text())
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = [step for step in steps if step["step"] > WARMUP_STEPS]
    return {
        "passed": result.get("passed"),
        "optimizations": result.get("optimizations"),
        "tokens_per_second": round(median(step["tokens_per_second"] for step in timed)),
        "memory_gib": round(max(step["memory_gib"] for step in steps), 2),
        "loss": steps[-1]["loss"],
    }


def has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def run_trl(options: argparse.Namespace, weights: Path, chats: Path) -> None:
    """Fine-tune by TRL in this process, and write the end time of each step."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    words = options.trl.split("-")[1:]
    output = Path(os.environ["PRIMUS_BENCHMARK_OUTPUT"])
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.time())
            if int(os.environ.get("RANK", "0")) == 0:
                output.mkdir(parents=True, exist_ok=True)
                (output / "metrics.jsonl").write_text(json.dumps(ends))

    settings: dict[str, Any] = {}
    if "plain" in words:
        settings["gradient_checkpointing"] = False
    if "compile" in words:
        settings["torch_compile"] = True
    if "liger" in words:
        settings["use_liger_kernel"] = True
    if options.ranks > 1:
        settings["fsdp"] = "full_shard auto_wrap"
        layers = ["LlamaDecoderLayer"]
        settings["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": layers}
    model_settings: dict[str, Any] = {}
    if "flash4" in words:
        model_settings["attn_implementation"] = "flash_attention_4"
    if "bf16" in words or options.mode == "lora":
        model_settings["dtype"] = torch.bfloat16
    adapters = None
    if options.mode == "lora":
        from peft import LoraConfig

        adapters = LoraConfig(
            r=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    config = SFTConfig(
        output_dir=str(output),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.sequences // (options.micro * options.ranks),
        max_length=options.length,
        # primus trains the answers of chats alone.
        assistant_only_loss=True,
        packing=True,
        bf16=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        optim="adamw_torch_fused",
        model_init_kwargs=model_settings,
        **settings,
    )
    trainer = SFTTrainer(
        model=str(weights),
        args=config,
        train_dataset=load_dataset("json", data_files=str(chats), split="train"),
        peft_config=adapters,
        callbacks=[Clock()],
    )
    trainer.train()
    if int(os.environ.get("RANK", "0")):
        return
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    peak = torch.cuda.max_memory_reserved() / 2**30
    output.mkdir(parents=True, exist_ok=True)
    (output / "trl.json").write_text(
        json.dumps(
            {
                "ends": ends,
                "memory_gib": peak,
                "loss": losses[-1],
                "losses": losses,
                "tokens": options.sequences * options.length,
            }
        )
    )


def trl_figures(output: Path) -> dict[str, Any]:
    record = json.loads((output / "trl.json").read_text())
    ends = record["ends"]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    timed = seconds[WARMUP_STEPS - 1 :]
    return {
        "tokens_per_second": round(record["tokens"] / median(timed)),
        "memory_gib": round(record["memory_gib"], 2),
        "loss": record["loss"],
    }


if __name__ == "__main__":
    sys.exit(main())
