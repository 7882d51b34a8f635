"""FedPall: prototypes and server nets in loops, what protects features, what moves where, and what it reduces to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import CLASSES, FEATURES
from support.nets import (
    NetHalf,
    class_means_of,
    epoch,
    epochs,
    kept,
    net_update,
    numbers,
    trained,
    unit,
    weighted_means,
)
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings

from common.errors import PayloadError
from common.numerics import generator
from common.prototypes import PrototypeSet, class_means
from common.storage import under_prefix
from strategies.core.method import Batch
from strategies.fedpall import FedPall
from strategies.parts.server_nets import NetTraining, initial_net, new_discriminator, sent_net

MEANS = [
    class_means_of((0, 3.0, 1), (2, 7.0, 2)),
    class_means_of((0, 5.0, 3)),
    class_means_of((0, 1.0, 4), (2, 2.0, 5)),
]


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["released", "paper"])
def test_prototypes_are_the_weighted_means(fidelity):
    server = NetHalf(exchange="train")
    method = FedPall(fidelity=fidelity)
    state = method.initial_state({}, server)
    state = method.aggregate(state, [net_update(i, part) for i, part in enumerate(MEANS)], server)
    wanted = weighted_means(MEANS, list if fidelity == "paper" else unit)
    assert state.prototypes.labels.tolist() == [0, 2]  # no client has class 1
    for label, vector in wanted.items():
        assert state.prototypes.of_class(label)[0].tolist() == pytest.approx(vector, rel=1e-5)
    assert state.prototypes.weights.tolist() == [9.0, 9.0]


def test_the_server_trains_the_classifier_by_label_and_the_amplifier_by_client():
    how = NetTraining(epochs=2, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    method, server = FedPall(server_training=how), NetHalf(exchange="mix")
    state = method.initial_state({}, server)
    head = server.new_model().head
    amplifier = new_discriminator("amplifier", server)
    first, second = (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for net in (head, amplifier)
    )
    for number in (1, 2):
        server.round = number
        draws = generator(0, "mixed", number)
        parts = [
            (torch.rand(n, FEATURES, generator=draws), torch.randint(3, (n,), generator=draws)) for n in (5, 11, 9)
        ]
        sent = [net_update(i, features=part, labels=own) for i, (part, own) in enumerate(parts)]
        state = method.aggregate(state, sent, server)
        features, labels = torch.cat([part for part, _ in parts]), torch.cat([own for _, own in parts])
        owners = torch.tensor([0] * 5 + [1] * 11 + [2] * 9)
        for batches in epochs(2, 25, 8, server.generator("train", "classifier")):  # 25: the last batch has one row
            epoch(head, first, features, labels, batches)
        for batches in epochs(2, 25, 8, server.generator("train", "amplifier"), single=False):  # it has batch norm
            epoch(amplifier, second, features, owners, batches)
    for prefix, net in (("classifier/", head), ("amplifier/", amplifier)):
        trained_net = under_prefix(prefix, state.extra)
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(trained_net[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("labels", [[0, 0, 1], [0, 0, 3], [0, -1, 1], [0, 0, 2]], ids=str)
def test_labels_must_be_those_that_were_registered(labels):
    method, server = FedPall(), NetHalf(exchange="mix")
    features = torch.zeros(3, FEATURES)
    wrong = net_update(0, counts=(1, 1, 1), features=features, labels=torch.tensor(labels))
    with pytest.raises(PayloadError, match="labels"):
        method.inspect(wrong, server)
    method.inspect(net_update(0, counts=(1, 1, 1), features=features, labels=torch.tensor([2, 0, 1])), server)


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["released", "paper"])
def test_the_divergence_is_the_printed_one(fidelity, tmp_path):
    settings = toy_settings("fedpall", tmp_path, hyper={"fidelity": fidelity, "divergence": 0.3})
    size = int(local_exchange(settings).model.feature_size)
    net = new_discriminator("amplifier", NetHalf(feature_size=size))
    local = local_exchange(settings, extra=sent_net("amplifier", initial_net("amplifier", net)))
    features = torch.rand(6, size, generator=generator(0, "batch"), requires_grad=True)
    batch = Batch(torch.empty(0), torch.arange(6) % CLASSES, features, torch.zeros(6, CLASSES))
    term = local.method.loss(batch, local).terms["divergence"]
    divergence = 0.0
    for row in numbers(net.train()(features)):
        p = [math.exp(v) / sum(math.exp(u) for u in row) for v in row]
        if fidelity == "paper":
            divergence += sum(q * math.log(3 * q) for q in p)
        else:
            divergence -= sum(math.log(3 * q) for q in p) / 3
    assert term.item() == pytest.approx(0.3 * divergence / 6, rel=1e-3)
    term.backward()
    assert bool(features.grad.any())  # deceiving needs the gradient through the amplifier


# ---- what protects the features --------------------------------------------------------------------------------------


TABLE = PrototypeSet(torch.full((3, 2048), 40.0), torch.arange(3), torch.ones(3))


def protected(count=50, size=2048, key=0, **options):
    features = 1 + torch.rand(count, size, generator=generator(0, "features"))
    labels = torch.arange(count) % 3
    table = PrototypeSet(TABLE.vectors[:, :size], TABLE.labels, TABLE.weights)
    return features, FedPall(**options).protect(features, labels, table, generator(0, "protection", key))


@pytest.mark.parametrize(("size", "share", "ones"), [(2048, 0.9, 1843), (10, 0.9, 9), (100, 0.29, 29), (7, 1.0, 7)])
def test_the_mask_has_exactly_its_share_of_ones_and_is_the_same_for_all_samples(size, share, ones):
    features, masked = protected(size=size, protection="mask", mask_share=share)
    mask = masked != 0
    assert int(mask[0].sum()) == ones
    assert bool((mask == mask[0]).all())
    assert torch.equal(masked, features * mask)


def test_the_mixture_has_one_share_of_two_decimals():
    shares = []
    for key in range(40):
        features, mixed = protected(size=16, key=key, protection="mix")
        share = (mixed - 40) / (features - 40)
        assert float(share.max() - share.min()) < 1e-4
        shares.append(float(share.double().mean()))
        assert 100 * shares[-1] == pytest.approx(round(100 * shares[-1]), abs=1e-2)
    assert min(shares) >= 0.8 - 1e-6
    assert max(shares) <= 1 + 1e-6
    assert max(shares) - min(shares) > 0.12
    assert len({round(share, 2) for share in shares}) > 10


def test_the_paper_draws_share_and_mask_for_every_sample():
    features, masked = protected(count=60, protection="mask", fidelity="paper")
    ones = (masked != 0).sum(1)
    assert len(set(ones.tolist())) > 20
    assert float(ones.float().mean()) == pytest.approx(0.9 * 2048, rel=5e-3)
    features, mixed = protected(count=60, size=16, protection="mix", fidelity="paper")
    shares = ((mixed - 40) / (features - 40)).mean(1)
    assert len({round(float(share), 3) for share in shares}) > 40
    assert 0.8 - 1e-5 <= float(shares.min()) < 0.84
    assert 0.96 < float(shares.max()) <= 1 + 1e-5


def test_the_other_protections():
    features, plain = protected(protection="none")
    assert torch.equal(features, plain)
    _, noisy = protected(protection="gaussian")
    noise = noisy - features
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.std()) == pytest.approx(1, abs=0.02)
    assert not torch.allclose(noise[0], noise[1], atol=0.1)
    _, both = protected(protection="both")
    _, mixed = protected(protection="mix")
    mask = both != 0
    assert torch.equal(both[mask], mixed[mask])
    assert int(mask[0].sum()) == 1843


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_share_and_mask_are_drawn_once_per_client_and_round(tmp_path):
    settings = toy_settings("fedpall", tmp_path, hyper={"protection": "mask"})
    masks = {}
    for item in trained(run(settings, TouchedEngine(settings)), "mix"):
        features = item.reply.payload.extra["features"]
        sent = (features != 0).any(0)
        assert int(sent.sum()) <= math.floor(0.9 * features.shape[1])
        masks[item.request.round, item.request.client] = tuple(sent.tolist())
    assert len(set(masks.values())) == len(masks) == 6


@pytest.mark.parametrize("feature_mode", ["train", "eval"])
def test_both_exchanges_see_the_same_features_of_the_trained_model(feature_mode, tmp_path):
    settings = toy_settings("fedpall", tmp_path, hyper={"protection": "none", "feature_mode": feature_mode})
    means, models = {}, {}
    for item in trained(run(settings, TouchedEngine(settings))):
        key, payload = (item.request.round, item.request.client), item.reply.payload
        if item.request.exchange == "train":
            means[key] = payload.prototypes
        else:
            again = class_means(payload.extra["features"], payload.extra["labels"], settings.data.class_count)
            assert again.labels.tolist() == means[key].labels.tolist()
            torch.testing.assert_close(again.vectors, means[key].vectors, rtol=1e-5, atol=1e-6)
            models[key] = again
    assert len(models) == 6


def test_collecting_features_moves_running_statistics_once(tmp_path):
    """The model that is kept after ``mix`` is the one that was kept after ``train``, to the bit."""
    settings = toy_settings("fedpall", tmp_path, train={"rounds": 1})
    seen = {}

    def edit(request, payload):
        if request.train and request.client == "noisy-0":
            seen[request.exchange] = kept(tmp_path)["noisy-0"]
        return payload

    run(settings, TouchedEngine(settings, edit=edit))
    before, after = seen["train"], seen["mix"]
    assert set(before) == set(after)
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_clients_take_over_the_classifier_but_its_batch_norm(tmp_path):
    settings = toy_settings(
        "fedpall", tmp_path, overrides=("model=resnet18", "model.head=multilayer"), data=Toy(image_size=32)
    )
    local = local_exchange(settings)
    server = NetHalf(class_count=4, feature_size=512, exchange="train")
    server.new_model = lambda: local_exchange(settings).model
    method, state = settings.method, settings.method.initial_state({}, server)
    state = replace(state, extra={name: torch.full_like(tensor, 7) for name, tensor in state.extra.items()})
    local.extra = method.download(state, server).extra
    sent = set(under_prefix("classifier/", local.extra))
    assert sent == {f"fc{i}.{part}" for i in (1, 2, 3) for part in ("weight", "bias")}
    before = {name: tensor.clone() for name, tensor in local.model.state_dict().items()}
    method.begin(local)
    for name, tensor in local.model.state_dict().items():
        taken = name.startswith("head.") and name.removeprefix("head.") in sent
        assert torch.equal(tensor, torch.full_like(tensor, 7) if taken else before[name])
    without = replace(method, swap_classifier=False)
    assert not under_prefix("classifier/", without.download(state, server).extra)


def test_the_same_rounds_are_scored_as_of_other_methods_and_the_last(tmp_path):
    settings = toy_settings("fedpall", tmp_path, train={"rounds": 5}, rounds={"evaluate_every": 2})
    assert {row["round"] for row in run(settings).history()} == {"2", "4", "5"}
