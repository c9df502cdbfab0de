"""Compare losses of `primus finetune` with those of a plain loop in float32 on the same samples.

    python -m benchmarks.finetune_loss OUT.json --model llama3.2-1b --steps 200

The loop is PyTorch and transformers alone: no compiler, no fused kernel, a mask of all pairs of
tokens. It takes the samples and the learning rate of each step from the run. Weights and chats are
those of benchmarks.finetune. With `--control`, a second loop computes in BF16 from the weights in
float32: what it differs by is due to BF16, not to `primus finetune`.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.finetune import SIZES, inputs_of
from benchmarks.gpu import host
from primus_images.training.backends.loop.config import RankJob, read_job
from primus_images.training.backends.loop.data import text

# The steps whose mean loss is compared.
LAST = 20


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its job, and the loss and learning rate of each step."""

    job: RankJob
    command: str
    losses: list[float]
    rates: list[float]
    optimizations: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--what", default="")
    parser.add_argument("--model", choices=SIZES, default="llama3.2-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--chats", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=2, help="packed sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a packed sequence")
    parser.add_argument("--control", action="store_true", help="run the loop in BF16, too")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/primus-finetune"))
    options = parser.parse_args()
    weights, chats = inputs_of(options)
    run = finetuned(options, weights, chats)
    reference = plain_losses(run, weights, torch.float32)
    differences = [abs(loss / exact - 1) for loss, exact in zip(run.losses, reference, strict=True)]
    last = fmean(run.losses[-LAST:]) / fmean(reference[-LAST:]) - 1
    document = {
        "what": options.what,
        "date": time.strftime("%Y-%m-%d"),
        "command": run.command,
        "host": host(),
        "optimizations": run.optimizations,
        "difference_of_last_steps": round(last, 6),
        "largest_difference_of_a_step": round(max(differences), 6),
        "losses": [round(loss, 5) for loss in run.losses],
        "float32_losses": [round(loss, 5) for loss in reference],
    }
    if options.control:
        losses = plain_losses(run, weights, torch.bfloat16)
        document["bf16_losses"] = [round(loss, 5) for loss in losses]
        document["difference_of_control"] = round(
            fmean(losses[-LAST:]) / fmean(reference[-LAST:]) - 1, 6
        )
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"the last {LAST} steps: {last:+.3%}; the worst step: {max(differences):.3%}")


def finetuned(options: argparse.Namespace, weights: Path, chats: Path) -> Run:
    """Run `primus finetune` with its defaults."""
    output = options.folder / f"loss-{time.time_ns()}"
    words = ["finetune", str(weights), str(chats), "--mode", "full", "--steps", str(options.steps)]
    words += ["packing=true", f"global_batch={options.sequences}", f"seq_len={options.length}"]
    words += ["finetune.save_weights=false", "--no-preflight", "--ranks", "1"]
    command = [sys.executable, "-m", "primus_images.cli.main", *words, "--output", str(output)]
    subprocess.run(command, check=True)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    result = json.loads((output / "result.json").read_text(encoding="utf-8"))
    return Run(
        job=read_job(output),
        command=" ".join(["primus", *words]).replace(f"{options.folder}/", ""),
        losses=[step["loss"] for step in steps],
        rates=[step["lr"] for step in steps],
        optimizations=result["optimizations"],
    )


def plain_losses(run: Run, weights: Path, dtype: torch.dtype) -> list[float]:
    """Return the loss of each step of the plain loop, which computes in ``dtype``.

    The weights that are updated are in float32.
    """
    config = run.job.training
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).to(device)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype).to(device).train()
    data = text(run.job, packing=True)
    optimizer = torch.optim.AdamW(
        trained.parameters(),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=True,
    )
    losses = []
    for step, rate in enumerate(run.rates):
        batch = data.batch(step * config.global_batch_size, config.global_batch_size)
        tensors = {name: tensor.to(device) for name, tensor in batch.items()}
        copy_weights(trained, model)
        losses.append(backward(model, tensors))
        for parameter, copied in zip(trained.parameters(), model.parameters(), strict=True):
            assert copied.grad is not None
            parameter.grad = copied.grad.float()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), config.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses


def copy_weights(trained: torch.nn.Module, model: torch.nn.Module) -> None:
    """Copy the weights to ``model``, whose gradients are dropped."""
    with torch.no_grad():
        for parameter, copied in zip(trained.parameters(), model.parameters(), strict=True):
            copied.copy_(parameter)
            copied.grad = None


def backward(model: Any, batch: dict[str, Tensor]) -> float:
    """Compute the gradients of a batch. Returns its mean loss."""
    logits = model(
        input_ids=batch["input_ids"],
        position_ids=batch["positions"],
        attention_mask=same_document(batch["positions"]),
        use_cache=False,
    ).logits
    labels = batch["labels"].flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels)
    loss.backward()
    return float(loss.detach())


def same_document(positions: Tensor) -> Tensor:
    """Return which earlier tokens each token sees: bool [samples, 1, seq_len, seq_len]."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


if __name__ == "__main__":
    main()
