"""Names that come from a stranger's files never become paths out of the folder that they belong in."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import run
from support.toy import toy_settings

from common.client_state import client_stores
from common.data.names import RESERVED, check_names
from common.errors import CheckpointError, ConfigError
from common.storage import check_run_id, folder_name
from goldfinch.commands.evaluate import TOGETHER
from goldfinch.results.frames import FACTS, summary_columns
from server.engines.inline import InlineEngine
from server.run.checkpoint import Checkpoints
from server.run.conduct import prepare_output, run_federation

STRANGE = {
    "parent": "..",
    "path upwards": "../../victim",
    "absolute path": "/etc",
    "empty": "",
    "here": ".",
    "backslash": "a\\b",
    "null byte": "a\0b",
    "too long": "x" * 300,
}


@pytest.mark.parametrize("name", STRANGE.values(), ids=STRANGE)
def test_no_strange_name_is_a_run_or_a_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run's id"):
        check_run_id(name)
    with pytest.raises(ConfigError, match="cannot name a folder"):
        folder_name(name)
    with pytest.raises(ConfigError, match="cannot name a folder"):
        client_stores(tmp_path, name, 1)
    with pytest.raises(ConfigError, match="cannot name a folder"):
        client_stores(tmp_path, "bright-0", 1)(name)


@pytest.mark.parametrize("value", [None, 7, ["run"]], ids=["none", "number", "list"])
def test_a_run_s_id_is_a_text(value: object) -> None:
    with pytest.raises(ValueError, match="run's id"):
        check_run_id(value)


@pytest.mark.parametrize("name", ["glyphs-0", "Zürich Nord-3", "signs.v2-0", "a'b-1"])
def test_ordinary_names_are_kept(name: str) -> None:
    assert folder_name(name) == name


@pytest.mark.parametrize("name", ["../victim", ""], ids=["other run", "empty"])
def test_a_checkpoint_with_a_path_as_run_is_not_resumed(name: str, tmp_path: Path) -> None:
    """Resuming wrote and deleted clients' states in folders outside the run's own."""
    folder = tmp_path / "stranger"
    settings = toy_settings("fedbn", folder, train={"rounds": 1})
    run(settings)
    victim = folder / "clients" / ".." / "victim" / "dark-0"
    victim.mkdir(parents=True)
    (victim / "state-00000001.safetensors").write_bytes(b"kept")
    checkpoints = Checkpoints(folder / "checkpoint")
    good = checkpoints.load()
    assert good is not None
    checkpoints.replace(dataclasses.replace(good, run=name))
    longer = toy_settings("fedbn", folder, train={"rounds": 2}, resume=True)
    with pytest.raises(CheckpointError, match="run's id"):
        prepare_output(longer)
    with pytest.raises(CheckpointError, match="run's id"):
        run_federation(longer, InlineEngine(longer))
    assert [path.read_bytes() for path in victim.iterdir()] == [b"kept"]


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("domain", "red\x1b[31m", "cannot be printed"),
        ("domain", "a\u202eb", "cannot be printed"),
        ("class", "=1+1", "formula"),
        *[("domain", name, "column of tables") for name in ("average", "worst", "validation", "unseen", TOGETHER)],
        *[("domain", fact.name, "column of tables") for fact in FACTS],
    ],
    ids=[
        "colour",
        "order",
        "formula",
        "average",
        "worst",
        "validation",
        "unseen",
        TOGETHER,
        *[fact.name for fact in FACTS],
    ],
)
def test_names_that_cannot_be_shown_are_refused_before_a_run(kind: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*rename|rename.*{reason}") as found:
        check_names(kind, ["photo", name])
    assert str(found.value).isprintable()
    check_names("class", ["average", "photo", "naïve café"])


def test_no_domain_is_called_as_a_column_of_the_tables() -> None:
    scores = {"final": {"average": 50.0, "unseen_average": 50.0, "validation": 50.0}}
    rows: Any = [SimpleNamespace(runs=[SimpleNamespace(rules=scores)])]
    columns = [column.removesuffix("_average") for column in summary_columns(rows)]
    columns += [fact.name for fact in FACTS]
    assert sorted([*columns, TOGETHER]) == sorted(RESERVED)
