from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.settings import RunSettings
from goldfinch.cli import main
from goldfinch.commands import demo as demo_module
from server.engines.inline import InlineEngine
from server.run.conduct import run_federation
from server.run.events import Listener


def inline(settings: RunSettings, listeners: Sequence[Listener]) -> None:
    """The demonstration's runs in this process instead of on Ray."""
    here = replace(settings, engine={"name": "inline", "device": "client.local.local_device"})
    run_federation(here, InlineEngine(here), listeners)


@pytest.mark.usefixtures("undrawn")
def test_the_demonstration_ends_with_a_table_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_module, "run_on_ray", inline)
    tiny = ["train.rounds=1", "train.epochs=1", "train.local_steps=1", "rounds.test_samples=20"]
    assert main(["demo", "--output", str(tmp_path / "shown"), *tiny]) == 0
    page = (tmp_path / "shown" / "report.html").read_text()
    assert "<title>FedAvg and FPL on glyphs</title>" in page
    assert "<svg" in page
    printed = capsys.readouterr().out
    assert "report.html" in printed
    assert "fedavg" in printed
    assert "best" not in printed, "one seed each does not tell the two apart"
    pictures = sorted((tmp_path / "shown" / "images").iterdir())
    assert [path.stem.partition("-")[0] for path in pictures] == ["handwritten", "printed", "signs"]
    assert all(re.search(rf"^{re.escape(str(path))}  \d  \d+\.\d%", printed, re.MULTILINE) for path in pictures)
    names = sorted(path.name for path in (tmp_path / "shown").iterdir())
    assert names == ["fedavg", "fpl", "images", "model", "report.html"]
