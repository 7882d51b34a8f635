"""FCCL+: two exchanges, what travels in them, the means on the server, and the own previous model as teacher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.exchanges import local_exchange
from support.halves import CLASSES, Half, elements, run_server, updates
from support.nets import kept, trained
from support.own_states import own_state
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings

from common.data.public import PublicImages
from common.data.textures import Textures
from common.errors import ConfigError, EngineError, PayloadError
from common.settings import load_settings
from common.storage import under_prefix
from strategies.core.method import Trained
from strategies.core.robust import GeometricMedian
from strategies.fccl_plus import (
    FCCLPlus,
    cross_correlation,
    nontarget_distillation,
    pairwise_similarities,
    similarity_distillation,
)

PUBLIC = PublicImages(Textures(image_size=16), "textures", 32)
SMALL = {"public": PUBLIC, "public_batch": 16, "public_learning_rate": 1e-3, "distillation": 1.0}


def messages_of(done, exchange, number):
    return {item.request.client: item for item in trained(done, exchange) if item.request.round == number}


# ---- the server ------------------------------------------------------------------------------------------------------


def answers(number, images):
    draws = torch.Generator().manual_seed(number)
    return {
        index: {
            "logits": torch.randn(32, CLASSES, generator=draws),
            "similarities": torch.randn(32, 15, generator=draws),
            "images": torch.tensor(fingerprint),
        }
        for index, fingerprint in enumerate(images)
    }


@pytest.mark.parametrize("images", [(7, 7, 7), (7, 9, 7)], ids=["equal", "one client has other images"])
def test_the_means_are_plain_and_over_those_with_the_same_images(images):
    sent = answers(1, images)
    state = run_server(FCCLPlus(**SMALL), [updates(1, extra=sent)])[1]
    chosen = [sent[index] for index, fingerprint in enumerate(images) if fingerprint == 7]
    for name in ("logits", "similarities"):
        columns = zip(*(elements(extra[name]) for extra in chosen), strict=True)
        assert elements(state.extra[name]) == pytest.approx([sum(c) / len(c) for c in columns], abs=1e-6)
    assert int(state.extra["images"]) == 7
    before = run_server(FCCLPlus(**SMALL), [])[0].weights  # the model waits for the second exchange
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in before.items())


def test_a_client_with_other_images_does_not_end_a_run_with_a_robust_rule():
    """Two of three agree, and the geometric median needs three."""
    sent = answers(1, (7, 9, 7))
    robust = Half(aggregation=GeometricMedian())
    means = FCCLPlus(**SMALL).mean_outputs(updates(1, extra=sent), robust)
    expected = torch.stack([sent[0]["logits"], sent[2]["logits"]]).mean(0)
    assert torch.allclose(means["logits"], expected, atol=1e-6)


def test_a_similarity_that_is_no_cosine_is_refused():
    method, sent = FCCLPlus(**SMALL), answers(1, (7,))
    update = updates(1, who=(0,), extra=sent)[0]
    method.inspect(update, Half())
    sent[0]["similarities"][3, 4] = -51.0
    with pytest.raises(PayloadError, match="51 is no cosine"):
        method.inspect(update, Half())
    method.inspect(update, Half(exchange="collaborate"))


def test_a_cosine_that_the_transport_rounded_up_is_accepted():
    """1 / 0.07 is 14.2857, and bfloat16 has 14.3125."""
    method, sent = FCCLPlus(**SMALL, similarity_temperature=0.07), answers(1, (7,))
    sent[0]["similarities"].clamp_(-14, 14)[3, 4] = torch.tensor(1 / 0.07).bfloat16().float()
    update = updates(1, who=(0,), extra=sent)[0]
    method.inspect(update, Half())
    sent[0]["similarities"][3, 4] = 1.02 / 0.07
    with pytest.raises(PayloadError, match=r"14\.6 is no cosine"):
        method.inspect(update, Half())


@pytest.mark.parametrize("unseen", ["test", "whole"])
def test_public_images_of_a_domain_that_is_scored_as_unseen_are_refused(unseen):
    """Every client would train on its images, unlabelled, and the run would score them."""
    words = ["method=fccl_plus", "data=glyphs", "method.public.source._target_=common.data.glyphs.Glyphs"]
    words += ["protocol=leave_one_out", "protocol.leave_out=[sketch]", f"protocol.unseen={unseen}"]
    with pytest.raises(ConfigError, match=r"method\.public takes training images of sketch, which no client has"):
        load_settings([*words, "method.public.domain=sketch"])
    assert load_settings([*words, "method.public.domain=printed"]).unseen_domains == ("sketch",)
    assert load_settings(words[:1] + words[3:] + ["data=glyphs"]).method.public.domain == "textures"


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_the_answers_are_those_of_the_model_on_the_same_batches(tmp_path):
    plain = replace(Toy().augmentation, crop_padding=0)
    hyper = {**SMALL, "public_mode": "eval"}
    local = local_exchange(toy_settings("fccl_plus", tmp_path, hyper=hyper, data=Toy(augmentation=plain)))
    sent = local.method.upload(local, Trained(None, 1, {})).extra
    with torch.no_grad():
        passes = [local.model.eval()(plain.test(images)) for images in PUBLIC.load().split(16)]
    torch.testing.assert_close(sent["logits"], torch.cat([logits for _, logits in passes]), rtol=1e-4, atol=1e-5)
    similar = torch.cat([pairwise_similarities(features, temperature=0.02) for features, _ in passes])
    torch.testing.assert_close(sent["similarities"], similar, rtol=1e-3, atol=1e-3)


def test_the_public_steps_lower_the_public_loss_and_in_evaluation_mode_move_no_statistics(tmp_path):
    settings = toy_settings("fccl_plus", tmp_path, hyper={**SMALL, "public_mode": "eval"}, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings))
    model = settings.model.build(4, 16, 0)
    images = settings.data.augmentation.test(PUBLIC.load())[:16]
    for client, item in messages_of(done, "collaborate", 1).items():
        means = [item.message.extra[name][:16] for name in ("logits", "similarities")]
        before = under_prefix("local/own/", kept(tmp_path)[client])
        losses = []
        for weights in (before, item.reply.payload.weights):
            model.load_state_dict(weights)
            with torch.no_grad():
                losses.append(float(settings.method.public_loss(*model.eval()(images), *means)))
        assert losses[1] < losses[0]
        statistics = set(dict(model.named_buffers()))
        assert all(torch.equal(before[name], item.reply.payload.weights[name]) for name in statistics)


def test_the_public_loss_is_the_sum_of_the_shared_losses():
    draws = torch.Generator().manual_seed(0)
    features, logits, mean = (torch.rand(16, size, generator=draws) for size in (8, 4, 4))
    similar = pairwise_similarities(torch.rand(16, 8, generator=draws))
    method = FCCLPlus(**SMALL, correlation=2.0, similarity=5.0)
    wanted = 2.0 * cross_correlation(logits, mean)
    wanted = wanted + similarity_distillation(features, similar, temperature=0.02, scale=5.0)
    torch.testing.assert_close(method.public_loss(features, logits, mean, similar), wanted)


def test_the_teacher_is_the_own_model_after_the_last_local_training(tmp_path):
    """One step of hardly any length over the whole split, images as they are: the second round's reported loss is that
    of the received model against the model that the client had after local training in the first."""
    train = {"learning_rate": 1e-12, "batch_size": 64, "momentum": 0.0, "weight_decay": 0.0}
    plain = replace(Toy().augmentation, crop_padding=0)
    hyper = {**SMALL, "public_learning_rate": 0.02}
    settings = toy_settings("fccl_plus", tmp_path, hyper=hyper, data=Toy(augmentation=plain), train=train)
    done = run(settings, TouchedEngine(settings))
    first, second = messages_of(done, "train", 1), messages_of(done, "train", 2)
    student, teacher = settings.model.build(4, 16, 0), settings.model.build(4, 16, 0)
    for client, item in second.items():
        assert set(first[client].reply.answer.losses) == {"cross_entropy"}
        own = own_state(next((tmp_path / "clients").glob("*")) / client, before=4)  # as round 2 began
        teacher.load_state_dict(under_prefix("local/own/", own))
        student.load_state_dict(item.message.weights)
        assert not torch.allclose(student.head.weight, teacher.head.weight, atol=1e-2)
        split = settings.data.load(client.rpartition("-")[0]).train
        images = plain.test(split.images)
        with torch.no_grad():
            logits, taught = student.train()(images)[1], teacher.eval()(images)[1]
            value = nontarget_distillation(logits, taught, split.labels, temperature=3.0)
        assert item.reply.answer.losses["distillation"] == pytest.approx(float(value), rel=1e-3)


def test_a_device_with_other_images_is_refused_with_a_message(tmp_path):
    """The other clients agree on a set that is not on this device."""
    settings = toy_settings("fccl_plus", tmp_path, hyper=SMALL, train={"rounds": 1})

    def edit(request, payload):
        if request.exchange != "train" or not request.train:
            return payload
        return replace(payload, extra={**payload.extra, "images": torch.tensor(5)})

    with pytest.raises(EngineError, match=r"public images here are not those of the other clients"):
        run(settings, TouchedEngine(settings, edit=edit))
