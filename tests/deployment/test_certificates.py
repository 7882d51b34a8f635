from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.federation import ROOT
from support.proxies import started_upstream

from common.errors import ConfigError
from goldfinch.cli import main
from server.admission import certificates
from server.admission.certificates import Certificates, ensure
from server.admission.enrolment import Enrolment
from server.flower import processes
from server.flower.processes import NOT_REACHED, NotTrustedError, ask_flower


def handshake(server: Certificates, authority: Path, name: str) -> str:
    """Return the error of a client that trusts ``authority`` and asks for ``name``; empty if there is none."""
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(server.server, server.server_key)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with listening.wrap_socket(ours, server_side=True) as secure:
                secure.recv(1)
        except (ssl.SSLError, OSError):
            pass  # the client's error names what was wrong
        finally:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ssl.create_default_context(cafile=str(authority)).wrap_socket(theirs, server_hostname=name) as secure:
            secure.send(b".")
        return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        theirs.close()
        thread.join()


def test_each_party_gets_its_folder_and_private_files_are_private(tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"], ["webcam", "dslr"])
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert modes == {
        "authority/ca.key": 0o600,
        "authority/ca.crt": 0o644,
        "server/ca.crt": 0o644,
        "server/server.pem": 0o644,
        "server/server.key": 0o600,
        "serverapp/ca.crt": 0o644,
        "serverapp/superexec.secret": 0o600,
        "operator/ca.crt": 0o644,
        "operator/nodes/dslr.pub": 0o644,
        "operator/nodes/webcam.pub": 0o644,
        "nodes/dslr/ca.crt": 0o644,
        "nodes/dslr/key": 0o600,
        "nodes/webcam/ca.crt": 0o644,
        "nodes/webcam/key": 0o600,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates that no test changes."""
    folder = tmp_path_factory.mktemp("made")
    ensure(folder, ["fl.example.org", "10.0.0.5"], ["webcam"])
    return Certificates(folder)


def test_node_keys_are_pairs_on_the_curve_that_flower_takes(made: Certificates) -> None:
    private = serialization.load_ssh_private_key(made.node_key("webcam").read_bytes(), password=None)
    public = serialization.load_ssh_public_key(made.node_public_key("webcam").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"], ["webcam"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    made = ensure(tmp_path, ["fl.example.org"], ["webcam"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert all(line.startswith("kept") for line in made[:-1])


@pytest.mark.parametrize("name", ["fl.example.org", "10.0.0.5", "localhost", "127.0.0.1"])
def test_a_client_accepts_every_name_of_the_server(made: Certificates, name: str) -> None:
    assert handshake(made, made.authority, name) == ""


def test_a_client_refuses_another_name_and_another_authority(made: Certificates, tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"])
    assert "mismatch" in handshake(made, made.authority, "evil.example.org")
    assert "unable to get local issuer" in handshake(made, Certificates(tmp_path).authority, "fl.example.org")


@pytest.mark.parametrize(
    ("days", "trusted", "message"),
    [
        (
            -0.01,
            "ours",
            "is not accepted: certificate has expired; renew it .goldfinch devices certificates. and restart",
        ),
        (1, "theirs", "is not accepted: unable to get local issuer certificate; compare address and root-certificates"),
        (1, "ours", ""),
    ],
)
def test_a_superlink_that_flower_does_not_trust_is_not_called_unavailable(
    days: float, trusted: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower prints the same as where none listens; the reason is in the handshake."""
    files = Certificates(tmp_path / "ours")
    ensure(files.folder, [])
    ensure(tmp_path / "theirs", [])
    certificates._make_server(files, list(certificates.LOCAL_HOSTS), days)  # type: ignore[arg-type]
    flwr = tmp_path / "flwr"
    flwr.write_text(f"#!/bin/sh\necho '{NOT_REACHED}. Please check your network connection'\n")
    flwr.chmod(0o755)
    monkeypatch.setattr(processes, "program", lambda _: str(flwr))
    with started_upstream(files) as upstream:
        (tmp_path / "config.toml").write_text(
            f'[superlink]\ndefault = "other"\n[superlink.other]\naddress = "127.0.0.1:1"\n[superlink.link]\n'
            f'address = "127.0.0.1:{upstream.server_port}"\n'
            f'root-certificates = "{Certificates(tmp_path / trusted).authority}"\n'
        )
        environment = {"FLWR_HOME": str(tmp_path)}
        assert NOT_REACHED in ask_flower(["list"], environment, tmp_path).stdout
        if message:
            with pytest.raises(NotTrustedError, match=message):
                ask_flower(["list", "link"], environment, tmp_path)
        else:
            assert NOT_REACHED in ask_flower(["list", "link"], environment, tmp_path).stdout


def test_the_server_certificate_cannot_sign(made: Certificates) -> None:
    server = x509.load_pem_x509_certificate(made.server.read_bytes())
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)


def test_it_is_renewed_a_month_before_it_ends(tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"], days=31)
    old = Certificates(tmp_path).server.read_bytes()
    assert ensure(tmp_path, ["fl.example.org"], days=31)[1].startswith("kept")
    Certificates(tmp_path).server.unlink()
    ensure(tmp_path, ["fl.example.org"], days=29)
    assert "ends in 28 days" in ensure(tmp_path, ["fl.example.org"])[1]
    assert ensure(tmp_path, ["fl.example.org"])[1].startswith("kept")
    assert Certificates(tmp_path).server.read_bytes() != old


def test_a_renewal_that_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is written before its certificate; neither the SuperLink nor nginx starts with one of each."""
    files = Certificates(tmp_path)
    ensure(tmp_path, ["fl.example.org"])
    write = certificates.hand_over

    def lose_power(path: Path, content: bytes, *, private: bool) -> None:
        if path == files.server:
            raise KeyboardInterrupt
        write(path, content, private=private)

    monkeypatch.setattr(certificates, "hand_over", lose_power)
    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path, ["fl.example.net"])
    monkeypatch.setattr(certificates, "hand_over", write)
    assert ensure(tmp_path, ["fl.example.org"])[1].startswith("made the server's (a key of another)")
    assert handshake(files, files.authority, "fl.example.org") == ""
    assert ensure(tmp_path, [])[1].startswith("kept")


def test_no_certificate_outlives_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices check both, so the days of the server's certificate alone would promise too much."""
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 20)
    files = Certificates(tmp_path)
    ends = "ends in 19 days and is for fl.example.org, localhost, 127.0.0.1 and ::1; the authority ends then, too: "
    assert ends in ensure(tmp_path, ["fl.example.org"])[-1]
    lines = ensure(tmp_path, [])
    assert lines[1].startswith("kept")
    assert ends in lines[-1]
    files.server.unlink()
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 0)
    certificates._make_authority(files)
    with pytest.raises(ConfigError, match=r"ca\.crt ended on .*replace it \(docs/deploy\.md.*clock"):
        ensure(tmp_path, ["fl.example.org"])


def test_what_was_made_while_the_clock_was_ahead_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Certificates(tmp_path)
    ensure(tmp_path, ["fl.example.org"])

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.now(tz) + datetime.timedelta(days=400)

    clock = SimpleNamespace(datetime=Ahead, timedelta=datetime.timedelta, UTC=datetime.UTC)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", clock)
        ensure(tmp_path, [])
    assert "not yet valid" in handshake(files, files.authority, "fl.example.org")
    assert "not valid yet" in ensure(tmp_path, [])[1]
    assert handshake(files, files.authority, "fl.example.org") == ""


def test_another_host_makes_another_certificate_by_the_same_authority(tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"])
    authority = Certificates(tmp_path).authority.read_bytes()
    assert "other hosts" in ensure(tmp_path, ["fl.example.net"])[1]
    assert Certificates(tmp_path).authority.read_bytes() == authority
    files = Certificates(tmp_path)
    assert handshake(files, files.authority, "fl.example.net") == ""
    assert handshake(files, files.authority, "fl.example.org") != ""


def test_without_hosts_the_certificate_keeps_its_names(tmp_path: Path) -> None:
    """A device is added, or the certificate renewed, by a command that need not repeat the names."""
    ensure(tmp_path, ["fl.example.org", "10.0.0.5"], days=29)
    lines = ensure(tmp_path, [], ["webcam"])
    assert "ends in 28 days" in lines[1]
    assert "ends in 364 days and is for fl.example.org, 10.0.0.5, localhost" in lines[-1]
    files = Certificates(tmp_path)
    assert handshake(files, files.authority, "fl.example.org") == ""
    assert ensure(tmp_path, [])[1].startswith("kept")


def test_a_certificate_for_this_machine_alone_says_so(tmp_path: Path) -> None:
    lines = ensure(tmp_path, [])
    assert lines[-1].endswith(
        "is for localhost, 127.0.0.1 and ::1 alone: devices elsewhere need the name by which they reach it, --host NAME"
    )
    assert lines[-1] == ensure(tmp_path, [])[-1]
    assert lines[-1] != ensure(tmp_path, ["fl.example.org"])[-1]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("mine")
    with pytest.raises(ConfigError, match="keys is a file; name a folder"):
        ensure(tmp_path / "keys", [])
    assert (tmp_path / "keys").read_text() == "mine"


def test_a_replaced_authority_replaces_the_server_certificate(tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"], ["webcam"])
    ensure(tmp_path / "new", ["fl.example.org"])
    for path in (tmp_path / "authority").iterdir():
        path.write_bytes((tmp_path / "new" / "authority" / path.name).read_bytes())
    assert "another authority" in ensure(tmp_path, ["fl.example.org"], ["webcam"])[1]
    copies = [tmp_path / party / "ca.crt" for party in ("authority", "server", "operator", "nodes/webcam")]
    assert len({path.read_bytes() for path in copies}) == 1


def test_the_authority_is_rotated_as_the_page_says(tmp_path: Path) -> None:
    """Devices that trust both authorities reach the server before and after; enrolments and keys stay."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert "goldfinch devices certificates authority/new" in page
    both, replaced = re.findall(r"`(cat authority/[^`]+|mv authority/[^`]+)`", page)
    files = Certificates(tmp_path)
    assert main(["devices", "certificates", str(tmp_path), "--host", "fl.example.org", "--node", "ward-a"]) == 0
    number = files.operator / "nodes" / "ward-a.number"
    number.write_text("7 ward-a-0\n")
    kept = [number, files.node_key("ward-a"), files.node_public_key("ward-a"), files.superexec_secret]
    before, old = [path.read_bytes() for path in kept], tmp_path / "old.crt"
    shutil.copy(files.authority, old)
    assert main(["devices", "certificates", str(tmp_path / "authority" / "new")]) == 0
    subprocess.run(["sh", "-euc", both], cwd=tmp_path, check=True)
    assert handshake(files, tmp_path / "ca.crt", "fl.example.org") == ""
    subprocess.run(["sh", "-euc", replaced], cwd=tmp_path, check=True)
    assert main(["devices", "certificates", str(tmp_path), "--node", "ward-a"]) == 0
    copies = [tmp_path / party / "ca.crt" for party in ("server", "serverapp", "operator", "nodes/ward-a")]
    assert len({path.read_bytes() for path in copies}) == 1
    for trusted in (tmp_path / "ca.crt", *copies):
        assert handshake(files, trusted, "fl.example.org") == ""
    assert handshake(files, old, "fl.example.org") != ""
    assert [path.read_bytes() for path in kept] == before


def test_a_server_without_the_authority_makes_no_other_one(tmp_path: Path) -> None:
    made, server = Certificates(tmp_path / "made"), Certificates(tmp_path / "server")
    ensure(made.folder, ["fl.example.org"], ["webcam"])
    for party in ("server", "serverapp", "operator"):
        shutil.copytree(made.folder / party, server.folder / party)
    lines = ensure(server.folder, ["fl.example.org"], ["dslr"])
    assert lines[0].startswith("copied from server/")
    assert not server.authority_key.exists()
    assert handshake(server, made.node("webcam") / "ca.crt", "fl.example.org") == ""
    with pytest.raises(ConfigError, match="run this where the authority is kept"):
        ensure(server.folder, ["fl.example.net"])


def test_without_the_authority_s_key_a_valid_certificate_is_kept_to_its_end(tmp_path: Path) -> None:
    """Its last month and names that are not asked for are no reason for a server not to start."""
    files = Certificates(tmp_path)
    ensure(tmp_path, ["fl.example.org", "10.0.0.5", "proxy"], days=20)
    kept, key = files.server.read_bytes(), files.authority_key.read_bytes()
    files.authority_key.unlink()
    lines = ensure(tmp_path, ["proxy", "fl.example.org"])
    assert files.server.read_bytes() == kept
    assert "ends in 19 days and is for fl.example.org, 10.0.0.5, proxy, localhost, 127.0.0.1 and ::1;" in lines[-1]
    assert "cannot be renewed here: run goldfinch devices certificates where the authority is kept" in lines[-1]
    with pytest.raises(ConfigError, match="run this where the authority is kept"):
        ensure(tmp_path, ["fl.example.net"])
    files.authority_key.write_bytes(key)
    certificates._make_server(files, list(certificates.LOCAL_HOSTS), -0.01)  # type: ignore[arg-type]
    files.authority_key.unlink()
    with pytest.raises(ConfigError, match="run this where the authority is kept"):
        ensure(tmp_path, [])
    files.authority_key.write_bytes(key)
    assert "ended or ends in 0 days" in ensure(tmp_path, [])[1]
    assert "cannot be renewed" not in ensure(tmp_path, [])[-1]


def test_any_user_may_enter_new_folders_whatever_the_umask(tmp_path: Path) -> None:
    """Root with the umask 027 kept the SuperLink's user out of the folder above server/, which was given to him."""
    umask = os.umask(0o077)
    try:
        ensure(tmp_path / "new" / "keys", [], ["webcam"])
    finally:
        os.umask(umask)
    folders = [path for path in (tmp_path / "new").rglob("*") if path.is_dir()]
    assert len(folders) == 8
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "new", *folders]} == {0o755}


def test_what_root_writes_belongs_to_the_owner_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink's user could not read a key that root has renewed."""
    given: dict[Path, tuple[int, int]] = {}

    def chown(path: Path, user: int, group: int, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        given[path.relative_to(tmp_path)] = (user, group)

    monkeypatch.setattr(certificates.os, "chown", chown)
    monkeypatch.setattr(certificates.os, "geteuid", lambda: 1000)
    ensure(tmp_path, [], days=20)
    assert not given
    monkeypatch.setattr(certificates.os, "geteuid", lambda: 0)
    owner = (tmp_path / "server").stat()
    ensure(tmp_path, [])
    renewed = {Path("server", name) for name in ("server.key", "server.pem", "ca.crt")}
    assert renewed <= given.keys()
    assert {given[path] for path in renewed} == {(owner.st_uid, owner.st_gid)}

    def refuse(path: Path, user: int, group: int, *, follow_symlinks: bool) -> None:
        raise PermissionError(path, user, group, follow_symlinks)

    monkeypatch.setattr(certificates.os, "chown", refuse)
    ensure(tmp_path, ["fl.example.org"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to others")
def test_a_renewed_key_is_the_superlink_s_user_s(tmp_path: Path) -> None:
    ensure(tmp_path, [], days=20)
    for path in (tmp_path / "server", *(tmp_path / "server").iterdir()):
        os.chown(path, 10001, 10002)
    ensure(tmp_path, [])
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in (tmp_path / "server").iterdir()}
    assert owners == {(10001, 10002)}


def test_the_remedy_for_a_damaged_authority_keeps_its_key(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    ensure(tmp_path, ["fl.example.org"])
    certificate, key = files.authority.read_bytes(), files.authority_key.read_bytes()
    files.authority.write_text("junk")
    with pytest.raises(ConfigError, match="remove it to have it made again"):
        ensure(tmp_path, ["fl.example.org"])
    files.authority.unlink()
    ensure(tmp_path, ["fl.example.org"])
    assert (files.authority.read_bytes(), files.authority_key.read_bytes()) == (certificate, key)


def test_without_the_authority_key_the_message_has_a_remedy(tmp_path: Path) -> None:
    ensure(tmp_path, ["fl.example.org"])
    Certificates(tmp_path).authority_key.unlink()
    ensure(tmp_path, ["fl.example.org"])  # nothing to sign
    with pytest.raises(ConfigError, match="run this where the authority is kept"):
        ensure(tmp_path, ["fl.example.net"])


def test_a_foreign_authority_key_is_noticed(tmp_path: Path) -> None:
    ensure(tmp_path / "ours", ["a.example"])
    ensure(tmp_path / "theirs", ["a.example"])
    Certificates(tmp_path / "ours").authority_key.write_bytes(
        Certificates(tmp_path / "theirs").authority_key.read_bytes()
    )
    with pytest.raises(ConfigError, match="is not the key of"):
        ensure(tmp_path / "ours", ["b.example"])


@pytest.mark.parametrize("name", ["../webcam", "a/b", "", ".hidden", "a b"])
def test_node_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a file name"):
        ensure(tmp_path, [], [name])
    assert not list(tmp_path.iterdir())


def test_a_damaged_certificate_is_named(tmp_path: Path) -> None:
    ensure(tmp_path, [])
    Certificates(tmp_path).server.write_text("nonsense")
    with pytest.raises(ConfigError, match=r"server\.pem is not a certificate"):
        ensure(tmp_path, [])


@pytest.mark.parametrize(
    "host",
    ["", "a b", "*", "a." * 150 + "a", "-a", "a..b", "256.1.1.1", "10.0.0"],
    ids=["nothing", "space", "star", "long", "hyphen", "empty label", "beyond 255", "three numbers"],
)
def test_what_is_no_host_name_is_refused_before_a_file_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="neither an address nor a host name"):
        ensure(tmp_path, [host])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["devices", "certificates", "FOLDER", "--days", "4000"], "--days 4000: .* 1 to 825 days"),
        (["devices", "certificates", "FOLDER", "--host", "-bad host-\u00e4"], "neither an address nor a host name"),
        (["devices", "enrol", "FOLDER"], "holds no public keys"),
        (["devices", "enrol", "FOLDER", "--client", "webcam-0"], "written NODE=ID"),
        (["devices", "enrol", "FOLDER", "--client", "x=a-0", "--client", "x=b-0"], "x is given a-0 as well"),
        *(
            (["devices", "enrol", "FOLDER", "--client", f"x={name}"], f"--client {name} is not a domain and a number")
            for name in ("webcam", "webcam-01", "webcam-\u0663", " webcam-0", "-0")
        ),
        (["devices", "enrol", "FOLDER", "--restore", "--kit", "a.tar"], "leave out all other options"),
        (["devices", "enrol", "FOLDER", "--server", "host:1"], "--server is for a kit: add --kit FILE"),
        (["devices", "dismiss", "FOLDER"], "--node NAME"),
        (["devices", "dismiss", "FOLDER", "--node", "x"], "has no such key"),
    ],
)
def test_the_commands_report_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([item.replace("FOLDER", str(tmp_path)) for item in arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_dismissed_device_is_no_mistake_for_another_and_gets_a_new_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What :meth:`Enrolment.dismiss` leaves; the remedy that is printed is obeyed."""
    ensure(tmp_path, [], ["ward-a", "ward-b"])
    files = Certificates(tmp_path)
    key = files.node_public_key("ward-b")
    old = key.read_bytes()
    key.replace(key.with_suffix(".pub.dismissed"))
    (key.parent / "ward-b.dismissed-device").write_text("7 ward-b-0 2026-01-01T00:00:00+00:00\n")
    assert main(["devices", "enrol", str(tmp_path), "--node", "ward-b"]) == 1
    assert main(["devices", "dismiss", str(tmp_path), "--node", "ward-b"]) == 0
    for said in capsys.readouterr():
        assert "dismissed already" in said
        assert "ward-a" not in said
        assert "goldfinch devices certificates FOLDER --node ward-b" in said
    shutil.rmtree(files.node("ward-b"))
    assert main(["devices", "certificates", str(tmp_path), "--node", "ward-b"]) == 0
    assert key.read_bytes() != old


def test_a_key_whose_other_half_was_not_written_is_made_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure(tmp_path, [], ["ward-a", "ward-b"])
    files = Certificates(tmp_path)
    public = files.node_public_key("ward-a")
    whole = public.read_bytes()
    public.unlink()  # the power went off before it was written
    ensure(tmp_path, [], ["ward-a"])
    assert public.read_bytes() == whole
    public.replace(public.with_suffix(".pub.dismissed"))
    ensure(tmp_path, [], ["ward-a"])
    assert not public.exists(), "what was dismissed stays dismissed"
    dismissed = public.with_suffix(".pub.dismissed")
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("absent")):
        dismissed.rmdir() if dismissed.is_dir() else dismissed.unlink()
        make(dismissed)
        with pytest.raises(ConfigError, match=r"ward-a\.pub\.dismissed, the keys .* cannot be read: .*backup"):
            ensure(tmp_path, [], ["ward-a"])
        assert not public.exists()
    shutil.rmtree(files.node("ward-b"))
    capsys.readouterr()
    made_for = ["--kit", str(tmp_path / "b.tar"), "--server", "fl.example.org:8443"]
    assert main(["devices", "enrol", str(tmp_path), "--node", "ward-b", *made_for]) == 1
    assert "give the device a new key (docs/deploy.md, Rotating certificates and keys)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "message"),
    [("here", "names no SuperLink.*export FLWR_HOME as in the terminal"), ("elsewhere", "elsewhere is not a folder")],
)
def test_without_a_superlink_or_a_folder_nothing_is_started(
    folder: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower would start a SuperLink of its own, and leave a configuration behind."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    ensure(tmp_path / "here", [], ["ward-a"])
    assert main(["devices", "enrol", str(tmp_path / folder)]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "home").exists()


class Registrar:
    """Flower's command line: it takes every key once."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.dismissed: list[str] = []

    def __call__(self, _: Enrolment, arguments: Sequence[str]) -> str:
        if arguments[1] == "list":
            nodes = [{"node-id": str(sum(key.encode()))} for key in self.names]
            return json.dumps({"success": True, "nodes": nodes})
        if arguments[1] == "unregister":
            self.dismissed.append(arguments[2])
            return json.dumps({"success": True})
        key, name = Path(arguments[2]).stem, arguments[-1]
        if key in self.names:
            return json.dumps({"success": False, "error-message": "Public key already in use"})
        self.names[key] = name
        return json.dumps({"success": True, "node-id": str(sum(key.encode()))})


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> Registrar:
    found = Registrar()
    monkeypatch.setattr(Enrolment, "_call", lambda self, arguments: found(self, arguments))
    return found


def test_a_key_is_enrolled_for_one_client(
    registrar: Registrar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure(tmp_path, [], ["webcam", "ward-a", "dslr-3"])
    enrol = ["devices", "enrol", str(tmp_path)]
    assert main([*enrol, "--node", "dslr-3", "--client", "ward-a=ward_a-1", "--node", "webcam"]) == 0
    assert registrar.names == {"dslr-3": "dslr-3", "ward-a": "ward_a-1", "webcam": "webcam-0"}
    output = capsys.readouterr().out
    assert "ward-a               enrolled as 572, for ward_a-1\n" in output
    assert "webcam               enrolled as 623, for webcam-0\n" in output
    assert main(enrol) == 0
    assert "ward-a               enrolled already for ward_a-1\n" in capsys.readouterr().out
    assert main([*enrol, "--client", "ward-a=ward_a-1"]) == 0
    assert main([*enrol, "--client", "ward-a=webcam-0"]) == 1
    assert "the key of ward-a is enrolled for ward_a-1, and a key keeps its client" in capsys.readouterr().err
    assert main(["devices", "dismiss", str(tmp_path), "--node", "ward-a"]) == 0
    assert registrar.dismissed == ["572"]


def test_a_key_whose_client_is_not_known_is_enrolled_for_no_other(
    registrar: Registrar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure(tmp_path, [], ["webcam"])
    enrol = ["devices", "enrol", str(tmp_path)]
    assert main(enrol) == 0
    next(tmp_path.rglob("webcam.number")).unlink()
    capsys.readouterr()
    for client in ([], ["--client", "webcam=dslr-0"]):
        assert main([*enrol, *client]) == 1
        told = capsys.readouterr().err
        assert "the key of webcam was enrolled before, but webcam.number is missing" in told
        assert "so its client is not known here: restore the file" in told


def test_devices_are_enrolled_again_on_a_superlink_that_lost_its_store(
    registrar: Registrar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure(tmp_path, [], ["webcam", "ward-a", "gone", "never-enrolled"])
    chosen = ["--client", "ward-a=ward_a-1", "--node", "webcam", "--node", "gone"]
    restore = ["devices", "enrol", str(tmp_path), "--restore"]
    assert main(restore) == 0
    assert main(["devices", "enrol", str(tmp_path), *chosen]) == 0
    assert main(["devices", "dismiss", str(tmp_path), "--node", "gone"]) == 0
    assert main(restore) == 0
    assert "nothing to restore" in capsys.readouterr().out
    registrar.names.clear()
    assert main(restore) == 0
    assert registrar.names == {"ward-a": "ward_a-1", "webcam": "webcam-0"}
    assert main([*restore, "--node", "webcam"]) == 1
    registrar.names.clear()
    assert main(["devices", "enrol", str(tmp_path), "--node", "ward-a"]) == 0
    assert registrar.names == {"ward-a": "ward_a-1"}
