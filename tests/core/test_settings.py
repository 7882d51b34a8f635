"""What a user types: every mistake is named with the nearest right thing, and what changes the result is one run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import pytest
from support.toy import composed, method_at_defaults

from common import choices
from common.composition import changed_config, compose_config
from common.config import Count, build, check, checked
from common.errors import ConfigError
from common.overrides import split_overrides
from common.round_settings import RoundSettings, TrainSettings
from common.run_config import read_config, yaml_of
from common.settings import load_settings, settings_of, with_method
from strategies.fedprox import FedProx

MISTAKES = {
    "a method's name": (["method=fedpro"], "did you mean 'fedprox'"),
    "a group's name": (["methode=fpl"], "did you mean 'method'"),
    "a key": (["train.round=3"], "did you mean 'rounds'"),
    "a key of the method": (["method.temprature=1"], "did you mean 'temperature'"),
    "a key of another method": (["method=fedavg", "method.mu=1"], "method.mu: no such key"),
    "an added key": (["+train.speed=3"], "cannot be added"),
    "no equals sign": (["train.rounds"], "not of the form key=value"),
    "no value, by an unset variable of the shell": (["output="], "output= has no value, as if a variable"),
    "an empty name of the run's folder": (["output=''"], "output: must name a folder"),
    "an empty name of the data's folder": (["data=folder", "data.root=''"], "root: must name a folder"),
    "an empty name of a table's folder": (["data=table", "data.root=''"], "root: must name a folder"),
    "a word for a number": (["train.rounds=many"], "train.rounds='many': must be a valid integer"),
    "a fraction for a number": (["train.rounds=1.5"], "train.rounds=1.5: must be a valid integer"),
    "a word for true": (["resume=perhaps"], "resume: must be true, false or anyway; got 'perhaps'"),
    "a number for true": (["resume=1"], "resume: must be true, false or anyway; got 1"),
    "true for a number": (["train.rounds=true"], "train.rounds=True: must be a valid integer"),
    "a choice": (["train.optimizer=sdg"], "did you mean 'sgd'"),
    "zero rounds": (["train.rounds=0"], "train.rounds=0: must be greater than or equal to 1"),
    "negative rate": (["train.learning_rate=-1"], "train.learning_rate=-1: must be greater than 0"),
    "infinite rate": (["train.learning_rate=inf"], "finite"),
    "momentum of one": (["train.momentum=1"], "train.momentum=1: must be less than 1"),
    "another planet's device": (["train.device=tpu"], "device must be auto"),
    "a device that is no number": (["train.device='cuda:²'"], "device must be auto"),
    "more than all": (["rounds.quorum=1.1"], "rounds.quorum=1.1: must be less than or equal to 1"),
    "negative seed": (["seed=-1"], "^seed=-1: must be greater than or equal to 0"),
    "a long seed": (["seed=18446744073709551616"], "^seed=18446744073709551616: must be less than 9223372036854775808"),
    "a long seed of the split": (
        ["protocol.partition_seed=18446744073709551616"],
        "must be less than 92233720368547758",
    ),
    "a domain": (["data.domains=[printd]"], "did you mean 'printed'"),
    "a choice like no other": (["data=zzzzzz"], r"choices: .*glyphs.*office_caltech"),
    "no method": (["method=null"], "one must be chosen; choices: .*fpl"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    overrides, reason = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=reason):
        load_settings(overrides)


def test_overrides_are_split_as_a_shell_does() -> None:
    assert split_overrides("method=fpl data.root='/a b' x=\"y z\"") == ["method=fpl", "data.root=/a b", "x=y z"]
    assert split_overrides("") == []
    with pytest.raises(ConfigError, match="quote"):
        split_overrides("data.root='/a b")


def test_the_default_output_is_named_by_data_method_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(["method=fpl", "seed=3"]).output_folder == tmp_path / "outputs/glyphs/fpl/seed-3"
    assert load_settings(["output=here"]).output_folder == tmp_path / "here"
    assert load_settings([f"output={tmp_path}/there"]).output_folder == tmp_path / "there"


# ---- one run is one identity -----------------------------------------------------------------------------------------

SAME = [
    "engine=ray train.rounds=99 train.device=cpu train.capture=true output=elsewhere resume=true",
    "rounds.deadline=5 rounds.registration=9 rounds.failures=7 rounds.checkpoints=9 rounds.memory=0.1 overwrite=true",
    "engine.workers=2 rounds.last_rounds=3 rounds.evaluate_every=2 rounds.test_samples=9 data.root=/elsewhere",
]
"""What changes no result, several at a time."""
OTHER = [
    *("method.temperature=0.03", "method=fedavg", "seed=1", "train.learning_rate=0.02", "train.threads=2"),
    *("train.precision=bfloat16", "rounds.participation=0.5", "rounds.participation=0.5 rounds.oversample=1.3"),
    *("rounds.quorum=1", "protocol.samples=10", "data.domains=[printed,signs]", "data.augmentation.flip=true"),
    *("model.norm=group", "views=randconv", "aggregation=geometric_median", "rounds.outlier_factor=9"),
    *("rounds.outliers=clip", "rounds.transport=float16", "rounds.transport=bfloat16", "protocol.validation=0.1"),
    "protocol.validation=0.1 rounds.metric=macro_f1",
]


def test_a_run_is_known_by_what_changes_its_result() -> None:
    base = load_settings(["method=fpl"]).identity
    assert len(base) == 16
    assert int(base, 16) >= 0
    for words in SAME:
        assert load_settings(["method=fpl", *words.split()]).identity == base, words
    validated = load_settings(["method=fpl", "protocol.validation=0.1"]).identity
    more = ["train.patience=2", "rounds.test=false"]
    assert load_settings(["method=fpl", "protocol.validation=0.1", *more]).identity == validated
    found = {load_settings(["method=fpl", *words.split()]).identity for words in OTHER}
    assert len(found | {base}) == 1 + len(OTHER)


def test_another_method_object_is_another_run() -> None:
    settings = load_settings(["method=fedprox"])
    assert with_method(settings, FedProx()).identity == settings.identity
    assert with_method(settings, FedProx(mu=0.5)).identity != settings.identity
    assert with_method(settings, FedProx(mu=0.5)).method.mu == 0.5


@pytest.mark.parametrize("name", choices.choices_of("method"))
def test_the_record_of_a_method_object_makes_it_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = method_at_defaults(name)
    given = with_method(composed("method=fedavg", "views=randconv"), chosen)
    (tmp_path / "config.yaml").write_text(yaml_of(given.raw))
    monkeypatch.setattr(choices, "_OWN_NAMES", set())  # another process
    assert settings_of(read_config(tmp_path / "config.yaml")).method == chosen


# ---- values ----------------------------------------------------------------------------------------------------------


@checked
class Inner:
    share: float = 0.5


@checked
class Outer:
    count: Count
    name: str = "x"
    kind: Literal["a", "b", 3] = "a"
    maybe: int | None = None
    pair: tuple[float, ...] = ()
    table: dict[str, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    place: Path | None = None

    def __post_init__(self) -> None:
        check(self.maybe is None or self.maybe > self.count, f"maybe={self.maybe} is not above count={self.count}")


def test_a_node_becomes_a_checked_object() -> None:
    node = {"count": 2, "kind": 3, "pair": [1, 2.5], "table": {"a": 1}, "inner": {"share": 1}, "place": "/tmp"}
    found = build(node, "here", Outer)
    assert found == Outer(2, kind=3, pair=(1.0, 2.5), table={"a": 1.0}, inner=Inner(1.0), place=Path("/tmp"))
    assert isinstance(found.inner.share, float)


WRONG: list[tuple[Mapping[str, Any], str]] = [
    ({"count": 1, "cuont": 2}, r"here\.cuont: no such key; did you mean 'count'"),
    ({}, r"here\.count: a value is missing"),
    ({"count": 0, "name": 3}, r"here\.count=0: .*; here\.name=3: must be text"),
    ({"count": 2, "maybe": 1}, "here: maybe=1 is not above count=2"),
    ({"count": 1.0}, r"here\.count=1\.0: must be a valid integer"),
    ({"count": 1, "pair": [True]}, r"here\.pair\[0\]=True"),
    ({"count": 1, "kind": "c"}, r"here\.kind='c': choices: 3, a, b"),
    ({"count": 1, "kind": True}, r"here\.kind=True"),
    ({"count": 1, "maybe": 0.5}, r"here\.maybe=0\.5: must be a valid integer"),
    ({"count": 1, "pair": [1, "two"]}, r"here\.pair\[1\]='two': must be a valid number"),
    ({"count": 1, "inner": {"shrae": 1}}, r"here\.inner\.shrae: no such key; did you mean 'share'"),
    ({"count": 1, "inner": 3}, r"here\.inner=3: must be .*Inner"),
    ({"count": 1, "pair": [float("nan")]}, r"here\.pair\[0\]=nan: .*finite"),
]


@pytest.mark.parametrize(("node", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_a_wrong_node_is_named_with_its_place(node: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(node, "here", Outer)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (None, "must be written module.Class"),
        ("no.such.module", "cannot import"),
        ("pathlib.NoPath", "has no class NoPath"),
        ("os.system", "not a checked dataclass"),
        ("common.data.protocols.ClientSpec", "not a checked dataclass"),
    ],
)
def test_only_dataclasses_are_built(target: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_OWN_NAMES", {target})
    with pytest.raises(ConfigError, match=reason):
        build({"_target_": target}, "method")


@pytest.mark.parametrize("kind", [TrainSettings, RoundSettings])
def test_defaults_of_the_files_are_those_of_the_classes(kind: type) -> None:
    group = {TrainSettings: "train", RoundSettings: "rounds"}[kind]
    assert build(compose_config([])[group], group, kind) == kind()


UNEVEN = {"handwritten": 2, "printed": 3, "signs": 4, "sketch": 1}
"""``protocol.counts`` of ``protocol=glyphs_uneven``."""

RECORDED = [
    "method=fedprox",
    "method.mu=0.5",
    "train.learning_rate=0.02",
    "engine.wire=true",
    "protocol=glyphs_uneven",
    "protocol.counts.sketch=2",
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([], {}),
        (["train.rounds=20"], {"train.rounds": 20}),
        (["engine=ray", "engine.actors=2"], {"engine": {"name": "ray", "address": None, "actors": 2, "gpus": 0}}),
        (["engine=inline"], {}),
        (["protocol.counts={signs: 3}"], {"protocol.counts": {"signs": 3}}),
        (["protocol.counts.signs=3"], {"protocol.counts": {**UNEVEN, "sketch": 2, "signs": 3}}),
        (["method.mu=0.25", "data.augmentation.flip=true"], {"method.mu": 0.25, "data.augmentation.flip": True}),
        (["method=strategies.fedprox.FedProx"], {}),
        (["method=fedavg"], {"method": {"_target_": "strategies.fedavg.FedAvg", "weighting": "samples"}}),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_a_recorded_configuration_changes_in_what_is_overridden_alone(
    overrides: list[str], changes: dict[str, Any]
) -> None:
    recorded = load_settings(RECORDED).raw
    expected = deepcopy(dict(recorded))
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = expected
        for part in parents:
            node = node[part]
        node[last] = value
        if not parents:
            expected["choices"][key] = overrides[0].partition("=")[2]
    assert changed_config(recorded, overrides) == expected
    assert recorded == load_settings(RECORDED).raw
    with pytest.raises(ConfigError, match="momentun"):
        changed_config(recorded, ["train.momentun=0.5"])


def test_changing_a_composition_does_not_change_the_cached_one() -> None:
    compose_config(["method=moon"])["method"]["mu"] = "spoilt"
    assert compose_config(["method=moon", "method.mu=0.5"])["method"]["mu"] == 0.5
    assert compose_config(["method=moon"])["method"]["mu"] == 5.0


def test_a_dictionary_is_given_anew_and_other_settings_stay() -> None:
    counts = "{mnist: 3, usps: 3, mnist_m: 2}"
    config = compose_config(["data=digits", "protocol=fpl_digits", f"protocol.counts={counts}"])
    assert config["protocol"]["counts"] == {"mnist": 3, "usps": 3, "mnist_m": 2}
    assert config["protocol"]["fraction"] == 0.01


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data._target_=common.data.batches.Augmentation", "data=Augmentation.*must be .*DataSource"),
        ("protocol._target_=common.models.specs.Small", "protocol=Small.*must be .*Protocol"),
        ("model._target_=common.data.views.NoViews", "model=NoViews.*must be .*ModelSpec"),
        ("views._target_=common.models.specs.Small", "views=Small.*must be .*Views"),
        ("method._target_=strategies.core.robust.GeometricMedian", "method: must be a method .*; got GeometricMedian"),
        ("aggregation._target_=strategies.fedavg.FedAvg", "aggregation: must be a rule of averaging .*; got FedAvg"),
    ],
)
def test_an_object_of_another_group_is_refused_at_its_key(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_settings([override])


@pytest.mark.parametrize(
    "words",
    [
        ["tracker=mlflow", "tracker.tracking_uri='https://bob:s3cret@host/x'"],
        ["engine=ray", "engine.address='ray://bob:s3cret@host:1'"],
        ["data=folder", "data.root='sftp://bob:s3cret@host/x'"],
    ],
)
def test_no_setting_holds_a_password(words: list[str]) -> None:
    """``config.yaml`` has all settings, and so has what a device receives."""
    with pytest.raises(ConfigError, match="the address holds a password") as told:
        load_settings(words)
    assert "s3cret" not in str(told.value)
    load_settings([word.replace("bob:s3cret@", "bob@") for word in words if "data" not in word])
