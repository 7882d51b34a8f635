"""Flower's own command: plain keys of the run configuration, and the bundle that flwr build makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import traceback
import zipfile
from pathlib import Path

import pytest
import yaml
from flwr.app import Context, RecordDict
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from support.simulations import simulation

from common.errors import ConfigError
from common.overrides import CONFIGURATION, RUN_CONFIG, overrides_in, parse_overrides, split_overrides
from common.settings import load_settings, settings_in
from common.versions import code_files
from goldfinch.overrides import overrides_of
from server.app import app
from server.flower.processes import flower_environment, program
from server.flower.submit import remote_configuration

ROOT = Path(__file__).resolve().parents[2]


def test_plain_keys_are_settings_and_overrides_win(tmp_path: Path) -> None:
    place = tmp_path / r"it's C:\here $u41$ \\there\\"
    given = {"method": "fedprox", "rounds": 5, "epochs": 2, "learning-rate": 0.05, "seed": 3, "output": str(place)}
    text = overrides_in({**dict.fromkeys(RUN_CONFIG, ""), **given, "overrides": "train.rounds=7 method.mu=0.5"})
    settings = load_settings(split_overrides(text))
    assert (settings.method.name, settings.method.mu, settings.seed) == ("fedprox", 0.5, 3)
    assert (settings.train.rounds, settings.train.epochs, settings.train.learning_rate) == (7, 2, 0.05)
    assert settings.output_folder == place
    assert load_settings(split_overrides(overrides_in(dict.fromkeys(RUN_CONFIG, "")))) == load_settings()


def test_short_settings_are_the_same_in_all_three_places() -> None:
    given = {"rounds": 5, "epochs": 2, "learning_rate": 0.05}
    line = load_settings(["rounds=5", "epochs=2", "learning_rate=0.05"])
    assert load_settings(overrides_of(None, given)) == line
    assert load_settings(split_overrides(overrides_in({"rounds": 5, "epochs": 2, "learning-rate": 0.05}))) == line
    assert (line.train.rounds, line.train.epochs, line.train.learning_rate) == (5, 2, 0.05)
    assert load_settings(["rounds=guarded", "rounds=5"]).rounds == load_settings(["rounds=guarded"]).rounds
    assert parse_overrides(["rounds=1,2"])[0].key == "train.rounds"
    assert parse_overrides(["rounds=default,guarded"])[0].key == "rounds"


def test_a_composed_configuration_is_the_same_run_without_being_composed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "method=fedprox",
        "method.mu=0.5",
        "data.domains=[handwritten,printed,signs,sketch]",
        "protocol=glyphs_uneven",
    ]
    given += ["protocol.counts={sketch: 2}"]
    settings = load_settings([*given, "train.learning_rate=1e-3", r"output='it\'s C:\\here $u41$'", "seed=3"])
    sent = json.dumps(remote_configuration(settings))
    monkeypatch.setattr("common.composition.compose", None)
    found = settings_in({"overrides": "seed=4", CONFIGURATION: sent})
    assert (found.identity, found.configuration, found.scoring) == (
        settings.identity,
        settings.configuration,
        settings.scoring,
    )
    assert found.output_folder == settings.output_folder
    assert (found.method, found.protocol, found.train) == (settings.method, settings.protocol, settings.train)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[" * 50_000, "cannot be read"),
        ('"' + "x" * 200_000 + '"', "at most 100000"),
        ("[1]", "not a configuration"),
        ('{"method": {}}', "not a configuration"),
    ],
    ids=["no JSON", "nested", "too long", "a list", "a part"],
)
def test_what_is_no_configuration_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        settings_in({CONFIGURATION: text})


def test_interpolations_are_resolved_where_the_run_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's own environment is not read into the settings of a run."""
    monkeypatch.setenv("GOLDFINCH_SECRET", "of this device")
    raw = {**load_settings(["method=fedavg"]).raw, "output": "${oc.env:GOLDFINCH_SECRET}"}
    assert settings_in({CONFIGURATION: json.dumps(raw)}).output == "${oc.env:GOLDFINCH_SECRET}"


def test_the_app_offers_exactly_these_keys() -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert offered == dict.fromkeys(["overrides", *RUN_CONFIG], "")


def flower_prints(monkeypatch: pytest.MonkeyPatch, **run_config: str) -> str:
    """What Flower prints of what the ServerApp raises in a simulation."""
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)  # set back afterwards
    context = Context(1, 1, {}, RecordDict(), {"overrides": "", **run_config})
    with pytest.raises(ConfigError) as raised:
        app(object.__new__(InMemoryGrid), context)
    return "".join(traceback.format_exception(raised.value))


def test_a_mistake_is_a_message_without_a_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    printed = flower_prints(monkeypatch, method="fpll")
    assert printed.startswith("common.errors.ConfigError: method=fpll: no such choice; did you mean 'fpl'?")
    assert printed.count("\n") == 1
    assert "train.rounds" in flower_prints(monkeypatch, overrides="train.rounds=-1")


def test_a_module_of_the_superlinks_folder_that_is_in_the_way_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's workers import from there first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strategies.py").touch()
    assert f"{tmp_path / 'strategies.py'} is imported in place of" in flower_prints(monkeypatch, method="fpll")


def checkout(app: Path) -> Path:
    """A copy of what git has, at ``app``."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, app / name)
    return app


def test_a_plain_build_leaves_tests_docs_and_benchmarks_out(tmp_path: Path) -> None:
    app = checkout(tmp_path / "goldfinch")
    done = subprocess.run([program("flwr"), "build"], cwd=app, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(app.glob("*.fab"))) as bundle:
        names = set(bundle.namelist())
    folders = {name.partition("/")[0] for name in names}
    assert {"client", "common", "conf", "server", "strategies"} <= folders
    assert code_files().keys() <= names, "without one of them, devices would compute another code hash"
    assert not {"tests", "docs", "bench"} & folders


@pytest.mark.slow
@pytest.mark.processes
def test_flwr_run_trains_a_class_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "ownlib").mkdir(parents=True)
    (tmp_path / "site" / "ownlib" / "fair.py").write_text(
        "from common.config import checked\nfrom strategies.core.method import Method\n\n"
        '@checked\nclass QFair(Method):\n    """A method."""\n    q: float = 1.0\n'
    )
    app = checkout(tmp_path / "goldfinch")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(app), str(tmp_path / "site")]))
    words = (
        "method._target_=ownlib.fair.QFair method.q=2.0 train.local_steps=1 protocol.samples=16 rounds.test_samples=8"
    )
    given = f"rounds=1 output='{tmp_path / 'run'}' overrides='{words} data.domains=[signs,sketch]'"
    with simulation(tmp_path / "flower", app) as flower:
        done = subprocess.run(
            [program("flwr"), "run", ".", "simulation", "--stream", "--run-config", given],
            cwd=app,
            env=flower_environment(flower.folder / "home"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert (tmp_path / "run" / "summary.json").exists(), done.stdout + done.stderr
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == {
        "_target_": "ownlib.fair.QFair",
        "q": 2.0,
    }
    assert "ownlib/fair.py" in json.loads((tmp_path / "run" / "code.json").read_text())
