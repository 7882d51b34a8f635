"""The Flower app as a folder of its own: just the code and configuration, whatever this Goldfinch was installed from.

``flwr run`` walks the whole folder it is given, virtual environments and data included, and a simulation imports code
from the SuperLink's working directory before the app. A small folder in a neutral place avoids both.
"""

import shutil
from pathlib import Path

from common.choices import CONF, FOLDERS, choices_of
from common.versions import CODE, VERSION

ROOT = Path(__file__).resolve().parents[2]

PYPROJECT = """[project]
name = "goldfinch"
version = "{version}"
description = "Federated learning for devices whose data come from different domains"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "goldfinch"

[tool.flwr.app.components]
serverapp = "server.app:app"
clientapp = "client.app:app"

[tool.flwr.app.config]
overrides = ""
"""


def write_bundle(folder: Path) -> Path:
    """Copy the app's packages and a minimal ``pyproject.toml`` to ``folder``; the folder.

    Choices of the user's own folders (:func:`common.config.search`) are copied beside those of ``conf/``, so that every
    process of the run has them, wherever it is. The app's dependencies are empty on purpose: they are installed
    already, and Flower would fetch them again for every run.
    """
    folder.mkdir(parents=True)
    for package in CODE:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for group in (place.name for place in CONF.iterdir() if place.is_dir()):
        for path in choices_of(group, FOLDERS[1:]).values():
            shutil.copy(path, folder / "conf" / group)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(version=VERSION))
    return folder
