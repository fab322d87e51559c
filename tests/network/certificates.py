"""The lab's certificate authority, by the ``openssl`` program: made anew for each lab, kept nowhere."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.network import zone

if TYPE_CHECKING:
    from pathlib import Path


def _openssl(*words: str) -> str:
    done = subprocess.run(["openssl", *words], check=True, capture_output=True, text=True)
    return done.stdout


def _self_signed(directory: Path, name: str, subject: str, *more: str) -> None:
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", f"/CN={subject}", "-keyout", f"{directory}/{name}.key", "-out", f"{directory}/{name}.crt",
        *more,
    )  # fmt: skip


def make(directory: Path) -> dict[str, str]:
    """An authority, a certificate for every name of the lab, and one that nobody trusts; the files' paths.

    Also ``hash``: the name under which OpenSSL looks for the authority in a directory.
    """
    _self_signed(
        directory, "ca", "Lab Authority",
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    name = "untrusted.example"
    _self_signed(directory, "untrusted", name, "-addext", f"subjectAltName=DNS:{name}")
    names = [*zone.NAMES, *(f"*.{name}" for name in zone.WILD), f"*.{zone.TO}"]
    names.remove(name)
    extensions = directory / "extensions"
    alternatives = [f"DNS:{name}" for name in names] + [f"IP:{zone.NAMES['allowed.example'][0]}"]
    extensions.write_text(f"subjectAltName={','.join(alternatives)}\nextendedKeyUsage=serverAuth\n")
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=lab",
        "-keyout", f"{directory}/leaf.key", "-out", f"{directory}/leaf.csr",
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", f"{directory}/leaf.csr", "-CA", f"{directory}/ca.crt", "-CAkey",
        f"{directory}/ca.key", "-CAcreateserial", "-days", "2", "-extfile", str(extensions),
        "-out", f"{directory}/leaf.crt",
    )  # fmt: skip
    files = ("ca.crt", "leaf.crt", "leaf.key", "untrusted.crt", "untrusted.key")
    found = {name: f"{directory}/{name}" for name in files}
    found["hash"] = _openssl("x509", "-hash", "-noout", "-in", f"{directory}/ca.crt").strip()
    return found
