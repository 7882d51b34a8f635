"""FedRep (Collins et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from common.config import check
from common.models.partition import body_names
from strategies.core.method import Method, Phase


@dataclass(frozen=True)
class FedRep(Method):
    """A shared body and a head of its own for each client, trained one after the other (Algorithm 1).

    Each round a client first fits its head to the body it received, then trains the body for that head; the server
    averages the bodies by samples.

    Payload: the body's state, both ways. Client state: the head, with its batch norm. Scored on each client's own
    model, that is the body it received under its own head.

    Args:
        head_epochs: epochs of the head, >= 1; ``None`` takes the run's local epochs, as FedPall does (official: 10).
        body_epochs: epochs of the body, >= 1 (official and FedPall: 1).
        freeze_statistics: whether batch norm of the part that does not train keeps its running statistics. In the
            released code the body's go on moving while the head trains, which is the default.
    """

    personal: ClassVar[bool] = True

    head_epochs: int | None = None
    body_epochs: int = 1
    freeze_statistics: bool = False

    def __post_init__(self) -> None:
        check(self.head_epochs is None or self.head_epochs >= 1, f"head_epochs must be >= 1; got {self.head_epochs}")
        check(self.body_epochs >= 1, f"body_epochs must be >= 1; got {self.body_epochs}")

    def shared_names(self, model: nn.Module) -> set[str]:
        """The body."""
        return body_names(model)

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """The head, then the body."""
        return (
            Phase(self.head_epochs or epochs, _in_head, freeze_statistics=self.freeze_statistics),
            Phase(self.body_epochs, _in_body, freeze_statistics=self.freeze_statistics),
        )


def _in_head(name: str) -> bool:
    return name.startswith("head.")


def _in_body(name: str) -> bool:
    return name.startswith("backbone.")
