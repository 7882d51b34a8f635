"""What a secure federation is made of: a certificate authority, the server's certificate, and one key per node.

::

    goldfinch devices certificates FOLDER --host fl.example.org --host 10.0.0.5 --node webcam --node dslr

makes one folder per party; each gets its own folder and nothing of the others:

- ``authority/``: ``ca.key`` signs server certificates and belongs on no server and no device; ``ca.crt`` is public.
- ``server/``: ``ca.crt``, ``server.pem`` and ``server.key`` for SuperLink and reverse proxy.
- ``serverapp/``: ``ca.crt``, and ``superexec.secret``, with which the SuperExec of the ServerApps proves itself to the
  SuperLink, which knows it too.
- ``operator/``: ``ca.crt`` to know the server by, and ``nodes/<name>.pub``, the public keys to enrol.
- ``nodes/<name>/``: ``ca.crt`` and ``key``, the device's private key in OpenSSH's format, as Flower wants it.

Private files have mode 0600, and any user may enter a new folder, whatever the umask; what root writes belongs to the
owner of its folder. Files that are still good are kept, so the command can run at every start. A server certificate is
renewed when it ends within 30 days or when other host names are given; without any, it keeps those that it has. Without
the authority's key, one that is valid for the names given is kept to its end. Keys are kept.
"""

import contextlib
import datetime
import ipaddress
import os
import re
import secrets
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import ConfigError
from common.regular_files import read_small_bytes
from common.storage import write_bytes
from common.text import listing

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
RENEWAL_DAYS = 30
REPLACE = "replace it (docs/deploy.md, Rotating certificates and keys)"
"""What to do about an authority that ends."""

HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
"""A host name (RFC 1123). Certificates for all hosts of a domain (``*``) are not made. One whose last label is a number
is no name but a mistaken address, such as 1.2.3.4.5."""

MAX_HOST_NAME = 253

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Certificates:
    """The files of a federation's certificates below ``folder``; see the module's table.

    Attributes:
        authority, authority_key: the authority's certificate, of which every party's folder holds a copy, and its
            private key; PEM (PKCS 8).
        server, server_key: the server's, likewise.
        superexec_secret: what a SuperExec next to the SuperLink proves itself with.
        operator: the operator's folder, which :mod:`server.admission.enrolment` reads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.operator = folder, folder / "operator"
        self.authority = folder / "authority" / "ca.crt"
        self.authority_key = folder / "authority" / "ca.key"
        self.server = folder / "server" / "server.pem"
        self.server_key = folder / "server" / "server.key"
        self.superexec_secret = folder / "serverapp" / "superexec.secret"

    def node(self, name: str) -> Path:
        """A device's folder."""
        return self.folder / "nodes" / name

    def node_key(self, name: str) -> Path:
        """A device's private key, in OpenSSH's format."""
        return self.node(name) / "key"

    def node_public_key(self, name: str) -> Path:
        """A device's public key, in OpenSSH's format, in the operator's folder."""
        return self.operator / "nodes" / f"{name}.pub"


def ensure(folder: Path, hosts: Sequence[str], nodes: Sequence[str] = (), days: int | None = None) -> list[str]:
    """Make missing files and renew certificates that end soon; return one line for each file.

    Args:
        folder: where the files go; made if it is missing.
        hosts: names and addresses under which devices and operators reach the server; none are those of the server's
            present certificate. This machine's are added.
        nodes: names of devices to make keys for.
        days: how long a server certificate is good, from 1 to 825 (a common upper limit of TLS clients); ``None`` is
            :data:`SERVER_DAYS`.

    Raises:
        ConfigError: a name that cannot be used, or files that do not belong together.
    """
    if days is None:
        days = SERVER_DAYS
    if not 1 <= days <= 825:
        raise ConfigError(f"--days {days}: a server's certificate is good for 1 to 825 days")
    for name in nodes:
        if not NODE_NAME.fullmatch(name):
            raise ConfigError(f"--node {name!r} cannot be a file name; use letters, digits, dot, dash, underscore")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder for the certificates, which may be new")
    files, made = Certificates(folder), list[tuple[str, Path]]()
    hosts = list(dict.fromkeys([*(hosts or _present_hosts(files)), *LOCAL_HOSTS]))
    for host in hosts:
        _general_name(host)  # before a file is made
    if files.authority.exists():
        made.append(("kept the authority", files.authority))
    elif copy := _copy_of_authority(files):
        hand_over(files.authority, copy.read_bytes(), private=False)
        made.append((f"copied from {copy.parent.name}/", files.authority))
    else:
        _make_authority(files)
        made.append(("made the authority", files.authority))
    if reason := _server_outdated(files, hosts):
        _make_server(files, hosts, days)
        made.append((f"made the server's ({reason})", files.server))
    else:
        made.append(("kept the server's", files.server))
    if not files.superexec_secret.exists():
        hand_over(files.superexec_secret, secrets.token_urlsafe(32).encode(), private=True)
        made.append(("made the SuperExec secret", files.superexec_secret))
    for name in nodes:
        if files.node_key(name).exists():
            _publish(files, name)
            made.append(("kept a node's key", files.node_key(name)))
        elif files.node_public_key(name).exists():
            made.append(("kept a node's public key", files.node_public_key(name)))
        else:
            _make_node(files, name)
            made.append(("made a node's key", files.node_key(name)))
    devices = [files.node(name) for name in nodes if files.node_key(name).exists()]
    for party in [files.server.parent, files.superexec_secret.parent, files.operator, *devices]:
        hand_over(party / files.authority.name, files.authority.read_bytes(), private=False)
    return [*(f"{text:28} {path}" for text, path in made), _validity(files)]


def _validity(files: Certificates) -> str:
    """Return when the server's certificate ends, what it is for, and what is to be done about either."""
    left, hosts = min(days_left(files.server), days_left(files.authority)), _present_hosts(files)
    line = f"the server's certificate ends in {left} days and is for {listing(hosts)}"
    if len(hosts) == len(LOCAL_HOSTS):
        line += " alone: devices elsewhere need the name by which they reach it, --host NAME"
    if _ends_with_authority(files):
        line += f"; the authority ends then, too: {REPLACE}"
    elif left < RENEWAL_DAYS and not files.authority_key.exists():
        line += (
            "; it cannot be renewed here: run goldfinch devices certificates where the authority is kept, copy server/ "
            "from there, and restart the SuperLink"
        )
    return line


def days_left(path: Path) -> int:
    """Return the whole days until the certificate at ``path`` ends; negative after it.

    Raises:
        ConfigError: it is not a certificate.
    """
    return (_certificate(path).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def _copy_of_authority(files: Certificates) -> Path | None:
    """Return a party's copy of the authority's certificate: another authority would lock every device out."""
    for party in (files.server.parent, files.operator):
        copy = party / files.authority.name
        if copy.exists():
            _certificate(copy)
            return copy
    return None


def _present_hosts(files: Certificates) -> list[str]:
    """Return the names of the server's certificate; none if there is no certificate."""
    if not files.server.exists():
        return []
    return [str(name.value) for name in _names(_certificate(files.server))]


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _make_authority(files: Certificates) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("Goldfinch federation authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key.public_key(), datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA384())
    )
    hand_over(files.authority_key, _pem(key), private=True)
    hand_over(files.authority, certificate.public_bytes(serialization.Encoding.PEM), private=False)


def _make_server(files: Certificates, hosts: Sequence[str], days: int) -> None:
    authority = _certificate(files.authority)
    if not files.authority_key.exists():
        raise ConfigError(
            f"{files.authority_key} is not here, so no server certificate can be signed; run this where the "
            "authority is kept, or start again in an empty folder and give every device the new ca.crt"
        )
    left = authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    if left <= datetime.timedelta():
        raise ConfigError(
            f"{files.authority} ended on {authority.not_valid_after_utc:%Y-%m-%d}; {REPLACE}, or set this machine's "
            "clock if that day has not come"
        )
    try:
        signer = serialization.load_pem_private_key(read_small_bytes(files.authority_key), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{files.authority_key} is not a private key: {error}; restore it from a backup") from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != authority.public_key():
        raise ConfigError(f"{files.authority_key} is not the key of {files.authority}; restore the pair from a backup")
    key = ec.generate_private_key(ec.SECP384R1())
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(_name(hosts[0]), authority.subject, key.public_key(), min(datetime.timedelta(days=days), left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(signer, hashes.SHA384())
    )
    hand_over(files.server_key, _pem(key), private=True)
    hand_over(files.server, certificate.public_bytes(serialization.Encoding.PEM), private=False)


def _make_node(files: Certificates, name: str) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    hand_over(files.node_key(name), private, private=True)
    _publish(files, name)


def _publish(files: Certificates, name: str) -> None:
    """Write a device's public key if it is missing and was not dismissed.

    Raises:
        ConfigError: its key cannot be read, or that which was dismissed.
    """
    path, public = files.node_key(name), files.node_public_key(name)
    if public.exists():
        return
    try:
        key = serialization.load_ssh_private_key(read_small_bytes(path), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a device's key: {error}; remove it to have one made") from error
    content = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    content += f" {name}\n".encode()
    dismissed = public.with_suffix(".pub.dismissed")
    try:
        if os.path.lexists(dismissed) and content.strip() in read_small_bytes(dismissed).splitlines():
            return
    except OSError as error:
        raise ConfigError(
            f"{dismissed}, the keys of {name} that were dismissed, cannot be read: {error}; restore it from a backup, "
            f"or remove it and {path.parent}, so that a new key is made"
        ) from error
    hand_over(public, content, private=False)


def _server_outdated(files: Certificates, hosts: Sequence[str]) -> str:
    """Return why the server's certificate must be made or renewed; empty if it is good."""
    if not (files.server.exists() and files.server_key.exists()):
        return "new"
    certificate, authority = _certificate(files.server), _certificate(files.authority)
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, InvalidSignature):
        return "another authority"
    if not _is_pair(files):
        return "a key of another"  # of a renewal that was interrupted
    now = datetime.datetime.now(datetime.UTC)
    left = certificate.not_valid_after_utc - now
    names, wanted = set(_names(certificate)), {_general_name(host) for host in hosts}
    if not files.authority_key.exists() and left > datetime.timedelta() and names >= wanted:
        return ""  # nothing better can be made here
    if certificate.not_valid_before_utc > now > authority.not_valid_before_utc:
        return "not valid yet"  # this machine's clock was ahead
    if left < datetime.timedelta(days=RENEWAL_DAYS) and not _ends_with_authority(files):
        return f"ended or ends in {max(0, left.days)} days"
    if names != wanted:
        return "other hosts"
    return ""


def _is_pair(files: Certificates) -> bool:
    """Return whether the server's key is that of its certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.server, files.server_key, password="")
    except ssl.SSLError:
        return False
    return True


def _ends_with_authority(files: Certificates) -> bool:
    """Return whether the server's certificate could not be made for longer."""
    return _certificate(files.server).not_valid_after_utc >= _certificate(files.authority).not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # devices' clocks are often a little behind
        .not_valid_after(now + lifetime)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    last = host.rpartition(".")[2]
    if len(host) > MAX_HOST_NAME or not HOST_NAME.fullmatch(host) or last.isdigit():
        raise ConfigError(
            f"--host {host!r} is neither an address nor a host name: labels of letters, digits and -, with dots "
            f"between them, {MAX_HOST_NAME} characters at most, the last label no number"
        )
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read_small_bytes(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a certificate: {error}; remove it to have it made again") from error


def hand_over(path: Path, content: bytes, *, private: bool) -> None:
    """Write a file. Root gives it to the owner of its folder, who could not read a key of root's."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        folder.chmod(0o755)  # root's umask would keep out the users whose files are below
    write_bytes(path, content, private=private)
    path.chmod(0o600 if private else 0o644)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        owner = path.parent.stat()
        with contextlib.suppress(PermissionError):  # a container without this right, or a network file system
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
