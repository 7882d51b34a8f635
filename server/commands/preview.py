"""``goldfinch run --dry-run``: what a run would be, without training anything or writing a file."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from omegaconf import OmegaConf

from common.errors import DataError
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.wire.payload import Payload, cast_down, encoded_size
from server.engines.inline import InlineEngine
from strategies.core.federation import Federation

HERE = {"name": "inline", "device": "client.local.local_device"}


def preview(settings: RunSettings) -> None:
    """Print the composed configuration, the clients with their samples, and about how many bytes a round moves."""
    print(OmegaConf.to_yaml(OmegaConf.create(dict(settings.raw))))
    federation = Federation(settings)
    names = federation.registry.expected
    print(f"# {len(names)} clients, output {settings.output_folder}")
    try:
        engine = InlineEngine(replace(settings, engine=HERE))
        engine.register(names, federation.registry.admit, 0.0)
        engine.close()
        for registration in federation.registry.registrations.values():
            print(f"#   {registration.client:24} {registration.samples:>8} samples")
    except DataError as error:  # on a SuperLink the data are on the devices
        print("\n".join(f"#   {name}" for name in names))
        print(f"# samples are not known here: {error}")
    sampled = settings.rounds.sampled(len(names))
    sizes = bytes_of_a_round(federation)
    for way, size in sizes.items():
        print(f"# about {size * sampled:,} bytes {way} a round: {sampled} clients, {size:,} each")


def bytes_of_a_round(federation: Federation) -> Mapping[str, int]:
    """Bytes down to and up from one client over a round's exchanges.

    A prototype set is counted as one row per class, unless the method allows more; what only the data determine (such
    as the number of clusters) is not.
    """
    server, method, settings = federation.server, federation.method, federation.settings
    state = federation.initial_state()
    samples = [client.samples for client in federation.registry.clients()] or [0]
    sizes = {"down": 0, "up": 0}
    for exchange in method.exchanges:
        federation.begin(1, exchange, score=exchange == method.scored_at)
        expected = method.expects(server)
        rows = server.class_count * (expected.most_rows or 1)
        shared = PrototypeSet(
            torch.zeros(rows, server.feature_size),
            torch.arange(server.class_count).repeat_interleave(rows // server.class_count),
            torch.ones(rows),
        )
        known = {"samples": round(sum(samples) / len(samples)), None: 0}
        extra = {
            name: torch.empty([length if isinstance(length, int) else known[length] for length in shape], dtype=dtype)
            for name, (dtype, shape) in expected.extra.items()
        }
        upload = Payload({}, server.shared if expected.weights else {}, shared if expected.prototypes else None, extra)
        message = federation.message(state)
        if message.prototypes is not None and not len(message.prototypes):  # as from the second round on
            message = replace(message, prototypes=shared)
        sizes["down"] += encoded_size(message)
        sizes["up"] += encoded_size(cast_down(upload, settings.rounds.transport))
    return sizes
