"""The losses as their formulas read: nested loops over Python lists of float64 scalars, one sample at a time.

Nothing here shares code with the library. Scalars are 0-d float64 tensors, so autograd gives the oracle's gradient.
"""

from __future__ import annotations

import math

import torch

Scalar = torch.Tensor


def total(scalars):
    result = torch.zeros((), dtype=torch.float64)
    for scalar in scalars:
        result = result + scalar
    return result


def dot(left, right):
    return total(left[d] * right[d] for d in range(len(left)))


def length(vector):
    squares = float(sum(float(x.detach()) ** 2 for x in vector))
    # The square root has no derivative at 0; a zero vector has length 0 and no gradient, by convention.
    return dot(vector, vector).sqrt() if squares > 0 else torch.zeros((), dtype=torch.float64)


def cosine(left, right):
    """0, without gradient, where either vector is (nearly) zero."""
    a, b = length(left), length(right)
    if float(a.detach()) < 1e-12 or float(b.detach()) < 1e-12:
        return torch.zeros((), dtype=torch.float64)
    return dot(left, right) / (a * b)


def log_sum_exp(scalars):
    largest = max(float(x.detach()) for x in scalars)
    return total((x - largest).exp() for x in scalars).log() + largest


def log_softmax(row):
    normaliser = log_sum_exp(list(row))
    return [x - normaliser for x in row]


def power(c, alpha):
    if alpha == 1:
        return c
    return c**alpha if float(c.detach()) > 1e-4 else torch.tensor(1e-4**alpha, dtype=torch.float64)


def contrast(z, label, rows, row_labels, weights, terms, bias=None):
    """One sample's ``-log(sum over its class / sum over the denominator)``; 0 where either sum is empty."""
    positives, denominators = [], []
    for j in range(len(rows)):
        c = cosine(z, rows[j])
        weight = float(weights[j]) if terms.weighted else 1.0
        if weight == 0:
            continue
        shift = math.log(weight)
        own = int(row_labels[j]) == int(label)
        if own and bias is not None:
            shift = shift + float(bias)
        scale = float(length(rows[j])) if terms.denominator_rows == "raw" else 1.0
        if own:
            positives.append(power(c, terms.alpha) / terms.temperature + shift)
        if terms.denominator == "all" or not own:
            denominators.append(scale * power(c, terms.alpha) / terms.temperature + shift)
    if not positives or not denominators:
        return torch.zeros((), dtype=torch.float64)
    return log_sum_exp(denominators) - log_sum_exp(positives)


def alignment(z, label, rows, row_labels, weights, terms):
    scores = []
    for j in range(len(rows)):
        if int(row_labels[j]) == int(label):
            weight = float(weights[j]) if terms.weighted else 1.0
            scores.append((power(cosine(z, rows[j]), terms.alpha) * weight, j))
    if not scores:
        return torch.zeros((), dtype=torch.float64)
    count = max(1, math.ceil(terms.fraction * len(scores) - 1e-9))
    scores.sort(key=lambda pair: (-float(pair[0].detach()), pair[1]))
    return -total(score for score, _ in scores[:count])


def row_of(label, rows, row_labels):
    for j in range(len(rows)):
        if int(row_labels[j]) == int(label):
            return rows[j]
    return None


def squared_distance(z, label, rows, row_labels, reduce):
    row = row_of(label, rows, row_labels)
    if row is None:
        return torch.zeros((), dtype=torch.float64)
    squares = total((z[d] - row[d]) ** 2 for d in range(len(z)))
    return squares / len(z) if reduce == "mean" else squares


def cosine_square(z, label, rows, row_labels, alpha):
    row = row_of(label, rows, row_labels)
    if row is None:
        return torch.zeros((), dtype=torch.float64)
    return 2 * (power(cosine(z, row), alpha) - 1) ** 2


def prototype_terms(features, labels, prototypes, terms, class_rows=None, bias=None):
    """``(contrast, alignment, mse, cosine_square)``: batch means times their coefficients, 0 if not asked for."""
    rows = prototypes.vectors.double()
    targets = (prototypes if class_rows is None else class_rows).vectors.double()
    target_labels = (prototypes if class_rows is None else class_rows).labels
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    for i in range(len(features)):
        z, label = features[i], labels[i]
        own_bias = None if bias is None else bias[i]
        common = (z, label, rows, prototypes.labels, prototypes.weights, terms)
        if terms.contrast:
            sums[0] = sums[0] + contrast(*common, own_bias)
        if terms.alignment:
            sums[1] = sums[1] + alignment(*common)
        if terms.mse:
            sums[2] = sums[2] + squared_distance(z, label, targets, target_labels, terms.mse_reduce)
        if terms.cosine_square:
            sums[3] = sums[3] + cosine_square(
                z, label, targets, target_labels, terms.alpha if terms.power_in_square else 1
            )
    count = max(len(features), 1)
    return [scale * value / count for scale, value in zip(terms.coefficients, sums, strict=True)]


def combined(features, labels, prototypes, terms, class_rows=None, bias=None):
    return total(prototype_terms(features, labels, prototypes, terms, class_rows, bias))


def value_and_gradient(function, features):
    leaf = features.detach().double().requires_grad_()
    value = function(leaf)
    gradient = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
    return value.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def cross_entropy(logits, labels, smoothing):
    losses = []
    for i in range(len(logits)):
        logs = log_softmax(logits[i])
        classes = len(logs)
        target = [smoothing / classes + (1 - smoothing) * (c == int(labels[i])) for c in range(classes)]
        losses.append(-total(target[c] * logs[c] for c in range(classes)))
    return total(losses) / len(losses)


def uniform_divergence(logits, direction):
    losses = []
    for i in range(len(logits)):
        logs = log_softmax(logits[i])
        uniform = 1.0 / len(logs)
        if direction == "uniform_first":
            losses.append(total(uniform * (math.log(uniform) - x) for x in logs))
        else:
            losses.append(total(x.exp() * (x - math.log(uniform)) for x in logs))
    return total(losses) / len(losses)


def model_contrast(features, positive, negative, temperature):
    losses = []
    for i in range(len(features)):
        near = cosine(features[i], positive[i]) / temperature
        far = cosine(features[i], negative[i]) / temperature
        losses.append(log_sum_exp([near, far]) - near)
    return total(losses) / len(losses)


def nontarget_distillation(logits, teacher, labels, temperature):
    losses = []
    for i in range(len(logits)):
        student_logs = log_softmax(logits[i] / temperature)
        teacher_logs = log_softmax(teacher[i] / temperature)
        for c in range(len(student_logs)):
            if c != int(labels[i]):
                losses.append(teacher_logs[c].exp() * (teacher_logs[c] - student_logs[c]))
    return temperature**2 * total(losses) / len(logits)


def cross_correlation(logits, mean_logits, off_diagonal):
    count, classes = logits.shape

    def standardised(matrix, c):
        column = [matrix[i, c] for i in range(count)]
        mean = total(column) / count
        variance = total((x - mean) ** 2 for x in column) / (count - 1)
        if float(variance.detach()) == 0:
            return [torch.zeros((), dtype=torch.float64) for _ in column]
        return [(x - mean) / variance.sqrt() for x in column]

    losses = []
    for c in range(classes):
        for d in range(classes):
            r = dot(standardised(logits, c), standardised(mean_logits, d)) / count
            losses.append((r - 1) ** 2 if c == d else off_diagonal * (r + 1) ** 2)
    return total(losses)


def similarities(features, temperature):
    count = len(features)
    return [[cosine(features[i], features[j]) / temperature for j in range(count) if j != i] for i in range(count)]


def similarity_distillation(features, mean_similarities, temperature, scale):
    own = similarities(features, temperature)
    losses = []
    for i in range(len(own)):
        ours, target = log_softmax(own[i]), log_softmax(mean_similarities[i])
        losses.extend(target[j].exp() * (target[j] - ours[j]) for j in range(len(ours)))
    return scale * total(losses) / len(own)
