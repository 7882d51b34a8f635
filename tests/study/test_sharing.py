"""Comparisons that several processes share: each piece of work is done once, and the result is that of one process."""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import DuplicatedStudyError
from optuna.storages.journal._base import BaseJournalSnapshot
from sqlalchemy import create_engine
from support.boards import TINY, read_runs
from support.postgres import postgres
from support.scripts import ROOT

from common.errors import CheckpointError, ConfigError
from goldfinch.cli import main
from goldfinch.study import compare, search, storage
from goldfinch.study.compare import CompareRequest
from goldfinch.study.options import Rules
from goldfinch.study.rules import entrants_of
from goldfinch.study.search import SharedStudy, TuningStudy, finished_trials, next_trial, open_study
from goldfinch.study.storage import JOURNAL, FolderStorage, storage_of, take

Outcome = tuple[int, dict[str, float], float | None, str, dict[int, float]]


SILENT = [
    "journal",
    pytest.param("sqlite", marks=pytest.mark.slow),
    pytest.param("postgresql", marks=pytest.mark.slow),
]
"""Storages for tests that wait until a process has been silent for long enough."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL."""
    with postgres() as found:
        yield found


@pytest.fixture(params=["journal", "sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The ``--storage`` of a comparison, a new one."""
    if request.param != "postgresql":
        return {"journal": "", "sqlite": f"sqlite:///{tmp_path / 'studies.db'}"}[request.param]
    server: str = request.getfixturevalue("server")
    name = f"studies_{uuid.uuid4().hex}"
    with create_engine(server, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


# ---- two processes, as two storages of one ---------------------------------------------------------------------------


class Runs:
    """Runs that take no time and do something else at the begin of a chosen one."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.meanwhile: dict[int, Callable[[], object]] = {}

    def __call__(
        self, overrides: tuple[str, ...], folder: Path, listener: Any, stop: Callable[[], bool], **_: bool
    ) -> None:
        self.folders.append(folder.name)
        given = dict(item.split("=", 1) for item in overrides)
        score = 1000 * float(given["train.learning_rate"])
        for number in range(1, 9):
            if stop():
                return
            listener("validation", {"round": number, "average": score * number / 8})
            listener("round done", {"round": number})
            if number == 2:
                self.meanwhile.pop(len(self.folders), lambda: None)()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(search, "run_here", made)
    return made


def process(output: Path, url: str, batch: int = 3, trials: int = 5) -> SharedStudy:
    """A study of FedProx, with ten trials, as a process of its own opens it."""
    rules = Rules(studies=1, trials=trials, batch=batch)
    (entrant,), _ = entrants_of(["fedprox"], ["data=glyphs", "train.rounds=8", "train.device=cpu"], rules)
    output.mkdir(parents=True, exist_ok=True)
    return open_study(TuningStudy(entrant, 0, rules, output), storage_of(output, url), "the storage")


def step(shared: SharedStudy, lines: list[str] | None = None) -> bool:
    return next_trial(shared, ([] if lines is None else lines).append)


def finish(shared: SharedStudy, lines: list[str] | None = None) -> None:
    """All trials that are left, in this process."""
    while step(shared, lines):
        pass


def test_a_study_that_another_process_begins_meanwhile_is_not_taken_for_damaged(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process opens the study and does a trial just before this one reads whether there are trials."""
    plain = optuna.Study.trials
    others: list[str] = []

    def read(study: optuna.Study) -> list[Any]:
        if not others:
            others.append(study.study_name)
            assert step(process(tmp_path, ""))
        found: list[Any] = plain.__get__(study)
        return found

    monkeypatch.setattr(optuna.Study, "trials", property(read))
    shared = process(tmp_path, "")
    assert others == [shared.study.name]
    assert len(shared.trials.trials) == 1
    finish(shared)
    assert len(outcomes(shared)) == 10


def outcomes(shared: SharedStudy) -> list[Outcome]:
    found: list[Outcome] = []
    for trial in finished_trials(shared.trials):
        values = dict(trial.intermediate_values)
        found.append((trial.user_attrs["trial"], dict(trial.params), trial.value, trial.state.name, values))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The ten trials of one process, in batches of three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "run_here", Runs())
        shared = process(tmp_path_factory.mktemp("alone"), "")
        finish(shared)
        found = outcomes(shared)
    assert [number for number, *_ in found] == list(range(10))
    assert {state for _, _, _, state, _ in found} == {"COMPLETE", "PRUNED"}
    return found


@pytest.mark.long
def test_trials_in_any_order_are_those_of_one_process(
    runs: Runs, url: str, alone: list[Outcome], tmp_path: Path
) -> None:
    """While one process does a trial, the other does others of the batch, and then waits for it."""
    one, other = process(tmp_path, url), process(tmp_path, url)

    busy: list[str] = []
    lines: dict[str, list[str]] = {"one": [], "other": []}

    def meanwhile() -> None:
        while not busy:
            busy.append("other")
            done = step(other, lines["other"])
            busy.clear()
            if not done:
                return

    for count in range(1, 11):
        runs.meanwhile[count] = meanwhile
    finish(one, lines["one"])
    assert runs.folders == [f"trial-{number}" for number in range(10)], "each once"
    assert (len(lines["one"]), len(lines["other"])) == (4, 6)
    assert outcomes(one) == outcomes(other) == alone


@pytest.mark.parametrize("url", SILENT, indirect=True)
def test_the_work_of_a_process_without_heartbeats_is_taken_over_and_counts_once(
    runs: Runs, url: str, alone: list[Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended, say: when it goes on, its next report ends its work, and it takes other work."""
    monkeypatch.setattr(storage, "SILENCE", 6)
    monkeypatch.setattr(storage, "HEARTBEAT", 1000)
    one, other = process(tmp_path, url), process(tmp_path, url)
    lines: list[str] = []

    def meanwhile() -> None:
        assert step(other)
        assert step(other)
        assert not step(other), "the first trial of the batch is in hand"
        time.sleep(7.5)
        assert step(other), "it is no longer"

    runs.meanwhile[1] = meanwhile
    assert step(one, lines)
    assert runs.folders == ["trial-0", "trial-1", "trial-2", "trial-0"]
    assert lines == [], "it has nothing to say of work that it lost"
    finish(one, lines)
    assert outcomes(one) == alone
    assert len(lines) == 7


def test_two_entries_for_one_task_are_done_once(url: str, tmp_path: Path) -> None:
    """Two processes may see at the same time that a task is free."""
    one, other = process(tmp_path, url), process(tmp_path, url)
    done: list[str] = []
    tasks = [{"trial": 0}, {"trial": 1}]

    def late(task: Any) -> dict[str, float]:
        assert take(other.trials, tasks, lambda _: {}, lambda _: float(bool(done.append("other"))), lambda _: None)
        return {}

    assert take(one.trials, tasks, late, lambda _: float(bool(done.append("one"))), lambda _: None)
    assert done == ["other"]
    states = [(trial.user_attrs["trial"], trial.state.name) for trial in one.trials.get_trials()]
    assert states == [(0, "COMPLETE"), (0, "FAIL")]


@pytest.mark.parametrize("url", SILENT, indirect=True)
def test_a_process_that_ends_at_once_after_it_took_a_trial_is_replaced(
    runs: Runs, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna's first heartbeat comes a moment after the trial was taken."""
    monkeypatch.setattr(storage, "SILENCE", 6)
    one = process(tmp_path, url, batch=1)
    one.trials.enqueue_trial({}, user_attrs={"trial": 0})
    assert one.trials._pop_waiting_trial_id() is not None
    other = process(tmp_path, url, batch=1)
    assert not step(other)
    time.sleep(7.5)
    assert step(other)
    assert len(finished_trials(other.trials)) == 1


def test_a_longer_study_is_the_one_that_was_long_from_the_start_and_one_of_other_batches_another(
    runs: Runs, tmp_path: Path
) -> None:
    finish(process(tmp_path / "parted", "", trials=4))
    longer, whole = process(tmp_path / "parted", "", trials=6), process(tmp_path / "whole", "", trials=6)
    for shared in (longer, whole):
        finish(shared)
    assert outcomes(longer) == outcomes(whole)
    assert len(outcomes(longer)) == 12
    with pytest.raises(ConfigError, match=r"other settings \(batch\)"):
        process(tmp_path / "parted", "", batch=2)


OPENED_AT_ONCE = """
import sys, time
from pathlib import Path
from goldfinch.study.storage import storage_of
folder, url = Path(sys.argv[1]), sys.argv[2]
(folder / sys.argv[3]).touch()
while len(list(folder.iterdir())) < 4:
    time.sleep(0.001)
storage_of(folder, url).get_all_studies()
"""


@pytest.mark.long
def test_processes_that_open_a_new_storage_at_the_same_moment_all_have_it(url: str, tmp_path: Path) -> None:
    """Optuna makes a database's tables without a lock: PostgreSQL refused all processes of an array but one."""
    folder = tmp_path / "ready"
    folder.mkdir()
    words = [sys.executable, "-c", OPENED_AT_ONCE, str(folder), url]
    started = [
        subprocess.Popen([*words, str(number)], cwd=ROOT, stderr=subprocess.PIPE, text=True) for number in range(4)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * 4, errors


# ---- databases that cannot be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/mnt/shared", "URL of a database"),
        ("postgresql+no_driver://me@host/studies", "no_driver"),
        ("sqlite:////no/such/folder/studies.db", "unable to open database file"),
        ("postgresql+psycopg://me:secret@127.0.0.1:1/studies", "OperationalError|driver is not installed"),
    ],
    ids=["a folder", "no driver", "no folder", "no server"],
)
def test_a_database_that_cannot_be_used_is_an_error_with_a_remedy(url: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        storage_of(tmp_path, url)
    remedies = ("another folder", "output folder", "the same command goes on")
    assert any(remedy in str(caught.value) for remedy in remedies)
    assert "secret" not in str(caught.value)


SECRETS = {
    "no scheme": "bob:s3cret@host/x",
    "a password before ://": "bob:s3cret@host://x",
    "a bad port": "postgresql+psycopg://bob:s3cret@host:s3cret/x",
    "no driver": "s3cret+none://bob:s3cret@host/x",
}


@pytest.mark.parametrize("case", SECRETS)
def test_no_message_repeats_the_url_of_a_database(case: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage") as told:
        storage_of(tmp_path, SECRETS[case])
    assert "s3cret@" not in str(told.value)
    assert "bob" not in str(told.value)


def test_workers_get_the_url_by_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, Any]] = []

    class Ended:
        def __init__(self, command: Any, *, env: Any, **_: Any) -> None:
            started.append((command, env))

        def wait(self) -> int:
            return 0

    monkeypatch.setattr("subprocess.Popen", Ended)
    url = "postgresql+psycopg://bob:s3cret@host/x"
    asked = CompareRequest(("fedavg",), (), tmp_path, Rules(), url, overwrite=False)
    compare._in_processes(asked, 2, 1, print)
    assert len(started) == 2
    for command, environment in started:
        assert "s3cret" not in " ".join(command)
        assert environment["GOLDFINCH_STORAGE"] == url


class Hostile:
    """What is called when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


LINE = {"op_code": 0, "worker_id": "x", "study_name": "a", "directions": [2]}


@pytest.mark.parametrize("snapshot", ["the journal", "beside it", "in a line"])
def test_no_pickle_of_a_journal_is_read(snapshot: str, tmp_path: Path) -> None:
    """Optuna unpickles snapshots, but only of backends that have them."""
    content = pickle.dumps(Hostile())
    with pytest.raises(pytest.fail.Exception):
        pickle.loads(content)
    assert not isinstance(FolderStorage(tmp_path / "other.log")._backend, BaseJournalSnapshot)
    path = tmp_path / JOURNAL
    line = json.dumps({**LINE, "snapshot": content.decode("latin-1")}).encode() + b"\n"
    path.write_bytes({"the journal": content + b"\n", "beside it": b"", "in a line": line * 300}[snapshot])
    for name in ("snapshot", "journal.log.snapshot", "journal.snapshot"):
        (tmp_path / name).write_bytes(content)
    with contextlib.suppress(CheckpointError, DuplicatedStudyError):
        study = optuna.create_study(storage=storage_of(tmp_path), study_name="b")
        for _ in range(120):  # Optuna would store a snapshot after 100
            study.ask()
        storage_of(tmp_path).get_all_studies()


def test_a_missing_driver_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'psycopg\[binary\]'"):
        storage_of(tmp_path, "postgresql+psycopg://me@host/studies")


# ---- real processes --------------------------------------------------------------------------------------------------

WORDS = [
    *("compare", "--methods", "fedavg", *TINY, "train.rounds=6"),
    *("--studies", "1", "--trials", "6", "--batch", "3", "--runs", "2"),
]
QUICK = (
    "import sys; from goldfinch.study import storage; storage.HEARTBEAT, storage.SILENCE = 1, 15; "
    "from goldfinch.cli import main; sys.exit(main())"
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("one") / "runs"
    assert main([*WORDS, "--output", str(folder)]) == 0
    return lines_of(folder)


def lines_of(folder: Path) -> list[tuple[Any, ...]]:
    """What ``runs.csv`` has of scores and states; times and bytes differ from run to run."""
    return [
        (run.kind, run.number, run.state, run.score, run.values, run.state_sha256)
        for run in read_runs(folder / "runs.csv")
    ]


def holds(process: subprocess.Popen[str], prefix: str) -> bool:
    """Whether a process writes a run of this name that has a checkpoint."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            place = link.readlink()
            if place.name.startswith(prefix) and any((place / "checkpoint").glob("*")):
                return True
    return False


def victim_of(processes: list[subprocess.Popen[str]], prefix: str, seconds: float = 400.0) -> subprocess.Popen[str]:
    """Wait until a process is within a run of this name, and return the process."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for process in processes:
            if process.poll() is None and holds(process, prefix):
                return process
        time.sleep(0.05)
    raise AssertionError("no process came to such a run")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kind", "prefix", "sent"),
    [
        ("journal", "trial-", signal.SIGKILL),
        ("journal", "seed-", signal.SIGKILL),
        ("journal", "trial-", signal.SIGSTOP),
        ("postgresql", "trial-", signal.SIGKILL),
    ],
    ids=["journal, in a trial", "journal, in a final run", "journal, suspended", "PostgreSQL, in a trial"],
)
def test_four_processes_of_which_one_is_killed_end_as_one(
    kind: str, prefix: str, sent: signal.Signals, one_process: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """With PostgreSQL they share no folder."""
    with contextlib.ExitStack() as stack:
        folders, more = [tmp_path / "runs"] * 4, []
        if kind == "postgresql":
            folders = [tmp_path / str(number) for number in range(4)]
            more = ["--storage", stack.enter_context(postgres())]
        processes: list[subprocess.Popen[str]] = []
        for folder in folders:
            words = [sys.executable, "-u", "-c", QUICK, *WORDS, *more, "--output", str(folder)]
            process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(process.kill)
            processes.append(process)
        victim = victim_of(processes, prefix)
        victim.send_signal(sent)
        if sent == signal.SIGSTOP:
            time.sleep(30)
            victim.send_signal(signal.SIGCONT)
        printed = [process.communicate(timeout=800)[0] for process in processes]
    done: list[str] = []
    for process, folder, text in zip(processes, folders, printed, strict=True):
        done += [line.partition(": ")[2].partition(":")[0] for line in text.splitlines() if line.startswith("fedavg/")]
        if process is victim and sent == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 0, text
            assert lines_of(folder) == one_process
    expected = [*(f"trial {number} of 6" for number in range(1, 7)), "final run with seed 0", "final run with seed 1"]
    assert sorted(done) == sorted(expected), "each once"
