"""``goldfinch doctor``: what is there of a data set, and the file for a public issue."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import socket
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from common.text import printable
from goldfinch.cli import main
from goldfinch.commands.public_report import REPORT, write_public_report

CLASSES = ("zebrafish", "quokka")
DOMAINS = ("Kiel", "ward nine")


def write_images(root: Path) -> None:
    for place, domain in enumerate(DOMAINS):
        for label, name in enumerate(CLASSES):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (8, 8), (40 * number, 90 * label, 10 + place)).save(folder / f"{number}.png")


def test_what_is_missing_of_a_data_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GOLDFINCH_DATA", raising=False)
    assert main(["doctor", "data=pacs"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"FAIL +art_painting, cartoon, photo, sketch +cannot be read\n +-> .*set data.root=DIR", printed)
    assert printed.count("Put PACS there as") == 1
    assert main(["doctor", "data=glyphs"]) == 0
    for name in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
        for domain in ("photo", "sketch"):
            folder = tmp_path / "PACS" / domain / name
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    (tmp_path / "PACS" / "sketch" / "horse").rename(tmp_path / "PACS" / "sketch" / "hrse")
    assert main(["doctor", "data=pacs", "data.split=index_rule", f"data.root='{tmp_path}'"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"ok +photo +its files are there", printed)
    assert re.search(r"FAIL +cartoon +cannot be read\n +-> pacs: domain 'cartoon'", printed)
    assert re.search(r"FAIL +sketch +cannot be read\n.*horse", printed)
    assert main(["doctor", "data=glyphs", "method=fpl"]) == 1
    assert "method=fpl: goldfinch doctor checks data alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("data=glyphs", "--server", "localhost:1"), ("--report", "here", "--server", "localhost:1")]
)
def test_nothing_that_is_asked_for_is_left_undone(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 1
    assert "doctor does one thing" in capsys.readouterr().err


def write_table(root: Path, images: int = 10, domain: bool = True) -> None:
    root.mkdir(parents=True)
    lines = ["path,label,domain"[: None if domain else 10]]
    for number in range(10):
        lines.append(f"{number}.png,{CLASSES[number % 2]}" + f",{DOMAINS[number // 5]}" * domain)
        if number < images:
            Image.new("RGB", (8, 8), (20 * number, 9, 9)).save(root / f"{number}.png")
    (root / "list.csv").write_text("\n".join(lines) + "\n")


def spoil(case: str, root: Path) -> list[str]:
    """Make data of which a domain lacks something; return the settings that read them."""
    folder = ["data=folder", f"data.root='{root}'", "data.domains=[Kiel,'ward nine']"]
    table = [*folder, "data=table", "data.path=list.csv"]
    if case == "no image in a domain":
        write_images(root)
        shutil.rmtree(root / "ward nine")
        (root / "ward nine").mkdir()
        folder.append("data.classes=[zebrafish,quokka]")
    elif case == "an unknown class":
        write_images(root)
        folder.append("data.classes=[zebrafish]")
    elif case == "another layout":
        write_images(root)
        folder += ["data.path=split/class", "data.classes=[zebrafish,quokka]"]
    elif case == "no domain in the path":
        write_images(root.parent)
        (root.parent / "Kiel").rename(root)
        folder.append("data.path=class")
    elif case == "a link to nothing":
        write_images(root)
        (root / "Kiel" / "quokka" / "9.png").symlink_to("10.png")
    elif case == "a listed image is missing":
        write_table(root, images=9)
        return table
    elif case == "a domain without rows":
        write_table(root)
        return [*table, "data.domains=[Kiel,Bonn]"]
    elif case == "one table for two domains":
        write_table(root, domain=False)
        return table
    elif case == "an empty folder of digits":
        (root / "digits" / "SVHN").mkdir(parents=True)
        return ["data=digits", f"data.root='{root}'", "data.domains=[svhn]"]
    elif case == "a damaged file of digits":
        (root / "USPS").mkdir(parents=True)
        for name in ("usps", "usps.t"):
            (root / "USPS" / name).write_text("<html>not found</html>")
        return ["data=digits", f"data.root='{root}'", "data.domains=[usps]"]
    elif case == "a list names no file":
        (root / "PACS" / "photo" / "dog").mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8)).save(root / "PACS" / "photo" / "dog" / f"{number}.png")
        (root / "PACS" / "train_list.txt").write_text("photo/dog/0.png 0\nphoto/dog/7.png 0\n")
        (root / "PACS" / "test_list.txt").write_text("photo/dog/1.png 0\n")
        return ["data=pacs", f"data.root='{root}'", "data.domains=[photo]"]
    return folder


CASES = (
    "no image in a domain", "an unknown class", "another layout", "a link to nothing", "a listed image is missing",
    "a domain without rows", "one table for two domains", "an empty folder of digits", "a damaged file of digits",
    "a list names no file", "no domain in the path",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_data_that_no_run_can_read_are_not_said_to_be_there(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = spoil(case, tmp_path / "images")
    assert main(["run", "--quiet", "method=fedavg", *overrides, f"output='{tmp_path}/run'", "train.rounds=1"]) != 0
    reason = capsys.readouterr().err
    assert main(["doctor", *overrides]) == 1
    found = re.search(r"FAIL .*\n +-> (.{30})", capsys.readouterr().out)
    assert found
    assert found[1] in " ".join(reason.split()), "the doctor and the run name the same reason"


def test_a_table_needs_no_folder_of_public_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GOLDFINCH_DATA", raising=False)
    write_table(tmp_path / "wards")
    saved = datasets.Dataset.from_dict(
        {
            "image": [(tmp_path / "wards" / f"{number}.png").read_bytes() for number in range(10)],
            "label": ["a", "b"] * 5,
        }
    )
    saved.save_to_disk(tmp_path / "set")
    parts = ((("", tuple(map(str, (tmp_path / "set").glob("*.arrow"))))),)
    monkeypatch.setattr("common.data.table_process.fetched", lambda name: parts)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "data=table", "data.path=somebody/wards", "data.domains=[Kiel]"]) == 0
    assert re.search(r"ok +Kiel +its files are there", capsys.readouterr().out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, beside the folder of its images."""
    place = tmp_path_factory.mktemp("secret runs")
    write_images(place / "secret images")
    tiny = ["train.rounds=1", "train.local_steps=1", "train.batch_size=4", "data.image_size=32"]
    named = [f"data.root='{place}/secret images'", "data.domains=[Kiel,'ward nine']", f"output='{place}/my run'"]
    assert main(["run", "--quiet", "method=fedavg", "data=folder", *named, *tiny]) == 0
    return place / "my run"


TRACE = """Traceback (most recent call last):
  File "/x/client/trainer.py", line 9, in {0}
  File "{0}/client/{0}.py", line 3, in {0}
common.errors.DataError: {0}
ValueError
{0}: {0}
"""


def record_of(private: str) -> list[dict[str, object]]:
    """Events of errors in which everything that a run, a device or a person fills is ``private``."""
    places = ["server/run/rounds.py:122", f"server/{private}.py:1", private]
    known = {"time": 1.0, "round": 1, "client": private, "domain": private, "reason": f"\x1b{private}"}
    return [
        {"event": "client failed", "exchange": private, "traceback": TRACE.format(private), **known},
        {"event": "registration refused", **known},
        {"event": "client refused", **known},
        {"event": "failed", "error": "EngineError", "places": places, **known},
        {"event": "interrupted", "error": private, **known},
        {"event": private, **known, f"{private} of it": private},
    ]


def report_of(run: Path, events: list[dict[str, object]], replies: list[dict[str, object]], place: Path) -> str:
    folder = place / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    for name, lines in (("events.jsonl", events), ("replies.jsonl", replies)):
        with (folder / name).open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
    return write_public_report(folder).read_text()


SHAPES = (
    "/home/ann/scans of Kiel/3.nii.gz", "C:\\Users\\ann", "kiel-gateway", "fe80::1ff:fe23:4567:890a",
    "ann@kiel.example", "'patient_id'", "ghp_0123456789abcdef0123", "10.1.2.3:9093", "quokka", "ward nine",
    "client failed2",
)  # fmt: skip
"""What was left when texts were scrubbed: a path with blanks, a host without a port, a key, a raw escape."""


TEXTS = st.text(max_size=40).map(printable).map("text {}".format)
"""Texts that are no word of the code, which Hypothesis tries."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(private=st.sampled_from(SHAPES) | TEXTS)
def test_no_text_of_a_run_is_in_the_file_for_an_issue(
    private: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replies: list[dict[str, object]] = [
        {"round": 1, "exchange": "train", "client": "a", "domain": "a", "status": "failed", "reason": private}
    ]
    text = report_of(finished, record_of(private), replies, tmp_path)
    assert text == report_of(finished, record_of("another"), replies, tmp_path)


def test_the_file_for_an_issue_has_what_helps(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = report_of(finished, record_of("norm 3.14e+20"), [], tmp_path)
    assert re.search(r"1 x client failed: ValueError: <text>\n +client/trainer.py:9\n", text)
    assert re.search(r"1 x failed: EngineError: <text>\n +server/run/rounds.py:122\n", text)
    assert "1 x client refused: <text>" in text
    assert "1 x interrupted: <text>" in text
    for line in ("method=fedavg", "data=folder", "train.batch_size=4", "client failed: 1", "other: 1"):
        assert f"\n  {line}\n" in text
    secrets = (*CLASSES, *DOMAINS, "secret", "my run", "3.14e+20", socket.gethostname(), getpass.getuser())
    for secret in secrets:
        assert not re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text, re.IGNORECASE), secret
    assert main(["doctor", "--report", str(finished)]) == 0
    assert f"wrote {REPORT}" in capsys.readouterr().out
    assert main(["doctor", "--report", str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
