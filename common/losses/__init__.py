"""The losses, by their names in the field: pure functions of ``[B, ..]`` tensors, scalar out, float32 or wider inside.

Prototype losses are one function (:mod:`common.losses.prototype`); all others are batched PyTorch. Each function
names its paper and equation. Means are over the whole batch unless stated otherwise.
"""

from common.losses.classification import balanced_weights, cross_entropy, uniform_divergence
from common.losses.prototype import PrototypeLosses, prototype_contrast, prototype_losses, prototype_mse
from common.losses.prototype_terms import PrototypeTerms
