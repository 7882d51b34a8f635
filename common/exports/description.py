"""The description of an exported model: ``model.json`` for programs, ``README.md`` (the model card) for people."""

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from common.config import Names, build, check, checked
from common.data.batches import Normalisation
from common.data.domain import ImageSize
from common.data.image_files import Reading, Resize
from common.errors import CheckpointError, ConfigError
from common.metrics import named_missing
from common.regular_files import read_small
from common.storage import check_run_id
from common.versions import VERSION
from common.wire.messages import OwnVersion

DESCRIPTION, CARD = "model.json", "README.md"
NO_LICENCE = "not stated"
RESIZED = {
    "squash": "whole images resized bilinearly",
    "crop": "the centre square of images, resized bilinearly",
    "pad": "images padded with black to a square, resized bilinearly",
}


@checked
class Description:
    """The content of ``model.json``.

    Args:
        architecture: the settings that rebuild the network: the nodes ``model`` and ``method`` as in a run's
            ``config.yaml``, ``clients`` (their number) and ``seed``.
        classes: names of the classes, in the order of the outputs.
        image_size: side of the square images, pixels.
        resize: how images become squares: ``squash``, ``crop`` or ``pad``.
        value_range: values of an image file that become 0 and 1; empty: 0 and 255, or 0 and 65535 of 16-bit images.
        page: the page of a TIFF that is read.
        orientation: images are turned upright as their EXIF orientation says.
        colour: the order of the channels; grey images are made RGB.
        mean, std: per channel, of images in 0..1; the graphs normalise by them.
        normalisation: ``fixed``: by ``mean`` and ``std``; ``image``: each image by its own.
        method: the method's name.
        data: ``name``, ``domains`` and ``protocol`` of the training data.
        run: the run's id; devices store their own part of the model under it.
        round: the rounds after which the state was taken.
        chosen: why that round was chosen, as text.
        client: the client, for a client's own model; ``None`` for the global model.
        score: ``rule`` as text, ``accuracy`` by domain in per cent, its ``average`` and ``worst``, and as ``missing``
            the domains that it lacks, with the last round that scored each; also by client if the net is not
            complete. ``None`` if that round was not scored.
        prototypes: ``rows``, the ``distance`` between them and, if known, the ``threshold``
            above which an image is like none of the classes, with its ``rule``; ``None`` without prototypes.
        privacy: the entry on differential privacy in ``summary.json``; ``None`` for a run without.
        notes: further remarks for readers.
        complete: whether the folder has the whole net; otherwise devices keep the rest.
        kept: by client, the version of its own state that completes the net; empty if the net is complete.
        licence: the licence of the model.
        files: name, ``sha256`` and ``bytes`` of each file, by format.
        goldfinch: the version of Goldfinch that wrote it.
        format: version of this file's format.
    """

    architecture: Mapping[str, Any]
    classes: Names
    image_size: ImageSize
    mean: tuple[float, ...]
    std: tuple[float, ...]
    method: str
    data: Mapping[str, Any]
    run: str
    round: int
    chosen: str
    client: str | None = None
    score: Mapping[str, Any] | None = None
    prototypes: Mapping[str, Any] | None = None
    privacy: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    complete: bool = True
    licence: str = NO_LICENCE
    files: Mapping[str, Any] = field(default_factory=dict)
    resize: Resize = "squash"
    value_range: tuple[float, ...] = ()
    page: int = 1
    orientation: Literal["exif"] = "exif"
    colour: Literal["RGB"] = "RGB"
    normalisation: Normalisation = "fixed"
    goldfinch: str = VERSION
    format: int = 1
    kept: Mapping[str, OwnVersion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(all(name.isprintable() for name in self.classes), "names of classes must be printable")

    @property
    def reading(self) -> Reading:
        """How image files become arrays."""
        return Reading(self.resize, self.value_range, self.page)

    def card(self) -> str:
        """Return the model card, in Markdown."""
        owner = "one model of all clients"
        if self.client:
            owner = f"the own model of {self.client}"
        lines = [
            f"# {_inline(self.method)} on {_inline(self.data['name'])}",
            f"\nTrained by federated learning (Goldfinch {self.goldfinch}): {_inline(f'{owner}, {self.chosen}')}.\n",
            "| | |\n|---|---|",
        ]
        for name, text in self._card_rows().items():
            lines.append(f"| {_inline(name)} | {_inline(text)} |")
        for note in self.notes:
            lines.append(f"\n{_inline(note)}")
        lines.append("\nIts accuracy on other domains is not known: `goldfinch evaluate` measures it.\n")
        return "\n".join(lines)

    def _card_rows(self) -> dict[str, str]:
        """Return the rows of the card's table: text by name."""
        size = self.image_size
        files = "0 to 255 of 8-bit files and 0 to 65535 of 16-bit files"
        if self.value_range:
            files = f"{self.value_range[0]:g} to {self.value_range[1]:g} of files"
        resized = f"turned upright by EXIF, {RESIZED[self.resize]}; {files} are 0 to 1"
        if self.page > 1:
            resized += f"; page {self.page} of a TIFF"
        rows = {
            "classes, in order": ", ".join(self.classes),
            "`images`": f"input: RGB, `[N, 3, {size}, {size}]`, float32 in 0..1, {resized}",
            "`probabilities`": "output `[N, K]`; normalisation and softmax are part of the graph",
            "`features`": "output `[N, D]`: the classifier's input",
        }
        if self.prototypes:
            rows["`distances`"] = "output `[N, K]`: cosine distance to each class's nearest prototype; 2 without one"
            threshold = self.prototypes.get("threshold")
            if threshold is not None:
                rows["none of the classes"] = f"smallest distance above {threshold:.4f}; {self.prototypes['rule']}"
        rows["trained on"] = f"{', '.join(self.data['domains'])}; protocol {self.data['protocol']}"
        if self.score:
            text = ", ".join(f"{name} {value:.2f}" for name, value in self.score["accuracy"].items())
            missing = self.score.get("missing", {})
            if missing:
                text += f"; PARTIAL, without {named_missing(missing)}"
            rows[self.score["rule"]] = text
        if self.privacy:
            rows["differential privacy of training"] = _privacy_text(self.privacy)
        rows["licence"] = self.licence
        for entry in self.files.values():
            rows[f"`{entry['name']}`"] = f"{entry['bytes']:,} bytes, SHA-256 `{entry['sha256']}`"
        return rows


def _inline(text: str) -> str:
    """Return a text that stays in its line and in its cell of a Markdown table, and holds no HTML."""
    line = " ".join(text.split())
    return line.replace("|", "\\|").replace("<", "&lt;")


def _privacy_text(privacy: Mapping[str, Any]) -> str:
    """Return the card's text on a run's differential privacy."""
    covers = f"covers {', '.join(privacy['covers'])} ({privacy['neighbours']})"
    if privacy["conditions"]:
        return f"no epsilon: {'; '.join(privacy['conditions'])}; {covers}"
    largest = max((value for value in privacy["epsilon"].values() if value is not None), default=None)
    return f"epsilon at most {largest} at delta {privacy['delta']:g} for each client; {covers}"


def read_description(folder: Path) -> Description:
    """Return the description in an exported model's folder.

    Raises:
        ConfigError: the folder holds no exported model.
        CheckpointError: its ``model.json`` is damaged, or of another version.
    """
    path = folder / DESCRIPTION
    if not path.exists():
        raise ConfigError(f"{path} is missing: goldfinch export RUN --to {folder} writes one")
    try:
        description: Description = build(json.loads(read_small(path)), DESCRIPTION, Description)
        check_run_id(description.run)
    except (OSError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged or of another version ({error}); export the run again") from error
    return description
