"""Statements about an image, made from its documents."""

import json

from primus_images.release.artifact import Document
from primus_images.release.documents import IN_TOTO, LOCK, SPDX, VALIDATION
from primus_images.release.git import Checkout
from primus_images.release.statement import (
    SIGNATURE,
    TEST_RESULT,
    statements,
    test_result as result_of,
)
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import Machine
from records import jobs, record

DIGEST = f"sha256:{'a' * 64}"


def test_a_test_result_counts_no_skipped_check() -> None:
    made = record(
        passed=False,
        verdicts=(
            Verdict("loss falls", True, "it does"),
            Verdict("exit code", False, "1"),
            Verdict("resume", False, "base failed", skipped=True),
        ),
        jobs=jobs("base", "resume", without="resume"),
        gpu="mi300x",
        machine=Machine(gpus=("MI300X",), driver="6.12"),
        facts={"seed": 7, "matmul_dtypes": {"bf16": 2}, "loaded": ["torch"]},
    )
    said = result_of(made, b"file")
    assert (said["result"], said["passedTests"], said["failedTests"]) == (
        "FAILED",
        ["loss falls"],
        ["exit code"],
    )
    about = said["primus"]
    assert about["runs"] == ["base"]
    assert about["hardware"] == {
        "gpu": "mi300x",
        "gpus": ["MI300X"],
        "driver": "6.12",
        "firmware": "",
    }
    assert about["precision"] == {
        "matmul_dtypes": {"bf16": 2},
        "matmul_flops": None,
        "gpu_kernels": None,
    }
    assert about["seeds"] == [7]
    assert about["recipe"].keys() & {"settings", "description"} == set()
    assert "wrap" not in about
    assert said == json.loads(json.dumps(said)), "as a signed one is read"


def test_each_document_has_a_statement_and_the_signature_names_all() -> None:
    validation = json.dumps(record().as_json()).encode()
    documents = [
        Document(media_type=LOCK, name="lock.json", data=b"{}"),
        Document(media_type=SPDX, name="sbom.spdx.json", data=b'{"packages": []}'),
        Document(media_type=IN_TOTO, name="provenance.json", data=b'{"predicate": 5}'),
        Document(media_type=VALIDATION, name="validation.json", data=validation),
    ]
    said = statements(documents, "v26.11-cpu", DIGEST)
    assert [row["predicateType"] for row in said] == [
        SIGNATURE,
        "https://spdx.dev/Document",
        "https://slsa.dev/provenance/v1",
        TEST_RESULT,
    ]
    assert list(said[0]["predicate"]["documents"]) == [document.name for document in documents]
    assert said[2]["predicate"] == 5
    for row in said:
        assert row["subject"] == [{"name": "v26.11-cpu", "digest": {"sha256": "a" * 64}}]


def test_the_version_of_a_checkout_says_if_it_was_edited() -> None:
    assert Checkout("c", []).version == "c"
    assert Checkout("c", ["README.md"]).version == "c+edited"
    assert Checkout(None, []).version == "unknown"
