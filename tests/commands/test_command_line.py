"""The command line: help, versions, completion, mistyped words, exit codes, and what is imported for it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from omegaconf import OmegaConf
from support.records import rewrite
from support.runs import run

from common.choices import CONF
from common.composition import changed_config, compose_config
from common.errors import ConfigError
from common.settings import settings_of
from goldfinch import cli
from goldfinch.cli import main
from goldfinch.commands import demo as demo_module
from goldfinch.commands import doctor
from goldfinch.commands import sweep as sweep_module
from goldfinch.commands.listing import description
from goldfinch.commands.program import items_of
from goldfinch.commands.sweep import plan
from goldfinch.record import RunRecord

TOP: dict[str, click.Command] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def commands() -> dict[str, click.Command]:
    """Every command by the words that call it; those of a group have the group's before their own."""
    found: dict[str, click.Command] = {}
    for name, each in TOP.items():
        if isinstance(each, click.Group):
            found |= {f"{name} {below}": command for below, command in each.commands.items()}
        else:
            found[name] = each
    return found


COMMANDS = commands()
ROOT = Path(__file__).resolve().parents[2]
TINY = ["train.rounds=2", "train.local_steps=1", "protocol.samples=24", "rounds.test_samples=8"]
COMMAND_LINE = "import sys; from goldfinch.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which the tests leave as it is."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["run", "--quiet", *TINY, "method=fedavg", f"output={folder}"]) == 0
    return folder


def spoken(value: object) -> str | None:
    return " ".join(value) if isinstance(value, list) else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_describes_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    assert main([*name.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    first = str(command.help).splitlines()[0]
    assert first in printed
    assert len(first) <= 57, "longer ones are cut in the list of commands"
    assert "\\[" not in printed, "escaped for a markup that is not used"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help
            assert parameter.opts[0] in printed
        elif isinstance(parameter, click.Argument):
            words = re.findall(r"[A-Za-z]+", str(parameter.metavar))
            assert words
            assert all(word in str(command.help) for word in words), "the docstring explains every word"


def test_the_list_of_commands_is_complete_and_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "..." not in printed.partition("Commands:")[2]
    assert all(re.search(rf"^  {name} +\w", printed, re.MULTILINE) for name in TOP)
    assert main([]) == 2
    assert capsys.readouterr().out == printed


def test_the_version_names_flower_s_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"goldfinch \d+\.\d+\.\d+, Flower 1\.\d+\.\d+, Python 3\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["rnu"], 2, "did you mean 'run'"),
        (["list", "temperature"], 1, "did you mean method.temperature?"),
        (["figure", "outputs/first"], 1, "KIND is missing before outputs/first: goldfinch figure convergence"),
        (["figure", "bars"], 1, "DIR is missing: goldfinch figure bars DIR"),
        (["figure", "bras", "outputs/first"], 1, "did you mean 'bars'"),
        (["report", "outputs/first", "--csv", "--output", "x.csv"], 1, "--csv writes into each run's own folder"),
        (["run", "fpl"], 1, "did you mean method=fpl?"),
        (["run", "fpll"], 1, "goldfinch list shows the settings"),
        (["run", "--method", "fpl"], 2, "a setting is written without hyphens: method=VALUE"),
        (["run", "method._target_=support.nowhere.Mine"], 1, "did you mean 'nodes'"),
        (["run", "method._target_=support.own.Mine"], 1, "has no class Mine"),
        (["run", "method._target_=nowhere.Mine"], 1, "PYTHONPATH"),
        (["run", "--qiet"], 2, "--quiet"),
        (["run", "--list"], 2, "there is a command: goldfinch list"),
        (["table"], 2, "DIR"),
        (["run", "epoch=3"], 1, "did you mean train.epochs=3?"),
        (["run", "rounds=ten"], 1, "choices: default, guarded"),
        (["run", "clients=10"], 1, "goldfinch list protocol"),
        (["run", "data=office"], 1, "did you mean 'office_caltech' or 'office_home'?"),
        (["run", "data.domains=sketch"], 1, "must be a list: data.domains=[sketch]"),
        (["run", "learningrate=0.1"], 1, "did you mean train.learning_rate=0.1?"),
        (["run", "train.lr=0.1"], 1, "did you mean train.learning_rate=0.1?"),
        (["run", "temperature=1"], 1, "did you mean method.temperature=1?"),
        (["run", "protocol=dirichlet", "client_counts=5"], 1, "did you mean protocol.client_count=5?"),
        (["run", "method=fedavg,fpl"], 1, "use sweep: goldfinch sweep method=fedavg,fpl"),
        (["run", "method=[fedavg,fpl]"], 1, "a run has one method; use sweep: goldfinch sweep method=fedavg,fpl"),
        (["run", "data=[glyphs]"], 1, "a run has one data; use sweep: goldfinch sweep data=glyphs"),
        (["run", "method=*"], 1, "use sweep"),
        (["run", "--multirun", "method=fpl"], 1, "use sweep"),
        (["sweep"], 1, "needs settings with several values"),
        (["sweep", "--jobs", "0", "seed=0,1"], 2, "--jobs"),
        (["sweep", "seed=0,1", "output=DIR"], 1, "write --output DIR"),
        (["sweep", "seed=0,1", "overwrite=yes"], 1, "expected overwrite=true or overwrite=false"),
        (["demo", "--deployment", "--methods", "fpl"], 1, "method=NAME"),
        (["evaluate", "MODEL", "photo.png", "data=glyphs"], 1, "give images, whose classes are predicted, or settings"),
        (["evaluate", "MODEL", "photo.png", "--split", "all"], 1, "images have no split"),
        (["sweep", "seed=0,1", "--jobs", "1", "--jobs", "2"], 1, "--jobs is given twice"),
        (["compare", "--methods", "fpl", "trials=20"], 1, "write --trials 20"),
        (["compare", "--methods", "fpl", "--trails", "20"], 2, "--trials"),
        (["compare", "--methods", "fpl", "--trials", "0"], 2, "--trials"),
        (["compare", "methods=fpl"], 1, "write --methods fpl"),
        (["sweep", "seed=0,1", "--output", ""], 1, "sweep seed=0,1 --output '': '' has no value, as if a variable"),
        (["sweep", "seed=0,1", "--output="], 1, "--output= has no value"),
        (["table", ""], 1, "'' has no value"),
        (["table", "outputs/first", "--output", "t.xyz"], 1, "--output t.xyz: its format xyz: choices: csv, json"),
        (["table", "outputs/first", "--format", "xyz"], 1, "--format xyz: choices: csv, json"),
        (["devices", "certificates", "federation", "--days", "0"], 1, "--days 0: a server's certificate is good for 1"),
        (["devices", "certificates", ""], 1, "'' has no value"),
        (["compare", "data=glyphs"], 1, "--methods fedavg,fpl"),
        (["reproduce", "fpl_office", "--seeds", "1,1"], 1, "--seeds 1,1: a seed is there twice"),
        (["compare", "--methods", "fpl", "method=moon"], 1, "--methods A,B"),
        (["demo", "method=fpl"], 1, "write --methods A,B"),
        (["reproduce", "fpl_office", "--scale", "smal"], 1, "did you mean 'small'"),
        (["reproduce", "fpl_office", "--seeds", "a"], 1, "--seeds a: expected whole numbers"),
        (["reproduce", "fpl_office", "--seeds", "٢"], 1, "--seeds ٢: expected whole numbers"),
        (["devices", "certificates", "FOLDER", "host=a"], 1, "write --host a"),
        (["table", "x", "--rule", "finla"], 1, "did you mean 'final'"),
        (["list", "methods"], 1, "did you mean method"),
        (["resume", "nowhere"], 1, "holds no run"),
        (["export", "nowhere"], 1, "goldfinch export nowhere --to DIR"),
        (["export", "nowhere", "--to", "x"], 1, "holds no run"),
        (["export", "nowhere", "--to", "x", "--format", "onxx"], 1, "did you mean 'onnx'"),
    ],
    ids=spoken,
)
def test_mistakes_are_named(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    assert message in capsys.readouterr().err


def test_an_option_of_several_values_may_be_repeated() -> None:
    """Click keeps the last of them, which would drop the others in silence."""
    lists = {
        (name, parameter.opts[0])
        for name, command in COMMANDS.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and ("," in str(parameter.metavar) or "repeat" in str(parameter.help))
    }
    assert {("export", "--format"), ("compare", "--methods"), ("reproduce", "--seeds")} <= lists
    for name, flag in lists:
        (parameter,) = (each for each in COMMANDS[name].params if flag in each.opts)
        assert parameter.multiple, f"goldfinch {name} {flag} keeps the last value alone"  # type: ignore[attr-defined]
    assert items_of(["a, b", "c"]) == ("a", "b", "c")


def test_goldfinch_does_not_import_from_the_working_folder_and_doctor_names_what_would_shadow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = [tmp_path / f"{name}.py" for name in ("common", "strategies", "client", "server")]
    for path in strangers:
        path.write_text("raise SystemExit('imported')")
    command = [sys.executable, Path(sys.executable).with_name("goldfinch"), "list", "engine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = [finding.result for finding in doctor._shadows()]
    assert [f"import {path} in place of" in words for path, words in zip(strangers, found, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        ("common.py", ["-c", "import goldfinch"]),
        ("server/__init__.py", ["-m", "goldfinch", "--version"]),
        ("client/__init__.py", ["script.py"]),
        ("strategies.py", ["-c", COMMAND_LINE, "list", "engine"]),
    ],
    ids=["imported", "a module that is run", "a script", "the command line"],
)
def test_a_file_that_shadows_a_package_is_named_however_goldfinch_is_imported(
    stranger: str, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    (tmp_path / "script.py").write_text("import goldfinch")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{path} is imported in place of Goldfinch's package" in done.stderr
    assert "rename it, or start Python in another folder" in done.stderr


IMPORTED = """
import sys
from goldfinch.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "flwr", "matplotlib", "hydra", "rich", "numpy", "pydantic"} & set(sys.modules)
print(code, *sorted(heavy))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--help"], "0"), (["rnu"], "2"), (["run", "train.round=5"], "1 hydra pydantic")],
    ids=spoken,
)
def test_help_and_mistakes_import_little(words: list[str], expected: str) -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(
    "group", ["method", "data", "protocol", "model", "aggregation", "engine", "tracker", "train", "experiment"]
)
def test_every_choice_has_a_line_of_description(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", group]) == 0
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    shown = capsys.readouterr().out.splitlines()[1:]
    lines = shown[: len(choices)]
    assert lines == shown or group == "train", "whose settings are explained below"
    assert [line.split()[0] for line in lines] == choices
    assert all(len(line.split()) > 2 for line in lines)
    assert not any("goldfinch " in line for line in lines), "what it is, not how it is called"


# ---- one run ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_dry_run_shows_what_would_be_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run"
    assert main(["run", "--dry-run", *TINY, "method=fpl", f"output={place}"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 40, "the samples are on the same screen as the settings"
    shown = OmegaConf.to_container(OmegaConf.create(printed))
    assert shown["train"] == {"rounds": 2, "local_steps": 1}  # type: ignore[index,call-overload]
    assert "seed" not in shown  # type: ignore[operator]
    assert re.findall(r"^#   (\S+) +(\d+) ", printed, re.MULTILINE) == [
        (f"{domain}-0", "24") for domain in ("handwritten", "printed", "signs", "sketch")
    ]
    assert not place.exists()


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedproto", "scaffold"])
def test_the_estimated_bytes_are_those_of_a_run(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"method={method}", f"output={tmp_path / 'run'}", "rounds.evaluate_every=2"]
    assert main(["run", "--dry-run", *words]) == 0
    sizes = re.findall(r"about ([\d,]+) bytes (down|up)", capsys.readouterr().out)
    estimated = {way: int(number.replace(",", "")) for number, way in sizes}
    assert main(["run", "--quiet", *words]) == 0
    moved = json.loads((tmp_path / "run" / "summary.json").read_text())["bytes"]
    for way, times in (("up", 2), ("down", 3)):  # the last state is sent once more, to be scored
        assert moved[way] == pytest.approx(estimated[way] * times, rel=0.02)


def test_a_run_is_resumed_with_its_own_configuration(tmp_path: Path) -> None:
    place = tmp_path / "a run, with=signs"
    odd = ["method=fedproto", "method.consistency=0.5", "seed=3", "protocol.order=first"]
    quoted = f"output='{place}'"
    assert main(["run", "--quiet", *TINY, *odd, quoted]) == 0
    whole = json.loads((place / "summary.json").read_text())
    again = settings_of(changed_config(RunRecord(place).config, []))
    assert again.identity == whole["identity"]
    assert again.output_folder == place
    assert main(["resume", str(place), "train.rounds=3", "--quiet"]) == 0
    assert json.loads((place / "summary.json").read_text())["rounds"] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_missing_device_is_an_error_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *TINY, "train.device=cuda", f"output={tmp_path / 'run'}"]) == 1
    assert "use auto or cpu where it is set (train.device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- several ---------------------------------------------------------------------------------------------------------


def test_the_demonstration_trains_the_given_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def note(settings: Any, listeners: Any) -> None:
        trained.append(settings.method.name)

    monkeypatch.setattr(demo_module, "run_on_ray", note)
    monkeypatch.setattr(demo_module, "show_table", lambda folders: None)
    monkeypatch.setattr(demo_module, "show_predictions", lambda run, output: None)
    monkeypatch.setattr(demo_module, "write_report", lambda folders, path: path)
    assert main(["demo", "--methods", "fedprox,moon", "--output", str(tmp_path)]) == 0
    assert trained == ["fedprox", "moon"]
    assert main(["demo", "--methods", "fedprox,mooon", "--output", str(tmp_path)]) == 1
    assert len(trained) == 2


def test_a_demonstration_shows_what_is_finished_and_replaces_nothing_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["method=fedavg", "engine=inline", "data=glyphs", "data.domains=[printed,signs]", "protocol.samples=16"]
    words += ["model=small", "train.device=cpu", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8"]
    chosen = [*words, f"output={tmp_path}"]
    settings = demo_module.settings_here(chosen)
    assert settings is not None
    run(settings)
    assert demo_module.settings_here(chosen) is None
    assert "has finished already and is shown as it is; overwrite=true trains it again" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"is kept: it has other settings: seed=1.*add overwrite=true"):
        demo_module.settings_here([*chosen, "seed=1"])
    replacing = demo_module.settings_here([*chosen, "seed=1", "overwrite=true"])
    assert replacing is not None
    assert replacing.overwrite
    longer = demo_module.settings_here([*chosen, "train.rounds=2"])
    assert longer is not None
    assert longer.resume


def test_a_sweep_runs_what_fits_and_names_the_rest(tmp_path: Path) -> None:
    jobs, skipped = plan(["method=fedavg,single_set", "aggregation=mean,geometric_median"], tmp_path)
    assert [job.label for job in jobs] == [
        "method=fedavg aggregation=mean",
        "method=fedavg aggregation=geometric_median",
        "method=single_set aggregation=mean",
    ]
    assert list(skipped) == ["method=single_set aggregation=geometric_median"]
    assert "single_set" in skipped["method=single_set aggregation=geometric_median"]


def test_a_sweep_skips_methods_that_lack_a_setting_and_names_it(tmp_path: Path) -> None:
    jobs, skipped = plan(["method=fedavg,fedbn", "method.refresh_statistics=true"], tmp_path)
    assert [job.label for job in jobs] == ["method=fedbn"]
    assert "method.refresh_statistics: no such key" in skipped["method=fedavg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=fedavg,fpll"], "did you mean 'fpl'"),
        (["seed=-1,-2"], "no run of the sweep is possible"),
        (["method=fedavg,fpl", "train.epoch=2"], "did you mean 'epochs'"),
        (["seed=0,1,2", "data.image_sizes=16"], "seed=0, seed=1, seed=2: data.image_sizes: no such key"),
    ],
    ids=["a choice that does not exist", "values out of range", "a mistyped key", "one reason for all seeds"],
)
def test_a_sweep_with_a_mistake_runs_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words, "--output", str(tmp_path / "sweep")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("words", "place", "message"),
    [
        (["sweep", "data=pacs", "method=fedavg,fpl", "seed=0,1"], "", "no directory was given"),
        (["reproduce", "fpl_office", "--scale", "small", "--methods", "FedAvg,FPL"], "", "no directory was given"),
        (["sweep", "data=digits", "method=fedavg,fpl"], ".", "mnist is not in"),
    ],
    ids=["sweep", "reproduce", "another folder"],
)
def test_missing_data_are_one_error_before_the_first_run(
    words: list[str],
    place: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOLDFINCH_DATA", place)
    assert main([*words, "--output", str(tmp_path / "runs")]) == 1
    assert capsys.readouterr().err.count(message) == 1
    assert not (tmp_path / "runs").exists()


def test_a_sweep_shows_how_far_its_runs_are() -> None:
    shown: list[str] = []
    progress = sweep_module.Progress(shown.append)
    progress("seed=0", "round 1/3 [odd]")
    progress("seed=1", "round 2/3")
    progress("seed=0", "")
    assert shown == [r"seed=0: round 1/3 \[odd]", "seed=0: round 1/3 \\[odd]\nseed=1: round 2/3", "seed=1: round 2/3"]


def test_a_reader_that_closes_the_output_is_no_error(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-c", COMMAND_LINE, "list", "experiment", "method", "protocol"])
    words = f"set -o pipefail; {command} | head -1"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "Broken pipe" not in done.stderr
    assert done.stdout.count("\n") == 1


def test_a_reader_that_closes_the_output_of_a_table_is_no_error(finished: Path) -> None:
    """The table is printed by another library, which ends the process in its own way."""
    command = shlex.join([sys.executable, "-c", COMMAND_LINE, "table", str(finished)])
    done = subprocess.run(["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_table_of_a_run_that_was_stopped_names_report_and_resume(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    rewrite(tmp_path / "run" / "events.jsonl", lambda line: None if line["event"] == "finish" else line)
    assert main(["table", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "goldfinch report" in message
    assert "goldfinch resume" in message


SHOWING = """
import sys
from goldfinch.cli import main
run = sys.argv[1]
for words in (
    ["list"], ["list", "method"], ["report", "--help"], ["report", run, "--watch"],
    ["table", run], ["table", run, "--format", "csv"], ["table", run, "--format", "latex"],
):
    assert main(words) == 0, words
    assert "torch" not in sys.modules, words
"""


def test_lists_and_runs_are_shown_and_watched_without_importing_torch(finished: Path) -> None:
    words = [sys.executable, "-c", SHOWING, str(finished)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "average" in done.stdout


WATCHING = """
import sys
from pathlib import Path
import server.flower.submit as submit
from goldfinch.cli import main

class Followed(submit.SubmittedRun):
    def follow(self, log):
        return "finished:completed", ""

submit.check_connection = lambda path, name: None
submit.start_run = lambda *_: Followed("1", [], {}, Path())
code = main(["run", "engine=superlink", "output=run"])
large = {"torchvision", "flwr", "ray", "pandas", "pyarrow", "matplotlib", "sklearn", "scipy", "optuna", "opacus"}
large |= {"datasets", "onnx", "tensorboard", "sympy", "grpc"}
print(code, *sorted(large & set(sys.modules)))
"""


@pytest.mark.long
def test_a_terminal_that_submits_imports_nothing_large_but_torch(tmp_path: Path) -> None:
    """The settings are checked before a run is submitted, and their classes need torch."""
    words = [sys.executable, "-c", WATCHING]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0", done.stderr


def test_a_description_keeps_its_last_bracket(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text("# goldfinch run experiment=a  the global mean (G) or the unbiased one (U)\n")
    assert description(place) == "the global mean (G) or the unbiased one (U)"
    place.write_text("# goldfinch run experiment=a\n# (all in brackets)\n")
    assert description(place) == "all in brackets"


def test_a_comma_in_the_output_is_quoted_and_sweeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"output={tmp_path}/a,b"]) == 1
    told = capsys.readouterr().err
    assert "a value with a comma is quoted: " in told
    assert "sweep" not in told
    (quoted,) = shlex.split(told.strip().rpartition("is quoted: ")[2])
    assert compose_config([quoted])["output"] == f"{tmp_path}/a,b"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["seed=0,1", "seed=2,3"], "seed"),
        (["method=fedavg,fpl", "method=fedprox"], "method"),
        (["train.learning_rate=0.1", "learning_rate=0.2,0.3"], "train.learning_rate"),
    ],
    ids=["two axes", "a fixed word", "a short key"],
)
def test_a_sweep_takes_a_key_once(words: list[str], key: str, tmp_path: Path) -> None:
    """The later word would count alone, in folders that are named after both."""
    with pytest.raises(ConfigError, match=rf"{words[0]} and .*: write all values of {key} in one word, {key}=A,B"):
        plan(["data=glyphs", *words], tmp_path)
