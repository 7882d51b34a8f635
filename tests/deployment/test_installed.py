"""The copy of a run's code on a device is removed if it is not as the server sent it; Flower makes the copies."""

from __future__ import annotations

import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from flwr.cli.install import install_from_fab
from flwr.proto.error_pb2 import Error
from flwr.proto.fab_pb2 import Fab, GetFabRequest, GetFabResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message
from flwr.supernode.fleet_http_client import FleetHttpClient

from client.installed import InstalledCode
from client.supernode import _note_code

PROJECT = """
[project]
name = "goldfinch"
version = "0.1.0"
license = "MIT"
[tool.flwr.app]
publisher = "goldfinch"
[tool.flwr.app.components]
serverapp = "server.app:app"
clientapp = "client.app:app"
"""
FILES = {"pyproject.toml": PROJECT, "client/__init__.py": "", "client/app.py": "app = None\n" * 20}


def bundle_of(files: dict[str, str]) -> bytes:
    """A bundle as Flower builds it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        lines = []
        for name, text in files.items():
            archive.writestr(name, text)
            lines.append(f"{name},{hashlib.sha256(text.encode()).hexdigest()},{len(text)}")
        archive.writestr(".info/CONTENT", "\n".join(lines))
    return stream.getvalue()


BUNDLE = bundle_of(FILES)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Flower's copy."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    return install_from_fab(BUNDLE, skip_prompt=True)


def damage_nothing(folder: Path) -> None:
    (folder / "client" / "__pycache__").mkdir()
    (folder / "client" / "__pycache__" / "app.cpython-311.pyc").touch()


def lose_the_last_file(folder: Path) -> None:
    (folder / "pyproject.toml").unlink()


def cut_a_file(folder: Path) -> None:
    (folder / "client" / "app.py").write_text("app = None\n")


def lose_all(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("damage", "stays"),
    [(damage_nothing, True), (lose_the_last_file, False), (cut_a_file, False), (lose_all, False)],
)
def test_a_copy_stays_only_if_it_is_what_was_sent(
    damage: Callable[[Path], None], stays: bool, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(installed)
    InstalledCode(quiet_seconds=0.0).note(installed, BUNDLE)
    assert installed.exists() == stays
    said = f"goldfinch-supernode: removing {installed}, an incomplete copy of a run's code"
    assert (said in capsys.readouterr().out) != stays
    assert install_from_fab(BUNDLE, skip_prompt=True) == installed
    assert (installed / "client" / "app.py").read_text() == FILES["client/app.py"]
    assert (installed / "pyproject.toml").read_text() == PROJECT


def test_copies_of_other_code_and_other_apps_are_left_alone(installed: Path) -> None:
    other = installed.parent / "somebody.app.1.0.0.12345678"
    other.mkdir()
    lose_the_last_file(installed)
    InstalledCode(quiet_seconds=0.0).note(installed.parent / "goldfinch.goldfinch.0.1.0.12345678", BUNDLE)
    assert other.exists()
    assert installed.exists()


def test_a_copy_that_another_node_still_makes_is_awaited(installed: Path) -> None:
    code = (installed / "client" / "app.py").read_bytes()
    cut_a_file(installed)
    number = installed.stat().st_ino
    writer = threading.Timer(0.3, (installed / "client" / "app.py").write_bytes, [code])
    writer.start()
    InstalledCode(quiet_seconds=5.0).note(installed, BUNDLE)
    writer.join()
    assert installed.stat().st_ino == number


def test_a_copy_is_old_by_any_clock(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board without a clock of its own begins in the past after a power cut."""
    cut_a_file(installed)
    now = time.time()
    monkeypatch.setattr("client.installed.time.time", lambda: now - 3600)
    monkeypatch.setattr("client.installed.time.sleep", lambda _: pytest.fail("it waits"))
    InstalledCode(quiet_seconds=60.0).note(installed, BUNDLE)
    assert not installed.exists()


def test_what_cannot_be_removed_is_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_a_file(installed)

    def refuse(_: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("client.installed.shutil.rmtree", refuse)
    InstalledCode(quiet_seconds=0.0).note(installed, BUNDLE)
    assert f"remove {installed}, an incomplete copy of a run's code: not yours" in capsys.readouterr().out


def test_a_node_checks_the_copy_as_code_comes_and_after_a_message_that_failed(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages go through Flower's own connection to the server."""
    for name in ("GetFab", "PushMessages"):
        monkeypatch.setattr(FleetHttpClient, name, getattr(FleetHttpClient, name))  # put back at the end
    _note_code(InstalledCode(quiet_seconds=0.0))

    def answer(request: httpx.Request) -> httpx.Response:
        kinds = {
            "get-fab": GetFabResponse(fab=Fab(hash_str="", content=BUNDLE)).SerializeToString(),
            "push-messages": PushMessagesResponse().SerializeToString(),
        }
        return httpx.Response(200, content=kinds[request.url.path.rpartition("/")[2]])

    client = FleetHttpClient("http://server")
    client._client = httpx.Client(transport=httpx.MockTransport(answer))
    lose_the_last_file(installed)
    client.GetFab(GetFabRequest())
    assert not installed.exists()
    install_from_fab(BUNDLE, skip_prompt=True)
    cut_a_file(installed)
    client.PushMessages(PushMessagesRequest(messages_list=[Message()]))
    assert installed.exists()
    client.PushMessages(PushMessagesRequest(messages_list=[Message(error=Error(code=1))]))
    assert not installed.exists()
