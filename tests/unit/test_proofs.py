"""Signed stamps: what a proof covers, who believes it, and what never shows."""

from __future__ import annotations

import hashlib
import hmac
import random
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ed25519

from fenced.errors import InvalidStamp, Misconfigured, Misuse
from fenced.proofs import Ed25519Key, Ed25519Public, HmacKey, Proof, verify
from fenced.testing.kit import stamp

SECRET = bytes(range(32))
HMAC = HmacKey("shop-1", SECRET)
SIGNER = Ed25519Key("partner-1", SECRET)
KEYS = (HMAC, SIGNER.public())
ORDER = 2**252 + 27742317777372353535851937790883648493
P = 2**255 - 19


@pytest.mark.parametrize("key", [HMAC, SIGNER], ids=["hmac", "ed25519"])
def test_a_proof_covers_all_but_the_seq(key: HmacKey | Ed25519Key) -> None:
    proof = key.sign(stamp(5, 3))
    assert verify(proof, KEYS)
    for same in (stamp(5, None), stamp(5, 0), stamp(5, 9)):
        assert verify(Proof(same, proof.text), KEYS)
    for other in (
        stamp(6, 3),
        stamp(5, 3, "orders/43"),
        stamp(5, 3, "orders/42", "orders/43"),
        stamp(5, 3, realm="f" * 16),
        stamp(5, 3, grant="f" * 32),
    ):
        assert not verify(Proof(other, proof.text), KEYS)
    assert not verify(proof, [one for one in KEYS if one.id != key.id])


def test_a_mac_of_the_bare_stamp_is_no_proof() -> None:
    """A MAC over the bare stamp, made by some other protocol with the same key, is none."""
    bare = stamp(5).bare_text.encode()
    right = hmac.new(SECRET, b"fenced proof 1\n" + bare, hashlib.sha256).hexdigest()
    assert HMAC.sign(stamp(5)).text == f"shop-1:{right}"
    assert not verify(Proof(stamp(5), f"shop-1:{hmac.new(SECRET, bare, hashlib.sha256).hexdigest()}"), KEYS)


def test_one_changed_bit_is_one_too_many() -> None:
    rng = random.Random(4711)
    for key, size in ((HMAC, 32), (SIGNER, 64)):
        proof = key.sign(stamp(5))
        right = bytes.fromhex(proof.text.partition(":")[2])
        for bit in rng.sample(range(8 * size), 60):
            wrong = bytearray(right)
            wrong[bit // 8] ^= 1 << bit % 8
            assert not verify(Proof(stamp(5), f"{key.id}:{wrong.hex()}"), KEYS), bit


def test_a_signature_has_one_form() -> None:
    """S and S + L satisfy the same equation; only the first is a signature."""
    text = SIGNER.sign(stamp(5)).text
    signature = bytes.fromhex(text.partition(":")[2])
    s = int.from_bytes(signature[32:], "little") + ORDER
    again = signature[:32] + s.to_bytes(32, "little")
    assert not verify(Proof(stamp(5), f"partner-1:{again.hex()}"), KEYS)


@pytest.mark.parametrize(
    "y",
    [0, 1, P - 1, P, P + 1, 2707385501144840649318225287225658788936804267575313519463743609750303402022],
)
@pytest.mark.parametrize("sign", [0, 1])
def test_keys_for_which_anybody_could_sign_are_none(y: int, sign: int) -> None:
    with pytest.raises(Misuse):
        Ed25519Public("weak", (y | sign << 255).to_bytes(32, "little"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shop-1",
        "shop-1:",
        "shop-1:" + "a" * 63,
        "shop-1:" + "a" * 96,
        "shop-1:" + "A" * 64,
        ":" + "a" * 64,
        "x" * 33 + ":" + "a" * 64,
        "shöp:" + "a" * 64,
        "shop-1:" + "a" * 64 + "\n",
        " shop-1:" + "a" * 64,
        "shop-1:" + "a" * 64 + " shop-1:" + "a" * 64,
        "shop-1:" + "٣" * 64,
        None,
    ],
)
def test_a_proof_has_one_form(text: object) -> None:
    with pytest.raises(InvalidStamp):
        Proof(stamp(5), text)  # type: ignore[arg-type]


@pytest.mark.parametrize("key_id", ["", "x" * 33, "a b", "a:b", "ä", "a\n", None])
def test_a_key_id_goes_into_a_proof(key_id: object) -> None:
    with pytest.raises(Misuse):
        HmacKey(key_id, SECRET)  # type: ignore[arg-type]


def test_secrets_do_not_show() -> None:
    for key in (HMAC, SIGNER):
        assert SECRET.hex() not in repr(key) and repr(SECRET) not in repr(key) and key.id in repr(key)
    for wrong in (b"short", "x" * 32, SECRET * 33):
        with pytest.raises(Misuse) as told:
            HmacKey("k", wrong)  # type: ignore[arg-type]
        assert "short" not in str(told.value) and "xxx" not in str(told.value)


def test_keys_come_from_files_as_openssl_writes_them(tmp_path: Path) -> None:
    private = ed25519.Ed25519PrivateKey.from_private_bytes(SECRET)
    written = {
        "secret.hex": SECRET.hex().encode() + b"\n",
        "private.pem": private.private_bytes(
            form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
        ),
        "public.pem": private.public_key().public_bytes(
            form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
        ),
        "raw": SECRET,
        "bad.pem": b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
    }
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    signer = Ed25519Key.read("partner-1", tmp_path / "private.pem")
    assert verify(signer.sign(stamp(5)), [Ed25519Public.read("partner-1", tmp_path / "public.pem")])
    assert verify(HmacKey.read("shop-1", tmp_path / "secret.hex").sign(stamp(5)), [HMAC])
    for read, name in (
        (HmacKey.read, "raw"),
        (HmacKey.read, "private.pem"),
        (HmacKey.read, "missing"),
        (Ed25519Public.read, "private.pem"),  # a private key is not handed to a guard by mistake
        (Ed25519Public.read, "bad.pem"),
        (Ed25519Key.read, "public.pem"),
    ):
        with pytest.raises(Misconfigured, match=name):
            read("k", tmp_path / name)


def test_without_cryptography_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(Misconfigured, match=r"pip install cryptography$"):
        SIGNER.sign(stamp(5))
    assert verify(HMAC.sign(stamp(5)), [HMAC])
