"""What the operator's folder remembers of enrolled devices."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.errors import ConfigError, EngineError
from server.admission import kit
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
