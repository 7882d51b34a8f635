"""``goldfinch export``: write a trained model to a folder, from a run's folder or from a device's state."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.choices import folder_options
from common.config import build, to_config
from common.data.batches import Split
from common.errors import ConfigError, DataError, nearest
from common.exports.description import Description
from common.exports.model import TrainedModel, kept_part, read_export, without_paths
from common.metrics import RoundScore, domain_accuracy
from common.models.mixed import Mixed
from common.models.specs import ModelSpec
from common.numerics import generator
from common.storage import folder_name
from common.text import quantity, shell_line
from goldfinch.commands.evaluate import domains_of
from goldfinch.exports.formats import BATCH, Content, check_opset, chosen_formats, write_export
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel, in_turn
from strategies.core.method import Method

SAMPLES = 256
"""Images of each domain, or of each client's validation, on which files are compared with the run's own net."""

RULE = "accuracy in % on each domain's test split"
PART = "accuracy in % on a part of each domain's test split, {images}"
CHOSEN = {"best": "best round by validation", "last": "last round"}
MIXED = "The score is with tensors that the server has for each client; in this model are those that all share."
SHARED = "shared"
"""In place of a client: the part that all clients share. No client has this name."""


def export(
    source: Path,
    to: Path,
    formats: Sequence[str] = (),
    *,
    chosen: str | None = None,
    client: str | None = None,
    shared: Path | None = None,
    licence: str | None = None,
    data: Sequence[str] = (),
    overwrite: bool = False,
    opset: int | None = None,
) -> Description:
    """Write the model of a run, or of a device, to a folder, print a summary, and return the model's description.

    Args:
        source: a run's folder, or a node's state-dir if ``shared`` is given.
        to: the folder to write.
        formats: further formats besides safetensors.
        chosen: the round, ``best`` or ``last``; by default ``best`` if the run has one. Not with ``shared``.
        client: the client, for a client's own model; :data:`SHARED` for what clients share.
        shared: an exported model of the part that clients share.
        licence: the licence of the model; ``None`` keeps that of ``shared``.
        data: settings of a data set on which files are compared.
        overwrite: replace an exported model in ``to``.
        opset: of the ONNX file; ``None`` is the earliest that can be written.

    Raises:
        ConfigError: an argument does not fit the run; the message names it.
    """
    wanted = chosen_formats(formats)
    check_opset(opset, wanted)
    content = _content(source, shared, chosen, client, data)
    description = content.description
    if licence is not None:
        description = replace(description, licence=licence)
    if not description.complete and len(wanted) > 1:
        raise ConfigError(f"clients of {description.method} keep a part of the net: other formats are made on devices")
    content = replace(content, description=description)
    description, differences = write_export(to, content, wanted, overwrite=overwrite, opset=opset)
    print(f"{to}: {_kind(content)}, {description.method}, {description.chosen}")
    for name, entry in description.files.items():
        comparison = "a part of the net"
        if differences:
            comparison = f"largest difference {differences[name]:.1e}"
        print(f"  {name:12} {entry['name']:18} {entry['bytes'] / 1e6:8.2f} MB   {comparison}")
    for note in description.notes:
        print(f"note: {note}")
    if description.complete:
        print(f"compared with the net on {content.images_are or 'noise, since the data are not on this machine'}")
        print(f"next: {shell_line(['goldfinch', 'evaluate', to, *folder_options()])} IMAGE...")
    else:
        words = shell_line(["--shared", to.name])
        print(f"next, on each device: goldfinch export STATE {words} --to DIR (docs/deploy.md)")
    return description


def _content(source: Path, shared: Path | None, chosen: str | None, client: str | None, data: Sequence[str]) -> Content:
    """Return the model of a device if ``shared`` is given, or else of a run."""
    if shared is not None:
        if chosen is not None:
            raise ConfigError(
                f"--round {chosen}: the round is that of {shared}, which the server exported; leave it out"
            )
        return _of_device(source, shared, client, data)
    if chosen is None:
        chosen = "last"
        if RunModel(RunRecord(source)).has_best:
            chosen = "best"
    return _of_run(RunModel(RunRecord(source), chosen), client, data)


def _kind(content: Content) -> str:
    """Return what is exported, in words."""
    if content.description.client:
        return f"the own model of {content.description.client}"
    if content.description.complete:
        return "the model of all clients"
    if content.weights:
        return "the part that clients share"
    return "what clients share, which is no weight of the net"


def _of_run(run: RunModel, client: str | None, data: Sequence[str]) -> Content:
    record, settings, method = run.record, run.settings, run.method
    if not method.trains:
        evaluated = record.config["method"].get("folder", "a model")
        raise ConfigError(f"{run.folder} trained no model: it evaluated {evaluated}; export the run that trained it")
    state = run.checkpoint.state
    model, weights = run.shared_model(None if client == SHARED else client)
    whole = len(weights) == len(model.state_dict())
    _check_client(run, client, whole)
    if client == SHARED:
        client = None
    complete = whole or client is not None
    held: list[str] = []
    for spec in run.clients:
        if weights or client in (None, spec.id):  # where no weights are shared, the client alone trained its model
            held += [part.domain for part in spec.holds]
    prototypes = None
    if len(state.prototypes):
        prototypes = {"rows": len(state.prototypes), "distance": "cosine"}
    description = Description(
        architecture={
            "model": without_paths(_network_of(record.config["model"], settings.model, client), "model"),
            "method": without_paths(record.config["method"], "method"),
            "clients": len(run.clients),
            "seed": record.facts.seed,
        },
        classes=tuple(record.class_names),
        image_size=settings.data.image_size,
        resize=settings.data.reading.resize,
        value_range=settings.data.reading.value_range,
        page=settings.data.reading.page,
        mean=settings.data.augmentation.mean,
        std=settings.data.augmentation.std,
        normalisation=settings.data.augmentation.normalisation,
        method=method.name,
        data={
            "name": settings.data.name,
            "domains": list(dict.fromkeys(held)),
            "protocol": record.facts.protocol,
        },
        run=run.checkpoint.run,
        round=state.round,
        chosen=f"{CHOSEN.get(run.chosen, 'chosen round')}, {state.round}",
        client=client,
        score=_score(record, state.round, client),
        prototypes=prototypes,
        privacy=run.privacy(),
        notes=_notes(run, state.round, len(state.prototypes)),
        complete=complete,
        kept={} if complete else run.checkpoint.counted,
    )
    images, images_are = _images(description, data, run)
    if not description.complete:
        return Content(description, weights, state.prototypes, images)
    inference, prepare = run.inference(client), settings.data.augmentation.test
    with torch.no_grad():
        expected = torch.cat([inference(prepare(part))[1].softmax(1) for part in images.split(BATCH)])
    return Content(description, run.model(client).state_dict(), state.prototypes, images, images_are, expected)


def _network_of(node: Any, spec: ModelSpec, client: str | None) -> Any:
    """Return the configuration of the client's network: ``node``, or a part of it where networks differ."""
    if client is None or not isinstance(spec, Mixed):
        return node
    return to_config(spec.of(client.rpartition("-")[0]))


def trained_model(folder: Path, *, client: str | None = None, chosen: str = "last") -> TrainedModel:
    """Return the model of the run in ``folder``, on the CPU, in evaluation mode.

    Args:
        folder: the run's folder.
        client: return the model of this client, for methods with a model for each client.
        chosen: ``last``, ``best`` by validation, or the number of a round.

    Raises:
        ConfigError: the run has no such model.
        CheckpointError: the checkpoint is damaged.
    """
    content = _of_run(RunModel(RunRecord(folder), chosen), client, ())
    if not content.description.complete:
        raise ConfigError(
            f"{folder}: devices keep a part of the net of {content.description.method}; export the model on a device"
        )
    return TrainedModel(content.description, content.weights, content.prototypes)


def _check_client(run: RunModel, client: str | None, whole: bool) -> None:
    """Check that ``client`` is given if, and only if, the clients have models of their own.

    Args:
        run: the run.
        client: the chosen client; ``None`` for the global model; :data:`SHARED`.
        whole: whether all clients have one model.

    Raises:
        ConfigError: the client does not exist, or must or must not be given.
    """
    ids = [*(spec.id for spec in run.clients), SHARED]
    if client is not None and whole:
        raise ConfigError(f"--client {client}: all clients of {run.method.name} have one model; leave it out")
    if client is not None and client not in ids:
        raise ConfigError(f"--client {client}: {nearest(client, ids)}")
    if client is None and not whole and (run.folder / "clients" / run.checkpoint.run).is_dir():
        raise ConfigError(
            f"clients of {run.method.name} have models of their own: choose by --client, or {SHARED}, which is what "
            f"they have in common; {nearest('', ids)}"
        )


def _of_device(state: Path, shared: Path, client: str | None, data: Sequence[str]) -> Content:
    description, weights, prototypes = read_export(shared)
    if description.complete:
        raise ConfigError(f"--shared {shared}: it holds the whole net, of which devices keep nothing")
    folder = state / description.run
    clients: list[str] = []
    if folder.is_dir():
        clients = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not clients:
        raise ConfigError(f"{state} holds no state of the run {description.run}: give this node's state-dir")
    chosen = client or clients[0]
    if chosen not in clients or (client is None and len(clients) > 1):
        raise ConfigError(f"--client {client or 'is needed'}: {nearest(client or '', clients)}")
    method = build(description.architecture["method"], "method")
    counted = {folder_name(name): version for name, version in description.kept.items()}
    kept = kept_part(folder / chosen, counted.get(chosen), method, {}, 0)
    notes = description.notes
    if type(method).own_weights is not Method.own_weights and kept.keys().isdisjoint(weights):
        notes = (*notes, MIXED)
    trained_on = description.data
    if not weights:  # the client alone trained its model
        trained_on = {**trained_on, "domains": [chosen.rpartition("-")[0]]}
    for name, tensor in kept.items():
        if name.startswith(("backbone.", "head.")):
            weights[name] = tensor
    own = (description.score or {}).get("clients", {}).get(chosen)
    score = None
    if own:
        score = {"rule": (description.score or {}).get("rule", RULE), "accuracy": own}
    parts = description.architecture
    architecture = {**parts, "model": _network_of(parts["model"], build(parts["model"], "model"), chosen)}
    description = replace(description, architecture=architecture, client=chosen, complete=True, score=score, files={})
    description = replace(description, notes=notes, data=trained_on)
    return Content(description, weights, prototypes, *_images(description, data))


def _images(description: Description, data: Sequence[str], run: RunModel | None = None) -> tuple[Tensor, str]:
    """Return the images on which files are compared, ``[N, 3, S, S]`` uint8, and a text that describes them.

    The images are those of ``data``, or else the run's validation samples, or else its test images: of each at most
    :data:`SAMPLES`, classes in turn. Without any, as on a SuperLink or a device, the images are noise, and the text is
    empty.
    """
    splits: dict[str, Split] = {}
    kind = "test images"
    if data:
        for name, domain in domains_of(data, description)[1].items():
            splits[name] = domain.test
    elif run is not None and run.settings.protocol.validation:
        kind = "validation samples"  # the threshold of "none of the classes" is chosen on them, and not on test images
        with contextlib.suppress(DataError, OSError):
            for spec in run.clients:
                if description.client in (None, spec.id):
                    splits[spec.id] = run.validation_split(spec)
    elif run is not None:
        domains = [spec.domain for spec in run.clients if spec.id == description.client] or run.test_domains
        with contextlib.suppress(DataError, OSError):
            splits = {name: run.test_split(name) for name in domains}
    if not splits:
        shape = (64, 3, description.image_size, description.image_size)
        return torch.randint(256, shape, generator=generator(0, "noise"), dtype=torch.uint8), ""
    images = torch.cat([in_turn(split, SAMPLES, name).images for name, split in splits.items()])
    return images, f"{len(images)} {kind} of {', '.join(splits)}"


def _notes(run: RunModel, number: int, prototypes: int) -> tuple[str, ...]:
    """Return remarks for readers of the score and of the files.

    Args:
        run: the run.
        number: the round.
        prototypes: number of prototypes in the files.
    """
    method, attack = run.method, run.record.attack
    earlier = method.scores_new_state and not method.personal
    notes: list[str] = []
    if not run.record.ended:
        notes.append(f"The run has not finished: this is round {number} of {run.settings.train.rounds}.")
    if attack:
        notes.append(f"Trained under a simulated attack: {attack}.")
    if method.adapts_to_data:
        notes.append(
            "The score is of models that were adapted to each client's training images; this model was not adapted."
        )
    if earlier:
        notes.append("The score was taken within the round, before its last exchange changed the model.")
    if method.name == "fedsr":
        notes.append(
            "The score is by draws of the features of each image; this model takes ten times as many, the same for all "
            "images."
        )
    if prototypes:
        notes.append("The prototypes in the files are means of clients' features, class by class.")
    return tuple(notes)


def _score(record: RunRecord, number: int, client: str | None) -> Mapping[str, Any] | None:
    """Return the accuracy of a round by domain, and by client if each has its own model; ``None`` without scores."""
    rows = [row for row in record.test_lines if int(row["round"]) == number and client in (None, row["client"])]
    if not rows:
        return None
    score = RoundScore(number, _accuracy(rows))
    scores = {"accuracy": dict(score.accuracy), "average": score.average, "worst": score.worst}
    scores["rule"] = _rule(record, rows)
    if client is None:
        for each in record.round_scores:
            if each.round == number:
                scores["missing"] = dict(each.missing)
    by_client: dict[str, list[Mapping[str, Any]]] = {}
    if record.personal:
        for row in rows:
            by_client.setdefault(str(row["client"]), []).append(row)
    scores["clients"] = {name: _accuracy(by_client[name]) for name in sorted(by_client)}
    return scores


def _rule(record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what an accuracy is; with ``rounds.test_samples`` it names the scored images of each domain."""
    if record.config["rounds"].get("test_samples") is None:
        return RULE
    counts = {str(row["domain"]): int(row["count"]) for row in rows}
    return PART.format(images=", ".join(f"{quantity(count, 'image')} of {name}" for name, count in counts.items()))


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return domain_accuracy([(row["domain"], int(row["correct"]), int(row["count"])) for row in rows])
