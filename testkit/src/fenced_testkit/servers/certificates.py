"""Certificates for servers that speak TLS, and for their clients."""

from __future__ import annotations

from pathlib import Path

from fenced.drills.relay.ports import HOST
from fenced_testkit.servers.base import find_program, run_program

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
_CA = ["-x509", "-days", "2", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]


def make_certificates(folder: Path, *, clients: tuple[str, ...] = ()) -> None:
    """Make a CA that is valid for a day, a certificate of it for loopback, and one for each client."""
    openssl = find_program("openssl", "openssl")
    folder.mkdir()
    files = ["-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt")]
    run_program([openssl, "req", *_KEY, *_CA, "-subj", "/CN=tests of fenced", *files])
    _sign(openssl, folder, "server", HOST, f"subjectAltName=IP:{HOST},DNS:localhost")
    for client in clients:
        _sign(openssl, folder, client, client, "extendedKeyUsage=clientAuth")


def _sign(openssl: str, folder: Path, file: str, name: str, extension: str) -> None:
    request, extensions = folder / f"{file}.csr", folder / f"{file}.extensions"
    made = ["-keyout", str(folder / f"{file}.key"), "-out", str(request)]
    run_program([openssl, "req", *_KEY, "-subj", f"/CN={name}", *made])
    extensions.write_text(f"{extension}\nauthorityKeyIdentifier=keyid\n")
    authority = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key"), "-CAcreateserial"]
    made = ["-in", str(request), "-out", str(folder / f"{file}.crt"), "-extfile", str(extensions)]
    run_program([openssl, "x509", "-req", "-days", "2", *authority, *made])
