"""``goldfinch``: run, sweep, table, report, doctor and the demonstrations."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError, GoldfinchError, nearest
from server.commands.signals import Terminated, terminable

if TYPE_CHECKING:  # commands import what they need: torch alone takes seconds
    from common.settings import RunSettings
    from server.flower.superlink import SimulationLink

USAGE = """goldfinch run [KEY=VALUE ...]     train: method=fpl data=glyphs train.rounds=10 output=DIR; --quiet
goldfinch sweep KEY=A,B [...]      every combination, e.g. method=* seed=0,1 output=DIR; --jobs N; finished ones skipped
goldfinch table DIR [DIR ...]      runs side by side over seeds; --rule final|last_n|best_round
goldfinch report DIR [DIR ...]     one HTML page: curves, confusion, prototypes, cost; --output FILE --tsne --images
goldfinch reproduce TABLE          a paper's table again, beside what was published; scale=small for two cores
goldfinch figure KIND DIR [...]    features, cam, heatmap, bars or convergence of runs as PNG; --output FILE
goldfinch doctor                   what works here, and how to mend what does not
goldfinch doctor entrance=HOST:PORT ca=FILE   whether a device here may join: server, certificate, clocks
goldfinch demo [KEY=VALUE ...]     FedAvg and FPL on Ray, side by side, offline, in minutes
goldfinch deployment-demo          a SuperLink and four SuperNodes as real processes, FPL for three rounds
goldfinch certificates FOLDER      authority, server certificate, device keys: host=NAME node=NAME, each repeatable
goldfinch enrol|dismiss FOLDER     let devices take part, or no longer: node=NAME connection=NAME
goldfinch list [GROUP]             what can be chosen: methods, data sets, models, protocols, engines ..."""

ENGINES = ("inline", "ray", "superlink")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 0 only if what was asked for was done."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "sweep": _sweep,
        "table": _table,
        "report": _report,
        "reproduce": _reproduce,
        "figure": _figure,
        "doctor": _doctor,
        "list": _list,
        "demo": _demo,
        "deployment-demo": _deployment_demo,
        "certificates": partial(_membership, "certificates"),
        "enrol": partial(_membership, "enrol"),
        "dismiss": partial(_membership, "dismiss"),
    }
    parser = argparse.ArgumentParser(prog="goldfinch", usage=USAGE, add_help=True)
    parser.add_argument("command", nargs="?")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        print(USAGE)
        return 2
    try:
        if parsed.command not in commands:
            raise ConfigError(f"goldfinch {parsed.command}: no such command; {nearest(parsed.command, commands)}")
        with terminable():
            return commands[parsed.command](parsed.rest)
    except GoldfinchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        words = str(error) or "stopped; the last complete round is kept: resume=true goes on"
        print(f"\n{words}", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130


def _run(overrides: list[str]) -> int:
    quiet = "--quiet" in overrides
    overrides = [item for item in overrides if item != "--quiet"]
    from server.flower.superlink import simulation_link

    with simulation_link() if "engine=ray" in overrides else contextlib.nullcontext() as link:
        from common.settings import load_settings  # seconds in which the SuperLink comes up

        run(load_settings(overrides), overrides, quiet=quiet, link=link)
    return 0


def run(
    settings: RunSettings, overrides: Sequence[str], *, quiet: bool = False, link: SimulationLink | None = None
) -> None:
    """One run on the engine that the settings name, shown as it goes on unless ``quiet``.

    Args:
        settings: the run's settings.
        overrides: the overrides that they were composed of.
        quiet: show nothing.
        link: a SuperLink for a simulation that was started before; ``None`` starts one where it is needed.

    Raises:
        GoldfinchError: what was wrong, and what to do next.
    """
    from server.engines.inline import InlineEngine
    from server.flower.submit import run_on_ray, run_on_superlink
    from server.run.conduct import conduct, prepare_output
    from server.trackers.progress import watching

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    engine = settings.engine.get("name")
    if engine not in ENGINES:
        raise ConfigError(f"engine.name={engine!r}; {nearest(str(engine), ENGINES)}")
    prepare_output(settings)
    with watching(settings, quiet=quiet) as show:
        if engine == "inline":
            conduct(settings, InlineEngine(settings), [show])
        elif engine == "ray":
            run_on_ray(settings, overrides, [show], link)
        else:
            run_on_superlink(settings, overrides, [show])


def _sweep(arguments: list[str]) -> int:
    from server.commands.sweep import sweep

    parser = argparse.ArgumentParser(prog="goldfinch sweep", usage=USAGE)
    parser.add_argument("--jobs", type=int, default=1)
    parsed, overrides = parser.parse_known_args(arguments)
    places = [item for item in overrides if item.startswith("output=")]
    output = Path(places[-1].partition("=")[2]) if places else Path("outputs", "sweep")
    sweep([item for item in overrides if item not in places], output, parsed.jobs)
    return 0


def _table(arguments: list[str]) -> int:
    from server.results.table import RULES, print_table

    parser = argparse.ArgumentParser(prog="goldfinch table", usage=USAGE)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--rule", choices=sorted(RULES), default="final")
    parsed = parser.parse_args(arguments)
    print_table(parsed.folders, parsed.rule)
    return 0


def _report(arguments: list[str]) -> int:
    from server.results.report.page import write_report

    parser = argparse.ArgumentParser(prog="goldfinch report", usage=USAGE)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--tsne", action="store_true")
    parser.add_argument("--images", action="store_true")
    parsed = parser.parse_args(arguments)
    path = write_report(parsed.folders, parsed.output, tsne=parsed.tsne, images=parsed.images)
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); it needs no network: open it in any browser")
    return 0


def _reproduce(arguments: list[str]) -> int:
    from server.commands.reproduce import command

    return command(arguments)


def _figure(arguments: list[str]) -> int:
    from server.commands.figure import command

    return command(arguments)


def _doctor(arguments: list[str]) -> int:
    from server.commands.doctor import examine

    return examine(arguments)


def _demo(overrides: list[str]) -> int:
    from server.commands.demo import demo

    demo(overrides=overrides)
    return 0


def _deployment_demo(overrides: list[str]) -> int:
    from server.commands.demo import deployment_demo

    deployment_demo(overrides=overrides)
    return 0


def _membership(command: str, arguments: list[str]) -> int:
    from server.commands.membership import COMMANDS

    return COMMANDS[command](arguments)


def _list(groups: list[str]) -> int:
    from common.config import CONF

    known = {path.name: sorted(item.stem for item in path.glob("*.yaml")) for path in CONF.iterdir() if path.is_dir()}
    for group in groups or sorted(known):
        if group not in known:
            raise ConfigError(f"{group}: no such group; {nearest(group, known)}")
        print(f"{group:12} {' '.join(known[group])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
