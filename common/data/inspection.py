"""Checks of the images of a run: copies in two places, images with two labels, and images that no client holds."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.data.batches import Augmentation, Split
from common.data.domain import DataSource, Domain
from common.data.protocols import ClientSpec, Protocol, scored_split
from common.data.value_ranges import sliver_of
from common.errors import ConfigError, DataError, nearest, some_of
from common.privacy import GaussianPrivacy, NoPrivacy
from common.text import quantity, warn_once

BLOCK = 4096
"""Images that are hashed at a time."""

MAX_NAMED = 5
"""Names in one message."""

CALLED = {"scored": "test", "validation": "validation"}
"""What messages call images that a run scores, by their use."""


@dataclass(frozen=True)
class Place:
    """Where an image is.

    Args:
        domain: its domain.
        use: ``training``, ``validation``, ``scored`` or ``unused``.
        label: its label.
        name: what messages call it.
    """

    domain: str
    use: str
    label: int
    name: str


@dataclass(frozen=True)
class UsedImages:
    """Images of a domain, and what a run does with them.

    Args:
        name: ``train`` or ``test``.
        split: the images.
        files: their paths; empty without.
        uses: of each image, see :class:`Place`.
    """

    name: str
    split: Split
    files: Sequence[Path]
    uses: Sequence[str]


def inspect(
    source: DataSource,
    domains: Sequence[str],
    protocol: Protocol | None = None,
    seed: int = 0,
    *,
    private: bool = False,
) -> None:
    """Read all domains of a simulation and compare them.

    Args:
        source: the data set.
        domains: the domains that the run uses.
        protocol: as for :func:`compare_images`.
        seed: likewise.
        private: likewise.

    Raises:
        DataError: a domain cannot be read, with the errors of all of them; or see :func:`compare_images`.
    """
    found: list[Domain] = []
    errors: list[str] = []
    for name in domains:
        try:
            found.append(source.load(name))
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("; ".join(dict.fromkeys(errors)))
    compare_images(source, found, protocol, seed, private=private)


def inspect_all(
    source: DataSource, protocol: Protocol, seed: int, privacy: GaussianPrivacy | NoPrivacy | None = None
) -> None:
    """Read and compare the domains that a protocol uses (:func:`inspect`), and say what no client holds of them.

    Args:
        source: the data set.
        protocol: its clients and test domains.
        seed: the run's seed.
        privacy: the run's. Where it protects groups, each must be of one domain; see :func:`check_shared_groups`.

    Raises:
        DataError: see :func:`inspect`; or two clients hold images of a group.
    """
    used = {client.domain for client in protocol.clients(source)} | set(protocol.test_domains(source))
    names = [domain for domain in source.domains if domain in used]
    private = isinstance(privacy, GaussianPrivacy)
    inspect(source, names, protocol, seed, private=private)
    if not source.generated:
        unit = privacy.unit if isinstance(privacy, GaussianPrivacy) else ""
        check_shared_groups(source, [source.load(name) for name in names], protocol, refuse=unit == "group")
    if line := uneven_holdings(source, protocol, seed):
        warn_once(line)


def inspect_own(source: DataSource, protocol: Protocol, seed: int, domain: Domain, *, private: bool) -> None:
    """Check the domain of a device, which has no other: what it holds of groups and copies.

    Args:
        source: the data set.
        protocol: the run's.
        seed: the run's seed.
        domain: the device's.
        private: whether nothing may be said of the images. Then they are not compared.

    Raises:
        DataError: see :func:`check_groups` and :func:`compare_images`.
    """
    check_groups(source, protocol, domain, seed)
    if not private:
        compare_images(source, [domain], protocol, seed)


def check_clients(data: DataSource, protocol: Protocol) -> None:
    """Refuse a protocol without clients, with one of them twice, or that scores what is no domain.

    Server and devices check this where they build settings; nothing is read.

    Raises:
        DataError: the protocol is one of these.
    """
    name = type(protocol).__name__
    ids = [client.id for client in protocol.clients(data)]
    twice = [client for client, count in Counter(ids).items() if count > 1]
    if not ids or twice:
        found = f"has {twice[0]} twice" if twice else "is empty"
        raise DataError(
            f"{name}.clients {found}; it must have each client once: ClientSpec(domain, 0), (domain, 1) ..."
        )
    scored = protocol.test_domains(data)
    if not scored:
        raise DataError(f"{name}.test_domains is empty; it must have the domains that are scored")
    for domain in scored:
        if domain not in data.domains:
            raise DataError(
                f"{name}.test_domains has {domain!r}, no domain of the data; {nearest(domain, data.domains)}"
            )


def check_groups(data: DataSource, protocol: Protocol, domain: Domain, seed: int) -> None:
    """Refuse a protocol that gives images of one group, such as a patient, to two clients.

    Each of the two would protect the group by itself, and neither knows what the other reveals of it.

    Args:
        data: the data set.
        protocol: its clients of the domain are compared.
        domain: the domain that is divided.
        seed: the run's seed.

    Raises:
        DataError: two clients hold images of a group.
    """
    if not domain.train_groups:
        return
    holders: dict[str, ClientSpec] = {}
    for client in protocol.clients(data):
        if client.domain != domain.name:
            continue
        for index in protocol.held(domain, client, seed).tolist():
            group = domain.train_groups[index]
            holder = holders.setdefault(group, client)
            if holder != client:
                raise DataError(
                    f"the protocol gives images of the group {group!r} (data.group) to {holder.id} and to {client.id}; "
                    "a group has one holder: choose protocol=one_per_domain, with a domain for each client in the "
                    "table's column of domains, or leave out data.group"
                )


def uneven_holdings(data: DataSource, protocol: Protocol, seed: int) -> str:
    """Return how many training images of a domain no client holds, and how many several hold; empty if each has one.

    Of those that no client holds, the classes that are lost are named, too.

    Args:
        data: the data set.
        protocol: its clients' domains are read.
        seed: the run's seed.
    """
    clients: dict[str, list[ClientSpec]] = {}
    for client in protocol.clients(data):
        clients.setdefault(client.domain, []).append(client)
    by_none: list[str] = []
    by_several: list[str] = []
    for name, of_domain in clients.items():
        domain = data.load(name)
        try:
            parts = [protocol.held(domain, client, seed) for client in of_domain]
        except DataError:  # a client that cannot be made says so itself
            continue
        check_groups(data, protocol, domain, seed)
        labels = domain.train.labels
        held, holders = torch.cat(parts).unique(return_counts=True)
        if several := int((holders > 1).sum()):
            by_several.append(f"{name} {several:,}")
        if len(held) == len(labels):
            continue
        text = f"{name} {len(labels) - len(held):,} of {len(labels):,}"
        lost = sorted(set(labels.tolist()) - set(labels[held].tolist()))
        if lost:
            text += f" (all of {some_of([str(data.class_names[label]) for label in lost])})"
        by_none.append(text)
    notes: list[str] = []
    if by_none:
        notes.append(f"training images that no client holds, by this protocol: {'; '.join(by_none)}")
    if by_several:
        notes.append(f"training images that two or more clients hold, by this protocol: {'; '.join(by_several)}")
    return "\n".join(notes)


def check_shared_groups(source: DataSource, domains: Sequence[Domain], protocol: Protocol, *, refuse: bool) -> None:
    """Say which groups, such as patients, have images in two domains: trained on in one, held or scored in another.

    Args:
        source: the data set.
        domains: all that the run uses.
        protocol: its clients and test images.
        refuse: whether the group is the unit of privacy. Each of two clients would protect it by itself, and neither
            knows what the other reveals.

    Raises:
        DataError: there are such groups, and ``refuse``.
    """
    trained = {client.domain for client in protocol.clients(source)}
    held: dict[str, set[str]] = {}
    scored: dict[str, set[str]] = {}
    for domain in domains:
        if domain.name in trained:
            held[domain.name] = set(domain.train_groups)
        if domain.name in protocol.test_domains(source):
            scored[domain.name] = set(domain.test_groups)
            if protocol.test_split(domain) is domain.whole:
                scored[domain.name] |= set(domain.train_groups)
    two_holders: dict[str, str] = {}
    leaked: dict[str, str] = {}
    for first, groups in held.items():
        for second in domains:
            if second.name == first:
                continue
            both = f"{first} and {second.name}"
            two_holders |= dict.fromkeys(sorted(groups & held.get(second.name, set())), both)
            leaked |= dict.fromkeys(sorted(groups & scored.get(second.name, set())), both)
    if not two_holders and not leaked:
        return
    example, places = next(iter({**leaked, **two_holders}.items()))
    message = (
        f"{source.name}: data.group: {quantity(len(two_holders), 'group')} with training images of two domains, and "
        f"{len(leaked)} trained on in one domain and scored in another, such as {example!r} of {places}. "
        "Keep each group in one domain; if these are different groups of one name, give each a name of its own"
    )
    if refuse:
        raise DataError(f"{message}. privacy.unit=group needs it")
    warn_once(message)


def compare_images(
    source: DataSource,
    domains: Sequence[Domain],
    protocol: Protocol | None = None,
    seed: int = 0,
    *,
    private: bool = False,
) -> None:
    """Find images with equal pixels, and values in a small part of the range.

    Args:
        source: the data set. Its ``on_duplicates`` says what becomes of test images that are training images.
        domains: all domains of a simulation, or the one of a device.
        protocol: says which domains are trained on, and which images validate and are scored; ``None``: all domains
            are trained on, and their test splits are scored.
        seed: the run's seed.
        private: whether no decision may depend on training images. Then every finding is a warning.

    Raises:
        DataError: two domains hold the same images; an image of the user's own has two labels; or a test image is a
            training image, and ``data.duplicates=refuse``.
    """
    for domain in domains:
        if sliver := sliver_of(domain.train.images.numpy()):
            low, high = sliver
            warn_once(
                f"{source.name}: the training images of {domain.name} have only values {low} to {high} of 0 to 255"
            )
    parts: list[tuple[str, UsedImages]] = []
    for domain in domains:
        for part in _parts(source, domain, protocol, seed):
            parts.append((domain.name, part))
    by_content = _places(parts)
    several = [places for places in by_content.values() if len(places) > 1]
    refused = _same_domains(by_content)
    warnings: list[str] = []
    labels = _two_labels(source, several)
    if source.own_images:
        refused += labels
    else:
        warnings += labels
    copies = _trained_and_scored(source, several)
    if source.on_duplicates == "refuse":
        refused += copies
    else:
        warnings += copies
    if refused and not private:
        raise DataError("; ".join(f"{source.name}: {message}" for message in refused))
    for message in [*refused, *warnings]:
        warn_once(f"{source.name}: {message}")


def _parts(source: DataSource, domain: Domain, protocol: Protocol | None, seed: int) -> list[UsedImages]:
    """Return the images of a domain with their uses; an image that is trained on and scored is in two parts."""
    uses = ["training"] * len(domain.train)
    scored, on_test = domain.test, "scored"
    more: list[UsedImages] = []
    if protocol is not None:
        clients = [client for client in protocol.clients(source) if client.domain == domain.name]
        uses = _uses(domain, clients, protocol, seed)
        if domain.name not in protocol.test_domains(source):
            on_test = "unused"
        else:
            scored = scored_split(protocol, domain)
        if scored is domain.whole and not clients:
            uses = ["scored"] * len(uses)
        elif scored is not domain.test:
            more.append(UsedImages("scored", scored, (), ["scored"] * len(scored)))
            on_test = "unused"
    train = UsedImages("train", domain.train, domain.train_files, uses)
    return [train, UsedImages("test", domain.test, domain.test_files, [on_test] * len(domain.test)), *more]


def _uses(domain: Domain, clients: Sequence[ClientSpec], protocol: Protocol, seed: int) -> list[str]:
    """Return the use of each image of a domain's train split."""
    if not clients:
        return ["unused"] * len(domain.train)
    uses = ["training"] * len(domain.train)
    for client in clients:
        if not protocol.validation:
            continue
        try:
            _, validated = protocol.parts(domain, client, seed)
        except DataError:  # a client that cannot be made says so itself
            continue
        for index in validated.tolist():
            uses[index] = "validation"
    return uses


def _places(parts: Sequence[tuple[str, UsedImages]]) -> dict[bytes, list[Place]]:
    """Return where each image is, by a hash of its pixels.

    Args:
        parts: each with the name of its domain.
    """
    found: defaultdict[bytes, list[Place]] = defaultdict(list)
    for domain, part in parts:
        labels = part.split.labels.tolist()
        for index, digest in enumerate(_digests(part.split)):
            name = _name(domain, part.name, index, part.files)
            found[digest].append(Place(domain, part.uses[index], labels[index], name))
    return found


def _digests(split: Split) -> Iterator[bytes]:
    for block in split.images.split(BLOCK):
        for image in block.contiguous().numpy():
            yield hashlib.blake2b(image.data, digest_size=16).digest()


def _name(domain: str, part: str, index: int, files: Sequence[Path]) -> str:
    if files:
        return str(files[index])
    return f"{part} image {index} of {domain}"


def _same_domains(by_content: Mapping[bytes, Sequence[Place]]) -> list[str]:
    """Return a message for each two domains of which one has only images that the other has too."""
    sizes: Counter[str] = Counter()
    shared: Counter[tuple[str, str]] = Counter()
    for places in by_content.values():
        names = sorted({place.domain for place in places})
        sizes.update(names)
        for first in names:
            shared.update((first, second) for second in names if second > first)
    found: list[str] = []
    for (first, second), count in shared.items():
        if count == min(sizes[first], sizes[second]):
            found.append(
                f"the domains {first} and {second} hold the same {count} images; give each its own folder, or leave "
                "one out of data.domains"
            )
    return found


def _two_labels(source: DataSource, several: Sequence[Sequence[Place]]) -> list[str]:
    """Return a message about images that are in two classes; none if there are no such images."""
    count = 0
    example = ""
    for places in several:
        other = next((place for place in places if place.label != places[0].label), None)
        if other is None:
            continue
        count += 1
        names = source.class_names
        example = example or (
            f"{places[0].name} is {names[places[0].label]!r} and {other.name} is {names[other.label]!r}"
        )
    if not count:
        return []
    return [
        f"{quantity(count, 'image')} with two labels: {example}. Keep each image in the one class that it belongs to"
    ]


def _trained_and_scored(source: DataSource, several: Sequence[Sequence[Place]]) -> list[str]:
    """Return messages about test and validation images that are training images, of their own domain and of others."""
    counts: defaultdict[tuple[str, bool], Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, bool], str] = {}
    for places in several:
        trained = {place.domain: place for place in places if place.use == "training"}
        for place in places:
            if place.use not in CALLED or not trained:
                continue
            key = place.use, place.domain in trained
            counts[key][place.domain] += 1
            original = trained.get(place.domain) or next(iter(trained.values()))
            examples.setdefault(key, f"{place.name} equals {original.name}")
    messages: list[str] = []
    for use, within in sorted(counts):
        found = counts[use, within]
        where, advice = "of one domain are training images of another", "; keep each image at one site"
        if within:
            where, advice = "are also training images of their domain", ""
        if within and use == "validation":
            advice = "; keep one of the copies, or set protocol.validation=0"
        elif within and source.on_duplicates == "warn":
            advice = "; data.duplicates=drop leaves out those of equal bytes"
        messages.append(
            f"{found.total():,} {CALLED[use]} images {where} ({_counts(found)}), so scores are of images that were "
            f"trained on: {examples[use, within]}{advice}"
        )
    return messages


def _counts(counts: Counter[str]) -> str:
    return some_of([f"{domain} {count:,}" for domain, count in counts.most_common()], MAX_NAMED)


def say_normalisation(data: DataSource, target: str) -> None:
    """Log that images are normalised by ImageNet's mean and deviation, if nobody chose it.

    Args:
        data: the data set.
        target: the name of its class, for the message.
    """
    default, used = Augmentation(), data.augmentation
    if (used.mean, used.std, used.normalisation) == (default.mean, default.std, default.normalisation):
        warn_once(
            f"{target}: images are normalised by ImageNet's mean and standard deviation, the default of "
            "data.augmentation; if they are not photographs, set data.augmentation.normalisation=image (each image by "
            "its own), or data.augmentation.mean and std"
        )


def check_test_images(data: DataSource, privacy: GaussianPrivacy | NoPrivacy) -> None:
    """Refuse a private run whose training images decide which images are scored.

    Raises:
        ConfigError: they do; the message names the setting.
    """
    if isinstance(privacy, GaussianPrivacy) and data.test_follows_training:
        raise ConfigError(
            f"{data.test_follows_training}: training images would decide which images are scored, so the number of "
            "scored images would tell of them without noise, and privacy=gaussian refuses it; remove copies from the "
            "data themselves and leave the setting out, or choose privacy=none"
        )
