"""Goldfinch from Python: train federated methods, read and compare runs, and use the parts.

Example::

    import goldfinch as gf

    run = gf.run(method="fpl", data="glyphs", rounds=10, seed=0)
    run.average, run.worst
    run.history  # a pandas.DataFrame
    gf.table(gf.load_runs("outputs/sweep"))
    gf.compare(["fedavg", "fpl"], data="glyphs")

A name is imported when it is first used; ``import goldfinch`` alone imports neither torch nor Flower.
"""

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common import losses, prototypes
    from common.config import checked
    from common.errors import GoldfinchError
    from common.exports.model import TrainedModel, load_model
    from common.metrics import Measure
    from common.own_metric import OwnMetric, SumRange
    from common.prototypes import PrototypeSet
    from common.settings import RunSettings, load_settings
    from goldfinch.comparison import compare, table
    from goldfinch.runs import Run, load_run, load_runs, resume, run, sweep
    from strategies.core.context import ClientContext, ServerContext
    from strategies.core.exchange import Batch, Download, Losses, Update, Upload, UploadSpec
    from strategies.core.flower import FlowerStrategy
    from strategies.core.method import Method


def _check_packages() -> None:
    """Raise an :class:`ImportError` that names the file which Python would import in place of one of our packages."""
    root = Path(__file__).resolve().parents[1]
    for name in ("common", "strategies", "client", "server"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        imported = Path(spec.origin).resolve()
        if not imported.is_relative_to(root / name):
            raise ImportError(
                f"{imported} is imported in place of Goldfinch's package {name!r}: rename it, or start Python in "
                "another folder and without it on PYTHONPATH"
            )


_check_packages()

__all__ = [
    "Batch",
    "ClientContext",
    "Download",
    "FlowerStrategy",
    "GoldfinchError",
    "Losses",
    "Measure",
    "Method",
    "OwnMetric",
    "PrototypeSet",
    "Run",
    "RunSettings",
    "ServerContext",
    "SumRange",
    "TrainedModel",
    "Update",
    "Upload",
    "UploadSpec",
    "checked",
    "compare",
    "load_model",
    "load_run",
    "load_runs",
    "load_settings",
    "losses",
    "prototypes",
    "resume",
    "run",
    "sweep",
    "table",
]


@cache
def _homes() -> dict[str, str]:
    """Return the module of each name, as the imports at the top of this file say. Only type checkers import there."""
    homes: dict[str, str] = {}
    for statement in ast.walk(ast.parse(Path(__file__).read_text())):
        if isinstance(statement, ast.ImportFrom):
            for imported in statement.names:
                homes[imported.name] = str(statement.module)
    return homes


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("common.versions").VERSION
    if name not in __all__:
        raise AttributeError(f"module 'goldfinch' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = _homes()[name]
    if home == "common":
        return import_module(f"common.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
