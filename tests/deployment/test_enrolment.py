"""What the operator's folder remembers of enrolled devices."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.errors import ConfigError, EngineError
from goldfinch.cli import main
from server.admission import kit
from server.admission.certificates import Certificates, ensure
from server.admission.enrolment import Enrolment


class Link:
    """A SuperLink that answers as Flower's command line does, and forgets its devices when it is told to."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def call(self, arguments: Sequence[str]) -> str:
        """Return the output of a call."""
        answer: dict[str, object] = {"success": True}
        if arguments[1] == "register":
            number = str(100 + len(self.names))
            self.names[number] = arguments[arguments.index("--name") + 1]
            answer["node-id"] = number
        if arguments[1] == "list":
            answer["nodes"] = [{"node-id": number} for number in self.names]
        return json.dumps(answer)


@pytest.mark.parametrize("client", ["webcam-1", "Real World-0", "site  a-12"])
def test_a_device_stays_the_client_that_it_was_enrolled_for(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link()
    monkeypatch.setattr(Enrolment, "_call", lambda self, arguments: link.call(arguments))
    enrolment = Enrolment(tmp_path, None, {})
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "ward-a.pub").write_text("a key\n")
    enrolment.enrol(["ward-a"], [client])
    assert list(link.names.values()) == [client]
    assert enrolment.enrolled("ward-a") == ("100", client)

    link.names.clear()
    assert enrolment.restore(0.0) == {"ward-a": f"enrolled as 100, for {client}"}
    assert list(link.names.values()) == [client]

    enrolment.dismiss("ward-a")
    assert enrolment.dismissed["ward-a"][0] == client

    (tmp_path / "nodes" / "ward-a.pub").write_text("a new key\n")
    link.names.clear()
    assert enrolment.enrol() == {"ward-a": f"enrolled as 100, for {client}"}
    assert enrolment.dismissed == {}
    link.names.clear()
    assert enrolment.restore(0.0) == {"ward-a": f"enrolled as 100, for {client}"}
    enrolment.dismiss("ward-a")
    (tmp_path / "nodes" / "ward-a.pub").write_text("a third key\n")
    (tmp_path / "nodes" / "ward-b.dismissed-device").write_text("7 b-0 damaged\n")  # another's record
    assert enrolment.enrol(["ward-a"], ["cardiology-2"])["ward-a"].endswith("for cardiology-2")
    assert not (tmp_path / "nodes" / "ward-a.dismissed-device").exists()
    (tmp_path / "nodes" / "ward-b-3.pub").write_text("a key\n")
    assert enrolment.enrol(["ward-b-3"])["ward-b-3"].endswith("for ward-b-3")
    (tmp_path / "nodes" / "ward-03.pub").write_text("a key\n")
    assert enrolment.enrol(["ward-03"])["ward-03"].endswith("for ward-03-0"), "no client is ward-03"


class Register:
    """A SuperLink that keeps a key taken once it was enrolled, as Flower does, and that answers about each."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}
        self.status: dict[str, str] = {}

    def call(self, arguments: Sequence[str]) -> str:
        """Return the output of a call."""
        if arguments[1] == "list":
            nodes = [{"node-id": number, "status": self.status[number]} for number in self.status]
            return json.dumps({"success": True, "nodes": nodes})
        if arguments[1] == "unregister":
            if self.status.get(arguments[2], "unregistered") == "unregistered":
                return json.dumps({"success": False, "error-message": "Node ID not found"})
            self.status[arguments[2]] = "unregistered"
            return json.dumps({"success": True})
        key = Path(arguments[2]).read_text()
        if key in self.numbers:
            return json.dumps({"success": False, "error-message": "Public key already in use"})
        self.numbers[key] = str(100 + len(self.numbers))
        self.status[self.numbers[key]] = "offline"
        return json.dumps({"success": True, "node-id": self.numbers[key]})


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """A SuperLink, which has enrolled ward-a, ward-b and ward-c."""
    found = Register()
    monkeypatch.setattr(Enrolment, "_call", lambda self, arguments: found.call(arguments))
    (tmp_path / "nodes").mkdir()
    for name in ("ward-a", "ward-b", "ward-c"):
        (tmp_path / "nodes" / f"{name}.pub").write_text(f"key {name}\n")
        Enrolment(tmp_path, None, {}).enrol([name])  # one after the other, so that their numbers are 100, 101, 102
    return found


def test_a_key_that_was_taken_off_the_list_is_not_said_to_be_enrolled(register: Register, tmp_path: Path) -> None:
    enrolment = Enrolment(tmp_path, None, {})
    register.status["101"] = "unregistered"  # flwr supernode unregister 101, or a dismissal that was interrupted
    with pytest.raises(
        ConfigError, match=r"the key of ward-b is refused, .*dismiss FOLDER --node ward-b, then give"
    ) as caught:
        enrolment.enrol()
    assert "ward-a: enrolled already for ward-a-0\nward-c: enrolled already" in str(caught.value)
    assert enrolment.restore(0.0).keys() == {"ward-b"}
    assert "goldfinch devices dismiss FOLDER --node ward-b" in enrolment.restore(0.0)["ward-b"]
    assert enrolment.dismiss("ward-b").startswith("dismissed; ")
    (tmp_path / "nodes" / "ward-b.pub").write_text("a new key\n")
    assert enrolment.enrol()["ward-b"] == "enrolled as 103, for ward-b-0"


def test_a_mistyped_device_does_not_keep_the_others_in(
    register: Register, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["devices", "dismiss", str(tmp_path)]
    for name in ("ward-b", "ward-x", "ward-a"):
        words += ["--node", name]
    assert main(words) == 1
    assert set(register.status.values()) == {"offline", "unregistered"}
    assert (register.status["100"], register.status["101"]) == ("unregistered", "unregistered")
    said = capsys.readouterr().err
    assert "--node ward-x: " in said
    assert "ward-a: dismissed; " in said
    words[words.index("ward-x")] = "ward-c"
    assert main(words) == 0, "what is dismissed already is no error"
    assert set(register.status.values()) == {"unregistered"}


def test_every_dismissed_key_of_a_device_stays_dismissed(register: Register, tmp_path: Path) -> None:
    """A key comes back from a backup of the operator's folder, or of a stolen device."""
    ensure(tmp_path, [], ["ward-d"])
    files = Certificates(tmp_path)
    enrolment = Enrolment(files.node_public_key("ward-d").parent.parent, None, {})
    shutil.copytree(files.node("ward-d"), tmp_path / "backup")
    for _ in range(2):
        enrolment.enrol(["ward-d"])
        enrolment.dismiss("ward-d")
        shutil.rmtree(files.node("ward-d"))
        ensure(tmp_path, [], ["ward-d"])
    shutil.rmtree(files.node("ward-d"))
    files.node_public_key("ward-d").unlink()
    shutil.copytree(tmp_path / "backup", files.node("ward-d"))
    ensure(tmp_path, [], ["ward-d"])
    assert not files.node_public_key("ward-d").exists()
    assert len(register.numbers) == 5
    dismissed = files.node_public_key("ward-d").with_suffix(".pub.dismissed")
    assert len(dismissed.read_text().splitlines()) == 2


def test_an_interrupted_dismissal_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink refuses to dismiss a device twice; a device that it does not know is not said to be dismissed."""
    nodes: dict[str, str] = {}

    def call(_: Enrolment, arguments: Sequence[str]) -> str:
        if arguments[1] == "list":
            return json.dumps({"success": True, "nodes": [{"node-id": key, "status": nodes[key]} for key in nodes]})
        if nodes.get(arguments[2]) != "offline":
            return json.dumps({"success": False, "error-message": "Node ID not found"})
        nodes[arguments[2]] = "unregistered"
        return json.dumps({"success": True})

    monkeypatch.setattr(Enrolment, "_call", call)
    monkeypatch.setattr("server.admission.enrolment.check_place", lambda _: None)  # it writes and deletes, too
    enrolment, folder = Enrolment(tmp_path, None, {}), tmp_path / "nodes"
    folder.mkdir()
    public = folder / "ward-a.pub"

    def stop(_: Path, __: object = None, *, private: bool = False) -> None:
        raise KeyboardInterrupt(private)

    for interrupted in (None, "server.admission.enrolment.hand_over", "pathlib.Path.replace", "pathlib.Path.unlink"):
        nodes["7"] = "offline"
        public.write_text("a key")
        (folder / "ward-a.number").write_text("7 ward-a-0\n")
        with monkeypatch.context() as patch:
            if interrupted:
                patch.setattr(interrupted, stop)
                with pytest.raises(KeyboardInterrupt):
                    enrolment.dismiss("ward-a")
        if public.exists():
            assert enrolment.dismiss("ward-a").startswith("dismissed; its key is refused")
        assert not public.exists(), "restored, it would take part again"
        assert enrolment.dismissed["ward-a"][0] == "ward-a-0"
    nodes.clear()
    public.write_text("a new key")
    (folder / "ward-a.number").write_text("7 ward-a-0\n")
    with pytest.raises(EngineError, match=r"could not be dismissed: .*goldfinch devices enrol FOLDER --restore"):
        enrolment.dismiss("ward-a")
    (folder / "ward-a.number").unlink()
    with pytest.raises(ConfigError, match=r"flwr supernode unregister NUMBER; then delete ward-a\.pub"):
        enrolment.dismiss("ward-a")


def test_the_superlink_s_user_can_read_what_root_enrolled_and_dismissed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service restores what root has enrolled under a umask of 077."""
    link = Link()
    monkeypatch.setattr(Enrolment, "_call", lambda self, arguments: link.call(arguments))
    enrolment = Enrolment(tmp_path, None, {})
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "ward-a.pub").write_text("a key\n")
    umask = os.umask(0o077)
    try:
        enrolment.enrol()
        assert (tmp_path / "nodes" / "ward-a.number").stat().st_mode & 0o777 == 0o644
        enrolment.dismiss("ward-a")
    finally:
        os.umask(umask)
    assert (tmp_path / "nodes" / "ward-a.dismissed-device").stat().st_mode & 0o777 == 0o644


def test_nothing_is_asked_of_the_superlink_that_could_not_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that was not kept is lost: the key is in use, and the device would need another."""
    called: list[str] = []

    def call(_: Enrolment, arguments: Sequence[str]) -> str:
        called.append(arguments[1])
        return json.dumps({"success": True, "node-id": "7"})

    monkeypatch.setattr(Enrolment, "_call", call)
    enrolment = Enrolment(tmp_path, None, {})
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "ward-a.pub").write_text("a key\n")
    write = kit.write_bytes

    def full(path: Path, *content: bytes, private: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(kit, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left.*ward-a\.number'"):
        enrolment.enrol()
    assert called == []
    monkeypatch.setattr(kit, "write_bytes", write)
    enrolment.enrol()
    monkeypatch.setattr(kit, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left.*ward-a\.dismissed-device'"):
        enrolment.dismiss("ward-a")
    monkeypatch.setattr(kit, "write_bytes", write)
    (tmp_path / "nodes" / "ward-a.pub.dismissed").mkdir()
    with pytest.raises(OSError, match=r"Is a directory.*ward-a\.pub\.dismissed'"):
        enrolment.dismiss("ward-a")
    (tmp_path / "nodes" / "ward-a.pub.dismissed").rmdir()
    assert called == ["register"]
    assert sorted(path.name for path in (tmp_path / "nodes").iterdir()) == ["ward-a.number", "ward-a.pub"]


@pytest.mark.parametrize("ending", ["pub", "number", "dismissed-device"])
def test_a_pipe_in_the_operator_s_folder_is_named(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would wait for ever, here or in Flower's own program."""
    monkeypatch.setattr(Enrolment, "_call", lambda self, arguments: json.dumps({"success": True, "node-id": "7"}))
    (tmp_path / "nodes").mkdir()
    if ending != "pub":
        (tmp_path / "nodes" / "ward-a.pub").write_text("a key\n")
    os.mkfifo(tmp_path / "nodes" / f"ward-a.{ending}")
    with pytest.raises(ConfigError, match=rf"ward-a\.{ending} cannot be read: .*not a regular file; .*backup"):
        Enrolment(tmp_path, None, {}).enrol()
