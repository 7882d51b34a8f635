"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp, Qi Dou. ICLR 2021. arXiv:2102.07623.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from common.config import checked
from strategies.core.method import ClientContext
from strategies.core.readings import Point
from strategies.fedavg import FedAvg


@checked
class FedBN(FedAvg):
    """FedAvg but for batch normalisation, which stays on each device: parameters, running statistics and counters.

    On a network without batch norm it is FedAvg. The original code weights clients equally; FedPall's table, like all
    of its rows, weights by samples, which is the default.

    Payload: the model's state without batch norm, both ways. Client state: batch norm. Scored on each client's own
    model, that is with its own batch norm.

    Args:
        layers: what counts as batch norm. ``type``: layers of that type. ``name``: tensors with "bn" in their names, as
            FedPall's code has it, which misses the batch norm of a torchvision ResNet's shortcuts
            (``downsample.1``), so that these are averaged.
        refresh_statistics: before a score, estimate the running statistics again with the averaged weights, in one
            pass over the client's training data. The papers' codes score with those of the client's own weights before
            averaging, the default, although these do not fit while the weights still move far; see
            docs/results/normalisation.md.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("batch norm is told by", "type", setting="layers", tables={"fedpall": "name"}),
        Point("average of models", released="uniform", setting="weighting"),
        Point("running statistics of a score", released=False, setting="refresh_statistics"),
    )

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = None
    personal: ClassVar[bool] = True

    layers: Literal["type", "name"] = "type"
    refresh_statistics: bool = False

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return all names except those of batch norm."""
        if self.layers == "name":
            return {name for name in model.state_dict() if "bn" not in name}
        return set(model.state_dict()) - norm_state_names(model)

    @property
    def adapts(self) -> bool:
        """Return whether the running statistics are estimated again before each score."""
        return self.refresh_statistics

    def adapt(self, local: ClientContext) -> None:
        """Set the running statistics to the mean over the images of one pass; those of a frozen backbone stay."""
        local.model.train()  # a frozen backbone stays in evaluation mode, so that the pass would not fill it again
        momenta: dict[_BatchNorm, float | None] = {}
        seen: dict[nn.Module, int] = {}

        def weigh(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            """Give each batch the weight of its images; the last may be short."""
            if not layer.training:
                return
            seen[layer] = seen.get(layer, 0) + len(arguments[0])
            layer.momentum = len(arguments[0]) / seen[layer]  # type: ignore[assignment]  # a module's attribute

        handles: list[RemovableHandle] = []
        for layer in local.model.modules():
            if isinstance(layer, _BatchNorm) and layer.training:
                momenta[layer] = layer.momentum
                layer.reset_running_stats()
                handles.append(layer.register_forward_pre_hook(weigh))
        try:
            local.features(augmented=1, training_mode=True)
        finally:
            for handle in handles:
                handle.remove()
            for layer, momentum in momenta.items():
                layer.momentum = momentum


def norm_state_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters, statistics and counters of batch norm, of any dimension and SyncBatchNorm.

    Layers are recognised by their type, never by their name.
    """
    names: set[str] = set()
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            for name in layer.state_dict():
                names.add(f"{path}.{name}".removeprefix("."))  # the path of the model itself is empty
    return names
