"""The model card of an exported model, for people: ``README.md`` in its folder."""

from collections.abc import Mapping
from typing import Any

from common.exports.description import Description
from common.metrics import named_missing

CARD = "README.md"
RESIZED = {
    "squash": "whole images resized bilinearly",
    "crop": "the centre square of images, resized bilinearly",
    "pad": "images padded with black to a square, resized bilinearly",
}


def model_card(description: Description) -> str:
    """Return the model card, in Markdown."""
    owner = "one model of all clients"
    last = "Its accuracy on other domains is not known: `goldfinch evaluate` measures it."
    if not description.complete:
        owner = "what all clients share"
        last = "Each client keeps the rest of the net, without which there is no output."
    elif description.client:
        owner = f"the own model of {description.client}"
    origin = _inline(f"{owner}, {description.chosen}")
    lines = [
        f"# {_inline(description.method)} on {_inline(description.data['name'])}",
        f"\nTrained with Goldfinch {description.goldfinch}: {origin}.\n",
        "| | |\n|---|---|",
    ]
    for name, text in _rows(description).items():
        lines.append(f"| {_inline(name)} | {_inline(text)} |")
    for note in description.notes:
        lines.append(f"\n{_inline(note)}")
    lines.append(f"\n{last}\n")
    return "\n".join(lines)


def _rows(description: Description) -> dict[str, str]:
    """Return the rows of the card's table: text by name."""
    size = description.image_size
    files = "0 to 255 of 8-bit files and 0 to 65535 of 16-bit files"
    if description.value_range:
        files = f"{description.value_range[0]:g} to {description.value_range[1]:g} of files"
    resized = f"turned upright by EXIF, {RESIZED[description.resize]}; {files} are 0 to 1"
    if description.page > 1:
        resized += f"; page {description.page} of a TIFF"
    rows = {
        "classes, in order": ", ".join(description.classes),
        "`images`": f"input: RGB, `[N, 3, {size}, {size}]`, float32 in 0..1, {resized}",
        "`probabilities`": "output `[N, K]`; normalisation and softmax are part of the graph",
        "`features`": "output `[N, D]`: the classifier's input",
    }
    if description.prototypes:
        rows["`distances`"] = "output `[N, K]`: cosine distance to each class's nearest prototype; 2 without one"
        threshold = description.prototypes.get("threshold")
        if threshold is not None:
            rows["none of the classes"] = f"smallest distance above {threshold:.4f}; {description.prototypes['rule']}"
    rows["trained on"] = f"{', '.join(description.data['domains'])}; protocol {description.data['protocol']}"
    if description.score:
        text = ", ".join(f"{name} {value:.2f}" for name, value in description.score["accuracy"].items())
        missing = description.score.get("missing", {})
        if missing:
            text += f"; PARTIAL, without {named_missing(missing)}"
        rows[description.score["rule"]] = text
    if description.privacy:
        rows["differential privacy of training"] = _privacy_text(description.privacy)
    rows["licence"] = description.licence
    for entry in description.files.values():
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
