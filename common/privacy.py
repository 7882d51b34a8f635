"""Differential privacy of what a device sends: the Gaussian mechanism on class means and on weight updates.

*Neighbouring* are two training sets of one client with the same number of samples in every class. With ``unit=sample``
they differ in one sample's image (a file, or a row of a table that holds its images; a device refuses ``sample`` if
a file is several samples), with ``unit=group`` in any number of images of one group (``data.group``: a patient, or a
file in several rows), with ``unit=client`` in any number of all. Labels, groups and class counts stay equal. They are
not protected: class counts are sent unchanged, since sampling, averaging and the server's checks need them.

Sensitivities (L2, largest change from one data set to a neighbour):

- a class mean of ``n`` features of norm <= C, each a function of its own image only: ``2 C / n`` (``unit=sample``);
- the class means of such features, where a group has ``m_c`` of the ``n_c`` samples of class c: each moves by at most
  ``2 C m_c / n_c``. With noise in units of ``2 C F / n_c``, where F is the largest ``sqrt(sum_c m_c^2)`` of a group
  (:func:`group_factor`), all of them together move by at most one unit (``unit=group``);
- ``k`` class means of norm <= C of any features: ``2 C sqrt(k)`` (``unit=client``);
- a weight update of norm <= U, computed in any way: ``2 U`` (all units).

Noise has the standard deviation ``noise_multiplier`` x sensitivity in every coordinate (Dwork and Roth, 2014, A). The
releases of several rounds compose; an accountant computes the total (:mod:`server.run.accounting`).
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from common.config import Count, Fraction, Positive, checked
from common.extras import libraries_of
from common.numerics import NORM_FLOOR

Unit = Literal["sample", "group", "client"]
"""In ascending order of what may change."""

NEIGHBOURS: Mapping[Unit, str] = {
    "sample": "replace-one sample: one training image is another one of the same class",
    "group": "replace-one group: any number of one group's training images are others of the same classes",
    "client": "replace-one client: any number of one client's training images are others, class counts stay equal",
}
"""The difference of neighbouring data sets, by unit. Adding or removing a sample or a client is neither of them."""

Randomness = Literal["auto", "keyed", "system"]

SMALLEST, LARGEST = 1e-9, 1e9
"""Range of norms and of noise multipliers above 0. Beyond it the accountant, or noise in float32, would overflow."""


def _none_or_in_range(multiplier: float) -> float:
    if 0 < multiplier < SMALLEST:
        raise ValueError(f"must be 0 for no noise, or from {SMALLEST:g} to {LARGEST:g}; got {multiplier:g}")
    return multiplier


Norm = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
Multiplier = Annotated[float, Field(ge=0, le=LARGEST), AfterValidator(_none_or_in_range)]


@checked
class NoPrivacy:
    """No differential privacy: devices send what they computed."""


@checked
class GaussianPrivacy:
    """Clipping and Gaussian noise on the device.

    Args:
        unit: what epsilon protects, with equal class counts: ``sample`` is one training image, ``group`` all images of
            a group of ``data.group``, ``client`` all images of a client. See the module for the neighbouring data sets.
        clip: C, the largest L2 norm of a sample's feature (of a class mean where ``unit`` is ``client``), in [1e-9,
            1e9].
        noise_multiplier: standard deviation of the prototypes' noise divided by their L2 sensitivity, 0 or in [1e-9,
            1e9]; 0 only clips and protects nothing.
        update_clip: U, the largest L2 norm of a client's update, in [1e-9, 1e9], over all floating-point tensors of the
            shared model together; ``None`` sends weights unchanged: there is then no epsilon, because the next received
            model depends on every image.
        update_noise_multiplier: the same as ``noise_multiplier`` for the weights, 0 or in [1e-9, 1e9].
        delta: probability with which the bound may fail, in (0, 1); well below one over the number of samples.
        randomness: ``system`` draws noise from the operating system, which cannot be predicted or repeated. ``keyed``
            draws it from the run's seed, so that runs repeat bit for bit, and **anyone who knows the seed can subtract
            it**. ``keyed`` is for simulations only; other devices refuse it unless their configuration allows it.
            ``auto`` is ``keyed`` if one machine plays all clients, else ``system``.
        max_releases: updates that a device releases of a client's data, in all runs together, >= 1; ``None`` is no
            limit. A device may have a limit of its own, and the stricter one counts.
        max_epsilon: epsilon at ``delta`` up to which a device releases updates, in all runs together, > 0; ``None`` is
            no limit. An update with a part without noise exceeds every limit.
    """

    unit: Unit = "sample"
    clip: Norm = 1.0
    noise_multiplier: Multiplier = 1.0
    update_clip: Norm | None = None
    update_noise_multiplier: Multiplier = 1.0
    delta: Fraction = 1e-5
    randomness: Randomness = "auto"
    max_releases: Count | None = None
    max_epsilon: Positive | None = None

    def noised(self, *, prototypes: bool, weights: bool) -> dict[str, float]:
        """Return the noise multipliers of the parts of an answer that have noise, by part.

        Args:
            prototypes: whether the method sends prototypes.
            weights: whether the method sends weights.

        Returns:
            Standard deviations over L2 sensitivities, > 0. Parts that are sent but not returned are not protected.
        """
        multipliers: dict[str, float] = {}
        if prototypes and self.noise_multiplier > 0:
            multipliers["prototypes"] = self.noise_multiplier
        if weights and self.update_clip is not None and self.update_noise_multiplier > 0:
            multipliers["weights"] = self.update_noise_multiplier
        return multipliers


def group_factor(groups: Sequence[str], labels: Sequence[int]) -> float:
    """Return how many times a single image's change one group's change is at most, over all class means together.

    Args:
        groups: the group of each sample.
        labels: its class.

    Returns:
        The largest ``sqrt(sum_c m_c^2)`` of a group with ``m_c`` samples of class c; 1 if each sample is a group.
    """
    squares: Counter[str] = Counter()
    for (group, _), count in Counter(zip(groups, labels, strict=True)).items():
        squares[group] += count**2
    return math.sqrt(max(squares.values(), default=1))


def finite_copy(tensor: Tensor) -> Tensor:
    """Return a copy in float64, with 0 in place of values that are not finite.

    Otherwise the norm of a tensor with NaN would be NaN, and could not be used to clip it.
    """
    return torch.nan_to_num(tensor.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)


def clip_rows(rows: Tensor, norm: float) -> Tensor:
    """Return the rows, those longer than ``norm`` scaled down to it.

    Args:
        rows: ``[N, D]``. Values that are not finite become 0; a row whose length overflows float64 becomes 0.
        norm: > 0.
    """
    values = finite_copy(rows)
    lengths = torch.linalg.vector_norm(values, dim=1, keepdim=True).clamp_min(NORM_FLOOR)
    return (values * (norm / lengths).clamp_max(1.0)).to(rows.dtype)


def clip_factor(norm: float, bound: float) -> float:
    """Return the factor that scales an update of length ``norm`` down to ``bound``; 0 if ``norm`` is not finite."""
    if not math.isfinite(norm):
        return 0.0
    if norm <= bound:
        return 1.0
    return bound / norm


def gaussian(shape: tuple[int, ...], draws: torch.Generator | None) -> Tensor:
    """Return standard normal numbers, float64 on the CPU; without a generator from the operating system."""
    if draws is not None:
        return torch.randn(shape, generator=draws, dtype=torch.float64)
    with libraries_of("privacy", "privacy=gaussian"):
        from scipy.special import ndtri  # here, since it is slow to import and few runs need it

    words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0; the largest word rounds to 1
    return torch.from_numpy(ndtri(uniform.clip(max=1 - 2.0**-53))).reshape(shape)
