"""Protocols: the clients, the samples of each client's domain that it holds, and the domains that are scored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from common.config import Count, Names, Natural, Seed, Share, check, checked
from common.data.batches import Split
from common.data.domain import DataSource, Domain
from common.data.own_images import none_held_out, whole_groups
from common.data.splits import check_split, content_hash
from common.errors import ConfigError, DataError, nearest
from common.numerics import GLOBAL_GENERATORS, generator, numpy_generator, seeded_globals
from common.text import quantity

T = TypeVar("T")


@dataclass(frozen=True)
class ClientSpec:
    """One client: the domain of its samples, and its number among the clients of that domain (from 0).

    Args:
        domain: the domain.
        index: the number.
        others: the clients whose samples it holds instead, of any domains (:meth:`pooled`).
    """

    domain: str
    index: int
    others: tuple["ClientSpec", ...] = ()

    @classmethod
    def pooled(cls, clients: Sequence["ClientSpec"]) -> "ClientSpec":
        """Return one client that holds the samples of ``clients``."""
        return cls("pooled", 0, tuple(clients))

    @property
    def holds(self) -> tuple["ClientSpec", ...]:
        """The clients of the protocol whose samples it holds: itself, or :attr:`others`."""
        return self.others or (self,)

    @cached_property
    def id(self) -> str:
        """The client's name in records, such as ``webcam-0``."""
        return f"{self.domain}-{self.index}"


@checked
class Protocol(ABC):
    """Base of the protocols. The same protocol, seed and data give the same split on every machine.

    Attributes:
        partition_seed: seed of the split. The papers fix the split and vary only the model's seed over runs;
            ``None`` uses the run's seed, so that both vary together.
        validation: share of every client's training samples that is scored and never trained on, in [0, 0.5].
    """

    partition_seed: Seed | None = 0
    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    @abstractmethod
    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """Return all clients, by domain in the data's order, then by number.

        Raises:
            ConfigError: the protocol names a domain that ``data`` does not use.
        """

    @abstractmethod
    def split(self, domain: Domain, client: ClientSpec, seed: int) -> Tensor:
        """Return the indices of ``client``'s samples in ``domain.train``: int64 [n], distinct, in ascending order.

        Args:
            domain: the client's domain.
            client: one of ``clients(data)``.
            seed: the run's seed; used only if ``partition_seed`` is ``None``.

        Raises:
            DataError: the domain has too few samples for the protocol.
        """

    def held(self, domain: Domain, client: ClientSpec, seed: int) -> Tensor:
        """Return the indices of :meth:`split`, checked; it may draw from the global generators.

        They start alike for all clients of the domain, so that a permutation drawn there is the same for each of them.

        Raises:
            DataError: the domain has too few samples for the protocol, or the split is not what one must be.
        """
        with GLOBAL_GENERATORS, seeded_globals(self._seed(seed), "split", domain.name):
            indices = self.split(domain, client, seed)
        check_split(type(self).__name__, domain.name, client.id, indices, len(domain.train))
        return indices

    def parts(self, domain: Domain, client: ClientSpec, seed: int) -> tuple[Tensor, Tensor]:
        """Return the indices of :meth:`split` to train on and those to validate with: int64, distinct, ascending.

        The samples are ordered by class, at random within each, and validation samples are taken at equal distances.
        So each class gives its share, rounded up or down, and never its last sample. If the samples have groups, such
        as patients, whole groups are taken at random, as far as they fit into the share and leave every class a sample.

        Raises:
            DataError: the client has too few samples to train on, or to validate with.
        """
        held = self.held(domain, client, seed)
        validated = self._validated(domain, held, generator(self._seed(seed), "validation", client.id))
        if self.validation and not len(validated):
            groups = [domain.train_groups[index] for index in held.tolist() if domain.train_groups]
            reason = none_held_out(domain.train.labels[held].tolist(), groups, self.validation)
            raise DataError(f"client {client.id} has {len(held)} training samples, and {reason}")
        trained = held[~torch.isin(held, validated)]
        if len(trained) < 2:
            found = quantity(len(trained), "sample")
            remedy = "give the domain more images or the protocol a larger share"
            if len(validated):
                found += f" besides {len(validated)} that protocol.validation={self.validation:g} holds out"
                remedy = f"set protocol.validation=0, or {remedy}"
            raise DataError(f"client {client.id} would train on {found}; it needs two or more: {remedy}")
        return trained, validated

    def _validated(self, domain: Domain, held: Tensor, draws: torch.Generator) -> Tensor:
        """Return the validation samples among those that a client holds."""
        if domain.train_groups:
            groups = [domain.train_groups[index] for index in held.tolist()]
            count = int(self.validation * len(held) + 0.5)
            return held[whole_groups(groups, domain.train.labels[held], count, draws)]
        mixed = held[torch.randperm(len(held), generator=draws)]
        labels = domain.train.labels[mixed]
        several = labels.bincount()[labels] > 1
        mixed = mixed[several][labels[several].argsort(stable=True)]
        count = min(int(self.validation * len(mixed) + 0.5), len(mixed) // 2)
        step = len(mixed) / max(count, 1)
        places = (torch.arange(count) + torch.rand(1, generator=draws, dtype=torch.float64)) * step
        return mixed[places.long().clamp(max=len(mixed) - 1)].sort().values

    def test_domains(self, data: DataSource) -> tuple[str, ...]:
        """Return the domains with a test split that is scored."""
        return data.domains

    def test_split(self, domain: Domain) -> Split:
        """Return the images of a test domain that are scored: its test split."""
        return domain.test

    def _check(self, domain: Domain, client: ClientSpec, clients: int) -> None:
        check(client.domain == domain.name, f"client {client.id} does not hold {domain.name}")
        check(0 <= client.index < clients, f"client {client.id}: the domain has {clients} clients")

    def _seed(self, seed: int) -> int:
        if self.partition_seed is None:
            return seed
        return self.partition_seed

    def _order(self, domain: Domain, seed: int) -> Tensor:
        """Return a random order of the domain's train samples, the same for each of its clients."""

        def draw() -> Tensor:
            return torch.randperm(len(domain.train), generator=generator(self._seed(seed), "partition", domain.name))

        return _once(domain, f"order {self._seed(seed)}", draw)


def scored_split(protocol: Protocol, domain: Domain) -> Split:
    """Return the images of a domain that are scored, by a protocol that may be the user's own.

    Raises:
        DataError: it returned no image.
    """
    split = protocol.test_split(domain)
    if not len(split):
        raise DataError(
            f"{protocol.test_split.__qualname__} returned no image of {domain.name}, which has "
            f"{quantity(len(domain.test), 'test image')}; return some, or leave the domain out of test_domains"
        )
    return split


@checked
class OneClientPerDomain(Protocol):
    """One client per domain (FedPLCC, FedPall): ``min(samples, available)`` samples of its train split.

    Attributes:
        samples: the most samples of a client, >= 1; ``None`` is no limit. FedPLCC: 300, DomainNet 400.
        fraction: the largest share of the train split, in (0, 1], rounded down. FedPall's digits: 0.1.
        order: ``random``, or ``first``: the leading samples of the train split, as FedPall's digits.
    """

    samples: Count | None = None
    fraction: Share = 1.0
    order: Literal["random", "first"] = "random"

    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """Return one client for each domain."""
        return tuple(ClientSpec(domain, 0) for domain in data.domains)

    def split(self, domain: Domain, client: ClientSpec, seed: int) -> Tensor:
        """See :meth:`Protocol.split`."""
        self._check(domain, client, 1)
        available = len(domain.train)
        count = min(share(domain, self.fraction), self.samples or available)
        order = torch.arange(available)
        if self.order == "random":
            order = self._order(domain, seed)
        return order[:count].sort().values


@checked
class LeaveOut(OneClientPerDomain):
    """One client for each domain except those left out, which are scored as unseen domains.

    Attributes:
        leave_out: the unseen domains; empty leaves out the data's last domain.
        score: ``unseen`` scores the domains that were left out, ``all`` the others as well.
        unseen: the images of an unseen domain that are scored: its ``test`` split, or the ``whole`` domain.
    """

    leave_out: Names = ()
    score: Literal["unseen", "all"] = "all"
    unseen: Literal["test", "whole"] = "test"

    def __post_init__(self) -> None:
        check(self.unseen == "test" or bool(self.leave_out), "unseen=whole needs leave_out to name the domains")

    def left_out(self, data: DataSource) -> tuple[str, ...]:
        """Return the unseen domains.

        Raises:
            ConfigError: a name is not a domain of ``data``, or no domain is left to train on.
        """
        _check_known("protocol.leave_out", self.leave_out, data)
        chosen = self.leave_out or data.domains[-1:]
        if len(chosen) == len(data.domains):
            raise ConfigError(f"protocol.leave_out: no domain is left to train on besides {', '.join(chosen)}")
        return chosen

    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """Return one client for each domain that is not left out."""
        unseen = self.left_out(data)
        return tuple(ClientSpec(domain, 0) for domain in data.domains if domain not in unseen)

    def test_domains(self, data: DataSource) -> tuple[str, ...]:
        """See ``score``."""
        if self.score == "unseen":
            return self.left_out(data)
        return data.domains

    def test_split(self, domain: Domain) -> Split:
        """See ``unseen``."""
        if self.unseen == "whole" and domain.name in self.leave_out:
            return domain.whole
        return domain.test


@checked
class Allocation(Protocol):
    """An explicit number of clients per domain, each with a share of it, without replacement (FPL, FedAPC).

    Attributes:
        counts: clients per domain; a domain without a count has no client but is still scored.
        fraction: share of the domain's train split each client takes, in (0, 1], rounded down. 0.01 / 0.2.
        fractions: replaces ``fraction`` for the domains that it names.
        ensure_every_class: exchange samples with the part that no client took, then between clients, until each client
            has every class of the domain, as far as the samples suffice. A client never gives its last sample of a
            class. As FPL's Office code.
    """

    counts: dict[str, Natural] = field(default_factory=dict)
    fraction: Share = 0.01
    fractions: dict[str, Share] = field(default_factory=dict)
    ensure_every_class: bool = False

    def __post_init__(self) -> None:
        check(sum(self.counts.values()) > 0, "counts must give at least one client")
        for domain, count in self.counts.items():
            total = count * self.fractions.get(domain, self.fraction)
            check(total <= 1 + 1e-9, f"{domain}: {count} clients would take {total:.4g} of the domain; at most 1")

    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """Return ``counts[domain]`` clients for each domain."""
        _check_known("protocol", {**self.counts, **self.fractions}, data)
        return _numbered(data, self.counts)

    def split(self, domain: Domain, client: ClientSpec, seed: int) -> Tensor:
        """See :meth:`Protocol.split`."""
        self._check(domain, client, self.counts.get(domain.name, 0))
        count = share(domain, self.fractions.get(domain.name, self.fraction))
        order = self._order(domain, seed)
        if not self.ensure_every_class:
            return order[client.index * count : (client.index + 1) * count].sort().values
        clients = self.counts.get(domain.name, 0)

        def exchange() -> list[Tensor]:
            parts = [order[index * count : (index + 1) * count] for index in range(clients)]
            return _with_every_class(parts, order[clients * count :], domain.train.labels)

        parts = _once(domain, f"{self!r} {self._seed(seed)}", exchange)
        return parts[client.index].sort().values


@checked
class Dirichlet(Protocol):
    """A label split of one source domain; the global model is scored on the other, unseen domains (FedGCA).

    For each class, the shares of the clients are drawn from Dirichlet(alpha, ..., alpha).

    Attributes:
        domain: the source; ``None`` is the data's first domain.
        client_count: number of clients, >= 1.
        alpha: concentration, 0.001..1e6; small is uneven.
        samples: number of random samples of the source that are split, or all if it has fewer; ``None`` is all.
            FedGCA's digits: 10,000.
        least: fewest samples of a client, >= 1; the shares are drawn again until every client has them.
        score: ``others`` scores every domain but the source, ``all`` the source as well.
        unseen: the images of an unseen domain that are scored: its ``test`` split, or the ``whole`` domain.
    """

    domain: str | None = None
    client_count: Count = 10
    alpha: Annotated[float, Field(ge=0.001, le=1e6)] = 0.3
    samples: int | None = None
    least: Count = 10
    score: Literal["others", "all"] = "others"
    unseen: Literal["test", "whole"] = "test"

    def __post_init__(self) -> None:
        check(self.unseen == "test" or self.domain is not None, "unseen=whole needs protocol.domain to name the source")
        check(
            self.samples is None or self.samples >= self.client_count * self.least,
            f"samples={self.samples} cannot give {self.client_count} clients {self.least} samples each",
        )

    def source(self, data: DataSource) -> str:
        """Return the domain that is split.

        Raises:
            ConfigError: ``domain`` is not a domain of ``data``.
        """
        if self.domain is not None:
            _check_known("protocol.domain", [self.domain], data)
        return self.domain or data.domains[0]

    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """Return ``client_count`` clients of the source."""
        source = self.source(data)
        return tuple(ClientSpec(source, index) for index in range(self.client_count))

    def test_domains(self, data: DataSource) -> tuple[str, ...]:
        """Return every domain but the source; all domains with ``score=all``.

        Raises:
            ConfigError: the source is the only domain.
        """
        source = self.source(data)
        if self.score == "all":
            return data.domains
        scored = tuple(name for name in data.domains if name != source)
        if not scored:
            raise ConfigError(f"protocol: no domain is left to score besides {source!r}; add one, or set score=all")
        return scored

    def test_split(self, domain: Domain) -> Split:
        """See ``unseen``."""
        if self.unseen == "whole" and domain.name != self.domain:
            return domain.whole
        return domain.test

    def split(self, domain: Domain, client: ClientSpec, seed: int) -> Tensor:
        """See :meth:`Protocol.split`."""
        self._check(domain, client, self.client_count)
        parts = _once(domain, f"{self!r} {self._seed(seed)}", lambda: self._parts(domain, seed))
        return parts[client.index].sort().values

    def _parts(self, domain: Domain, seed: int) -> list[Tensor]:
        """Return the samples of each client."""
        order = self._order(domain, seed)[: self.samples]
        _check_enough(domain, len(order), self.client_count, self.least)
        labels = domain.train.labels[order]
        classes = [order[labels == label] for label in labels.unique()]
        draws = numpy_generator(self._seed(seed), "dirichlet", domain.name)
        cuts = _drawn_cuts(domain, classes, draws, self.alpha, self.client_count, self.least)
        return _divided(classes, cuts, self.client_count)


@checked
class Skewed(Protocol):
    """Several clients in every domain, unlike each other within it: shifts of features and of labels at once.

    Attributes:
        skew: how the samples of a domain are divided. ``labels``: for each class, shares from Dirichlet(alpha).
            ``classes``: each client holds ``classes_each`` classes, each class goes in equal parts to its holders.
            ``sizes``: shares of the number of samples from Dirichlet(alpha), classes at random. ``none``: equal parts
            at random.
        client_count: number of clients in each domain, >= 1.
        alpha: concentration, 0.001..1e6; small is uneven.
        classes_each: classes of a client, >= 1.
        samples: number of random samples of each domain that are divided, or all if it has fewer; ``None`` is all.
        least: fewest samples of a client, >= 1; shares are drawn again until every client has them.
    """

    skew: Literal["labels", "classes", "sizes", "none"] = "labels"
    client_count: Count = 3
    alpha: Annotated[float, Field(ge=0.001, le=1e6)] = 0.3
    classes_each: Count = 2
    samples: Count | None = None
    least: Count = 10

    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """Return ``client_count`` clients for each domain."""
        return _numbered(data, dict.fromkeys(data.domains, self.client_count))

    def split(self, domain: Domain, client: ClientSpec, seed: int) -> Tensor:
        """See :meth:`Protocol.split`."""
        self._check(domain, client, self.client_count)
        parts = _once(domain, f"{self!r} {self._seed(seed)}", lambda: self._parts(domain, seed))
        return parts[client.index].sort().values

    def _parts(self, domain: Domain, seed: int) -> list[Tensor]:
        """Return the samples of each client."""
        order = self._order(domain, seed)[: self.samples]
        _check_enough(domain, len(order), self.client_count, self.least)
        labels = domain.train.labels[order]
        draws = numpy_generator(self._seed(seed), "skew", domain.name)
        groups = [order]
        if self.skew in ("labels", "classes"):
            groups = [order[labels == label] for label in labels.unique()]
        if self.skew == "classes":
            cuts = self._class_cuts(domain, groups, draws)
        elif self.skew == "none":
            cuts = [_even_cuts(list(range(self.client_count)), self.client_count, len(order))]
        else:
            cuts = _drawn_cuts(domain, groups, draws, self.alpha, self.client_count, self.least)
        return _divided(groups, cuts, self.client_count)

    def _class_cuts(self, domain: Domain, classes: Sequence[Tensor], draws: np.random.Generator) -> list[np.ndarray]:
        """Return the cuts of each class among its holders."""
        if len(classes) < self.classes_each:
            raise DataError(f"{domain.name} has {len(classes)} classes; set protocol.classes_each to at most as many")
        holders: list[list[int]] = [[] for _ in classes]
        dealt = draws.permutation(len(classes)).tolist()
        for place in range(self.client_count * self.classes_each):
            holders[dealt[place % len(dealt)]].append(place // self.classes_each)
        cuts: list[np.ndarray] = []
        for members, mine in zip(classes, holders, strict=True):
            cuts.append(_even_cuts(mine, self.client_count, len(members)))
        sizes = np.sum([np.diff(cut) for cut in cuts], axis=0)
        if int(sizes.min()) < self.least:
            raise DataError(
                f"{domain.name}: a client would have {int(sizes.min())} samples, and protocol.least={self.least}; "
                "raise protocol.classes_each or protocol.samples, or lower protocol.least"
            )
        return cuts


def _numbered(data: DataSource, counts: Mapping[str, int]) -> tuple[ClientSpec, ...]:
    """Return so many clients of each domain, in the data's order."""
    found: list[ClientSpec] = []
    for domain in data.domains:
        for index in range(counts.get(domain, 0)):
            found.append(ClientSpec(domain, index))
    return tuple(found)


def _check_known(setting: str, names: Iterable[str], data: DataSource) -> None:
    for name in names:
        if name not in data.domains:
            close = nearest(name, data.domains)
            raise ConfigError(f"{setting}: {name!r} is not in data.domains of {data.name}; {close}")


def _check_enough(domain: Domain, available: int, clients: int, least: int) -> None:
    if available < clients * least:
        raise DataError(
            f"{domain.name}: {available} of its train images are divided, and cannot give {clients} clients {least} "
            "each; lower protocol.client_count or protocol.least, or raise protocol.samples if it is set"
        )


def _divided(groups: Sequence[Tensor], cuts: Sequence[np.ndarray], clients: int) -> list[Tensor]:
    """Return the samples of each client, from each group what lies between its cuts."""
    parts: list[Tensor] = []
    for client in range(clients):
        chosen: list[Tensor] = []
        for members, cut in zip(groups, cuts, strict=True):
            chosen.append(members[cut[client] : cut[client + 1]])
        parts.append(torch.cat(chosen))
    return parts


def _drawn_cuts(
    domain: Domain, groups: Sequence[Tensor], draws: np.random.Generator, alpha: float, clients: int, least: int
) -> list[np.ndarray]:
    """Return the cuts of each group of samples, drawn again until each client has ``least`` samples in all."""
    for _ in range(1000):
        cuts: list[np.ndarray] = []
        sizes = np.zeros(clients, dtype=np.int64)
        for members in groups:
            cut = _cuts(draws, alpha, clients, len(members))
            cuts.append(cut)
            sizes += np.diff(cut)
        if int(sizes.min()) >= least:
            return cuts
    raise DataError(
        f"{domain.name}: 1000 draws of Dirichlet({alpha}) left a client with fewer than {least} "
        "samples; raise protocol.alpha, or lower protocol.client_count or protocol.least"
    )


def _even_cuts(holders: Sequence[int], clients: int, count: int) -> np.ndarray:
    """Return the cuts of ``count`` samples in equal parts among ``holders``, in ascending order; others get none."""
    sizes = np.zeros(clients, dtype=np.int64)
    for place, holder in enumerate(sorted(holders)):
        sizes[holder] = (place + 1) * count // len(holders) - place * count // len(holders)
    return np.concatenate([[0], np.cumsum(sizes)])


def share(domain: Domain, fraction: float) -> int:
    """Return ``fraction`` of the number of a domain's train images, rounded down, at least one.

    0.29 * 100 is 28.999... in floating point and counts as 29.

    Raises:
        DataError: the fraction is less than one image.
    """
    count = int(fraction * len(domain.train) + 1e-9)
    if not count:
        raise DataError(
            f"{domain.name}: {fraction} of its {len(domain.train)} train images is less than one; take a larger share"
        )
    return count


def test_hash(domain: Domain) -> str:
    """Return the SHA-256 (hex) of the pixels and labels of a domain's test split."""
    return _once(domain, "test_hash", lambda: content_hash(domain.test, str(domain.test.labels.tolist())))


def test_subset(split: Split, samples: int | None, domain: str) -> Split:
    """Return at most ``samples`` random samples of a test split, the same in every run; all of them for ``None``."""
    if samples is None or samples >= len(split):
        return split
    order = torch.randperm(len(split), generator=generator(0, "test subset", domain))
    return split.subset(order[:samples].sort().values)


def _once(domain: Domain, key: str, make: Callable[[], T]) -> T:
    """Return what ``make`` returns, computed once for all clients of a domain instead of once for each."""
    if key not in domain.partitions:
        domain.partitions[key] = make()
    found: T = domain.partitions[key]
    return found


def _with_every_class(parts: list[Tensor], free: Tensor, labels: Tensor) -> list[Tensor]:
    """Return ``parts`` after exchanging samples until each part has every class, as far as the samples suffice."""
    pool = free.tolist()
    held = [part.tolist() for part in parts]
    label_of = labels.tolist()
    for mine in held:
        others = [each for each in held if each is not mine]
        for label in sorted(set(label_of)):
            classes = [label_of[index] for index in mine]
            spare = _last_repeated(classes)
            if label in classes or spare is None:
                continue
            for other in (pool, *others):
                places = [place for place, index in enumerate(other) if label_of[index] == label]
                if places and (other is pool or len(places) > 1):
                    mine[spare], other[places[0]] = other[places[0]], mine[spare]
                    break
    return [torch.tensor(part, dtype=torch.int64) for part in held]


def _last_repeated(classes: Sequence[int]) -> int | None:
    """Return the last position with a class that occurs more than once; ``None`` if no class does."""
    for place in reversed(range(len(classes))):
        if classes.count(classes[place]) > 1:
            return place
    return None


def _cuts(draws: np.random.Generator, alpha: float, clients: int, count: int) -> np.ndarray:
    """Return the cuts of one class's ``count`` samples among ``clients`` clients: int64 [clients + 1], 0 to count."""
    shares = draws.dirichlet(np.full(clients, alpha))
    inner = (np.cumsum(shares)[:-1] * count).astype(np.int64)
    return np.concatenate([[0], np.minimum(inner, count), [count]])
