"""The description of an exported model for programs: ``model.json``."""

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
from common.regular_files import read_small
from common.storage import check_run_id
from common.text import shell_line
from common.versions import VERSION
from common.wire.messages import OwnVersion

DESCRIPTION = "model.json"


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
    licence: str = "not stated"
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


def read_description(folder: Path) -> Description:
    """Return the description in an exported model's folder.

    Raises:
        ConfigError: the folder holds no exported model.
        CheckpointError: its ``model.json`` is damaged, or of another version.
    """
    path = folder / DESCRIPTION
    if not path.exists():
        if (folder / "config.yaml").exists():
            export = shell_line(["goldfinch", "export", str(folder), "--to", "DIR"])
            raise ConfigError(f"{folder} is a run's folder: {export} writes its model; name that DIR")
        raise ConfigError(f"{path} is missing: goldfinch export RUN --to DIR writes an exported model")
    try:
        description: Description = build(json.loads(read_small(path)), DESCRIPTION, Description)
        check_run_id(description.run)
    except (OSError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged or of another version ({error}); export the run again") from error
    return description
