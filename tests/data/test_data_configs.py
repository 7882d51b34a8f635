from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from data_makers import write_image

from common.composition import compose_config
from common.config import build
from common.data.batches import Augmentation
from common.data.domain import DataSource
from common.data.protocols import Protocol

CONF = Path(__file__).resolve().parents[2] / "conf"

PROTOCOLS = {
    "one_per_domain": ("glyphs", 4),
    "glyphs_uneven": ("glyphs", 10),
    "dirichlet": ("glyphs", 10),
    "skewed": ("glyphs", 12),
    "fedplcc": ("office_caltech", 4),
    "fedplcc_domainnet": ("domainnet", 6),
    "feddap_domainnet": ("domainnet", 20),
    "fpl_office": ("office_caltech", 10),
    "fedapc_office": ("office_caltech", 8),
    "fpl_digits": ("digits", 20),
    "fpl_digits_code_seed0": ("digits", 20),
    "fedapc_digits": ("digits", 8),
    "fedpall_digits": ("digits", 4),
    "fedheal_digits": ("digits", 20),
    "fedheal_digits_stand_in": ("digits", 20),
    "fedheal_office": ("office_caltech", 20),
    "fedgca_digits": ("digits", 10),
    "i2pfl_pacs": ("pacs", 10),
    "fedgca_pacs": ("pacs", 10),
    "leave_one_out": ("glyphs", 3),
    "fpl_digits_stand_in": ("digits", 20),
    "fedapc_digits_stand_in": ("digits", 8),
}
"""For each protocol, the data that it is written for, and how many clients it has there."""


@cache
def composed(group: str, name: str) -> dict[str, Any]:
    return dict(compose_config([f"{group}={name}"])[group])


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("name", names("data"))
def test_every_data_file_builds_and_shows_every_field(name: str, tmp_path: Path) -> None:
    node = {**composed("data", name)}
    assert (CONF / "data" / f"{name}.yaml").read_text().startswith("# ")
    node["root"] = str(tmp_path)
    write_image(tmp_path / "domain" / "cat" / "image.png", 3)
    (tmp_path / "domain" / "metadata.csv").write_text("path,label\n")
    source = build(node, "data")
    assert isinstance(source, DataSource)
    assert source.name == name
    assert isinstance(source.augmentation, Augmentation)
    assert set(node) - {"_target_"} == {field.name for field in dataclasses.fields(source)}
    assert set(node["augmentation"]) == {field.name for field in dataclasses.fields(Augmentation)}
    hash(source)


@pytest.mark.parametrize("name", names("protocol"))
def test_every_protocol_file_builds_and_has_its_clients(name: str) -> None:
    node = composed("protocol", name)
    assert (CONF / "protocol" / f"{name}.yaml").read_text().startswith("# ")
    protocol = build(node, "protocol")
    assert isinstance(protocol, Protocol)
    assert set(node) - {"_target_"} | {"validation"} == {field.name for field in dataclasses.fields(protocol)}
    chosen, count = PROTOCOLS[name]
    data = {**composed("data", chosen)}
    if node.get("counts") and data["_target_"].endswith("Digits"):
        data["domains"] = list(node["counts"])
    source = build(data, "data")
    clients = protocol.clients(source)
    assert len({client.id for client in clients}) == len(clients) == count
    assert set(protocol.test_domains(source)) <= set(source.domains)
