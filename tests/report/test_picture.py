"""The README's picture can be drawn anew."""

from __future__ import annotations

import runpy
from pathlib import Path

from PIL import Image

DRAWING = Path(__file__).resolve().parents[2] / "docs" / "make_picture.py"


def test_the_picture_is_drawn_from_runs(finished_runs: Path, tmp_path: Path) -> None:
    for method in ("fedavg", "fpl"):
        (tmp_path / f"method-{method}").mkdir()
        (tmp_path / f"method-{method}" / "seed-0").symlink_to(finished_runs / f"{method}-0")
    runpy.run_path(str(DRAWING))["draw"](tmp_path, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as drawn, Image.open(DRAWING.with_name("picture.png")) as committed:
        assert drawn.size == committed.size
