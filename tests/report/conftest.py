"""Runs to report on, made once."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from support.runs import BrokenError, TouchedEngine, run
from support.toy import toy_settings

from common.wire.messages import Request
from goldfinch.record import find_runs
from goldfinch.results.groups import group_runs
from goldfinch.results.report import page

HOSTILE = "</script><img src=x onerror=\"document.title='broken in'\">&amp;"


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and FPL on the toy domains, two seeds each; in one run a client fails with a hostile message."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fpl"):
        for seed in (0, 1):
            settings = toy_settings(method, folder / f"{method}-{seed}", seed=seed, train={"rounds": 4})
            run(settings)
    spoilt = toy_settings("fpl", folder / "fpl-spoilt", seed=2, train={"rounds": 4})
    run(spoilt, TouchedEngine(spoilt, failing=_fails))
    return folder


@pytest.fixture(scope="session")
def boards(finished_runs: Path) -> Any:
    return group_runs(find_runs([str(finished_runs)], finished=False), name=attrgetter("title"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages with empty figures, for tests that read a page's words: to draw them takes seconds."""
    monkeypatch.setattr(page, "inline_svg", lambda *drawn, **how: "<svg></svg>")


def _fails(request: Request) -> bool:
    if request.client.startswith("dark") and request.round == 2:
        raise BrokenError(HOSTILE)
    return False
