"""The start-up kit of a device: what is in it, and that its programs accept what is in it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from support.federation import ROOT

from common.errors import ConfigError
from common.versions import VERSION
from goldfinch.cli import main
from server.admission.certificates import Certificates, ensure
from server.admission.kit import write_kit


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked kit."""
    folder = tmp_path_factory.mktemp("kit")
    files = Certificates(folder / "keys")
    ensure(files.folder, [], ["ward-a"])
    write_kit(folder / "ward-a.tar", files, "ward-a", "radiology-north-2", "fl.example.org:8443")
    assert (folder / "ward-a.tar").stat().st_mode & 0o777 == 0o600
    with tarfile.open(folder / "ward-a.tar") as archive:
        archive.extractall(folder, filter="data")
    assert (folder / "ward-a" / "key").read_bytes() == files.node_key("ward-a").read_bytes()
    assert (folder / "ward-a" / "ca.crt").read_bytes() == files.authority.read_bytes()
    return folder / "ward-a"


def test_a_kit_has_what_a_device_needs_and_nothing_of_others(kit: Path) -> None:
    names = {"README", "start", "settings.env", "goldfinch.service", "key", "ca.crt"}
    assert {path.name for path in kit.iterdir()} == names
    assert (kit / "key").stat().st_mode & 0o777 == 0o600
    assert len((kit / "README").read_text().splitlines()) <= 10
    for path in kit.iterdir():
        if path.name not in ("key", "ca.crt"):
            assert not re.search(r"@[A-Z]+@", path.read_text()), path
    settings = (kit / "settings.env").read_text()
    assert "GOLDFINCH_DOMAIN=radiology-north\nGOLDFINCH_INDEX=2\nGOLDFINCH_SERVER=fl.example.org:8443\n" in settings


def settings_of(kit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", (kit / "settings.env").read_text(), re.MULTILINE))


def container(text: str) -> dict[str, list[str]]:
    """Return the options of the one ``docker run --detach`` in a text: values by name; the rest has an empty name."""
    (command,) = re.findall(r"docker run --detach(?:.*\\\n)+.*$", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))[2:]
    options: dict[str, list[str]] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            options.setdefault("", []).append(word)
        elif word in ("--detach", "--init", "--read-only"):
            options[word] = []
        else:
            options.setdefault(word, []).append(words.pop(0))
    return options


def test_the_container_of_a_kit_has_the_limits_of_the_demonstration_s_devices(kit: Path) -> None:
    shipped = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    hardened, service = shipped["x-hardened"], shipped["x-supernode"]
    found = container((kit / "start").read_text())
    check, logging = service["healthcheck"], hardened["logging"]
    expected = {
        "--cap-drop": hardened["cap_drop"],
        "--security-opt": [option.removesuffix(":true") for option in hardened["security_opt"]],
        "--tmpfs": hardened["tmpfs"],
        "--pids-limit": [str(hardened["pids_limit"])],
        "--log-driver": [logging["driver"]],
        "--log-opt": [f"{name}={value}" for name, value in logging["options"].items()],
        "--restart": [service["restart"]],
        "--health-cmd": [" ".join(check["test"][1:])],
        "--health-interval": [check["interval"]],
        "--health-timeout": [check["timeout"]],
        "--health-retries": [str(check["retries"])],
        "--health-start-period": [check["start_period"]],
        "": [f"goldfinch:{VERSION}", *service["command"]],
    }
    assert {name: found.get(name) for name in expected} == expected
    assert ("--init" in found, "--read-only" in found) == (hardened["init"], hardened["read_only"])


def test_the_documented_container_is_that_of_a_kit(kit: Path) -> None:
    text = (kit / "start").read_text()
    for name, value in settings_of(kit).items():
        text = text.replace(f"$(value {name})", value)
    of_kit, documented = container(text), container((ROOT / "docs" / "deploy.md").read_text())
    assert [volume.partition(":")[2] for volume in documented.pop("--volume")] == [
        volume.partition(":")[2] for volume in of_kit.pop("--volume")
    ]
    assert f"OMP_NUM_THREADS={settings_of(kit)['OMP_NUM_THREADS']}" in documented.pop("--env")
    del of_kit["--env"], of_kit["--env-file"]  # the settings, which the documented command has one by one
    assert documented == of_kit


def test_the_service_of_a_kit_has_the_limits_of_its_container(kit: Path) -> None:
    found = container((kit / "start").read_text())
    unit = dict(re.findall(r"^(\w+)=(.*)$", (kit / "goldfinch.service").read_text(), re.MULTILINE))
    assert unit["MemoryMax"] == settings_of(kit)["GOLDFINCH_MEMORY"].upper()
    assert unit["CPUQuota"] == f"{100 * int(settings_of(kit)['GOLDFINCH_CPUS'])}%"
    assert [unit["TasksMax"]] == found["--pids-limit"]
    assert unit["NoNewPrivileges"] == "true"
    assert unit["Restart"] == "always"
    assert f"exit {unit['SuccessExitStatus']}' TERM INT" in (ROOT / "docker" / "entrypoint.sh").read_text()


def test_the_limits_that_a_device_s_owner_sets_reach_the_service(kit: Path, tmp_path: Path) -> None:
    """The lines of the script that write the unit, with changed settings."""
    script = (kit / "start").read_text()
    lines = script[script.index("value()") : script.index("data=")]
    lines += script[script.index("  memory=") : script.index("  systemctl daemon-reload")]
    text = (kit / "settings.env").read_text().replace("GOLDFINCH_MEMORY=3g", "GOLDFINCH_MEMORY=1500m")
    (tmp_path / "settings.env").write_text(text.replace("GOLDFINCH_CPUS=2", "GOLDFINCH_CPUS=0.5"))
    lines = lines.replace("/etc/goldfinch/", f"{tmp_path}/").replace("/etc/systemd/system/", f"{tmp_path}/")
    subprocess.run(["sh", "-euc", lines], env={"PATH": "/usr/bin:/bin", "here": str(kit)}, check=True)
    unit = (tmp_path / "goldfinch.service").read_text()
    assert "\nMemoryMax=1500M\nCPUQuota=50%\n" in unit
    assert unit.replace("1500M", "3G").replace("50%", "200%") == (kit / "goldfinch.service").read_text()


def test_a_second_start_of_the_service_applies_changed_settings(kit: Path, tmp_path: Path) -> None:
    """``systemctl enable --now`` leaves a running service as it is."""
    script = (kit / "start").read_text()
    lines = script[script.index("  systemctl daemon-reload") : script.index('fi\necho "start: neither Docker')]
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\n')
    (tmp_path / "systemctl").chmod(0o755)
    subprocess.run(["sh", "-euc", lines], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [
        "daemon-reload",
        "enable goldfinch",
        "restart goldfinch",
    ]


def test_the_page_leaves_time_to_edit_a_kit_s_settings() -> None:
    """To unpack again would replace edited settings."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    started = re.findall(r"^.*sudo \S*start.*$", page, re.MULTILINE)
    assert len(started) == 1
    assert "tar" not in started[0].partition("start")[0]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_service_of_a_kit(kit: Path, tmp_path: Path) -> None:
    text = (kit / "goldfinch.service").read_text().replace("/opt/goldfinch/docker/entrypoint.sh", "/bin/true")
    (tmp_path / "goldfinch.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "goldfinch.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "goldfinch.service" not in done.stderr, done.stderr


def test_the_start_of_a_kit_is_a_shell_script_that_names_what_is_missing(kit: Path, tmp_path: Path) -> None:
    subprocess.run(["sh", "-n", kit / "start"], check=True)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [kit / "start"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "start: run it with sudo\n")


@pytest.mark.parametrize("server", ["", "fl.example.org", "fl.example.org:", ":8443", "::1:8443"])
def test_a_server_without_a_port_makes_no_kit(server: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT|--kit needs --server HOST:PORT"):
        write_kit(tmp_path / "kit.tar", Certificates(tmp_path), "ward-a", "ward-a-0", server)
    assert not (tmp_path / "kit.tar").exists()


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ([], "--kit needs --server HOST:PORT"),
        (["--server", "fl.example.org"], "is not HOST:PORT"),
        (["--server", "fl.example.org:8443"], "goldfinch devices certificates makes them"),
    ],
)
def test_what_a_kit_lacks_is_told_before_the_server_is_asked(
    more: list[str], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection is configured, which would be the first error of an enrolment."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    ensure(tmp_path / "keys", [], ["ward-a"])
    if "fl.example.org:8443" in more:
        shutil.rmtree(tmp_path / "keys" / "nodes")
    words = ["devices", "enrol", str(tmp_path / "keys"), "--node", "ward-a", "--kit", str(tmp_path / "kit.tar"), *more]
    assert main(words) == 1
    assert missing in capsys.readouterr().err


def test_a_kit_is_for_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure(tmp_path, [], ["ward-a", "ward-b"])
    words = ["devices", "enrol", str(tmp_path), "--kit", str(tmp_path / "kit.tar"), "--server", "localhost:1"]
    for devices in ([], ["--node", "ward-a", "--node", "ward-b"]):
        assert main([*words, *devices]) == 1
        assert "--kit is for one device" in capsys.readouterr().err
