"""Vectors in the plane, for figures of prototypes: a projection by PCA and one by t-SNE."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.prototypes import normalise_rows

REDUCED = 30
"""Dimensions that PCA leaves for t-SNE (van der Maaten and Hinton, JMLR 2008, section 4)."""

LARGEST_PERPLEXITY = 30.0

Matrix = NDArray[np.float64]


def unit_rows(vectors: Tensor) -> Matrix:
    """Return ``vectors [N, D]`` at unit length in float64, since the losses compare directions; zero rows stay zero."""
    return normalise_rows(vectors.double()).numpy()


def embed_by_pca(rows: Matrix) -> tuple[Matrix, float]:
    """Place ``rows [N, D]``, N >= 2, on their first two principal components.

    Returns:
        ``[N, 2]``, and the share of the variance in [0, 1] that these components explain. If D is 1, the second column
        is 0.
    """
    from sklearn.decomposition import PCA  # here, since it is slow to import and only prototypes need it

    model = PCA(min(2, *rows.shape), random_state=0).fit(rows)
    explained = float(np.nan_to_num(model.explained_variance_ratio_).sum())
    places = model.transform(rows)
    return np.pad(places, ((0, 0), (0, 2 - places.shape[1]))), explained


def embed_by_tsne(rows: Matrix) -> Matrix:
    """Place ``rows [N, D]``, N >= 4, finite and not all equal, by t-SNE, after PCA to at most 30 dimensions.

    The perplexity is 30, or a third of the points where they are few. The same rows give the same places.

    Returns:
        ``[N, 2]``.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    reduced = PCA(min(REDUCED, *rows.shape), random_state=0).fit_transform(rows)
    perplexity = min(LARGEST_PERPLEXITY, (len(rows) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=0, n_jobs=1).fit_transform(reduced)
