"""``goldfinch doctor``: what is there of a data set, and the file for a public issue."""

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path

import pytest
from PIL import Image

from goldfinch.cli import main
from goldfinch.commands.public_report import REPORT, Names

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
    assert "export GOLDFINCH_DATA=DIR, or data.root=DIR; Put PACS there as" in capsys.readouterr().out
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
    assert re.search(r"FAIL +cartoon +is missing\n +-> pacs: domain 'cartoon'", printed)
    assert re.search(r"FAIL +sketch +is missing\n.*horse", printed)
    assert main(["doctor", "data=glyphs", "method=fpl"]) == 1
    assert "method=fpl: goldfinch doctor checks data alone" in capsys.readouterr().err


def test_the_file_for_an_issue_has_no_path_name_or_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, place = tmp_path / "secret images", tmp_path / "my run"
    write_images(root)
    monkeypatch.chdir(tmp_path)
    tiny = ["train.rounds=1", "train.local_steps=1", "train.batch_size=4", "data.image_size=32"]
    named = "data.domains=[Kiel,'ward nine']"
    words = ["method=fedavg", "data=folder", f"data.root='{root}'", named, *tiny, f"output='{place}'"]
    assert main(["run", "--quiet", *words]) == 0
    broken = {
        "event": "client failed",
        "time": 1.0,
        "round": 1,
        "client": "Kiel-0",
        "exchange": "train",
        "reason": f"DataError: {root}/Kiel/quokka/3.png of Kiel is no zebrafish ('{place}', 10.1.2.3:9093, scan7.dcm)",
        "traceback": f'  File "{root}/mine.py", line 3, in read\n  File "/x/client/trainer.py", line 9, in loss\n',
    }
    refused = {"event": "registration refused", "time": 1.0, "client": "ward nine-0", "reason": "has quokka too often"}
    with (place / "events.jsonl").open("a") as stream:
        stream.write(json.dumps(broken) + "\n" + json.dumps(refused) + "\n")
    assert main(["doctor", "--report", str(place)]) == 0
    assert f"wrote {REPORT}" in capsys.readouterr().out
    text = (tmp_path / REPORT).read_text()
    for secret in (*CLASSES, *DOMAINS, str(tmp_path), "secret", "my run", "3.png", "scan7", "10.1.2.3", "mine.py"):
        assert secret.lower() not in text.lower(), secret
    for name in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name
    assert "method=fedavg" in text
    assert "data=folder" in text
    assert "  train.batch_size=4" in text
    assert "  client failed: 1" in text
    assert "client failed: DataError: " in text
    assert "client/trainer.py, line 9, in loss" in text
    assert "<domain 1>" in text
    assert main(["doctor", "--report", str(root)]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_short_names_leave_other_words_whole() -> None:
    names = Names({"class": ["a", "1"], "client": ["a-0"], "user": ["root"]})
    assert names.hidden("a-0 of class a has 11 rooted images") == "<client 1> of class <class 2> has 11 rooted images"
