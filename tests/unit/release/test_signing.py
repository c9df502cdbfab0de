"""What cosign is asked, and what is said of its answers. A program on the path stands in for it."""

from pathlib import Path

import pytest

from primus_images.errors import HostError, InputError
from primus_images.release.statement import Signer, Trust, check_key

COSIGN = """#!/bin/sh
echo "$*" >> "$LEDGER"
for word; do
  [ "$before" = --statement ] && statement=$word
  [ "$before" = --bundle ] && [ "$1" = attest-blob ] && cp "$statement" "$word"
  before=$word
done
[ -n "$COSIGN_SAYS" ] || exit 0
echo "WARNING: nothing" >&2
echo "$COSIGN_SAYS" >&2
exit 1
"""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of cosign's command lines. COSIGN_SAYS is why it fails."""
    program = tmp_path / "bin/cosign"
    program.parent.mkdir()
    program.write_text(COSIGN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("COSIGN_SAYS", "")
    return tmp_path / "ledger"


def test_a_signature_of_a_key_is_in_no_log_and_one_of_an_identity_is(ledger: Path) -> None:
    assert Signer(key="my.key").bundle({"a": 1}) == b'{"a":1}'
    assert Signer(key=None).bundle({"a": 2}) == b'{"a":2}'
    of_key, keyless = ledger.read_text().splitlines()
    assert of_key.startswith("attest-blob --yes --statement ")
    assert of_key.endswith("--key my.key --use-signing-config=false --tlog-upload=false")
    assert "--key" not in keyless and "tlog" not in keyless


def test_a_key_must_be_a_file_or_an_address_that_cosign_reads(ledger: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--key: there is no file gone\.key"):
        Signer(key="gone.key").check("--key")
    assert not ledger.exists()
    (tmp_path / "my.key").touch()
    for key in ("awskms://a/b", str(tmp_path / "my.key")):
        Signer(key=key).check("--key")
        assert ledger.read_text().splitlines()[-1] == f"public-key --key {key}"
    Signer(key=None).check("--keyless")
    assert len(ledger.read_text().splitlines()) == 2


def test_the_owner_of_a_key_trusts_it_alone(ledger: Path, tmp_path: Path) -> None:
    assert Signer(key="my.key").own_trust(tmp_path) == Trust(key=str(tmp_path / "cosign.pub"))
    assert ledger.read_text() == f"public-key --key my.key --outfile {tmp_path}/cosign.pub\n"
    assert Signer(key=None).own_trust(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "says", "hint"),
    [
        ("my.key", "Error: signing: wrong password", "check the key, and COSIGN_PASSWORD"),
        (None, "error: no token", "--sign-later signs elsewhere"),
        ("my.key", "Error: unknown flag: --statement", "cosign"),
    ],
)
def test_a_refusal_to_sign_says_what_to_check(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, says: str, hint: str
) -> None:
    monkeypatch.setenv("COSIGN_SAYS", says)
    with pytest.raises(HostError) as caught:
        Signer(key=key).bundle({})
    assert caught.value.message == f"cosign failed: {says.partition(': ')[2]}"
    assert hint in str(caught.value.hint)
    assert ("COSIGN_PASSWORD" in str(caught.value.hint)) == ("password" in says)


def test_a_signature_is_judged_by_the_key_or_the_identity(ledger: Path) -> None:
    assert Trust(key="a.pub").rejects(b"{}", "kind") == ""
    assert Trust(identity="me", issuer="them").rejects(b"{}", "kind") == ""
    of_key, keyless = ledger.read_text().splitlines()
    begin, end = "verify-blob-attestation --bundle ", "--check-claims=false --type kind "
    assert of_key.startswith(begin) and keyless.startswith(begin)
    assert of_key.endswith(f"{end}--key a.pub --insecure-ignore-tlog")
    assert keyless.endswith(f"{end}--certificate-identity me --certificate-oidc-issuer them")


@pytest.mark.parametrize("trust", [Trust(key="a.pub"), Trust(identity="me", issuer="them")])
def test_a_signature_of_another_is_rejected_and_an_unreadable_key_judges_none(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, trust: Trust
) -> None:
    monkeypatch.setenv("COSIGN_SAYS", "Error: no match")
    name = trust.key or trust.identity
    assert trust.rejects(b"{}", "kind") == f"its signature is not by {name} (cosign: no match)"
    monkeypatch.setenv("COSIGN_SAYS", "odd words")
    assert trust.rejects(b"{}", "kind").endswith("(cosign: code 1)")
    monkeypatch.setenv("COSIGN_SAYS", "Error: loading verifier from key opts: none")
    with pytest.raises(
        HostError, match="cosign cannot verify signatures: loading verifier"
    ) as none:
        trust.rejects(b"{}", "kind")
    assert ("cosign.pub" in str(none.value.hint)) == bool(trust.key)


def test_without_cosign_nothing_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for act in (lambda: check_key(None, "--keyless"), lambda: Signer(key="k").bundle({})):
        with pytest.raises(HostError, match="cosign, which signs and verifies, is missing"):
            act()
