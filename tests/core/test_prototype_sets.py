"""Prototype sets and what is made of them; 0, 1, 2, 3 points, duplicates and absent classes are ordinary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.numerics import generator
from common.prototypes import (
    ClassSums,
    PrototypeSet,
    class_means,
    cluster_prototypes,
    partition,
    unbiased_prototypes,
)
from strategies.parts.sent_prototypes import carry_over, normalise_weights


def rows_of(*entries: tuple[int, list[float], float]) -> PrototypeSet:
    """A set from (class, vector, weight) entries."""
    labels = torch.tensor([entry[0] for entry in entries])
    return PrototypeSet(
        torch.tensor([entry[1] for entry in entries]), labels, torch.tensor([entry[2] for entry in entries])
    )


def listed(found: PrototypeSet) -> list[tuple[int, list[float], float]]:
    return list(zip(found.labels.tolist(), found.vectors.tolist(), found.weights.tolist(), strict=True))


def random_set(rows: int, size: int = 8, classes: int = 3, seed: int = 0) -> PrototypeSet:
    draws = generator(seed, "set", rows)
    labels = torch.randint(0, classes, (rows,), generator=draws)
    weights = torch.randint(1, 9, (rows,), generator=draws).float()
    return PrototypeSet(torch.randn(rows, size, generator=draws).relu(), labels, weights)


# ---- the set ---------------------------------------------------------------------------------------------------------


def test_rows_are_sorted_by_class_and_keep_their_order_within_one() -> None:
    found = rows_of((2, [1.0], 1), (0, [2.0], 2), (2, [3.0], 3), (0, [4.0], 4))
    assert listed(found) == [(0, [2.0], 2), (0, [4.0], 4), (2, [1.0], 1), (2, [3.0], 3)]
    assert found.classes == [0, 2]
    assert found.offsets(4).tolist() == [0, 2, 2, 4, 4]
    assert found.of_class(2).tolist() == [[1.0], [3.0]]
    assert found.of_class(1).shape == (0, 1)
    parts = [rows_of((2, [1.0], 1), (0, [2.0], 2)), rows_of((2, [3.0], 3), (0, [4.0], 4))]
    assert PrototypeSet.concatenate(parts) == found
    with pytest.raises(ValueError, match="class 2 where only 2"):
        found.offsets(2)
    with pytest.raises(ValueError, match="different feature sizes"):
        PrototypeSet.concatenate([found, rows_of((0, [1.0, 2.0], 1))])


@pytest.mark.parametrize(
    ("vectors", "labels", "weights", "reason"),
    [
        (torch.ones(2), torch.zeros(2), torch.ones(2), r"\[M, D\]"),
        (torch.ones(2, 1), torch.zeros(2, 1), torch.ones(2), r"\[M, D\]"),
        (torch.ones(2, 1), torch.zeros(1), torch.ones(2), "do not match"),
        (torch.ones(2, 1), torch.zeros(2), torch.ones(3), "do not match"),
        (torch.ones(1, 1), torch.tensor([-1]), torch.ones(1), "labels must be >= 0"),
        (torch.ones(1, 1), torch.tensor([0]), -torch.ones(1), "weights must be >= 0"),
    ],
    ids=["one vector", "labels in two dimensions", "a label short", "a weight more", "label -1", "weight -1"],
)
def test_what_is_no_set(vectors: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PrototypeSet(vectors, labels, weights)


def test_the_empty_set_is_a_set() -> None:
    empty = PrototypeSet.empty(5)
    assert (len(empty), empty.feature_size, empty.classes) == (0, 5, [])
    assert empty.offsets(3).tolist() == [0, 0, 0, 0]
    assert empty.normalised.shape == (0, 5)
    table, present = empty.rows_per_class(2)
    assert table.tolist() == [[0.0] * 5] * 2
    assert not present.any()
    results = [make(empty) for make in (cluster_prototypes, unbiased_prototypes, normalise_weights)]
    for result in [*results, ClassSums(3, 5).means()]:
        assert (len(result), result.feature_size) == (0, 5)
    assert normalise_weights(rows_of((0, [1.0], 0), (1, [1.0], 4))).weights.tolist() == [0, 1]
    assert PrototypeSet.concatenate([]).feature_size == 0
    assert PrototypeSet.concatenate([empty, PrototypeSet.empty(0)]).feature_size == 5
    assert PrototypeSet.concatenate([empty, rows_of((1, [1.0], 1))]) == rows_of((1, [1.0], 1))


def test_a_dense_table_takes_one_row_per_class() -> None:
    table, present = rows_of((0, [1.0], 1), (2, [2.0], 1)).rows_per_class(4)
    assert table.flatten().tolist() == [1, 0, 2, 0]
    assert present.tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="several prototypes"):
        rows_of((0, [1.0], 1), (0, [2.0], 1)).rows_per_class(1)


def test_unit_rows_and_the_zero_row() -> None:
    unit = rows_of((0, [3.0, 4.0], 1), (1, [0.0, 0.0], 1), (2, [1e-20, 0.0], 1)).normalised
    assert torch.allclose(unit[0], torch.tensor([0.6, 0.8]))
    assert unit[1].tolist() == [0, 0]
    assert float(unit[2].norm()) <= 1


def test_equality_is_by_value() -> None:
    assert random_set(5) == random_set(5)
    assert random_set(5) != random_set(5, seed=1)
    assert random_set(5) != "a set"
    with pytest.raises(TypeError, match="unhashable"):
        hash(random_set(2))


# ---- class means -----------------------------------------------------------------------------------------------------


def test_class_means_in_loops() -> None:
    draws = generator(0, "features")
    features, labels = torch.randn(40, 6, generator=draws), torch.randint(0, 4, (40,), generator=draws)
    labels[labels == 2] = 3
    found = class_means(features, labels, 5)
    assert found.classes == [0, 1, 3]
    for label, vector, weight in listed(found):
        members = [features[i].double() for i in range(40) if int(labels[i]) == label]
        assert weight == len(members)
        assert torch.allclose(torch.tensor(vector).double(), sum(members) / len(members), atol=1e-6)


def test_running_means_do_not_depend_on_batches_and_keep_no_graph() -> None:
    draws = generator(0, "running")
    features = torch.randn(30, 4, generator=draws, requires_grad=True)
    labels = torch.randint(0, 3, (30,), generator=draws)
    whole = class_means(features, labels, 3)
    for size in (1, 7, 30):
        sums = ClassSums(3, 4)
        for part, names in zip(features.split(size), labels.split(size), strict=True):
            sums.add(part * 1, names)
        assert sums.means() == whole
        assert not sums.sums.requires_grad


def test_sums_of_large_features_stay_exact() -> None:
    """Float32 sums would lose the ones next to the ten millions."""
    features = torch.tensor([[1e7]] * 999 + [[1.0]])
    expected = (999 * 1e7 + 1) / 1000
    assert class_means(features, torch.zeros(1000, dtype=torch.int64), 1).vectors.item() == pytest.approx(
        expected, rel=1e-7
    )


# ---- clustering ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clustering", ["torch", "finch-clust"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_up_to_three_rows_are_one_cluster(count: int, clustering: str) -> None:
    rows = torch.randn(count, 5, generator=generator(0, "few", count))
    assert partition(rows, clustering=clustering).tolist() == [0] * count
    if count:
        entries = PrototypeSet(rows, torch.zeros(count, dtype=torch.int64), torch.arange(1.0, count + 1))
        found = cluster_prototypes(entries)
        assert len(found) == 1
        assert torch.allclose(found.vectors[0], rows.mean(0), atol=1e-6)
        assert found.weights.item() == sum(range(1, count + 1))


def test_duplicates_merge_and_groups_stay_apart() -> None:
    assert partition(torch.ones(6, 3)).tolist() == [0] * 6
    rows = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 2)
    assert partition(rows).tolist() == [0, 0, 0, 1, 1]
    assert partition(rows * torch.tensor([[1.0], [5.0], [0.1], [3.0], [2.0]])).tolist() == [0, 0, 0, 1, 1]
    zero = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    assert len(partition(zero)) == 5


@given(st.integers(4, 60), st.integers(0, 1000))
def test_every_cluster_has_two_members_or_more_and_coarser_levels_join_finer_ones(count: int, seed: int) -> None:
    rows = torch.randn(count, 6, generator=generator(seed, "finch", count))
    fine, coarse = partition(rows, level=0), partition(rows)
    assert int(torch.bincount(fine).min()) >= 2
    assert len(coarse.unique()) <= len(fine.unique()) <= count // 2
    for cluster in fine.unique():
        assert len(coarse[fine == cluster].unique()) == 1
    assert partition(rows, level=99).tolist() == coarse.tolist()


def test_clusters_are_means_with_the_mass_of_their_members() -> None:
    entries = random_set(30, classes=2)
    found = cluster_prototypes(entries)
    assert found.classes == entries.classes
    for label in entries.classes:
        rows, weights = entries.of_class(label), entries.weights[entries.labels == label]
        clusters = partition(rows)
        mine = [(vector, weight) for name, vector, weight in listed(found) if name == label]
        assert len(mine) == int(clusters.max()) + 1
        for cluster, (vector, weight) in enumerate(mine):
            members = clusters == cluster
            assert torch.allclose(torch.tensor(vector), rows[members].mean(0), atol=1e-6)
            assert weight == float(weights[members].sum())
    assert float(found.weights.sum()) == float(entries.weights.sum())


def test_the_order_of_classes_and_the_others_rows_do_not_matter() -> None:
    entries = random_set(40)
    alone = []
    for label in entries.classes:
        mine = entries.labels == label
        rows = PrototypeSet(entries.vectors[mine], entries.labels[mine], entries.weights[mine])
        alone.append(cluster_prototypes(rows))
    assert PrototypeSet.concatenate(alone) == cluster_prototypes(entries)


# ---- one row per class -----------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(0, 50))
def test_unbiased_in_loops(count: int, seed: int) -> None:
    entries = random_set(count, seed=seed)
    for sample_weighted in (False, True):
        for label, vector, weight in listed(unbiased_prototypes(entries, sample_weighted=sample_weighted)):
            rows = entries.of_class(label).double()
            masses = entries.weights[entries.labels == label].double()
            shares = masses if sample_weighted else torch.ones_like(masses)
            expected = sum(share * row for share, row in zip(shares, rows, strict=True)) / shares.sum()
            assert torch.allclose(torch.tensor(vector).double(), expected, atol=1e-6)
            assert weight == float(masses.sum())


def test_classes_that_no_client_reported_carry_over() -> None:
    before = rows_of((0, [1.0], 1), (1, [2.0], 2), (1, [3.0], 3))
    now = rows_of((0, [9.0], 9), (2, [8.0], 8))
    assert listed(carry_over(now, before)) == [(0, [9.0], 9), (1, [2.0], 2), (1, [3.0], 3), (2, [8.0], 8)]
    assert carry_over(now, PrototypeSet.empty(1)) is now
    assert carry_over(PrototypeSet.empty(1), before) == before
