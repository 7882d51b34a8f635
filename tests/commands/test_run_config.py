"""Flower's own command: plain keys of the run configuration, and the bundle that flwr build makes."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

from common.config import split_overrides
from common.run_config import KEYS, overrides_in
from common.settings import load_settings
from server.flower.processes import program

ROOT = Path(__file__).resolve().parents[2]


def test_plain_keys_are_settings_and_overrides_win(tmp_path: Path) -> None:
    place = tmp_path / "it's here"
    given = {"method": "fedprox", "rounds": 5, "epochs": 2, "learning-rate": 0.05, "seed": 3, "output": str(place)}
    text = overrides_in({**dict.fromkeys(KEYS, ""), **given, "overrides": "train.rounds=7 method.mu=0.5"})
    settings = load_settings(split_overrides(text))
    assert (settings.method.name, settings.method.mu, settings.seed) == ("fedprox", 0.5, 3)
    assert (settings.train.rounds, settings.train.epochs, settings.train.learning_rate) == (7, 2, 0.05)
    assert settings.output_folder == place
    assert load_settings(split_overrides(overrides_in(dict.fromkeys(KEYS, "")))) == load_settings()


def test_the_app_offers_exactly_these_keys() -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert offered == dict.fromkeys(["overrides", *KEYS], "")


def test_a_plain_build_leaves_tests_docs_and_benchmarks_out(tmp_path: Path) -> None:
    app = tmp_path / "goldfinch"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, app / name)
    done = subprocess.run([program("flwr"), "build"], cwd=app, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(app.glob("*.fab"))) as bundle:
        folders = {name.partition("/")[0] for name in bundle.namelist()}
    assert {"client", "common", "conf", "server", "strategies"} <= folders
    assert not {"tests", "docs", "bench"} & folders
