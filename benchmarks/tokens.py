"""Tokenizing a JSON Lines corpus by ``primus_images.training.text.tokens`` and by ``datasets.map``,
in alternating runs.

``python -m benchmarks.tokens TOKENIZER_FOLDER [MEGABYTES [REPETITIONS]]`` needs an image's Python
packages. Each run is a process of its own on two processors; where there are four, both sides run
at the same time. A run's time is that of everything after the imports, its memory the largest
resident size. Where others use the processors, too, compare ``cpu_seconds``.
"""

import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

RESULT = Path(__file__).parent / "results/tokens.json"
PROCESSORS = 2


def written(folder: Path, megabytes: int) -> Path:
    """Write documents of 20 to 2,000 words, drawn from 20,000."""
    draw = random.Random(1)
    words = [
        "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 10)))
        for _ in range(20_000)
    ]
    path = folder / f"{megabytes}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(
                json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 2000)))}) + "\n"
            )
    return path


def primus(corpus: str, tokenizer: str, folder: str) -> float:
    """Write the files that ranks map. Returns the seconds."""
    from primus_images.training.text import encoder, tokens
    from primus_images.training.text.corpus import Corpus

    encoder.without_torch()
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    began = time.perf_counter()
    tokens.write(
        tokens.Reader(Corpus(name=corpus, tokenizer=tokenizer)), Path(folder), progress=print
    )
    return time.perf_counter() - began


def hugging_face(corpus: str, tokenizer: str, folder: str) -> float:
    """Write Arrow files, by a fast tokenizer on batches of 1,000 documents. Returns the seconds."""
    from primus_images.training.text import encoder

    encoder.without_torch()
    import datasets
    import transformers

    began = time.perf_counter()
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    rows = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=folder)
    rows.map(
        lambda batch: {
            "input_ids": fast([f"{text}{fast.eos_token}" for text in batch["text"]])["input_ids"]
        },
        batched=True,
        remove_columns=["text"],
    )
    return time.perf_counter() - began


def measured(
    name: str, corpus: Path, tokenizer: str, processors: Sequence[int]
) -> dict[str, float]:
    """Run ``name`` in a process of its own on ``processors``."""
    with TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.tokens",
            name,
            str(corpus),
            tokenizer,
            folder,
        ]
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "true",
            "HF_HOME": folder,
            "HF_HUB_OFFLINE": "1",
        }
        # Threads have processors of their own in Linux, and what they start inherits these.
        os.sched_setaffinity(0, processors)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure both, and write the result."""
    if measure := {"primus": primus, "hugging_face": hugging_face}.get(sys.argv[1]):
        seconds = measure(*sys.argv[2:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cpu = round(time.process_time(), 2)
        print(
            json.dumps({"seconds": round(seconds, 2), "cpu_seconds": cpu, "peak_mib": round(peak)})
        )
        return
    tokenizer = sys.argv[1]
    megabytes, repetitions = (*map(int, sys.argv[2:]), *(1000, 3)[len(sys.argv) - 2 :])
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[:PROCESSORS])
    runs: dict[str, list[dict[str, float]]] = {"primus": [], "hugging_face": []}
    places = [processors[number * PROCESSORS :][:PROCESSORS] for number in range(len(runs))]
    apart = all(len(place) == PROCESSORS for place in places)
    with TemporaryDirectory() as folder:
        small = measured("primus", written(Path(folder), 25), tokenizer, places[0])
        corpus = written(Path(folder), megabytes)
        for _ in range(repetitions):
            with ThreadPoolExecutor(len(runs) if apart else 1) as pool:
                waiting = {
                    name: pool.submit(
                        measured, name, corpus, tokenizer, place if apart else places[0]
                    )
                    for name, place in zip(runs, places, strict=True)
                }
                for name, each in waiting.items():
                    runs[name].append(each.result())
    median = {
        name: statistics.median(row["seconds"] for row in rows) for name, rows in runs.items()
    }
    document = {
        "generated": "by `python -m benchmarks.tokens`; do not edit",
        "processors": PROCESSORS,
        "at_the_same_time": apart,
        "python": platform.python_version(),
        "corpus_mb": megabytes,
        "runs": runs,
        "of_25_mb": small,
        "speed_of_primus_by_datasets": round(median["hugging_face"] / median["primus"], 2),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
