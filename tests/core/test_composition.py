"""How overrides become a configuration: read once, composed at most twice, with the defaults of all classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from common import composition
from common.choices import search
from common.composition import Composition, changed_config, compose_config
from common.config import build, checked, with_defaults
from common.errors import ConfigError
from common.overrides import parse_overrides
from common.settings import load_settings
from goldfinch.cli import main
from goldfinch.explanation import explain


@checked
class Inner:
    low: float = 0.0
    high: float = 1.0


@checked
class Outer:
    inner: Inner = field(default_factory=lambda: Inner(high=3.0))
    counts: dict[str, int] = field(default_factory=lambda: {"a": 1})
    names: tuple[str, ...] = ("x", "y")
    place: Path | None = None
    fixed: int = field(default=7, init=False)
    opaque: Any = field(default_factory=object)


def test_defaults_of_a_class_fill_in_what_is_not_given() -> None:
    expected = {"inner": {"low": 0.0, "high": 3.0}, "counts": {"a": 1}, "names": ["x", "y"], "place": None}
    assert with_defaults({}, "outer", Outer) == expected
    given = {"inner": {"low": 2.0}, "counts": {"b": 2}, "unknown": 1}
    assert with_defaults(given, "outer", Outer) == {
        **expected,
        "inner": {"low": 2.0, "high": 3.0},
        "counts": {"b": 2},
        "unknown": 1,
    }


def test_an_object_that_is_a_default_keeps_what_is_not_given() -> None:
    assert build({"inner": {"low": 2.0}}, "outer", Outer).inner == Inner(low=2.0, high=3.0)
    with pytest.raises(ConfigError, match=r"outer\.inner.*lwo"):
        build({"inner": {"lwo": 2.0}}, "outer", Outer)


def test_settings_of_a_class_of_the_user_s_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from common.config import checked\nfrom strategies.core.method import Averaging\n@checked\n"
        'class Tail(Averaging):\n    """A margin.\n\n    Args:\n        margin: the margin.\n    """\n'
        "    margin: float = 0.25\n"
    )
    (tmp_path / "own_tail.py").write_text(source)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "tail.yaml").write_text("_target_: own_tail.Tail\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    search(tmp_path / "conf")
    found = {setting.key: setting.default for setting in explain("tail").settings}
    assert found["method.margin"] == "0.25"


def test_an_object_that_is_named_stays_as_it_is() -> None:
    named = {"_target_": "common.data.batches.Augmentation", "flip": True}
    assert with_defaults({"inner": named}, "outer", Outer)["inner"] == named


@pytest.mark.parametrize("words", [["method=fpl"], ["method=fpl", "data=digits", "printed=true"]], ids=" ".join)
def test_a_run_is_composed_at_most_twice(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[Sequence[str]] = []
    of_hydra = composition.compose

    def compose(name: str, lines: Sequence[str], **more: Any) -> Any:
        composed.append(lines)
        return of_hydra(name, lines, **more)

    monkeypatch.setattr("common.composition.compose", compose)
    composition._composed.cache_clear()
    recorded = compose_config(words)
    assert len(composed) == 1 + ("printed=true" in words)
    changed_config(recorded, ["train.rounds=3"])
    assert len(composed) <= 3


def test_a_command_reads_an_override_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []
    of_hydra = OverridesParser.parse_overrides

    def parse(self: OverridesParser, overrides: list[str]) -> Any:
        read.extend(overrides)
        return of_hydra(self, overrides)

    monkeypatch.setattr(OverridesParser, "parse_overrides", parse)
    words = ["method=fedprox", "train.rounds=3", "method.mu=0.5", f"output={tmp_path}", "protocol.samples=24"]
    assert main(["run", *words, "--dry-run"]) == 0
    assert "mu: 0.5" in capsys.readouterr().out
    for word in words[1:]:  # Hydra itself reads those that choose an option
        assert read.count(word) == 1, word


def test_what_was_read_is_passed_on() -> None:
    words = parse_overrides(["method=fedprox", "method.mu=0.5", "data.domains=[a,b]", "seed=1,2"])
    assert [item.key for item in words] == ["method", "method.mu", "data.domains", "seed"]
    assert [item.value for item in words] == ["fedprox", 0.5, ["a", "b"], None]
    assert (words[3].several, words[3].values) == (True, ("1", "2"))
    assert parse_overrides([*words[:2], "seed=3"])[:2] == words[:2]
    assert compose_config(words[:2]) == compose_config(["method=fedprox", "method.mu=0.5"])
    with pytest.raises(ConfigError, match="use sweep"):
        Composition(words)


def test_a_value_is_known_before_classes_are_imported() -> None:
    made = Composition(["engine=ray", "engine.address=auto", "seed=4"])
    assert made.value("engine.name") == "ray"
    assert (made.value("engine.address"), made.value("seed"), made.value("resume")) == ("auto", 4, False)
    assert Composition([]).value("engine.address") is None


def test_a_file_of_one_s_own_for_a_class_of_goldfinch_s_has_its_defaults_too(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "sharp.yaml").write_text("_target_: strategies.fpl.FPL\ntemperature: 0.05\n")
    search(tmp_path)
    method = compose_config(["method=sharp"])["method"]
    assert method == {**compose_config(["method=fpl"])["method"], "temperature": 0.05}
    with pytest.raises(ConfigError, match=r"method\.contrats: no such key in method; did you mean 'contrast'"):
        compose_config(["method=sharp", "method.contrats=2"])


def test_an_experiment_s_values_are_not_overridden(tmp_path: Path) -> None:
    assert load_settings(["experiment=feddg_ga_pacs"]).protocol.validation == 0.1
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    search(tmp_path)
    assert compose_config(["experiment=mine"])["seed"] == 3
    assert compose_config(["experiment=mine", "seed=5"])["seed"] == 5


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("+method=fpl", r"^\+method=fpl: keys cannot be added or removed; set an existing key with key=value$"),
        ("~method", "^~method: keys cannot be added or removed"),
        ("output=a=b", r"""^output=a=b cannot be read: .*, as in 'output="a=b"'$"""),
        ("method=[fpl", r"^method=\[fpl cannot be read: close each bracket"),
    ],
)
def test_an_override_that_hydra_refuses_is_told_in_our_words(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose_config(["seed=1", word])


def test_the_quotes_that_are_advised_can_be_read() -> None:
    assert compose_config(['output="a=b"'])["output"] == "a=b"
