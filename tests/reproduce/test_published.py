"""The papers' numbers, the rows that make them again, and the experiments they belong to."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import pytest

from common.choices import CONF
from common.composition import compose_config
from common.errors import ConfigError
from common.run_config import flat
from common.settings import RunSettings, load_settings
from goldfinch.reproduction.published import Scale, method_of, published_table, published_tables
from strategies.parts.server_nets import NetTraining

TABLES = published_tables()
SCALES: tuple[Scale, ...] = ("paper", "small")
NO_PAPER = ("demo", "different_networks", "recommended")
"""Experiments that repeat no published table."""


@cache
def loaded(*overrides: str) -> RunSettings:
    """Settings, composed once."""
    return load_settings(list(overrides))


def test_every_experiment_has_a_table_and_every_table_an_experiment() -> None:
    assert set(TABLES) == {path.stem for path in (CONF / "experiment").glob("*.yaml")} - set(NO_PAPER)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_printed_averages_are_those_of_the_cells_or_marked_as_misprints(name: str) -> None:
    table = TABLES[name]
    unit = 10.0**-table.decimals
    for row in table.listed:
        known = [cell for cell in row.cells if cell is not None]
        if len(known) < len(row.cells) or not known or row.average is None:
            continue
        wrong = abs(sum(known) / len(known) - row.average) > unit + 1e-9  # printed truncated or from unrounded cells
        assert wrong == bool(row.misprint), f"{row.label}: {sum(known) / len(known)} or {row.average}"
        if row.misprint:
            assert f"{sum(known) / len(known):.2f}" in row.misprint


def test_rows_that_papers_print_twice_have_the_same_numbers() -> None:
    def cells(table: str, label: str) -> tuple[float | None, ...]:
        return next(row.cells for row in TABLES[table].rows if row.label == label)

    for data in ("office", "digits"):
        assert cells(f"fpl_{data}", "FedProto") == cells(f"fpl_{data}_targets", "global mean (G)")
        assert cells(f"fpl_{data}", "FedAvg") == cells(f"fpl_{data}_losses", "neither")
        assert cells(f"fpl_{data}", "FPL") == cells(f"fpl_{data}_losses", "CPCL + UPCR")
        assert cells(f"fpl_{data}_losses", "UPCR") == cells(f"fpl_{data}_targets", "unbiased mean (U)")
    for data in ("digits", "pacs"):
        assert cells(f"fedgca_{data}", "FedDyn") == cells(f"fedgca_{data}_losses", "none, no RC")
        assert cells(f"fedgca_{data}", "FedDyn+RC") == cells(f"fedgca_{data}_losses", "none")
        assert cells(f"fedgca_{data}", "FedGCA") == cells(f"fedgca_{data}_losses", "all")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TABLES))
def test_rows_name_methods_and_settings_that_exist(name: str) -> None:
    for row in TABLES[name].rows:
        path = CONF / "method" / f"{method_of(row)}.yaml"
        assert path.is_file(), f"{row.label} needs {path.name}"
        method = compose_config([f"method={method_of(row)}"])["method"]
        for override in row.overrides:
            key, _, value = override.partition("=")
            group, _, inner = key.partition(".")
            if group == "method" and inner:
                assert inner in flat(method), f"{row.label}: {override}"
            if key == "views":
                assert (CONF / "views" / f"{value}.yaml").is_file()


@pytest.mark.long
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_own_row_of_every_table_composes_to_checked_settings(name: str, scale: Scale) -> None:
    table = TABLES[name]
    row = next((row for row in table.rows if row.label == table.own), table.rows[-1])
    settings = loaded(*table.overrides(row, scale))
    scored = set(settings.protocol.test_domains(settings.data))
    assert scored == {table.stand_in(domain, scale) for domain in table.domains}
    assert settings.choices["method"] == method_of(row)
    assert (settings.choices["model"] == "small") == (scale == "small")
    assert scale == "small" or "computer_fonts" not in scored
    assert settings.rounds.outliers == "off", "no guard of ours changes a paper's updates"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "clients", "rounds", "epochs", "batch", "momentum"),
    [
        ("fpl_office", 10, 100, 10, 64, 0.9),
        ("fpl_digits", 20, 100, 10, 64, 0.9),
        ("fedapc_office", 8, 100, 10, 32, 0.9),
        ("fedapc_digits", 8, 100, 10, 32, 0.9),
        ("feddap_office", 10, 100, 10, 32, 0.9),
        ("feddap_domainnet", 20, 100, 10, 32, 0.9),
        ("fdse_office", 4, 500, 1, 50, 0.0),
        ("fdse_pacs", 4, 500, 5, 50, 0.0),
        ("fedplcc_office", 4, 100, 10, 64, 0.9),
        ("fedplcc_digit5", 5, 50, 10, 64, 0.9),
        ("fedplcc_domainnet", 6, 50, 10, 64, 0.9),
        ("fedgca_digits", 10, 100, 5, 32, 0.9),
        ("fedgca_pacs", 10, 50, 5, 32, 0.9),
        ("fedheal_office", 20, 200, 10, 16, 0.9),
        ("fedheal_digits", 20, 200, 10, 64, 0.9),
        ("feddg_ga_pacs", 3, 40, 5, 16, 0.9),
        ("i2pfl_office", 10, 100, 10, 32, 0.9),
        ("i2pfl_pacs", 10, 100, 10, 16, 0.9),
        ("fedpall_office", 4, 100, 10, 32, 0.0),
        ("fedpall_digits", 5, 100, 5, 64, 0.0),
        ("fedpall_pacs", 4, 100, 10, 32, 0.0),
    ],
)
def test_the_papers_settings(name: str, clients: int, rounds: int, epochs: int, batch: int, momentum: float) -> None:
    settings = loaded(f"experiment={name}", "method=fedavg")  # any method goes with an experiment
    train = settings.train
    assert len(settings.protocol.clients(settings.data)) == clients
    assert (train.rounds, train.epochs, train.batch_size, train.momentum) == (rounds, epochs, batch, momentum)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_stand_ins_are_in_every_small_setting_that_lacks_the_published_set(name: str) -> None:
    table = TABLES[name]
    absent = {"syn", "synth_digits"} & set(table.domains)
    assert set(table.small.stand_ins) == absent
    assert not absent or any("not S" in says for says in table.small.says)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_number_that_the_small_scale_sets_is_said(name: str) -> None:
    """But how often is scored, which changes no score that a table shows."""
    small = TABLES[name].small
    said = " ".join(small.says).replace(",", "")
    for override in small.overrides:
        key, _, value = override.partition("=")
        if re.fullmatch(r"[\d.]+", value) and key != "rounds.evaluate_every":
            share = f"{100 * float(value):g} %"
            numbers = "|".join(re.escape(number) for number in (value, share))
            assert re.search(rf"(?<![\d.])({numbers})(?!\.?\d)", said), override


@pytest.mark.parametrize(
    ("name", "rows", "rounds"),
    [
        ("fpl_office", ["FedAvg", "FPL"], 30),
        ("fedapc_office", ["FedAvg", "FedAPC"], 30),
        ("fedplcc_office", ["FedAvg", "FPL", "FedPLCC"], 20),
    ],
)
def test_paper_net_is_the_paper_s_setting_in_fewer_rounds(name: str, rows: list[str], rounds: int) -> None:
    table = TABLES[name]
    chosen = table.rows_at("paper_net")
    assert [row.label for row in chosen] == rows
    for row in chosen:
        ours, papers = loaded(*table.overrides(row, "paper_net")), loaded(*table.overrides(row, "paper"))
        assert ours.train == dataclasses.replace(papers.train, rounds=rounds)
        for part in ("model", "data", "protocol", "method"):
            assert getattr(ours, part) == getattr(papers, part)
    assert table.reduction("paper_net").seeds == (0,)  # type: ignore[union-attr]  # the table has it


def test_rows_are_chosen_by_label_or_method_and_mistakes_name_the_nearest() -> None:
    table = TABLES["fedgca_digits"]
    assert [row.label for row in table.select(["FedAVG+RC", "fedgca"])] == ["FedAVG+RC", "FedGCA"]
    assert [row.label for row in table.select(["fedavg"])] == ["FedAVG", "FedAVG+RC"]
    assert [row.label for row in table.select(["FedAVG"])] == ["FedAVG"], "a label is one row, a method all its rows"
    readings = TABLES["fedapc_office_readings"]
    assert [row.label for row in readings.select(["FedAPC views"])] == ["FedAPC, views"], "a comma separates rows"
    with pytest.raises(ConfigError, match="did you mean 'fedsam'"):
        table.select(["fedsan"])
    with pytest.raises(ConfigError, match="did you mean 'fpl_office'"):
        published_table("fpl_ofice")
    with pytest.raises(ConfigError, match=r"fedgca_digits has no --scale paper_net; .*fpl_office"):
        table.rows_at("paper_net")


def test_a_row_of_the_released_code_s_variant_is_in_the_table_with_the_method_s_own() -> None:
    """FPL's FedDyn row is FedAvg in all but name; the method itself has no published cells to be compared with."""
    for name in ("fpl_office", "fpl_digits"):
        rows = {row.label: row for row in TABLES[name].rows}
        released = loaded(*TABLES[name].overrides(rows["FedDyn as released"], "paper")).method
        assert type(released).fedavg_at == {"alpha": released.alpha, "weighting": released.weighting}
        assert rows["FedDyn as released"].average
        assert rows["FedDyn"].expected_average is None
        assert [row.label for row in TABLES[name].select(["feddyn"])] == ["FedDyn as released", "FedDyn"]


def feddyn_rows(*names: str) -> list[tuple[str, str]]:
    return [(name, row.label) for name in names for row in TABLES[name].rows if method_of(row) == "feddyn"]


MADE_WITH = [
    *((name, label, {"alpha": 0.1}) for name, label in feddyn_rows("fedgca_digits", "fedgca_digits_losses")),
    *((name, label, {"alpha": 10.0}) for name, label in feddyn_rows("fedgca_pacs", "fedgca_pacs_losses")),
    ("fedgca_digits", "FedGCA", {"alpha": 0.1, "beta": 0.1}),
    ("fedgca_pacs", "FedGCA", {"alpha": 10.0, "beta": 8.0}),
    ("fedgca_digits_other_reading", "FedGCA", {"alpha": 0.1, "beta": 10.0}),
    ("fedgca_pacs_other_reading", "FedGCA", {"alpha": 0.1, "beta": 8.0}),
    *(("fedgca_pacs", label, {"fidelity": "released_pacs"}) for label in ("FedADG", "FedADG+RC")),
    ("fpl_office", "FPL", {"temperature": 0.02, "contrast": 1.0, "consistency": 1.0}),
    ("fpl_office", "FedProto", {"consistency": 1.0}),
    ("fpl_office", "FedProx", {"mu": 0.01, "scale": 0.01}),
    *(
        (name, "FedOPT", {"start": "mean", "server_learning_rate": 0.5, "momentum": 0.9})
        for name in ("fpl_office", "fpl_digits")
    ),
    *((name, "MOON", {"frozen_mode": "train", "mu": 5.0}) for name in ("fpl_office", "fpl_digits")),
    *(
        (name, "FedProc", {"schedule": "rethinkfl", "prototype_mode": "last_epoch_running", "keep_missing": False})
        for name in ("fpl_office", "fpl_digits")
    ),
    *((f"fedpall_{data}", "FedBN", {"layers": "name"}) for data in ("office", "digits", "pacs")),
    *((f"fedplcc_{data}", "FedPLVM", {"weighting": "uniform"}) for data in ("office", "digit5", "domainnet")),
    ("fedplcc_digit5", "FedPLVM", {"contrast": 100.0, "correction": 100.0}),
    ("fedplcc_digit5", "FedPLCC", {"contrast": 100.0, "correction": 1000.0}),
    ("fedplcc_office", "FedPLCC", {"contrast": 20.0, "correction": 200.0}),
    ("fedplcc_office", "FedPLCC", {"fraction": 0.5}),
    ("fedapc_office", "FedAPC", {"reading": "prototypes", "prototype_views": 2}),
    ("fedpall_office", "FedPall", {"contrast": 0.1, "divergence": 0.1}),
    ("fedpall_office", "FedPall", {"server_training": NetTraining(3, 0.01, momentum=0.9, weight_decay=1e-5)}),
    ("fedpall_office", "RUCR", {"contrast": 0.1, "temperature": 1.0}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "label", "options"), MADE_WITH, ids=lambda value: str(value).replace("'", ""))
def test_rows_are_made_with_the_options_of_their_papers(name: str, label: str, options: dict[str, object]) -> None:
    (row,) = [row for row in TABLES[name].rows if row.label == label]
    method = loaded(*TABLES[name].overrides(row, "paper")).method
    assert {option: getattr(method, option) for option in options} == options


ABLATIONS = {"fpl_office_targets", "fpl_digits_targets"}
"""Tables whose own row is the method without one of its parts."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(TABLES) - ABLATIONS))
def test_a_header_says_which_values_of_the_method_its_experiment_alone_does_not_set(name: str) -> None:
    table = TABLES[name]
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    commands = " ".join(line for line in text.splitlines() if line.startswith("# goldfinch run"))
    for row in table.rows:
        if row.label != table.own or method_of(row) == "fedavg":
            continue
        experiment, whole = loaded(f"experiment={name}").method, loaded(f"experiment={name}", *row.overrides).method
        alone = " ".join(text.replace("\n#", " ").split())
        assert (f"not by experiment={name} alone" in alone) == (experiment != whole)
        if experiment == whole:
            continue
        for override in row.overrides:
            assert override in commands or override.startswith("method="), override


READ_WITH = [
    ("fedgca", "alpha/beta", ("alpha", "beta"), {"digits": "Digits", "pacs": "PACS"}),
    (
        "fedplcc",
        "lambda_1/lambda_2",
        ("contrast", "correction"),
        {"digits": "Digit-5", "office_caltech": "Office-10", "domainnet": "DomainNet"},
    ),
]


@pytest.mark.parametrize(("method", "about", "fields", "sets"), READ_WITH, ids=["fedgca", "fedplcc"])
def test_readings_tell_the_values_of_a_plain_run_and_of_printed_true(
    method: str, about: str, fields: tuple[str, str], sets: dict[str, str]
) -> None:
    def values(*more: str) -> str:
        chosen = loaded(f"method={method}", *more).method
        return "/".join(f"{getattr(chosen, field):g}" for field in fields)

    readings = {reading.about: reading for reading in loaded(f"method={method}").method.readings}
    printed = ", ".join(f"{values(f'data={data}', 'printed=true')} on {shown}" for data, shown in sets.items())
    assert str(readings[about].paper).startswith(printed)
    assert readings[about].ours == f"{values()}; the paper's if printed=true"


def test_readings_of_views_and_epochs_are_those_of_a_plain_run() -> None:
    def ours(method: str, about: str) -> str:
        return next(reading.ours for reading in loaded(f"method={method}").method.readings if reading.about == about)

    views = ours("fedgca", "repetitions with the same parameters")
    assert loaded("method=fedgca").views.count == 1
    assert views.startswith("one view besides the image")
    assert loaded("experiment=fedgca_digits").views.count == 2
    assert "views=randconv_two, the experiments': two" in views
    plain, experiment = loaded("method=fedplcc").train.epochs, loaded("experiment=fedplcc_office").train.epochs
    assert ours("fedplcc", "E = 10") == f"train.epochs={plain}; {experiment} in the experiments"


def test_no_smaller_scale_changes_a_method_or_its_views() -> None:
    for table in TABLES.values():
        assert [each for each in table.small.overrides if each.startswith(("method", "views"))] == []


@pytest.mark.parametrize("name", [name for name in sorted(TABLES) if name.startswith(("fedplcc", "fedgca_digits"))])
def test_papers_that_name_no_augmentation_train_on_images_as_they_are(name: str) -> None:
    augmentation = loaded(f"experiment={name}", "method=fedavg").data.augmentation
    assert (augmentation.crop_padding, augmentation.flip, augmentation.erasing) == (0, False, 0.0)


@pytest.mark.parametrize("name", [name for name in sorted(TABLES) if name.startswith("fedgca")])
def test_fedgca_has_two_views_besides_the_image_and_the_rows_without_views_none(name: str) -> None:
    without = [row for row in TABLES[name].rows if "views=none" in row.overrides]
    others = [row for row in TABLES[name].rows if row not in without]
    counts = {row.label: loaded(*TABLES[name].overrides(row, "paper")).views.count for row in (*without[:1], others[0])}
    assert counts == {**{row.label: 0 for row in without[:1]}, others[0].label: 2}


def test_a_sweep_has_one_row_for_each_point_and_its_published_averages() -> None:
    rows = TABLES["fedpall_office_sensitivity"].rows
    assert [row.label.rpartition(" ")[2] for row in rows[:4]] == ["0.1", "0.2", "0.5", "1"], "the figure's grid"
    assert len(rows) == 16
    assert {row.label: row.average for row in rows if row.average} == {
        "mu = 0.2, delta = 0.2": 69.12,
        "mu = 1, delta = 0.2": 68.62,
    }
    assert rows[1].overrides == ("method=fedpall", "method.divergence=0.1", "method.contrast=0.2")


def test_the_last_override_of_a_key_counts() -> None:
    table = TABLES["fpl_office"]
    found = table.overrides(table.rows[1], "small", ["train.rounds=2", "method.scale=1"])
    assert found.count("train.rounds=2") == 1
    assert "train.rounds=30" not in found
    assert "method.scale=0.01" not in found
    found = table.overrides(
        table.rows[1], "small", ["train.rounds=2", "train={epochs: 3}", "train.epochs=5", "train.rounds=4"]
    )
    assert [item for item in found if item.startswith("train")][-3:] == [
        "train={epochs: 3}", "train.epochs=5", "train.rounds=4"
    ]  # fmt: skip


def test_a_table_with_wrong_cells_or_a_repeated_row_is_refused() -> None:
    table = TABLES["fpl_office"]
    short = dataclasses.replace(table.rows[0], cells=(1.0, 2.0))
    with pytest.raises(ValueError, match="2 cells"):
        dataclasses.replace(table, listed=(short, *table.listed[1:]))
    with pytest.raises(ValueError, match="names a row twice"):
        dataclasses.replace(table, listed=(*table.listed, table.listed[0]))
    with pytest.raises(ValueError, match="is no row"):
        dataclasses.replace(table, own="FPLL")
