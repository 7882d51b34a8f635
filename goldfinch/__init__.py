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
        found = Path(spec.origin).resolve()
        if not found.is_relative_to(root / name):
            raise ImportError(
                f"{found} is imported in place of Goldfinch's package {name!r}: rename it, or start Python in another "
                "folder and without it on PYTHONPATH"
            )


_check_packages()

_NAMES = {
    "common": ["losses", "prototypes"],
    "common.config": ["checked"],
    "common.errors": ["GoldfinchError"],
    "common.exports.model": ["TrainedModel", "load_model"],
    "common.metrics": ["Measure"],
    "common.own_metric": ["OwnMetric", "SumRange"],
    "common.prototypes": ["PrototypeSet"],
    "common.settings": ["RunSettings", "load_settings"],
    "goldfinch.comparison": ["compare", "table"],
    "goldfinch.runs": ["Run", "load_run", "load_runs", "resume", "run", "sweep"],
    "strategies.core.context": ["ClientContext", "ServerContext"],
    "strategies.core.exchange": ["Batch", "Download", "Losses", "Update", "Upload", "UploadSpec"],
    "strategies.core.flower": ["FlowerStrategy"],
    "strategies.core.method": ["Method"],
}
_HOMES: dict[str, str] = {}
for _module, _names in _NAMES.items():
    _HOMES |= dict.fromkeys(_names, _module)
__all__ = ["Batch", "ClientContext", "Download", "FlowerStrategy", "GoldfinchError", "Losses", "Measure", "Method"]
__all__ += [
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
]
__all__ += [
    "checked",
    "compare",
    "load_model",
    "load_run",
    "load_runs",
    "load_settings",
    "losses",
    "prototypes",
    "resume",
]
__all__ += ["run", "sweep", "table"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("common.versions").VERSION
    if name not in _HOMES:
        raise AttributeError(f"module 'goldfinch' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    home = _HOMES[name]
    if home == "common":
        return import_module(f"common.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
