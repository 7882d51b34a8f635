"""A server of the shipped code that attacks one deployed device: any settings, any request, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from client.node import answer_question
from client.resident.messages import Question, TrainerReply
from common.settings import RunSettings, load_settings
from common.wire.messages import Request, request_text
from common.wire.payload import TENSOR_TYPE, Payload, decode, encode
from strategies.core.method import build_model

CLASSES = ("negative", "positive")
NOISED = ("privacy=gaussian", "privacy.update_clip=1e-3", "privacy.update_noise_multiplier=66")
EPSILON = 0.07
"""A device's own budget, which one update with this noise spends."""


def write_noise(path: Path, draws: np.random.Generator) -> None:
    """Write one image of noise."""
    Image.fromarray(draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def write_folder(folder: Path, count: int = 10, seed: int = 0) -> Path:
    """Write two class folders with ``count`` images each."""
    draws = np.random.default_rng(seed)
    for label in CLASSES:
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            write_noise(folder / label / name_of(number, label), draws)
    return folder


def name_of(number: int, label: str = "negative") -> str:
    return f"patient_{number:04d}_{label}.png"


def replace_image(path: Path, source: Path | None = None) -> None:
    """Give an image another content under its own name: that of ``source``, or noise."""
    if source is None:
        write_noise(path, np.random.default_rng(99))
    else:
        path.write_bytes(source.read_bytes())


class Attacker:
    """A server that asks one device.

    Args:
        folder: the device's data.
        state: the device's state folder.
        configuration: further keys of the node's configuration.
    """

    def __init__(self, folder: Path, state: Path, **configuration: Any) -> None:
        place = {"data-dir": str(folder), "state-dir": str(state), "resident": False}
        self.configuration = {**place, **{key.replace("_", "-"): value for key, value in configuration.items()}}
        self.runs = 0

    def register(self, *overrides: str) -> TrainerReply:
        """The device's reply to a request to register."""
        return answer_question(self._question("register", chosen(*overrides)))

    def ask(
        self,
        *overrides: str,
        train: bool = False,
        score: Sequence[str] = (),
        validate: bool = False,
        client: str = "clinic-0",
        message: Payload | None = None,
    ) -> TrainerReply:
        """The device's reply to a request to train, or to score, the initial model of a run with these settings.

        With a message it is asked for that in place of the initial model.
        """
        words = chosen(*overrides)
        settings = load_settings(words)
        clients = len(settings.protocol.clients(settings.data))
        request = Request(
            run=f"run-{self.runs}",
            identity=settings.identity,
            method=settings.method.name,
            round=1,
            exchange="train",
            client=client,
            client_count=clients,
            client_index=0,
            train=train,
            score=list(score),
            validate=validate,
            code=settings.code,
        )
        blob = encode(message or Payload(initial_weights(settings, clients)))
        content = {"request": request_text(request), "tensor_type": TENSOR_TYPE, "tensors": [blob]}
        return answer_question(self._question("answer", words, **content))

    def _question(self, kind: str, words: Sequence[str], **content: Any) -> Question:
        self.runs += 1
        return Question(kind, self.runs, {"overrides": " ".join(words)}, self.configuration, **content)


def chosen(*overrides: str) -> list[str]:
    """The overrides of a run of FedAvg on folders of images."""
    fixed = ["method=fedavg", "data=folder", "data.classes=[negative,positive]", "data.image_size=16"]
    fixed += ["data.domains=[clinic]", "model=small", "train.device=cpu", "train.epochs=1", "train.rounds=1"]
    return [*fixed, "engine=inline", "output=outputs/attack", *overrides]


def initial_weights(settings: RunSettings, clients: int) -> dict[str, Any]:
    """The shared weights of a run's model as they are before the first round."""
    model = build_model(settings, clients)
    shared = settings.method.shared_names(model)
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name in shared}


def scores_of(reply: TrainerReply) -> list[dict[str, Any]]:
    """The scores in an answer, which must be one."""
    assert reply.ok, reply.text
    return list(decode(reply.tensors[0]).header["scores"])
