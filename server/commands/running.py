"""``goldfinch run`` and ``goldfinch resume``: one run on the engine that its settings name."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from common.config import compose_config, trust_said, with_tuned
from common.errors import ConfigError, nearest
from common.models.pretrained import same_classes
from common.settings import RunSettings, settings_of
from server.engines.inline import InlineEngine
from server.flower.submit import run_on_ray, run_on_superlink
from server.flower.superlink import SimulationLink
from server.results.overrides import overrides_of
from server.results.run import Run
from server.run.conduct import conduct, prepare_output
from server.trackers.progress import watching

ENGINES = ("inline", "ray", "superlink")


def run(
    settings: RunSettings, overrides: Sequence[str], *, quiet: bool = False, link: SimulationLink | None = None
) -> None:
    """One run on the engine that the settings, made of ``overrides``, name; shown as it goes on unless ``quiet``.

    A simulation takes ``link``, a SuperLink that was started before, or starts one.
    """
    overrides = with_tuned(overrides)  # nodes do not have the file
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    engine = settings.engine.get("name")
    if engine not in ENGINES:
        raise ConfigError(f"engine.name={engine!r}; {nearest(str(engine), ENGINES)}")
    inline = InlineEngine(settings) if engine == "inline" else None  # which refuses a device that is not there
    if settings.model.pretrained and not quiet:
        kept = same_classes(settings.model.pretrained, settings.data.class_names)
        head = "with its classifier" if kept else "whose classes differ: these get a new classifier"
        print(f"starts from {settings.model.pretrained}, {head}")
    prepare_output(settings)
    with watching(settings, quiet=quiet) as show:
        if inline:
            conduct(settings, inline, [show])
        elif engine == "ray":
            run_on_ray(settings, overrides, [show], link)
        else:
            run_on_superlink(settings, overrides, [show])


def resume(folder: Path, overrides: Sequence[str], *, quiet: bool = False) -> None:
    """Go on with the run in ``folder``, by its own configuration and what ``overrides`` have otherwise."""
    trust_said(overrides)  # a class that the user names, not one of the folder's
    own = overrides_of(Run(folder))
    other = tuple(f"{word.partition('=')[0]}." for word in overrides if word not in own)  # what another choice replaces
    again = [word for word in own if not word.startswith(other)] + ["resume=true", "overwrite=false", *overrides]
    run(settings_of(compose_config(again, said=overrides)), again, quiet=quiet)
