"""What a private run claims: which runs are refused, when there is an epsilon, and what has been released."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.records import rewrite
from support.runs import TouchedEngine, run
from support.toy import toy_settings
from test_differential_privacy import exact_epsilon

from client.device import Device
from client.ledger import Ledger as Kept
from common.choices import CONF
from common.client_state import ClientStore
from common.data.protocols import ClientSpec
from common.errors import CheckpointError, ConfigError
from common.exports.description import read_description
from common.settings import RunSettings
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.commands.export import export
from goldfinch.commands.sweep import Job, privacy_lines
from goldfinch.record import RunRecord
from goldfinch.results.report.page import write_report
from goldfinch.run_model import RunModel
from goldfinch.study.options import Rules
from goldfinch.study.rules import entrants_of
from server.run.accounting import (
    LEDGER,
    PrivacyAccount,
    ReleaseCounts,
    epsilon,
    privacy_report,
    report_line,
    total_reports,
)
from strategies.core.federation import Federation
from strategies.core.protection import check_protects

COVERED = ("privacy=gaussian", "privacy.update_clip=1")
SYSTEM = "privacy.randomness=system"


def private(method: str, output: Path, *overrides: str, **more: Any) -> RunSettings:
    return toy_settings(method, output, overrides=(*COVERED, *overrides), **more)


# ---- what is refused -------------------------------------------------------------------------------------------------

PERSONAL = {
    "fedproto without averaging": ("fedproto", {"aggregate_models": False}),
    "fedbn": ("fedbn", {}),
    "fedbn with refreshed statistics": ("fedbn", {"refresh_statistics": True}),
    "fedrep": ("fedrep", {}),
    "per_fedavg with adaptation": ("per_fedavg", {"adapt_steps": 1}),
    "single_set": ("single_set", {}),
}


@pytest.mark.parametrize("case", PERSONAL)
def test_scores_of_personal_models_are_refused(case: str, tmp_path: Path) -> None:
    """For the other unit of privacy, test_privacy_audit.py tries all methods."""
    method, hyper = PERSONAL[case]
    with pytest.raises(ConfigError, match="exact functions of its training images"):
        Federation(private(method, tmp_path, "privacy.unit=sample", hyper=hyper))


@pytest.mark.parametrize("refreshed", [True, False], ids=["refreshed statistics", "statistics of training"])
def test_scores_with_local_batch_norm_of_combined_are_refused(refreshed: bool, tmp_path: Path) -> None:
    """Without FedDyn's correction, which noise on the weights forbids."""
    chosen = ("method.alpha=0", f"method.refresh_statistics={refreshed}", "privacy.unit=client")
    Federation(private("combined", tmp_path, *chosen))
    with pytest.raises(ConfigError, match="exact functions of its training images"):
        Federation(private("combined", tmp_path, *chosen, "method.local_normalisation=true"))


def test_validation_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"remove protocol\.validation"):
        Federation(private("fedavg", tmp_path, "protocol.validation=0.2"))


@pytest.mark.parametrize("method", ["feddg_ga", "fedheal"])
def test_a_method_that_sends_more_than_means_and_weights_is_refused_before_training(
    method: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"covers class means and weights; {method} also sends"):
        Federation(private(method, tmp_path))


@pytest.mark.parametrize("asked", [{"score": ["bright"]}, {"validate": True}], ids=["test", "validation"])
def test_a_device_refuses_what_its_server_did_not(asked: dict[str, Any], tmp_path: Path) -> None:
    method = "fedavg" if "validate" in asked else "fedbn"
    settings = private(method, tmp_path, "protocol.validation=0.2")
    device = Device(settings, ClientSpec("bright", 0), lambda name: ClientStore(tmp_path / name), ledger=Kept(tmp_path))
    fields = {"run": "r", "identity": settings.identity, "method": method, "exchange": "train", "code": settings.code}
    who: dict[str, Any] = {"client": device.spec.id, "client_count": 3, "client_index": 0}
    request = Request(**{"round": 1, "train": False, "score": [], **who, **fields, **asked})
    with pytest.raises(ConfigError, match="exact functions"):
        device.answer(request, Payload())


@pytest.mark.parametrize(
    ("method", "overrides", "named"),
    [
        ("fpl", ["privacy.noise_multiplier=0"], r"privacy\.noise_multiplier above 0"),
        ("fedavg", [COVERED[1], "privacy.update_noise_multiplier=0"], r"privacy\.update_noise_multiplier above 0"),
        ("fedavg", [], r"privacy\.update_clip"),
        ("feddyn", [], r"clients keep a correction: choose another method"),  # update_clip would be refused, too
        ("fedgca", ["views=randconv"], r"clients keep a correction: choose another method"),
    ],
)
def test_a_run_in_which_nothing_is_noised_is_refused(
    method: str, overrides: Sequence[str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        Federation(toy_settings(method, tmp_path, overrides=("privacy=gaussian", *overrides)))


def test_combined_is_refused_only_where_its_weights_would_be_noised(tmp_path: Path) -> None:
    Federation(toy_settings("combined", tmp_path, overrides=("privacy=gaussian",)))
    with pytest.raises(ConfigError, match="keeps a correction"):
        private("combined", tmp_path)
    page = (CONF.parent / "SECURITY.md").read_text()
    assert "others (Combined: under `update_clip`) are refused" in page


def test_a_part_that_stays_on_the_device_needs_the_whole_client_as_unit(tmp_path: Path) -> None:
    settings = private("fpl", tmp_path, "privacy.unit=sample")
    federation = Federation(settings)
    model = federation.server.new_model()
    model.register_buffer("own", next(model.parameters()).detach().clone())
    method = replace(settings.method)
    object.__setattr__(method, "shared_names", lambda found: set(found.state_dict()) - {"own"})
    expected = settings.method.expects(federation.server)
    with pytest.raises(ConfigError, match=r"privacy\.unit=client"):
        check_protects(settings.privacy, method, model, expected)


# ---- when there is an epsilon ----------------------------------------------------------------------------------------


def test_there_is_no_epsilon_while_weights_leave_without_noise(tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path, overrides=("privacy=gaussian", SYSTEM), train={"rounds": 1})
    done = run(settings)
    report = done.summary["privacy"]
    assert set(report["epsilon"].values()) == {None}
    assert report["conditional_epsilon"]["bright-0"] == pytest.approx(epsilon([1.0], 1, 1e-5), abs=1e-3)
    assert any("update_clip" in condition for condition in report["conditions"])
    assert report["neighbours"].startswith("replace-one sample")
    warnings = [entry["reason"] for name, entry in done.events if name == "privacy warning"]
    assert any("weights leave without noise" in reason for reason in warnings)
    (spent,) = [entry["reason"] for name, entry in done.events if name == "privacy spent"]
    assert spent.startswith("no epsilon: weights leave without noise")
    assert "Otherwise it would be" in spent


@pytest.mark.parametrize(("delta", "warned"), [(1 / 25, True), (1e-5, False)], ids=str)
def test_a_delta_as_large_as_one_over_the_samples_is_warned_of(delta: float, warned: bool, tmp_path: Path) -> None:
    done = run(private("fpl", tmp_path, f"privacy.delta={delta}", train={"rounds": 1}))
    assert bool(done.summary["privacy"]["warnings"]) is warned
    told = [entry for name, entry in done.events if name == "privacy warning"]
    assert any("privacy.delta" in entry["reason"] for entry in told) is warned


@pytest.mark.parametrize("multiplier", [0.005, 0.05, 20.0, 100.0, 1000.0])
def test_little_and_much_noise_are_counted_closely_too(multiplier: float) -> None:
    """Orders up to 63 alone give 0.106 at a multiplier of 100; the exact epsilon is 0.027."""
    found = epsilon([multiplier], 1, 1e-5)
    exact = exact_epsilon(multiplier, 1, 1e-5) if multiplier >= 20 else 0.5 / multiplier**2
    assert exact <= found
    assert found <= 1.25 * exact + 0.0005 or multiplier < 1
    assert found <= 1.1 * (exact + 5 / multiplier) or multiplier >= 1


# ---- what has been released ------------------------------------------------------------------------------------------


def row(client: str, status: str, releases: int = 0, randomness: str = "system") -> dict[str, Any]:
    return {"client": client, "status": status, "releases": releases or "", "randomness": randomness}


def test_a_ledger_takes_the_devices_own_count(tmp_path: Path) -> None:
    ledger = ReleaseCounts(tmp_path, {"prototypes": True})
    ledger.count_requests("a", ["x", "y"])
    ledger.count_replies("a", [row("x", "trained", 4), row("y", "lost")])
    assert ledger.releases() == {"x": 4, "y": 1}
    ledger.count_requests("a", ["y"])
    ledger.count_replies("a", [row("y", "trained", 2)])
    assert ReleaseCounts(tmp_path).releases() == {"x": 4, "y": 2}


def test_a_device_that_has_lost_its_ledger_does_not_hide_what_it_released(tmp_path: Path) -> None:
    """Of its releases one was lost on the way, so that there are fewer replies than releases."""
    ledger = ReleaseCounts(tmp_path)
    for answer in (row("x", "lost"), row("x", "trained", 2), row("x", "trained", 1), row("x", "trained", 2)):
        ledger.count_requests("a", ["x"])
        ledger.count_replies("a", [answer])
    assert ReleaseCounts(tmp_path).releases() == {"x": 4}
    for answer in (row("x", "lost"), row("x", "trained", 1)):
        ledger = ReleaseCounts(tmp_path)
        ledger.count_requests("a", ["x"])
        ledger.count_replies("a", [answer])
    assert ledger.releases() == {"x": 6}, "the lost request may have been a release, before the ledger was lost"


def test_a_device_that_counts_anew_up_to_its_old_count_has_released_again(tmp_path: Path) -> None:
    """Twice one reply is lost and the next reports two releases: before the ledger was lost, and after it."""
    ledger = ReleaseCounts(tmp_path)
    for answer in (row("x", "lost"), row("x", "trained", 2), row("x", "lost"), row("x", "trained", 2)):
        ledger.count_requests("a", ["x"])
        ledger.count_replies("a", [answer])
    assert ledger.releases() == {"x": 4}


def test_replies_that_came_are_releases_even_if_the_device_counts_fewer(tmp_path: Path) -> None:
    ledger = ReleaseCounts(tmp_path)
    for answer in (row("x", "refused"), row("x", "late"), row("x", "refused"), row("x", "trained", 1)):
        ledger.count_requests("a", ["x"])
        ledger.count_replies("a", [answer])
    assert ledger.releases() == {"x": 4}


@pytest.mark.parametrize("status", ["late", "lost"])
def test_a_request_that_did_not_leave_is_no_release(status: str, tmp_path: Path) -> None:
    ledger = ReleaseCounts(tmp_path)
    for answer, unsent in ((row("x", "trained", 1), ()), (row("x", status), ("x",)), (row("x", status), ("x",))):
        ledger.count_requests("a", ["x"])
        ledger.count_replies("a", [answer], unsent)
    assert ledger.releases() == {"x": 1}


def report_of(settings: RunSettings, *rows: dict[str, Any]) -> dict[str, Any]:
    """What a run reports whose devices sent these rows, with noise on prototypes and weights."""
    ledger = ReleaseCounts(settings.output_folder, {"prototypes": True, "weights": True})
    ledger.count_replies("a", rows)
    report = privacy_report(settings, ledger, {"x": 25, "y": 25})
    assert report is not None
    return report


def test_measurements_that_came_are_not_protected(tmp_path: Path) -> None:
    for seconds, unprotected in ((0.0, []), (0.25, ["measurements"])):
        sent = {**row("x", "trained", 1), "seconds_train": seconds, "peak_bytes": ""}
        report = report_of(private("fpl", tmp_path / str(seconds)), sent)
        assert report["unprotected"] == unprotected
        assert (report["epsilon"]["x"] is None) is bool(unprotected)
        assert ReleaseCounts(tmp_path / str(seconds)).sent["measurements"] is bool(unprotected)


def test_all_conditions_met_is_an_epsilon(tmp_path: Path) -> None:
    report = report_of(private("fpl", tmp_path), row("x", "trained", 3))
    assert (report["conditions"], report["randomness"]) == ([], ["system"])
    assert report["epsilon"]["x"] == pytest.approx(epsilon([1.0, 1.0], 3, 1e-5), abs=1e-3)
    assert report["epsilon"]["x"] >= epsilon([1.0, 1.0], 3, 1e-5)
    assert report_line(report).startswith("epsilon at most")


def test_the_epsilon_that_is_printed_is_a_bound_too(tmp_path: Path) -> None:
    """298.4752 was printed as 298.475."""
    noise = ("privacy.noise_multiplier=0.07", "privacy.update_noise_multiplier=0.07")
    report = report_of(private("fpl", tmp_path, *noise), row("x", "trained", 1))
    printed = report_line(report).removeprefix("epsilon at most ").partition(" ")[0]
    assert float(printed) == report["epsilon"]["x"] > 100


@pytest.mark.parametrize("randomness", ["keyed", ""], ids=["keyed", "unknown"])
def test_noise_that_can_be_predicted_has_no_epsilon(randomness: str, tmp_path: Path) -> None:
    report = report_of(private("fpl", tmp_path), row("x", "trained", 1), row("y", "trained", 1, randomness))
    assert report["epsilon"] == {"x": None, "y": None}
    assert report["conditional_epsilon"]["x"] > 0


def test_a_release_with_much_noise_has_an_epsilon_above_zero(tmp_path: Path) -> None:
    overrides = ("privacy.noise_multiplier=1e7", "privacy.update_noise_multiplier=1e7", "privacy.delta=0.9")
    assert report_of(private("fpl", tmp_path, *overrides), row("x", "trained", 1))["epsilon"]["x"] > 0


def test_a_device_that_failed_has_released_nothing(tmp_path: Path) -> None:
    ledger = ReleaseCounts(tmp_path)
    ledger.count_requests("a", ["x"])
    ledger.count_replies("a", [row("x", "failed")])
    assert ledger.releases() == {"x": 0}


def test_a_server_that_died_while_it_waited_counts_what_it_asked_for(tmp_path: Path) -> None:
    ReleaseCounts(tmp_path).count_requests("a", ["x"])
    assert ReleaseCounts(tmp_path).releases() == {"x": 1}


def test_another_run_in_the_same_folder_adds(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ledger = ReleaseCounts(tmp_path)
        ledger.count_requests(name, ["x"])
        ledger.count_replies(name, [row("x", "trained", 1)])
    assert ReleaseCounts(tmp_path).releases() == {"x": 2}
    assert ReleaseCounts(tmp_path, new_run=True).releases() == {}
    assert not (tmp_path / LEDGER).exists()


@pytest.mark.parametrize(("resume", "left"), [(False, {}), (True, {"x": 1})], ids=["new", "resumed"])
def test_a_run_counts_what_the_folder_s_run_released_if_it_goes_on_with_it(
    resume: bool, left: dict[str, int], tmp_path: Path
) -> None:
    settings = private("fpl", tmp_path, resume=resume)
    ReleaseCounts(tmp_path).count_requests("before", ["x"])
    account = PrivacyAccount.of(settings, Federation(settings))
    assert account is not None
    assert account.ledger.releases() == left


@pytest.mark.parametrize("content", ["{", "[]", '{"clients": {"x": 3}}'], ids=["cut", "list", "number"])
def test_a_damaged_ledger_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text(content)
    with pytest.raises(CheckpointError, match="is not known"):
        ReleaseCounts(tmp_path)


@pytest.mark.parametrize("content", [None, "{"], ids=["missing", "damaged"])
def test_a_resumed_run_that_does_not_know_its_releases_is_refused_and_keeps_its_records(
    content: str | None, tmp_path: Path
) -> None:
    """Of clients that no later round asks, no report would tell what they released."""
    settings = private("fpl", tmp_path, SYSTEM, train={"rounds": 2})
    run(settings)
    (tmp_path / LEDGER).unlink()
    if content is not None:
        (tmp_path / LEDGER).write_text(content)
    records = ("scores.jsonl", "replies.jsonl", "config.yaml", "summary.json")
    before = [(tmp_path / name).read_bytes() for name in records]
    longer = private("fpl", tmp_path, SYSTEM, train={"rounds": 3})
    with pytest.raises(CheckpointError, match=r"privacy\.json is (missing|damaged), so what clients have released"):
        run(replace(longer, resume=True))
    assert [(tmp_path / name).read_bytes() for name in records] == before
    with pytest.raises(CheckpointError, match="is not known"):
        total_reports([(settings, tmp_path)])


def test_a_repeated_round_is_counted_after_resuming(tmp_path: Path) -> None:
    """Round 2 was answered and not kept: the devices have released three times, the record shows two."""
    settings = private("fpl", tmp_path, train={"rounds": 2})

    class KilledError(RuntimeError):
        pass

    def kill(request: Request, payload: Payload) -> Payload:
        if request.round == 2 and request.client == "noisy-0":
            raise KilledError
        return payload

    with pytest.raises(KilledError):
        run(settings, TouchedEngine(settings, edit=kill))
    done = run(private("fpl", tmp_path, train={"rounds": 2}, resume=True))
    assert done.summary["privacy"]["releases"] == {"bright-0": 3, "dark-0": 3, "noisy-0": 3}
    rows = [entry for entry in done.replies() if entry["status"] == "trained"]
    assert len([entry for entry in rows if entry["client"] == "bright-0"]) == 2


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_runs_on_the_same_data_add_up_and_a_sweep_prints_the_sum(tmp_path: Path) -> None:
    jobs = [private("fpl", tmp_path / str(seed), train={"rounds": 2}, seed=seed) for seed in (0, 1)]
    for settings in jobs:
        run(settings)
    jobs.append(toy_settings("fpl", tmp_path / "plain"))
    found = total_reports([(settings, settings.output_folder) for settings in jobs])
    assert list(found) == ["toy"]
    report, together = found["toy"], epsilon([1.0, 1.0], 4, 1e-5)
    assert report["runs"] == 2
    assert report["conditional_epsilon"]["all runs"] == pytest.approx(together, abs=1e-3)
    assert report["epsilon"]["all runs"] is None
    assert "no epsilon" in report_line(report)
    (line,) = privacy_lines([Job((), settings, str(settings.seed)) for settings in jobs])
    assert line.startswith("privacy, 2 runs on toy together: no epsilon")
    assert f"{together:.2f}"[:-1] in line
    assert privacy_lines([Job((), jobs[-1], "plain")]) == []


def test_the_sum_is_that_of_the_client_that_released_most_at_the_smallest_delta(tmp_path: Path) -> None:
    """An image may belong to ``x`` in one run and to ``y`` in the other."""
    jobs: list[tuple[RunSettings, Path]] = []
    for delta, x, y in ((1e-6, 3, 1), (1e-4, 1, 2)):
        settings = private("fpl", tmp_path / str(delta), f"privacy.delta={delta}")
        report_of(settings, row("x", "trained", x), row("y", "trained", y))
        jobs.append((settings, settings.output_folder))
    report = total_reports(jobs)["toy"]
    assert report["delta"] == 1e-6
    assert report["epsilon"]["all runs"] == pytest.approx(epsilon([1.0, 1.0], 3 + 2, 1e-6), abs=1e-3)


@pytest.mark.long
def test_a_search_by_validation_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match="validation scores"):
        entrants_of(["fpl"], ["data=glyphs", "privacy=gaussian"], Rules())
    with pytest.raises(ConfigError, match=r"no method is left.*validation scores"):
        entrants_of(["*"], ["data=glyphs", "privacy=gaussian"], Rules())


# ---- where it is shown -----------------------------------------------------------------------------------------------


def test_export_and_report_of_a_private_run_hold_what_was_released(tmp_path: Path) -> None:
    done = run(toy_settings("fpl", tmp_path / "run", overrides=("privacy=gaussian",), train={"rounds": 1}))
    export(tmp_path / "run", tmp_path / "model")
    assert read_description(tmp_path / "model").privacy == done.summary["privacy"]
    card = (tmp_path / "model" / "README.md").read_text()
    page = write_report([str(tmp_path / "run")]).read_text()
    assert 'id="privacy"' in page
    assert all("weights leave without noise" in text for text in (card, page))
    assert "replace-one sample" in card


def test_a_run_without_privacy_reports_none_anywhere(tmp_path: Path) -> None:
    done = run(toy_settings("fpl", tmp_path / "run", train={"rounds": 1}))
    assert "privacy" not in done.summary
    assert not (tmp_path / "run" / LEDGER).exists()
    assert export(tmp_path / "run", tmp_path / "model").privacy is None
    assert "privacy" not in (tmp_path / "model" / "README.md").read_text()
    assert 'id="privacy"' not in write_report([str(tmp_path / "run")]).read_text()


def test_a_run_that_has_not_ended_reports_what_it_released_so_far(tmp_path: Path) -> None:
    done = run(private("fpl", tmp_path, "privacy.unit=client", train={"rounds": 1}))
    assert done.summary["privacy"]["neighbours"].startswith("replace-one client")
    assert "class counts stay equal" in done.summary["privacy"]["neighbours"]
    content = json.loads((tmp_path / LEDGER).read_text())
    assert content["sent"] | {"measurements": False} == {"prototypes": True, "weights": True, "measurements": False}
    assert set(content["clients"]) == set(done.summary["clients"])
    assert RunRecord(tmp_path).facts.end is not None
    rewrite(tmp_path / "events.jsonl", lambda line: None if line["event"] == "finish" else line)
    so_far = RunModel(RunRecord(tmp_path))
    assert so_far.record.facts.end is None
    assert so_far.privacy() == done.summary["privacy"]
