"""``privacy.unit=group``: all images of a group are one change, for the split, the border, the noise and the report."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attacks import Attacker, write_noise
from support.runs import run
from test_device_decides import LISTED, MEANS, OWN_LIST, WAYS, listed
from test_sensitivity_audit import settings_of

from client.border import SCORED, Border, Images, trained_on
from client.device import Device
from client.reasons import REASONS
from common.accounting import epsilon
from common.client_state import ClientStore
from common.data.inspection import inspect_all
from common.data.protocols import LeaveOut, OneClientPerDomain, Skewed
from common.data.table import Table, leading_groups
from common.errors import ConfigError, DataError, ImageSideError, RepeatedImageError
from common.privacy import NEIGHBOURS, GaussianPrivacy, group_factor
from common.settings import load_settings
from server.run.accounting import total_reports
from strategies.core.federation import Federation

Samples = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), min_size=1, max_size=40)


@given(Samples)
def test_the_factor_is_the_largest_group_s_movement(samples: list[tuple[str, int]]) -> None:
    """Noise of a class mean is in units of 2 C factor / n, and a group of m moves it by at most 2 C m / n."""
    factor = group_factor(*zip(*samples, strict=True))
    sizes = Counter(label for _, label in samples)
    worst = 0.0
    for group in {name for name, _ in samples}:
        counts = Counter(label for name, label in samples if name == group)
        movement = [2 * count / sizes[label] / (2 * factor / sizes[label]) for label, count in counts.items()]
        worst = max(worst, math.hypot(*movement))
    assert worst == pytest.approx(1.0)


def test_groups_of_one_image_are_single_images() -> None:
    assert group_factor(["a", "b", "c"], [0, 0, 1]) == 1.0
    assert group_factor(["a", "a", "b"], [0, 1, 1]) == pytest.approx(math.sqrt(2))


# ---- the split -------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60), st.floats(0.05, 0.95))
def test_whole_groups_are_split(names: list[str], fraction: float) -> None:
    files = [(Path(f"{number:03}"), number % 2) for number in range(len(names))]
    groups = {path: name for (path, _), name in zip(files, names, strict=True)}
    train, test = leading_groups(files, groups, fraction)
    assert sorted(train + test) == files
    sides = [{groups[path] for path, _ in part} for part in (train, test)]
    assert sides[0].isdisjoint(sides[1])
    assert bool(train) is True
    assert bool(test) is (len(set(names)) > 1)
    largest = max(Counter(names).values())
    assert abs(len(train) - fraction * len(files)) <= largest, "no farther than the largest group"


def write_patients(folder: Path, *, split: bool) -> Path:
    """Twelve images of four patients; with a split that divides the last patient."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    lines = ["path,label,patient" + ",split" * split]
    for number in range(12):
        write_noise(folder / f"{number}.png", draws)
        line = f"{number}.png,{('negative', 'positive')[number % 2]},p{number // 3}"
        lines.append(line + f",{'test' if number > 9 else 'train'}" * split)
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder


def table(folder: Path, **more: str) -> Table:
    place = {"root": str(folder), "path": "list.csv", "label": "label", "domain": "none"}
    return Table(domains=("clinic",), image_size=16, group="patient", **{**place, **more})


def test_a_table_without_splits_is_divided_by_groups(tmp_path: Path) -> None:
    found = table(write_patients(tmp_path / "clinic", split=False)).load("clinic")
    assert set(found.train_groups) == {"p0", "p1", "p2"}
    assert set(found.test_groups) == {"p3"}
    assert [path.stem for path in found.test_files] == ["9", "10", "11"] or len(found.test_files) == 3


def test_a_split_that_divides_a_group_is_refused(tmp_path: Path) -> None:
    folder = write_patients(tmp_path / "clinic", split=True)
    with pytest.raises(
        DataError, match=r"p3 of 'patient' are groups with images in train and in test.*data\.split=none"
    ):
        table(folder).load("clinic")
    assert set(table(folder, split="none").load("clinic").test_groups) == {"p3"}


def test_an_image_of_two_groups_is_refused(tmp_path: Path) -> None:
    folder = write_patients(tmp_path / "clinic", split=False)
    with (folder / "list.csv").open("a") as stream:
        stream.write("0.png,negative,p3\n")
    with pytest.raises(DataError, match=r"0\.png is of the group 'p0' and of 'p3'"):
        table(folder).load("clinic")


def test_a_row_without_a_group_is_refused(tmp_path: Path) -> None:
    folder = write_patients(tmp_path / "clinic", split=False)
    text = (folder / "list.csv").read_text()
    (folder / "list.csv").write_text(text.replace("5.png,positive,p1", "5.png,positive,"))
    with pytest.raises(DataError, match="a row has no 'patient'"):
        table(folder).load("clinic")


def test_a_protocol_that_divides_a_group_among_clients_is_refused(tmp_path: Path) -> None:
    data = table(write_patients(tmp_path / "clinic", split=False))
    divided = Skewed(skew="none", client_count=2, least=1)
    with pytest.raises(DataError, match=r"group 'p\d' \(data\.group\) to clinic-0 and to clinic-1.*one_per_domain"):
        inspect_all(data, divided, 0)
    inspect_all(data, OneClientPerDomain(), 0)
    inspect_all(replace(data, group=""), divided, 0)


def write_wards(folder: Path, *, apart: bool) -> Table:
    """Two wards of five patients each, two of whom are in both, unless the wards are ``apart``."""
    draws = np.random.default_rng(0)
    lines = ["path,label,domain,patient"]
    for number in range(40):
        write_noise(folder / f"{number}.png", draws)
        ward, patient = number // 20, number % 20 // 4 + 3 * (number // 20)
        name = f"p{patient}" + f"-ward_{'ab'[ward]}" * apart
        lines.append(f"{number}.png,{('negative', 'positive')[number % 2]},ward_{'ab'[ward]},{name}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return Table(root=str(folder), path="list.csv", image_size=16, group="patient")


def test_groups_of_two_domains_are_told_and_refused_where_they_are_protected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Patients p3 and p4 are at both wards: ``p4`` is scored at the first, and both are trained on at the second."""
    private = GaussianPrivacy(clip=1.0, noise_multiplier=1.0, unit="group")
    told = "1 group with training images of two domains, and 1 trained on in one domain and scored in another"
    data = write_wards(tmp_path, apart=False)
    assert set(data.load("ward_a").test_groups) == {"p4"}
    assert {"p3", "p4"} <= set(data.load("ward_b").train_groups)
    inspect_all(data, OneClientPerDomain(), 0)
    assert told in caplog.text
    assert "such as 'p4' of ward_b and ward_a" in caplog.text
    inspect_all(data, OneClientPerDomain(), 0, replace(private, unit="sample"))
    with pytest.raises(DataError, match=rf"{told}.*privacy\.unit=group needs it"):
        inspect_all(data, OneClientPerDomain(), 0, private)
    whole = LeaveOut(leave_out=("ward_a",), unseen="whole")
    with pytest.raises(DataError, match="0 groups with training images of two domains, and 2 trained on in one"):
        inspect_all(data, whole, 0, private)
    caplog.clear()
    data.forget()
    data = write_wards(tmp_path, apart=True)
    inspect_all(data, OneClientPerDomain(), 0, private)
    assert "data.group" not in caplog.text


def test_a_device_of_its_own_refuses_to_hold_a_part_of_a_group(tmp_path: Path) -> None:
    """The server of a deployment sees no data: what it cannot refuse, the device does."""
    folder = write_patients(tmp_path / "clinic", split=False)
    settings = load_settings(
        [
            "data=table",
            "data.domains=[clinic]",
            "data.path=list.csv",
            "data.label=label",
            "data.domain=none",
            "data.group=patient",
            "data.image_size=16",
            "model=small",
            "protocol=skewed",
            "protocol.client_count=2",
            "protocol.skew=none",
            "protocol.least=1",
            f"output={tmp_path / 'run'}",
        ]
    )
    client = settings.clients[0]
    device = Device(settings, client, lambda run: ClientStore(tmp_path / run), data_root=str(folder))
    with pytest.raises(DataError, match=r"\(data\.group\) to clinic-0 and to clinic-1"):
        device.register()


# ---- the border ------------------------------------------------------------------------------------------------------


def test_a_group_stays_on_its_side(tmp_path: Path) -> None:
    """An image of a patient who was trained on is not scored, although nobody trained on this image."""
    border = Border(tmp_path)
    border.keep(trained_on("clinic"), Images("clinic", ("a", "b"), "files", ("p1", "p2")))
    border.check(trained_on("clinic"), Images("clinic", ("c",), "files", ("p1",)))
    border.check(SCORED, Images("clinic", ("d",), "files", ("p3",)))
    border.check(SCORED, Images("ward", ("e",), "files", ("p1",)))
    with pytest.raises(ImageSideError):
        border.check(SCORED, Images("clinic", ("c",), "files", ("p1",)))


# ---- one image in several rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_one_image_in_many_rows_is_a_group(way: str, tmp_path: Path) -> None:
    """The refusal of ``unit=sample`` names this way out; links to one file are several groups."""
    folder = listed(tmp_path / "clinic", WAYS[way], changed=False)
    attacker = Attacker(folder, tmp_path / "state", domain="clinic", **OWN_LIST, data_group="path")
    assert "privacy.unit=group with data.group=COLUMN" in REASONS[RepeatedImageError]
    asked = (*LISTED, *MEANS, "privacy.unit=group", "data.group=path")
    for reply in (attacker.register(*asked), attacker.ask(*asked, train=True)):
        assert reply.ok is (way == "rows"), reply.text
        if way != "rows":
            assert reply.text == REASONS[RepeatedImageError]


def test_the_owner_names_the_groups(tmp_path: Path) -> None:
    """The attack: in a column without patients each image is a group, so the noise is that of single images."""
    folder = write_patients(tmp_path / "clinic", split=False)
    words = ("data=table", "data.path=list.csv", "data.domain=none", "data.label=label", *MEANS, "privacy.unit=group")
    pins = {"data": "table", "data_path": "list.csv", "data_label": "label", "data_domain": "", "privacy_unit": "group"}
    attacker = Attacker(folder, tmp_path / "state", domain="clinic", **pins, data_group="patient")
    assert not attacker.register(*words, "data.group=path").ok
    assert not attacker.register(*words, "data.group=patient", "privacy.unit=sample").ok
    assert attacker.register(*words, "data.group=patient").ok


# ---- what is claimed -------------------------------------------------------------------------------------------------


def test_a_unit_of_groups_needs_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.unit=group: nothing says which images belong together"):
        Federation(settings_of("fpl", tmp_path, "group"))


def test_a_run_reports_its_unit(tmp_path: Path) -> None:
    folder = write_patients(tmp_path / "clinic", split=False)
    words = ["method=fpl", "engine=inline", "train.device=cpu", "train.rounds=2", "model=small", "data=table"]
    words += [f"data.root={folder}", "data.path=list.csv", "data.group=patient", "data.label=label", "data.domain=none"]
    words += ["data.image_size=16", "data.domains=[clinic]", "privacy=gaussian", "privacy.update_clip=1"]
    reports = []
    for unit in ("group", "client"):
        settings = load_settings([*words, f"privacy.unit={unit}", f"output={tmp_path / unit}"])
        report = run(settings).summary["privacy"]
        assert (report["unit"], report["neighbours"]) == (unit, NEIGHBOURS[unit])
        assert report["conditional_epsilon"]["clinic-0"] == pytest.approx(epsilon([1.0, 1.0], 2, 1e-5), abs=1e-3)
        reports.append((settings, tmp_path / unit))
    (total,) = total_reports(reports).values()
    assert total["unit"] == "group"
    regrouped = replace(settings, privacy=GaussianPrivacy(unit="group"), data=replace(settings.data, group="path"))
    (total,) = total_reports([*reports, (regrouped, tmp_path / "client")]).values()
    assert total["unit"] == "sample", "a patient is several files"


# ---- the secret of the border ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", "xyz", "00"], ids=["missing", "empty", "no hexadecimals", "short"])
def test_a_lost_secret_does_not_forget_the_sides_of_images(content: str | None, tmp_path: Path) -> None:
    """With a new secret each image would be a new one, which may be scored although it was trained on."""
    border = Border(tmp_path / "border")
    images = Images("clinic", ("1.png", "2.png"), "files")
    border.keep(trained_on("clinic"), images)
    secret = tmp_path / "border" / "secret"
    known = secret.read_text()
    secret.unlink()
    if content is not None:
        secret.write_text(content)
    for use in (border.check, border.keep):
        with pytest.raises(DataError, match=r"secret, .*: restore it, because .*border\.json|; restore it, because"):
            use(SCORED, images)
    secret.write_text(known)
    with pytest.raises(ImageSideError):
        border.check(SCORED, images)
