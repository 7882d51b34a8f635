"""``goldfinch``: the commands, their options and their help. A command imports what it needs when it is called."""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from common.errors import ConfigError, nearest
from common.metrics import METRICS, RULES
from common.versions import VERSION
from goldfinch.commands import models
from goldfinch.commands.program import (
    Jobs,
    Labels,
    Output,
    Quiet,
    Rule,
    Runs,
    Settings,
    app,
    argument,
    command,
    device_command,
    items_of,
    one_of,
    option,
    seeds_of,
    show_loading,
)
from goldfinch.study.options import Rules, help_text


def _version(asked: bool) -> None:
    if asked:
        print(f"goldfinch {VERSION}, Flower {version('flwr')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _goldfinch(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback has done it
        bool, option("--version", text="Show the versions and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning for devices whose data come from different domains, on Flower."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 0 only if what was asked for was done."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return typer.main.get_command(app).main(given, prog_name="goldfinch", standalone_mode=False) or 0
    except click.NoSuchOption as error:
        _with_remedy(error).show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code


def _with_remedy(error: click.NoSuchOption) -> click.UsageError:
    """Return the error of an unknown option, with the command or the setting that it may stand for."""
    word = error.option_name.lstrip("-")
    if word in [known.name for known in app.registered_commands]:
        text = f"No such option '{error.option_name}', but there is a command: goldfinch {word}"
        return click.UsageError(text, error.ctx)
    arguments = error.ctx.command.params if error.ctx else []
    takes_settings = any("=" in str(each.metavar) for each in arguments if isinstance(each, click.Argument))
    if takes_settings and not error.possibilities:
        text = f"No such option '{error.option_name}'; a setting is written without hyphens: {word}=VALUE"
        return click.UsageError(text, error.ctx)
    return error


@command("run")
def _run(
    overrides: Settings,
    quiet: Quiet = False,
    dry_run: Annotated[
        bool, option("--dry-run", text="Show changed settings, clients, samples and bytes a round; train nothing.")
    ] = False,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", hidden=True)] = False,
) -> None:
    """Train one run.

    goldfinch run method=fpl data=glyphs train.rounds=10 seed=0 output=DIR
    KEY=VALUE  any setting of conf/; goldfinch list shows what can be chosen
    resume=true goes on with the run in output=DIR, overwrite=true replaces it
    """
    if multirun:
        raise ConfigError(
            "a run has one value of each setting; use sweep for several: goldfinch sweep method=fedavg,fpl seed=0,1"
        )
    from common.composition import Composition

    composition = Composition(overrides)  # most mistakes are told before torch is imported, which takes seconds
    if dry_run:
        from common.settings import settings_of
        from goldfinch.commands.running import preview

        preview(settings_of(composition.config()))
        return
    show_loading(quiet)
    from server.flower.superlink import simulation_link

    early = composition.value("engine.name") == "ray"
    if composition.value("resume") or composition.value("engine.address"):
        early = False  # a run that cannot be resumed, or a cluster that cannot be joined, starts nothing
    with simulation_link() if early else contextlib.nullcontext() as link:
        from common.settings import settings_of  # seconds in which the SuperLink comes up
        from goldfinch.commands.running import run

        run(settings_of(composition.config()), quiet=quiet, link=link)


@command("resume")
def _resume(
    folder: Annotated[Path, argument("DIR")],
    overrides: Settings,
    quiet: Quiet = False,
    trust: Annotated[
        bool, option("--trust", text="Write where config.yaml says, also outside DIR: the folder is my own.")
    ] = False,
) -> None:
    """Go on with a run, with its own configuration.

    goldfinch resume DIR [train.rounds=20]
    DIR        the run's folder; its config.yaml says what it is
    KEY=VALUE  what is to be otherwise from here on, such as more rounds; what contradicts the rounds done is refused
    """
    show_loading(quiet)
    from goldfinch.commands.running import resume

    resume(folder, overrides, quiet=quiet, trust=trust)


@command("sweep")
def _sweep(
    overrides: Annotated[list[str], argument("KEY=A,B...", default_factory=list)],
    output: Annotated[
        Path | None,
        option("--output", text="The folder; by default one below outputs/, named after the settings.", metavar="DIR"),
    ] = None,
    jobs: Jobs = 1,
) -> None:
    """Train every combination, then show the table.

    goldfinch sweep method=fedavg,fpl seed=0,1,2 --output DIR
    KEY=A,B    a setting with several values; method=* is every choice of a group
    KEY=VALUE  a setting of all runs
    overwrite=true replaces another sweep in DIR, and runs of other settings or other code, which are kept otherwise
    What is finished is skipped, what was interrupted goes on, what cannot be combined is named.
    """
    if not overrides:
        raise ConfigError("a sweep needs settings with several values: goldfinch sweep method=fedavg,fpl seed=0,1")
    from goldfinch.commands.sweep import default_output, sweep
    from goldfinch.kept import split_overwrite

    chosen, overwrite = split_overwrite(overrides)
    sweep(chosen, output or default_output("sweep", chosen), jobs, overwrite=overwrite)


def _rule(name: str, metavar: str, **more: Any) -> Any:
    """Return the option for a field of :class:`Rules`."""
    return option(f"--{name}", text=help_text(name), metavar=metavar, **more)


@command("compare")
def _compare(
    overrides: Annotated[list[str], argument("KEY=VALUE...", default_factory=list)],
    methods: Annotated[list[str] | None, option("--methods", text="The methods; * is all.", metavar="A,B")] = None,
    studies: Annotated[int, _rule("studies", "N", min=1)] = Rules.studies,
    trials: Annotated[int, _rule("trials", "N", min=1)] = Rules.trials,
    runs: Annotated[int, _rule("runs", "N", min=1)] = Rules.runs,
    scores: Annotated[list[str] | None, _rule("scores", "A,B")] = None,
    weighting: Annotated[str, _rule("weighting", "NAME")] = Rules.weighting,
    batch: Annotated[int, _rule("batch", "N", min=1)] = Rules.batch,
    output: Output = None,
    storage: Annotated[
        str,
        option(
            "--storage",
            text="A database that keeps the studies; by default the folder does.",
            metavar="URL",
            envvar="GOLDFINCH_STORAGE",
        ),
    ] = "",
    jobs: Jobs = 1,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Tune methods alike on validation samples, then rank them.

    goldfinch compare --methods fedavg,fpl data=glyphs --trials 8 --output DIR
    KEY=VALUE  any setting of goldfinch run but the method's, for all of them
    overwrite=true replaces a comparison of other settings or other code in DIR, which is kept otherwise
    An interrupted comparison goes on when it is called again, and several calls share the work. With one method it
    tunes this method.
    """
    from common.extras import libraries_of
    from goldfinch.commands.sweep import default_output
    from goldfinch.kept import split_overwrite

    with libraries_of("tune", "goldfinch compare"):
        from goldfinch.study.compare import CompareRequest, compare, take_part

    rules = Rules(studies, trials, runs, items_of(scores) or Rules.scores, weighting, batch)
    chosen, overwrite = split_overwrite(overrides)
    words = [f"methods={','.join(items_of(methods))}", *chosen, *rules.options]
    folder = output or default_output("compare", sorted(words))
    request = CompareRequest(items_of(methods), tuple(chosen), folder, rules, storage, overwrite)
    if worker:
        take_part(request)
        return
    compare(request, jobs)


@command("table")
def _table(
    folders: Runs,
    rule: Rule = "final",
    form: Annotated[
        str,
        option(
            "--format",
            text="rich (default), md, latex, csv, json.",
            metavar="FORMAT",
            autocompletion=one_of(("rich", "md", "latex", "csv", "json")),
        ),
    ] = "",
    metric: Annotated[
        str,
        option(
            "--metric",
            text="accuracy (default), balanced_accuracy, macro_f1, worst_class, or another that the runs have.",
            metavar="METRIC",
            autocompletion=one_of(METRICS),
        ),
    ] = "accuracy",
    columns: Annotated[
        list[str] | None,
        option("--columns", text="Show these alone, such as sketch,average,worst; all by default.", metavar="A,B"),
    ] = None,
    classes: Annotated[bool, option("--classes", text="Show the recall of each class by domain instead.")] = False,
    labels: Labels = None,
    output: Annotated[Path | None, option("--output", text="Write to a file; its suffix is the format.")] = None,
) -> None:
    """Show runs side by side, averaged over seeds.

    DIR  run folders, or folders with runs below them
    csv and json hold numbers, latex needs the package booktabs
    """
    from goldfinch.results.table import FORMATS, show_classes, show_table

    suffix = "" if output is None else output.suffix.lower().removeprefix(".").replace("tex", "latex")
    chosen = _known(form or suffix or "rich", FORMATS, "--format" if form else f"--output {output}: its format")
    if classes:
        if metric != "accuracy":
            raise ConfigError(f"--classes shows recall, and --metric {metric} another metric: choose one of the two")
        if columns:
            raise ConfigError(
                "--classes shows a table for each row, and --columns is of the scores: choose one of the two"
            )
        show_classes(folders, _known(rule, RULES), chosen, output, labels or ())
        return
    show_table(folders, _known(rule, RULES), chosen, output, metric, labels or (), items_of(columns))


@command("report")
def _report(
    folders: Runs,
    output: Annotated[Path | None, option(text="The page; report.html in the first folder by default.")] = None,
    csv: Annotated[
        bool, option("--csv", text="Write each run's scores and replies as history.csv and replies.csv instead.")
    ] = False,
    watch: Annotated[
        bool, option("--watch", text="Show the run in DIR while it goes on, instead; Ctrl-C leaves it alone.")
    ] = False,
) -> None:
    """Write one HTML page of runs, or watch one.

    goldfinch report outputs/first outputs/second --output report.html
    goldfinch report outputs/first --watch
    DIR  run folders, or folders with runs below them
    The page holds curves, confusion, prototypes and cost, and needs no network.
    """
    if csv:
        from goldfinch.commands.report import write_csv

        if output or watch:
            raise ConfigError("--csv writes into each run's own folder, and no page: goldfinch report DIR --csv")
        for path in write_csv(folders):
            print(f"wrote {path}")
        return
    if watch:
        from goldfinch.commands.watch import watch as show

        if len(folders) > 1 or output:
            raise ConfigError("--watch shows one run, and writes no page: goldfinch report DIR --watch")
        show(Path(folders[0]))
        return
    from goldfinch.results.report.page import write_report

    path = write_report(folders, output)
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); it needs no network: open it in any browser")


command("export")(models.export_run)
command("evaluate")(models.evaluate_model)


@command("reproduce")
def _reproduce(
    table: Annotated[list[str], argument("[TABLE] [KEY=VALUE]...", default_factory=list)],
    scale: Annotated[
        str,
        option(
            "--scale",
            text="paper (default); small: a stated reduction for two CPU cores; paper_net: fewer rounds alone.",
            metavar="SCALE",
        ),
    ] = "paper",
    methods: Annotated[
        list[str] | None,
        option(
            "--methods",
            text="Rows by label as written (its own commas left out), or all of a method's; every row by default.",
            metavar="A,B",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None, option("--seeds", text="Seeds; the table's own by default.", metavar="0,1,2")
    ] = None,
    output: Annotated[
        Path | None, option("--output", text="The folder; outputs/reproduce/SCALE by default.", metavar="DIR")
    ] = None,
    records: Annotated[
        Path | None,
        option(
            "--records",
            text="Keep page, curves and each run's summary and history there, as runs end.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Make a paper's table again, next to the published one.

    goldfinch reproduce fpl_digits --scale small
    TABLE      the table; without it, all are listed
    KEY=VALUE  any setting of goldfinch run, for every row
    overwrite=true  train again what is finished by other code, which is kept otherwise
    """
    from goldfinch.commands.reproduce import print_tables, reproduce, request_of

    asked = scale != "paper" or methods or seeds or output or records
    if not table and not asked:
        print_tables()
        return
    reproduce(request_of(table, scale, items_of(methods), seeds_of(seeds), output, records))


FIGURES = ("convergence", "prototypes", "heatmap", "bars")
"""The same as :data:`goldfinch.commands.figure.KINDS`. Importing that module would import matplotlib."""


@command("figure")
def _figure(
    kind: Annotated[str, argument("KIND", autocompletion=one_of(FIGURES))],
    folders: Annotated[list[str], argument("DIR...", default_factory=list)],
    output: Annotated[Path | None, option(text="The picture; KIND.png in the first folder by default.")] = None,
    rule: Rule = "final",
    column: Annotated[str, option(text="heatmap: average (default), worst, spread or a domain.")] = "average",
    axes: Annotated[
        list[str] | None, option(text="heatmap: one or two settings, such as method.contrast,method.temperature.")
    ] = None,
    samples: Annotated[int, option(text="prototypes: test images of each domain; 100 by default.")] = 100,
    by: Annotated[
        str, option(text="prototypes: placed by tsne (default) or pca.", autocompletion=one_of(("tsne", "pca")))
    ] = "tsne",
    title: Annotated[str | None, option(text="The title; data and protocol by default.")] = None,
    size: Annotated[str | None, option(text="Width and height in inches.", metavar="7x4")] = None,
    labels: Labels = None,
) -> None:
    """Draw runs as one picture.

    KIND  convergence, prototypes, heatmap or bars
    DIR   run folders, or folders with runs below them
    """
    if kind not in FIGURES and not folders:
        raise ConfigError(f"KIND is missing before {kind}: goldfinch figure convergence {kind}; {nearest('', FIGURES)}")
    if not folders:
        raise ConfigError(f"DIR is missing: goldfinch figure {kind} DIR, a run's folder or one with runs below it")
    from goldfinch.commands.figure import draw

    draw(
        kind,
        folders,
        output,
        _known(rule, RULES),
        column,
        items_of(axes),
        samples,
        by,
        title,
        size,
        labels or (),
    )


@command("doctor")
def _doctor(
    overrides: Settings,
    server: Annotated[
        str | None,
        option(
            "--server",
            text="Check whether a device here may join that server: certificate, clocks.",
            metavar="HOST:PORT",
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        option("--ca", text="The authority's certificate, unless the server speaks no TLS.", metavar="FILE"),
    ] = None,
    report: Annotated[
        Path | None,
        option("--report", text="Write a file about that run for a public issue.", metavar="RUN"),
    ] = None,
) -> None:
    """Check what works here, and print how to fix the rest.

    goldfinch doctor
    goldfinch doctor data=pacs data.root=DIR
    goldfinch doctor --server HOST:PORT --ca FILE
    goldfinch doctor --report RUN
    KEY=VALUE  a data set: what of its files is there, and what is missing
    A file for a public issue has settings, versions, counts, and where errors were raised; no path, name, text or data.
    """
    asked = [each for each in (overrides, server or ca, report) if each]
    if len(asked) > 1:
        raise ConfigError("doctor does one thing: leave out all but KEY=VALUE, --server with --ca, or --report")
    if report is not None:
        from goldfinch.commands.public_report import write_public_report

        print(f"wrote {write_public_report(report)}: read it, then attach it to the issue")
        return
    if overrides:
        from goldfinch.commands.doctor import examine_data

        raise typer.Exit(examine_data(overrides))
    from goldfinch.commands.doctor import examine

    raise typer.Exit(examine(server, ca))


@command("demo")
def _demo(
    overrides: Settings,
    methods: Annotated[
        list[str] | None, option("--methods", text="The methods; fedavg,fpl by default.", metavar="A,B")
    ] = None,
    output: Annotated[
        Path | None, option("--output", text="The folder; outputs/demo by default.", metavar="DIR")
    ] = None,
    deployment: Annotated[
        bool,
        option(
            "--deployment",
            text="Train FPL on a SuperLink and four SuperNodes instead: real processes on this machine, which end "
            "with the demonstration.",
        ),
    ] = False,
) -> None:
    """Train FedAvg and FPL on Ray, side by side, offline.

    goldfinch demo --methods fedprox,fpl --output DIR
    goldfinch demo --deployment
    KEY=VALUE  any setting of goldfinch run, for all of them
    """
    show_loading(quiet=False)
    from goldfinch.commands import demo

    if deployment:
        if methods or output:
            raise ConfigError("--deployment trains one method: write method=NAME and output=DIR, as of goldfinch run")
        demo.deployment_demo(overrides)
        return
    demo.demo(overrides, items_of(methods) or demo.DEMO_METHODS, output or Path("outputs/demo"))


Nodes = Annotated[list[str] | None, option("--node", text="A device; repeatable.", metavar="NAME")]
Folder = Annotated[Path, argument("FOLDER")]
Connection = Annotated[
    str | None, option("--connection", text="The SuperLink's name in Flower's config.toml.", metavar="NAME")
]


@device_command("certificates")
def _certificates(
    folder: Folder,
    host: Annotated[
        list[str] | None, option("--host", text="A name or address of the server; repeatable.", metavar="NAME")
    ] = None,
    node: Nodes = None,
    days: Annotated[
        int | None, option("--days", text="Days for which a new certificate of the server is valid.", metavar="N")
    ] = None,
) -> None:
    """Make or renew certificates and devices' keys.

    goldfinch devices certificates FOLDER --host fl.example.org --node ward-a --node ward-b
    FOLDER  where they are kept
    """
    from goldfinch.commands.membership import certificates

    certificates(folder, host or [], node or [], days)


@device_command("enrol")
def _enrol(
    folder: Folder,
    node: Nodes = None,
    client: Annotated[
        list[str] | None,
        option(
            "--client",
            text="A device and the client that it is, such as ward-a=radiology-0; repeatable. By default a device is "
            "the client of its name, or NAME-0.",
            metavar="NODE=ID",
        ),
    ] = None,
    restore: Annotated[
        bool,
        option(
            "--restore",
            text="Wait for the SuperLink, and enrol again the devices that it has forgotten, as the clients that they "
            "were.",
        ),
    ] = False,
    kit: Annotated[
        Path | None,
        option("--kit", text="Write an archive from which the device of --node starts.", metavar="FILE"),
    ] = None,
    server: Annotated[str, option("--server", text="How that device reaches the server.", metavar="HOST:PORT")] = "",
    connection: Connection = None,
) -> None:
    """Let devices take part, each as one client for good.

    goldfinch devices enrol FOLDER --node ward-b --client ward-a=radiology-0
    goldfinch devices enrol FOLDER --node ward-a --kit ward-a.tar --server fl.example.org:8443
    FOLDER  the folder that goldfinch devices certificates was given
    Without --node and --client, all devices of the folder.
    """
    from goldfinch.commands import membership

    if restore:
        if node or client or kit or server:
            raise ConfigError("--restore enrols the devices that were enrolled before: leave out all other options")
        membership.enrol_again(folder, connection)
        return
    if kit is not None:
        named = [*(node or []), *(each.partition("=")[0] for each in client or [])]
        if len(named) != 1:
            raise ConfigError("--kit is for one device: name it by --node NAME or --client NAME=ID")
        membership.enrolment_of(folder, None).check_kit(named[0], kit, server)
    elif server:
        raise ConfigError("--server is for a kit: add --kit FILE, or leave it out")
    membership.enrol(folder, node or [], client or [], connection)
    if kit is not None:
        print(f"wrote {membership.make_kit(folder, named[0], kit, server)}: it holds the device's key; see its README")


@device_command("dismiss")
def _dismiss(folder: Folder, node: Nodes = None, connection: Connection = None) -> None:
    """Let devices take part no longer.

    goldfinch devices dismiss FOLDER --node ward-a
    FOLDER  the folder that goldfinch devices certificates was given
    """
    from goldfinch.commands.membership import dismiss

    dismiss(folder, node or [], connection)


@device_command("list")
def _list_devices(
    folder: Folder,
    runs: Annotated[list[str], argument("[RUN]...", default_factory=list)],
    as_json: Annotated[bool, option("--json", text="One JSON object in place of the table.")] = False,
    metrics: Annotated[
        Path | None, option("--metrics", text="A file for a node exporter (*.prom), written besides.", metavar="FILE")
    ] = None,
    connection: Connection = None,
) -> None:
    """List devices, with their contact and contributions.

    goldfinch devices list FOLDER outputs
    FOLDER  the folder that goldfinch devices certificates was given
    RUN     run folders, or folders with runs below them

    device, client            the key, and the client that it is enrolled for
    status                    online, offline, registered (never seen), new (not enrolled), dismissed, or unknown
    online since, last contact        what the SuperLink says (UTC)
    last reply, of run        the last reply that counted, in the runs that are named
    missed                    rounds in a row, up to now, in which the device was asked and did not count
    version, clock            Goldfinch's version there; seconds by which its clock is ahead of the server's
    epsilon                   what its last private run spent; what is left of its limit, the device alone knows

    The exit status is 0, also if the SuperLink does not answer, which is said; 1 after an error.
    """
    from goldfinch.commands.device_list import list_devices
    from goldfinch.commands.membership import enrolment_of

    list_devices(enrolment_of(folder, connection), runs, as_json=as_json, metrics=metrics)


@command("list")
def _list(
    names: Annotated[list[str], argument("[NAME]...", default_factory=list)],
) -> None:
    """List what can be chosen, and explain settings.

    goldfinch list method
    goldfinch list fpl method.temperature
    NAME  a group (method, train), all by default; a choice (fpl, protocol.fpl_office); a setting (train.rounds);
          alterations lists what may change a published algorithm
    """
    from goldfinch.commands.listing import print_names

    print_names(names)


def _known(value: str, choices: Iterable[str], name: str = "--rule") -> Any:
    """Return an option's value, if it is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} {value}: {nearest(value, choices)}")
    return value


if __name__ == "__main__":
    sys.exit(main())
