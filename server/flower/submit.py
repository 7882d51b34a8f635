"""Submit a run to a SuperLink and follow it to its true end: ``flwr run`` itself exits 0 even when the run failed.

What is submitted is a folder of the code and configuration alone, in a neutral place, whatever this Goldfinch was
installed from: ``flwr run`` walks all that it is given, virtual environments and data included, and a simulation
imports code from the SuperLink's working directory before the app.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.choices import CONF, FOLDERS, choices_of
from common.config import Count, ZeroToOne, build, checked
from common.errors import ConfigError, EngineError
from common.overrides import quoted_override
from common.settings import RunSettings
from common.versions import CODE, VERSION
from server.flower.processes import answer_in, ask_flower, flower_environment, program
from server.flower.superlink import CONNECTION, SimulationLink, simulation_link
from server.trackers.events import Listener

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

MAX_LINES = 60
"""Lines of an error's message that are passed on at most: a client's traceback fits, a long list is in the log."""


@checked
class RaySettings:
    """conf/engine/ray.yaml.

    Args:
        name: ``ray``.
        actors: clients that train at the same time; ``None`` is one per CPU, at most one per client.
        gpus: share of a GPU that each actor takes, in [0, 1].
    """

    name: str
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


def run_on_ray(
    settings: RunSettings,
    overrides: Sequence[str],
    listeners: Sequence[Listener],
    link: SimulationLink | None = None,
) -> None:
    """A simulation on ``link``, or on a SuperLink of its own, in a neutral folder, ended with the run.

    Raises:
        EngineError: the SuperLink did not start, or the run failed; the reason is in the message.
    """
    if link is None:
        with simulation_link() as started:
            run_on_ray(settings, overrides, listeners, started)
        return
    import torch

    options: RaySettings = build(settings.engine, "engine", RaySettings)
    clients = len(settings.protocol.clients(settings.data))
    actors = min(options.actors or os.cpu_count() or 1, clients)
    federation = {
        "num-supernodes": clients,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": options.gpus,
        "init-args-num-cpus": actors,
        "init-args-num-gpus": torch.cuda.device_count() if options.gpus else 0,
    }
    link.wait(settings.output_folder / "logs")
    submit(settings, overrides, CONNECTION, link.environment, link.neutral, federation, listeners)


def run_on_superlink(settings: RunSettings, overrides: Sequence[str], listeners: Sequence[Listener]) -> None:
    """Run on a SuperLink that is running already.

    Raises:
        ConfigError: no SuperLink is configured under the connection's name.
        EngineError: the run failed; the reason is in the message.
    """
    options: SuperLinkSettings = build(settings.engine, "engine", SuperLinkSettings)
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    check_connection(home / "config.toml", options.connection)
    with tempfile.TemporaryDirectory(prefix="goldfinch-", ignore_cleanup_errors=True) as neutral:
        environment = flower_environment(home)
        submit(settings, overrides, options.connection, environment, Path(neutral), {}, listeners, outlives=True)


def check_connection(path: Path, name: str | None) -> None:
    """Check that a connection leads to a SuperLink that somebody started.

    Without one, ``flwr run`` starts a SuperLink of its own, simulates on this machine, and leaves it running.

    Args:
        path: Flower's ``config.toml``.
        name: the connection's name; ``None`` is the default one.

    Raises:
        ConfigError: the connection is missing, or is Flower's local simulation.
    """
    try:
        connections = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
        chosen = name or connections.get("default", "local")
    except FileNotFoundError:
        connections, chosen = {}, name or "local"
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    connection = connections.get(chosen)
    address = connection.get("address") if isinstance(connection, dict) else None
    if isinstance(address, str) and address and not address.startswith(":local"):
        return
    found = f"is Flower's local simulation, {address}" if address else "names no SuperLink"
    raise ConfigError(
        f"engine=superlink: the connection {chosen!r} in {path} {found}. Add a connection with the SuperLink's address "
        "(docs/deploy.md) and name it by engine.connection=NAME; to simulate on this machine, choose engine=ray"
    )


def submit(
    settings: RunSettings,
    overrides: Sequence[str],
    connection: str | None,
    environment: Mapping[str, str],
    neutral: Path,
    federation: Mapping[str, object],
    listeners: Sequence[Listener],
    *,
    outlives: bool = False,
) -> None:
    """Submit, follow ``events.jsonl`` for the listeners, keep Flower's own output in ``logs/flower.log``.

    Args:
        settings: the run's settings.
        overrides: the overrides that they were composed of.
        connection: of Flower's configuration; ``None`` is its default.
        environment: of Flower's programs.
        neutral: an empty folder for the bundle and as their working folder.
        federation: Flower's federation options.
        listeners: told of every event.
        outlives: the SuperLink goes on when this program is interrupted, and so does the run; the interruption says so.

    Raises:
        EngineError: the run did not complete.
    """
    app = write_bundle(neutral / "goldfinch")
    empty = neutral / "cwd"  # Flower's commands take an argument that names a folder here for an app
    empty.mkdir(exist_ok=True)
    places = [quoted_override("output", settings.output_folder)]
    if settings.data.root:  # a relative path means something else where the server and its clients run
        places.append(quoted_override("data.root", settings.data.root))
    if settings.model.pretrained:
        places.append(quoted_override("model.pretrained", settings.model.pretrained.expanduser().absolute()))
    text = shlex.join([*overrides, *places])
    target = [connection] if connection else []
    # a file, because Flower's parser of command-line values stumbles over quotes inside quotes
    run_config = neutral / "run.toml"
    run_config.write_text(f"overrides = {json.dumps(text, ensure_ascii=False)}\n", encoding="utf-8")
    command = ["run", str(app), *target, "--run-config", str(run_config)]
    if federation:
        command += ["--federation-config", " ".join(f"{key}={value}" for key, value in federation.items())]
    started = _call(command, environment, empty)
    answer = answer_in(started, NO_JSON)
    if "run-id" not in answer:
        raise EngineError(f"flwr run was refused: {answer.get('error-message') or started.strip()}")
    run = str(answer["run-id"])
    logs = settings.output_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    events = settings.output_folder / "events.jsonl"
    try:
        with (logs / "flower.log").open("ab") as stream, _following(events, listeners) as spoke:
            if not outlives:
                spoke.wait(HEAD_START_SECONDS)
            status, details = "", ""
            while not status.startswith("finished"):  # the stream also ends when the connection does
                subprocess.run(  # noqa: S603  # our own command, no shell
                    [program("flwr"), "log", run, *target, "--stream"],
                    env=dict(environment),
                    cwd=empty,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
                status, details = _final_status(run, target, environment, empty)
    except KeyboardInterrupt as error:
        if not outlives:
            raise
        names = shlex.join([run, *target])
        raise type(error)(
            f"no longer watching; the run goes on: flwr log {names} --stream follows it, flwr stop {names} ends it"
        ) from None
    if status != "finished:completed":
        cause = cause_of(logs / "flower.log") or (LOST if details in NO_REASON else details)
        raise EngineError(f"the run ended as {status}: {cause}\n(Flower's own output is in {logs / 'flower.log'})")


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


HEAD_START_SECONDS = 8.0
"""How long `flwr log` lets a simulation start on the same cores before it starts itself: it gets all lines anyway."""

NO_JSON = "flwr answered without JSON"
NO_REASON = ("", "Task failed with unknown error.", "No heartbeat received from the task")
LOST = (
    "its server process ended without a word: killed, or out of memory, or its SuperLink was restarted; the last "
    "complete round is kept: resume=true goes on"
)


def _final_status(run: str, target: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[str, str]:
    """The run's status once it is final, for which the SuperLink has 20 seconds: the log stream can end before it.

    Raises:
        EngineError: the SuperLink does not answer any more.
    """
    status, details, problem = "", "", ""
    for _ in range(20):
        try:
            entry = entry_of(_call(["list", *target, "--run-id", run], environment, folder))
        except EngineError as error:  # it may be about to come back
            problem = str(error)
        else:
            status, details = str(entry["status"]), str(entry.get("status-details", ""))
            if status.startswith("finished"):
                return status, details
        time.sleep(1.0)
    if not status:
        raise EngineError(
            f"the SuperLink no longer answers for run {run}, so how it ended is not known. A run does not outlive its "
            f"SuperLink: start that again, then resume=true goes on after the last complete round\n{problem}"
        )
    return status, details


def entry_of(listed: str) -> dict[str, Any]:
    """The one run in what ``flwr list`` printed; it may exit with 0 although it failed.

    Raises:
        EngineError: no run is in it; the message is Flower's own.
    """
    answer = answer_in(listed, NO_JSON)
    runs = answer.get("runs")
    if not runs:
        raise EngineError(f"flwr list failed: {answer.get('error-message') or listed.strip()}")
    return runs[0]


def _call(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    result = ask_flower(words, environment, folder)
    if result.returncode:
        raise EngineError(f"flwr {words[0]} failed: {(result.stdout + result.stderr).strip()}")
    return result.stdout


def cause_of(log: Path) -> str:
    """The last error in Flower's output that says what was wrong, with the indented lines of its message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for place in reversed(range(len(lines))):
        plain = lines[place].strip()
        if plain.startswith("common.errors."):
            more = itertools.takewhile(lambda line: line.startswith("  "), lines[place + 1 : place + 1 + MAX_LINES])
            return "\n".join([plain.partition(": ")[2], *more])
        if "Error: " in plain and not lines[place].startswith((" ", "[")):  # an indented line belongs to one above
            return plain
    return ""


@contextlib.contextmanager
def _following(path: Path, listeners: Sequence[Listener]) -> Iterator[threading.Event]:
    """Tells listeners of events as the server process appends them to ``path``; what is set once the first has come."""
    done, spoke = threading.Event(), threading.Event()
    earlier = set(path.read_bytes().splitlines()) if path.exists() else set()

    def follow() -> None:
        inode, seen, last = 0, 0, False
        while not last:
            last = done.wait(0.3)
            if not path.exists():
                continue
            with path.open("rb") as stream:
                now = os.fstat(stream.fileno()).st_ino
                inode, seen = now, seen if now == inode else 0  # the server rewrites the file when it starts
                stream.seek(seen)
                content = stream.read()
            complete = content[: content.rfind(b"\n") + 1]
            seen += len(complete)
            for line in complete.splitlines():
                if line in earlier:  # a resumed run writes it again
                    continue
                spoke.set()
                entry = json.loads(line)
                for listener in listeners:
                    listener(entry["event"], entry)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield spoke
    finally:
        done.set()
        thread.join()
