"""The documentation's Python is run, so that it stays true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from fastapi.testclient import TestClient
from PIL import Image
from support.own import forget

import goldfinch as gf
from common.choices import trust
from common.config import build
from common.settings import load_settings, with_method
from goldfinch.cli import main
from server.admission.kit import UNIT
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

ROOT = Path(__file__).resolve().parent.parent
TINY = ["train.rounds=3", "protocol.samples=24", "rounds.evaluate_every=3"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.mark.long
def test_python_api_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    """In one folder, as a reader has it: no block stands in the way of another, nor of what the text says after it."""
    sources = blocks("python-api.md", "python")[:-1]  # the last is below
    for number, source in enumerate(sources):
        exec(compile(source, f"python-api.md block {number}", "exec"), {"folder": str(tmp_path)})
    found = gf.load_runs(tmp_path)
    assert sorted(run.folder.name for run in found) == ["fedavg", "fpl", "own"]
    assert len(gf.resume(tmp_path / "fpl", rounds=3).scores) == 4


@pytest.mark.long
def test_the_way_from_a_run_to_its_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command and every block of Python of the page, in its order, in an empty folder."""
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    monkeypatch.chdir(tmp_path)
    tiny = ["train.rounds=1", "train.local_steps=2", "train.device=cpu", "rounds.test_samples=8", "--quiet"]
    assert main(["run", "method=fpl", "data=glyphs", *tiny, "output=outputs/first"]) == 0
    glyphs = load_settings(["data=glyphs", "data.domains=[blended]"]).data.load("blended").test
    for number, (image, label) in enumerate(zip(glyphs.images[:40], glyphs.labels.tolist(), strict=False)):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        for folder in (Path("photos"), Path("elsewhere", "new_site", str(label))):
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{number}.png")
    commands = [line for block in blocks("use-the-model.md", "bash") for line in block.splitlines()]
    for command in commands:
        words = shlex.split(command)[1:]
        assert main([*words, *(tiny if words[0] == "run" else [])]) == 0, command
    assert len(commands) == 6
    assert len(Path("predictions.csv").read_text().splitlines()) == 41
    assert Path("outputs/second/summary.json").exists()
    spaces = []
    for source in [*blocks("use-the-model.md", "python"), blocks("python-api.md", "python")[-1]]:
        spaces.append({"folder": "models/first"})
        exec(compile(source, "use-the-model.md", "exec"), spaces[-1])
    model, service = spaces[0]["model"], TestClient(spaces[1]["app"])
    with torch.no_grad():
        expected = model(glyphs.images[:1].float() / 255)["probabilities"][0]
    answer = service.post("/predict", content=Path("photos", "0.png").read_bytes())
    assert list(answer.json()) == list(model.classes)
    assert list(answer.json().values()) == pytest.approx(expected.tolist(), abs=1e-5)
    assert service.post("/predict", content=b"words").status_code == 400


def test_added_method_runs_and_is_fedavg_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = blocks("add-a-method.md", "python")[0]
    assert len(source.splitlines()) <= 60
    module = types.ModuleType("strategies.warm_contrast")
    monkeypatch.setitem(sys.modules, "strategies.warm_contrast", module)
    exec(compile(source, "add-a-method.md", "exec"), module.__dict__)
    node = yaml.safe_load(blocks("add-a-method.md", "yaml")[0])
    trust([node["_target_"]])  # it is not in conf/
    hashes = {}
    for label, contrast in (("on", 1.0), ("off", 0.0)):
        settings = load_settings([*TINY, f"output='{tmp_path / label}'"])
        settings = with_method(settings, build({**node, "contrast": contrast}, "method"))
        prepare_output(settings)
        engine = InlineEngine(settings)
        assert run_federation(settings, engine)["method"] == "warm_contrast"
        hashes[label] = weights_of(tmp_path / label)
    settings = load_settings([*TINY, "method=fedavg", f"output='{tmp_path / 'fedavg'}'"])
    prepare_output(settings)
    run_federation(settings, InlineEngine(settings))
    fedavg = weights_of(tmp_path / "fedavg")
    assert hashes["off"] == fedavg
    assert hashes["on"] != fedavg


OWN = ["train.rounds=1", "train.local_steps=1", "rounds.test_samples=8", "train.batch_size=4"]
FILE = re.compile(r"`([\w/]+\.(?:py|yaml))`[^`]*```\w+\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["method", "model", "data-set", "protocol", "metric", "transform"])
@pytest.mark.long
def test_what_is_added_from_outside_runs_as_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written where the page says, other Python is run, and so is every command that is about them."""
    text = (ROOT / "docs" / f"add-a-{page}.md").read_text()
    assert len(text.splitlines()) <= 125
    if page == "method":  # its files are in the checkout first
        text = text.replace("strategies/warm", "mylib/warm").replace("strategies.warm", "mylib.warm")
        text = text.replace("conf/method/warm_contrast.yaml", "mine/method/warm.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for place, content in FILE.findall(text):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    for source in re.findall(r"```python\n(.*?)```", FILE.sub("", text), re.DOTALL):
        exec(compile(source, page, "exec"), {})
    commands = re.findall(r"^goldfinch .*(?:mylib|mine).*", text, re.MULTILINE)
    assert len(commands) >= 2
    for number, line in enumerate(commands):
        forget("mylib")
        words = shlex.split(line, comments=True)[1:]
        assert main([*words, *([*OWN, f"output=out/{number}"] if words[0] == "run" else [])]) == 0, line
    forget("mylib")
    if page == "metric":
        assert main(["table", "out", "--metric", "class_f1"]) == 0


def weights_of(folder: Path) -> str:
    from common.storage import tensors_sha256
    from server.run.checkpoint import Checkpoints

    checkpoint = Checkpoints(folder / "checkpoint").load()
    assert checkpoint is not None
    return tensors_sha256(checkpoint.state.weights)


def test_pages_link_to_files_that_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_picture_of_the_results_is_on_a_page() -> None:
    results = ROOT / "docs" / "results"
    pages = "".join(page.read_text() for page in results.rglob("*.md"))
    assert [picture.name for picture in results.rglob("*.png") if f"{picture.name})" not in pages] == []


def test_the_site_has_every_page_in_its_menu() -> None:
    """`make docs` fails where a page is missing; this test finds it in a second."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries: list[object]) -> list[str]:
        found = []
        for entry in entries:
            if isinstance(entry, str):
                found.append(entry)
            elif isinstance(entry, dict):
                for value in entry.values():
                    found += pages(value if isinstance(value, list) else [value])
        return found

    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    written.remove("README.md")  # which the site shows as contents.md
    generated = {
        "index.md",
        "contents.md",
        "fpl_in_one_file.md",
        "reference/index.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    }
    assert set(pages(site["nav"])) == written | generated


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr.strip()
    assert (tmp_path / "reference" / "strategies.fpl.html").exists()


def test_the_workflow_runs_the_readme_s_command_and_hooks_are_make_lint_s() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert any(step.get("run", "").startswith("make test") for step in job["steps"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert recipe is not None
    for hook in hooks:
        program = hook["entry"].split()[0].rpartition("/")[2]
        assert f"$(BIN)/{program}" in recipe[1]


def test_the_tests_that_security_names_exist() -> None:
    """Each attempt has a protection and the name of a test, or says that there is none."""
    section = (ROOT / "SECURITY.md").read_text().partition("## Who can do what\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    defined: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"def (test_\w+)", path.read_text()))
    groups = [row[0].split("**")[1] for row in rows if "**" in row[0]]
    assert groups == ["stranger on the network", "enrolled device", "author of a folder, model or image", "local user"]
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row[-1])
        assert set(named) <= defined, row[0]
        assert named or row[-1].strip() == "none" or "**" in row[0], row[0]


def test_a_service_ends_every_process_of_its_node() -> None:
    """A ClientApp that outlives its SuperNode keeps its memory and its connection."""
    services = [*(ROOT / "docs/deploy.md").read_text().split("[Service]")[1:], UNIT.partition("[Service]")[2]]
    assert len(services) == 2
    for service in services:
        assert "KillMode=control-group" in service.partition("[Install]")[0]
