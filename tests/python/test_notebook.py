"""The notebook of the first hour runs from its first cell to its last."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import ROOT

NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs_and_its_cells_compile() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
    for number, source in enumerate(code_cells()):
        compile(source, f"cell {number}", "exec")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict[str, Any] = {}
    for number, source in enumerate(code_cells()):
        exec(compile(source, f"cell {number}", "exec"), names)
    assert names["fpl"].average > 30, "chance is 10 %"
    assert len(names["table"]) == 2
    assert set(names["photos"].accuracy) == {"day", "night"}
    assert names["photos"].average > 90, "chance is 50 %"
    events = [json.loads(line)["event"] for line in Path("runs/photos/events.jsonl").read_text().splitlines()]
    assert "at chance" not in events, "a run that has learned is not suspected of chance"
    assert len(names["model"].classes) == 10
