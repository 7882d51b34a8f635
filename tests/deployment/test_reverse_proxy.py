"""What a device can do through the shipped reverse proxy: what SuperNodes need, and nothing more."""

from __future__ import annotations

import re
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from support.federation import NGINX, ROOT, start_proxy, trust

from goldfinch.commands.deployment import LocalDeployment
from server.admission.certificates import ensure
from server.flower.processes import flower_environment, program

CONFIGURATION = (ROOT / "docker" / "proxy" / "nginx.conf").read_text()
OWN_REGISTRATION = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}


def allowed_paths() -> set[str]:
    reserve, shared = re.findall(r'location ~ "\^/v1/fleet/\((.*)\)\\z"', CONFIGURATION)
    assert reserve == shared
    return {f"/v1/fleet/{name}" for name in reserve.split("|")}


def test_the_list_is_what_the_pinned_flower_calls_from_a_supernode() -> None:
    import flwr.supernode.fleet_http_client as client

    called = set(re.findall(r'"(/v1/[^"]+)"', Path(client.__file__).read_text()))
    assert allowed_paths() == called - OWN_REGISTRATION
    assert len(allowed_paths()) == 10


# ---- in front of a real SuperLink ------------------------------------------------------------------------------------

with_proxy = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx)"),
]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalDeployment, str]]:
    with LocalDeployment(tmp_path_factory.mktemp("proxy"), {}) as deployment:
        ensure(deployment.certificates.folder, [], ["newcomer"])
        _, address = start_proxy(deployment)
        yield deployment, address


class TestFromTheDevicesSide:
    pytestmark = with_proxy

    def test_health_is_answered_and_the_server_is_verified(self, proxied: tuple[LocalDeployment, str]) -> None:
        deployment, address = proxied
        assert httpx.get(f"https://{address}/health", verify=trust(deployment)).status_code == 200

    def test_only_the_owner_reads_the_superlink_s_registry(self, proxied: tuple[LocalDeployment, str]) -> None:
        files = list(proxied[0].folder.glob("link.db*"))
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}

    def test_every_call_a_supernode_makes_reaches_the_superlink(self, proxied: tuple[LocalDeployment, str]) -> None:
        deployment, address = proxied
        for path in allowed_paths():
            answer = httpx.post(f"https://{address}{path}", verify=trust(deployment), headers=protobuf())
            assert answer.status_code == 401, path  # Flower's own answer to a call without a key
            assert "Invalid SuperNode authentication" in answer.text

    def test_every_other_route_of_flower_ends_at_the_proxy(self, proxied: tuple[LocalDeployment, str]) -> None:
        deployment, address = proxied
        others = {path for _, path in PROTOBUF_REQUEST_TYPES} - allowed_paths()
        assert len([path for path in others if path.startswith("/v1/control/")]) > 10
        assert len([path for path in others if path.startswith("/v1/runtime/")]) > 10
        with httpx.Client(verify=trust(deployment), headers=protobuf()) as client:
            for path in sorted(others):
                refused = client.post(f"https://{address}{path}")
                assert refused.status_code in (403, 412), path
                assert (
                    "through the reverse proxy for devices" in refused.text or "cannot register itself" in refused.text
                )
                direct = client.post(f"https://{deployment.address}{path}")
                assert "reverse proxy" not in direct.text, path  # so it was the proxy that refused

    @pytest.mark.parametrize(
        "target",
        [
            "/",
            "/docs",
            "/openapi.json",
            "/V1/CONTROL/START-RUN",
            "//v1/control/start-run",
            "/v1/fleet/../control/start-run",
            "/v1/fleet/%2e%2e/control/start-run",
            "/v1/fleet%2f..%2fcontrol/start-run",
            "/v1/fleet/get-run/",
            "/v1/fleet/get-run/../../control/start-run",
            "/v1/fleet/get-run%00",
            "/v1/fleet/get-run;/../../control/start-run",
            "/v1/fleet/get-run%0A",
            "/health/../v1/control/start-run",
        ],
    )
    def test_paths_that_try_to_slip_by(self, proxied: tuple[LocalDeployment, str], target: str) -> None:
        deployment, address = proxied
        status, body = raw_request(deployment, address, target)
        assert status in (400, 403), body

    def test_a_path_is_passed_on_as_it_was_checked(self, proxied: tuple[LocalDeployment, str]) -> None:
        deployment, address = proxied
        status, body = raw_request(deployment, address, "/v1/control/start-run/../../fleet/get-run?x=/v1/control")
        assert status == 401
        assert "Invalid SuperNode authentication" in body  # the fleet's answer, not the control's

    def test_submitting_a_run_is_refused(self, proxied: tuple[LocalDeployment, str], tmp_path: Path) -> None:
        deployment, address = proxied
        app = minimal_app(tmp_path)
        output = flower(deployment, address, tmp_path, "run", str(app), "server", "--format", "json")
        assert "runs are submitted and nodes are enrolled on the server" in output
        listed = flower(deployment, deployment.address, tmp_path, "list", "server", "--format", "json")
        assert '"runs": []' in listed

    def test_enrolling_a_node_is_refused(self, proxied: tuple[LocalDeployment, str], tmp_path: Path) -> None:
        deployment, address = proxied
        key = str(deployment.certificates.node_public_key("newcomer"))
        output = flower(deployment, address, tmp_path, "supernode", "register", key, "server", "--format", "json")
        assert "runs are submitted and nodes are enrolled on the server" in output
        listed = flower(deployment, deployment.address, tmp_path, "supernode", "list", "server", "--format", "json")
        assert '"nodes": []' in listed

    def test_requests_that_are_too_large_end_at_the_proxy(self, proxied: tuple[LocalDeployment, str]) -> None:
        deployment, address = proxied
        huge = b"\0" * (33 * 2**20)
        url = f"https://{address}/v1/fleet/push-object"
        try:
            status = httpx.post(url, content=huge, verify=trust(deployment), headers=protobuf()).status_code
        except httpx.WriteError:  # the proxy closed the connection before it was all sent
            status = 413
        assert status == 413

    def test_plain_http_is_answered_with_a_hint_at_tls(self, proxied: tuple[LocalDeployment, str]) -> None:
        _, address = proxied
        answer = httpx.post(f"http://{address}/v1/fleet/activate-node", headers=protobuf())
        assert answer.status_code == 412
        assert "speaks TLS only" in answer.text

    def test_old_tls_is_refused(self, proxied: tuple[LocalDeployment, str]) -> None:
        deployment, address = proxied
        context = trust(deployment)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError, match=r"(?i)ssl|tls|protocol"):
            httpx.get(f"https://{address}/health", verify=context)


def protobuf() -> dict[str, str]:
    return {"content-type": "application/protobuf", "accept": "application/protobuf"}


def raw_request(deployment: LocalDeployment, address: str, target: str) -> tuple[int, str]:
    """Send a request with a path that no library has normalised."""
    host, _, port = address.partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        trust(deployment).wrap_socket(plain, server_hostname=host) as secure,
    ):
        secure.sendall(
            f"POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/protobuf\r\n"
            "Accept: application/protobuf\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        content = b""
        while piece := secure.recv(65536):
            content += piece
    head, _, body = content.decode(errors="replace").partition("\r\n\r\n")
    return int(head.split()[1]), body


def flower(deployment: LocalDeployment, address: str, folder: Path, *arguments: str) -> str:
    """Return what Flower's command line prints, with a connection to ``address``."""
    home = folder / f"home-{address.replace(':', '-')}"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "server"\n\n[superlink.server]\naddress = "{address}"\n'
        f'root-certificates = "{deployment.certificates.operator / "ca.crt"}"\n'
    )
    result = subprocess.run(
        [program("flwr"), *arguments],
        env=flower_environment(home, COLUMNS="200"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return " ".join((result.stdout + result.stderr).split())


def minimal_app(folder: Path) -> Path:
    """The smallest app that Flower's command line would submit."""
    app = folder / "intruder"
    (app / "evil").mkdir(parents=True)
    (app / "evil" / "__init__.py").touch()
    (app / "evil" / "app.py").write_text(
        "from flwr.serverapp import ServerApp\nfrom flwr.clientapp import ClientApp\n"
        "server = ServerApp()\nclient = ClientApp()\n"
    )
    (app / "pyproject.toml").write_text(
        '[project]\nname = "intruder"\nversion = "1.0.0"\ndescription = ""\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "evil"\n'
        '[tool.flwr.app.components]\nserverapp = "evil.app:server"\nclientapp = "evil.app:client"\n'
    )
    return app
