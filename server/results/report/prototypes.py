"""Prototypes over rounds: a map of them in the plane, how many there are, how far they move, how domains agree."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from common.prototypes import unbiased_prototypes
from server.results.run import Run
from server.run.prototype_log import Page

MAX_POINTS = 400
"""Points of one round on the map; of more, evenly spaced ones are drawn."""

MAX_TSNE = 800
"""Points that t-SNE places together; rounds are thinned until they are no more."""

Matrix = NDArray[np.float64]


def prototype_map(record: Run, *, tsne: bool = False) -> dict[str, Any] | None:
    """Coordinates of every kept round's prototypes, all placed together, so that rounds may be compared.

    Vectors are brought to unit length first, since the losses compare directions. ``None`` if there are no prototypes.

    Returns:
        ``rounds``, ``owners`` (``client`` and ``domain`` by index), ``frames`` (per round ``class``, ``owner``, -1 the
        global set, and ``weight``), and ``places`` by projection: per round the points' ``x`` and ``y`` in [0, 1].
    """
    pages = [page for page in record.pages if len(page.uploaded) or len(page.prototypes)]
    if not pages:
        return None
    clients = sorted({client for page in pages for client in page.clients})
    frames, blocks = [], []
    for page in pages:
        vectors, labels, owners, weights = _points(page, clients)
        blocks.append(_unit(vectors))
        frames.append({"class": labels.tolist(), "owner": owners.tolist(), "weight": np.round(weights, 2).tolist()})
    domains = {client: str(entry["domain"]) for client, entry in record.registrations.items()}
    flat = np.concatenate(blocks)
    places = {}
    if len(flat) >= 2:
        components = min(2, *flat.shape)
        model = PCA(components, random_state=0).fit(flat)
        places["PCA"] = {
            "frames": _split(_square(model.transform(flat)), blocks),
            "note": f"{100 * float(np.nan_to_num(model.explained_variance_ratio_).sum()):.0f} % of the variance",
        }
    if tsne:
        step = 1
        while sum(len(block) for block in blocks[::step]) > MAX_TSNE:
            step += 1
        chosen = sorted({*range(0, len(blocks), step), len(blocks) - 1})
        placed = _tsne([blocks[index] for index in chosen])
        if placed is not None:
            empty: list[Any] = [None] * len(blocks)
            for index, frame in zip(chosen, placed, strict=True):
                empty[index] = frame
            places["t-SNE"] = {"frames": empty, "note": "distances between far groups mean little"}
    return {
        "rounds": [page.round for page in pages],
        "owners": [{"client": client, "domain": domains.get(client, "")} for client in clients],
        "frames": frames,
        "places": places,
    }


def _points(page: Page, clients: Sequence[str]) -> tuple[Matrix, NDArray[np.int64], NDArray[np.int64], Matrix]:
    """Uploaded rows, then the global ones, thinned to ``MAX_POINTS``: vectors, classes, owners, weights."""
    positions = np.array([clients.index(client) for client in page.clients], dtype=np.int64)
    owners = positions[page.owners.numpy()] if len(page.owners) else np.zeros(0, np.int64)
    parts = [(page.uploaded, owners), (page.prototypes, np.full(len(page.prototypes), -1))]
    kept = []
    for part, owner in parts:
        if len(part):
            step = -(-len(part) // (MAX_POINTS // 2))
            columns = (part.vectors.double().numpy(), part.labels.numpy(), owner, part.weights.double().numpy())
            kept.append([column[::step] for column in columns])
    vectors, labels, owned, weights = (np.concatenate(column) for column in zip(*kept, strict=True))
    return vectors, labels, owned, weights


def _unit(vectors: Matrix) -> Matrix:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _tsne(blocks: Sequence[Matrix]) -> list[Any] | None:
    flat = np.concatenate(blocks)
    if len(flat) < 8:
        return None
    reduced = PCA(min(30, *flat.shape), random_state=0).fit_transform(flat)
    if not np.isfinite(reduced).all() or float(np.ptp(reduced[:, 0])) < 1e-9:
        return None
    perplexity = min(30.0, (len(flat) - 1) / 3)
    return _split(_square(TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(reduced)), blocks)


def _square(points: Matrix) -> Matrix:
    """Into the unit square, one scale for both axes, centred."""
    if points.shape[1] < 2:
        points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    low, high = points.min(0), points.max(0)
    size = max(float((high - low).max()), 1e-12)
    return (points - (low + high) / 2) / size + 0.5


def _split(points: Matrix, blocks: Sequence[Matrix]) -> list[Any]:
    edges = np.cumsum([0] + [len(block) for block in blocks])
    rounded = np.round(points, 4)
    return [
        {"x": rounded[start:end, 0].tolist(), "y": rounded[start:end, 1].tolist()}
        for start, end in itertools.pairwise(edges)
    ]


def prototype_numbers(record: Run) -> dict[str, Any] | None:
    """Counts, drift and agreement of prototypes over the kept rounds.

    ``count``: rows of the global set. ``drift``: mean over classes of the cosine distance of the class's mean from the
    kept round before. ``domains``: mean cosine distance between different domains' means of the same class, which falls
    as domains come to agree; ``classes``: the same between different classes of one domain, which should not.
    """
    pages = [page for page in record.pages if len(page.uploaded) or len(page.prototypes)]
    if not pages:
        return None
    domains = {client: str(entry["domain"]) for client, entry in record.registrations.items()}
    numbers: dict[str, Any] = {key: [] for key in ("rounds", "count", "drift", "domains", "classes")}
    before: dict[int, Matrix] = {}
    for page in pages:
        sets = unbiased_prototypes(page.prototypes if len(page.prototypes) else page.uploaded)
        means = dict(zip(sets.labels.tolist(), _unit(sets.vectors.double().numpy()), strict=True))
        moved = [1 - float(means[label] @ before[label]) for label in means if label in before]
        before = means
        apart, spread = _agreement(page, domains)
        numbers["rounds"].append(page.round)
        numbers["count"].append(len(page.prototypes))
        numbers["drift"].append(_mean(moved))
        numbers["domains"].append(apart)
        numbers["classes"].append(spread)
    return numbers


def _agreement(page: Page, domains: dict[str, str]) -> tuple[float | None, float | None]:
    sums: dict[tuple[str, int], Matrix] = {}
    rows = _unit(page.uploaded.vectors.double().numpy())
    for row, label, owner in zip(rows, page.uploaded.labels.tolist(), page.owners.tolist(), strict=True):
        key = (domains.get(page.clients[owner], page.clients[owner]), int(label))
        sums[key] = sums.get(key, 0) + row
    unit = {key: value / max(float(np.linalg.norm(value)), 1e-12) for key, value in sums.items()}
    pairs = list(itertools.combinations(sorted(unit), 2))
    same_class, same_domain = ([1 - float(unit[a] @ unit[b]) for a, b in pairs if a[i] == b[i]] for i in (1, 0))
    return _mean(same_class), _mean(same_domain)


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 5) if values else None
