"""``goldfinch export``, ``predict`` and ``evaluate``: their options and help. What they do is imported when called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import ConfigError, nearest
from server.commands.program import Quiet, Settings, argument, option

Model = Annotated[Path, argument("MODEL")]


def export(
    source: Annotated[Path, argument("RUN")],
    data: Settings,
    to: Annotated[Path | None, option("--to", text="The new folder; always given.", metavar="DIR")] = None,
    formats: Annotated[
        str, option("--format", text="onnx, besides safetensors, which is always written.", metavar="NAMES")
    ] = "",
    chosen: Annotated[
        str | None, option("--round", text="best (by validation, default where it was kept), last, or a round.")
    ] = None,
    client: Annotated[str | None, option("--client", text="This client's own model, where clients keep one.")] = None,
    shared: Annotated[
        Path | None, option("--shared", text="On a device: what the server exported of the run.", metavar="DIR")
    ] = None,
    licence: Annotated[str, option("--licence", text="Under which the model may be used.")] = "not stated",
    overwrite: Annotated[bool, option("--overwrite", text="Replace an exported model that DIR holds.")] = False,
) -> None:
    """Write a trained model into a folder of its own.

    goldfinch export outputs/first --to models/first --format onnx
    RUN        the run's folder; with --shared, the device's state folder
    KEY=VALUE  data to compare the files on, as of evaluate; the run's test splits by default
    """
    if to is None:  # typer would show a required option with a stray backslash
        raise ConfigError(f"--to DIR is missing: goldfinch export {source} --to DIR")
    from server.commands.export import export as write

    names = [name for name in formats.split(",") if name]
    write(
        source,
        to,
        names,
        chosen=chosen,
        client=client,
        shared=shared,
        licence=licence,
        data=data,
        overwrite=overwrite,
    )


def predict(
    model: Model,
    images: Annotated[list[Path], argument("IMAGE...")],
    output: Annotated[Path | None, option("--output", text="A .csv or .json file for all of it.")] = None,
) -> None:
    """Predict the classes of images with an exported model.

    MODEL  the folder that goldfinch export wrote
    IMAGE  images, or folders of images
    What cannot be read is named and skipped, and makes the exit code 1.
    """
    from server.commands.predict import predict as classify

    raise typer.Exit(classify(model, images, output))


def evaluate(
    model: Model,
    data: Settings,
    part: Annotated[str, option("--split", text="test (default), train or all.")] = "test",
    output: Annotated[
        Path | None, option("--output", text="A .json file for all of it; with engine=..., a folder.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Score an exported model, also on domains of others.

    goldfinch evaluate MODEL data=folder data.root=DIR data.domains=[new_site]
    goldfinch evaluate MODEL engine=superlink data=folder data.domains=[a,b] --output DIR
    MODEL      the folder that goldfinch export wrote
    KEY=VALUE  the data, as of goldfinch run
    With engine=inline, ray or superlink every client scores the model on its own test data, without training;
    DIR holds the records of a run.
    """
    from server.commands.device_evaluation import evaluate_on_devices, is_federated

    if is_federated(data):
        if part != "test":
            raise ConfigError(f"--split {part}: with engine=... clients score their test split; leave --split out")
        evaluate_on_devices(model, data, output, quiet=quiet)
        return
    from server.commands.evaluate import PARTS
    from server.commands.evaluate import evaluate as score

    if part not in PARTS:
        raise ConfigError(f"--split {part}: {nearest(part, PARTS)}")
    known: Any = part
    score(model, data, known, output)
