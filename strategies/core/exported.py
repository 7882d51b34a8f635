"""No training: clients score an exported model on their own test data, and the model does not change.

``goldfinch evaluate MODEL engine=...`` runs it. The server reads the model from a folder and sends it with the request
to score. Devices rebuild the network from the settings and need no file of the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from common.config import Count, Natural, checked
from common.errors import CheckpointError
from common.exports.model import check_shapes, read_export, without_training_parts
from common.models.pretrained import WEIGHTS
from common.regular_files import file_sha256
from common.storage import GlobalState
from strategies.core.method import ClientContext, Download, Method, ServerContext

MIN_SCORE = -1e6
"""A class without a prototype has the score minus infinity, with which the loss would not be finite."""


@checked
class ExportedModel(Method):
    """Scores an exported model. Every client scores it on the test split of its own domain.

    Args:
        trained: the method that trained the model, with its hyper-parameters; it says how the model classifies.
        folder: the exported model's folder, which the server process reads.
        sha256: SHA-256 of its ``model.safetensors``. Another file is refused.
        clients: the number of clients of the training.
        seed: the seed of the training.
    """

    trained: Method
    folder: str
    sha256: str
    clients: Count
    seed: Natural

    @property
    def trains(self) -> bool:
        """Return False: there are no rounds."""
        return False

    @property
    def personal(self) -> bool:
        """Return True: each client scores on its own domain."""
        return True

    @property
    def scores_own_training(self) -> bool:
        """Return False: the model's scores tell nothing of a client's training images."""
        return False

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the exported network, without the parts that only training needs."""
        return without_training_parts(self.trained.extend(model, self.clients, self.seed))

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the exported model and its prototypes.

        Raises:
            ConfigError: the folder holds no exported model.
            CheckpointError: the model is another one than the settings name, or of another network.
        """
        folder = Path(self.folder)
        _, exported, prototypes = read_export(folder)
        if file_sha256(folder / WEIGHTS) != self.sha256:
            raise CheckpointError(f"{folder} holds another model than the one that is to be evaluated")
        check_shapes(server.new_model(), exported)
        ordered = {name: exported[name] for name in weights}
        return GlobalState(ordered, prototypes, round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """Return the model, with prototypes if it has any."""
        return Download(state.weights, state.prototypes if len(state.prototypes) else None, {})

    def compute(
        self, model: nn.Module, images: Tensor, local: ClientContext
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return features, and the scores of the classes as the exported files give them."""

        def make() -> nn.Module:
            return self.trained.inference(model, local.prototypes, self.seed).to(local.device).eval()

        inference: Any = local.cached("inference", make)
        features, scores = inference(images)
        return features, scores.clamp_min(MIN_SCORE), {}
