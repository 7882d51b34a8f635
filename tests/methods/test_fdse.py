"""FDSE: its solver by its optimality, its regulariser in loops over the formulas, its layer, and erasers in a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import PARAMETERS, Half, model_state, run_server, updates
from support.runs import run
from support.toy import toy_settings
from torch import nn

from common.errors import ConfigError
from common.models.specs import AlexNet, ResNet10, Small
from common.storage import under_prefix
from strategies.core.aggregation import Mean
from strategies.fdse import (
    ERASERS,
    FDSE,
    Running,
    SplitLayer,
    Statistics,
    consensus_step,
    is_eraser,
    min_norm_point,
    printed_regulariser,
    released_regulariser,
    shared_norms,
    similarity_mixture,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the consensus ---------------------------------------------------------------------------------------------------

ONE = drawn(6, seed=3)
DIRECTIONS = {
    **{f"{n} random in {d}": drawn(n, d, seed=n) for n, d in ((2, 5), (4, 3), (7, 40), (20, 200), (20, 6))},
    "one alone": drawn(1, 4),
    "equal": ONE.repeat(3, 1),
    "opposite": torch.stack([ONE, -ONE]),
    "one is zero": torch.stack([ONE, torch.zeros(6, dtype=torch.float64), drawn(6)]),
    "all are zero": torch.zeros(3, 4, dtype=torch.float64),
    "nearly equal": ONE + 1e-7 * drawn(4, 6),
    "a cone": ONE + 0.3 * drawn(8, 6),
    "pairs": torch.stack([ONE, -ONE, drawn(6), drawn(6), -drawn(6, seed=2)]),
}


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
def test_the_solver_finds_the_shortest_vector(directions):
    units = directions / (directions.norm(dim=1, keepdim=True) + 1e-8)
    gram = units @ units.T
    shares = min_norm_point(gram)
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((shares >= 0).all())
    square = float(shares @ gram @ shares)
    # if no vector of the hull lies behind a point of it, that is the shortest, since the problem is convex
    assert float((gram @ shares).min()) >= square - 1e-9


def test_the_step_is_the_formula():
    before, sent = drawn(3, 4, seed=1).float(), [drawn(3, 4, seed=seed).float() for seed in (5, 6, 7)]
    moves = torch.stack([(part.double() - before.double()).flatten() for part in sent])
    lengths = moves.norm(dim=1)
    units = moves / (lengths[:, None] + 1e-8)
    expected = before.double().flatten() + lengths.mean() * min_norm_point(units @ units.T) @ units
    torch.testing.assert_close(consensus_step(before, sent), expected.view(3, 4).float(), rtol=1e-6, atol=1e-6)


def test_without_a_change_there_is_no_step():
    before = drawn(5, 2).float()
    assert torch.equal(consensus_step(before, [before, before]), before)


def test_parameters_go_by_consensus_and_statistics_by_the_mean():
    sent = updates(1)
    state = run_server(FDSE(), [sent])[-1]
    mean = Mean().average(sent, uniform=True)
    for name, tensor in model_state("initial").items():
        expected = mean[name]
        if name in PARAMETERS:
            expected = consensus_step(tensor, [update.weights[name] for update in sent])
        assert torch.equal(state.weights[name], expected)
    plain = run_server(FDSE(consensus="mean", weighting="samples"), [sent])[-1]
    assert all(torch.equal(tensor, plain.weights[name]) for name, tensor in Mean().average(sent).items())


# ---- the mixture of erasers ------------------------------------------------------------------------------------------


def test_erasers_are_mixed_by_similarity():
    orthogonal = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    share = math.exp(2) / (math.exp(2) + 1)
    expected = torch.tensor([[2 * share, 3 * (1 - share)], [2 * (1 - share), 3 * share]])
    torch.testing.assert_close(similarity_mixture(orthogonal, 0.5), expected)


def test_a_client_that_sat_out_keeps_its_eraser():
    name = "layer.eraser.weight"
    server = Half(shared={**model_state("initial"), name: torch.ones(2, 1)}, parameters=PARAMETERS | {name})
    rounds = []
    for number, who in ((1, (0, 1, 2)), (2, (0, 2))):
        rounds.append(updates(number, who))
        for update in rounds[-1]:
            update.weights[name] = drawn(2, 1, seed=10 * number + update.client.index).float()
    states = run_server(FDSE(), rounds, server)
    tables = [state.extra[ERASERS + name] for state in states]
    assert torch.equal(tables[0], torch.ones(3, 2, 1))
    assert torch.equal(tables[2][1], tables[1][1])
    for table, sent in zip(tables[1:], rounds, strict=True):
        rows = torch.stack([update.weights[name] for update in sent])
        places = [update.client.index for update in sent]
        torch.testing.assert_close(table[places], similarity_mixture(rows, 0.5))
        assert is_eraser(name)


@pytest.mark.parametrize("scored", ["mixture", "trained"])
def test_a_client_trains_from_its_row_and_is_scored_as_the_option_says(scored, tmp_path):
    """The model that it trained last has an eraser, too, which then counts and not the mixed one."""
    settings = toy_settings("fdse", tmp_path, hyper={"scored": scored})
    tables, kept = {}, {}
    for place, (name, tensor) in enumerate(local_exchange(settings).model.state_dict().items()):
        if "eraser" in name and "running" not in name and "tracked" not in name:
            tables[ERASERS + name] = drawn(3, *tensor.shape, seed=place).float()
        if scored == "trained" and _travels(name):
            kept[f"trained/{name}"] = torch.full_like(tensor, 7)
    local = local_exchange(settings, position=1, extra=tables, kept=kept)
    row = {name.removeprefix(ERASERS): table[1] for name, table in tables.items()}
    for install, own in ((settings.method.begin, {}), (settings.method.adapt, under_prefix("trained/", kept))):
        install(local)
        state = local.model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in {**row, **own}.items())
    upload = settings.method.upload(local, None)
    assert set(upload.local) == {f"trained/{name}" for name in local.weights if scored == "trained" and _travels(name)}


def _travels(name):
    return "eraser_norm.running" not in name and "eraser_norm.num" not in name


# ---- the regulariser -------------------------------------------------------------------------------------------------

SIZES = (5, 3, 8)


def two_batches():
    """Means of two batches of four images in three layers, and global statistics."""
    means = [[drawn(4, size, seed=10 * b + place) for place, size in enumerate(SIZES)] for b in range(2)]
    known = [Statistics(drawn(size, seed=50), drawn(size, seed=60).exp()) for size in SIZES]
    return [[layer.requires_grad_() for layer in batch] for batch in means], known


def in_loops(means, known, growth, form, squares):
    """The regulariser of both batches, layer by layer; ``found`` has one value for each batch."""
    total_weight = sum(math.exp(growth * place) for place in range(len(SIZES)))
    running, per_layer, found = None, {place: (item.mean, item.variance) for place, item in enumerate(known)}, []
    for batch, layers in enumerate(means):
        value = 0.0
        for place, layer in enumerate(layers):
            mu, q = known[place].mean, known[place].variance
            channels = layer.mean(0)
            if form == "printed":
                seconds = squares[batch][place].mean(0)
                f = 0.9 * per_layer[place][0] + 0.1 * channels
                v = 0.9 * per_layer[place][1] + 0.1 * (seconds - channels**2)
                term = (f - mu) ** 2 + (v.mean() - q.mean()) ** 2
                per_layer[place] = (f.detach(), v.detach())
            else:
                now = torch.stack([channels.mean(), channels.var()])
                running = now if running is None else 0.9 * running + 0.1 * now
                f, v = running
                term = (torch.log(v / q) + (q + (mu - f) ** 2) / v - 1) / 2
            if form == "released":
                term = (mu**2 - f**2) / (2 * v) + (torch.log(v / (q + 1e-8)) + q / (v + 1e-8)) / 2
            value = value + math.exp(growth * place) / total_weight * term.mean()
        running = None if running is None else running.detach()
        found.append(value)
    return found


@pytest.mark.parametrize("form", ["released", "kl", "printed"])
def test_the_regulariser_is_the_formula_in_value_and_gradient(form):
    (found, known), (expected, _) = two_batches(), two_batches()
    squares = [[layer.detach().square() + 0.5 for layer in batch] for batch in found]
    one_pair = Running()
    per_layer = [item.copy() for item in known]
    loops = in_loops(expected, known, 0.3, form, squares)
    for batch in range(2):
        if form == "printed":
            value = printed_regulariser(found[batch], squares[batch], known, per_layer, 0.3)
        else:
            value = released_regulariser(found[batch], known, one_pair, 0.3, divergence=form == "kl")
        torch.testing.assert_close(value, loops[batch], rtol=1e-9, atol=1e-9)
        ours = torch.autograd.grad(value, found[batch])
        theirs = torch.autograd.grad(loops[batch], expected[batch])
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_regulariser_reads_what_the_split_layers_give(tmp_path):
    """From round 2 on, ``compute`` gives the means of each shared normalisation's input."""
    settings = toy_settings("fdse", tmp_path)
    model = FDSE().extend(settings.model.build(4, 16, 0), 3, 0).train()
    seen = []
    for layer in shared_norms(model).values():
        layer.register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0]))

    class Side:
        round = 2

    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    _, _, extra = FDSE(form="printed").compute(model, images, Side())
    assert len(seen) == 5
    for place, maps in enumerate(seen):
        torch.testing.assert_close(extra[f"mean/{place}"], maps.mean((2, 3)))
        torch.testing.assert_close(extra[f"square/{place}"], maps.square().mean((2, 3)))
    Side.round = 1
    assert FDSE().compute(model, images, Side())[2] == {}


# ---- its layer -------------------------------------------------------------------------------------------------------


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_counts_of_the_paper_s_network():
    model = AlexNet().build(10, 256, 0)
    assert parameters(model) == 12_974_154
    FDSE().extend(model, 4, 0)
    assert parameters(model) == 6_508_010
    assert sum(item.numel() for name, item in model.named_parameters() if is_eraser(name)) == 9_408


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 7, 5, stride=2, padding=2), nn.Linear(6, 7)], ids=["maps", "vectors"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_split_layer_is_the_formula(layer, groups):
    split = SplitLayer(layer, groups, "bn").eval()
    with torch.no_grad():
        split.bias.copy_(torch.arange(7.0))
        split.eraser_norm.running_mean.add_(0.5)
    inputs = torch.rand(2, 3, 8, 8) if isinstance(layer, nn.Conv2d) else torch.rand(2, 6)
    width = 7 if groups == 1 else 4
    u = split.eraser_norm(split.extractor(inputs))
    assert u.shape[1] == width
    wide = u if u.ndim == 4 else u[:, :, None, None]
    kernel = split.eraser.weight.view(width, 1, *([3, 3] if u.ndim == 4 else [1, 1]))
    v = torch.nn.functional.conv2d(wide, kernel, padding=kernel.shape[-1] // 2, groups=width)
    joined = wide + v if groups == 1 else torch.cat([wide, v], 1)[:, :7]
    expected = joined + torch.arange(7.0).view(1, 7, 1, 1)
    torch.testing.assert_close(split(inputs), expected if u.ndim == 4 else expected[:, :, 0, 0])
    assert split(inputs).shape == layer(inputs).shape


def test_a_residual_network_is_split_but_for_its_shortcuts():
    model = FDSE().extend(ResNet10().build(10, 32, 0), 4, 0)
    split = [path for path, layer in model.named_modules() if isinstance(layer, SplitLayer)]
    assert split[:3] == ["backbone.conv1", "backbone.layer1.0.conv1", "backbone.layer1.0.conv2"]
    assert len(split) == len(shared_norms(model)) == 9
    features, logits = model(torch.rand(2, 3, 32, 32))
    assert (features.shape, logits.shape) == ((2, 512), (2, 10))


def test_a_network_without_batch_normalisation_is_refused():
    with pytest.raises(ConfigError, match=r"model\.norm=batch"):
        FDSE().extend(Small(norm="group").build(10, 32, 0), 4, 0)
    plain = Small(norm="group").build(10, 32, 0)
    assert FDSE(split=None).extend(plain, 4, 0) is plain


@pytest.mark.parametrize("override", ["model.freeze=backbone", "model.norm=group"])
def test_what_an_unsplit_network_needs_is_named_whole(override: str, tmp_path: Path) -> None:
    """With ``split=null`` alone the run was refused again: it scored each client's trained model."""
    with pytest.raises(ConfigError) as caught:
        run(toy_settings("fdse", tmp_path, overrides=(override,)))
    _, named, remedy = str(caught.value).partition("method.split=null")
    obeyed = toy_settings("fdse", tmp_path, overrides=(override, *(named + remedy).split()), train={"rounds": 1})
    assert run(obeyed).summary["rounds"] == 1
