"""Features of test images with the prototypes over them, and class activation maps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from torch import Tensor

from common.data.batches import Split
from common.errors import ConfigError
from common.prototypes import PrototypeSet
from server.plots.figures import CLASS_COLOURS, MARKERS, new_figure
from server.results.embedding import embed_by_tsne, unit_rows
from server.results.heat import coarseness, heat_maps, overlay
from server.results.run import Run
from server.run.prototype_log import Page

MAX_PANELS = 6
RIGHT, WRONG = "#00614b", "#a03c00"
"""Colours of a correct and of a wrong prediction's name."""


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


def embed(features: Tensor, sets: Sequence[PrototypeSet]) -> tuple[np.ndarray, list[np.ndarray]]:
    """t-SNE by cosine of features and all prototype sets together, so that places can be compared between panels.

    Rows are put at unit length first, since the methods compare by angle.

    Returns:
        ``[N, 2]`` of ``features [N, D]``, and ``[M, 2]`` for each set of D features, or an empty one.

    Raises:
        ConfigError: fewer than four points, or they are not finite or do not differ.
    """
    vectors = [features]
    sizes = [len(features)]
    for prototypes in sets:
        sizes.append(len(prototypes))
        if len(prototypes):
            vectors.append(prototypes.vectors)
    rows = unit_rows(torch.cat(vectors))
    if len(rows) < 4:
        raise ConfigError(f"a map needs four points or more; got {len(rows)}")
    placed = embed_by_tsne(rows)
    if placed is None:
        raise ConfigError("a map needs finite features that differ; the network gives the same for all images")
    parts = np.split(placed, np.cumsum(sizes)[:-1])
    return parts[0], parts[1:]


def feature_map(run: Run, per_domain: int = 100, title: str | None = None) -> Figure:
    """Features by class (colour) and domain (marker), with prototypes as stars; one panel for each of up to six rounds.

    The last panel has test features of the final model. A run keeps no model of an earlier round, so that round's panel
    has what is kept of its features: the class means that clients sent. All lie in one embedding. Without prototypes,
    there is the last panel alone. ``per_domain`` counts test images of each domain; ``title`` replaces method and data.

    Raises:
        CheckpointError: the run's model is gone.
    """
    domains = run.test_domains
    features, labels, places = [], [], []
    for index, domain in enumerate(domains):
        split = run.sample(domain, per_domain)
        features.append(run.features(run.model_for(domain), split)[0])
        labels.append(split.labels)
        places += [index] * len(split)
    tested = torch.cat(features)
    earlier, final = _stages(run, tested.shape[1])
    received: list[PrototypeSet] = []
    uploaded: list[PrototypeSet] = []
    for page in earlier:
        received.append(page.prototypes)
        uploaded.append(page.uploaded)
    points, placed = embed(tested, [*received, *uploaded, final])
    domain_of_client = {}
    for client in run.clients:
        if client.domain in domains:
            domain_of_client[client.id] = domains.index(client.domain)
    panels = []
    for index, page in enumerate(earlier):
        senders = []
        for owner in page.owners.tolist():
            senders.append(domain_of_client.get(page.clients[owner], -1))  # -1: a domain without test images
        panels.append(
            Panel(
                title=f"round {page.round}: class means that clients sent",
                points=placed[len(earlier) + index],
                labels=page.uploaded.labels.numpy(),
                domains=np.array(senders, dtype=int),
                prototypes=placed[index],
                prototype_labels=page.prototypes.labels.numpy(),
            )
        )
    last = f"round {run.checkpoint.state.round}: test features"
    panels.append(Panel(last, points, torch.cat(labels).numpy(), np.array(places), placed[-1], final.labels.numpy()))
    if title is None:
        title = f"{run.method.name} on {run.settings.data.name}"
    return draw_map(panels, domains, run.settings.data.class_names, title)


def _stages(run: Run, size: int) -> tuple[list[Page], PrototypeSet]:
    """Return the kept rounds before the last that are shown, evenly spaced, and the final prototypes."""
    state = run.checkpoint.state
    final = PrototypeSet.empty(size)
    if state.prototypes.feature_size == size:
        final = state.prototypes
    pages = []
    for page in run.pages:
        if page.round >= state.round or not len(page.prototypes):
            continue
        if page.prototypes.feature_size == size and page.uploaded.feature_size == size:
            pages.append(page)
    count = min(MAX_PANELS - 1, len(pages))
    places = np.unique(np.linspace(0, len(pages) - 1, count).round().astype(int))
    return [pages[place] for place in places], final


def draw_map(panels: Sequence[Panel], domains: Sequence[str], classes: Sequence[str], title: str) -> Figure:
    """Return a figure of the panels, at most three in a row: class by colour, domain by marker, prototypes as stars."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(max(4.0 * columns, 5.0) + 1.8, 3.8 * rows + 0.4, f"{title}: t-SNE by cosine")
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


def activation_maps(runs: Sequence[tuple[str, Run]], per_domain: int = 2, title: str | None = None) -> Figure:
    """Class activation maps over test images: a row per image, the image first, then one column for each run.

    The map is that of the true class (Zhou et al., CVPR 2016), resized to the image and drawn as
    :func:`server.results.heat.heat_maps` describes. Under it stands what the run predicts.

    Args:
        runs: label and run; all of the same data, on networks with global average pooling and one linear layer.
        per_domain: images of each test domain.
        title: the title instead of one that explains the maps; a warning of coarse maps stays.

    Raises:
        ModelError: a network has no class activation maps.
        ConfigError: the runs are of different data.
    """
    first = runs[0][1]
    for _, run in runs:
        if run.settings.data.name != first.settings.data.name or run.test_domains != first.test_domains:
            raise ConfigError("cam: the runs have different data or test domains; show them one by one")
    if title is None:
        title = "class activation maps of the true class; below, the prediction."
    columns: list[list[Cell | None]] = [_image_column(first, per_domain)]
    warnings = []
    for _, run in runs:
        column, warning = _map_column(run, per_domain)
        columns.append(column)
        if warning and warning not in warnings:
            warnings.append(warning)
    if warnings:
        title += f" {warnings[0]}"
    rows = len(columns[0])
    figure = new_figure(1.45 * len(columns) + 0.6, 1.55 * rows + 0.5, title)
    grid = figure.subplots(rows, len(columns), squeeze=False)
    for place, cells in enumerate(columns):
        for row, cell in enumerate(cells):
            _draw_cell(grid[row, place], cell)
    for place, label in enumerate(["image", *[name for name, _ in runs]]):
        grid[0, place].set_title(fill(label, 20), fontsize=8)
    for index, domain in enumerate(first.test_domains):
        for row in range(per_domain):
            grid[index * per_domain + row, 0].set_ylabel(domain, fontsize=7)
    return figure


@dataclass(frozen=True)
class Cell:
    """One picture of a figure of class activation maps.

    Args:
        picture: ``[H, W, 3]`` uint8.
        caption: the class that stands under it.
        colour: the caption's colour.
    """

    picture: np.ndarray
    caption: str
    colour: str


def _draw_cell(axes: Axes, cell: Cell | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if cell is None:
        axes.set_visible(False)
        return
    axes.imshow(cell.picture, interpolation="nearest")
    axes.set_xlabel(cell.caption, fontsize=7)
    axes.xaxis.label.set_color(cell.colour)


def _image_column(run: Run, per_domain: int) -> list[Cell | None]:
    """Return the test images of every domain with their classes; ``None`` where a domain has fewer."""
    cells: list[Cell | None] = []
    for domain in run.test_domains:
        split = run.sample(domain, per_domain)
        for picture, label in zip(_pictures(split), split.labels.tolist(), strict=True):
            cells.append(Cell(picture, run.settings.data.class_names[label], "black"))
        cells += [None] * (per_domain - len(split))
    return cells


@torch.no_grad()
def _map_column(run: Run, per_domain: int) -> tuple[list[Cell | None], str | None]:
    """Return the same images in grey with their maps over them, and a warning if the maps are coarse."""
    names = run.settings.data.class_names
    cells: list[Cell | None] = []
    warning = None
    for domain in run.test_domains:
        split = run.sample(domain, per_domain)
        model = run.model_for(domain)
        images = run.settings.data.augmentation.test(split.images)
        size = (split.images.shape[2], split.images.shape[3])
        heat, own_size = heat_maps(model, images, split.labels, size)
        warning = coarseness(own_size)
        guesses = model(images)[1].argmax(1).tolist()
        for picture, layer, guess, label in zip(_pictures(split), heat, guesses, split.labels.tolist(), strict=True):
            grey = Image.fromarray(picture).convert("L")  # a picture's colours would mix with the map's
            shown = np.asarray(overlay(grey, layer.double().numpy()))
            colour = RIGHT if guess == label else WRONG
            cells.append(Cell(shown, names[guess], colour))
        cells += [None] * (per_domain - len(split))
    return cells, warning


def _pictures(split: Split) -> list[np.ndarray]:
    """Return each image as ``[H, W, 3]`` uint8."""
    return list(split.images.permute(0, 2, 3, 1).numpy())
