"""``goldfinch run`` and ``goldfinch resume``: one run on the engine that its settings name."""

import logging
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from common.choices import choices_of, folder_options
from common.composition import changed_config, compose_config, trust_overrides
from common.errors import ConfigError, DataError, nearest, some_of
from common.metrics import named_missing
from common.models.pretrained import same_classes
from common.overrides import parse_overrides
from common.prototypes import PrototypeSet
from common.run_config import flat
from common.settings import RunSettings, check_deployable, inspect_run, settings_of
from common.storage import write_json
from common.text import printable, quantity, shell_line
from common.wire.payload import Payload, cast_down, encoded_size
from goldfinch.overrides import check_reachable
from goldfinch.record import RunRecord
from goldfinch.trackers.live import watching
from server.engines.inline import InlineEngine
from server.flower.submit import run_on_ray, run_on_superlink
from server.flower.superlink import SimulationLink
from server.run.checkpoint import Checkpoints
from server.run.conduct import prepare_output, run_federation
from server.run.events import count_lines
from server.run.existing import Step, decide
from server.run.summary import SUMMARY
from strategies.core.federation import Federation

HERE = {"name": "inline", "device": "client.local.local_device"}
ENGINES = ("inline", "ray", "superlink")

SIMULATED = ("inline", "ray")
"""Engines that need all data on this machine."""

PLACES = ("tracker",)
"""Groups of settings that say where a run writes outside its own folder, and which servers it calls."""


def run(settings: RunSettings, *, quiet: bool = False, link: SimulationLink | None = None) -> None:
    """Train one run on the engine that its settings name.

    With ``resume`` a run that has finished with a whole score, of which the settings ask for nothing more, stays as it
    is.

    Args:
        settings: the run's settings.
        quiet: show no progress.
        link: a running SuperLink for a simulation; ``None`` starts one.

    Raises:
        ConfigError: the engine does not exist, the output folder cannot be used, or code has changed since this process
            imported it.
        CheckpointError: a setting contradicts the rounds that are done of a run that is resumed; nothing was started
            or written.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    engine = settings.engine.get("name")
    if engine not in ENGINES:
        raise ConfigError(f"engine.name={engine!r}; {nearest(str(engine), ENGINES)}")
    settings.check_code()
    if engine != "inline":
        check_reachable(flat(settings.raw), f"engine={engine}")
    if engine not in SIMULATED:
        check_deployable(settings)
    if decide(settings).step is Step.NOTHING:  # before an engine is started or data are read
        write_summary(settings.output_folder)
        if not quiet:
            more = "; train.rounds=N adds rounds" if settings.method.trains else ""
            print(f"{settings.output_folder} has finished, and nothing is left to do{more}")
        return
    inline = None
    if engine == "inline":
        inline = InlineEngine(settings)  # before the output folder is written: it may refuse the device
    if settings.model.pretrained and not quiet:
        head = "with a new classifier, since the classes differ or the export has none"
        if same_classes(settings.model.pretrained, settings.data.class_names):
            head = "with its classifier"
        print(f"starts from {settings.model.pretrained}, {head}")
    settings.data.forget()  # files may have changed since an earlier run of this process
    if inline and not quiet:
        print(one_device(settings.train.device), end="")
    prepare_output(settings)
    try:
        with watching(settings, quiet=quiet) as show:
            if inline:
                run_federation(settings, inline, [show])
            elif engine == "ray":
                run_on_ray(settings, [show], link)
            else:
                run_on_superlink(settings, [show])
    except KeyboardInterrupt as error:
        if str(error):
            raise
        raise type(error)(f"stopped; {what_is_kept(settings)}") from None
    _warn_if_partial(settings.output_folder)


def write_summary(folder: Path) -> None:
    """Write ``summary.json`` of a run that has ended, if it is missing: the disk may have been full at the end."""
    if not (folder / SUMMARY).exists():
        write_json(folder / SUMMARY, RunRecord(folder).summary)


def what_is_kept(settings: RunSettings) -> str:
    """Return what a stopped run's folder holds, and the command that goes on."""
    folder = settings.output_folder
    rounds = Checkpoints(folder / "checkpoint").series.numbers()
    if not rounds:
        return "no round was complete, so nothing is kept: the same command with overwrite=true begins again"
    words = ["goldfinch", "resume", str(folder)]
    for group, choice in settings.choices.items():
        if "." in str(choice):  # a class that the user named, and that no file of conf/ does
            words.append(f"{group}._target_={choice}")
    words += folder_options()
    if _foreign_places(settings.raw) or _links_out(folder):
        words.append("--trust")
    return f"round {max(rounds)} is kept: {shell_line(words)} goes on"


def one_device(name: str) -> str:
    """Return the line that tells of GPUs which the inline engine leaves idle; empty if there are none.

    Args:
        name: ``train.device``.
    """
    count = torch.cuda.device_count()
    if name == "cpu" or count < 2:
        return ""
    if name in ("auto", "cuda"):
        name = "cuda:0"
    return f"engine=inline uses one device, {name}, of {count}; engine=ray engine.gpus=1 uses them all\n"


def _warn_if_partial(folder: Path) -> None:
    """Print a warning to standard error if the final score lacks domains, also with ``--quiet``."""
    missing = RunRecord(folder).rules.get("final", {}).get("missing", {})
    if missing:
        print(
            f"warning: the final score is PARTIAL, without {named_missing(missing)}; average and worst are over the "
            "other domains alone",
            file=sys.stderr,
        )


def resume(folder: Path, overrides: Sequence[str], *, quiet: bool = False, trust: bool = False) -> Path:
    """Resume the run in ``folder`` with its own configuration, changed by ``overrides``.

    Engine, tracker, device and deadlines may change, and of the settings that change the result those of
    :data:`common.run_config.CHANGEABLE_ON_RESUME`: more rounds, ``train.patience`` and ``rounds.last_rounds``. With
    ``output=`` of another folder it is a new run, and every setting may change.

    The folder may come from somebody else. The recorded settings of the tracker count where they are the
    defaults, which write to the run's own folder; others must be among ``overrides``.

    Args:
        folder: the run's folder.
        overrides: ``key=value`` each, the user's own.
        quiet: show no progress.
        trust: take every setting of the folder.

    Returns:
        The folder that the run is in.

    Raises:
        ConfigError: the folder holds no run, a setting is wrong, or the folder alone says where to write.
        CheckpointError: a setting contradicts the rounds that are done; nothing was started or written.
    """
    given = parse_overrides(overrides)
    trust_overrides(given)  # only the user's own, not those of the folder
    recorded = {
        **RunRecord(folder).trusted_config,
        "output": str(folder.absolute()),
        "resume": True,
        "overwrite": False,
    }
    if not trust:
        _check_places(folder, recorded, {item.key for item in given})
    try:
        settings = settings_of(changed_config(recorded, given))
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.yaml'} with your overrides: {error}") from error
    if not settings.method.trains and "train.rounds" in {item.key for item in given}:
        raise ConfigError(f"train.rounds: the run in {folder} evaluates a model and trains none; leave it out")
    if not trust:
        _check_links(settings.output_folder)
    run(settings, quiet=quiet)
    return settings.output_folder


def _check_places(folder: Path, recorded: Mapping[str, Any], named: Collection[str]) -> None:
    """Refuse a recorded configuration that itself says where the run writes, or whom it calls.

    Args:
        folder: the run's folder.
        recorded: its configuration.
        named: the keys that the user's own overrides set.

    Raises:
        ConfigError: it does; the message names each such setting.
    """
    foreign = _foreign_places(recorded, named)
    if foreign:
        raise ConfigError(
            f"{folder / 'config.yaml'} says where the run writes or trains besides {folder}: {' '.join(foreign)}. "
            "Resuming a run does not take that from its folder alone, which may be of somebody else: repeat the "
            "setting after the folder, choose tracker=csv or engine=inline, or add --trust if the folder is your own"
        )


def _check_links(folder: Path) -> None:
    """Refuse a folder with links through which the run would write, and delete checkpoints, elsewhere.

    Raises:
        ConfigError: there are such links; the message names them.
    """
    links = _links_out(folder)
    if links:
        raise ConfigError(
            f"{some_of(links)}, outside {folder}, where resuming the run would write: put copies in place of the links "
            "(cp -rL), go on in another folder with output=, or add --trust if the folder is your own"
        )


def _links_out(folder: Path) -> list[str]:
    """Return the links in and below a folder that lead out of it, and where to."""
    home = Path(os.path.realpath(folder))
    leading: list[str] = []
    for name, folders, files in os.walk(folder):
        for path in [Path(name, each) for each in sorted([*folders, *files])]:
            end = os.path.realpath(path)
            if path.is_symlink() and not Path(end).is_relative_to(home):
                leading.append(printable(f"{path} leads to {end}"))
    return leading


def _foreign_places(recorded: Mapping[str, Any], named: Collection[str] = ()) -> list[str]:
    """Return the settings by which a configuration says where the run writes, or whom it calls.

    These are :data:`PLACES` and the address of a Ray cluster, whose replies could run any code here.

    Args:
        recorded: the configuration.
        named: the keys that the user's own overrides set.
    """
    foreign: list[str] = []
    for group in PLACES:
        settings = recorded.get(group, {})
        choice = recorded["choices"].get(group)
        defaults: Mapping[str, Any] = {}
        if choice in choices_of(group):
            defaults = compose_config([f"{group}={choice}"])[group]
        for key, value in settings.items():
            name = f"{group}.{key}"
            if value != defaults.get(key) and name not in named and group not in named:
                foreign.append(printable(f"{name}={value}")[:200])
    address = recorded["engine"].get("address")  # what a Ray cluster sends can run code here
    if address and "engine" not in named and "engine.address" not in named:
        foreign.append(printable(f"engine.address={address}")[:200])
    return foreign


# ---- goldfinch run --dry-run -----------------------------------------------------------------------------------------


def preview(settings: RunSettings) -> None:
    """Print the settings that are not the defaults, the clients with their samples, and about the bytes of a round."""
    print("# settings that are not the defaults; config.yaml in a run's folder has all")
    print(OmegaConf.to_yaml(OmegaConf.create(_different(settings.raw, compose_config(())))))
    federation = Federation(settings)
    names = federation.registry.expected
    print(f"# {quantity(len(names), 'client')}, output {settings.output_folder}")
    try:
        inspect_run(settings)
        engine = InlineEngine(replace(settings, engine=HERE))
        engine.register(names, federation.registry.admit, 0.0)
        engine.close()
        counts = {name: each.class_counts for name, each in federation.registry.registrations.items()}
        for line in count_lines(settings.data.class_names, counts, most=len(counts)):  # no report has them
            print(f"# {line}")
    except DataError as error:
        if settings.engine.get("name") in SIMULATED:
            raise
        for name in names:  # on a SuperLink the data are on the devices
            print(f"#   {name}")
        print(f"# samples are not known here: {error}")
    sampled = settings.rounds.sampled(len(names))
    sizes = bytes_of_a_round(federation)
    for way, size in sizes.items():
        print(f"# about {size * sampled:,} bytes {way} a round: {quantity(sampled, 'client')}, {size:,} each")


def _different(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not the same in ``defaults``, group by group."""
    differences: dict[str, Any] = {}
    for key, value in given.items():
        before = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            below = _different(value, before)
            if below:
                differences[key] = below
        elif value != before or key not in defaults:
            differences[key] = value
    return differences


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
