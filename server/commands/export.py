"""``goldfinch export``: a trained model in a folder of its own, from a run's folder or from a device's state."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import build
from common.data.batches import Split
from common.errors import ConfigError, DataError, nearest
from common.exports.description import NO_LICENCE, Description
from common.exports.formats import BATCH, Content, chosen_formats, write_export
from common.exports.model import TrainedModel, kept_part, read_export
from common.metrics import RoundScore, domain_accuracy
from common.seeding import generator
from server.commands.evaluate import domains_of
from server.results.run import Run
from strategies.core.method import Method

SAMPLES = 256
"""Test images of a domain on which files are compared with the run's own net."""

RULE = "accuracy in % on each domain's test split"
CHOSEN = {"best": "best round by validation", "last": "last round"}
PLACES = ("root", "pretrained", "pretrained_file")
"""Settings that name places of this machine, which stay on this machine."""


def export(
    source: Path,
    to: Path,
    formats: Sequence[str] = (),
    *,
    chosen: str | None = None,
    client: str | None = None,
    shared: Path | None = None,
    licence: str = NO_LICENCE,
    data: Sequence[str] = (),
    overwrite: bool = False,
) -> Description:
    """Write the model of a run, or of a device, into the folder ``to``, print what was written, and return what it is.

    Arguments are those of ``goldfinch export``; ``data`` are settings of a data set.
    """
    wanted = chosen_formats(formats)
    if shared is None:
        content = _of_run(Run(source, chosen or ("best" if Run(source).has_best else "last")), client, data)
    else:
        content = _of_device(source, shared, client, data)
    description = replace(content.description, licence=licence)
    if not description.complete and len(wanted) > 1:
        raise ConfigError(f"clients of {description.method} keep a part of the net: other formats are made on devices")
    description, differences = write_export(to, replace(content, description=description), wanted, overwrite=overwrite)
    whose = f"the own model of {description.client}" if description.client else "the model of all clients"
    whose = whose if description.complete else "what clients share"
    print(f"{to}: {whose}, {description.method}, {description.chosen}")
    for name, entry in description.files.items():
        said = f"largest difference {differences[name]:.1e}" if differences else "a part of the net"
        print(f"  {name:12} {entry['name']:18} {entry['bytes'] / 1e6:8.2f} MB   {said}")
    if description.complete:
        print(f"compared with the net on {content.images_are or 'noise, as the data are not here'}")
        print(f"next: goldfinch predict {to} IMAGE...")
    else:
        print(f"next, on each device: goldfinch export STATE --shared {to.name} --to DIR (docs/deploy.md)")
    return description


def _of_run(run: Run, client: str | None, data: Sequence[str]) -> Content:
    settings, method, state = run.settings, run.method, run.checkpoint.state
    model, weights = run.shared_model()
    whole, ids = len(weights) == len(model.state_dict()), [spec.id for spec in run.clients]
    if client is not None and (whole or client not in ids):
        why = f"all clients of {method.name} have one model; leave it out" if whole else nearest(client, ids)
        raise ConfigError(f"--client {client}: {why}")
    if client is None and not whole and (run.folder / "clients" / run.checkpoint.run).is_dir():
        raise ConfigError(f"clients of {method.name} have models of their own: choose by --client; {nearest('', ids)}")
    description = Description(
        architecture={
            **{part: _without_places(run.config[part]) for part in ("model", "method")},
            "clients": len(ids),
            "seed": run.seed,
        },
        classes=tuple(run.class_names),
        image_size=settings.data.image_size,
        mean=settings.data.augmentation.mean,
        std=settings.data.augmentation.std,
        method=method.name,
        data={
            "name": settings.data.name,
            "domains": list(dict.fromkeys(spec.domain for spec in run.clients)),
            "protocol": run.names[1],
        },
        run=run.checkpoint.run,
        round=state.round,
        chosen=f"{CHOSEN.get(run.chosen, 'chosen round')}, {state.round}",
        client=client,
        score=_score(run, state.round, client),
        prototypes={"rows": len(state.prototypes), "distance": "cosine"} if len(state.prototypes) else None,
        privacy=run.privacy,
        notes=_notes(method, len(state.prototypes)),
        complete=whole or client is not None,
    )
    domains = [spec.domain for spec in run.clients if spec.id == client] or run.test_domains
    images, images_are = _images(description, data, run, domains)
    if not description.complete:
        return Content(description, weights, state.prototypes, images)
    inference, prepare = run.inference(client), settings.data.augmentation.test
    with torch.no_grad():
        expected = torch.cat([inference(prepare(part))[1].softmax(1) for part in images.split(BATCH)])
    return Content(description, run.model(client).state_dict(), state.prototypes, images, images_are, expected)


def trained_model(folder: Path, *, client: str | None = None, chosen: str = "last") -> TrainedModel:
    """Return the model of the run in ``folder``, on the CPU, in evaluation mode.

    Args:
        folder: the run's folder.
        client: the client whose model it is, for methods with a model for each client.
        chosen: ``last``, ``best`` by validation, or the number of a round.

    Raises:
        ConfigError: the run has no such model.
        CheckpointError: the checkpoint is damaged.
    """
    content = _of_run(Run(folder, chosen), client, ())
    if not content.description.complete:
        raise ConfigError(
            f"{folder}: devices keep a part of the net of {content.description.method}; export the model on a device"
        )
    return TrainedModel(content.description, content.weights, content.prototypes)


def _of_device(state: Path, shared: Path, client: str | None, data: Sequence[str]) -> Content:
    description, weights, prototypes = read_export(shared)
    if description.complete:
        raise ConfigError(f"--shared {shared}: it holds the whole net, of which devices keep nothing")
    folder = state / description.run
    clients = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not clients:
        raise ConfigError(f"{state} holds no state of the run {description.run}: give this node's state-dir")
    chosen = client or clients[0]
    if chosen not in clients or (client is None and len(clients) > 1):
        raise ConfigError(f"--client {client or 'is needed'}: {nearest(client or '', clients)}")
    exchanges = build(description.architecture["method"], "method").exchanges
    kept = kept_part(folder / chosen, (description.round + 1) * len(exchanges))
    weights |= {name: kept[name] for name in kept if name.startswith(("backbone.", "head."))}
    own = (description.score or {}).get("clients", {}).get(chosen)
    score = {"rule": RULE, "accuracy": own} if own else None
    description = replace(description, client=chosen, complete=True, score=score, files={})
    return Content(description, weights, prototypes, *_images(description, data))


def _images(
    description: Description, data: Sequence[str], run: Run | None = None, domains: Sequence[str] = ()
) -> tuple[Tensor, str]:
    """Images to compare files on, ``[N, 3, S, S]`` uint8, and what they are in words, empty for noise.

    They are of the data that were chosen, or else of the run's test splits; a SuperLink has neither, nor has a device.
    """
    splits: dict[str, Split] = {}
    if data:
        splits = {name: domain.test for name, domain in domains_of(data, description)[1].items()}
    elif run is not None:
        with contextlib.suppress(DataError, OSError):
            splits = {name: run.sample(name, SAMPLES) for name in domains}
    if not splits:
        shape = (64, 3, description.image_size, description.image_size)
        return torch.randint(256, shape, generator=generator(0, "noise"), dtype=torch.uint8), ""
    images = torch.cat([split.images[:SAMPLES] for split in splits.values()])
    return images, f"{len(images)} test images of {', '.join(splits)}"


def _notes(method: Method, prototypes: int) -> tuple[str, ...]:
    """What a reader of the score, or of the files, should know besides."""
    adapted = method.adapts and type(method).scored_weights is Method.scored_weights
    earlier = method.scores_new_state and not method.personal
    notes = {
        "The score is of models that were adapted to each client's training images; this one was not.": adapted,
        "The score was taken within the round, before its last exchange changed the model.": earlier,
        "The prototypes in the files are means of clients' features, class by class.": prototypes,
    }
    return tuple(note for note, holds in notes.items() if holds)


def _score(run: Run, number: int, client: str | None) -> Mapping[str, Any] | None:
    """The accuracy of a round by domain, and by client where each has its own model; ``None`` if it was not scored."""
    rows = [row for row in run.scores if int(row["round"]) == number and client in (None, row["client"])]
    if not rows:
        return None

    def accuracy(chosen: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return domain_accuracy([(row["domain"], int(row["correct"]), int(row["count"])) for row in chosen])

    score = RoundScore(number, accuracy(rows))
    found = {"rule": RULE, "accuracy": dict(score.accuracy), "average": score.average, "worst": score.worst}
    if client is None:
        for each in run.round_scores:
            if each.round == number:
                found["missing"] = dict(each.missing)
    names = sorted({str(row["client"]) for row in rows}) if run.personal else ()
    return found | {"clients": {name: accuracy([row for row in rows if row["client"] == name]) for name in names}}


def _without_places(node: Any) -> Any:
    """A node of the configuration without names of folders and files."""
    if not isinstance(node, Mapping):
        return node
    return {key: None if key in PLACES else _without_places(value) for key, value in node.items()}
