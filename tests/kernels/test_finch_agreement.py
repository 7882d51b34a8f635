"""The torch FINCH against the authors' package, and by itself on the sets that go wrong first."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from common import prototypes as finch
from common.numerics import generator
from common.prototypes import first_neighbours, partition

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("finch") is None, reason="finch-clust is not installed: pip install finch-clust"
)

KINDS = {
    # signed rows: no structure
    "normal": lambda noise, _: noise,
    # what a network's pooled ReLU gives: many zeros, cosines >= 0
    "relu": lambda noise, _: noise.relu(),
    # clusters that exist
    "blobs": lambda noise, draw: (
        torch.randn(5, noise.shape[1], generator=draw)[torch.randint(0, 5, (len(noise),), generator=draw)] + 0.3 * noise
    ),
    # exact duplicates: ties at distance 0
    "duplicates": lambda noise, draw: noise[torch.randint(0, len(noise), (len(noise),), generator=draw)],
    # a zero row, equally far from all
    "zero row": lambda noise, _: torch.cat([torch.zeros_like(noise[:1]), noise[1:]]),
}


@needs_package
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 16, 512])
def test_agrees_with_finch_clust_on_random_sets(kind, size):
    """5 kinds x 3 sizes x 10 sets x 2 levels: 300 partitions.

    They may differ only where two neighbours are closer than float32 can tell (1e-7; duplicates are ties). Which of
    these is taken hangs on the processor's last bits, so ours must then be as near as float64's nearest, to 1e-6.
    """
    different = 0
    for number in range(10):
        draw = generator(number, kind, size)
        count = int(torch.randint(4, 400 if number % 10 == 0 else 80, (1,), generator=draw))
        rows = KINDS[kind](torch.randn(count, size, generator=draw), draw)
        for level in (None, 0):
            ours = partition(rows, level=level, clustering="torch")
            theirs = partition(rows, level=level, clustering="finch-clust")
            if not torch.equal(ours, theirs):
                different += 1
                assert smallest_gap(rows) < 1e-7, (kind, size, number, level)
                units = torch.nn.functional.normalize(rows.double())
                cosines = units @ units.T - 3 * torch.eye(len(units))
                ours_at = cosines.gather(1, first_neighbours(rows)[:, None])[:, 0]
                assert (cosines.max(1).values - ours_at).max() < 1e-6, (kind, size, number, level)
    assert different <= 1, "of 20"


def smallest_gap(rows):
    """Between the nearest and the second nearest neighbour, over all rows, in float64."""
    units = torch.nn.functional.normalize(rows.double())
    nearest = (units @ units.T - 3 * torch.eye(len(units))).topk(2).values
    return (nearest[:, 0] - nearest[:, 1]).min().item()


def test_blocks_do_not_change_the_neighbours(monkeypatch):
    points = torch.randn(37, 8, generator=generator(0, "points"))
    whole = first_neighbours(points)
    for elements in (1, 37 * 5, 37 * 36):
        monkeypatch.setattr(finch, "BLOCK_ELEMENTS", elements)
        assert torch.equal(first_neighbours(points), whole)
    cosines = torch.nn.functional.normalize(points.double()) @ torch.nn.functional.normalize(points.double()).T
    assert torch.equal(whole, (cosines - 3 * torch.eye(37)).argmax(1))


def test_components_of_a_long_chain_are_one():
    """The slowest case for pointer jumping: 1000 arrows in a row into one cycle, and a separate pair."""
    chain = torch.arange(-1, 999)
    chain[0] = 1
    pair = torch.tensor([1001, 1000])
    labels, count = finch._components(torch.cat([chain, pair]))
    assert count == 2
    assert labels[:1000].eq(0).all()
    assert labels[1000:].eq(1).all()


def test_clusters_are_numbered_by_their_first_row():
    rows = torch.tensor([[0.0, 1], [1, 0], [0, 1.1], [1.1, 0], [0, 1.2], [1.2, 0.01]])
    assert partition(rows).tolist() == [0, 1, 0, 1, 0, 1]


@needs_package
def test_the_package_is_the_default_and_refuses_what_it_cannot_hold(monkeypatch):
    monkeypatch.setattr(finch, "MAX_ROWS", 20)
    rows = torch.randn(21, 4, generator=generator(0, "many"))
    with pytest.raises(ValueError, match=r"21 rows of one class.*method.clustering=torch"):
        partition(rows)
    assert len(partition(rows, clustering="torch")) == 21
    monkeypatch.setattr(finch, "_by_torch", lambda *_: pytest.fail("torch was not asked for"))
    assert len(partition(rows[:20])) == 20


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="not finite"):
        partition(torch.tensor([[float("nan"), 1.0]]))
    with pytest.raises(ValueError, match="count from 0"):
        partition(torch.ones(4, 2), level=-1)
    with pytest.raises(ValueError, match="clustering"):
        partition(torch.ones(4, 2), clustering="faiss")
    assert partition(torch.zeros(0, 3)).shape == (0,)


def test_prototypes_import_without_the_package():
    """GPU machines may lack finch-clust: nothing needs it until it is asked for."""
    code = "import sys; sys.modules['finch'] = None; import common.losses, common.prototypes, torch; "
    code += "common.prototypes.partition(torch.eye(4), clustering='torch')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
