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
    words = shlex.split(command.replace("\\\n", " ").replace("$(value GOLDFINCH_DOCKER_OPTIONS)", ""))[2:]
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
    for name, setting in {"$memory": "GOLDFINCH_MEMORY", "$cpus": "GOLDFINCH_CPUS"}.items():
        text = text.replace(f'"{name}"', settings_of(kit)[setting])
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


PROGRAMS = {
    "id": "echo 0",
    "chown": "",
    "useradd": "",
    "install": 'for word; do case $word in -o|-g|root) ;; *) set -- "$@" "$word" ;; esac; shift; done; '
    'PATH=/usr/bin:/bin exec install "$@"',
    "setpriv": 'while [ "$1" != sh ]; do shift; done; exec "$@"',
    "systemctl": "",
    "docker": 'case "$1 $2" in "image inspect") [ -e "$0.image" ] ;; "volume inspect") [ -e "$0.volume" ] ;; '
    '"run --detach") printf "%s|" "$@"; touch "$0.volume" ;; "run --rm") [ ! -e "$0.denied" ] ;; esac',
}
"""Stand-ins for what only root may do, and for a Docker that has the image if a file says so."""


def start(kit: Path, folder: Path, *, image: bool = False, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the start of a kit with these settings; ``folder`` stands for the file system's root, and has ``images``."""
    for name in ("bin", "images", "opt/goldfinch/.venv/bin", "run/systemd/system", "etc/systemd/system"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, text in {f"bin/{name}": text for name, text in PROGRAMS.items()}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "opt/goldfinch/.venv/bin/goldfinch-supernode").symlink_to("/bin/true")
    if image:
        (folder / "bin/docker.image").touch()
    shutil.copytree(kit, folder / "kit")
    text = (kit / "settings.env").read_text()
    for name, value in {"GOLDFINCH_DATA": str(folder / "images"), **settings}.items():
        text = re.sub(f"^{name}=.*$", lambda _, line=f"{name}={value}": line, text, flags=re.MULTILINE)  # type: ignore[misc]
    (folder / "kit/settings.env").write_text(text)
    script = re.sub("/(etc|opt|run|var)/", rf"{folder}/\1/", (kit / "start").read_text())
    (folder / "kit/start").write_text(script)
    return again(folder, "kit")


def again(folder: Path, place: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(folder / place / "start")]
    path = f"{folder}/bin:/usr/bin:/bin"
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("memory", "cpus", "expected"),
    [("1500m", "0.5", ("1500M", "50%")), ("3gb", "2", ("3G", "200%")), ("1.5GB", "0.333", ("1.5G", "33%"))],
)
def test_the_limits_that_a_device_s_owner_sets_reach_the_service(
    memory: str, cpus: str, expected: tuple[str, str], kit: Path, tmp_path: Path
) -> None:
    done = start(kit, tmp_path, GOLDFINCH_MEMORY=memory, GOLDFINCH_CPUS=cpus)
    assert (done.returncode, done.stderr) == (0, "")
    unit = (tmp_path / "etc/systemd/system/goldfinch.service").read_text()
    assert f"\nMemoryMax={expected[0]}\nCPUQuota={expected[1]}\n" in unit
    shown = unit.replace(expected[0], "3G").replace(expected[1], "200%").replace(f"{tmp_path}/images", "/srv/images")
    assert shown == (kit / "goldfinch.service").read_text()


def test_a_service_sees_its_data_wherever_they_are(kit: Path, tmp_path: Path) -> None:
    """It sees nothing else of /home and /tmp."""
    data = tmp_path / "images of ward A & B | C"
    data.mkdir()
    assert start(kit, tmp_path, GOLDFINCH_DATA=str(data)).stderr == ""
    unit = tmp_path / "etc/systemd/system/goldfinch.service"
    assert f'\nProtectHome=tmpfs\nPrivateTmp=true\nBindReadOnlyPaths="{data}"\n' in unit.read_text()


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("GOLDFINCH_MEMORY", "three", "is not a size such as 3g"),
        ("GOLDFINCH_MEMORY", "", "is not a size such as 3g"),
        ("GOLDFINCH_CPUS", "", "is not a number of CPUs"),
        ("GOLDFINCH_CPUS", "0", "is not a number of CPUs"),
        ("GOLDFINCH_CPUS", "all", "is not a number of CPUs"),
        ("GOLDFINCH_DATA", "", "is not a whole path"),
        ("GOLDFINCH_DATA", "images", "is not a whole path"),
        ("GOLDFINCH_DATA", "/srv/a:b", "is not a whole path"),
        ("GOLDFINCH_DATA", "/srv/a\\b", "is not a whole path"),
        ("GOLDFINCH_DATA", '"/srv/a"', "is not a whole path"),
        ("GOLDFINCH_DATA", "/nowhere", "is not a folder"),
    ],
)
def test_a_setting_that_neither_docker_nor_systemd_would_take_is_named(
    setting: str, value: str, said: str, image: bool, kit: Path, tmp_path: Path
) -> None:
    done = start(kit, tmp_path, image=image, **{setting: value})
    assert done.returncode == 1
    assert done.stderr.startswith(f"start: {setting}={value} in settings.env {said}"), done.stderr


def test_data_that_the_service_or_the_container_cannot_read_are_named(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    (tmp_path / "container" / "bin").mkdir(parents=True)
    denied = {"setpriv": "exit 1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROGRAMS, "setpriv", denied["setpriv"])
        done = start(kit, tmp_path / "service")
    assert (done.returncode, "user goldfinch cannot read GOLDFINCH_DATA" in done.stderr) == (1, True)
    (tmp_path / "container" / "bin" / "docker.denied").touch()
    done = start(kit, tmp_path / "container", image=True)
    assert (done.returncode, done.stdout, "user, 10001, cannot read" in done.stderr) == (1, "", True)


def test_a_container_gets_further_options_of_docker(kit: Path, tmp_path: Path) -> None:
    done = start(kit, tmp_path, image=True, GOLDFINCH_DOCKER_OPTIONS="--gpus all --network devices")
    assert done.stderr == ""
    assert f"|--gpus|all|--network|devices|goldfinch:{VERSION}|supernode|" in done.stdout


def test_settings_are_changed_without_the_kit_and_by_root_alone(kit: Path, tmp_path: Path) -> None:
    """What root runs and reads does not belong to the device's user, and an option of Docker gives all rights."""
    start(kit, tmp_path)
    shutil.rmtree(tmp_path / "kit")
    kept = tmp_path / "etc/goldfinch"
    text = (kept / "settings.env").read_text()
    (kept / "settings.env").write_text(text.replace("GOLDFINCH_MEMORY=3g", "GOLDFINCH_MEMORY=4g"))
    assert again(tmp_path, "etc/goldfinch").stderr == ""
    assert "\nMemoryMax=4G\n" in (tmp_path / "etc/systemd/system/goldfinch.service").read_text()
    owned = re.findall(r"^ *chown (.*)$", (kit / "start").read_text(), re.MULTILINE)
    assert len(owned) == 2
    assert all(re.match(r"\S+ /etc/goldfinch/key /etc/goldfinch/ca.crt\b", line) for line in owned)


def test_a_device_goes_on_where_its_state_is(kit: Path, tmp_path: Path) -> None:
    """Started elsewhere, it would run twice, and find no record of what was released of its data."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "systemd").mkdir()
    assert start(kit, tmp_path / "docker", image=True).returncode == 0
    assert again(tmp_path / "docker", "kit").returncode == 0
    (tmp_path / "docker/bin/docker.image").unlink()
    pruned = again(tmp_path / "docker", "kit")
    assert (pruned.returncode, "here: docker load it" in pruned.stderr) == (1, True)
    assert not list((tmp_path / "docker/etc/systemd/system").iterdir())

    assert start(kit, tmp_path / "systemd").returncode == 0
    (tmp_path / "systemd/bin/docker.image").touch()
    loaded = again(tmp_path / "systemd", "kit")
    assert (loaded.returncode, loaded.stdout) == (1, "")
    assert f"docker image rm goldfinch:{VERSION}\n" in loaded.stderr
    (tmp_path / "systemd/etc/systemd/system/goldfinch.service").unlink()  # what the message says
    assert again(tmp_path / "systemd", "kit").returncode == 0


@pytest.mark.parametrize("folder", ["authority", "server"])
def test_a_kit_is_not_started_where_a_server_s_keys_are(folder: str, kit: Path, tmp_path: Path) -> None:
    (tmp_path / "etc/goldfinch" / folder).mkdir(parents=True)
    done = start(kit, tmp_path)
    assert (done.returncode, "has the keys of a server" in done.stderr) == (1, True)
    assert [path.name for path in (tmp_path / "etc/goldfinch").iterdir()] == [folder]


def test_a_second_start_of_the_service_applies_changed_settings(kit: Path, tmp_path: Path) -> None:
    """``systemctl enable --now`` leaves a running service as it is."""
    script = (kit / "start").read_text()
    lines = script[script.index("  systemctl daemon-reload") : script.index('fi\nsay "neither Docker')]
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
    text = text.replace('"/srv/images"', '"/home/me/images of ward A & B"').replace("MemoryMax=3G", "MemoryMax=1.5G")
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
        (["--server", "fl.example.org:8443"], "make the kit where they were made"),
        (["--server", "fl.example.org:8443", "--kit", "{keys}"], "Is a directory; choose another --kit"),
        (
            ["--server", "fl.example.org:8443", "--kit", "{keys}/server/server.key/x.tar"],
            "server.key/x.tar: File exists",
        ),
    ],
)
def test_what_a_kit_lacks_is_told_before_the_server_is_asked(
    more: list[str], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection is configured, which would be the first error of an enrolment."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    ensure(tmp_path / "keys", [], ["ward-a"])
    if more[1:] == ["fl.example.org:8443"]:
        shutil.rmtree(tmp_path / "keys" / "nodes")
    words = ["devices", "enrol", str(tmp_path / "keys"), "--node", "ward-a", *more]
    if "--kit" not in more:
        words += ["--kit", str(tmp_path / "kit.tar")]
    assert main([word.format(keys=tmp_path / "keys") for word in words]) == 1
    assert missing in capsys.readouterr().err


def test_a_kit_is_for_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure(tmp_path, [], ["ward-a", "ward-b"])
    words = ["devices", "enrol", str(tmp_path), "--kit", str(tmp_path / "kit.tar"), "--server", "localhost:1"]
    for devices in ([], ["--node", "ward-a", "--node", "ward-b"]):
        assert main([*words, *devices]) == 1
        assert "--kit is for one device" in capsys.readouterr().err
