"""What it means that a server cannot be reached by TLS, in a sentence."""

from __future__ import annotations

import ssl

from fenced.errors import Misconfigured

EXPIRED, NOT_YET_VALID, OTHER_HOST, OTHER_ADDRESS = 10, 9, 62, 64
"""Codes of X509_verify_cert(3)."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def tls_refused(error: OSError, where: str) -> Misconfigured | None:
    """The exception for a handshake that another try would not complete; None: another one may."""
    if isinstance(error, ssl.SSLCertVerificationError):
        match error.verify_code:
            case code if code == EXPIRED:
                return Misconfigured(f"{where}: its certificate has expired; the server needs a new one")
            case code if code == NOT_YET_VALID:
                return Misconfigured(f"{where}: its certificate is not valid yet; does a clock go wrong?")
            case code if code in (OTHER_HOST, OTHER_ADDRESS):
                return Misconfigured(f"{where}: its certificate is for another host: {error.verify_message}")
        why = f"its certificate is not trusted; name its CA with ssl_ca_certs: {error.verify_message}"
        return Misconfigured(f"{where}: {why}")
    if isinstance(error, ssl.SSLError) and any(sign in str(error) for sign in _NO_TLS):
        return Misconfigured(f"{where}: this port does not speak TLS; is a plain address meant?")
    return None
