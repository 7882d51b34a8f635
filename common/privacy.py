"""Differential privacy of what a device sends: the Gaussian mechanism on class means and on weight updates.

*Neighbouring* are two training sets of one client with the same number of samples in every class. With ``unit=sample``
they differ in one sample's image, with ``unit=client`` in any number of them. Class counts are therefore public: they
are sent as they are, since sampling, averaging and the server's checks need them. Labels are not protected.

Sensitivities (L2, largest change from one data set to a neighbour):

- a class mean of ``n`` features of norm <= C, each a function of its own image only: ``2 C / n`` (``unit=sample``);
- ``k`` class means of norm <= C, whatever they were computed from: ``2 C sqrt(k)`` (``unit=client``);
- a weight update of norm <= U, whatever it was computed from: ``2 U`` (both units).

Noise has the standard deviation ``noise_multiplier`` x sensitivity in every coordinate (Dwork and Roth, 2014, A). What
an observer is told in several rounds composes; an accountant counts (:mod:`server.run.accounting`).
"""

import math
import os
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from common.config import Count, Fraction, NonNegative, Positive, checked
from common.errors import libraries_of
from common.precision import NORM_FLOOR

Unit = Literal["sample", "client"]

NEIGHBOURS: Mapping[Unit, str] = {
    "sample": "replace-one sample: one training image is another one of the same class",
    "client": "replace-one client: any number of one client's training images are others, class counts stay equal",
}
"""What neighbouring data sets differ in, by unit. Adding or removing a sample, or a client, is neither of them."""

Randomness = Literal["auto", "keyed", "system"]


@checked
class NoPrivacy:
    """What devices send is what they computed."""


@checked
class GaussianPrivacy:
    """Clipping and Gaussian noise on the device.

    Args:
        unit: what neighbouring data sets differ in; see the module.
        clip: C, > 0.
        noise_multiplier: of the prototypes, >= 0; 0 only clips and protects nothing.
        update_clip: U, > 0, over all floating-point tensors of the shared model together; ``None`` sends weights as
            they are: there is then no epsilon, since already the next received model depends on every image.
        update_noise_multiplier: of the weights, >= 0.
        delta: probability with which the bound may fail, in (0, 1); well below one over the number of samples.
        randomness: ``system`` draws noise from the operating system, which nobody can predict or repeat. ``keyed``
            draws it from the run's seed, so that runs repeat bit for bit, and **whoever knows the seed can subtract
            it**: for simulations only; a device of its own refuses unless its own configuration allows it. ``auto`` is
            ``keyed`` where one machine plays all clients, else ``system``.
        max_releases: updates that a device releases of a client's data, in all runs together, >= 1; ``None`` is no
            limit. A device may have a limit of its own, and the stricter one counts.
        max_epsilon: epsilon at ``delta`` up to which a device releases updates, in all runs together, > 0; ``None`` is
            no limit. An update of which a part carries no noise exceeds every limit.
    """

    unit: Unit = "sample"
    clip: Positive = 1.0
    noise_multiplier: NonNegative = 1.0
    update_clip: Positive | None = None
    update_noise_multiplier: NonNegative = 1.0
    delta: Fraction = 1e-5
    randomness: Randomness = "auto"
    max_releases: Count | None = None
    max_epsilon: Positive | None = None

    def noised(self, *, prototypes: bool, weights: bool) -> dict[str, float]:
        """Return the noise multipliers of the parts of an answer that carry noise, by part.

        Args:
            prototypes: whether the method sends prototypes.
            weights: whether the method sends weights.

        Returns:
            Standard deviations over L2 sensitivities, > 0. A part that is sent and is not here is not protected.
        """
        found: dict[str, float] = {}
        if prototypes and self.noise_multiplier > 0:
            found["prototypes"] = self.noise_multiplier
        if weights and self.update_clip is not None and self.update_noise_multiplier > 0:
            found["weights"] = self.update_noise_multiplier
        return found


def finite(tensor: Tensor) -> Tensor:
    """Return a copy in float64, in which 0 stands for every value that is not a finite number.

    The norm of a tensor with NaN is NaN, and no factor computed from it shortens anything.
    """
    return torch.nan_to_num(tensor.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)


def clip_rows(rows: Tensor, norm: float) -> Tensor:
    """Return rows that are no longer than ``norm``.

    Args:
        rows: ``[N, D]``. Values that are not finite become 0; a row whose length overflows float64 becomes 0.
        norm: > 0.
    """
    values = finite(rows)
    lengths = torch.linalg.vector_norm(values, dim=1, keepdim=True).clamp_min(NORM_FLOOR)
    return (values * (norm / lengths).clamp_max(1.0)).to(rows.dtype)


def clip_factor(norm: float, bound: float) -> float:
    """Return what shortens an update to ``bound``: 1 if it is no longer, 0 if its length ``norm`` is not finite."""
    if not math.isfinite(norm):
        return 0.0
    return bound / norm if norm > bound else 1.0


def gaussian(shape: tuple[int, ...], draws: torch.Generator | None) -> Tensor:
    """Standard normal numbers, float64 on the CPU; from the operating system's randomness without a generator."""
    if draws is not None:
        return torch.randn(shape, generator=draws, dtype=torch.float64)
    with libraries_of("privacy", "privacy=gaussian"):
        from scipy.special import ndtri  # here, since it is slow to import and few runs need it

    words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), never 0 or 1
    return torch.from_numpy(ndtri(uniform)).reshape(shape)
