"""Values that a search found (``tuned=``) and that papers print (``printed=true``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.choices import CONF
from common.config import compose_config, printed_values, with_tuned
from common.errors import ConfigError
from common.run_config import flat
from common.settings import load_settings
from server.commands import sweep
from server.reproduction.published import published_table

PRINTED = [
    (path.stem, str(data))
    for path in sorted((CONF / "printed").glob("*.yaml"))
    for data in OmegaConf.to_container(OmegaConf.load(path))
]
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

FILE = "method: fedprox\ndata: glyphs\nfound: by hand\nvalues: {method.mu: 0.5, train.learning_rate: 0.02}\n"


def test_the_values_of_a_tuned_file_are_sent_to_subprocesses_as_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    overrides = with_tuned([f"tuned={path}", "seed=3"])
    assert overrides == ["method.mu=0.5", "train.learning_rate=0.02", "data=glyphs", "method=fedprox", "seed=3"]
    assert with_tuned(overrides) == overrides
    assert with_tuned(["tuned=none", "seed=3"]) == ["seed=3"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (FILE, ["method=moon"], "was found for method=fedprox, not moon"),
        (FILE, ["data=digits"], "was found for data=glyphs, not digits"),
        (FILE.replace("0.5", "often"), [], "values"),
        (FILE.replace("found", "lost"), [], "lost: no such key"),
        ("- 1", [], "not what goldfinch compare writes"),
        ("{", [], "not what goldfinch compare writes"),
        (FILE.replace("method.mu", "method.my"), [], "method.my: no such key"),
    ],
    ids=["method", "data", "no number", "unknown key", "list", "no yaml", "no setting"],
)
def test_a_tuned_file_that_does_not_fit_is_refused(text: str, words: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose_config([f"tuned={path}", *words])


def test_a_tuned_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tuned=moon_on_nothing: no such file"):
        compose_config(["tuned=moon_on_nothing"])


# ---- what papers print -----------------------------------------------------------------------------------------------


def weights(words: list[str]) -> tuple[float, float]:
    method = load_settings(words).method
    return method.contrast, method.correction


def test_printed_values_are_those_of_the_data_set(tmp_path: Path) -> None:
    words = ["method=fedplcc", "protocol=fedplcc"]
    assert weights([*words, "data=digits", "printed=true"]) == (100, 1000)
    assert weights([*words, "data=office_caltech", "printed=true"]) == (20, 200)
    assert weights([*words, "data=domainnet", "printed=true"]) == (1, 10)
    assert weights([*words, "data=office_caltech", "printed=false"]) == (100, 1000)
    assert weights([*words, "data=office_caltech", "printed=true", "method.contrast=3"]) == (3, 200), "the user wins"
    assert weights(["experiment=fedplcc_office", "printed=true"]) == (20, 200), "also where an experiment chooses"
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


@pytest.mark.parametrize("path", sorted((CONF / "tuned").glob("*_on_*.yaml")), ids=lambda path: path.stem)
def test_a_tuned_file_calls_its_first_values_printed_only_if_they_are(path: Path) -> None:
    """The files in conf/tuned/ were found by searches that began with the defaults of conf/method/."""
    method, _, data = path.stem.partition("_on_")
    printed = printed_values(method, data)
    defaults = flat({"method": compose_config([f"method={method}", f"data={data}"])["method"]})
    same = printed is not None and all(defaults[key] == value for key, value in printed.values.items())
    words = " ".join(path.read_text().split())
    assert f"with the {'printed' if same else 'default'} values" in words
