"""Whether a last batch of one sample is trained on, or joins the batch before it.

Released code trains on such a batch. Batch normalisation cannot train on one value of each channel, such as a feature
vector or a map of one position; torch raises an error. Only then the sample joins the batch before it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.settings import RunSettings


def keeps_single(settings: RunSettings, model: nn.Module) -> bool:
    """Return whether the run's method and network can train on a batch of one sample.

    Args:
        settings: the run's settings.
        model: the run's model, extended. The model and its mode stay as they are.
    """
    if not settings.method.takes_single:
        return False
    size = settings.data.image_size
    device = next(model.parameters()).device
    return _normalises_one(model, torch.zeros(1, 3, size, size, device=device))


@torch.no_grad()
def _normalises_one(model: nn.Module, image: Tensor) -> bool:
    """Return whether every batch normalisation that trains has two values of each channel of ``image [1, 3, H, W]``."""
    modes = {module: module.training for module in model.modules()}
    training = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    if not training:
        return True

    def check(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:  # noqa: ARG001
        values = arguments[0]
        if values.numel() // values.shape[1] < 2:
            raise ValueError  # as torch does when it trains

    handles = [layer.register_forward_pre_hook(check) for layer in training]
    model.eval()
    try:
        model(image)
    except ValueError:
        return False
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return True


def joined_clients(
    settings: RunSettings, new_model: Callable[[str], nn.Module], samples: Mapping[str, int]
) -> list[str]:
    """Return the clients whose last batch of one sample joins the batch before it, sorted.

    Args:
        settings: the run's settings.
        new_model: builds the model of the clients of a domain, extended; called only if there is such a batch.
        samples: training samples by client id.
    """
    train = settings.train
    clients: list[str] = []
    for client, count in sorted(samples.items()):
        whole, left = divmod(count, train.batch_size)
        reached = settings.local_steps is None or settings.local_steps >= whole
        if train.last_batch == "keep" and whole and left == 1 and reached:
            clients.append(client)
    if not settings.method.trains:
        return []
    keeps: dict[str, bool] = {}
    for domain in {client.rpartition("-")[0] for client in clients}:
        keeps[domain] = keeps_single(settings, new_model(domain))
    return [client for client in clients if not keeps[client.rpartition("-")[0]]]
