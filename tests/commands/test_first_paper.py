"""docs/first-paper.md, block by block as it stands: from a class of one's own to a table and a figure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import ROOT

PAGE = ROOT / "docs" / "first-paper.md"
MOST_WORDS = 350


def test_the_page_is_one_page_and_its_class_has_eight_lines() -> None:
    text = PAGE.read_text()
    assert len(text.split()) <= MOST_WORDS
    body = re.search(r"^class WarmFPL.*?(?=^END)", text, re.MULTILINE | re.DOTALL)
    assert body is not None
    assert len([line for line in body[0].splitlines() if line.strip()]) <= 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_s_blocks_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "bash", "bash", "python"]
    script = tmp_path / "page.sh"
    script.write_text("set -e\n" + "".join(text for language, text in blocks if language == "bash"))
    program = tmp_path / "page.py"
    program.write_text(blocks[-1][1])
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    place = tmp_path / "a folder"
    place.mkdir()
    printed = ""
    for command in (["bash", str(script)], [sys.executable, str(program)]):
        done = subprocess.run(
            command,
            cwd=place,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        printed += done.stdout
        assert done.returncode == 0, printed
    assert "--config-dir=mylib/conf" in printed, "the command of the page finds the class again"
    assert "different code" not in printed, "a package of one row alone is no other version of Goldfinch"
    assert "UserWarning" not in printed
    table = (place / "table.tex").read_text()
    assert "method & handwritten & sketch & average & worst" in table
    for label in ("FedAvg", "FedProto", "FPL", "Warm FPL (我的方法)"):
        assert f"\n{label} & " in table
    assert table.startswith("% compile with XeLaTeX; the preamble needs \\usepackage{xeCJK}")
    assert (place / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert (place / "small.tex").exists()
    assert (place / "run.pdf").exists()
