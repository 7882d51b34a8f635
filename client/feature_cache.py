"""Features of a device's images under a backbone that does not train, computed once."""

from collections.abc import Callable

from torch import Tensor

from common.data.batches import Split


class FeatureCache:
    """Holds the features of whole splits for as long as the device lives; they depend on the frozen backbone alone.

    A split of N images takes ``4 N D`` bytes.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Split, Tensor]] = {}

    def features(self, split: Split, compute: Callable[[Split], Tensor]) -> Tensor:
        """Return ``[N, D]``, the features of ``split``; ``compute`` makes them the first time they are asked for."""
        if id(split) not in self._found:
            self._found[id(split)] = (split, compute(split))  # the split too, so that its id stays its own
        return self._found[id(split)][1]
