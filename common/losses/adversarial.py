"""FedADG's least-squares adversarial pieces (Zhang et al., 2021), on the scores of a sigmoid discriminator."""

from __future__ import annotations

from torch import Tensor

from common.precision import working_dtype


def least_squares_discriminator(reference_scores: Tensor, feature_scores: Tensor) -> Tensor:
    """What the discriminator minimises: ``-(mean D(reference)^2 + mean (1 - D(feature))^2)``.

    ``reference_scores`` are those of samples from the distribution generator, ``feature_scores`` those of the
    (detached)
    features; any shape. Bounded below by -2 for scores in [0, 1].
    """
    reference = reference_scores.to(working_dtype(reference_scores))
    feature = feature_scores.to(working_dtype(feature_scores))
    return -(reference.square().mean() + (1.0 - feature).square().mean())


def least_squares_generator(scores: Tensor) -> Tensor:
    """``mean (1 - D)^2``: what the feature extractor (on its features) and the generator (on its samples) minimise."""
    return (1.0 - scores.to(working_dtype(scores))).square().mean()
