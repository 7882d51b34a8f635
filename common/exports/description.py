"""What an exported model's folder says of it: ``model.json`` for programs, ``README.md`` for people."""

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from common.config import Names, build, check, checked
from common.data.domain import ImageSize
from common.errors import CheckpointError, ConfigError
from common.metrics import named_missing
from common.storage.files import check_run_id
from common.versions import VERSION

DESCRIPTION, CARD = "model.json", "README.md"
NO_LICENCE = "not stated"


@checked
class Description:
    """``model.json``.

    Args:
        architecture: what the network is built from again: the nodes ``model`` and ``method`` as in a run's
            ``config.yaml``, ``clients`` (their number) and ``seed``.
        classes: names of the classes, in the order of the outputs.
        image_size: side of the square images, pixels.
        mean, std: per channel, of images in 0..1; the graphs normalise by them.
        method: the method's name.
        data: ``name``, ``domains`` and ``protocol`` of what it was trained on.
        run: the run's id, by which devices find their own part.
        round: the rounds after which the state was taken.
        chosen: which round that is, in words.
        client: whose own model it is; ``None`` is the global one.
        score: ``rule`` in words, ``accuracy`` by domain in per cent, its ``average`` and ``worst``, and as ``missing``
            the domains that it lacks, with the last round that scored each; by client too where the net is not
            complete. ``None`` if that round was not scored.
        prototypes: ``rows``, the ``distance`` they are compared by and, where it could be found, the ``threshold``
            above which an image is like none of the classes, with its ``rule``; ``None`` without prototypes.
        privacy: what ``summary.json`` says of differential privacy; ``None`` where the run had none.
        notes: what a reader should know besides.
        complete: whether the whole net is here; otherwise devices keep the rest.
        licence: under which the model may be used.
        files: name, ``sha256`` and ``bytes`` of each file, by format.
        goldfinch: the version that wrote it.
        format: of this file.
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
    goldfinch: str = VERSION
    format: int = 1

    def __post_init__(self) -> None:
        check(all(name.isprintable() for name in self.classes), "names of classes must be printable")

    def card(self) -> str:
        """The model card, in Markdown."""
        size, threshold = self.image_size, (self.prototypes or {}).get("threshold")
        rows = {
            "classes, in order": ", ".join(self.classes),
            "`images`": f"input: RGB, `[N, 3, {size}, {size}]`, float32 in 0..1, whole images resized bilinearly",
            "`probabilities`": "output `[N, K]`; normalisation and softmax are part of the graph",
            "`features`": "output `[N, D]`: the classifier's input",
        }
        if self.prototypes:
            rows["`distances`"] = "output `[N, K]`: cosine distance to each class's nearest prototype; 2 without one"
        if threshold is not None and self.prototypes:
            rows["none of the classes"] = f"smallest distance above {threshold:.4f}; {self.prototypes['rule']}"
        rows["trained on"] = f"{', '.join(self.data['domains'])}; protocol {self.data['protocol']}"
        if self.score:
            accuracy = ", ".join(f"{name} {value:.2f}" for name, value in self.score["accuracy"].items())
            missing = self.score.get("missing", {})
            partial = f"; PARTIAL, without {named_missing(missing)}" if missing else ""
            rows[self.score["rule"]] = accuracy + partial
        if self.privacy:
            rows["differential privacy of training"] = _privacy_said(self.privacy)
        rows["licence"] = self.licence
        for entry in self.files.values():
            rows[f"`{entry['name']}`"] = f"{entry['bytes']:,} bytes, SHA-256 `{entry['sha256']}`"
        whose = f"the own model of {self.client}" if self.client else "one model of all clients"
        whose = f"{_inline(whose)}, {_inline(self.chosen)}"
        return "\n".join(
            [
                f"# {_inline(self.method)} on {_inline(self.data['name'])}",
                f"\nTrained by federated learning (Goldfinch {self.goldfinch}): {whose}.\n",
                "| | |\n|---|---|",
                *(f"| {_inline(name)} | {_inline(text)} |" for name, text in rows.items()),
                *(f"\n{_inline(note)}" for note in self.notes),
                "\nHow good it is on other domains is not known: `goldfinch evaluate` tells.\n",
            ]
        )


def _inline(text: str) -> str:
    """Return a text that stays in its line and in its cell of a Markdown table, and holds no HTML."""
    line = " ".join(text.split())
    return line.replace("|", "\\|").replace("<", "&lt;")


def _privacy_said(privacy: Mapping[str, Any]) -> str:
    """Return the card's words about a run's privacy."""
    covers = f"covers {', '.join(privacy['covers'])} ({privacy['neighbours']})"
    if privacy["conditions"]:
        return f"no epsilon: {'; '.join(privacy['conditions'])}; {covers}"
    largest = max((value for value in privacy["epsilon"].values() if value is not None), default=None)
    return f"epsilon at most {largest} at delta {privacy['delta']:g} for each client; {covers}"


def read_description(folder: Path) -> Description:
    """The description in an exported model's folder.

    Raises:
        ConfigError: the folder holds no exported model.
        CheckpointError: its ``model.json`` is damaged, or of another version.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ConfigError(f"{path} is missing: goldfinch export RUN --to {folder} writes one")
    try:
        description: Description = build(json.loads(path.read_text(encoding="utf-8")), DESCRIPTION, Description)
        check_run_id(description.run)
    except (OSError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged or of another version ({error}); export the run again") from error
    return description
