"""What an installation leaves out, and the command that adds it."""

import contextlib
import json
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from common.errors import ConfigError

DISTRIBUTION = "goldfinch-fl"

HERE = Path(__file__).parents[1]

EXTRA_OF = {
    "finch": "clustering",
    "threadpoolctl": "clustering",
    "matplotlib": "datasets",
    "scipy": "datasets",
    "sklearn": "datasets",
    "jinja2": "server",
    "markupsafe": "server",
    "pandas": "server",
    "ray": "simulation",
    "optuna": "tune",
    "onnxruntime": "export",
    "onnxscript": "export",
    "opacus": "privacy",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "timm": "timm",
    "pillow_heif": "heif",
    "datasets": "table",
    "pyarrow": "table",
}
"""Modules that only an extra of the package installs, and the smallest such extra."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation.

    The distribution is on no index. A checkout or a folder that Goldfinch was installed from is installed again with
    the extra; from elsewhere, the extra's libraries are named.
    """
    python = shlex.quote(sys.executable)
    if extra not in EXTRA_OF.values():  # a library of one's own class
        return f"{python} -m pip install {shlex.quote(extra)}"
    folder = _installed_from()
    if folder is None:
        return f"{python} -m pip install {shlex.join(_libraries(extra))}"
    flag = ""
    if folder == HERE or _is_editable():
        flag = "-e "
    pins = shlex.quote(str(folder / "requirements.txt"))
    return f"{python} -m pip install -c {pins} {flag}{shlex.quote(f'{folder}[{extra}]')}"


@contextlib.contextmanager
def libraries_of(extra: str, what: str) -> Iterator[None]:
    """Within the context, a missing library becomes a :class:`ConfigError` that says how to install it.

    If a file or folder of the user's has the library's name, the error says so instead.

    Args:
        extra: the extra of the package that installs the library.
        what: the setting or feature that needs it.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        stranger = _of_the_user(sys.modules.get(module))
        if stranger is not None:
            raise ConfigError(named_alike(what, module, stranger)) from error
        raise ConfigError(f"{what} needs {error.name}: {install_command(extra)}") from error


def named_alike(what: str, library: str, place: Path) -> str:
    """Return that a file or folder of the user's has a library's name, and the command that renames it."""
    move = shlex.join(["mv", str(place), str(place.with_name(f"my_{place.name}"))])
    return f"{what} needs {library}, and {place} has its name and is found first; rename it: {move}"


def _of_the_user(module: Any) -> Path | None:
    """Return the file or folder of an imported module that no installation put there; ``None`` for others."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    place = Path(file)
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))
    if any(place.is_relative_to(folder) for folder in installed):
        return None
    return place.parent if place.name == "__init__.py" else place


def hugging_face_datasets() -> Any:
    """Return Hugging Face's ``datasets``.

    Raises:
        ConfigError: it is not installed, or a file of the user's has its name.
    """
    with libraries_of("table", "data=table"):
        import datasets
    if not hasattr(datasets, "Features"):
        place = Path(str(datasets.__file__))
        if place.name == "__init__.py":
            place = place.parent
        raise ConfigError(named_alike("data=table", "Hugging Face's datasets", place))
    return datasets


def missing_library(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that could not be imported; ``None`` if no extra has it."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(module)
    if extra is None:
        return None
    if extra in ("clustering", "datasets"):
        extra = "server"  # what runs, compares and draws needs all of it
    return f"{module} is not installed; the extra {extra!r} has it: {install_command(extra)}"


def _origin() -> dict[str, object]:
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text or "{}")


def _is_editable() -> bool:
    details = _origin().get("dir_info")
    return isinstance(details, dict) and details.get("editable") is True


def _installed_from() -> Path | None:
    """Return the checkout that this runs in or was installed from, if it is still there.

    A checkout has pins. The code that a run brings to a device has a ``pyproject.toml``, too, but no extras.
    """
    url = urlparse(str(_origin().get("url", "")))
    for folder in (HERE, Path(unquote(url.path))):
        if (folder / "pyproject.toml").is_file() and (folder / "requirements.txt").is_file():
            return folder
    return None


def _libraries(extra: str) -> list[str]:
    """Return the requirements that ``extra`` adds, those of the extras that it contains too."""
    requirements: list[str] = []
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [f"{DISTRIBUTION}[{extra}]"]
    for line in lines:
        requirement, _, marker = line.partition(";")
        if f'extra == "{extra}"' not in marker:
            continue
        requirement = requirement.strip()
        if not requirement.startswith(DISTRIBUTION):
            requirements.append(requirement)
            continue
        inner = requirement.partition("[")[2].partition("]")[0]
        for name in inner.split(","):
            requirements.extend(_libraries(name))
    return requirements
