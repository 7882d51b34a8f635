"""Overlays: files that set values of one method on one data set, over the options of all other groups.

``conf/printed/`` holds the values that papers print, ``conf/tuned/`` those that ``goldfinch compare`` found. Each file
is an option like any other, which Hydra composes (``# @package _global_``): its defaults choose the method and the data
set, and its other keys are the values. This module reads, checks and writes such files.
"""

import hashlib
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.choices import choices_of
from common.errors import ConfigError, nearest
from common.run_config import yaml_text

GROUPS = ("printed", "tuned")
"""The groups of overlays in ``conf/``."""

NONE = "none"
"""The option of both groups that sets nothing."""

FITTING = "true"
"""``printed=true`` is the option for the run's method and data set."""

HEADER = "# @package _global_"
YAML_ERRORS = (YAMLError, OmegaConfBaseException)

WIDTH = 110
"""Characters of a line of a comment."""

WEIGHTING = "method.weighting"
"""The one setting of an overlay that is no number."""


@dataclass(frozen=True)
class Overlay:
    """One file.

    Args:
        group: ``printed`` or ``tuned``.
        name: what the user wrote: an option of the group, or the path of a file.
        option: the option of Hydra's that it is.
        source: the comment at the top of the file, in one line, without the command: where the values are from.
        method, data: the options of ``conf/method/`` and ``conf/data/`` that the values are for.
        values: the values by ``a.b`` keys: numbers, and the name of a weighting if one was chosen for all methods.
    """

    group: str
    name: str
    option: str
    source: str
    method: str
    data: str
    values: Mapping[str, Any]


def option_of(group: str, value: object) -> str:
    """Return the option that the value of an override chooses: ``printed=true`` the one that fits, ``false`` none.

    Raises:
        ConfigError: there is no such option of ``printed``.
    """
    if value is True and group == "printed":
        return FITTING
    if value is None or value is False:
        return NONE
    name = str(value)
    if group == "printed" and name not in choices_of(group):
        raise ConfigError(f"printed={name}: true takes what a paper prints for the data set, false does not")
    return name


def read_overlay(group: str, name: str, path: Path) -> Overlay:
    """Return an overlay, and make its file an option of Hydra's if it is not one of ``conf/``.

    Args:
        group: ``printed`` or ``tuned``.
        name: what the user wrote.
        path: the file.

    Raises:
        ConfigError: the file cannot be read, chooses anything but a method and a data set, or has a value that is no
            number.
    """
    try:
        text = yaml_text(path)
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        if not text.startswith(HEADER):
            raise ValueError(f"its first line must be {HEADER!r}")
        chosen: dict[str, Any] = {}
        for item in content["defaults"]:
            chosen.update(item)
        if set(chosen) != {"override /method", "override /data"}:
            raise ValueError(f"its defaults must choose method and data, and have {', '.join(chosen) or 'neither'}")
        values = {key: value for key, value in leaves(content) if key != "defaults"}
        for key, value in values.items():
            if key == WEIGHTING and isinstance(value, str):  # its names are checked with the method's other settings
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{key}={value!r:.100} must be a number")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, *YAML_ERRORS) as error:
        raise ConfigError(
            f"{path} is no overlay of a method's values: {error!s:.300}; goldfinch compare writes one, see conf/tuned/"
        ) from error
    option = name
    if name not in choices_of(group):
        option = hashlib.sha256(text.encode()).hexdigest()  # so that a changed file is another option
        ConfigStore.instance().store(option, content, group=group, package="_global_")
    method, data = str(chosen["override /method"]), str(chosen["override /data"])
    return Overlay(group, name, option, _comment(text), method, data, values)


def find_overlay(group: str, name: str) -> Overlay:
    """Return the overlay that an override names.

    Args:
        group: ``printed`` or ``tuned``.
        name: an option of the group, or the path of a ``.yaml`` file.

    Raises:
        ConfigError: the file does not exist, or is not as it must be.
    """
    known = choices_of(group)
    path = known.get(name, Path(name))
    if name not in known and not (path.suffix == ".yaml" and path.is_file()):
        raise ConfigError(f"{group}={name}: no such file; goldfinch compare writes one; {nearest(name, known)}")
    return read_overlay(group, name, path)


def fitting_overlay(method: str, data: str) -> Overlay:
    """Return the printed values of ``method`` on ``data``.

    Raises:
        ConfigError: none are on file; the message lists what is.
    """
    overlay = printed_values(method, data)
    if overlay is not None:
        return overlay
    known: list[str] = []
    for name in choices_of("printed"):
        if name != NONE:
            its_method, _, its_data = name.partition("_on_")
            known.append(f"method={its_method} data={its_data}")
    raise ConfigError(
        f"printed=true: conf/printed/ has no settings for method={method} data={data}; leave printed=true out to take "
        f"the method's defaults; there are {', '.join(known)}"
    )


def printed_values(method: str, data: str) -> Overlay | None:
    """Return the values with which a paper's results of ``method`` on ``data`` were made; ``None`` if none are on file.

    The values are weights, temperatures and the server's epochs. An experiment has the paper's protocol, net and local
    training.

    Args:
        method: an option of ``conf/method/``.
        data: an option of ``conf/data/``.

    Raises:
        ConfigError: the file is not as it must be.
    """
    name = f"{method}_on_{data}"
    path = choices_of("printed").get(name)
    if path is None:
        return None
    return read_overlay("printed", name, path)


def check_choices(overlay: Overlay, choices: Mapping[str, str]) -> None:
    """Refuse an overlay of another method or data set than the run's.

    Args:
        overlay: the overlay that the run has.
        choices: the chosen option of each group.

    Raises:
        ConfigError: the user, who is before the overlay, chose another one.
    """
    for group, value in (("method", overlay.method), ("data", overlay.data)):
        if choices[group] != value:
            raise ConfigError(
                f"{overlay.group}={overlay.name} was found for {group}={value}, not {choices[group]}: leave one out, "
                f"or take {overlay.group} values of {group}={choices[group]}"
            )


def overlay_text(command: str, source: str, method: str, data: str, values: Mapping[str, int | float | str]) -> str:
    """Return the text of an overlay's file.

    Args:
        command: the command that takes the file, for the comment at its top.
        source: where the values are from.
        method: the option of ``conf/method/`` that they are for.
        data: the option of ``conf/data/``.
        values: the values by ``a.b`` keys.
    """
    lines = [HEADER, f"# {command}"]
    lines += textwrap.wrap(source, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    lines += ["defaults:", f"  - override /method: {method}", f"  - override /data: {data}"]
    nested = OmegaConf.create({})
    for key, value in values.items():
        OmegaConf.update(nested, key, value)
    return "\n".join([*lines, OmegaConf.to_yaml(nested)])


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the ``a.b`` key and the value of every setting in nested mappings; an empty mapping is a value."""
    for name, value in node.items():
        key = f"{prefix}.{name}".removeprefix(".")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key)
        else:
            yield key, value


def _comment(text: str) -> str:
    """Return the comment below the header, without lines that name a command, in one line."""
    lines: list[str] = []
    for line in text.splitlines()[1:]:
        if not line.startswith("#"):
            break
        if not line.startswith("# goldfinch "):
            lines.append(line[1:].strip())
    return " ".join(lines)
