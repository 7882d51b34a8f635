"""``goldfinch run`` and ``goldfinch resume``: one run on the engine that its settings name."""

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf

from common.config import changed_config, trust_overrides
from common.errors import ConfigError, DataError, nearest
from common.metrics import named_missing
from common.models.pretrained import same_classes
from common.prototypes import PrototypeSet
from common.settings import RunSettings, settings_of
from common.wire.payload import Payload, cast_down, encoded_size
from server.engines.inline import InlineEngine
from server.flower.submit import run_on_ray, run_on_superlink
from server.flower.superlink import SimulationLink
from server.results.run import Run
from server.run.conduct import check_holds_no_runs, check_not_in_a_run, prepare_output, run_federation
from server.run.resume import check_resumable, has_finished
from server.trackers.live import watching
from strategies.core.federation import Federation

HERE = {"name": "inline", "device": "client.local.local_device"}
ENGINES = ("inline", "ray", "superlink")


def run(settings: RunSettings, *, quiet: bool = False, link: SimulationLink | None = None) -> None:
    """Train one run on the engine that its settings name.

    With ``resume`` a run that has finished with a whole score, of which the settings ask for nothing more, stays as it
    is.

    Args:
        settings: the run's settings.
        quiet: show no progress.
        link: a running SuperLink for a simulation; ``None`` starts one.

    Raises:
        ConfigError: the engine does not exist, or the output folder cannot be used.
        CheckpointError: a setting contradicts the rounds that are done of a run that is resumed; nothing was started
            or written.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    engine = settings.engine.get("name")
    if engine not in ENGINES:
        raise ConfigError(f"engine.name={engine!r}; {nearest(str(engine), ENGINES)}")
    check_resumable(settings)  # before an engine is started or data are read
    if has_finished(settings):
        if not quiet:
            print(f"{settings.output_folder} has finished, and nothing is left to do; train.rounds=N adds rounds")
        return
    inline = None
    if engine == "inline":
        inline = InlineEngine(settings)  # before the output folder is written: it may refuse the device
    if settings.model.pretrained and not quiet:
        head = "with a new classifier, since the classes differ or the export has none"
        if same_classes(settings.model.pretrained, settings.data.class_names):
            head = "with its classifier"
        print(f"starts from {settings.model.pretrained}, {head}")
    check_not_in_a_run(settings.output_folder)
    check_holds_no_runs(settings.output_folder)
    prepare_output(settings)
    with watching(settings, quiet=quiet) as show:
        if inline:
            run_federation(settings, inline, [show])
        elif engine == "ray":
            run_on_ray(settings, [show], link)
        else:
            run_on_superlink(settings, [show])
    _warn_if_partial(settings.output_folder)


def _warn_if_partial(folder: Path) -> None:
    """Print a warning to standard error if the final score lacks domains, also with ``--quiet``."""
    missing = Run(folder).summary.get("missing", {})
    if missing:
        print(
            f"warning: the final score is PARTIAL, without {named_missing(missing)}; average and worst are over the "
            "other domains alone",
            file=sys.stderr,
        )


def resume(folder: Path, overrides: Sequence[str], *, quiet: bool = False) -> Path:
    """Resume the run in ``folder`` with its own configuration, changed by ``overrides``.

    Engine, tracker, device and deadlines may change, and of the settings that change the result those of
    :data:`common.run_config.CHANGEABLE_ON_RESUME`: more rounds, ``train.patience`` and ``rounds.last_rounds``. With
    ``output=`` of another folder it is a new run, and every setting may change.

    Returns:
        The folder that the run is in.

    Raises:
        ConfigError: the folder holds no run, or a setting is wrong.
        CheckpointError: a setting contradicts the rounds that are done; nothing was started or written.
    """
    trust_overrides(overrides)  # only the user's own, not those of the folder
    recorded = {**Run(folder).config, "output": str(folder.absolute()), "resume": True, "overwrite": False}
    try:
        settings = settings_of(changed_config(recorded, overrides))
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.yaml'} with your overrides: {error}") from error
    run(settings, quiet=quiet)
    return settings.output_folder


# ---- goldfinch run --dry-run -----------------------------------------------------------------------------------------


def preview(settings: RunSettings) -> None:
    """Print the composed configuration, the clients with their samples, and roughly the bytes of a round."""
    print(OmegaConf.to_yaml(OmegaConf.create(dict(settings.raw))))
    federation = Federation(settings)
    names = federation.registry.expected
    print(f"# {len(names)} clients, output {settings.output_folder}")
    try:
        engine = InlineEngine(replace(settings, engine=HERE))
        engine.register(names, federation.registry.admit, 0.0)
        engine.close()
        for registration in federation.registry.registrations.values():
            print(f"#   {registration.client:24} {registration.samples:>8} samples")
    except DataError as error:  # on a SuperLink the data are on the devices
        for name in names:
            print(f"#   {name}")
        print(f"# samples are not known here: {error}")
    sampled = settings.rounds.sampled(len(names))
    sizes = bytes_of_a_round(federation)
    for way, size in sizes.items():
        print(f"# about {size * sampled:,} bytes {way} a round: {sampled} clients, {size:,} each")


def bytes_of_a_round(federation: Federation) -> Mapping[str, int]:
    """Return the bytes ``down`` to and ``up`` from one client over a round's exchanges.

    A prototype set counts as one row per class unless the method allows more. Sizes that depend on the data, such as
    the number of clusters, are not counted.
    """
    method, settings = federation.method, federation.settings
    state = federation.initial_state()
    samples = [client.samples for client in federation.registry.clients()] or [0]
    sizes = {"down": 0, "up": 0}
    for exchange in method.exchanges:
        federation.begin(1, exchange, score=exchange == method.scored_at)
        server = federation.server
        expected = method.expects(server)
        rows = server.class_count * (expected.max_rows or 1)
        shared = PrototypeSet(
            torch.zeros(rows, server.feature_size),
            torch.arange(server.class_count).repeat_interleave(rows // server.class_count),
            torch.ones(rows),
        )
        known = {"samples": round(sum(samples) / len(samples)), None: 0}
        extra: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in expected.extra.items():
            sides: list[int] = []
            for length in shape:
                if not isinstance(length, int):
                    length = known[length]
                sides.append(length)
            extra[name] = torch.empty(sides, dtype=dtype)
        upload = Payload({}, None, extra)
        if expected.weights:
            upload = replace(upload, weights=server.shared)
        if expected.prototypes:
            upload = replace(upload, prototypes=shared)
        message = federation.message(state)
        if message.prototypes is not None and not len(message.prototypes):  # as from the second round on
            message = replace(message, prototypes=shared)
        sizes["down"] += encoded_size(message)
        sizes["up"] += encoded_size(cast_down(upload, settings.rounds.transport))
    return sizes
