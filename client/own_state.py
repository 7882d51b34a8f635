"""A client's own state in one exchange: the version that it starts from, and the one that it keeps."""

from collections.abc import Mapping

from torch import Tensor

from common.settings import RunSettings
from common.storage import ClientStore, Version
from common.wire.messages import Request, header_of


def kept_versions(settings: RunSettings) -> int:
    """Return how many versions of a client's own state a device keeps.

    A run goes on from any of its last ``rounds.checkpoints`` checkpoints, and each may name another version. The reply
    after them may count or not, so its version is one more. In each round every exchange makes a version.
    """
    return (settings.rounds.checkpoints + 1) * len(settings.method.exchanges)


class OwnState:
    """The own state of a client in one exchange.

    Args:
        store: the client's versions in this run.
        request: the server's request, which names the version to start from.
        exchanges: the method's exchanges.

    Attributes:
        tensors: what the client starts from, by name; empty if no reply of it has counted.
        lost: whether it starts without a state although one has counted; see :meth:`common.storage.ClientStore.load`.

    Raises:
        PayloadError: the request is older than one that was answered, or names an exchange that is not the method's.
        DataError: the version is missing or damaged.
    """

    def __init__(self, store: ClientStore, request: Request, exchanges: tuple[str, ...]) -> None:
        self._store = store
        self._version = Version.of(header_of(request), exchanges)
        self._past: Version | None = None
        if request.own is not None:
            self._past = Version.of(request.own, exchanges)
        self._best_before = (request.keep + 1) * len(exchanges)
        if request.train:
            store.check_latest(self._version)
        self.tensors, self.lost = store.load(self._past)

    def keep(self, tensors: Mapping[str, Tensor]) -> bool:
        """Write the state after this exchange; return whether there is one.

        The version before stays, from which the next exchange starts if the server does not count this one.

        Raises:
            PayloadError, DataError: see :meth:`common.storage.ClientStore.save`.
        """
        if not tensors:
            return False
        self._store.save(self._version, tensors, self._past, self._best_before)
        return True
