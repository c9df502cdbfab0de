"""TLS to registries, with the certificates that podman, skopeo and Docker use.

See https://github.com/containers/image/blob/main/docs/containers-certs.d.5.md.
"""

import socket
import ssl
from pathlib import Path

from primus_images.errors import HostError

_SYSTEM = (Path("/etc/containers"), Path("/etc/docker"))
# Seconds of a registry on this machine.
_PATIENCE = 3.0


def context_for(host: str, *, verify: bool = True) -> ssl.SSLContext:
    """Return how to speak TLS with ``host[:port]``.

    It trusts the machine's authorities and those of the host's folder, whose client certificates
    it shows. Without ``verify``, it trusts everybody. Raises HostError for a file there that is
    damaged.
    """
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    folder = _folder_of(host)
    if folder is None:
        return context
    for authority in sorted(folder.glob("*.crt")):
        try:
            context.load_verify_locations(authority)
        except OSError as error:
            raise _damaged(authority, error) from None
    for certificate in sorted(folder.glob("*.cert")):
        try:
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        except OSError as error:
            raise _damaged(certificate, error) from None
    return context


def _folder_of(host: str) -> Path | None:
    """Return the folder of the certificates for ``host[:port]``: the first one that exists."""
    for parent in (Path.home() / ".config/containers", *_SYSTEM):
        folder = parent / "certs.d" / host
        if folder.is_dir():
            return folder
    return None


def _damaged(path: Path, error: OSError) -> HostError:
    # An SSLError is an OSError; it has no text for a file without a certificate.
    reason = error.strerror or "it has no certificate"
    return HostError(
        f"the certificate {path} cannot be used: {reason}",
        hint="NAME.crt is an authority, NAME.cert with NAME.key a client's certificate, in PEM",
    )


def speaks_tls(host: str) -> bool:
    """Return whether ``host[:port]`` answers a TLS handshake. No certificate is checked."""
    name, _, port = host.partition(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((name, int(port or 443)), timeout=_PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=name),
        ):
            return True
    except OSError:
        return False
