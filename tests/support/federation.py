"""Real SuperLinks with TLS, SuperNodes that should not get in, and the shipped reverse proxy on a free port."""

from __future__ import annotations

import atexit
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from goldfinch.commands.deployment import LocalDeployment
from server.admission.certificates import Certificates
from server.flower.processes import Child, Processes, flower_environment, free_port, program, wait_healthy

ROOT = Path(__file__).resolve().parents[2]
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def start_proxy(deployment: LocalDeployment, checkout: Path = ROOT, **more: str) -> tuple[Child, str]:
    """The proxy of ``checkout``'s container, in front of ``deployment``; the process and its ``host:port``."""
    return start_nginx(deployment.processes, deployment.certificates, deployment.address, checkout, **more)


def start_nginx(
    processes: Processes, certificates: Certificates, superlink: str, checkout: Path = ROOT, **more: str
) -> tuple[Child, str]:
    """nginx as the proxy's container starts it, in front of ``superlink``; the process and its ``host:port``."""
    assert NGINX is not None
    address = f"127.0.0.1:{free_port()}"
    temporary = Path(tempfile.mkdtemp(prefix="goldfinch-proxy-"))
    temporary.chmod(0o711)  # nginx of a root user works as another, who cannot enter that user's folders of tests
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    environment = {
        "PATH": f"{Path(NGINX).parent}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "GOLDFINCH_CERTIFICATES": str(certificates.folder),
        "GOLDFINCH_LISTEN": address,
        "GOLDFINCH_SUPERLINK": superlink,
        "GOLDFINCH_SUPERLINK_NAME": "localhost",
        "GOLDFINCH_PROXY_CONFIGURATION": str(checkout / "docker" / "proxy" / "nginx.conf"),
        **more,
    }
    proxy = processes.start("proxy", [str(checkout / "docker" / "entrypoint.sh"), "proxy"], environment)
    context = ssl.create_default_context(cafile=str(certificates.operator / "ca.crt"))
    wait_healthy(proxy, f"https://{address}/health", 20, verify=context)
    return proxy, address


def trust(deployment: LocalDeployment) -> ssl.SSLContext:
    """What a device verifies the server with."""
    return ssl.create_default_context(cafile=str(deployment.certificates.operator / "ca.crt"))


def start_stranger(deployment: LocalDeployment, name: str, address: str, arguments: Sequence[str]) -> Child:
    """A SuperNode with security options of its own."""
    command = [program("goldfinch-supernode"), "--superlink", address, "--port", str(free_port()), *arguments]
    command += ["--node-config", 'domain="sketch"', "--max-retries", "2"]
    return deployment.processes.start(name, command, flower_environment(deployment.folder / "strangers" / name))


def wait_until_ended(children: Sequence[Child], seconds: float) -> None:
    """Until all programs ended, or the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(child.process.poll() is None for child in children):
        time.sleep(0.3)
