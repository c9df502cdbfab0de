"""Strategic merge patches: what becomes of a manifest."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.errors import InputError
from primus_images.launch.merge import patched

JOB: dict[str, Any] = {
    "kind": "Job",
    "spec": {
        "parallelism": 2,
        "suspend": True,
        "args": ["a", "b"],
        "containers": [
            {"name": "train", "image": "x", "env": [{"name": "A", "value": "1"}]},
            {"name": "log", "image": "y"},
        ],
        "ports": [{"containerPort": 80, "name": "http"}, {"port": 90}],
        "volumeMounts": [{"mountPath": "/a", "name": "v"}, {"mountPath": "/b", "name": "v"}],
    },
}
SERVICE = {"kind": "Service", "spec": {"a": 1}}


def merged(patch: str, folder: Path) -> list[dict[str, Any]]:
    path = folder / "patch.yaml"
    path.write_text(patch)
    return patched([JOB, SERVICE], path)


@pytest.mark.parametrize(
    ("patch", "key", "value"),
    [
        ("{parallelism: 3}", "parallelism", 3),
        ("{suspend: null}", "suspend", None),
        ("{absent: null}", "absent", None),
        ("{new: {a: {b: 1}}}", "new", {"a": {"b": 1}}),
        # A mapping in place of a value, and the other way round.
        ("{parallelism: {a: 1}}", "parallelism", {"a": 1}),
        # A list without a key of its items is replaced.
        ("{args: [c]}", "args", ["c"]),
        (
            "{containers: [{name: log, $patch: delete}]}",
            "containers",
            JOB["spec"]["containers"][:1],
        ),
        (
            "{containers: [{name: gone, $patch: delete}]}",
            "containers",
            JOB["spec"]["containers"],
        ),
        (
            "{containers: [{name: log, image: z}, {name: more}]}",
            "containers",
            [JOB["spec"]["containers"][0], {"name": "log", "image": "z"}, {"name": "more"}],
        ),
        (
            "{containers: [{name: train, image: null, env: [{name: B, value: '2'}]}]}",
            "containers",
            [
                {
                    "name": "train",
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                },
                JOB["spec"]["containers"][1],
            ],
        ),
        (
            "{containers: [{name: train, $patch: replace, a: 1}]}",
            "containers",
            [{"name": "train", "a": 1}, JOB["spec"]["containers"][1]],
        ),
        (
            "{ports: [{containerPort: 80, name: web}, {port: 90, a: 1}]}",
            "ports",
            [{"containerPort": 80, "name": "web"}, {"port": 90, "a": 1}],
        ),
        (
            "{volumeMounts: [{mountPath: /b, name: w}]}",
            "volumeMounts",
            [{"mountPath": "/a", "name": "v"}, {"mountPath": "/b", "name": "w"}],
        ),
        ("{env: [{name: A, value: '1'}]}", "env", [{"name": "A", "value": "1"}]),
    ],
)
def test_a_patch_of_the_job(patch: str, key: str, value: object, tmp_path: Path) -> None:
    before = yaml.safe_dump(JOB)
    job, service = merged(f"spec: {patch}\n", tmp_path)
    assert job["spec"].get(key) == value
    assert (key in job["spec"]) is (value is not None)
    others = {name: old for name, old in JOB["spec"].items() if name != key}
    assert {name: new for name, new in job["spec"].items() if name != key} == others
    assert service == SERVICE
    assert yaml.safe_dump(JOB) == before


def test_a_whole_part_is_replaced_and_several_objects_are_patched(tmp_path: Path) -> None:
    text = "---\nspec: {$patch: replace, b: 1}\n---\n\n---\nkind: Service\nspec: {a: 2}\n"
    job, service = merged(text, tmp_path)
    assert job == {"kind": "Job", "spec": {"b": 1}}
    assert service == {"kind": "Service", "spec": {"a": 2}}


@pytest.mark.parametrize(
    ("patch", "message", "hint"),
    [
        ("[1]", "a patch is a mapping, as a manifest is", None),
        (
            "kind: Servce",
            "the job has no object of kind 'Servce'",
            "did you mean 'Service'?",
        ),
        ("kind: X", "the job has no object of kind 'X'", "kinds: Job, Service"),
        (
            "spec: {containers: [{image: x}]}",
            "each item of containers needs name, which names it",
            None,
        ),
        (
            "spec: {ports: [{name: x}]}",
            "each item of ports needs containerPort or port, which names it",
            None,
        ),
        ("spec: {env: [x]}", "each item of env needs name, which names it", None),
    ],
)
def test_what_cannot_be_merged_is_refused(
    patch: str, message: str, hint: str | None, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        merged(patch, tmp_path)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.where == str(tmp_path / "patch.yaml")


def test_a_secret_in_a_patch_is_refused(tmp_path: Path) -> None:
    secret = "hf_" + "a" * 34
    with pytest.raises(InputError) as caught:
        merged(f"spec: {{env: [{{name: HF_TOKEN, value: {secret}}}]}}", tmp_path)
    assert caught.value.hint == "remove it: --hf-token-secret NAME passes a token"
    assert secret not in str(caught.value)
