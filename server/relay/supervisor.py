"""Starts a relay at each SuperLink as a run of its own, and again after it or its SuperLink has ended."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.config import build
from common.errors import ConfigError, EngineError, GoldfinchError, writing
from common.overrides import CONFIGURATION
from common.settings import RunSettings
from server.engines.flower import FlowerEngine
from server.flower.processes import Child, Processes, ask_flower, flower_environment, flower_home, program
from server.flower.submit import (
    SubmittedRun,
    SuperLinkSettings,
    check_connection,
    remote_configuration,
    start_run,
    write_bundle,
)
from server.relay.coordinator import Coordinator, Shard
from server.relay.frames import ANNOUNCEMENT, RECONNECT_SECONDS
from server.relay.grid import RelayedGrid
from server.run.conduct import run_federation
from server.run.engine import Notices
from server.trackers.events import Listener

SERVER_APP = "server.relay.app:app"
RUN_CONFIG = (CONFIGURATION, "relay-address", "relay-certificate")

START_SECONDS = 240.0
"""Seconds that a relay has to connect after its run was submitted: a crowded machine starts programs slowly."""

CHECK_SECONDS = 0.2
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 3.0, 30.0
"""Seconds between two attempts to submit a relay again; they double after each failure."""

END_SECONDS = 10.0
"""Seconds that the relays' runs have to end after the rounds."""

TOKEN = re.compile(re.escape(ANNOUNCEMENT) + r"([0-9a-f]{64})\b")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def run_on_superlinks(settings: RunSettings, listeners: Sequence[Listener]) -> None:
    """Run the rounds in this process, over the nodes of several SuperLinks that are running already.

    Args:
        settings: the run's settings.
        listeners: receive every event.

    Raises:
        ConfigError: a connection does not exist, is named twice, or cannot reach this process.
        EngineError: a relay could not be started, or the run failed.
    """
    options: SuperLinkSettings = build(settings.engine, "engine", SuperLinkSettings)
    home = flower_home()
    check_connections(home / "config.toml", options)

    notices = Notices()
    with contextlib.ExitStack() as stack:
        neutral = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="goldfinch-", ignore_cleanup_errors=True))
        )
        shards = [Shard(name) for name in options.connections or ()]
        coordinator = Coordinator(shards, options.listen, options.advertised)
        stack.callback(coordinator.close)
        relays = Relays(coordinator, flower_environment(home), neutral, settings.output_folder / "logs", notices.add)
        stack.callback(relays.stop)
        relays.start(json.dumps(remote_configuration(settings)))
        enrolled = has_enrolled_nodes(shards)
        grid = RelayedGrid(shards, notices.add)
        engine = FlowerEngine(grid, enrolled=enrolled, describe=grid.describe)
        run_federation(settings, engine, listeners, notices=notices)


def check_connections(path: Path, options: SuperLinkSettings) -> None:
    """Check the names of several connections, and that their SuperLinks can reach this process.

    Args:
        path: Flower's ``config.toml``.
        options: the engine's settings.

    Raises:
        ConfigError: a connection is missing or named twice, two have the same SuperLink, or one is on another machine
            and ``listen`` on this one alone.
    """
    names = options.connections or ()
    if options.connection is not None:
        raise ConfigError("engine.connection and engine.connections are both set: name all SuperLinks in connections")
    if not names:
        raise ConfigError("engine.connections is empty: name at least one connection of Flower's config.toml")
    addresses: dict[str, str] = {}
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"engine.connections names {name!r} twice; leave one out")
        address = check_connection(path, name)
        if address in addresses:
            raise ConfigError(
                f"engine.connections: {addresses[address]!r} and {name!r} are the same SuperLink, {address}; leave one "
                "out"
            )
        addresses[address] = name
    _check_address("engine.listen", options.listen, allow_zero=True)
    if options.advertised is not None:
        _check_address("engine.advertised", options.advertised, allow_zero=False)
        return
    if _host(options.listen) not in LOOPBACK:
        return
    for address, name in addresses.items():
        if _host(address) not in LOOPBACK:
            raise ConfigError(
                f"the SuperLink of connection {name!r}, {address}, cannot reach engine.listen={options.listen}: name "
                "an address of this machine that it can reach, such as engine.listen=10.0.0.5:9300"
            )


def _host(address: str) -> str:
    return urlsplit(f"//{address}").hostname or ""


def _check_address(key: str, address: str, *, allow_zero: bool) -> None:
    """Check that ``address`` is ``host:port``.

    Raises:
        ConfigError: it is not.
    """
    try:
        parts = urlsplit(f"//{address}")
        port = parts.port
    except ValueError:
        port = None
        parts = urlsplit("//")
    if not parts.hostname or port is None or (port == 0 and not allow_zero):
        raise ConfigError(f"{key}={address}: expected host:port, such as 10.0.0.5:9300")


def has_enrolled_nodes(shards: Sequence[Shard]) -> bool:
    """Return whether the SuperLinks bind each node to an enrolled key.

    Raises:
        EngineError: some do and others do not, so any node could be any client at the others.
    """
    insecure = [shard.name for shard in shards if shard.insecure]
    if insecure and len(insecure) < len(shards):
        raise EngineError(
            f"the SuperLink of {insecure[0]!r} works without TLS and keys of its nodes, others with them: start all in "
            "the same way (docs/deploy.md)"
        )
    return not insecure


class Relays:
    """The relays of all SuperLinks, each looked after by a thread.

    Args:
        coordinator: accepts their connections.
        environment: environment of Flower's programs.
        neutral: an empty folder for the app's copy and the programs' files.
        logs: folder for what the relays print, ``relay-NAME.log``.
        notify: called when a relay is lost and when it is back.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        environment: Mapping[str, str],
        neutral: Path,
        logs: Path,
        notify: Callable[[str], None],
    ) -> None:
        self.coordinator = coordinator
        self.environment = environment
        self.neutral = neutral
        self.logs = logs
        self.notify = notify
        self.ended = threading.Event()
        self._keepers: list[Keeper] = []

    def start(self, configuration: str) -> None:
        """Submit all relays, and wait until each is connected.

        Args:
            configuration: the run's composed configuration as JSON, for the devices.

        Raises:
            EngineError: one could not be submitted, or did not connect.
        """
        app = write_bundle(self.neutral / "goldfinch", SERVER_APP, RUN_CONFIG)
        certificate = self.coordinator.certificate.decode()
        values = (configuration, self.coordinator.address, certificate)
        run_config = dict(zip(RUN_CONFIG, values, strict=True))
        with writing(self.logs, "another output="):
            self.logs.mkdir(parents=True, exist_ok=True)
        for place, shard in enumerate(self.coordinator.shards):
            folder = self.neutral / str(place)
            folder.mkdir()
            self._keepers.append(Keeper(self, shard, app, run_config, folder))
        for keeper in self._keepers:
            keeper.thread.start()
        while not all(keeper.shard.ready for keeper in self._keepers):
            for keeper in self._keepers:
                if keeper.problem:
                    raise EngineError(f"engine.connections: {keeper.shard.name}: {keeper.problem}")
            time.sleep(CHECK_SECONDS)
        for keeper in self._keepers:
            keeper.is_first = False

    def stop(self) -> None:
        """End all relays, and stop their runs that do not end by themselves."""
        self.ended.set()
        for shard in self.coordinator.shards:
            shard.end()
        end = time.monotonic() + END_SECONDS
        for keeper in self._keepers:
            keeper.stop(end)


@dataclass
class Submission:
    """A relay's run.

    Args:
        run: the run.
        child: the program that writes the run's log to a file.
        offset: length of that file before.
        began: when it was submitted, on the monotonic clock.
        known: whether the relay's token was read from the log.
    """

    run: SubmittedRun
    child: Child
    offset: int
    began: float
    known: bool = False

    def token(self) -> str | None:
        """Return the SHA-256 of the relay's token, if it was printed."""
        if not self.child.log.exists():
            return None
        with self.child.log.open("rb") as stream:
            stream.seek(self.offset)
            found = TOKEN.search(stream.read().decode(errors="replace"))
        if found is None:
            return None
        return found[1]


class Keeper:
    """Keeps a relay at one SuperLink.

    Args:
        relays: those of the run.
        shard: the SuperLink.
        app: the bundle's folder.
        run_config: values of the app's configuration.
        folder: an empty folder for the programs' files.
    """

    def __init__(self, relays: Relays, shard: Shard, app: Path, run_config: Mapping[str, str], folder: Path) -> None:
        self.relays = relays
        self.shard = shard
        self.app = app
        self.run_config = run_config
        self.folder = folder
        self.problem = ""
        self.is_first = True
        self.was_lost = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._processes = Processes(folder / "cwd", relays.logs)
        self._submission: Submission | None = None

    def _run(self) -> None:
        pause = MIN_RETRY_SECONDS
        ended = self.relays.ended
        while not ended.is_set():
            try:
                submission = self._submit()
            except GoldfinchError as error:
                self.problem = str(error)
            else:
                problem = self._watch(submission)
                if ended.is_set():
                    return
                if not self.is_first:
                    pause = MIN_RETRY_SECONDS
                    self.was_lost = True
                    self.relays.notify(f"SuperLink {self.shard.name} is lost: {problem}")
                self._give_up(submission, problem)
            if self.is_first:
                return
            ended.wait(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _submit(self) -> Submission:
        """Submit the relay's run."""
        environment = self.relays.environment
        run = start_run(self.app, self.run_config, self.shard.name, environment, self.folder, {})
        log = self.relays.logs / f"relay-{self.shard.name}.log"
        offset = 0
        if log.exists():
            offset = log.stat().st_size
        command = [program("flwr"), "log", run.identity, self.shard.name, "--stream"]
        child = self._processes.start(f"relay-{self.shard.name}", command, environment)
        self._submission = Submission(run, child, offset, time.monotonic())
        self.relays.coordinator.forget(self.shard)
        self.shard.expect()
        return self._submission

    def _watch(self, submission: Submission) -> str:
        """Wait until the relay is lost. Return why; empty if the rounds have ended before."""
        was_ready = False
        while not self.relays.ended.wait(CHECK_SECONDS):
            if not submission.known:
                token = submission.token()
                if token is not None:
                    self.relays.coordinator.accept(token, self.shard)
                    submission.known = True
            if self.shard.problem:
                return self.shard.problem
            if self.shard.ready and not was_ready:
                was_ready = True
                if self.was_lost:
                    self.relays.notify(f"SuperLink {self.shard.name} is back")
            if self.shard.away == 0.0:
                continue
            if was_ready and self.shard.away > RECONNECT_SECONDS:
                return "its relay is not connected any more"
            if not was_ready and time.monotonic() - submission.began > START_SECONDS:
                return f"its relay has not connected to {self.relays.coordinator.address} within {START_SECONDS:g} s"
            if submission.child.process.poll() is not None:
                return f"its relay ended, see {submission.child.log.name}"
        return ""

    def _give_up(self, submission: Submission, problem: str) -> None:
        """Forget the relay, and stop its run if that goes on."""
        self.relays.coordinator.forget(self.shard)
        self.problem = f"{problem}\n{submission.child.tail(5)}\n(see {submission.child.log})"
        self.shard.lose(f"SuperLink {self.shard.name} was lost: {problem}")
        self._processes.stop(1.0)
        self._stop_run(submission.run)

    def _stop_run(self, run: SubmittedRun) -> None:
        """Stop a run. A SuperLink that does not answer has ended it, and one that does may have."""
        ask_flower(["stop", run.identity, *run.target], run.environment, run.folder)

    def stop(self, end: float) -> None:
        """Wait until the relay's run has ended; after ``end`` (monotonic clock), stop it."""
        submission = self._submission
        if submission is None:
            return
        with contextlib.suppress(Exception):
            submission.child.process.wait(max(0.1, end - time.monotonic()))
        if submission.child.process.poll() is None and self.shard.ready:
            self._stop_run(submission.run)
        self._processes.stop(1.0)
