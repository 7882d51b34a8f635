"""FDSE: Federated Learning with Domain Shift Eraser.

Zheng Wang, Zihui Wang, Zheng Wang, Xiaoliang Fan, Cheng Wang. CVPR 2025. arXiv:2503.13063.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.config import NonNegative, Positive, Search, checked
from common.errors import ConfigError
from common.models.base import initialised
from common.numerics import working_dtype
from common.prototypes import PrototypeSet, normalise_rows
from common.storage import GlobalState, under_prefix
from strategies.core.aggregation import STACKED_ELEMENTS, number_by_number
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Download,
    Losses,
    ServerContext,
    Trained,
    Update,
    Upload,
    Weighting,
)
from strategies.core.readings import Point

ERASERS = "erasers/"
"""Prefix of the tables ``[C, ...]`` of the clients' erasers, by the name of the parameter."""

TRAINED = "trained/"
"""Prefix of the model that a client keeps for its score, with ``scored=trained``."""

MOMENTUM = 0.1
"""Share of the present batch in the running statistics of the regulariser; batch normalisation's own."""

EPSILON = 1e-8
"""What the released code adds to variances that it divides by, and to the lengths of changes."""


@checked
class FDSE(Averaging):
    """Every layer is split into a shared extractor and a small personal eraser of the domain's style.

    A layer that batch normalisation follows computes only a part of its channels; an *eraser*, batch normalisation and
    a depthwise convolution, makes the others of them. Extractors and all other layers are merged by consensus: the step
    of each tensor goes along the shortest vector in the convex hull of the clients' directions. Each client's eraser
    becomes a mixture of the participants' erasers, weighted by similarity. A regulariser pulls the statistics behind
    the erasers towards the global ones, deeper layers more. ``split=null consistency=0 consensus=mean
    weighting=samples`` is FedAvg bit for bit.

    The paper itself could not be read; layer, server and regulariser follow the released code. docs/methods.md lists
    the differences.

    Payload: the split model's state without the erasers' running statistics both ways, and down one eraser per client
    (each participant sees the erasers of all). Client state: its erasers' running statistics, and with
    ``scored=trained`` its trained model. Server state: the erasers of all clients. Scored on each client's own model. A
    layer that is split starts from random weights, also where the network starts from pretrained ones.

    Args:
        split: 2 computes half of the channels by the extractor and half by the eraser (the paper); 1 computes all of
            them by the extractor and adds the eraser's to them; ``null`` leaves the network as it is.
        consistency: weight of the regulariser, >= 0 (released: 0.05 on Office-Caltech, 0.5 on PACS).
        similarity_temperature: of the softmax over cosines that mixes erasers, > 0 (released: 0.5).
        depth_growth: beta >= 0; layer l has the weight ``exp(beta l) / sum`` in the regulariser (released: 0.05 on
            Office-Caltech, 0.001 on PACS).
        consensus: ``min_norm``, or the plain ``mean`` of the clients' tensors.
        form: of the regulariser. ``released``: the code's, with one running mean and variance for all layers;
            ``printed``: squared distances for each layer and channel (second-hand, the paper's); ``kl``: the code's
            with the squared difference of means that a KL divergence has.
        scored: ``trained``: the client's model right after its local training, the released code's rule; ``mixture``:
            the merged extractors with the client's mixed eraser, as other personal methods are scored here.
        weighting: of running statistics, and of everything with ``consensus=mean``: ``uniform`` (the released code), or
            by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point(
            "score",
            released="trained",
            setting="scored",
            meanings={
                "trained": "the client's model right after local training",
                "mixture": "merged extractors with the mixed eraser",
            },
        ),
        Point(
            "regulariser",
            "printed",  # second-hand
            "released",
            setting="form",
            meanings={
                "printed": "squared distances for each layer and channel",
                "released": "one running pair for all layers, with mu^2 - F^2",
                "kl": "the same with (mu - F)^2",
            },
        ),
        Point("channels of the extractor", 2, 2, setting="split"),
        Point("temperature of the mixture", released=0.5, setting="similarity_temperature"),
        Point("average of statistics", released="uniform", setting="weighting"),
        Point(
            "weights of the regulariser",
            released="0.05 and growth 0.05 on Office-Caltech, 0.5 and 0.001 on PACS",
            ours="0.01 and growth 0.1; the tables' rows: released",
        ),
        Point(
            "eraser behind linear layers",
            "a 1x1 convolution, behind convolutions too",  # second-hand
            "a factor per channel; 3x3 behind convolutions",
            "released",
        ),
        Point("padding of split 3x3 layers", released="none", ours="that of the layer"),
        Point("last step of an epoch", released="a full batch of a new shuffle", ours="the samples that are left"),
        Point("shortest vector of the hull", released="by a general solver", ours="by Wolfe's algorithm, exactly"),
        Point("factor on the rate per round", 0.998, 0.9998, "none; train.step_factor"),
        Point("model for unseen clients", ours="with the plain mean of the erasers"),
    )

    capturable: ClassVar[bool] = True
    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "split": None,
        "consistency": 0.0,
        "consensus": "mean",
        "scored": "mixture",
        "weighting": "samples",
    }
    averages: ClassVar[bool] = False

    split: Literal[1, 2] | None = 2
    consistency: Annotated[NonNegative, Search(0.001, 10.0)] = 0.01
    similarity_temperature: Annotated[Positive, Search(0.05, 5.0)] = 0.5
    depth_growth: NonNegative = 0.1
    consensus: Literal["min_norm", "mean"] = "min_norm"
    form: Literal["released", "printed", "kl"] = "released"
    scored: Literal["trained", "mixture"] = "trained"
    weighting: Weighting = "uniform"

    # ---- the model -------------------------------------------------------------------------------------------------

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """Split every convolution and hidden linear layer that batch normalisation follows; shortcuts stay.

        Raises:
            ConfigError: the network has no such layer, or its backbone does not train.
        """
        if self.split is None:
            return model
        if getattr(model, "frozen", False):
            raise ConfigError(
                "model.freeze=backbone: fdse adds layers of its own to the backbone, which must train; "
                "set model.freeze=none, or method.split=null method.scored=mixture"
            )
        with initialised(seed, "split layers"):
            count = split_layers(model, self.split)
        if not count:
            raise ConfigError(
                "method=fdse splits layers that batch normalisation follows, and this network has none; set "
                "model.norm=batch, choose another model, or set method.split=null method.scored=mixture"
            )
        return model

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return all names except those of the erasers' running statistics."""
        shared: set[str] = set()
        for name in model.state_dict():
            if not is_eraser(name) or name.endswith((".weight", ".bias")):
                shared.add(name)
        return shared

    @property
    def keeps_step(self) -> bool:
        """Return False: a client keeps its own trained model for its score."""
        return False

    # ---- how it is scored ------------------------------------------------------------------------------------------

    @property
    def adapts(self) -> bool:
        """Whether a client's own tensors are installed for its score."""
        return self.split is not None or self.scored == "trained"

    @property
    def personal(self) -> bool:
        """Return whether each client's own model is scored, with its eraser or as it was trained."""
        return self.adapts

    def adapt(self, local: ClientContext) -> None:
        """Install the client's mixed eraser, or the model that it trained last."""
        install_tensors(local.model, self.own_weights(local.extra, local.kept, local.client.index))

    @property
    def adapts_to_data(self) -> bool:
        """Return False: the tensors were made in training."""
        return False

    def own_weights(self, extra: Mapping[str, Tensor], kept: Mapping[str, Tensor], place: int) -> Mapping[str, Tensor]:
        """Return the client's mixed eraser, or the model that it trained last."""
        return {**own_eraser(extra, place), **under_prefix(TRAINED, kept)}

    # ---- on the device ---------------------------------------------------------------------------------------------

    def begin(self, local: ClientContext) -> None:
        """Install the client's mixed eraser."""
        install_tensors(local.model, own_eraser(local.extra, local.client.index))

    def _regularises(self, local: ClientContext) -> bool:
        """Return whether the regulariser applies: not in round 1, whose statistics are an untrained network's."""
        return self.split is not None and self.consistency > 0 and local.round > 1

    def compute(
        self, model: nn.Module, images: Tensor, local: ClientContext
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return also each layer's mean (and mean square) over positions before its last normalisation, by image."""
        if not model.training or not self._regularises(local):
            return super().compute(model, images, local)
        inputs: list[Tensor] = []

        def record(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:  # noqa: ARG001
            inputs.append(arguments[0])

        handles = [layer.register_forward_pre_hook(record) for layer in shared_norms(model).values()]
        features, logits = model(images)
        for handle in handles:
            handle.remove()
        extra: dict[str, Tensor] = {}
        for place, maps in enumerate(inputs):
            values = maps.to(working_dtype(maps)).flatten(1).unflatten(1, (maps.shape[1], -1))
            extra[f"mean/{place}"] = values.mean(2)
            if self.form == "printed":
                extra[f"square/{place}"] = values.square().mean(2)
        return features, logits, extra

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy, and from round 2 the regulariser."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self._regularises(local):
            terms["consistency"] = self.consistency * self._regulariser(batch, local)
        return Losses(terms)

    def _regulariser(self, batch: Batch, local: ClientContext) -> Tensor:
        received: list[Statistics] = local.cached("received", lambda: received_statistics(local))
        means = list(under_prefix("mean/", batch.extra).values())
        if self.form == "printed":
            squares = list(under_prefix("square/", batch.extra).values())
            running = local.cached("running", lambda: [item.copy() for item in received])
            return printed_regulariser(means, squares, received, running, self.depth_growth)
        one_pair = local.cached("running", Running)
        return released_regulariser(means, received, one_pair, self.depth_growth, divergence=self.form == "kl")

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the model without the erasers' running statistics."""
        kept: dict[str, Tensor] = {}
        if self.scored == "trained":
            shared = self.shared_names(local.model)
            for name, tensor in local.model.state_dict().items():
                if name in shared:
                    kept[TRAINED + name] = tensor.detach().clone()
        return Upload(local=kept)

    # ---- on the server ---------------------------------------------------------------------------------------------

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state, in which all clients have the same eraser."""
        tables: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if is_eraser(name):
                tables[ERASERS + name] = torch.stack([tensor] * server.client_count)
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), tables, round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """Return the model and the erasers of all clients."""
        return Download(state.weights, extra=state.extra)

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Merge extractors by consensus, and mix the participants' erasers by similarity.

        A client that sat out keeps its eraser. The eraser in the model itself is the plain mean of the uploaded ones.
        """
        weights = self.average(updates, server)
        if self.consensus == "min_norm":
            for name in sorted(server.parameters):
                if not is_eraser(name):
                    sent = [update.weights[name] for update in updates]
                    weights[name] = consensus_step(state.weights[name], sent)
        places = torch.tensor([update.client.index for update in updates])
        tables: dict[str, Tensor] = {}
        for name, table in under_prefix(ERASERS, state.extra).items():
            sent = [update.weights[name] for update in updates]
            mixed = similarity_mixture(torch.stack(sent), self.similarity_temperature)
            tables[ERASERS + name] = table.index_copy(0, places, mixed)
        return GlobalState(weights, state.prototypes, tables, round=state.round)


# ---- its layer -------------------------------------------------------------------------------------------------------


class SplitLayer(nn.Module):
    """An extractor and an eraser in the place of a layer ``x -> [B, O, ...]`` that batch normalisation follows.

    ``u = eraser_norm(extractor(x))`` with ``ceil(O / groups)`` channels, ``v = eraser(u)`` depthwise; the output is
    ``cat(u, v)[:, :O] + bias``, or ``u + v + bias`` with one group. There is no activation in between. The eraser is
    3x3 after a convolution, and one factor per channel after a linear layer.

    Args:
        layer: the layer to replace: its sizes, stride, padding and dilation are taken over, its weights are not.
        groups: 1 or 2.
        norm: name of the batch normalisation that follows, in the same module.
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, groups: int, norm: str) -> None:
        super().__init__()
        self.norm = norm
        self.groups = groups
        self.extractor: nn.Module
        self.eraser: nn.Module
        if isinstance(layer, nn.Conv2d):
            self.channels = layer.out_channels
            width = math.ceil(self.channels / groups)
            sizes = (
                both_directions(layer.kernel_size),
                both_directions(layer.stride),
                both_directions(layer.padding),
                both_directions(layer.dilation),
            )
            self.extractor = nn.Conv2d(layer.in_channels, width, *sizes)
            self.eraser_norm: nn.Module = nn.BatchNorm2d(width)
            self.eraser = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        else:
            self.channels = layer.out_features
            width = math.ceil(self.channels / groups)
            self.extractor = nn.Linear(layer.in_features, width)
            self.eraser_norm = nn.BatchNorm1d(width)
            self.eraser = nn.Conv1d(width, width, 1, groups=width, bias=False)
        self.bias = nn.Parameter(torch.zeros(self.channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, O, U, V]`` of maps, ``[B, O]`` of vectors."""
        extracted = self.eraser_norm(self.extractor(inputs))
        if extracted.ndim == 2:
            erased = self.eraser(extracted[:, :, None])[:, :, 0]
        else:
            erased = self.eraser(extracted)
        if self.groups == 1:
            joined = extracted + erased
        else:
            joined = torch.cat([extracted, erased], 1)[:, : self.channels]
        return joined + self.bias.view(-1, *[1] * (joined.ndim - 2))


def both_directions(sizes: str | tuple[int, ...]) -> tuple[int, int]:
    """Return a convolution's sizes for both directions."""
    assert not isinstance(sizes, str)
    return sizes[0], sizes[1]


def split_layers(module: nn.Module, groups: int) -> int:
    """Replace every layer of ``module`` that batch normalisation follows, in place; return their number.

    A layer is followed by batch normalisation if the next child of the same module is one of its size. Convolutions in
    groups, and shortcuts (``downsample`` of a residual block), stay as they are.
    """
    count = 0
    children = list(module.named_children())
    for (name, layer), (norm_name, norm) in pairwise(children):
        if is_splittable(layer, norm):
            assert isinstance(layer, nn.Conv2d | nn.Linear)
            setattr(module, name, SplitLayer(layer, groups, norm_name))
            count += 1
    for name, child in children:
        if name != "downsample":
            count += split_layers(child, groups)
    return count


def is_splittable(layer: nn.Module, norm: nn.Module) -> bool:
    """Return whether ``norm`` is a batch normalisation of the output of ``layer``."""
    if not isinstance(norm, _BatchNorm):
        return False
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and not isinstance(layer.padding, str)
        return plain and layer.out_channels == norm.num_features
    return isinstance(layer, nn.Linear) and layer.out_features == norm.num_features


def is_eraser(name: str) -> bool:
    """Whether a tensor of the model's state belongs to an eraser."""
    return ".eraser." in name or ".eraser_norm." in name


def shared_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch normalisation behind each split layer by its name, in the order of the layers."""
    norms: dict[str, nn.Module] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, SplitLayer):
            parent = path.rpartition(".")[0]
            name = f"{parent}.{layer.norm}"
            norms[name] = model.get_submodule(name)
    return norms


@torch.no_grad()
def install_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the model's state."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)


def own_eraser(extra: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    """Return the eraser of the client with index ``place``."""
    own: dict[str, Tensor] = {}
    for name, table in under_prefix(ERASERS, extra).items():
        own[name] = table[place]
    return own


# ---- its regulariser -------------------------------------------------------------------------------------------------


@dataclass
class Statistics:
    """Running mean and variance of a layer's channels, ``[C_l]`` each."""

    mean: Tensor
    variance: Tensor

    def copy(self) -> "Statistics":
        """Return a copy with tensors of its own."""
        return Statistics(self.mean.clone(), self.variance.clone())


@dataclass
class Running:
    """The released code's one running mean and variance for all layers; none before the first layer of a round."""

    mean: Tensor | None = None
    variance: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None

    def update(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a layer's scalars, and return the new pair."""
        if self.mean is None or self.variance is None:
            self.mean, self.variance = mean, variance
        else:
            self.mean = (1 - MOMENTUM) * self.mean + MOMENTUM * mean
            self.variance = (1 - MOMENTUM) * self.variance + MOMENTUM * variance
        return self.mean, self.variance

    def detach(self) -> None:
        """Cut the pair off from the batch's graph; its tensors stay the same from batch to batch."""
        if self.mean is None or self.variance is None:
            return
        if self.kept is None:
            self.kept = self.mean.detach().clone(), self.variance.detach().clone()
        else:
            self.kept[0].copy_(self.mean.detach())
            self.kept[1].copy_(self.variance.detach())
        self.mean, self.variance = self.kept


def received_statistics(local: ClientContext) -> list[Statistics]:
    """Return the running statistics behind each split layer as received: global means and variances."""
    statistics: list[Statistics] = []
    for name in shared_norms(local.model):
        statistics.append(Statistics(local.weights[f"{name}.running_mean"], local.weights[f"{name}.running_var"]))
    return statistics


def depth_weights(count: int, growth: float, like: Tensor) -> Tensor:
    """``[L]``: ``exp(growth l) / sum`` for layers l = 0 .. L-1."""
    return torch.softmax(growth * torch.arange(count, dtype=like.dtype, device=like.device), 0)


def released_regulariser(
    means: Sequence[Tensor],
    received: Sequence[Statistics],
    running: Running,
    growth: float,
    *,
    divergence: bool = False,
) -> Tensor:
    """Return the regulariser of the released code; see docs/methods.md.

    With ``f_l`` the batch's mean of a layer's channels, F and V follow ``mean_c f_l`` and ``var_c f_l`` from layer to
    layer and batch to batch. R is the sum over layers of ``o_l mean_c[(mu^2 - F^2) / (2 V) + (log(V / (q + e)) +
    q / (V + e)) / 2]``, with the released code's e of 1e-8, which counts while erasers are new and V is small.

    Args:
        means: of each layer ``[B, C_l]``, over positions.
        received: global mean mu and variance q of each layer.
        running: F and V so far; moved on, and detached from the batch afterwards.
        growth: beta of the layers' weights o_l.
        divergence: take the KL divergence ``KL(N(mu, q) || N(F, V))`` instead.
    """
    weights = depth_weights(len(means), growth, means[0])
    total = means[0].new_zeros(())
    for values, known, weight in zip(means, received, weights, strict=True):
        channels = values.mean(0)
        mean, variance = running.update(channels.mean(), channels.var())
        if divergence:
            distance = (known.variance + (known.mean - mean).square()) / variance
            layer = ((variance / known.variance).log() + distance - 1) / 2
        else:
            location = (known.mean.square() - mean.square()) / (2 * variance)
            ratio = (variance / (known.variance + EPSILON)).log() + known.variance / (variance + EPSILON)
            layer = location + ratio / 2
        total = total + weight * layer.mean()
    running.detach()
    return total


def printed_regulariser(
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    received: Sequence[Statistics],
    running: Sequence[Statistics],
    growth: float,
) -> Tensor:
    """Return the regulariser with squared distances, as second-hand notes give the paper; see docs/methods.md.

    R is the sum over layers of ``o_l [mean_c (F - mu)^2 + (mean_c V - mean_c q)^2]``, where F and V are running mean
    and variance of each channel, the present batch included.

    Args:
        means: of each layer ``[B, C_l]``, over positions.
        squares: likewise, of the squares.
        received: global mean mu and variance q of each layer.
        running: F and V of each layer so far; moved on, and detached from the batch afterwards.
        growth: beta of the layers' weights o_l.
    """
    weights = depth_weights(len(means), growth, means[0])
    total = means[0].new_zeros(())
    for values, second, known, item, weight in zip(means, squares, received, running, weights, strict=True):
        batch_mean = values.mean(0)
        batch_variance = second.mean(0) - batch_mean.square()
        mean = (1 - MOMENTUM) * item.mean + MOMENTUM * batch_mean
        variance = (1 - MOMENTUM) * item.variance + MOMENTUM * batch_variance
        layer = (mean - known.mean).square().mean() + (variance.mean() - known.variance.mean()).square()
        total = total + weight * layer
        item.mean.copy_(mean.detach())
        item.variance.copy_(variance.detach())
    return total


# ---- its server ------------------------------------------------------------------------------------------------------


def similarity_mixture(rows: Tensor, temperature: float) -> Tensor:
    """Return ``sum_j softmax_j(cos(t_k, t_j) / temperature) t_j`` for each row t_k of ``rows [n, ...]``."""
    table = rows.double().flatten(1)
    units = normalise_rows(table)
    shares = torch.softmax(units @ units.T / temperature, 1)
    return (shares @ table).to(rows.dtype).view_as(rows)


def consensus_step(before: Tensor, sent: Sequence[Tensor]) -> Tensor:
    """Return ``p + mean_k |D_k| sum_k lambda_k D_k / |D_k|`` for the clients' changes ``D_k = p_k - p`` of a tensor.

    The lambda are those of :func:`min_norm_point`. Equal changes give the mean, opposite ones no step.

    Args:
        before: p, any shape.
        sent: the clients' tensors of the same shape.
    """
    parts = [before, *sent]
    gram = torch.zeros(len(sent), len(sent), dtype=torch.float64)
    rows = [part.reshape(-1) for part in parts]
    size = max(1, STACKED_ELEMENTS // len(parts))
    for start in range(0, before.numel(), size):
        stacked = torch.stack([row[start : start + size] for row in rows]).double()
        moves = stacked[1:] - stacked[0]
        gram += moves @ moves.T
    lengths = gram.diagonal().clamp_min(0).sqrt()
    scales = 1 / (lengths + EPSILON)
    shares = min_norm_point(gram * scales[:, None] * scales)
    coefficients = lengths.mean() * shares * scales

    def step(stacked: Tensor) -> Tensor:
        values = stacked.double()
        return values[0] + coefficients @ (values[1:] - values[0])

    return number_by_number(parts, step).to(before.dtype)


def min_norm_point(gram: Tensor) -> Tensor:
    """Return the weights of the shortest vector in the convex hull of n vectors: ``[n]`` >= 0, of sum 1.

    Wolfe's algorithm ("Finding the nearest point in a polytope", 1976) on the vectors' inner products. The algorithm
    ends after a finite number of steps. If several weights give the shortest vector, one of them is returned.

    Args:
        gram: ``[n, n]`` float64, positive semi-definite.
    """
    count = len(gram)
    tolerance = 1e-12 * max(1.0, float(gram.diagonal().max()))
    weights = torch.zeros(count, dtype=torch.float64)
    chosen = [int(gram.diagonal().argmin())]
    weights[chosen] = 1.0
    for _ in range(100 * count):
        products = gram @ weights
        nearest = int(products.argmin())
        if nearest in chosen or float(products[nearest]) >= float(weights @ products) - tolerance:
            break
        chosen.append(nearest)
        chosen = shrink_to_face(gram, weights, chosen)
    return weights


def shrink_to_face(gram: Tensor, weights: Tensor, chosen: list[int]) -> list[int]:
    """Move ``weights``, in place, to the shortest point of a face of the hull of ``chosen``; return the face's vectors.

    While the shortest point of their affine hull lies outside the convex hull, go towards it up to the boundary, and
    drop the vectors whose weight becomes 0.
    """
    while True:
        target = affine_minimum(gram[chosen][:, chosen])
        if bool((target > 0).all()):
            weights[chosen] = target
            return chosen
        present = weights[chosen]
        outside = target <= 0
        reach = float((present[outside] / (present[outside] - target[outside]).clamp_min(1e-300)).min())
        moved = present + reach * (target - present)
        last = int(torch.where(outside, moved, torch.inf).argmin())
        moved[last] = 0.0
        weights[chosen] = moved.clamp_min(0)
        chosen = [index for index in chosen if float(weights[index]) > 0]


def affine_minimum(gram: Tensor) -> Tensor:
    """Return ``[n]`` of sum 1: the weights of the shortest vector in the affine hull of n vectors."""
    count = len(gram)
    system = torch.ones(count + 1, count + 1, dtype=torch.float64)
    system[0, 0] = 0.0
    system[1:, 1:] = gram
    right = torch.zeros(count + 1, dtype=torch.float64)
    right[0] = 1.0
    solution = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[1:, 0]
    return solution / solution.sum()
