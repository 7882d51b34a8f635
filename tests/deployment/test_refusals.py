"""Six refused devices, each with a message that names the reason; through the proxy where nginx is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from support.federation import NGINX, start_proxy, start_stranger, wait_until_ended

from goldfinch.commands.deployment import LocalDeployment
from server.admission.certificates import Certificates, ensure
from server.flower.processes import Child, Processes, flower_environment, free_port, program, wait_healthy

pytestmark = [pytest.mark.processes, pytest.mark.long]

REFUSED = {
    # what was wrong -> the message in the device's log
    "plain client": "speaks TLS only" if NGINX else "Server disconnected without sending a response",
    "wrong authority": "unable to get local issuer certificate",
    "expired certificate": "certificate has expired",
    "wrong host name": "IP address mismatch",
    "unknown key": "[code: 2004] Failed to activate SuperNode",
    "removed key": "[code: 2004] Failed to activate SuperNode",
    # and, besides the six, a device that was given no key
    "no key": "its key" if NGINX else "must be registered via the CLI",
}


@dataclass
class Refusals:
    """What became of the devices."""

    children: dict[str, Child]
    admitted: Child
    admitted_while_running: bool
    nodes_seen: str
    ended_after_dismissal: bool


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusals]:
    folder = tmp_path_factory.mktemp("refusals")
    with LocalDeployment(folder / "right", {}) as deployment, Processes(folder / "cwd", folder / "logs") as others:
        files = deployment.certificates
        ensure(files.folder, [], ["admitted", "unknown", "removed", "expired"])
        deployment.enrolment.enrol(["admitted", "removed"])
        assert "dismissed" in deployment.enrolment.dismiss("removed")
        proxy_address = start_proxy(deployment)[1] if NGINX else deployment.address

        stranger = Certificates(folder / "stranger")
        ensure(stranger.folder, [])
        expired = second_link(others, files, folder / "expired", expire=True)
        elsewhere = second_link(others, files, folder / "elsewhere", expire=False)

        authority = ["--root-certificates", str(files.operator / "ca.crt")]

        def key(name: str) -> list[str]:
            return ["--auth-supernode-private-key", str(files.node_key(name))]

        def start(name: str, address: str, arguments: list[str]) -> Child:
            return start_stranger(deployment, name, address, arguments)

        admitted = start("admitted", proxy_address, [*authority, *key("admitted")])
        children = {
            "plain client": start("plain", proxy_address, ["--insecure"]),
            "wrong authority": start(
                "wrong-authority",
                proxy_address,
                ["--root-certificates", str(stranger.operator / "ca.crt"), *key("admitted")],
            ),
            "expired certificate": start("expired", expired, [*authority, *key("expired")]),
            "wrong host name": start("elsewhere", elsewhere, [*authority, *key("expired")]),
            "unknown key": start("unknown", proxy_address, [*authority, *key("unknown")]),
            "removed key": start("removed", proxy_address, [*authority, *key("removed")]),
            "no key": start("no-key", proxy_address, authority),
        }
        wait_until_ended(list(children.values()), 120)
        running = admitted.process.poll() is None and "SuperNode ID" in admitted.tail(40)
        deployment.enrolment.dismiss("admitted")
        wait_until_ended([admitted], 60)
        log = deployment.children["superlink"].log.read_text()
        yield Refusals(children, admitted, running, log, admitted.process.poll() is not None)


def second_link(others: Processes, files: Certificates, folder: Path, *, expire: bool) -> str:
    """Another SuperLink with a certificate of the right authority that is expired, or of another host; its address."""
    certificate = folder / "server.pem"
    folder.mkdir()
    certificate.write_bytes(bad_certificate(files, expire=expire))
    port = free_port()
    command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(files.authority), "--ssl-certfile", str(certificate)]
    command += ["--ssl-keyfile", str(files.server_key), "--database", str(folder / "link.db")]
    command += ["--disable-runtime-dependency-installation"]
    child = others.start(folder.name, command, flower_environment(folder / "home"))
    wait_healthy(child, f"https://127.0.0.1:{port}/health", verify=False)
    return f"127.0.0.1:{port}"


def bad_certificate(files: Certificates, *, expire: bool) -> bytes:
    """The server's certificate again, by the right authority, but ended yesterday or for another host only."""
    good = x509.load_pem_x509_certificate(files.server.read_bytes())
    signer = serialization.load_pem_private_key(files.authority_key.read_bytes(), password=None)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(good.subject)
        .issuer_name(good.issuer)
        .public_key(good.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now - timedelta(days=1) if expire else now + timedelta(days=30))
    )
    for extension in good.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName) and not expire:
            value = x509.SubjectAlternativeName([x509.DNSName("other.example.org")])
        builder = builder.add_extension(value, extension.critical)
    return builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("wrong", REFUSED)
def test_it_is_refused_with_the_reason(refusals: Refusals, wrong: str) -> None:
    child = refusals.children[wrong]
    assert child.process.poll() == 1, f"{wrong}: still running\n{child.tail()}"
    log = child.log.read_text()
    assert "Exit Code: 305" in log
    assert REFUSED[wrong] in log
    assert "SuperNode ID" not in log


def test_an_enrolled_device_gets_in_meanwhile(refusals: Refusals) -> None:
    assert refusals.admitted_while_running, refusals.admitted.tail(40)
    assert refusals.nodes_seen.count("Activated node_id=") == 1


def test_a_device_that_is_dismissed_while_it_runs_is_out_within_a_minute(refusals: Refusals) -> None:
    assert refusals.ended_after_dismissal, refusals.admitted.tail(40)
