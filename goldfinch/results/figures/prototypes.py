"""Prototypes in the plane, with the class means that clients sent and features of test images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from common.errors import ConfigError, nearest
from common.prototypes import PrototypeSet
from goldfinch.record import RunRecord
from goldfinch.results.embedding import embed_by_pca, embed_by_tsne, unit_rows
from goldfinch.results.figures.charts import CLASS_COLOURS, MARKERS, new_figure
from goldfinch.run_model import RunModel
from server.run.prototype_log import Page

PROJECTIONS = ("tsne", "pca")
"""How vectors are placed in the plane, the default first."""

MAX_PANELS = 6
MAX_SENT = 3
"""Rounds in a figure of what was sent alone."""


@dataclass(frozen=True)
class Panel:
    """Points of one panel, in two dimensions.

    Args:
        points: ``[N, 2]`` of features.
        labels: ``[N]`` classes.
        domains: ``[N]`` index into the figure's domains.
        prototypes: ``[M, 2]``.
        prototype_labels: ``[M]`` classes.
    """

    title: str
    points: np.ndarray
    labels: np.ndarray
    domains: np.ndarray
    prototypes: np.ndarray
    prototype_labels: np.ndarray


def embed(sets: Sequence[Tensor], by: str = "tsne") -> tuple[list[np.ndarray], str]:
    """Place all vectors together in the plane, so that places can be compared between panels.

    Rows are put at unit length first, since the methods compare by angle.

    Args:
        sets: ``[N, D]`` each; N may be 0.
        by: one of :data:`PROJECTIONS`.

    Returns:
        ``[N, 2]`` for each of the ``sets``, and the projection's name for a title.

    Raises:
        ConfigError: there is no such projection; there are fewer than four points, or they are not finite or do not
            differ.
    """
    if by not in PROJECTIONS:
        raise ConfigError(f"--by {by}: no such projection; {nearest(by, PROJECTIONS)}")
    sizes = [len(vectors) for vectors in sets]
    if sum(sizes) < 4:
        raise ConfigError(f"a map needs four points or more; got {sum(sizes)}")
    rows = unit_rows(torch.cat([vectors for vectors in sets if len(vectors)]))
    if not np.isfinite(rows).all() or float(np.ptp(rows, axis=0).max()) < 1e-9:
        raise ConfigError("a map needs finite features that differ; the network gives the same for all images")
    if by == "tsne":
        placed, name = embed_by_tsne(rows), "t-SNE by cosine"
    else:
        placed, explained = embed_by_pca(rows)
        name = f"PCA of unit vectors, {100 * explained:.0f} % of the variance"
    return np.split(placed, np.cumsum(sizes)[:-1]), name


def prototype_figure(run: RunModel, by: str = "tsne", per_domain: int = 100, title: str | None = None) -> Figure:
    """Draw features by class (colour) and domain (marker), prototypes as stars, in one panel a round, up to six.

    The last panel has test features of the final model. A run keeps no model of an earlier round, so that round's panel
    has what is kept of its features: the class means that clients sent. All lie in one embedding. Without prototypes,
    there is the last panel alone.

    Args:
        run: its model and data must be on this machine, unless ``per_domain`` is 0.
        by: one of :data:`PROJECTIONS`.
        per_domain: test images of each domain; 0 leaves the panel of test features out, and three rounds are drawn.
        title: replaces method and data; empty leaves them out.

    Raises:
        ConfigError: the vectors cannot be placed, see :func:`embed`; the run kept none, and ``per_domain`` is 0.
        CheckpointError: the run's model is gone.
    """
    record = run.record
    if title is None:
        title = f"{record.facts.method} on {record.facts.data}"
    if per_domain == 0:
        pages = _evenly([page for page in run.pages if len(page.uploaded) + len(page.prototypes)], MAX_SENT)
        placed, projection = embed(_vectors(pages), by)
        panels = _sent_panels(pages, placed, record, record.domains)
        return draw_map(panels, record.domains, record.class_names, _heading(title, projection))
    domains = run.test_domains
    features, labels, places = [], [], []
    for index, domain in enumerate(domains):
        split = run.sample(domain, per_domain)
        features.append(run.features(run.model_for(domain), split)[0])
        labels.append(split.labels)
        places += [index] * len(split)
    tested = torch.cat(features)
    state = run.checkpoint.state
    final = PrototypeSet.empty(tested.shape[1])
    if state.prototypes.feature_size == tested.shape[1]:
        final = state.prototypes
    earlier = []
    for page in run.pages:
        if page.round < state.round and len(page.prototypes) and _sizes(page) == {tested.shape[1]}:
            earlier.append(page)
    earlier = _evenly(earlier, MAX_PANELS - 1)
    placed, projection = embed([*_vectors(earlier), tested, final.vectors], by)
    panels = _sent_panels(earlier, placed, record, domains)
    last = f"round {state.round}: test features"
    panels.append(
        Panel(last, placed[-2], torch.cat(labels).numpy(), np.array(places), placed[-1], final.labels.numpy())
    )
    return draw_map(panels, domains, run.settings.data.class_names, _heading(title, projection))


def _heading(title: str, projection: str) -> str:
    if not title:
        return projection
    return f"{title}: {projection}"


def _sizes(page: Page) -> set[int]:
    return {page.prototypes.feature_size, page.uploaded.feature_size}


def _evenly(pages: Sequence[Page], count: int) -> list[Page]:
    """Return at most ``count`` pages, evenly spaced, the first and the last among them."""
    places = np.unique(np.linspace(0, len(pages) - 1, min(count, len(pages))).round().astype(int))
    return [pages[place] for place in places]


def _vectors(pages: Sequence[Page]) -> list[Tensor]:
    """Return for each page the vectors that clients sent, then those of the global set."""
    vectors: list[Tensor] = []
    for page in pages:
        vectors += [page.uploaded.vectors, page.prototypes.vectors]
    return vectors


def _sent_panels(
    pages: Sequence[Page], placed: Sequence[np.ndarray], run: RunRecord, domains: Sequence[str]
) -> list[Panel]:
    """Return a panel for each page; ``placed`` begins with the places of :func:`_vectors`."""
    panels = []
    for index, page in enumerate(pages):
        senders = []
        for owner in page.owners.tolist():
            domain = str(run.facts.registrations.get(page.clients[owner], {}).get("domain"))
            senders.append(domains.index(domain) if domain in domains else -1)  # -1: it is not tested on
        panels.append(
            Panel(
                title=f"round {page.round}: class means that clients sent",
                points=placed[2 * index],
                labels=page.uploaded.labels.numpy(),
                domains=np.array(senders, dtype=int),
                prototypes=placed[2 * index + 1],
                prototype_labels=page.prototypes.labels.numpy(),
            )
        )
    return panels


def draw_map(panels: Sequence[Panel], domains: Sequence[str], classes: Sequence[str], title: str) -> Figure:
    """Return a figure of the panels, at most three in a row: class by colour, domain by marker, prototypes as stars."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(max(4.0 * columns, 5.0) + 1.8, 3.8 * rows + 0.4, title)
    palette = class_colours(len(classes))
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        size = 26
        if len(panel.points) > 100:
            size = 14
        for place in range(len(domains)):
            mine = panel.domains == place
            axes.scatter(
                panel.points[mine, 0],
                panel.points[mine, 1],
                s=size,
                c=[palette[label] for label in panel.labels[mine]],
                marker=MARKERS[place % len(MARKERS)],
                alpha=0.7,
                linewidths=0,
            )
        axes.scatter(
            panel.prototypes[:, 0],
            panel.prototypes[:, 1],
            s=150,
            c=[palette[label] for label in panel.prototype_labels],
            marker="*",
            edgecolors="black",
            linewidths=0.8,
            zorder=3,
        )
        for (x, y), label in zip(panel.prototypes, panel.prototype_labels, strict=True):
            axes.annotate(str(label), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7, zorder=4)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    key = partial(Line2D, [], [], linestyle="", markersize=5)
    handles = []
    for place, domain in enumerate(domains):
        handles.append(key(marker=MARKERS[place % len(MARKERS)], color="#555555", label=domain))
    for label, name in enumerate(classes):
        text = name
        if name != str(label):
            text = f"{label} {name}"
        handles.append(key(marker="o", color=palette[label], label=text))
    prototype_count = 0
    for panel in panels:
        prototype_count += len(panel.prototypes)
    if prototype_count:
        text = "prototype, with its class"
        handles.append(key(marker="*", color="white", markeredgecolor="black", markersize=10, label=text))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=7)
    return figure


def class_colours(count: int) -> list[tuple[float, float, float]]:
    """Return a colour for each class: ten that all readers can tell apart, then their lighter halves, then again."""
    dark = list(map(to_rgb, CLASS_COLOURS))
    light = []
    for red, green, blue in dark:
        light.append((0.5 * red + 0.5, 0.5 * green + 0.5, 0.5 * blue + 0.5))
    both = dark + light
    return [both[index % len(both)] for index in range(count)]
