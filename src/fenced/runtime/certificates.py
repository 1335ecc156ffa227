"""The certificate of a service of ours: found wrong before it listens, with the name of the file."""

from __future__ import annotations

import os
import ssl

from fenced.errors import Misconfigured

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: those with forward secrecy. Those of TLS 1.3 all have it."""
_ANY_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: also a certificate that has expired is seen."""
_VALID_NOT_NOW = {10: "has expired", 9: "is not valid yet"}


def server_context(chain: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """TLS 1.2 or later, with forward secrecy. Misconfigured if the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    load_chain(context, chain, key)
    if client_ca is not None:
        _readable(client_ca, "the CA of clients")
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError:
            raise Misconfigured(f"the CA of clients {client_ca} is not in PEM") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_chain(context: ssl.SSLContext, chain: str, key: str) -> None:
    _readable(chain, "the certificate")
    _readable(key, "the key")
    try:
        context.load_cert_chain(chain, key, password=lambda: "")  # it must not ask at a terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise Misconfigured(f"the key {key} does not belong to the certificate {chain}") from None
        raise Misconfigured(
            f"the certificate {chain} with the key {key} cannot be used ({error.reason or error}): both are files in "
            "PEM, the key without a password"
        ) from None


def _readable(path: str, what: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise Misconfigured(f"{what} {path}: {os.strerror(error.errno or 0)}") from None


def why_not_now(context: ssl.SSLContext, chain: str) -> str | None:
    """Why clients refuse the certificate of this context today: it has expired, or is not valid yet."""
    try:
        _greet(context, chain)
    except ssl.SSLCertVerificationError as error:
        return _VALID_NOT_NOW.get(error.verify_code)
    return None


def ends_at(context: ssl.SSLContext, chain: str) -> float | None:
    """Until when the certificate of this context is valid, in seconds since 1970; None if it cannot be seen."""
    try:
        found = _greet(context, chain, _ANY_TIME).getpeercert()
    except (ssl.SSLError, ValueError):
        return None
    return ssl.cert_time_to_seconds(str(found["notAfter"])) if found else None


def _greet(context: ssl.SSLContext, chain: str, flags: int = 0) -> ssl.SSLObject:
    """What a client sees that trusts this certificate."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate itself is trusted, so only its dates count.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | flags
    client.load_verify_locations(chain)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in ends * 2:  # a handshake takes two rounds
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError:
            raise
        except ssl.SSLError:
            break  # the context wants a certificate of the client
    return ends[0]
