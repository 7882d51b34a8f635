"""Prototypes over rounds: a map of them in the plane, their number, their drift, and the distances between domains."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.prototypes import unbiased_prototypes
from server.results.embedding import Matrix, embed_by_pca, embed_by_tsne, unit_rows
from server.results.run import Run
from server.run.prototype_log import Page

MAX_POINTS = 400
"""Largest number of points of one round on the map; of more, evenly spaced ones are drawn."""

MAX_TSNE = 800
"""Largest number of points that t-SNE places together; of more, evenly spaced rounds are placed."""

MIN_TSNE = 8
"""Fewest points that t-SNE places."""

Points = dict[str, list[float]]
"""``x`` and ``y`` of the points of one round."""


def _pages_with_prototypes(record: Run) -> list[Page]:
    return [page for page in record.pages if len(page.uploaded) or len(page.prototypes)]


def _client_domains(record: Run) -> dict[str, str]:
    return {client: str(entry["domain"]) for client, entry in record.registrations.items()}


def prototype_map(record: Run, *, tsne: bool = False) -> dict[str, Any] | None:
    """Place the prototypes of all kept rounds in the plane together, so that rounds may be compared.

    Vectors are scaled to unit length first, since the losses compare directions.

    Args:
        record: the run.
        tsne: whether to place them by t-SNE as well as by PCA.

    Returns:
        ``rounds``; ``owners`` (``client`` and ``domain`` by index); ``frames``, which has for each round ``class``,
        ``owner`` (-1 is the global set) and ``weight`` of each point; and ``places``, which has for each projection
        the points' ``x`` and ``y`` in [0, 1] by round. ``None`` if the run kept no prototypes.
    """
    pages = _pages_with_prototypes(record)
    if not pages:
        return None
    names: set[str] = set()
    for page in pages:
        names.update(page.clients)
    clients = sorted(names)
    rounds, frames, blocks = [], [], []
    for page in pages:
        rounds.append(page.round)
        vectors, labels, senders, weights = _points(page, clients)
        blocks.append(unit_rows(vectors))
        frames.append({"class": labels.tolist(), "owner": senders.tolist(), "weight": np.round(weights, 2).tolist()})
    places: dict[str, dict[str, Any]] = {}
    flat = np.concatenate(blocks)
    if len(flat) >= 2:
        points, variance = embed_by_pca(flat)
        placed = _by_round(_in_unit_square(points), blocks)
        places["PCA"] = {"frames": placed, "note": f"{100 * variance:.0f} % of the variance"}
    if tsne:
        found = _tsne(blocks)
        if found is not None:
            places["t-SNE"] = {"frames": found, "note": "distances between far groups mean little"}
    domains = _client_domains(record)
    owners = [{"client": client, "domain": domains.get(client, "")} for client in clients]
    return {
        "rounds": rounds,
        "owners": owners,
        "frames": frames,
        "places": places,
    }


def _points(page: Page, clients: Sequence[str]) -> tuple[Tensor, NDArray[np.int64], NDArray[np.int64], Matrix]:
    """Return vectors, classes, owners and weights of a round's points: uploaded rows first, then the global ones.

    Of more than ``MAX_POINTS``, evenly spaced ones are returned.
    """
    positions = np.array([clients.index(client) for client in page.clients], dtype=np.int64)
    senders = positions[page.owners.numpy().astype(np.int64)]
    vectors, labels, owners, weights = [], [], [], []
    for part, owner in ((page.uploaded, senders), (page.prototypes, np.full(len(page.prototypes), -1))):
        if len(part):
            chosen = slice(None, None, -(-len(part) // (MAX_POINTS // 2)))
            vectors.append(part.vectors[chosen])
            labels.append(part.labels.numpy()[chosen])
            owners.append(owner[chosen])
            weights.append(part.weights.double().numpy()[chosen])
    return torch.cat(vectors), np.concatenate(labels), np.concatenate(owners), np.concatenate(weights)


def _tsne(blocks: Sequence[Matrix]) -> list[Points | None] | None:
    """Place rounds by t-SNE; a round that was left out is ``None``.

    Returns:
        ``None`` if there are too few points, or they do not differ.
    """
    step = 1
    while sum(map(len, blocks[::step])) > MAX_TSNE:
        step += 1
    chosen = sorted({*range(0, len(blocks), step), len(blocks) - 1})
    used = [blocks[index] for index in chosen]
    flat = np.concatenate(used)
    if len(flat) < MIN_TSNE:
        return None
    points = embed_by_tsne(flat)
    if points is None:
        return None
    found: list[Points | None] = [None] * len(blocks)
    for index, frame in zip(chosen, _by_round(_in_unit_square(points), used), strict=True):
        found[index] = frame
    return found


def _in_unit_square(points: Matrix) -> Matrix:
    """Scale points ``[N, 1 or 2]`` into the unit square, centred, with one scale for both axes."""
    if points.shape[1] < 2:
        points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    low, high = points.min(0), points.max(0)
    size = max(float((high - low).max()), 1e-12)
    return (points - (low + high) / 2) / size + 0.5


def _by_round(points: Matrix, blocks: Sequence[Matrix]) -> list[Points]:
    """Split ``points``, one row per row of all ``blocks``, into those of each block."""
    rounded = np.round(points, 4)
    found: list[Points] = []
    start = 0
    for block in blocks:
        part = rounded[start : start + len(block)]
        found.append({"x": part[:, 0].tolist(), "y": part[:, 1].tolist()})
        start += len(block)
    return found


def prototype_numbers(record: Run) -> dict[str, Any] | None:
    """Return count, drift and distances of prototypes, one value per kept round.

    Returns:
        ``rounds``; ``count``, the rows of the global set; ``drift``, the cosine distance of a class's mean from the
        same mean in the round before, averaged over classes; ``domains``, the mean cosine distance between the means
        of different domains for the same class, which falls as domains come to agree; ``classes``, the same between
        different classes of one domain, which should not fall. ``None`` if the run kept no prototypes.
    """
    pages = _pages_with_prototypes(record)
    if not pages:
        return None
    domains = _client_domains(record)
    numbers: dict[str, Any] = {"rounds": [], "count": [], "drift": [], "domains": [], "classes": []}
    before: dict[int, Matrix] = {}
    for page in pages:
        prototypes = page.prototypes
        if not len(prototypes):
            prototypes = page.uploaded
        sets = unbiased_prototypes(prototypes)
        means: dict[int, Matrix] = dict(zip(sets.labels.tolist(), unit_rows(sets.vectors), strict=True))
        moved: list[float] = []
        for label, mean in means.items():
            if label in before:
                moved.append(1 - float(mean @ before[label]))
        before = means
        between_domains, between_classes = _distances(page, domains)
        numbers["rounds"].append(page.round)
        numbers["count"].append(len(page.prototypes))
        numbers["drift"].append(_mean(moved))
        numbers["domains"].append(_mean(between_domains))
        numbers["classes"].append(_mean(between_classes))
    return numbers


def _distances(page: Page, domains: Mapping[str, str]) -> tuple[list[float], list[float]]:
    """Return cosine distances between means: of two domains for one class, and of two classes in one domain."""
    sums: dict[tuple[str, int], Matrix] = {}
    rows = unit_rows(page.uploaded.vectors)
    for row, label, owner in zip(rows, page.uploaded.labels.tolist(), page.owners.tolist(), strict=True):
        client = page.clients[owner]
        key = (domains.get(client, client), int(label))
        sums[key] = sums.get(key, 0) + row
    units: dict[tuple[str, int], Matrix] = {}
    for key, total in sums.items():
        units[key] = total / max(float(np.linalg.norm(total)), 1e-12)
    between_domains: list[float] = []
    between_classes: list[float] = []
    for first, second in itertools.combinations(sorted(units), 2):
        distance = 1 - float(units[first] @ units[second])
        if first[1] == second[1]:
            between_domains.append(distance)
        if first[0] == second[0]:
            between_classes.append(distance)
    return between_domains, between_classes


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return round(float(np.mean(values)), 5)
