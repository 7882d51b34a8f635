from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_makers import even_labels, made_up_domain

from common.config import checked
from common.data.domain import Domain
from common.data.glyphs import Glyphs
from common.data.inspection import uneven_holdings
from common.data.office_caltech import OfficeCaltech
from common.data.protocols import (
    Allocation,
    ClientSpec,
    Dirichlet,
    LeaveOut,
    OneClientPerDomain,
    Protocol,
    Skewed,
    _with_every_class,
    share,
)
from common.data.splits import split_hash
from common.errors import ConfigError, DataError
from common.settings import inspect_run, load_settings
from common.versions import combined_hash

OFFICE = OfficeCaltech()
GLYPHS = Glyphs()
FPL_OFFICE = Allocation(
    counts={"caltech": 3, "amazon": 2, "webcam": 1, "dslr": 4}, fraction=0.2, ensure_every_class=True
)


def parts(protocol: Protocol, name: str, labels: object, seed: int = 0) -> list[torch.Tensor]:
    domain = made_up_domain(name, labels)
    source = OFFICE if name in OFFICE.domains else GLYPHS
    return [protocol.split(domain, client, seed) for client in protocol.clients(source) if client.domain == name]


def test_clients_are_numbered_within_their_domain_in_the_datas_order() -> None:
    assert [client.id for client in FPL_OFFICE.clients(OFFICE)] == [
        *("caltech-0", "caltech-1", "caltech-2", "amazon-0", "amazon-1", "webcam-0"),
        *("dslr-0", "dslr-1", "dslr-2", "dslr-3"),
    ]
    assert [client.id for client in OneClientPerDomain().clients(OFFICE)] == [f"{name}-0" for name in OFFICE.domains]


@pytest.mark.parametrize(
    ("train", "fraction", "wanted"),
    [
        *((60000, 0.01, 600), (7291, 0.01, 72), (73257, 0.01, 732), (10000, 0.01, 100)),  # FPL's digits
        *((899, 0.2, 179), (768, 0.2, 153), (237, 0.2, 47), (127, 0.2, 25)),  # FPL's Office-Caltech
        (100, 0.29, 29),  # 0.29 * 100 is 28.999... in binary
    ],
)
def test_shares_are_those_of_the_papers(train: int, fraction: float, wanted: int) -> None:
    assert share(SimpleNamespace(name="any", train=range(train)), fraction) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "train", "each"), [("caltech", 899, 179), ("amazon", 768, 153), ("dslr", 127, 25)])
def test_allocation_is_disjoint_and_has_the_right_sizes(name: str, train: int, each: int) -> None:
    clients = parts(FPL_OFFICE, name, even_labels(train))
    assert len(clients) == FPL_OFFICE.counts[name]
    for indices in clients:
        assert indices.dtype == torch.int64
        assert len(indices) == each
        assert torch.equal(indices, indices.unique())
        assert 0 <= int(indices.min()) <= int(indices.max()) < train
    everyone = torch.cat(clients)
    assert len(everyone.unique()) == len(everyone)


def test_every_class_is_ensured_by_exchange_without_losing_another() -> None:
    # two rare classes: without the exchange, clients of 25 out of 127 would often miss them
    labels = [*([0] * 100), *([1] * 19), *([2] * 4), *([3] * 4)]
    without = Allocation(counts={"dslr": 4}, fraction=0.2)
    missing = [set(labels) - {labels[i] for i in part.tolist()} for part in parts(without, "dslr", labels)]
    assert any(missing)
    ensured = parts(FPL_OFFICE, "dslr", labels)
    assert all({labels[i] for i in part.tolist()} == {0, 1, 2, 3} for part in ensured)
    everyone = torch.cat(ensured)
    assert len(everyone) == len(everyone.unique()) == 100


def test_a_missing_class_comes_from_what_no_client_took_if_it_can() -> None:
    labels = torch.tensor([0, 0, 1, 1, 0, 1])
    first, second, pool = torch.tensor([0, 1]), torch.tensor([2, 3, 4]), torch.tensor([5])
    assert [part.tolist() for part in _with_every_class([first, second], pool, labels)] == [[0, 5], [2, 3, 4]]
    assert [part.tolist() for part in _with_every_class([first, second], pool[:0], labels)] == [[0, 2], [1, 3, 4]]


def test_a_class_that_cannot_go_round_is_left_where_it_is() -> None:
    labels = [*([0] * 59), 1]
    clients = parts(FPL_OFFICE, "dslr", labels)
    assert [len(part) for part in clients] == [12] * 4
    assert sum(1 for part in clients if 59 in part.tolist()) <= 1


def test_fractions_override_the_common_fraction() -> None:
    protocol = Allocation(counts={"printed": 2, "sketch": 1}, fraction=0.1, fractions={"sketch": 0.5})
    assert [len(part) for part in parts(protocol, "printed", even_labels(100))] == [10, 10]
    assert [len(part) for part in parts(protocol, "sketch", even_labels(100))] == [50]
    assert protocol.test_domains(GLYPHS) == GLYPHS.domains


def counts_of(protocol: Protocol, labels: np.ndarray) -> torch.Tensor:
    """Samples of each client and class, [K, C]."""
    return torch.stack(
        [torch.from_numpy(labels[part]).bincount(minlength=10) for part in parts(protocol, "sketch", labels)]
    )


def unevenness(counts: torch.Tensor) -> float:
    """How far the clients' shares of a class are apart."""
    return float((counts / counts.sum(1, keepdim=True)).std(0).mean())


@pytest.mark.parametrize(("available", "wanted"), [(899, 300), (127, 127)])
def test_one_client_takes_at_most_what_is_there(available: int, wanted: int) -> None:
    (indices,) = parts(OneClientPerDomain(samples=300), "dslr", even_labels(available))
    assert len(indices.unique()) == len(indices) == wanted
    (fewer,) = parts(OneClientPerDomain(samples=300, fraction=0.1), "dslr", even_labels(available))
    assert len(fewer) == available // 10, "and at most its share"


def test_first_tenth_is_the_leading_part() -> None:
    (indices,) = parts(OneClientPerDomain(fraction=0.1, order="first"), "dslr", even_labels(7438))
    assert indices.tolist() == list(range(743))


def test_the_split_is_fixed_over_run_seeds_unless_asked_otherwise() -> None:
    labels = even_labels(500)
    for make in (
        lambda seed: OneClientPerDomain(samples=50, partition_seed=seed),
        lambda seed: Allocation(counts={"sketch": 2}, fraction=0.1, partition_seed=seed),
        lambda seed: Dirichlet(domain="sketch", client_count=3, partition_seed=seed),
        lambda seed: Skewed(partition_seed=seed),
    ):
        first, second = (parts(make(0), "sketch", labels, seed)[0] for seed in (0, 1))
        assert torch.equal(first, second)
        assert not torch.equal(first, parts(make(7), "sketch", labels)[0])
        moving = [parts(make(None), "sketch", labels, seed)[0] for seed in (0, 1)]
        assert torch.equal(first, moving[0])
        assert not torch.equal(moving[0], moving[1])


def test_dirichlet_divides_everything_among_the_clients() -> None:
    clients = parts(Dirichlet(domain="sketch", alpha=0.3), "sketch", even_labels(2000))
    assert len(clients) == 10
    assert sorted(torch.cat(clients).tolist()) == list(range(2000))
    assert min(map(len, clients)) >= 10


def test_small_alpha_is_more_uneven_than_large() -> None:
    assert unevenness(counts_of(Dirichlet(domain="sketch", alpha=0.3), even_labels(5000))) > 0.1
    assert unevenness(counts_of(Dirichlet(domain="sketch", alpha=1000.0), even_labels(5000))) < 0.02


@pytest.mark.parametrize("skew", ["labels", "classes", "sizes", "none"])
@pytest.mark.parametrize("clients", [1, 3, 7])
def test_a_skewed_domain_goes_to_its_clients_without_overlap(skew: str, clients: int) -> None:
    protocol = Skewed(skew=skew, client_count=clients, samples=1000, classes_each=4)
    found = parts(protocol, "sketch", even_labels(1500))
    everyone = torch.cat(found)
    assert len(found) == clients
    assert len(everyone.unique()) == len(everyone) <= 1000
    assert min(map(len, found)) >= 10
    if skew != "classes" or clients >= 3:  # fewer clients leave classes without a holder
        assert len(everyone) == 1000


EVERY_PROTOCOL = {
    "one per domain": OneClientPerDomain(samples=90),
    "leave one out": LeaveOut(samples=90),
    "allocation": Allocation(counts={"handwritten": 2}, fraction=0.3),
    "dirichlet": Dirichlet(client_count=3, samples=60),
    "skewed": Skewed(samples=60),
}


@pytest.mark.parametrize("name", EVERY_PROTOCOL)
def test_every_protocol_says_how_many_training_images_no_client_holds(name: str) -> None:
    protocol = EVERY_PROTOCOL[name]
    data = Glyphs(domains=("handwritten", "printed"))
    said = uneven_holdings(data, protocol, 0)
    for domain in {client.domain for client in protocol.clients(data)}:
        total = len(data.load(domain).train)
        held = sum(
            len(protocol.split(data.load(domain), one, 0)) for one in protocol.clients(data) if one.domain == domain
        )
        assert held < total
        assert f"{domain} {total - held:,} of {total:,}" in said
    assert "all of" not in said
    assert "two or more clients" not in said


def test_classes_without_a_holder_are_named_and_nothing_is_said_where_nothing_is_left_over() -> None:
    data = Glyphs(domains=("signs",))
    assert uneven_holdings(data, OneClientPerDomain(), 0) == ""
    protocol = Skewed(skew="classes")  # three clients of two classes each
    said = uneven_holdings(data, protocol, 0)
    domain = data.load("signs")
    held = torch.cat([protocol.split(domain, client, 0) for client in protocol.clients(data)])
    lost = sorted(set(range(10)) - set(domain.train.labels[held].tolist()))
    assert len(lost) == 4
    assert said.endswith(f"(all of {', '.join(data.class_names[label] for label in lost)})")


def test_images_that_two_clients_hold_are_said() -> None:
    class Overlapping(Skewed):
        def split(self, domain: Domain, client: ClientSpec, seed: int) -> torch.Tensor:
            return torch.arange(100 + client.index)

    said = uneven_holdings(Glyphs(domains=("signs",)), Overlapping(), 0)
    assert said.endswith("\ntraining images that two or more clients hold, by this protocol: signs 101")


def test_a_run_says_what_no_client_holds(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(["data=glyphs", "data.domains=[signs]", "protocol=skewed", "protocol.skew=classes"])
    with caplog.at_level(logging.WARNING):
        inspect_run(settings)
    assert "training images that no client holds, by this protocol: signs" in caplog.text


@checked
class Twice(OneClientPerDomain):
    """Lists each client twice; its splits repeat an image."""

    def clients(self, data):
        return super().clients(data) * 2

    def split(self, domain, client, seed):
        indices = super().split(domain, client, seed)
        return torch.cat([indices, indices[-1:]])


@checked
class Whole(OneClientPerDomain):
    """Scores training images."""

    def test_split(self, domain):
        return domain.whole


def test_a_wrong_protocol_is_refused_where_it_acts_and_not_in_simulations_alone() -> None:
    """Devices and the server of a deployment build settings and call ``parts``; they compare no domains."""
    with pytest.raises(DataError, match=r"Twice\.clients has sketch-0 twice"):
        load_settings(["data=glyphs", "data.domains=[sketch]", f"protocol={__name__}.Twice"])
    domain = GLYPHS.load("sketch")
    with pytest.raises(DataError, match=r"Twice.split of sketch-0 must be an int64 tensor \[n\] of distinct"):
        Twice().parts(domain, ClientSpec("sketch", 0), 0)


def test_training_images_that_are_scored_are_said_of_generated_data_too(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(["data=glyphs", "data.domains=[sketch]", f"protocol={__name__}.Whole"])
    with caplog.at_level(logging.WARNING):
        inspect_run(settings)
    assert "240 test images are also training images" in caplog.text


def test_each_skew_is_of_its_kind() -> None:
    labels, classes, sizes, none = (
        counts_of(Skewed(skew=skew), even_labels(2000)) for skew in ("labels", "classes", "sizes", "none")
    )
    assert unevenness(labels) > 0.1 > unevenness(sizes)
    assert unevenness(none) < 0.05
    assert (classes > 0).sum(1).tolist() == [2, 2, 2]
    assert sizes.sum(1).max() > 1.5 * sizes.sum(1).min()
    assert none.sum(1).max() - none.sum(1).min() <= 1
    assert len(Skewed().clients(GLYPHS)) == 3 * len(GLYPHS.domains)


def test_classes_are_dealt_so_that_none_has_two_holders_more_than_another() -> None:
    counts = counts_of(Skewed(skew="classes", client_count=7, classes_each=3), even_labels(2000))
    assert sorted((counts > 0).sum(0).tolist()) == [2] * 9 + [3]


def test_dirichlet_uses_a_sample_of_the_source_and_scores_the_others() -> None:
    protocol = Dirichlet(domain="printed", samples=1000)
    assert len(torch.cat(parts(protocol, "printed", even_labels(3000))).unique()) == 1000
    assert protocol.test_domains(GLYPHS) == ("handwritten", "signs", "sketch")
    assert Dirichlet(domain="printed", score="all").test_domains(GLYPHS) == GLYPHS.domains
    assert Dirichlet().source(GLYPHS) == "handwritten"
    with pytest.raises(ConfigError, match="no domain is left to score"):
        Dirichlet().test_domains(Glyphs(domains=("sketch",)))


@pytest.mark.parametrize(
    "protocol",
    [Dirichlet(domain="sketch", unseen="whole", score="all"), LeaveOut(leave_out=("signs",), unseen="whole")],
)
def test_a_domain_that_is_trained_on_is_scored_on_its_test_split_alone(protocol: Protocol) -> None:
    trained, unseen = made_up_domain("sketch", even_labels(20)), made_up_domain("signs", even_labels(20))
    assert protocol.test_split(trained) is trained.test
    assert protocol.test_split(unseen) is unseen.whole


def test_a_protocol_that_leaves_no_domain_is_refused() -> None:
    with pytest.raises(ConfigError, match="no domain is left to train on besides handwritten"):
        LeaveOut(leave_out=GLYPHS.domains).clients(GLYPHS)
    with pytest.raises(ConfigError, match="no domain is left to score besides 'sketch'"):
        Dirichlet().test_domains(Glyphs(domains=("sketch",)))


def test_unknown_domains_are_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'webcam'"):
        Allocation(counts={"webcams": 1}).clients(OFFICE)
    with pytest.raises(ConfigError, match="did you mean 'sketch'"):
        Dirichlet(domain="sketches").clients(GLYPHS)
    with pytest.raises(ConfigError, match="did you mean 'sketch'"):
        Allocation(counts={"signs": 1}, fractions={"sketches": 0.5}).clients(GLYPHS)


FEW: list[tuple[Protocol, int, int, str]] = [
    (Allocation(counts={"sketch": 1}, fraction=0.01), 50, 10, "less than one"),
    (
        Dirichlet(domain="sketch"),
        99,
        10,
        "cannot give 10 clients 10 each; lower protocol.client_count or protocol.least",
    ),
    (Skewed(), 29, 10, "cannot give 3 clients 10 each"),
    (Skewed(skew="classes", classes_each=6), 100, 5, "has 5 classes"),
    (Skewed(skew="classes", classes_each=1), 60, 10, "a client would have 6 samples"),
    (Dirichlet(domain="sketch", alpha=0.001), 100, 2, r"raise protocol\.alpha"),
]


def test_too_few_samples_are_an_error_with_a_way_out() -> None:
    for protocol, samples, classes, message in FEW:
        with pytest.raises(DataError, match=message):
            parts(protocol, "sketch", even_labels(samples, classes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneClientPerDomain(samples=0), "samples"),
        (lambda: OneClientPerDomain(fraction=0.0), "fraction"),
        (lambda: Allocation(counts={}), "at least one client"),
        (lambda: Allocation(counts={"sketch": -1, "signs": 2}), "counts.sketch"),
        (lambda: Allocation(counts={"sketch": 6}, fraction=0.2), "sketch: 6 clients would take 1.2"),
        (lambda: Dirichlet(alpha=0.0), "alpha"),
        (lambda: Dirichlet(samples=20), "cannot give"),
        (lambda: LeaveOut(unseen="whole"), "unseen=whole needs leave_out"),
        (lambda: Dirichlet(unseen="whole"), "unseen=whole needs protocol.domain"),
    ],
    ids=[
        *("no sample", "no share", "no client", "below 0", "more than all", "alpha 0", "fewer than its clients"),
        *("the whole of no named domain", "the whole of all but no named source"),
    ],
)
def test_values_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_client_of_another_domain_is_refused() -> None:
    domain = made_up_domain("sketch", even_labels(20))
    with pytest.raises(ValueError, match="does not hold"):
        OneClientPerDomain().split(domain, ClientSpec("printed", 0), 0)
    with pytest.raises(ValueError, match="has 1 clients"):
        OneClientPerDomain().split(domain, ClientSpec("sketch", 1), 0)


def test_hashes_are_stable_and_notice_every_part() -> None:
    client, indices, labels = ClientSpec("sketch", 0), torch.tensor([1, 3, 4]), torch.tensor([0, 1, 2, 3, 4, 5])
    value = split_hash("glyphs", client.id, indices, labels)
    # written down once: histories of different versions stay comparable
    assert value == "aabffef42ce1b3c697b69f2b2df816c5b48b233638d8679489c0f05c85f6de94"
    others = [
        split_hash("digits", client.id, indices, labels),
        split_hash("glyphs", "sketch-1", indices, labels),
        split_hash("glyphs", client.id, indices[:2], labels),
        split_hash("glyphs", client.id, indices, torch.tensor([0, 1, 2, 0, 4, 5])),
    ]
    assert len({value, *others}) == 5
    assert split_hash("glyphs", client.id, indices, torch.tensor([9, 1, 2, 3, 4, 5])) == value, "of an unseen sample"


def test_the_combined_hash_ignores_the_order_of_arrival() -> None:
    assert combined_hash({"a-0": "11", "b-0": "22"}) == combined_hash({"b-0": "22", "a-0": "11"})
    assert combined_hash({"a-0": "11", "b-0": "22"}) != combined_hash({"a-0": "22", "b-0": "11"})


def test_published_allocations_are_in_the_configuration() -> None:
    text = (Path(__file__).resolve().parents[2] / "conf" / "protocol" / "fpl_digits.yaml").read_text()
    assert "{mnist: 3, usps: 7, svhn: 6, syn: 4}" in text


@pytest.mark.parametrize("validation", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("make", [OneClientPerDomain, Skewed, Dirichlet])
def test_images_of_one_group_are_all_trained_on_or_all_validated(make: Any, validation: float) -> None:
    """A model that knows a patient is no better for recognising other images of the same patient."""
    draws = np.random.default_rng(0)
    patients = draws.integers(0, 60, 300)
    labels = np.where(draws.random(300) < 0.9, patients % 3, draws.integers(0, 3, 300))
    domain = made_up_domain("photo", labels.tolist())
    groups = tuple(f"patient {number}" for number in patients)
    grouped = replace(domain, train_groups=groups)
    protocol = make(validation=validation)
    for client in protocol.clients(SimpleNamespace(domains=("photo",), name="mine")):
        trained, validated = protocol.parts(grouped, client, 0)
        held = protocol.split(grouped, client, 0)
        assert torch.equal(torch.cat([trained, validated]).sort().values, held)
        sides = [{groups[index] for index in part.tolist()} for part in (trained, validated)]
        assert not sides[0] & sides[1]
        assert 0 < len(validated) <= int(validation * len(held) + 0.5)
        kinds = domain.train.labels
        assert set(kinds[trained].tolist()) == set(kinds[held].tolist()), "a class keeps a sample to train on"


def test_a_group_that_does_not_fit_into_the_share_is_not_divided() -> None:
    domain = made_up_domain("photo", [0, 1] * 20)
    grouped = replace(domain, train_groups=tuple(f"patient {index // 20}" for index in range(40)))
    with pytest.raises(
        DataError, match=r"is at most 12, while the smallest whole group has 20: set protocol\.validation=0\.5 or more"
    ):
        OneClientPerDomain(validation=0.3).parts(grouped, ClientSpec("photo", 0), 0)
    trained, validated = OneClientPerDomain(validation=0.5).parts(grouped, ClientSpec("photo", 0), 0)
    assert (len(trained), len(validated)) == (20, 20)


class GloballyDrawn(OneClientPerDomain):
    """An own protocol with two clients a domain, whose split is cut from a global permutation."""

    def clients(self, data: Any) -> tuple[ClientSpec, ...]:
        return tuple(ClientSpec(domain, index) for domain in data.domains for index in range(2))

    def split(self, domain: Any, client: ClientSpec, seed: int) -> torch.Tensor:
        return torch.randperm(len(domain.train))[client.index :: 2].sort().values


def test_a_split_that_draws_from_the_global_generators_repeats_and_divides_its_domain() -> None:
    domain = made_up_domain("webcam", even_labels(40, 4))
    protocol = GloballyDrawn()
    first, second = (ClientSpec("webcam", index) for index in range(2))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    trained, _ = protocol.parts(domain, first, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, _ = protocol.parts(domain, first, 0)
    assert torch.equal(trained, again)
    others, _ = protocol.parts(domain, second, 0)
    assert torch.equal(torch.cat([trained, others]).sort().values, torch.arange(40))
    drawn = protocol.held(domain, first, 5)
    assert torch.equal(drawn, trained)  # partition_seed is 0, whatever the run's seed is
    reseeded = GloballyDrawn(partition_seed=None).held(domain, first, 5)
    assert not torch.equal(reseeded, trained)
