"""FedSAM: Generalized Federated Learning via Sharpness Aware Minimization.

Zhe Qu, Xingyu Li, Rui Duan, Yao Liu, Bo Tang, Zhuo Lu. ICML 2022. arXiv:2206.02618. Improving Generalization in
Federated Learning by Seeking Flat Minima. Debora Caldarola, Barbara Caputo, Marco Ciccone. ECCV 2022. arXiv:2203.11834.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from common.config import NonNegative, Search, checked
from strategies.core.method import ClientContext, Losses, Method
from strategies.core.readings import Point
from strategies.parts.edits import displace, restore, running_statistics_kept

NORM_FLOOR = 1e-16
"""Added to the gradient's norm before it divides, as in Caldarola's released code."""


@checked
class FedSAM(Method):
    """FedAvg with sharpness-aware local steps (SAM: Foret et al., ICLR 2021, Eq. 2 and 3); ``rho=0`` is FedAvg.

    Each step takes two gradients: ``g`` at ``w`` and ``g'`` at ``w + rho g / ||g||``, the worst point nearby to first
    order, with one norm over all trainable parameters. ``w`` is put back exactly and steps with ``g'``. Every batch
    costs two forward and two backward passes. Recorded losses are those at ``w``, and only the pass there moves batch
    norm's running statistics, since the model that is sent never is at the other point.

    Payload: the model's state both ways. Client state: none.

    Args:
        rho: radius of the neighbourhood, >= 0, in the units of the parameters. FedGCA's tables do not give it; 0.05 is
            SAM's own, Caldarola's code takes 0.1 on CIFAR-10.
    """

    readings: ClassVar[tuple[Point, ...]] = (Point("radius", released="0.1 on CIFAR-10", ours="0.05, SAM's own"),)

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {"rho": 0.0}

    rho: Annotated[NonNegative, Search(0.005, 0.5)] = 0.05

    def step(self, local: ClientContext, images: Tensor, labels: Tensor) -> Losses:
        """Take one step: gradient, ascent to the neighbour, gradient there, back, descent."""
        losses = self.loss(local.forward(images, labels), local)
        local.backward(losses.total)
        if self.rho:
            origin = ascend(local.model, self.rho)
            with running_statistics_kept(local.model):
                local.backward(self.loss(local.forward(images, labels), local).total)
            restore(origin)
        self.edit_gradients(local)
        local.optimizer.step()
        return losses


@torch.no_grad()
def ascend(model: nn.Module, rho: float) -> list[tuple[nn.Parameter, Tensor]]:
    """Move ``w`` to ``w + rho g / ||g||``; return the moved parameters with copies of their old values."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return []
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return displace(model, rho / (norm + NORM_FLOOR))
