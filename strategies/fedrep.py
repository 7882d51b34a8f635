"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Liam Collins, Hamed Hassani, Aryan Mokhtari, Sanjay Shakkottai. ICML 2021. arXiv:2102.07078.
"""

from typing import ClassVar

from torch import nn

from common.config import Count, checked
from strategies.core.method import Method, Phase


@checked
class FedRep(Method):
    """A shared body and a head of its own for each client, trained one after the other (Algorithm 1).

    Each round a client first fits its head to the body it received, then trains the body for that head; the server
    averages the bodies by samples.

    Payload: the body's state, both ways. Client state: the head, with its batch norm. Scored on each client's own
    model, that is the body it received under its own head.

    Args:
        head_epochs: epochs of the head, >= 1; ``None`` takes the run's local epochs, as FedPall does (official: 10).
    """

    capturable: ClassVar[bool] = True

    personal: ClassVar[bool] = True

    head_epochs: Count | None = None

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return the names of the body."""
        return set(filter(_in_body, model.state_dict()))

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return two phases: the head trains, then the body, for one epoch as officially and in FedPall.

        Batch norm of the body updates its running statistics in both, as in the released code.
        """
        return Phase(self.head_epochs or epochs, _in_head), Phase(1, _in_body)


def _in_head(name: str) -> bool:
    return name.startswith("head.")


def _in_body(name: str) -> bool:
    return name.startswith("backbone.")
