"""Printed and tuned values: overlays that Hydra composes, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.choices import CONF
from common.composition import changed_config, compose_config
from common.errors import ConfigError
from common.overlays import GROUPS, NONE, find_overlay, overlay_text, printed_values
from common.overrides import quoted_override
from common.run_config import flat
from common.settings import load_settings
from goldfinch.commands import sweep
from goldfinch.reproduction.published import published_table

FILES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml")) if path.stem != NONE]
PRINTED = [(name.partition("_on_")[0], name.partition("_on_")[2]) for group, name in FILES if group == "printed"]
TUNED = [name for group, name in FILES if group == "tuned"]
TABLES = {
    ("fedplcc", "digits"): "fedplcc_digit5",
    ("fedplcc", "office_caltech"): "fedplcc_office",
    ("fedplcc", "domainnet"): "fedplcc_domainnet",
    ("fedpall", "digits"): "fedpall_digits",
    ("fedpall", "office_caltech"): "fedpall_office",
    ("fedpall", "pacs"): "fedpall_pacs",
    ("fedgca", "digits"): "fedgca_digits",
    ("fedgca", "pacs"): "fedgca_pacs",
    ("fpl", "digits"): "fpl_digits",
    ("fpl", "office_caltech"): "fpl_office",
    ("fedplvm", "digits"): "fedplcc_digit5",
    ("fccl+", "office_caltech"): "fedplcc_office",
}
"""The table that a paper's printed values are of, by the paper that ``source`` names, and the data set."""
FILE = overlay_text(
    "goldfinch run tuned=FILE", "by hand", "fedprox", "glyphs", {"method.mu": 0.5, "train.learning_rate": 0.02}
)


# ---- what Hydra makes of them ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("group", "name"), FILES, ids=lambda value: value)
def test_a_file_holds_settings_of_its_method_and_data_set(group: str, name: str) -> None:
    overlay = find_overlay(group, name)
    known = flat(compose_config([f"method={overlay.method}", f"data={overlay.data}"]))
    assert name == f"{overlay.method}_on_{overlay.data}"
    assert set(overlay.values) <= set(known)


@pytest.mark.parametrize(("group", "name"), [FILES[0], FILES[-1]], ids=lambda value: value)
def test_a_file_is_the_same_run_as_its_values_as_overrides(group: str, name: str) -> None:
    overlay = find_overlay(group, name)
    words = [f"method={overlay.method}", f"data={overlay.data}"]
    words += [f"{key}={value!r}" for key, value in overlay.values.items()]
    assert compose_config([f"{group}={name}"]) == compose_config(words)


def test_a_file_outside_conf_is_composed_alike_and_the_user_s_words_win(tmp_path: Path) -> None:
    path = tmp_path / "with a space, ümlaut = $x$.yaml"
    shutil.copy(CONF / "tuned" / "moon_on_pacs.yaml", path)
    more = ["seed=3", "model=small", "method.mu=0.25"]
    found = compose_config([quoted_override("tuned", path), *more])
    assert found == compose_config(["tuned=moon_on_pacs", *more])
    assert (found["seed"], found["method"]["mu"]) == (3, 0.25)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for mu in ("0.5", "0.75"):
        path.write_text(FILE.replace("0.5", mu))
        assert load_settings([f"tuned={path}"]).method.mu == float(mu)


def test_an_overlay_is_over_an_experiment() -> None:
    settings = load_settings(["experiment=fpl_office", "tuned=fpl_on_office_caltech"])
    values = find_overlay("tuned", "fpl_on_office_caltech").values
    assert settings.train.learning_rate == values["train.learning_rate"]
    assert settings.train.rounds == 100, "which the experiment says"


def test_a_new_run_that_begins_from_another_s_configuration_takes_the_values() -> None:
    """``goldfinch resume DIR output=ANOTHER tuned=...``."""
    recorded = dict(load_settings(["method=fpl", "data=glyphs", "train.rounds=7"]).raw)
    assert changed_config(recorded, ["tuned=none"]) == changed_config(recorded, [])
    changed = changed_config(recorded, ["tuned=fpl_on_glyphs"])
    values = find_overlay("tuned", "fpl_on_glyphs").values
    assert {key: value for key, value in flat(changed).items() if key in values} == values
    assert changed["train"]["rounds"] == 7
    with pytest.raises(ConfigError, match="was found for method=moon, not fpl"):
        changed_config(recorded, ["tuned=moon_on_glyphs"])


# ---- what is refused -------------------------------------------------------------------------------------------------


REFUSED = {
    "method": (FILE, ["method=moon"], "was found for method=fedprox, not moon"),
    "data": (FILE, ["data=digits"], "was found for data=glyphs, not digits"),
    "a truth": (FILE.replace("0.5", "true"), [], "method.mu=True must be a number"),
    "no overlay": (FILE.replace("# @package _global_", "# values"), [], "its first line must be"),
    "other defaults": (FILE.replace("/data", "/model"), [], "its defaults must choose method and data"),
    "no method": (FILE.replace("fedprox", "fedproxy"), [], "fedproxy is not one of Goldfinch's own methods"),
    "list": ("- 1", [], "goldfinch compare writes one"),
    "no yaml": ("{", [], "goldfinch compare writes one"),
    "aliases": (FILE + "a: &a [x]\nb: [*a, *a]\n", [], "refers to parts of itself"),
    "deep": ("[" * 20_000, [], "goldfinch compare writes one"),
    "no defaults": ("# @package _global_\ndefaults: 3\n", [], "goldfinch compare writes one"),
    "no setting": (FILE.replace("method:\n  mu", "method:\n  my"), [], "method.my: no such key"),
    "no group": (FILE.replace("train:\n", "trian:\n"), [], "trian: no such key; did you mean 'train'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    text, words, message = REFUSED[case]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings([f"tuned={path}", *words])
    with pytest.raises(ConfigError, match=r"tuned=moon_on_nothing: no such file"):
        compose_config(["tuned=moon_on_nothing"])


def test_a_key_that_only_an_experiment_of_one_s_own_has_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    """It would be left out of the run without a word."""
    monkeypatch.setattr("common.composition.FOLDERS", [CONF, tmp_path])
    monkeypatch.setattr("common.choices.FOLDERS", [CONF, tmp_path])
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrian:\n  rounds: 3\n")
    with pytest.raises(ConfigError, match="trian: no such key; did you mean 'train'"):
        compose_config(["experiment=mine"])


# ---- what papers print -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_printed_values_are_those_of_the_data_set(tmp_path: Path) -> None:
    def weights(*words: str) -> tuple[float, float]:
        method = load_settings(["method=fedplcc", "protocol=fedplcc", "data=office_caltech", *words]).method
        return method.contrast, method.correction

    assert weights("printed=true") == (20, 200)
    assert weights("printed=true", "data=domainnet") == (1, 10)
    assert weights("printed=false") == (100, 1000)
    assert weights("printed=true", "method.contrast=3") == (3, 200), "the user wins"
    assert weights("experiment=fedplcc_office", "printed=true") == (20, 200), "also where an experiment chooses"
    jobs, _ = sweep.plan(["method=fpl,fedplcc", "data=office_caltech", "printed=true,false"], tmp_path)
    assert [job.settings.method.contrast for job in jobs] == [1, 1, 20, 100]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=fedapc", "data=digits", "printed=true"], "no settings for method=fedapc data=digits"),
        (["method=fedplcc", "data=glyphs", "printed=true"], "no settings for method=fedplcc data=glyphs"),
        (["printed=maybe"], "printed=maybe: true takes"),
        (["printed=true", "tuned=fpl_on_digits"], "leave one out"),
    ],
    ids=["no paper", "no paper's data", "neither true nor false", "tuned too"],
)
def test_printed_values_that_are_not_on_file_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(words)


ROW_OF_DEFAULTS = ("fccl_plus", "digits")
"""FedPLCC does not say how its row of FCCL+ was made; ours on Digit-5 has the default public batch."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "data"), [each for each in PRINTED if each != ROW_OF_DEFAULTS], ids=lambda value: value
)
def test_the_published_tables_are_made_with_the_printed_values(method: str, data: str) -> None:
    """A data set's printed values and the rows of the table that they are from cannot say different things."""
    printed = printed_values(method, data)
    assert printed is not None
    paper = re.split(r"'s|,", printed.source)[0].lower()
    table = TABLES[paper, data]
    rows = [row for row in published_table(table).listed if f"method={method}" in row.overrides]
    assert len(rows) == 1
    found = flat({"method": compose_config([f"experiment={table}", *rows[0].overrides])["method"]})
    assert {key: found[key] for key in printed.values} == printed.values


@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_file_calls_its_first_values_printed_only_if_they_are(name: str) -> None:
    """The files in conf/tuned/ were found by searches that began with the defaults of conf/method/."""
    method, _, data = name.partition("_on_")
    printed = printed_values(method, data)
    defaults = flat({"method": compose_config([f"method={method}", f"data={data}"])["method"]})
    same = printed is not None and all(defaults[key] == value for key, value in printed.values.items())
    assert f"with the {'printed' if same else 'default'} values" in find_overlay("tuned", name).source
