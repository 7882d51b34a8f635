"""engine=superlink needs a SuperLink that somebody started: Flower's local simulation in its place is refused."""

import socket
from pathlib import Path

import pytest

from common.errors import ConfigError
from goldfinch.commands import doctor
from server.flower.processes import check_connection

LOCAL = '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'
HOSPITAL = '[superlink.hospital]\naddress = "fl.example.org:9093"\n'


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (None, None, "'local'.*names no SuperLink"),
        (LOCAL, None, "'local'.*local simulation, :local:"),
        (LOCAL.replace(":local:", ":local-in-memory:"), None, "local simulation"),
        (LOCAL + HOSPITAL, "clinic", "'clinic'.*names no SuperLink"),
        ("[superlink.hospital]\ninsecure = true\n", "hospital", "names no SuperLink"),
        ('superlink = "x"\n', None, "cannot be read"),
        ("not toml", None, "cannot be read"),
    ],
    ids=["no file", "local", "local in memory", "unknown name", "no address", "no table", "not TOML"],
)
def test_a_connection_without_a_superlink_is_refused(
    text: str | None, name: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_connection(path, name)


def test_doctor_tells_which_superlinks_accept_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert doctor._connections() == []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        here = f'[superlink.here]\naddress = "127.0.0.1:{server.getsockname()[1]}"\n'
        (tmp_path / "config.toml").write_text(LOCAL + here + '[superlink.gone]\naddress = "127.0.0.1:1"\n')
        found = {finding.name: finding.state for finding in doctor._connections()}
    assert found == {"connection here": doctor.OK, "connection gone": doctor.NOTE}


@pytest.mark.parametrize("default", [True, False], ids=["by default", "by name"])
def test_a_connection_to_a_superlink_is_accepted(default: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[superlink]\ndefault = "hospital"\n' + HOSPITAL if default else LOCAL + HOSPITAL)
    check_connection(path, None if default else "hospital")
