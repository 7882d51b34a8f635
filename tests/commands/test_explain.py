"""What ``goldfinch list`` explains, and the completion of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from common.choices import CONF, choices_of
from common.composition import CLASSES, compose_config
from common.config import with_defaults
from common.errors import ConfigError
from common.settings import load_settings
from goldfinch.cli import main
from goldfinch.explanation import explain

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
WITHOUT_TEXT = ("engine", "experiment", "printed", "tuned", "tracker")
"""Groups with files that no class documents key by key; the comment of the file does."""


def of_its_file(overrides: Sequence[str]) -> dict[str, Any]:
    """The default composition with the file of another choice as it stands; to compose each takes far longer."""
    found = compose_config(())
    for group, _, choice in (item.partition("=") for item in overrides):
        node = yaml.safe_load(choices_of(group)[choice].read_text()) or {}
        node.pop("defaults", None)
        if "_target_" in node or group in CLASSES:
            node = with_defaults(node, group, CLASSES.get(group))
        found[group] = node
    return found


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in WITHOUT_TEXT])
def test_every_setting_of_every_choice_has_a_type_and_a_meaning(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldfinch.explanation.compose_config", of_its_file)
    whole = "_target_" not in compose_config(())[group]
    for choice, path in choices_of(group).items():
        if not whole and "_target_:" not in path.read_text():
            continue  # it changes values of another choice alone
        for setting in explain(f"{group}.{choice}").settings:
            assert setting.kind, setting
            assert setting.meaning, setting


def test_a_setting_has_type_default_meaning_search_and_printed_values() -> None:
    (setting,) = explain("method.fpl.temperature").settings
    assert (setting.key, setting.default, setting.kind) == ("method.temperature", "0.02", "number, > 0")
    assert "Eq. 7" in setting.meaning
    assert setting.search == "0.02 to 1"
    assert setting.published == {"digits": "0.02", "office_caltech": "0.02"}


@pytest.mark.parametrize("key", ["train.rounds", "rounds.outliers", "protocol.samples", "seed"])
def test_the_default_is_that_of_a_run(key: str) -> None:
    node = load_settings().raw
    for part in key.split("."):
        node = node[part]
    (setting,) = explain(key).settings
    assert setting.default == str(node).replace("None", "null")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fplx", "did you mean fpl"),
        ("fpl_office", "protocol.fpl_office or experiment.fpl_office"),
        ("method.temprature", "method.temperature"),
        ("fpl_on_digits", "printed.fpl_on_digits or tuned.fpl_on_digits"),
        ("experiment", "goldfinch list experiment"),
        ("choices", "choices: no such group, choice or setting"),
    ],
    ids=[
        "unknown",
        "of two groups",
        "misspelt setting",
        "of two kinds of values",
        "group without a default",
        "a record",
    ],
)
def test_a_wrong_name_gets_what_to_write(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        explain(name)


def test_a_group_is_listed_and_a_group_of_settings_is_explained_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "method"]) == 0
    shown = capsys.readouterr().out
    assert "\n  fedavg " in shown
    assert "method.temperature" not in shown
    assert main(["list", "method=fpl", "train", "rounds"]) == 0
    shown = capsys.readouterr().out
    assert "method.clusters=finch  (finch or global)" in shown
    assert "train=\n  default" in shown
    assert "train.rounds=10  (whole number, >= 1)" in shown
    assert "rounds.quorum=0.5" in shown
    assert main(["list", "trian"]) == 1
    assert "did you mean train" in capsys.readouterr().err


def test_a_tuned_file_is_explained() -> None:
    found = explain("tuned.fpl_on_digits")
    assert "No test set was looked at" in found.text
    assert {"method", "data", "train.learning_rate", "method.temperature"} <= {each.key for each in found.settings}


def test_a_command_of_a_group_is_named_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["enrol", "FOLDER"]) == 2
    assert "goldfinch enrol: no such command; write goldfinch devices enrol" in capsys.readouterr().err
    assert main(["devices", "dismis", "FOLDER"]) == 2
    assert "goldfinch devices dismis: no such command; did you mean 'dismiss'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["re"], {"resume", "report", "reproduce"}),
        (["report", "--o"], {"--output"}),
        (["figure", "c"], {"convergence"}),
        (["table", "--rule", "l"], {"last_n"}),
        (["nothing", "e"], {"export", "evaluate"}),
    ],
    ids=["a command", "an option", "a kind of figure", "a rule", "after a command that does not exist"],
)
def test_words_are_completed(
    words: list[str], expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_GOLDFINCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["goldfinch", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        main([])
    assert set(capsys.readouterr().out.split()) == expected


@pytest.mark.long
def test_a_text_of_several_paragraphs_has_no_table_in_it() -> None:
    for group in GROUPS:
        for choice in choices_of(group) if group not in WITHOUT_TEXT else ():
            assert "====" not in explain(f"{group}.{choice}").text, choice
    assert "\nsketch, 240 and 400: " in explain("glyphs").text


def test_a_preview_has_every_client(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data=glyphs", "method=fedavg", "protocol=skewed", "protocol.client_count=4"]
    assert main(["run", "--dry-run", *words]) == 0
    printed = capsys.readouterr().out
    assert "more clients" not in printed
    assert [line.split()[1] for line in printed.splitlines() if "-3  " in line] == [
        f"{domain}-3" for domain in ("handwritten", "printed", "signs", "sketch")
    ]
