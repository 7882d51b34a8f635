"""What holds for every test: one thread, a cache of the session's own, and property tests that always try the same."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.toy import DOMAINS, Toy

from common.choices import FOLDERS
from common.data.domain import DataSource

settings.register_profile(
    "goldfinch", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("goldfinch")


def pytest_configure() -> None:
    """SIGTERM ends the tests as Ctrl-C does, so that fixtures stop the processes that they have started.

    A shell without job control lets what it starts in the background ignore SIGINT, as no test expects.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Words for values that pytest would number, or spell with addresses or escapes; else the test must write ids.

    Raises:
        TypeError: no short, printable words can be found for the value.
    """
    if isinstance(val, int | float | None) or (callable(val) and "<" not in getattr(val, "__name__", "<")):
        return None  # pytest's own words are good
    if isinstance(val, str):
        words = val
    elif isinstance(val, torch.dtype):
        words = str(val).removeprefix("torch.")
    elif isinstance(val, Mapping):
        words = ", ".join(f"{name}={value}" for name, value in val.items()) or "nothing"
    elif isinstance(val, list | tuple):
        words = ", ".join(map(str, val)) or "nothing"
    elif dataclasses.is_dataclass(val):
        fields = [field for field in dataclasses.fields(val) if getattr(val, field.name) != field.default]
        words = f"{type(val).__name__}({', '.join(f'{field.name}={getattr(val, field.name)}' for field in fields)})"
    else:
        words = ""
    if not words.isprintable() or len(words) > 100 or " at 0x" in words or (not words and val != ""):
        raise TypeError(f"the parameter {argname} has a value without readable words, {type(val)}: write ids")
    return words


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums round differently with another number of threads, and the machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Runs write thousands of small files; waiting until each has reached the disk is what they would mostly do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Generated data go to a folder of the session and its workers, so that the home folder need not be writable."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "goldfinch-cache"
    folder.mkdir(exist_ok=True)
    before = os.environ.get("GOLDFINCH_CACHE")
    os.environ["GOLDFINCH_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["GOLDFINCH_CACHE"]
    else:
        os.environ["GOLDFINCH_CACHE"] = before


@pytest.fixture(autouse=True, scope="module")
def no_folders_of_choices_are_left() -> Iterator[None]:
    """A process knows the folders of --config-dir until it ends; another module's tests must not find a damaged one."""
    yield
    del FOLDERS[1:]


@pytest.fixture(autouse=True, scope="module")
def loaded_images_stay_as_they_were() -> Iterator[None]:
    """A domain is loaded once a process and shared: a test that wrote into it would change every later run."""
    yield
    for domain in DOMAINS:
        cached, fresh = Toy().load(domain), Toy()._read(domain)
        assert torch.equal(cached.train.images, fresh.train.images), f"a test changed the shared images of {domain}"
        assert torch.equal(cached.test.images, fresh.test.images), f"a test changed the shared images of {domain}"


@pytest.fixture(autouse=True)
def speaking_loggers() -> Iterator[None]:
    """Import-linter and Flower's database set up logging again, and silence every logger that was there before."""
    yield
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Append why tests were skipped to the file that GOLDFINCH_SKIPPED names, one line for each."""
    path = os.environ.get("GOLDFINCH_SKIPPED")
    if not path:
        return
    with Path(path).open("a") as stream:
        for report in terminalreporter.stats.get("skipped", []):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            stream.write(" ".join(reason.removeprefix("Skipped: ").split()) + "\n")


@pytest.fixture
def no_files_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that check whether a data set's files are there are made without them, on every machine."""
    monkeypatch.setattr(DataSource, "check_files", lambda self: None)
