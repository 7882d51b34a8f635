"""Files in the folders that a user names."""

import os
from pathlib import Path

from common.errors import ConfigError


def named_folder(name: Path | str) -> Path:
    """Return the folder that a caller of the Python interface names.

    Raises:
        ConfigError: it is no path, or empty, which would be the present folder.
    """
    if not isinstance(name, str | Path):
        raise ConfigError(f"{name!r} is not the path of a folder: give one; a run's is run.folder")
    if name == "":
        raise ConfigError("a folder's name is empty, which would be the present folder: name one; . is the present one")
    return Path(name)


def files_below(place: Path) -> list[Path]:
    """Return the files in and below a folder and the folders that links in it lead to, sorted."""
    home = place.resolve()
    entered = {home, *home.parents}  # a link to one of them would lead to all that is beside it
    paths: list[Path] = []
    for name, folders, files in os.walk(place, followlinks=True):
        paths += [Path(name, file) for file in files]
        for link in [Path(name, below) for below in folders if Path(name, below).is_symlink()]:
            target = link.resolve()
            if target in entered or home in target.parents:
                folders.remove(link.name)
            entered.add(target)
    return sorted(paths)
