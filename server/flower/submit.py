"""Submit a run to a SuperLink and follow it to its true end: ``flwr run`` itself exits 0 even when the run failed.

Only a copy of the code and the configuration is submitted, from an empty folder: ``flwr run`` reads all files of the
folder that it is given, virtual environments and data included, and a simulation imports code from the SuperLink's
working directory before the app's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common.choices import CONF, FOLDERS, choices_of
from common.config import Count, ZeroToOne, build, checked
from common.errors import ConfigError, EngineError
from common.extras import install_command
from common.log_lines import plain_line
from common.overrides import CONFIGURATION
from common.settings import RunSettings
from common.versions import OURS, VERSION
from server.flower.cluster import Machine, find_cluster, places_on
from server.flower.processes import (
    NOT_REACHED,
    NotTrustedError,
    answer_in,
    ask_flower,
    check_connection,
    flower_environment,
    flower_home,
    program,
)
from server.flower.superlink import CONNECTION, SimulationLink, simulation_link
from server.run.events import Listener
from server.run.tail import Tail

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
clientapp = "{client_app}"

[tool.flwr.app.config]
{configuration} = ""
"""

CLIENT_APP, SIMULATED_APP = "client.app:app", "server.flower.simulation:app"
"""The ClientApp of a device, and that of a simulation (:mod:`server.flower.simulation`)."""

MAX_LINES = 60
"""Lines of an error's message that are passed on: a client's traceback fits, a longer list is in the log only."""

HEAD_START_SECONDS = 8.0
"""Seconds that a simulation has to start before ``flwr log`` starts on the same cores; ``flwr log`` misses no line."""

MAX_SIMULATED_NODES = 100
"""Nodes of a simulation at most. With more clients a node hosts several. Flower sends each node a message to register,
and lists all nodes in every round: 5,000 nodes took minutes, and hundreds of their messages were lost."""

PATIENCE_SECONDS = 30.0
"""How long Flower's command line waits for an answer."""

STATUS_TRIES = 20
"""How often the SuperLink is asked for a run's final status, a second apart."""

NO_JSON = "flwr answered without JSON"
UNKNOWN_RUN = "Run ID not found"
"""What Flower's command line prints of a run that the SuperLink does not know."""

NO_REASON = ("", "N/A", "Task failed with unknown error.", "No heartbeat received from the task")
KEPT = "complete rounds are kept: resume=true goes on"
LOST = f"its server process ended without a message: killed, or out of memory, or its SuperLink was restarted; {KEPT}"


@checked
class RaySettings:
    """conf/engine/ray.yaml.

    Args:
        name: ``ray``.
        address: ``HOST:PORT`` of an existing Ray cluster, or ``auto``; ``None`` starts Ray for the run alone.
        actors: clients that train at the same time; ``None`` is one per CPU, at most one per client.
        gpus: share of a GPU that each actor takes, in [0, 1].
    """

    name: str
    address: str | None = None
    actors: Count | None = None
    gpus: ZeroToOne = 0.0


@checked
class SuperLinkSettings:
    """conf/engine/superlink.yaml.

    Args:
        name: ``superlink``.
        connection: name of the connection in Flower's ``config.toml``; ``None`` is its default.
    """

    name: str
    connection: str | None = None


def run_on_ray(settings: RunSettings, listeners: Sequence[Listener], link: SimulationLink | None = None) -> None:
    """Run a simulation on Ray.

    Args:
        settings: the run's settings.
        listeners: receive every event.
        link: the SuperLink; ``None`` starts one, and stops it after the run.

    Raises:
        ConfigError: Ray is not installed, cannot start its workers from this environment's folder, or has no room for
            an actor; or the cluster at ``engine.address`` cannot be joined.
        EngineError: the SuperLink did not start, or the run failed; the reason is in the message.
    """
    check_ray()
    options: RaySettings = build(settings.engine, "engine", RaySettings)
    environment = {}
    if options.address is None:
        machines: Sequence[Machine] = [_this_machine(options)]
    else:
        cluster = find_cluster(options.address)
        machines = cluster.machines
        environment["RAY_ADDRESS"] = cluster.address
        link = None  # its processes would start a Ray of their own
    places = places_on(machines, options.gpus)
    clients = len(settings.clients)
    federation = {
        "num-supernodes": min(clients, MAX_SIMULATED_NODES),
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": options.gpus,
        "init-args-num-cpus": min(options.actors or places, places, clients),
        "init-args-num-gpus": int(sum(machine.gpus for machine in machines)),
    }
    with contextlib.nullcontext(link) if link else simulation_link(**environment) as started:
        started.wait(settings.output_folder / "logs")
        submit(
            settings,
            CONNECTION,
            started.environment,
            started.neutral,
            federation,
            listeners,
            client_app=SIMULATED_APP,
        )


def _this_machine(options: RaySettings) -> Machine:
    """Return this machine. Ray counts a CPU for each actor that the user wants, whether or not it is there."""
    gpus = 0
    if options.gpus:
        import torch

        gpus = torch.cuda.device_count()
    return Machine("this machine", options.actors or os.cpu_count() or 1, gpus)


def check_ray() -> None:
    """Check that Ray is there and can start its workers.

    Raises:
        ConfigError: Ray is not installed, or the path of this environment has a blank.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"engine=ray needs Ray: {install_command('simulation')}, or choose engine=inline")
    environment = str(Path(sys.prefix).resolve())
    if len(environment.split()) > 1:
        raise ConfigError(
            f"Ray cannot start its workers from a folder with a blank in its path, here {environment!r}: make setup "
            "puts the environment into a folder without; or choose engine=inline"
        )


def run_on_superlink(settings: RunSettings, listeners: Sequence[Listener]) -> None:
    """Run on a SuperLink that is running already.

    Args:
        settings: the run's settings.
        listeners: receive every event.

    Raises:
        ConfigError: no SuperLink is configured under the connection's name.
        EngineError: the run failed; the reason is in the message.
    """
    options: SuperLinkSettings = build(settings.engine, "engine", SuperLinkSettings)
    home = flower_home()
    check_connection(home / "config.toml", options.connection)
    with tempfile.TemporaryDirectory(prefix="goldfinch-", ignore_cleanup_errors=True) as neutral:
        environment = flower_environment(home)
        submit(settings, options.connection, environment, Path(neutral), {}, listeners, outlives=True)


def submit(
    settings: RunSettings,
    connection: str | None,
    environment: Mapping[str, str],
    neutral: Path,
    federation: Mapping[str, object],
    listeners: Sequence[Listener],
    *,
    client_app: str = CLIENT_APP,
    outlives: bool = False,
) -> None:
    """Submit a run and follow it to its end.

    The listeners receive what the server process appends to ``events.jsonl``. Flower's own output goes to
    ``logs/flower.log``.

    Args:
        settings: the run's settings.
        connection: name of the connection in Flower's ``config.toml``; ``None`` is its default.
        environment: environment of Flower's programs.
        neutral: an empty folder for the app's copy and as the programs' working folder.
        federation: Flower's federation options.
        listeners: receive every event.
        client_app: the ClientApp, as ``module:name``.
        outlives: the SuperLink, and so the run, continue when this program is interrupted.

    Raises:
        EngineError: the run did not complete.
        KeyboardInterrupt: this program was interrupted. With ``outlives``, the message says how to follow the run.
    """
    app = write_bundle(neutral / "goldfinch", client_app)
    configuration = json.dumps(remote_configuration(settings))
    run = start_run(app, configuration, connection, environment, neutral, federation)
    log = settings.output_folder / "logs" / "flower.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = 0
    if log.exists():  # of a run that is resumed
        start = log.stat().st_size
    try:
        with _following(settings.output_folder / "events.jsonl", listeners) as has_event:
            if not outlives:
                has_event.wait(HEAD_START_SECONDS)
            status, details = run.follow(log)
    except KeyboardInterrupt as error:
        if not outlives:
            raise
        shown = shlex.join(["goldfinch", "report", str(settings.output), "--watch"])
        ended = shlex.join(["flwr", "stop", run.identity, *run.target])
        raise type(error)(f"no longer watching; the run goes on: {shown} shows it again, {ended} ends it") from None
    if status == "finished:completed":
        return
    raise EngineError(how_it_ended(status, details, log, start))


def how_it_ended(status: str, details: str, log: Path, start: int = 0) -> str:
    """Return why a run did not complete, and what to do.

    Args:
        status: the run's final status in Flower.
        details: Flower's text about the status.
        log: file with Flower's output.
        start: bytes of it that are of earlier runs in the same folder.
    """
    if status == "finished:stopped":
        return f"the run was stopped, as flwr stop does; {KEPT}"
    if details in NO_REASON:
        details = LOST
    cause = cause_of(log, start) or details
    return f"the run ended as {status}: {cause}\n(Flower's own output is in {log})"


def start_run(
    app: Path,
    configuration: str,
    connection: str | None,
    environment: Mapping[str, str],
    neutral: Path,
    federation: Mapping[str, object],
) -> SubmittedRun:
    """Submit an app to a SuperLink, and return its run.

    Args:
        app: the app's folder, see :func:`write_bundle`.
        configuration: the run's composed configuration as JSON.
        connection: name of the connection in Flower's ``config.toml``; ``None`` is its default.
        environment: environment of Flower's programs.
        neutral: a folder for the programs' files.
        federation: Flower's federation options.

    Raises:
        EngineError: the SuperLink does not answer, or refuses the run.
    """
    folder = neutral / "cwd"  # Flower's commands read an argument that names a folder here as an app
    folder.mkdir(exist_ok=True)
    path = neutral / "run.toml"  # a file, because Flower's parser of command-line values fails on nested quotes
    path.write_text(f"{CONFIGURATION} = {json.dumps(configuration, ensure_ascii=False)}\n", encoding="utf-8")
    target = []
    if connection:
        target.append(connection)
    command = ["run", str(app), *target, "--run-config", str(path)]
    if federation:
        options = " ".join(f"{key}={value}" for key, value in federation.items())
        command += ["--federation-config", options]
    began = time.monotonic()
    printed = _call(command, environment, folder)
    answer = answer_in(printed, NO_JSON)
    if "run-id" not in answer:
        message = str(answer.get("error-message") or printed.strip())
        raise EngineError(_why_not_taken(message, time.monotonic() - began))
    return SubmittedRun(str(answer["run-id"]), target, environment, folder)


def _why_not_taken(message: str, seconds: float) -> str:
    """Return why a run was not submitted: Flower gives one message for a link that is slow and for one that fails.

    Args:
        message: Flower's.
        seconds: how long ``flwr run`` took.
    """
    if NOT_REACHED not in message:
        return f"flwr run was refused: {message}"
    if seconds < PATIENCE_SECONDS:
        return (
            f"the SuperLink was not reached, after {seconds:.0f} s: is it running, is its address in config.toml right,"
            " and is its certificate of the authority named there? Then submit the run again"
        )
    return (
        f"the link to the SuperLink is slow, or it is busy: it took longer than Flower's {PATIENCE_SECONDS:.0f} s. "
        "flwr list shows whether it took the run; if not, submit it again, on the SuperLink's own network"
    )


def remote_configuration(settings: RunSettings) -> dict[str, Any]:
    """Return the composed configuration for the run's other processes.

    Paths are absolute, because those processes have other working folders.
    """
    model = _with_absolute_paths(settings.raw["model"], settings.model)
    return {**settings.raw, "output": str(settings.output_folder), "model": model}


def _with_absolute_paths(node: Any, value: Any) -> Any:
    """Return the configuration of a value with an absolute path wherever the value, or a part of it, is a path."""
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    if not isinstance(node, Mapping):
        return node
    values: dict[str, Any] = {}
    for key, inner in node.items():
        if isinstance(value, Mapping):
            values[key] = _with_absolute_paths(inner, value.get(key))
        else:
            values[key] = _with_absolute_paths(inner, getattr(value, key, None))
    return values


def write_bundle(folder: Path, client_app: str = CLIENT_APP) -> Path:
    """Copy the app's packages and a minimal ``pyproject.toml`` to ``folder``, and return it.

    Choices of the user's own folders (:func:`common.choices.search`) are copied to ``conf/``, so that every process of
    the run has them. The app has no dependencies on purpose: they are installed already, and Flower would fetch them
    again for every run.

    Args:
        folder: a folder that does not exist yet.
        client_app: the ClientApp, as ``module:name``.
    """
    folder.mkdir(parents=True)
    for package in OURS:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for group in CONF.iterdir():
        if not group.is_dir():
            continue
        for path in choices_of(group.name, FOLDERS[1:]).values():
            shutil.copy(path, folder / "conf" / group.name)
    (folder / "pyproject.toml").write_text(
        PYPROJECT.format(version=VERSION, client_app=client_app, configuration=CONFIGURATION)
    )
    return folder


@dataclass(frozen=True)
class SubmittedRun:
    """A run that the SuperLink accepted.

    Args:
        identity: Flower's id of the run.
        target: the connection's name as an argument of ``flwr``; empty for the default connection.
        environment: environment of Flower's programs.
        folder: working folder of Flower's programs.
    """

    identity: str
    target: Sequence[str]
    environment: Mapping[str, str]
    folder: Path

    def follow(self, log: Path) -> tuple[str, str]:
        """Append Flower's output, plain, to ``log`` until the run has ended. Return its status and Flower's details.

        Raises:
            EngineError: the SuperLink no longer answers, or no longer knows the run.
        """
        with log.open("ab") as stream:
            while True:  # the output also ends when the connection breaks
                self._copy_output(stream)
                status, details = self._status()
                if status.startswith("finished"):
                    return status, details

    def _copy_output(self, stream: IO[bytes]) -> None:
        """Append the run's output until it ends. A line has no time: ``flwr log`` repeats those of before."""
        with subprocess.Popen(  # noqa: S603  # our own command, no shell
            [program("flwr"), "log", self.identity, *self.target, "--stream"],
            env=dict(self.environment),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                for line in process.stdout or ():
                    stream.write(plain_line(line))
                    stream.flush()
            except BaseException:  # such as Ctrl-C
                process.kill()
                raise

    def _status(self) -> tuple[str, str]:
        """Return the run's status and details, after up to 20 seconds if it is not final: the output can end before it.

        Raises:
            EngineError: the SuperLink no longer answers, is not trusted, or no longer knows the run.
        """
        status = ""
        details = ""
        problem = ""
        for _ in range(STATUS_TRIES):
            try:
                printed = _call(["list", *self.target, "--run-id", self.identity], self.environment, self.folder)
                entry = entry_of(printed)
            except NotTrustedError as error:
                raise EngineError(f"how run {self.identity} ends is not known here: {error}") from error
            except EngineError as error:  # the SuperLink can come back
                problem = str(error)
                if UNKNOWN_RUN in problem:
                    raise EngineError(
                        f"the SuperLink no longer knows run {self.identity}: it was restarted and has lost its store, "
                        f"and the run ended with it; {KEPT}"
                    ) from error
            else:
                status = str(entry["status"])
                details = str(entry.get("status-details", ""))
                if status.startswith("finished"):
                    return status, details
            time.sleep(1.0)
        if not status:
            raise EngineError(
                f"the SuperLink no longer answers for run {self.identity}, so how it ended is not known. A run does "
                "not outlive its SuperLink: start that again, then resume=true goes on after the last complete round\n"
                f"{problem}"
            )
        return status, details


def entry_of(listed: str) -> dict[str, Any]:
    """Return the one run in the output of ``flwr list``, which can exit with 0 although it failed.

    Args:
        listed: what ``flwr list`` printed.

    Raises:
        EngineError: the output has no run. The message is Flower's own.
    """
    answer = answer_in(listed, NO_JSON)
    runs = answer.get("runs")
    if not runs:
        raise EngineError(f"flwr list failed: {answer.get('error-message') or listed.strip()}")
    return runs[0]


def _call(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Return what ``flwr`` prints; raise an error if it fails."""
    result = ask_flower(arguments, environment, folder)
    if result.returncode:
        raise EngineError(f"flwr {arguments[0]} failed: {(result.stdout + result.stderr).strip()}")
    return result.stdout


RAY_TIMED_OUT = "The current node timed out during startup"
"""What Ray prints if its processes do not start in time; Flower's last error does not repeat it."""

RAY_IS_LATE = (
    "Ray did not start within its 30 s, as on a machine that is busy or short of memory: end other programs and run "
    "the command again, or take engine=inline, which gives the same result"
)


ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z]\w*(?:Error|Exception|Exit|Timeout|Interrupt): \S.*")
"""The last line of a traceback: the error's class, by its full name, and its message."""

LINE_HEAD = re.compile(r"^(?:\([^()]*(?:pid|ip)=[^()]*\)|(?:ERROR|WARNING)\s*:)\s*")
"""What Ray and Flower write before a line of a process's output."""

GOLDFINCH_ERROR = "common.errors."


def cause_of(log: Path, start: int = 0) -> str:
    """Return the error in Flower's output that ended the run.

    The last of Goldfinch's own errors names reasons and remedy, so it is returned with the indented lines of its
    message. Without an error of Goldfinch's own, the first error is returned: Flower's and Ray's later errors only wrap
    it.

    Args:
        log: file with Flower's output.
        start: bytes of it that are of earlier runs in the same folder.

    Returns:
        The error; empty if there is none, or no such file.
    """
    try:
        content = log.read_bytes()[start:]
    except OSError:
        return ""
    raw = plain_line(content).decode(errors="replace").splitlines()
    lines = [LINE_HEAD.sub("", line) for line in raw]
    for index in reversed(range(len(lines))):
        if lines[index].strip().startswith(GOLDFINCH_ERROR):
            message = [lines[index].strip().partition(": ")[2]]
            for following in raw[index + 1 : index + 1 + MAX_LINES]:
                if not following.startswith("  "):
                    break
                message.append(following)
            return "\n".join(message)
    if any(RAY_TIMED_OUT in line for line in lines):
        return RAY_IS_LATE
    return next((line for line in lines if ERROR_LINE.fullmatch(line)), "")


@contextlib.contextmanager
def _following(path: Path, listeners: Sequence[Listener]) -> Iterator[threading.Event]:
    """Pass events on to the listeners as the server process appends them to ``path``, within the block.

    Yields:
        An event that is set once the first event of the run was read.
    """
    done = threading.Event()
    has_event = threading.Event()
    known: list[bytes] = []  # lines of before, which a resumed run writes again
    if path.exists():
        known = path.read_bytes().splitlines()
    tail = Tail(path, known)

    def follow() -> None:
        is_last_read = False
        while not is_last_read:
            is_last_read = done.wait(0.3)
            for entry in tail.read():
                has_event.set()
                for listener in listeners:
                    listener(entry["event"], entry)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield has_event
    finally:
        done.set()
        thread.join()
