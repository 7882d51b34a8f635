"""What comes from the user's own package or folder of choices: found, run, resumed, and hashed like the application."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.own import forget
from support.runs import run

from common.choices import CONF, FOLDERS, search
from common.composition import changed_config, compose_config
from common.config import build
from common.errors import ConfigError, EngineError
from common.overlays import overlay_text
from common.overrides import escaped, quoted_override, unescaped
from common.settings import load_settings, settings_of
from common.versions import code_files, code_sha256, place_of
from goldfinch.cli import main
from goldfinch.commands import sweep as sweep_module
from goldfinch.commands.running import what_is_kept
from goldfinch.commands.sweep import plan
from goldfinch.readings import plain_methods
from goldfinch.record import RunRecord
from goldfinch.results.overrides import export_command
from server.flower.processes import flower_environment
from server.flower.submit import write_bundle
from server.run.own_processes import OwnProcesses

TINY = ["train.rounds=1", "train.local_steps=1", "protocol.samples=8", "rounds.test_samples=8", "data.domains=[sketch]"]

JITTER = "torchvision.transforms.v2.ColorJitter"

FAIR = '''
"""A module."""
from common.config import NonNegative, checked
from strategies.core.method import Method

@checked
class QFair(Method):
    """What fairness may cost. And more."""

    q: NonNegative = 1.0
    power: NonNegative = 0.5
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``ownlib`` with a method, as if it were installed."""
    folder = tmp_path / "site" / "ownlib"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "fair.py").write_text(FAIR)
    monkeypatch.syspath_prepend(folder.parent)
    yield folder
    forget("ownlib")


@pytest.fixture
def folder(tmp_path: Path, package: Path) -> Path:
    """A folder of choices, one of them described by its class."""
    place = tmp_path / "my choices ü"
    (place / "method").mkdir(parents=True)
    (place / "method" / "qfair.yaml").write_text("_target_: ownlib.fair.QFair\nq: 2.0\n")
    (place / "config.yaml").write_text("not: ours\n")
    return place


# ---- a class by its name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["method._target_=ownlib.fair.QFair", "method.q=2"], ["method.q=2", "method=ownlib.fair.QFair"]],
    ids=["target", "short"],
)
def test_a_class_of_ones_own_replaces_the_choice(words: list[str], package: Path) -> None:
    settings = load_settings(words)
    assert settings.raw["method"] == {"_target_": "ownlib.fair.QFair", "q": 2, "power": 0.5}, (
        "the default is recorded, too"
    )
    assert (settings.method.q, settings.method.power) == (2.0, 0.5)
    assert settings.choices["method"] == "ownlib.fair.QFair"
    assert settings.output_folder.parts[-3:] == ("glyphs", "ownlib.fair.QFair", "seed-0")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method=ownlib.fair.QFair", "method.p=2"], "method.p: no such key; did you mean 'q'?|choices: power, q"),
        (["method=ownlib.fair.QFair", "method.q=-2"], "method.q=-2: must be greater than or equal to 0"),
        (["method=ownlib.fair.QFare"], "did you mean 'QFair'"),
        (["train=ownlib.fair.QFair"], "train=ownlib.fair.QFair: no such choice"),
        (["train._target_=ownlib.fair.QFair"], "train._target_: no such key in train"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_mistakes_in_it_are_named(words: list[str], reason: str, package: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_settings(words)


def test_a_class_that_the_choice_names_already_changes_nothing() -> None:
    words = ["method=fedprox", "method.mu=0.5"]
    assert compose_config([*words, "method._target_=strategies.fedprox.FedProx"]) == compose_config(words)


def test_a_class_that_python_has_imported_is_built_and_no_function(package: Path, tmp_path: Path) -> None:
    node = {"_target_": "ownlib.fair.QFair", "q": 2.0}
    with pytest.raises(
        ConfigError, match=r"if you name it: .* by method._target_=.* .in Python import ownlib.fair before"
    ):
        build(node, "method")
    importlib.import_module("ownlib.fair")
    assert build(node, "method").q == 2.0
    for name in ("subprocess.Popen", "common.choices.trust", "common.settings.RunSettings"):
        with pytest.raises(ConfigError, match="imported only if you name it"):
            build({"_target_": name}, "method")


def test_a_class_that_only_a_tuned_file_names_is_not_imported(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text(overlay_text("goldfinch run", "by chance", "ownlib.fair.QFair", "glyphs", {"method.q": 3.0}))
    with pytest.raises(ConfigError, match="imported only if you name it"):
        load_settings([f"tuned={path}"])
    assert load_settings([f"tuned={path}", "method=ownlib.fair.QFair"]).method.q == 3.0


# ---- a folder of choices ---------------------------------------------------------------------------------------------


def test_a_run_with_a_folder_of_choices_goes_on_with_it_or_with_its_class_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    given = ["--config-dir", str(folder)]
    assert main(["run", "--quiet", *given, "method=qfair", "method.power=1", *TINY, f"output={place}"]) == 0
    assert json.loads((place / "summary.json").read_text())["method"] == "fair"
    forget("ownlib")  # another process
    assert main(["table", str(place)]) == 0, "a table needs no class"
    assert main(["figure", "prototypes", str(place)]) == 1
    assert "--config-dir with the folder that names it" in capsys.readouterr().err
    own = "method._target_=ownlib.fair.QFair"
    assert main(["resume", str(place), "train.rounds=2", own, "--quiet"]) == 0
    assert "ownlib/fair.py" in json.loads((place / "code.json").read_text())
    forget("ownlib")
    assert main(["resume", str(place), "train.rounds=3", "--quiet", *given]) == 0
    assert main(["table", str(place)]) == 0
    assert settings_of(changed_config(RunRecord(place).config, [])).identity == RunRecord(place).summary["identity"]


def test_a_model_of_its_method_is_evaluated_by_the_remedy_of_the_refusal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, model = tmp_path / "run", tmp_path / "model"
    given = ["--config-dir", str(folder)]
    assert main(["run", "--quiet", *given, "method=qfair", *TINY, f"output={place}"]) == 0
    assert main(["export", str(place), "--to", str(model), *given]) == 0
    forget("ownlib")  # another process
    evaluated = ["evaluate", str(model), "data=glyphs", "data.domains=[sketch]"]
    assert main(evaluated) == 1
    assert "imported only if you name it: by --config-dir with the folder whose file does" in capsys.readouterr().err
    assert main([*evaluated, *given]) == 0


@pytest.mark.parametrize("named", ["by a folder", "by the user"])
def test_the_command_that_goes_on_finds_the_class_and_writes_where_the_run_wrote(
    named: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    words = ["method=ownlib.fair.QFair", "tracker=tensorboard", f"tracker.folder='{tmp_path}'", f"output={place}"]
    if named == "by a folder":
        search(folder)
        words[0] = "method=qfair"
    settings = load_settings([*TINY, *words])
    run(settings)
    told = what_is_kept(settings)
    forget("ownlib")  # another process
    told = told.removeprefix("round 1 is kept: goldfinch ").removesuffix(" goes on")
    assert main([*shlex.split(told), "--quiet"]) == 0, capsys.readouterr().err
    assert "ownlib" in told or str(folder) in told
    assert ("--config-dir" in export_command(RunRecord(place))) == (named == "by a folder")


def test_its_choices_are_listed_with_the_docstrings_of_their_classes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "method" / "absent.yaml").write_text("_target_: nolib.fair.QFair\n")
    assert main(["list", "method", "--config-dir", str(folder)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["qfair", "What fairness may cost."] in lines
    assert ["absent"] in lines


@pytest.mark.parametrize(
    "odd", ["_target_: nolib.fair.QFair", "q: 2.0", "_target_: strategies.core.exported.ExportedModel"]
)
def test_an_odd_choice_of_ones_own_leaves_goldfinch_s_own_explained(odd: str, folder: Path) -> None:
    plain_methods.cache_clear()
    (folder / "method" / "odd.yaml").write_text(f"{odd}\n")
    assert main(["list", "fpl", "--config-dir", str(folder)]) == 0
    assert main(["list", "alterations", "--config-dir", str(folder)]) == 0


def test_a_choice_with_a_transform_of_any_class_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "_target_: common.data.glyphs.Glyphs\naugmentation:\n  transform:\n"
    (folder / "data").mkdir()
    (folder / "data" / "bright.yaml").write_text(f"{text}    _target_: {JITTER}\n    hue: 0.1\n")
    assert main(["list", "bright", "--config-dir", str(folder)]) == 0
    assert f"data.augmentation.transform={{_target_:{JITTER},hue:0.1}}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "reason"),
    [("method/fpl.yaml", "there is a method=fpl already"), ("methods/mine.yaml", "no file such as method/NAME.yaml")],
)
def test_a_folder_that_is_of_no_use_is_refused(file: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("_target_: ownlib.fair.QFair\n")
    with pytest.raises(ConfigError, match=reason):
        search(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        search(tmp_path / "nowhere")
    assert FOLDERS == [CONF]


def test_a_sweep_hands_the_folder_to_its_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(folder)
    jobs, _ = plan(["method=qfair,ownlib.fair.QFair"], tmp_path)
    assert [job.settings.method.q for job in jobs] == [2.0, 1.0]
    called: list[Any] = []

    def start(command: list[str], **_: object) -> subprocess.Popen[bytes]:
        called.append(command)
        raise OSError("not started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="not started"):
        sweep_module.run_subprocess(jobs[0], OwnProcesses(), lambda label, line: None)
    assert f"--config-dir={folder}" in called[0]


def test_an_error_ends_what_runs_and_lets_nothing_start() -> None:
    """As Ctrl-C in a sweep: the next run in the queue would train otherwise, after the others were ended."""

    def fail() -> None:
        with OwnProcesses() as processes:
            found.append(processes.start(["compare", "--help"], 1))
            groups.append(processes)
            raise KeyboardInterrupt

    found: list[subprocess.Popen[bytes]] = []
    groups: list[OwnProcesses] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert found[0].wait(60) in (0, -15)
    with pytest.raises(EngineError, match="no further process"):
        groups[0].start(["list"], 1)


def test_the_bundle_of_a_run_holds_its_choices_and_nothing_else_of_the_folder(folder: Path, tmp_path: Path) -> None:
    search(folder)
    conf = write_bundle(tmp_path / "bundle") / "conf"
    assert (conf / "method" / "qfair.yaml").read_text() == (folder / "method" / "qfair.yaml").read_text()
    assert (conf / "config.yaml").read_text() == (CONF / "config.yaml").read_text()


@pytest.mark.long
def test_where_a_bundle_runs_a_class_of_ones_own_imports_its_names_from_goldfinch(tmp_path: Path) -> None:
    """Flower puts the bundle first on the path."""
    bundle = write_bundle(tmp_path / "bundle")
    lines = f"import sys; sys.path.insert(0, {str(bundle)!r}); import client.app, goldfinch; print(goldfinch.Batch)"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "strategies.core.exchange.Batch" in done.stdout, done.stderr


def test_what_flower_starts_elsewhere_finds_the_package_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["mine", "/theirs"]))
    assert flower_environment(tmp_path / "home")["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "mine"), "/theirs"])


# ---- the same on both sides ------------------------------------------------------------------------------------------


def test_the_code_hash_covers_the_packages_that_the_settings_name(package: Path) -> None:
    settings = load_settings(["method=ownlib.fair.QFair"])
    assert settings.own_packages == ("ownlib",)
    assert settings.software == "the same Goldfinch and the same ownlib"
    first = settings.code
    assert first != code_sha256() == load_settings().code
    (package / "other.py").write_text("x = 1\n")
    assert load_settings(["method=ownlib.fair.QFair"]).code == first, "what is imported stays as it was"
    code_sha256.cache_clear()
    code_files.cache_clear()
    assert load_settings(["method=ownlib.fair.QFair"]).code != first


def test_a_package_is_found_without_importing_it(package: Path) -> None:
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    assert place_of("ownlib") == package
    (package.parent / "single.py").touch()
    assert place_of("single") == package.parent / "single.py"
    assert [place_of(name) for name in ("nolib", "__main__", "sys")].count(None) >= 2


def test_code_that_was_changed_after_its_import_is_not_run_as_if_it_were_new(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook, whose process goes on: Python does not import a file again."""
    run = ["run", "--quiet", "method=ownlib.fair.QFair", *TINY, "overwrite=true", f"output={tmp_path / 'run'}"]
    compare = ["compare", "--methods", "ownlib.fair.QFair", *TINY, "--output", str(tmp_path / "compare")]
    assert main(run) == 0
    (package / "fair.py").write_text(FAIR.replace("1.0", "3.0"))
    for command in (run, compare):
        assert main(command) == 1
        assert "ownlib/fair.py: changed since this process imported it" in capsys.readouterr().err
    forget("ownlib")  # another process
    assert main(run) == 0


def test_a_file_that_is_new_since_the_package_was_imported_is_imported_and_hashed(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook, where a second class is written after a first run."""

    def run(name: str) -> int:
        return main(["run", "--quiet", f"method=ownlib.{name}.QFair", *TINY, f"output={tmp_path / name}"])

    assert run("fair") == 0
    before = load_settings(["method=ownlib.fair.QFair"]).code
    (package / "fairer.py").write_text(FAIR)
    assert run("fairer") == 0
    assert "ownlib/fairer.py" in (tmp_path / "fairer" / "code.json").read_text()
    assert load_settings(["method=ownlib.fairer.QFair"]).code != before
    (package / "fairer.py").write_text(FAIR.replace("1.0", "3.0"))
    assert run("fairer") == 1
    assert "ownlib/fairer.py: changed since this process imported it" in capsys.readouterr().err


def test_the_command_for_a_traceback_goes_on_with_the_run_that_it_interrupted(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "    def aggregate(self, state, updates, server):\n"
    broken += "        1 / (2 - server.round)\n        return super().aggregate(state, updates, server)\n"
    (package / "fair.py").write_text(FAIR + broken)
    words = ["run", "--quiet", "method=ownlib.fair.QFair", *TINY, "train.rounds=2", f"output={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["goldfinch", *words])
    assert main(words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    command = shlex.split(line.partition(" shows where")[0])
    monkeypatch.setenv(*command[0].split("=", 1))
    with pytest.raises(ZeroDivisionError):
        main(command[2:])


# ---- letters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Zürich-东京", "a$u41$b", "it's C:\\x", "a, b=c (d)", "😀"])
def test_any_letter_comes_through_hydras_grammar(text: str) -> None:
    assert unescaped(escaped(text)) == text or "$u" in text
    assert compose_config([quoted_override("output", text)])["output"] == text


ALLOCATION = "protocol=common.data.protocols.Allocation"


def test_names_need_no_quotes_for_letters_of_any_language() -> None:
    words = ["data=folder", "data.domains=[Zürich-东京,b]", ALLOCATION, "protocol.counts={Zürich-东京:2}"]
    composed = compose_config(words)
    assert composed["data"]["domains"] == ["Zürich-东京", "b"]
    assert composed["protocol"]["counts"] == {"Zürich-东京": 2}
    jobs, _ = plan(["data=folder", "data.classes=[猫]", "data.domains=[Zürich],[东京]"], Path("x"))
    assert [job.settings.data.domains for job in jobs] == [("Zürich",), ("东京",)]
    assert build(jobs[0].settings.raw["data"], "data").classes == ("猫",)


def test_the_error_for_a_value_to_quote_has_an_example() -> None:
    with pytest.raises(ConfigError, match=r"quote a value .* as in 'data\.domains=\[\"A & B\",C\]'"):
        compose_config(["data=folder", "data.domains=[New York (A&B),b]"])
    assert compose_config(["data=folder", 'data.domains=["A & B",C]'])["data"]["domains"] == ["A & B", "C"]


def test_a_run_with_odd_domain_names_is_resumed(tmp_path: Path) -> None:
    odd = ("Zürich-东京", "1 Ward (A & B), it's")
    for shade, domain in enumerate(odd):
        for colour, label in enumerate(("猫", "dog")):
            (tmp_path / "data" / domain / label).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (16, 16), (60 * number, 60 * shade, 60 * colour)).save(
                    tmp_path / "data" / domain / label / f"{number}.png"
                )
    place = tmp_path / "läuft"
    words = ["data=folder", quoted_override("data.root", tmp_path / "data"), "train.batch_size=4", "method=fedavg"]
    words += ["data.image_size=16", "train.rounds=1", f"output={place}", "engine.wire=true"]
    counts = ",".join(f"{escaped(name, r'[^a-zü-]')}:1" for name in odd)
    words += [ALLOCATION, f"protocol.counts={{{counts}}}", "protocol.fraction=1"]
    assert main(["run", "--quiet", *words]) == 0
    assert settings_of(changed_config(RunRecord(place).config, [])).protocol.counts == dict.fromkeys(odd, 1)
    assert main(["resume", str(place), "train.rounds=2", "--quiet"]) == 0
    assert set(RunRecord(place).summary["accuracy"]) == set(odd)
