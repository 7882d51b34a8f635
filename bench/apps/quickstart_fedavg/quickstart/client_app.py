"""Train one batch, evaluate one batch: two messages per round, each in a process of its own."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from quickstart.net import TEST_IMAGES, TRAIN_IMAGES, build, images

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's signature
    """One step of SGD."""
    model = build()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    pictures, labels = images(TRAIN_IMAGES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = cross_entropy(model(pictures), labels)
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": TRAIN_IMAGES})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's signature
    """Accuracy on one batch."""
    model = build()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    pictures, labels = images(TEST_IMAGES)
    with torch.inference_mode():
        correct = int((model.eval()(pictures).argmax(1) == labels).sum())
    metrics = MetricRecord({"eval_acc": correct / TEST_IMAGES, "num-examples": TEST_IMAGES})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
