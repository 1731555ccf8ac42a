"""Certificates that tests make by the command openssl, and the variables for Ray to use them."""

import subprocess
from pathlib import Path


def _openssl(where: Path, *command: str) -> None:
    subprocess.run(["openssl", *command], cwd=where, check=True, capture_output=True, timeout=60)


def make_authority(where: Path) -> Path:
    """Make an authority in an empty folder."""
    where.mkdir()
    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key"
    sign = f"req -x509 {key} -out ca.crt -days 2 -subj /CN=ca"
    _openssl(where, *sign.split())
    return where


def make_certificate(authority: Path, name: str, host: str = "127.0.0.1", days: int = 2) -> Path:
    """Sign a certificate for an address by ``authority``; with ``days=-1``, it has expired."""
    key = f"-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key"
    _openssl(authority, "req", *key.split(), *f"-out {name}.csr -subj /CN={name}".split())
    (authority / "extensions").write_text(f"subjectAltName=IP:{host}\n")
    sign = f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days {days}"
    _openssl(authority, *sign.split(), *f"-extfile extensions -out {name}.crt".split())
    return authority / f"{name}.crt"


def tls_environment(certificate: Path) -> dict[str, str]:
    """Return the variables that make Ray use a certificate, and trust its authority."""
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(certificate.with_suffix(".key")),
        "RAY_TLS_CA_CERT": str(certificate.parent / "ca.crt"),
    }
