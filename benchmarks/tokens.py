"""Tokenizing a JSON Lines corpus by ``primus_images.training.text.tokens`` and by
``datasets.map(num_proc=…)`` with the same tokenizer, in alternating runs.

``python -m benchmarks.tokens TOKENIZER_FOLDER [MEGABYTES [REPETITIONS]]`` needs an image's Python
packages. The corpus is made of the documentation and the programs that are installed.
Each run is a process of its own, on two processors. A run's time is that of everything after the
imports; ``main_cpu_seconds`` is that of its main process, which more processors do not shorten. Its
memory is the largest sum over its processes, in which what several share counts once.
Where others use the processors, too, compare ``cpu_seconds``.
"""

import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from primus_images.training.run.processes import processes

RESULT = Path(__file__).parent / "results/tokens.json"
PROCESSORS = 2
SUFFIXES = (".py", ".txt", ".md", ".rst", ".html", ".h", ".pm", "")
LARGEST = 500_000
# The memory of a process, where that of several is divided by their number, in KiB.
_SHARE = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def texts() -> Iterator[str]:
    """Yield the texts of installed documentation and programs."""
    for root in ("/usr/share/doc", "/usr/lib/python3", "/usr/include", sys.prefix):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
                continue
            if path.stat().st_size > LARGEST:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip() and "\0" not in text:
                yield text


def written(folder: Path, megabytes: int) -> Path:
    """Write a corpus, one text a line."""
    path = folder / f"{megabytes}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for text in texts():
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if file.tell() > megabytes * 1_000_000:
                break
    return path


class Times(NamedTuple):
    """Seconds that passed, and those of the processors in this process."""

    seconds: float
    main_cpu_seconds: float

    @classmethod
    def now(cls) -> "Times":
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, began: "Times") -> "Times":
        now = cls.now()
        return cls(round(now[0] - began[0], 2), round(now[1] - began[1], 2))


def primus(corpus: str, tokenizer: str, folder: str) -> "Times":
    """Write the files that ranks map. Returns the times."""
    from primus_images.training.text import encoder, tokens
    from primus_images.training.text.corpus import Corpus

    encoder.without_torch()
    import datasets  # noqa: F401  not counted, as on the other side
    import transformers  # noqa: F401

    began = Times.now()
    reader = tokens.Reader(Corpus(name=corpus, tokenizer=tokenizer))
    tokens.write(reader, Path(folder), progress=print)
    return Times.since(began)


def hugging_face(corpus: str, tokenizer: str, folder: str) -> "Times":
    """Write Arrow files, by a fast tokenizer on batches of 1,000 documents. Returns the times."""
    from primus_images.training.text import encoder

    encoder.without_torch()
    import datasets
    import transformers

    began = Times.now()
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)

    def encoded(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {
            "input_ids": fast([f"{text}{fast.eos_token}" for text in batch["text"]])["input_ids"]
        }

    rows = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=folder)
    rows.map(encoded, batched=True, remove_columns=["text"], num_proc=PROCESSORS)
    return Times.since(began)


def memory_of(process: int) -> float:
    """Return the MiB that a process and those that it started use now."""
    parents = {number: parent for number, (parent, _) in processes().items()}
    total = 0
    for number in parents:
        ancestor = number
        while ancestor not in (0, process):
            ancestor = parents.get(ancestor, 0)
        if ancestor != process:
            continue
        with suppress(OSError):  # it has ended
            found = _SHARE.search(Path(f"/proc/{number}/smaps_rollup").read_text())
            if found:
                total += int(found[1])
    return total / 1024


def measured(name: str, corpus: Path, tokenizer: str) -> dict[str, float]:
    """Run ``name`` in a process of its own."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tokens", name]
        command += [str(corpus), tokenizer, folder]
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "true" if name == "primus" else "false",
            "HF_HOME": folder,
            "HF_HUB_OFFLINE": "1",
        }
        peak = 0.0
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            while run.poll() is None:
                peak = max(peak, memory_of(run.pid))
                time.sleep(1)
            assert run.stdout is not None
            if run.returncode:
                raise SystemExit(f"{name} ended with exit code {run.returncode}")
            result: dict[str, float] = json.loads(run.stdout.read().splitlines()[-1])
    result["peak_mib"] = round(peak)
    return result


def main() -> None:
    """Measure both, and write the result."""
    measure = {"primus": primus, "hugging_face": hugging_face}.get(sys.argv[1])
    if measure:
        times = measure(*sys.argv[2:])
        cpu = time.process_time()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu += ended.ru_utime + ended.ru_stime
        print(json.dumps({**times._asdict(), "cpu_seconds": round(cpu, 2)}))
        return
    tokenizer = sys.argv[1]
    given = [int(word) for word in sys.argv[2:]]
    megabytes, repetitions = (*given, *(300, 3)[len(given) :])
    processors = sorted(os.sched_getaffinity(0))[:PROCESSORS]
    os.sched_setaffinity(0, processors)
    runs: dict[str, list[dict[str, float]]] = {"primus": [], "hugging_face": []}
    with TemporaryDirectory() as folder:
        corpus = written(Path(folder), megabytes)
        size = corpus.stat().st_size
        for _ in range(repetitions):
            for name, rows in runs.items():
                rows.append(measured(name, corpus, tokenizer))
                print(name, rows[-1], flush=True)
    medians = {}
    for name, rows in runs.items():
        for key in ("seconds", "cpu_seconds", "main_cpu_seconds"):
            medians[name, key] = statistics.median(row[key] for row in rows)
    document = {
        "generated": "by `python -m benchmarks.tokens`; do not edit",
        "processors": PROCESSORS,
        "python": platform.python_version(),
        "corpus_mb": round(size / 1e6, 1),
        "runs": runs,
    }
    for key in ("seconds", "cpu_seconds"):
        ratio = medians["hugging_face", key] / medians["primus", key]
        document[f"primus_by_datasets_{key}"] = round(ratio, 2)
    main = medians["primus", "main_cpu_seconds"]
    document["primus_main_cpu_seconds_per_gb"] = round(main / size * 1e9, 2)
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
