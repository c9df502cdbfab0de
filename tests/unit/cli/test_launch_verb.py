"""`primus launch`: what it renders, says and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.image.train import passed_on
from primus_images.cli.main import main
from primus_images.cli.verb import parser_of
from primus_images.launch import kubernetes, slurm
from primus_images.launch.plan import Plan
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices


def plan(*words: str, nodes: int = 8, gpu: str = "mi300x", recipe: str = "llama3.1-70b") -> Plan:
    return Plan(recipe=resolve(recipe, words, Choices(nodes=nodes, gpu=gpu)))


@pytest.mark.parametrize("gpu", [["--gpu", "mi300x", "--image", "a"], ["--image", "a:v1-mi300x"]])
def test_weights_are_fine_tuned_in_place_of_a_recipe(
    gpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (
        Path(__file__).parents[3] / "recipes/published/meta-llama--Llama-3.1-8B.json"
    ).read_text()
    (tmp_path / "config.json").write_text(config)
    files, words = (
        [str(tmp_path), f"{tmp_path}/config.json"],
        ["tokenizer=mock", *gpu],
    )
    assert (
        main(["launch", "slurm", "finetune", *files, *words, "global_batch=24", "--dry-run"]) == 0
    )
    text = capsys.readouterr().out
    assert all(
        p in text
        for p in (f"weights={files[0]} ", f"corpus={files[1]} ", f"-v {files[1]}:", "batch_size=3")
    )


def test_every_corpus_of_a_mixture_is_mounted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = Path(__file__).parents[3] / "recipes/published/meta-llama--Llama-3.1-8B.json"
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(published.read_text())
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}')
    mixture = tmp_path / "mix.yaml"
    mixture.write_text("- {corpus: chats.jsonl}\n- {corpus: hf:owner/texts}\n")
    words = ["tokenizer=mock", "--gpu", "mi300x", "--image", "a", "--dry-run"]
    assert main(["launch", "slurm", "finetune", str(weights), str(mixture), *words]) == 0
    text = capsys.readouterr().out
    assert f"-v {mixture}:" in text
    assert f"-v {tmp_path / 'chats.jsonl'}:" in text


def test_options_of_train_are_passed_on_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--accept-change",
        "global_batch",
        "--resume-from",
        "/a/step-5",
        "--wrap",
        'nsys profile -o "a b"',
        "--force",
        "--stall-timeout",
        "0",
        "--judge-every",
        "7",
        "--log",
        "wandb",
        "--compile-cache",
        "/tmp",
        "--burn-in",
        "10m",
    ]
    parser, rest = parser_of("train"), ["llama3.1-8b", *words[2:4]]
    passed = passed_on(parser.parse_args([*rest, *words]))
    assert parser.parse_args([*rest, *passed]) == parser.parse_args([*rest, *words])
    assert len(passed) == 8
    start = [
        "launch",
        "slurm",
        "llama3.1-8b",
        "--nodes",
        "2",
        "--gpu",
        "mi300x",
        "--image",
        "a",
        "--dry-run",
    ]
    assert main([*start, *words]) == 0
    text = capsys.readouterr().out
    assert all(word.partition("=")[0] in text for word in passed)
    # A judged run begins again, and the other nodes wait for the judge.
    assert main(["launch", "slurm", "llama3-proxy", *start[3:], "--judge", "--gpu", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "\nsteps=0" in text
    assert "--wait=0 " in text
    # The job alone knows how many steps its epochs are: an attempt continues from any checkpoint.
    assert main([*start, "epochs=2"]) == 0
    assert f"\nsteps={2**62}\n" in capsys.readouterr().out
    for refused in (
        "--judge --resume-from /a",
        "--accept-change all",
        "--burn-in 1m --no-preflight",
        "--burn-in 1m --gpu cpu --proxy",
        "--judge-every 9 --backend megatron",
        "--judge-every 2000",
        "--judge-every 2 --judge --gpu cpu --proxy",
    ):
        assert main([*start, *refused.split()]) == 2, refused
        assert f"primus launch: {refused.split()[0]}" in capsys.readouterr().err


def test_no_value_of_the_environment_reaches_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecretvery")
    assert (
        main(
            [
                "launch",
                "slurm",
                "llama3.1-8b",
                "--gpu",
                "mi300x",
                "--nodes",
                "2",
                "--image",
                "a",
                "--dry-run",
            ]
        )
        == 0
    )
    assert "verysecret" not in capsys.readouterr().out


def test_the_gpu_is_the_images_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", "llama3.1-70b", "--nodes", "8", "--precision", "fp8", "--dry-run"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "--gpu=mi300x" in told.out
    assert "resolved for mi300x" in told.err
    assert main([*words, "--image", "rocm/primus:v26.11-mi355x-preview"]) == 0
    assert "--gpu=mi355x" in capsys.readouterr().out


@pytest.mark.parametrize("system", ["slurm", "k8s"])
def test_what_does_not_fit_its_gpu_is_refused_before_submission(
    system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(*words: str) -> int:
        return main(["launch", system, *words, "--image", "a", "--dry-run"])

    large = ("deepseek-v3", "--precision", "fp8", "--nodes", "4", "--gpu", "mi300x")
    activations = ("llama3.1-8b", "--gpu", "mi300x", "local_batch=16")
    for words, why in (
        (large, "787 GiB per rank, and AMD Instinct MI300X has 192"),
        (activations, "batch of 16"),
    ):
        assert code(*words) == 3
        refused = capsys.readouterr()
        assert refused.out == ""
        assert why in refused.err
        assert "--force" in refused.err
        assert code(*words, "--force") == 0
        capsys.readouterr()
    assert code(*large, "--proxy") == 0
    assert code("llama3.1-8b", "--gpu", "cpu", "--proxy") == 0


def test_the_document_holds_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "launch",
        "slurm",
        "deepseek-16b",
        "--gpu",
        "mi300x",
        "--nodes",
        "2",
        "--dry-run",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["world_size"] == 16
    assert found["plan"]["mesh"]["ep"] == 8
    assert 2**30 < found["plan"]["memory_bytes_per_gpu"] < 192 * 2**30
    assert found["plan"]["tokens_per_step"] == found["plan"]["global_batch"] * 4096
    assert found["script"].startswith("#!/bin/bash\n")


def test_containers_see_the_run_that_is_continued(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "llama3.1-8b",
        "--gpu",
        "mi300x",
        "--image",
        "a/b:c",
        "--container",
        "docker",
        "--dry-run",
    ]
    assert main(["launch", "slurm", *words, "--resume-from", "/shared/run-7"]) == 0
    out = capsys.readouterr().out
    assert "/shared/run-7:/shared/run-7" in out
    assert "resume=/shared/run-7" in out


def test_a_job_reads_tuned_gemms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "slurm", "llama3.1-8b", "--gpu", "mi300x", "--image", "a/b:c", "--dry-run"]
    assert main([*words, "--container", "docker", "--tuned-gemms", "tuned"]) == 0
    out = capsys.readouterr().out
    assert f"--tuned-gemms={tmp_path}/tuned" in out
    assert f"-v {tmp_path}/tuned:{tmp_path}/tuned" in out


@pytest.mark.parametrize(
    ("image", "code", "said"),
    [
        ("rocm/primus:v26.11-cpu", 2, "named for the CPU, but the nodes have GPUs (mi300x)"),
        ("r.example:5000/cpu/primus:v26.11-cpu-mine", 2, "named for the CPU"),
        ("rocm/primus:v26.11-mi300x-preview", 0, "is named as a preview"),
        ("cpu/primus:v26.11-mi300x", 0, ""),
        ("primus", 0, ""),
    ],
)
def test_images_for_other_nodes_are_named(
    image: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "k8s", "llama3.1-8b", "--gpu", "mi300x", "--dry-run", "--image", image]
    assert main(words) == code
    err = capsys.readouterr().err
    assert said in err
    assert said or not err


SLURM = ["launch", "slurm", "llama3.1-8b", "--gpu", "mi300x", "--dry-run"]
KUBERNETES = ["launch", "k8s", "llama3.1-8b", "--gpu", "mi300x", "--image", "a", "--dry-run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SLURM, "--image", "a/primus:v1-mi355x"], "the image is named for mi355x, but the nodes"),
        ([*SLURM, "--image", "a/primus:v1-mi325x"], ""),
        ([*SLURM, "--image", "a", "--container", "none"], "without a container, the nodes run"),
        ([*SLURM, "--container", "none"], ""),
        ([*SLURM, "--image", "a", "--env", "ABSENT"], "--env ABSENT: it is not set here"),
        ([*SLURM, "--image", "a", "--env", "ABSENT=1", "--env", "HOME"], ""),
        ([*KUBERNETES, "--restarts", "3"], "--restarts has no effect without --claim"),
        ([*KUBERNETES, "--restarts", "3", "--claim", "runs"], ""),
        (KUBERNETES, ""),
    ],
)
def test_options_that_contradict_each_other_are_pointed_out(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    assert main(words) == 0
    err = capsys.readouterr().err
    assert f"primus launch: {said}" in err if said else not err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SLURM, "--namespace", "n"], "--namespace cannot be used with primus launch slurm"),
        ([*KUBERNETES, "--partition", "p"], "--partition cannot be used with primus launch k8s"),
        ([*KUBERNETES, "--tuned-gemms", "tuned"], "name the absolute path that it has in the pods"),
        (["launch", "slurm", "finetune", "--image", "a"], "primus launch slurm finetune WEIGHTS"),
        (["launch", "slurm", "finetune", "w", "--gpu", "mi300x"], "needs the weights"),
        (
            ["launch", "k8s", "finetune", "w", "d", "--gpu", "mi300x"],
            "on Kubernetes, name a",
        ),
        (["launch", "slurm", "finetune", "w", "d"], "needs the weights"),
    ],
)
def test_what_a_system_cannot_do_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_job_is_handed_over_with_its_plan_above_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[tuple[Path, bool]] = []

    def submit(text: str, output: Path, *, wait: bool) -> tuple[int, str]:
        given.append((output, wait))
        return 5, "42"

    monkeypatch.setattr(slurm, "submit", submit)
    words = [*SLURM[:-1], "--image", "a"]
    assert main(words) == 5
    said = capsys.readouterr()
    runs = tmp_path / "runs"
    assert said.out == f"job 42 → {runs / '42'}, log {runs}/slurm-42.txt\n"
    assert "checkpoints" in said.err
    assert main([*words, "--wait", "--output", "mine", "--json"]) == 5
    said = capsys.readouterr()
    assert said.err == ""
    document = json.loads(said.out)
    assert (document["job"], document["exit_code"]) == (42, 5)
    assert given == [(runs, False), (tmp_path / "mine", True)]
    assert main([*words, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["exit_code"] is None


def test_a_job_of_kubernetes_is_applied_under_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created: list[Any] = []
    monkeypatch.setattr(kubernetes, "create", created.append)
    words = [*KUBERNETES[:-1], "--namespace", "team", "--name", "mine"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out == "applied job mine in namespace team\n"
    assert "security     Pod Security restricted" in said.err
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["namespace"]) == ("mine", "team")
    assert [row["kind"] for row in created[0]] == ["Service", "Job"]
    shown = [*KUBERNETES, "--tuned-gemms", "/runs/tuned"]
    assert main(shown) == 0
    assert "# security     Pod Security" in capsys.readouterr().out
