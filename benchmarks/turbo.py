"""Train a model at full size with one optimization after another, each variant in its own
processes.

    python -m benchmarks.turbo OUT.json --ranks 2 --steps 14 VARIANT [VARIANT ...]

A VARIANT is NAME@RECIPE:PRECISION, then any key=value arguments after further colons; ``bare``
among them runs torchtitan's own trainer without this project's code, ``profile`` writes the time of
each GPU kernel in one step, ``budget=N`` sets the compiler's activation memory budget, and
``NCCL_NAME=VALUE`` sets a variable of NCCL. RECIPE is a recipe's name, or RECIPE/BACKEND/MODE for
anything but torchtitan's pre-training. The file is written after every variant, and a failed
variant does not stop the others. Variants run in the given order. To repeat one, name it several
times, with others in between.

Ranks are forked from a process that has already imported the libraries, and share one compiler
cache, so most of the time is spent on training.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import host

PACKAGES = (
    "torch",
    "triton",
    "torchtitan",
    "torchao",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "transformers",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--what", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, default=150, help="seconds that one variant may take"
    )
    parser.add_argument(
        "--until", type=float, default=560, help="seconds after which no variant is started"
    )
    parser.add_argument("--runs", type=Path, default=Path("/tmp/primus-turbo"))
    options = parser.parse_args()
    options.wait = False
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch  # noqa: F401
    import torchtitan.train  # noqa: F401

    print(f"imported after {time.monotonic() - began:.1f} s", flush=True)
    results: list[dict[str, Any]] = (
        json.loads(options.out.read_text())["results"] if options.out.exists() else []
    )
    for variant in options.variants:
        if time.monotonic() - began > options.until:
            print(f"no time left for {variant}", flush=True)
            continue
        at = time.monotonic()
        try:
            result = one(variant, options.runs / f"{time.time_ns()}", options)
        except Exception as error:  # noqa: BLE001 - the next variant must run
            result = {
                "variant": variant,
                "passed": False,
                "error": f"{type(error).__name__}: {error}",
            }
            traceback.print_exc()
        result["wall_seconds"] = round(time.monotonic() - at, 1)
        results.append(result)
        shown = {
            k: result.get(k)
            for k in (
                "variant",
                "passed",
                "tokens_per_second",
                "memory_gib",
                "turbo",
                "wall_seconds",
            )
        }
        print(json.dumps(shown), flush=True)
        document = {
            "what": options.what,
            "date": time.strftime("%Y-%m-%d"),
            "host": host(),
            "python": platform.python_version(),
            "versions": {name: metadata.version(name) for name in PACKAGES if _installed(name)},
            "ranks": options.ranks,
            "warmup_steps": options.warmup,
            "results": results,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def one(variant: str, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one variant. Returns its figures and series."""
    from primus_images.recipes.resolve import resolve
    from primus_images.recipes.setting import Choices
    from primus_images.training.run import logs, ranks, start
    from primus_images.training.run.job import Job

    name, _, rest = variant.partition("@")
    recipe_name, precision, *words = rest.split(":")
    flags = {
        word
        for word in words
        if word in ("bare", "profile") or word.startswith(("budget=", "NCCL_"))
    }
    recipe_name, backend, mode = (
        recipe_name.split("/") + ["torchtitan", "pretrain"][recipe_name.count("/") :]
    )[:3]
    steps = next(
        (int(w.partition("=")[2]) for w in words if w.startswith("training.steps=")), options.steps
    )
    ranks_asked = next(
        (int(w.partition("=")[2]) for w in words if w.startswith("ranks=")), options.ranks
    )
    options = argparse.Namespace(**{**vars(options), "steps": steps, "ranks": ranks_asked})
    settings = [
        f"ranks={options.ranks}",
        f"training.steps={options.steps}",
        *(w for w in words if w not in flags and not w.startswith(("training.steps=", "ranks="))),
    ]
    recipe = resolve(
        recipe_name, settings, Choices(backend=backend, mode=mode, precision=precision, gpu="h200")
    )
    job = Job(name=name, recipe=recipe, output=output)
    output.mkdir(parents=True)
    start.prepare(job)
    config = _bare_config(job) if "bare" in flags else job.output / "torchtitan.toml"
    if backend != "torchtitan":
        config = Path(backend)
    environment = ranks.environment(job, os.environ) | {
        "TORCHINDUCTOR_CACHE_DIR": str(options.runs / "inductor"),
        "TRITON_CACHE_DIR": str(options.runs / "triton"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + time.time_ns() // 1000 % 20000),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(options.runs / "cute"),
        **dict(flag.split("=", 1) for flag in flags if flag.startswith("NCCL_")),
    }
    if options.wait:
        _wait_for_memory()
    options.wait = True
    began, began_at = time.monotonic(), time.time()
    watts = output / "watts.csv"
    query = [
        "nvidia-smi",
        "--query-gpu=timestamp,power.draw",
        "--format=csv,noheader,nounits",
        "-lms",
        "250",
    ]
    with watts.open("w") as file, subprocess.Popen(query, stdout=file) as meter:
        try:
            codes = _ranks(config, flags, environment, output, options)
        finally:
            meter.terminate()
    text = (output / "log0.txt").read_text(errors="replace")
    series = logs.read_steps(text)
    tokens = recipe.seq_len * recipe.global_batch // options.ranks
    times = _times(text) or _reckoned(output / "exact.jsonl", series.steps, tokens)
    # The profiler's data are read during the next step.
    left_out = (_PROFILED, _PROFILED + 1) if "profile" in flags else ()
    counted = [s for s in series.steps if s.step > options.warmup and s.step not in left_out]
    rates = sorted(s.tokens_per_second for s in counted)
    facts = (
        json.loads((output / "facts.json").read_text()) if (output / "facts.json").exists() else {}
    )
    passed = not any(codes) and len(series.steps) == options.steps
    if not passed:
        for rank in range(options.ranks):
            log = (output / f"log{rank}.txt").read_text(errors="replace").splitlines()
            print(
                "\n".join([*[line for line in log if "Error" in line][:6], *log[-12:]])[-3000:],
                flush=True,
            )
    profile = output / "profile.json"
    return {
        "name": name,
        "variant": rest,
        "passed": passed,
        "exit_codes": codes,
        "steps": options.steps,
        "seconds": round(time.monotonic() - began, 1),
        "ranks": options.ranks,
        "local_batch": recipe.local_batch,
        "seq_len": recipe.seq_len,
        "tokens_per_second": rates[len(rates) // 2] if rates else None,
        "slowest": rates[0] if rates else None,
        "fastest": rates[-1] if rates else None,
        "first_step_seconds": round(times[1] - began_at, 1) if 1 in times else None,
        "joules_per_token": _joules(watts, times, options, tokens) if passed else None,
        "memory_gib": max((s.memory_gib or 0 for s in series.steps), default=None),
        "turbo": facts.get("turbo", []),
        "turbo_calls": facts.get("turbo_calls", {}),
        "gpu_kernels": facts.get("gpu_kernels", []),
        "loss": [s.loss for s in series.steps],
        "grad_norm": [s.grad_norm for s in series.steps],
        "exact": (output / "exact.jsonl").read_text().splitlines()
        if (output / "exact.jsonl").exists()
        else [],
        "step_tokens_per_second": [s.tokens_per_second for s in series.steps],
        **({"kernel_ms": json.loads(profile.read_text())} if profile.exists() else {}),
        **({"idle": json.loads((output / "idle.json").read_text())} if profile.exists() else {}),
    }


def _wait_for_memory() -> None:
    """Wait until the processes of the previous variant have released their memory."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    for _ in range(20):
        used = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        if all(int(mebibytes) < 2000 for mebibytes in used):
            return
        time.sleep(0.5)


def _times(text: str) -> dict[int, float]:
    """Return step → the time of its log line."""
    found = re.findall(
        r"\[titan\] (\S+ \S+),(\d+) .*step: +(\d+) ", re.sub(r"\x1b\[[\d;]*m", "", text)
    )
    return {
        int(step): time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1e3
        for at, ms, step in found
    }


def _reckoned(exact: Path, steps: Any, tokens: int) -> dict[int, float]:
    """Return the same for our own loop, whose log has no times, counted back from the time of the
    last step.
    """
    found: dict[int, float] = {}
    at = exact.stat().st_mtime if exact.exists() else 0.0
    for step in reversed(steps):
        found[step.step] = at
        at -= tokens / step.tokens_per_second
    return found


def _joules(
    watts: Path, times: dict[int, float], options: argparse.Namespace, tokens: int
) -> float | None:
    """Return joules per token: the GPUs' mean power during the counted steps ÷ tokens per second.
    ``tokens`` is per step.
    """
    first, last = times[options.warmup], times[options.steps]
    drawn: list[float] = []
    for line in watts.read_text().splitlines():
        at, _, power = line.partition(", ")
        with contextlib.suppress(ValueError):
            second, _, fraction = at.partition(".")
            when = time.mktime(time.strptime(second, "%Y/%m/%d %H:%M:%S")) + float("0." + fraction)
            if first <= when <= last:
                drawn.append(float(power))
    if not drawn:
        return None
    seconds, steps = last - first, int(options.steps - options.warmup)
    return round(sum(drawn) / len(drawn) * seconds / (steps * tokens), 5)


_PROFILED = 8


def _bare_config(job: Any) -> Path:
    """Write a configuration for torchtitan's own model of the same size, with its own data loader
    and the same text.
    """
    from primus_images.training.backends.torchtitan import render

    corpus = job.output / "corpus"
    corpus.mkdir()
    (corpus / "corpus.jsonl").write_bytes(job.recipe.asset("corpus").read_bytes())
    text = (
        render.toml(job)
        .replace('flavor = "recipe"', 'flavor = "8B"')
        .replace('"recipe_corpus"', '"c4_test"')
    )
    (job.output / "bare.toml").write_text(
        text.replace(f'"{job.recipe.asset("corpus")}"', f'"{corpus}"')
    )
    return Path(job.output / "bare.toml")


def _ranks(
    config: Path, flags: set[str], environment: dict[str, str], output: Path, options: Any
) -> list[int]:
    """Fork the ranks and wait. If one fails or the time is up, end the others."""
    sys.stdout.flush()
    running: dict[int, int] = {}
    for rank in range(options.ranks):
        child = os.fork()
        if child == 0:
            _rank(
                config,
                flags,
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                output,
                rank,
            )
        running[child] = rank
    codes = [-1] * options.ranks
    deadline = time.monotonic() + options.limit
    while running:
        found, status = os.waitpid(-1, os.WNOHANG)
        if found in running:
            codes[running.pop(found)] = os.waitstatus_to_exitcode(status)
            # A data-loading process may outlive its rank for a while, and keeps its memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(found, signal.SIGKILL)
        if any(code > 0 for code in codes) or time.monotonic() > deadline:
            time.sleep(2)
            for child in running:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.1)
    return codes


def _rank(
    config: Path, flags: set[str], environment: dict[str, str], output: Path, rank: int
) -> None:
    """In a child process: train, and never return."""
    code = 1
    try:
        os.setsid()
        file = os.open(output / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["train", "--job.config_file", str(config)]
        from torchtitan.config import ConfigManager

        # Its default was taken from sys.argv when torchtitan was imported.
        ConfigManager.parse_args.__defaults__ = (sys.argv[1:],)
        for flag in flags:
            if flag.startswith("budget="):
                from torch._functorch import config as functorch

                functorch.activation_memory_budget = float(flag.partition("=")[2])
        if config.name in ("fsdp", "finetune", "megatron", "flux"):
            if "profile" in flags:
                _profile_own_loop(output)
            _own_loop(config.name, output)
        elif "bare" in flags:
            from torchtitan.train import Trainer, main as train

            train(_profiled(Trainer, output) if "profile" in flags else Trainer)
        else:
            from primus_images.training.backends.torchtitan import entry
            from primus_images.training.run import facts

            # Hashing 32 GB of weights takes as long as the steps and is irrelevant to speed.
            facts.digest = lambda parts: ""
            made = entry.observed_trainer
            if "profile" in flags:
                entry.observed_trainer = lambda *a, **k: _profiled(made(*a, **k), output)
            entry.main(config.parent)
        code = 0
    except BaseException:  # noqa: BLE001 - the log says it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _own_loop(backend: str, output: Path) -> None:
    from importlib import import_module

    from primus_images.training.backends.loop import process
    from primus_images.training.run import facts

    facts.digest = lambda parts: ""
    entry = import_module(f"primus_images.training.backends.{backend}.entry")
    if backend == "megatron":
        entry.main(str(output))
    else:
        process.main(str(output), entry.main)


def _profiled(trainer: type, output: Path) -> type:
    """Return a subclass of ``trainer`` that writes the time of each GPU kernel in one step."""
    import torch

    class Profiled(trainer):  # type: ignore[misc]
        def train_step(self, iterator: Any) -> None:
            if self.step != _PROFILED or os.environ["RANK"] != "0":
                super().train_step(iterator)
                return
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                super().train_step(iterator)
                torch.cuda.synchronize()
            _write_profile(profile, output)

    return Profiled


def _write_profile(profile: Any, output: Path) -> None:
    (output / "idle.json").write_text(json.dumps(_idle(profile)))
    rows = [(e.self_device_time_total / 1e3, e.count, e.key) for e in profile.key_averages()]
    rows = sorted(((round(ms, 2), n, key[:150]) for ms, n, key in rows if ms > 0.3), reverse=True)
    (output / "profile.json").write_text(json.dumps(rows[:60]))


def _profile_own_loop(output: Path) -> None:
    """Do the same for our own loop: from the forward pass of one step to the end of its update."""
    import torch

    from primus_images.training.backends.loop.session import Sharded

    forward_backward, step = Sharded.forward_backward, Sharded.step
    running: list[Any] = []
    count = 0

    def profiled_forward_backward(self: Any, *words: Any) -> Any:
        nonlocal count
        count += 1
        if count == _PROFILED and os.environ["RANK"] == "0":
            running.append(
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            )
            running[0].start()
        return forward_backward(self, *words)

    def profiled_step(self: Any, *words: Any) -> Any:
        made = step(self, *words)
        if running:
            torch.cuda.synchronize()
            profile = running.pop()
            profile.stop()
            _write_profile(profile, output)
        return made

    Sharded.forward_backward, Sharded.step = profiled_forward_backward, profiled_step  # type: ignore[assignment,method-assign]


def _idle(profile: Any) -> dict[str, Any]:
    """Return the time without any kernel except collectives: the total, and the longest pauses with
    the kernels before and after.
    """
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()[:80])
        for event in profile.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type())
        and "nccl" not in event.name()
        and event.duration_ns()
        and not event.name().startswith(("ProfilerStep", "FSDP", "Optimizer", "aten::"))
    )
    pauses, end, before = [], spans[0][1], spans[0][2]
    for start, stop, name in spans[1:]:
        if start > end:
            pauses.append((round((start - end) / 1e6, 2), before, name))
        if stop > end:
            end, before = stop, name
    total = round(sum(ms for ms, _, _ in pauses), 1)
    return {
        "ms": total,
        "step_ms": round((end - spans[0][0]) / 1e6, 1),
        "longest": sorted(pauses, reverse=True)[:14],
    }


if __name__ == "__main__":
    sys.exit(main())
