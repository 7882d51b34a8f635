"""The two demonstrations: methods side by side on Ray, and a federation of real processes."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from PIL import Image
from rich.console import Console

from common.errors import ConfigError
from common.overrides import quoted_override
from common.settings import RunSettings, load_settings
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client, store_for
from goldfinch.commands.export import export
from goldfinch.commands.predict import predict
from goldfinch.record import RunRecord
from goldfinch.results.overrides import own_model_of
from goldfinch.results.report.page import write_report
from goldfinch.results.table import show_table
from goldfinch.run_model import RunModel
from goldfinch.trackers.live import watching
from goldfinch.trackers.wait_lines import wait_lines
from server.flower.submit import run_on_ray
from server.run.conduct import prepare_output
from server.run.existing import Step, decide

DEMO_METHODS = ("fedavg", "fpl")


def demo(overrides: Sequence[str], methods: Sequence[str], output: Path) -> None:
    """Train ``methods`` on the embedded domains through ``flwr run`` on Ray, then show the table and the report.

    A run that ``output`` holds already is shown again, or goes on if it was interrupted. ``overwrite=true`` replaces
    it.

    Raises:
        ConfigError: a method or setting is not good, or ``output`` holds another run; nothing has been trained.
    """
    console = Console()
    if any(item.startswith("method=") for item in overrides):
        raise ConfigError("method= is no setting of the demonstration: write --methods A,B")
    for method in methods:  # a mistake is named before the first is trained
        load_settings([f"method={method}", *overrides])
    console.print("Ten devices hold digits of four domains (handwritten, printed, signs, sketch), unevenly and few.")
    if tuple(methods) == DEMO_METHODS:
        console.print(
            "FedAvg averages models; FPL also shares clustered prototypes, which keep the rare domain afloat."
        )
    folders = [output / method for method in methods]
    chosen: list[RunSettings | None] = []
    for method, folder in zip(methods, folders, strict=True):  # a folder that holds another run is named before, too
        place = quoted_override("output", folder.absolute())
        chosen.append(settings_here(["experiment=demo", f"method={method}", "engine=ray", place, *overrides]))
    for method, settings in zip(methods, chosen, strict=True):
        if settings is None:
            continue
        console.rule(f"{method} (Flower simulation on Ray)")
        prepare_output(settings)
        with watching(settings) as show:
            run_on_ray(settings, [show])
    console.rule("side by side")
    show_table(list(map(str, folders)))
    console.print(f"written to {output.absolute()}: scores.jsonl, summary.json, checkpoint/ of each run")
    console.print(f"report: {write_report(list(map(str, folders)), output / 'report.html')}", soft_wrap=True)
    show_predictions(RunRecord(folders[-1]), output)
    console.print("next: goldfinch run method=fpl data=glyphs; goldfinch list; goldfinch doctor")


def settings_here(chosen: Sequence[str]) -> RunSettings | None:
    """Return the settings of a demonstration's run; ``None`` if its folder holds the finished run, which is said.

    Args:
        chosen: the overrides; ``overwrite=true`` replaces whatever run the folder holds.

    Raises:
        ConfigError: the folder holds another run, which is kept.
    """
    settings = load_settings(chosen)
    if settings.overwrite:
        return settings
    folder = settings.output_folder
    decision = decide(settings, study=True)
    if decision.step is Step.KEEP:
        raise ConfigError(f"{folder} holds a run, which is kept: {decision.reason}. To train again, add overwrite=true")
    if decision.step is Step.NOTHING:
        print(f"{folder} has finished already and is shown as it is; overwrite=true trains it again")
        return None
    if decision.step is Step.GO_ON:
        return load_settings([*chosen, "resume=true"])
    return settings


def show_predictions(run: RunRecord, output: Path) -> None:
    """Export the run's model and predict three test images, which are written next to it."""
    export(run.folder, output / "model", client=own_model_of(run), overwrite=True)
    places = []
    model = RunModel(run)
    for domain in run.domains[:3]:
        sample = model.sample(domain, 1)
        picture = Image.fromarray(sample.images[0].permute(1, 2, 0).numpy())
        places.append(output / "images" / f"{domain}-{run.class_names[int(sample.labels[0])]}.png")
        places[-1].parent.mkdir(exist_ok=True)
        picture.resize((4 * picture.width, 4 * picture.height), Image.Resampling.NEAREST).save(places[-1])
    print("\nwhat it says of three test images, named by domain and class:")
    predict(output / "model", places)


def deployment_demo(overrides: Sequence[str]) -> None:
    """Train FPL for three rounds on a SuperLink and four SuperNodes, one domain each, as real processes.

    The logs, keys and certificates of the processes are in a folder next to the run's, named after it. A run that has
    finished is shown again, as by :func:`demo`.
    """
    console = Console()
    started = time.perf_counter()
    place = quoted_override("output", Path("outputs", "demo-deployment", "run").absolute())
    chosen = ["method=fpl", "rounds=guarded", "engine=superlink", "train.rounds=3", place, *overrides]
    settings = settings_here(chosen)
    if settings is None:
        show_table([str(load_settings(chosen).output_folder)])
        return
    prepare_output(settings)
    nodes = one_node_per_client(settings)
    console.print(f"starting a SuperLink with TLS and {len(nodes)} SuperNodes with a key each: {', '.join(nodes)}")
    with ExitStack() as stack:
        with wait_lines("waiting for the SuperLink and the SuperNodes to start"):
            local = LocalDeployment(processes_of(settings), nodes, store=store_for(len(nodes)))
            deployment = stack.enter_context(local)
        for name, child in deployment.children.items():
            console.print(f"  {name:16} pid {child.process.pid}, log {child.log}")
        console.print(f"all answer after {time.perf_counter() - started:.1f} s; submitting FPL\n")
        with watching(settings) as show:
            deployment.run(settings, [show])
    console.print(f"\nall processes are stopped, {time.perf_counter() - started:.0f} s in all\n")
    show_table([str(settings.output_folder)])


def processes_of(settings: RunSettings) -> Path:
    """Return the folder for the processes of a run: ``<output>-processes``."""
    run = settings.output_folder
    return run.with_name(f"{run.name}-processes")
