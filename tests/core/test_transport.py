"""Half-precision transport: rounded once each way, refused rather than infinite; and the ledger of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.nets import shared_weights
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings

from common.errors import PayloadError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.wire.messages import request_text
from common.wire.payload import TRANSPORTS, Payload, cast_down, cast_up, encode
from server.run.files import PARTS
from strategies.core.flower import answer_to_fit_res, request_to_fit_ins

HALVES = ["bfloat16", "float16"]
TENSORS = [f"bytes_{way}_{part}" for way in ("down", "up") for part in ("weights", "prototypes", "extra")]


def payload() -> Payload:
    draws = generator(0, "transport")
    weights = {"w": torch.randn(7, 5, generator=draws), "batches": torch.tensor(7), "mask": torch.tensor([True])}
    weights |= {"scale": 1 + 1e-3 * torch.rand(5, generator=draws), "share": torch.tensor(0.7)}
    rows = PrototypeSet(torch.randn(3, 4, generator=draws), torch.tensor([0, 1, 1]), torch.ones(3))
    extra = {"mean": torch.rand(2, dtype=torch.float64), "x": torch.rand(3, 1)}
    return Payload(weights, rows, extra, header={"a": 1})


@pytest.mark.parametrize("transport", HALVES)
def test_matrices_are_rounded_once_and_all_else_is_exact(transport: str) -> None:
    """Also vectors and scalars: next to 1, where batch norm's scales begin, bfloat16 has no number within 0.003."""
    before = payload()
    after = cast_up(cast_down(before, transport), transport)
    for part in ("weights", "extra"):
        for name, tensor in getattr(before, part).items():
            found = getattr(after, part)[name]
            assert found.dtype == tensor.dtype
            narrow = tensor.dtype == torch.float32 and tensor.ndim > 1
            assert torch.equal(found, tensor.to(TRANSPORTS[transport]).float() if narrow else tensor)
    assert not torch.equal(after.weights["w"], before.weights["w"])
    assert after.prototypes is before.prototypes
    assert cast_down(after, transport).tensors().keys() == before.tensors().keys()


def test_float32_is_untouched() -> None:
    before = payload()
    assert cast_down(before, "float32") is before
    assert cast_up(before, "float32") is before


@pytest.mark.parametrize(
    ("transport", "value", "reason"),
    [
        ("float16", 70_000.0, r"cannot carry layer\.w: it reaches 7e\+04.*bfloat16"),
        ("bfloat16", 3.4e38, "reaches"),
        ("float16", float("nan"), "not finite.*learning_rate"),
        ("bfloat16", float("-inf"), "not finite"),
    ],
)
def test_what_does_not_fit_is_named_and_not_sent(transport: str, value: float, reason: str) -> None:
    for part in ("weights", "extra"):
        with pytest.raises(PayloadError, match=reason):
            cast_down(Payload(**{part: {"layer.w": torch.tensor([[1.0, value]])}}), transport)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", HALVES)
def test_full_precision_from_a_sender_is_refused(transport: str) -> None:
    with pytest.raises(PayloadError, match=f"transport is {transport}"):
        cast_up(payload(), transport)


def tensor_bytes(done: Run) -> list[dict[str, str]]:
    """Bytes of tensors by client and exchange; headers hold seconds and so vary in length."""
    return [{key: value for key, value in row.items() if key in TENSORS} for row in done.replies()]


@pytest.mark.parametrize("method", ["fpl", "adcol"])
def test_half_the_bytes_and_the_same_result_with_and_without_the_codec(method: str, tmp_path: Path) -> None:
    runs = {
        (transport, wire): run(
            toy_settings(
                method, tmp_path / transport / str(wire), rounds={"transport": transport}, engine={"wire": wire}
            )
        )
        for transport, wire in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    }
    assert runs["bfloat16", True].sha256 == runs["bfloat16", False].sha256 != runs["float32", False].sha256
    full, half = (runs[transport, False].summary["bytes_by_part"] for transport in ("float32", "bfloat16"))
    for way in ("down", "up"):
        for part in ("weights", "extra"):
            assert 0.5 * full[way][part] <= half[way][part] <= 0.51 * full[way][part]
    assert half["up"]["prototypes"] == full["up"]["prototypes"]
    assert tensor_bytes(runs["bfloat16", True]) == tensor_bytes(runs["bfloat16", False])


def test_the_scales_of_batch_norm_train_although_their_steps_are_short(tmp_path: Path) -> None:
    train = {"rounds": 3, "learning_rate": 0.001, "momentum": 0.0, "weight_decay": 0.0}
    run(toy_settings("fedavg", tmp_path, rounds={"transport": "bfloat16"}, train=train))
    weights = shared_weights(tmp_path)
    scale = weights["backbone.bn1.weight"]
    assert 0 < float((scale - 1).abs().max()) < 2**-8, "shorter steps than bfloat16 can take from 1"
    assert float((scale != 1).float().mean()) > 0.9


# ---- recorded bytes ------------------------------------------------------------------------------------------------


def test_recorded_bytes_are_those_that_flower_carries(tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path)
    engine = TouchedEngine(settings)
    done = run(settings, engine)
    rows = {(row["round"], row["client"]): row for row in done.replies()}
    assert len(rows) == len(engine.messages)
    for item in engine.messages:
        assert item.reply is not None
        row = rows[str(item.request.round), item.request.client]
        sent = request_to_fit_ins(encode(item.message), item.request)
        text = str(sent.config["request"])
        assert text == request_text(item.request)
        assert int(row["bytes_down"]) == len(sent.parameters.tensors[0]) + len(text)
        came = answer_to_fit_res(item.reply.payload)
        assert int(row["bytes_up"]) == sum(len(tensor) for tensor in came.parameters.tensors)
        for way, payload_ in (("down", item.message), ("up", item.reply.payload)):
            parts = payload_.part_bytes()
            assert {part: int(row[f"bytes_{way}_{part}"]) for part in parts} == parts
            assert sum(int(row[f"bytes_{way}_{part}"]) for part in PARTS) == int(row[f"bytes_{way}"])
    for way in ("down", "up"):
        total = sum(int(row[f"bytes_{way}"]) for row in rows.values())
        assert done.summary["bytes_by_part"][way]["total"] == done.summary["bytes"][way] == total


def test_failures_and_refusals_cost_bytes_too(tmp_path: Path) -> None:
    def spoil(request, payload_):
        spoiled = {name: torch.zeros_like(tensor) for name, tensor in payload_.weights.items()}
        return Payload(spoiled, header=payload_.header) if request.client == "noisy-0" and request.train else payload_

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 1}, rounds={"quorum": 0.3})
    done = run(settings, TouchedEngine(settings, failing=lambda request: request.client == "dark-0", edit=spoil))
    rows = {row["client"]: row for row in done.replies() if row["round"] == "1"}
    assert rows["dark-0"]["status"] == "failed"
    assert 0 < int(rows["dark-0"]["bytes_up_header"]) == int(rows["dark-0"]["bytes_up"])
    assert rows["noisy-0"]["status"] == "refused"
    assert rows["noisy-0"]["bytes_up_weights"] == rows["bright-0"]["bytes_up_weights"] != "0"
    assert len({row["bytes_down"] for row in rows.values()}) <= 3
    assert all(int(row["bytes_down_weights"]) for row in rows.values())
