"""``goldfinch export`` and ``evaluate``: their options and help. What they do is imported when called."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import ConfigError, nearest
from goldfinch.commands.program import Quiet, Settings, argument, items_of, option

Model = Annotated[Path, argument("MODEL")]

SETTING = re.compile(r"[+~]*[A-Za-z_][\w.@/]*=")
"""How a setting begins. An image of such a name is written with its folder: ``./a=b.png``."""


def export_run(
    source: Annotated[Path, argument("RUN")],
    data: Settings,
    to: Annotated[Path | None, option("--to", text="The new folder; always given.", metavar="DIR")] = None,
    formats: Annotated[
        list[str] | None,
        option("--format", text="onnx, besides safetensors, which is always written; repeatable.", metavar="NAMES"),
    ] = None,
    opset: Annotated[int | None, option("--opset", text="Of the ONNX file: 18 (default), 19 or 20.")] = None,
    chosen: Annotated[
        str | None, option("--round", text="best (by validation, default where it was kept), last, or a round.")
    ] = None,
    client: Annotated[
        str | None,
        option("--client", text="This client's own model, where clients keep one; shared: what they have in common."),
    ] = None,
    shared: Annotated[
        Path | None, option("--shared", text="On a device: what the server exported of the run.", metavar="DIR")
    ] = None,
    licence: Annotated[str | None, option("--licence", text="Under which the model may be used.")] = None,
    overwrite: Annotated[bool, option("--overwrite", text="Replace an exported model that DIR holds.")] = False,
) -> None:
    """Write a trained model into a folder of its own.

    goldfinch export outputs/first --to models/first --format onnx
    RUN        the run's folder; with --shared, the device's state folder
    KEY=VALUE  data to compare the files on, as of evaluate; the run's test splits by default
    """
    if to is None:  # typer would show a required option with a stray backslash
        raise ConfigError(f"--to DIR is missing: goldfinch export {source} --to DIR")
    from goldfinch.commands.export import export

    export(
        source,
        to,
        items_of(formats),
        chosen=chosen,
        client=client,
        shared=shared,
        licence=licence,
        data=data,
        overwrite=overwrite,
        opset=opset,
    )


def evaluate_model(
    model: Model,
    given: Annotated[list[str], argument("[IMAGE or KEY=VALUE]...", default_factory=list)],
    part: Annotated[str, option("--split", text="test (default), train or all.")] = "",
    output: Annotated[
        Path | None,
        option("--output", text="A .json file for all of it, or .csv of images; with engine=..., a folder."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Predict images, or score a model on any domain.

    goldfinch evaluate MODEL photos more.png --output predictions.csv
    goldfinch evaluate MODEL data=folder data.root=DIR data.domains=[new_site]
    goldfinch evaluate MODEL engine=superlink data=folder data.domains=[a,b] --output DIR
    MODEL      the folder that goldfinch export wrote
    IMAGE      images, or folders of images, whose classes are predicted; what cannot be read is named
               and skipped, and makes the exit code 1
    KEY=VALUE  the data, as of goldfinch run, whose labels the model is scored by
    With engine=inline, ray or superlink every client scores the model on its own test data, without training;
    DIR holds the records of a run.
    """
    settings = [word for word in given if SETTING.match(word)]
    images = [Path(word) for word in given if not SETTING.match(word)]
    if not given:
        raise ConfigError(
            f"neither images nor data were given: goldfinch evaluate {model} IMAGE..., or data=folder ..."
        )
    if images:
        _predict(model, images, settings, part, output)
        return
    from goldfinch.commands.device_evaluation import evaluate_on_devices, is_federated

    if is_federated(settings):
        if part not in ("", "test"):
            raise ConfigError(f"--split {part}: with engine=... clients score their test split; leave --split out")
        evaluate_on_devices(model, settings, output, quiet=quiet)
        return
    from goldfinch.commands.evaluate import PARTS, evaluate

    if part and part not in PARTS:
        raise ConfigError(f"--split {part}: {nearest(part, PARTS)}")
    known: Any = part or "test"
    evaluate(model, settings, known, output)


def _predict(model: Path, images: list[Path], settings: list[str], part: str, output: Path | None) -> None:
    if settings:
        raise ConfigError(
            f"{settings[0]} and {images[0]}: give images, whose classes are predicted, or settings of data, on which "
            "the model is scored (an image whose name looks like a setting is written ./NAME)"
        )
    if part:
        raise ConfigError(f"--split {part}: images have no split; leave it out")
    from goldfinch.commands.predict import predict

    raise typer.Exit(predict(model, images, output))
