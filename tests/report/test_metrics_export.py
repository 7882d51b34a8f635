from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.errors import ConfigError
from server.run.conduct import prepare_output, run_federation

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402  # after the check above

from server.trackers.prometheus import PrometheusExporter  # noqa: E402  # after the check above

GRAFANA = Path(__file__).parents[2] / "docker" / "grafana"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_run_can_be_watched_over_http(tmp_path: Path) -> None:
    port = free_port()
    settings = toy_settings("fpl", tmp_path / "run")
    settings = replace(settings, tracker={"_target_": "server.trackers.base.TrackerSettings", "prometheus_port": port})
    engine = TouchedEngine(settings, failing=lambda request: request.client.startswith("dark") and request.round == 2)
    seen: list[dict[tuple[str, tuple[tuple[str, str], ...]], float]] = []

    def look(name: str, entry: Mapping[str, Any]) -> None:
        if name in ("round done", "finish"):
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics")
            families = text_string_to_metric_families(answer.text)
            seen.append(
                {
                    (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                    for family in families
                    for sample in family.samples
                }
            )

    prepare_output(settings)
    summary = run_federation(settings, engine, [look])
    at_end = seen[-1]  # the listener looks before the exporter hears of the same event
    assert at_end["goldfinch_round", ()] == 2
    assert at_end["goldfinch_rounds", ()] == 2
    assert at_end["goldfinch_training", ()] == 1
    assert at_end["goldfinch_round_participants", ()] == 3
    assert at_end["goldfinch_round_duration_seconds_count", ()] == 2
    assert at_end["goldfinch_run_info", (("data", "toy"), ("method", "fpl"), ("seed", "0"))] == 1
    failed = (("client", "dark-0"), ("domain", "dark"), ("status", "failed"))
    assert at_end["goldfinch_answers_total", failed] == 1
    for domain, value in summary["accuracy"].items():
        assert at_end["goldfinch_accuracy_percent", (("domain", domain),)] == pytest.approx(value)
    assert at_end["goldfinch_accuracy_worst_percent", ()] == pytest.approx(summary["worst"])
    for way in ("up", "down"):
        assert at_end["goldfinch_transferred_bytes_total", (("way", way),)] == summary["bytes"][way]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_is_an_error_before_training(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = toy_settings("fedavg", tmp_path / "run")
        options = {"_target_": "server.trackers.base.TrackerSettings", "prometheus_port": port}
        settings = replace(settings, tracker=options)
        with pytest.raises(ConfigError, match=f"prometheus_port={port}: cannot listen on 127.0.0.1"):
            run(settings)


def test_the_dashboard_asks_only_for_metrics_that_exist(tmp_path: Path) -> None:
    exporter = PrometheusExporter(0, "127.0.0.1", toy_settings("fedavg", tmp_path))
    exporter.close()
    known = {sample_name for family in exporter.registry.collect() for sample_name in _sample_names(family)}
    dashboard = json.loads((GRAFANA / "dashboards" / "goldfinch.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"goldfinch_\w+", query)}
    assert asked <= known, asked - known
    assert {name for name in known if "accuracy" in name} <= asked
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def _sample_names(family: Any) -> set[str]:
    endings = {
        "counter": ["_total"],
        "histogram": ["_bucket", "_sum", "_count"],
        "gauge": [""],
        "info": ["_info"],
    }[family.type]
    return {family.name + ending for ending in endings}


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((GRAFANA / "dashboards" / "goldfinch.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_provisioning_agrees_with_the_dashboard() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    dashboard = json.loads((GRAFANA / "dashboards" / "goldfinch.json").read_text())
    asked = {panel["datasource"]["uid"] for panel in dashboard["panels"]}
    assert asked == {entry["uid"] for entry in source["datasources"]}
    jobs = yaml.safe_load((GRAFANA / "prometheus.yaml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["goldfinch"]
