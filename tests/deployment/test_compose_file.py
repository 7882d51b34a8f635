"""What compose.yaml promises about every container, read from the file; the rehearsal itself is make test-compose."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.federation import ROOT
from support.logs import without_time

from common.settings import load_settings
from goldfinch.commands.deployment import MAX_NODES_IN_FILE, store_for

DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DEVICES = [name for name in SERVICES if name.startswith("supernode-")]
ENTRYPOINT = (DOCKER / "entrypoint.sh").read_text()
LASTING = ["superlink", "serverapp", "proxy", *DEVICES]


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert "privileged" not in service


def bytes_of(size: str) -> int:
    """``512m``, or the default in ``${NAME:-512m}``."""
    number, unit = re.findall(r"(\d+)([kmg])", size)[-1]
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit]


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_container_writes_to_memory_fits_into_its_limit(name: str) -> None:
    written = sum(bytes_of(part.partition("size=")[2]) for part in SERVICES[name]["tmpfs"])
    assert written <= 0.75 * bytes_of(SERVICES[name]["mem_limit"])


def test_the_uploads_that_the_proxy_holds_fit_into_its_folder() -> None:
    configuration = (DOCKER / "proxy" / "nginx.conf").read_text()
    largest = max(bytes_of(size) for size in re.findall(r"client_max_body_size (\w+);", configuration))
    limits = {name: int(most) for name, most in re.findall(r"limit_conn (\w+) (\d+);", configuration)}
    held = limits["bodies"] + limits["shared_bodies"]
    assert held * largest <= 0.8 * bytes_of(SERVICES["proxy"]["tmpfs"][0])
    assert limits["shared_body_of"] < limits["shared_bodies"]


def test_the_security_page_has_the_number_of_addresses_that_can_hold_everything() -> None:
    configuration = (DOCKER / "proxy" / "nginx.conf").read_text()
    limits = {name: int(most) for name, most in re.findall(r"limit_conn (\w+) (\d+);", configuration)}
    uploads = limits["bodies"] // limits["body_of"]
    polls = int(re.findall(r"GOLDFINCH_POLLS=(\d+)", (DOCKER / ".env").read_text())[0])
    reserved = polls * int(re.findall(r"@RESERVED_POLLS@\|\$\(\(polls \* (\d+)", ENTRYPOINT)[0])
    of_an_address = int(re.findall(r"zone=polls_of:4m rate=(\d+)r/m", configuration)[0])
    stated = f"{uploads} addresses can hold all uploads, {reserved // of_an_address} use all polls"
    assert stated in (ROOT / "SECURITY.md").read_text()


def test_one_container_is_root_and_it_has_no_network_and_ends() -> None:
    root = [name for name, service in SERVICES.items() if service.get("user") == "root"]
    assert root == ["certificates"]
    assert SERVICES["certificates"]["network_mode"] == "none"
    assert SERVICES["certificates"]["restart"].startswith("on-failure")
    assert re.findall(r"^USER (\w+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE) == ["goldfinch", "goldfinch"]


@pytest.mark.parametrize("name", LASTING)
def test_what_should_last_has_a_health_check_and_is_restarted(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert "health.py" in " ".join(SERVICES[name]["healthcheck"]["test"])
    assert SERVICES[name]["init"] is True


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_reaches_the_proxy_and_nothing_else(name: str) -> None:
    assert SERVICES[name]["networks"] == ["devices"]
    others = [other for other, service in SERVICES.items() if "devices" in service.get("networks", [])]
    assert set(others) == {"proxy", *DEVICES}
    assert COMPOSE["networks"]["devices"] == {"internal": True}
    assert COMPOSE["networks"]["control"] == {"internal": True}


def test_only_the_proxy_publishes_a_port_and_only_to_this_machine_by_default() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"proxy"}
    assert published["proxy"] == ["${GOLDFINCH_BIND:-127.0.0.1}:${GOLDFINCH_PORT:-8443}:8443"]


def test_each_container_has_the_keys_of_its_own_party_only() -> None:
    mounts = {
        name: {str(volume).split(":")[0] for volume in service.get("volumes", [])}
        for name, service in SERVICES.items()
        if name != "certificates"
    }
    secret = {
        "authority",
        "more-nodes",
        "server",
        "serverapp",
        *(name for name in COMPOSE["volumes"] if name.startswith("node-")),
    }
    held = {name: sorted(volumes & secret) for name, volumes in mounts.items() if volumes & secret}
    expected = {"superlink": ["server", "serverapp"], "serverapp": ["serverapp"], "proxy": ["server"]}
    for name in DEVICES:
        expected[name] = [f"node-{name.removeprefix('supernode-').removesuffix('-gpu')}"]
    assert held == expected


@pytest.mark.parametrize("name", DEVICES)
def test_data_and_keys_are_read_only_for_a_device(name: str) -> None:
    places = {str(volume).rsplit(":", 2)[-2]: str(volume) for volume in SERVICES[name]["volumes"] if ":ro" in volume}
    assert set(places) == {"/certificates/node", "/data"}


def test_the_default_devices_are_the_clients_of_the_default_run() -> None:
    settings = load_settings(["method=fpl"])
    domains = {spec.domain for spec in settings.protocol.clients(settings.data)}
    assert {re.split(r":-|}", SERVICES[name]["environment"]["GOLDFINCH_DOMAIN"])[1] for name in DEVICES} == domains


def test_each_key_is_enrolled_for_the_domain_of_its_device(tmp_path: Path) -> None:
    clients = SERVICES["enrol"]["environment"]["GOLDFINCH_CLIENTS"]
    held = {
        f"{re.sub('supernode-|-gpu', '', name)}={SERVICES[name]['environment']['GOLDFINCH_DOMAIN']}-0"
        for name in DEVICES
    }
    assert set(clients.splitlines()) == held
    for name, text in {"goldfinch": '#!/bin/sh\nprintf "%s|" "$@"\n', "ca.crt": ""}.items():
        path = tmp_path / ("operator" if name == "ca.crt" else "") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    places = {"GOLDFINCH_CERTIFICATES": str(tmp_path), "FLWR_HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    chosen = {"GOLDFINCH_CLIENTS": "signs=Ward A & B-0\nsketch=*-0", "GOLDFINCH_MORE_NODES": "ward-a ward-b"}
    command = [str(DOCKER / "entrypoint.sh"), "enrol"]
    ran = subprocess.run(command, env=places | chosen, capture_output=True, text=True, check=True)
    arguments = "--client|signs=Ward A & B-0|--client|sketch=*-0|--node|ward-a|--node|ward-b|"
    assert ran.stdout == f"devices|enrol|{tmp_path / 'operator'}|{arguments}"


def test_no_proxy_of_docker_s_configuration_is_asked_for_the_containers_themselves(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "NO_PROXY": "intranet.example"}
    for superlink, host in (("link:8000", "link"), ("[2001:db8::1]:8000", "2001:db8::1")):
        environment["GOLDFINCH_SUPERLINK"] = superlink
        command = [str(DOCKER / "entrypoint.sh"), "env"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        own = f"localhost,127.0.0.1,::1,proxy,{host}"
        assert {f"no_proxy=intranet.example,{own}", f"NO_PROXY=intranet.example,{own}"} <= set(ran.stdout.splitlines())


def test_a_dismissed_device_keeps_no_other_from_being_enrolled(tmp_path: Path) -> None:
    records = tmp_path / "operator" / "nodes"
    records.mkdir(parents=True)
    (tmp_path / "operator" / "ca.crt").touch()
    (tmp_path / "goldfinch").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "goldfinch").chmod(0o755)
    environment = {
        "GOLDFINCH_CERTIFICATES": str(tmp_path),
        "FLWR_HOME": str(tmp_path),
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "GOLDFINCH_CLIENTS": "signs=signs-0\nsketch=sketch-0",
        "GOLDFINCH_MORE_NODES": "ward-a ward-b",
    }

    def enrol() -> tuple[str, list[str]]:
        command = [str(DOCKER / "entrypoint.sh"), "enrol"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        left_out = re.findall(r"enrol: (\S+) was dismissed, and is left out", ran.stderr)
        return ran.stdout.strip(), left_out

    beginning = f"devices enrol {tmp_path / 'operator'}"
    for name in ("signs", "ward-b"):
        (records / f"{name}.dismissed-device").write_text(f"7 {name}-0 2026-01-01T00:00:00+00:00\n")
    assert enrol() == (f"{beginning} --client sketch=sketch-0 --node ward-a", ["signs", "ward-b"])
    (records / "ward-b.pub").write_text("its new key")
    assert enrol() == (f"{beginning} --client sketch=sketch-0 --node ward-a --node ward-b", ["signs"])
    environment |= {"GOLDFINCH_CLIENTS": "signs=signs-0", "GOLDFINCH_MORE_NODES": ""}
    assert enrol() == ("", ["signs"]), "all others that have a key are not meant"


def test_the_page_s_archives_of_keys_are_read_by_their_user_alone(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\necho a key\n")
    (tmp_path / "docker").chmod(0o755)
    _, _, rest = (ROOT / "docs" / "deploy.md").read_text().partition("docker compose logs enrol")
    block, _, _ = rest.partition("```")
    command = "umask 022\n" + block.partition("\n")[2]
    subprocess.run(["sh", "-euc", command], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.glob("*.tar")] == [0o600, 0o600]


@pytest.mark.parametrize(
    ("store", "code", "words"),
    [
        ("sqlite", 0, "--database STATE/superlink.db"),
        ("memory", 0, "--database :flwr-in-memory:"),
        ("ram", 78, "not ram"),
    ],
)
def test_the_superlink_keeps_its_store_where_the_setting_says_and_enrols_devices_again(
    tmp_path: Path, store: str, code: int, words: str
) -> None:
    needed = [
        "server/ca.crt",
        "server/server.pem",
        "server/server.key",
        "serverapp/superexec.secret",
        "operator/ca.crt",
    ]
    for name in [*needed, "operator/nodes/ward-a.pub"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for program in ("goldfinch", "flower-superlink"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "GOLDFINCH_CERTIFICATES": str(tmp_path),
        "GOLDFINCH_STATE": str(tmp_path),
        "FLWR_HOME": str(tmp_path),
        "GOLDFINCH_STORE": store,
    }
    command = [str(DOCKER / "entrypoint.sh"), "superlink"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == code
    assert words.replace("STATE", str(tmp_path)) in ran.stdout + ran.stderr
    assert without_time((ran.stdout + ran.stderr).splitlines()) == []
    assert (f"goldfinch devices enrol {tmp_path / 'operator'} --restore" in ran.stdout) == (code == 0)


@pytest.mark.parametrize(("key", "value"), [("POLLS", "many"), ("POLLS", "1.5"), ("PATIENCE", "5m"), ("PATIENCE", "0")])
def test_a_number_of_the_proxy_that_is_none_is_named(tmp_path: Path, key: str, value: str) -> None:
    for name in ("ca.crt", "server.pem", "server.key"):
        (tmp_path / "server").mkdir(exist_ok=True)
        (tmp_path / "server" / name).touch()
    environment = {"PATH": "/usr/bin:/bin", "GOLDFINCH_CERTIFICATES": str(tmp_path), f"GOLDFINCH_{key}": value}
    command = [str(DOCKER / "entrypoint.sh"), "proxy"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
    assert ran.returncode == 78
    assert f"GOLDFINCH_POLLS and GOLDFINCH_PATIENCE are whole numbers from 1, not {value}" in ran.stderr


@pytest.mark.parametrize("role", ["proxy", "serverapp", "supernode"])
@pytest.mark.parametrize("value", ["superlink", "10.0.0.7", "superlink:", "[::1]"])
def test_a_superlink_without_a_port_is_named(role: str, value: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "GOLDFINCH_SUPERLINK": value}
    command = [str(DOCKER / "entrypoint.sh"), role]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
    assert ran.returncode == 78
    assert f"address with a port, such as superlink:8000, not {value}\n" in ran.stderr


def test_the_demonstration_keeps_many_nodes_in_memory() -> None:
    assert [store_for(nodes) for nodes in (4, MAX_NODES_IN_FILE, MAX_NODES_IN_FILE + 1)] == [
        "sqlite",
        "sqlite",
        "memory",
    ]


def test_every_setting_in_env_is_used_and_every_required_one_has_a_default() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text)) | {"COMPOSE_PROFILES"}
    defined = set(re.findall(r"^(\w+)=", (DOCKER / ".env").read_text(), re.MULTILINE))
    assert defined <= used
    assert not re.findall(r"\$\{\w+\}", text)  # each has a default, so the file works without .env


def test_the_entrypoint_is_a_shell_script_with_every_role_of_compose() -> None:
    script = DOCKER / "entrypoint.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)
    subprocess.run(["bash", "-n", str(DOCKER / "demo.sh")], check=True)
    roles = set(re.findall(r"^(\w+)\)", script.read_text(), re.MULTILINE))
    used = {
        service["command"][0]
        for service in SERVICES.values()
        if service.get("command") and not service.get("entrypoint")
    }
    used |= {service["entrypoint"][1] for service in SERVICES.values() if service.get("entrypoint")}
    assert used <= roles


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("superlink", "server/ca.crt is missing"),
        ("serverapp", "serverapp/ca.crt is missing"),
        ("proxy", "server/ca.crt is missing"),
        ("supernode", "node/ca.crt is missing or not readable by user UID; it is in this device's archive: copy it"),
        ("enrol", "operator/ca.crt is missing"),
        ("run", "operator/ca.crt is missing"),
    ],
)
def test_a_missing_certificate_is_named(tmp_path: Path, role: str, message: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "GOLDFINCH_CERTIFICATES": str(tmp_path), "FLWR_HOME": str(tmp_path)}
    result = subprocess.run(
        [str(DOCKER / "entrypoint.sh"), role], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 78
    assert message.replace("UID", str(os.getuid())) in result.stderr
    assert ("certificates service" in result.stderr) == (role != "supernode")
    assert without_time(result.stderr.splitlines()) == []


def test_the_page_s_command_for_both_authorities_writes_outside_the_container(tmp_path: Path) -> None:
    """The folder /certificates, between its volumes, is read-only there."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    (command,) = re.findall(r"`docker compose run --rm --no-deps -T certificates (sh -c '.*' >ca.crt)`", page)
    for name in ("authority/ca.crt", "authority/new/authority/ca.crt"):
        path = tmp_path / "certificates" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    subprocess.run(command.replace("/certificates/", "certificates/"), shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "ca.crt").read_text() == "authority/ca.crt\nauthority/new/authority/ca.crt\n"


def test_the_image_installs_the_dependencies_without_the_simulation() -> None:
    chosen = runpy.run_path(str(DOCKER / "dependencies.py"))["dependencies"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert 'ARG EXTRAS="server"' in (DOCKER / "Dockerfile").read_text()
    assert COMPOSE["x-image"]["build"]["args"]["EXTRAS"] == "${GOLDFINCH_EXTRAS:-server}"
    assert "opacus" in chosen(project, ["server", "privacy"]), "the accountant of privacy-max-epsilon"
    names = chosen(project, ["server"])
    assert not {"finch-clust", "scikit-learn", "scipy", "matplotlib"} & set(chosen(project, ["device"]))
    assert {"flwr", "hydra-core", "psutil", "finch-clust", "scikit-learn"} <= set(names)
    assert not {"ray", "torch", "torchvision", "flwr[simulation]"} & set(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


@pytest.mark.long
def test_no_package_of_the_image_needs_ray() -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'ray':\n"
        "            raise ImportError('ray is not in the image')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import server.app, client.app, server.flower.submit, goldfinch.cli, goldfinch.commands.membership\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
