"""Hugging Face's Trainer gives the weights of a plain loop."""

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consequent
from integrations import plain

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from consequent.integrations.transformers import AVERAGES, ConsequentialismCallback  # noqa: E402


class Model(nn.Module):
    """A user's own model: the Trainer divides its mean loss by the number of micro-batches."""

    def __init__(self):
        super().__init__()
        self.model = plain.make_model()

    def forward(self, images, labels):
        return {"loss": F.cross_entropy(self.model(images).float(), labels)}


class ToldTheDivisor(Model):
    """A model as the package makes them: told what to divide its loss by, for all micro-batches together."""

    def forward(self, images, labels, num_items_in_batch=None, **others):
        loss = F.cross_entropy(self.model(images).float(), labels, reduction="sum")
        return {"loss": loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)}


def arguments(folder, *, accumulate=1, clip=None, bfloat16=False, epochs=1, **options):
    return transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=plain.BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=clip or 0.0,
        bf16=bfloat16,
        num_train_epochs=epochs,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        save_strategy=options.pop("save_strategy", "no"),
        **options,
    )


def dataset(batches):
    images, labels = plain.make_data(batches)
    return [{"images": x, "labels": t} for x, t in zip(images, labels, strict=True)]


def trainer(model, callbacks, batches, folder, *, ready_made=False, **settings):
    if ready_made:
        optimizer = consequent.CSGD(model, lr=plain.LR, momentum=0.9, damping=plain.DAMPING)
    else:
        optimizer = plain.make_optimizer(model)
    return transformers.Trainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=dataset(batches),
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("how", ["callback", "ready-made"])
@pytest.mark.parametrize("settings", plain.SETTINGS.values(), ids=plain.SETTINGS)
def test_gives_the_weights_of_a_plain_loop(settings, how, tmp_path):
    model, expected = Model(), plain.make_model()
    callback = ConsequentialismCallback(damping=plain.DAMPING)
    callbacks = [callback] if how == "callback" else []
    trainer(model, callbacks, 6, tmp_path, ready_made=how == "ready-made", **settings).train()
    by_hand = plain.train(expected, *plain.make_data(6), **settings)
    plain.check_has_learned(model.model)
    plain.check_equal(model.model, expected)
    if how == "callback":
        assert callback.correction.samples == by_hand.samples == plain.BATCH * settings.get("accumulate", 1)
        assert callback.correction.counters == by_hand.counters


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_divisor_is_what_the_model_is_told(accumulate, tmp_path):
    """The sum is divided, and then the gradients added: the same numbers, rounded in another order."""
    model, expected = ToldTheDivisor(), plain.make_model()
    callback = ConsequentialismCallback(damping=plain.DAMPING)
    trainer(model, [callback], 6, tmp_path, accumulate=accumulate).train()
    plain.train(expected, *plain.make_data(6), accumulate=accumulate)
    for value, theirs in zip(model.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, theirs, rtol=1e-5, atol=1e-6)


def test_an_incomplete_accumulation_at_the_end_of_an_epoch(tmp_path):
    """The Trainer divides by the micro-batches there are, so the mean is one over all their samples."""
    model, expected = Model(), plain.make_model()
    callback = ConsequentialismCallback(damping=plain.DAMPING)
    trainer(model, [callback], 5, tmp_path, accumulate=3).train()
    images, labels = plain.make_data(5)
    optimizer = plain.make_optimizer(expected)
    whole = 3 * plain.BATCH
    plain.train(expected, images[:whole], labels[:whole], accumulate=3, optimizer=optimizer).detach()
    plain.train(expected, images[whole:], labels[whole:], accumulate=2, optimizer=optimizer)
    plain.check_equal(model.model, expected)


@pytest.mark.parametrize("how", ["callback", "ready-made"])
def test_a_resumed_training_gives_the_same_weights(how, tmp_path):
    def train(folder, resume=None):
        model = Model()
        callbacks = [ConsequentialismCallback(damping=plain.DAMPING)] if how == "callback" else []
        options = {"accumulate": 2, "epochs": 2, "save_strategy": "steps", "save_steps": 3}
        trainer(model, callbacks, 4, folder, ready_made=how == "ready-made", **options).train(resume)
        return model

    expected = train(tmp_path / "whole")
    resumed = train(tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-3"))
    plain.check_has_learned(resumed.model)
    plain.check_equal(resumed, expected)


@pytest.mark.parametrize("stops_at", [3, 4])
def test_averages_go_on_where_a_checkpoint_left_them(stops_at, tmp_path):
    """Before a refresh and after one; without them in the checkpoint the weights are others."""

    def train(folder, resume=None):
        model = Model()
        callback = ConsequentialismCallback(damping=plain.DAMPING, averaging=0.9, refresh=3)
        options = {"epochs": 2, "save_strategy": "steps", "save_steps": stops_at}
        training = trainer(model, [callback], 4, folder, **options)
        training.train(resume)
        assert not any(AVERAGES in group for group in training.optimizer.param_groups)
        return model

    expected = train(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / f"checkpoint-{stops_at}"
    plain.check_equal(train(tmp_path / "again", resume=str(checkpoint)), expected)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    del saved["param_groups"][0][AVERAGES]
    torch.save(saved, checkpoint / "optimizer.pt")
    without = train(tmp_path / "without", resume=str(checkpoint))
    pairs = zip(without.parameters(), expected.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


def test_both_dampings_are_refused_at_once():
    with pytest.raises(ValueError, match=r"damping=0\.2 and relative_damping=0\.3: give one"):
        ConsequentialismCallback(damping=0.2, relative_damping=0.3)


@pytest.mark.parametrize("damping", [{}, {"damping": 0.3}, {"relative_damping": 0.3}], ids=str)
def test_counters_go_on_where_a_checkpoint_left_them(damping, tmp_path):
    def train(folder, resume=None, **options):
        callback = ConsequentialismCallback(**damping, exclude=exclude)
        options = {"epochs": 2, "save_strategy": "steps", "save_steps": 3, **options}
        training = trainer(Model(), [callback], 4, folder, **options)
        training.train(resume)
        (callback,) = (one for one in training.callback_handler.callbacks if isinstance(one, ConsequentialismCallback))
        return callback.correction

    exclude = ["model.0"]
    whole = train(tmp_path / "whole")
    assert whole.counters.steps == 8
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    for options in ({}, {"restore_callback_states_from_checkpoint": True}):
        resumed = train(tmp_path / "again", resume=checkpoint, **options)
        assert resumed.counters == whole.counters
        assert list(resumed.corrected) == list(whole.corrected)
        given = damping or reference.damping_options(reference.DEFAULT_DAMPING)
        assert (resumed.damping, resumed.relative_damping) == (given.get("damping"), given.get("relative_damping"))
    exclude = [nn.Conv2d]  # which is not for JSON
    train(tmp_path / "other")
    with pytest.raises(ValueError, match="cannot hold its exclude; leave it out: the counters are restored anyway"):
        train(
            tmp_path / "replaced",
            resume=str(tmp_path / "other" / "checkpoint-3"),
            restore_callback_states_from_checkpoint=True,
        )


def test_a_second_training_counts_from_zero(tmp_path):
    callback = ConsequentialismCallback(damping=plain.DAMPING)
    training = trainer(Model(), [callback], 4, tmp_path)
    for _ in range(2):
        training.train()
        assert callback.correction.counters.steps == 4


class MeanOfItsOwn(Model):
    """Like BertForSequenceClassification: takes any argument, and divides its loss by the micro-batch nevertheless."""

    def forward(self, images, labels, **others):
        return super().forward(images, labels)


@pytest.mark.parametrize("is_scaled", [None, False])
def test_a_model_that_does_not_divide_as_it_is_told(is_scaled, tmp_path):
    """The Trainer trusts it, so without the flag all gradients, plain ones too, are as many times too large as there
    are micro-batches.
    """
    model, expected = MeanOfItsOwn(), plain.make_model()
    running = trainer(model, [ConsequentialismCallback(damping=plain.DAMPING)], 4, tmp_path, accumulate=4)
    running.loss_is_scaled_for_ga = is_scaled
    running.train()
    plain.train(expected, *plain.make_data(4), accumulate=4)
    ratio = 1 if is_scaled is False else 4
    start = plain.make_model()
    for value, theirs, before in zip(model.parameters(), expected.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(value - before, ratio * (theirs - before), rtol=1e-3, atol=1e-6)


def test_nothing_stays_attached(tmp_path):
    model, callback = Model(), ConsequentialismCallback()
    trainer(model, [callback], 2, tmp_path).train()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_tokens_of_a_language_model_are_what_the_mean_is_over(tmp_path):
    """Padding is not counted. (The first token, which nothing predicts, is counted for GPT-2 by transformers, and so is
    in the loss's divisor and here.)
    """
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config)
    labels = torch.randint(0, 11, (8, 6))
    labels[::2, 4:] = -100
    data = [{"input_ids": label.clamp(min=0), "labels": label} for label in labels]
    divisors = []

    class Watched(ConsequentialismCallback):
        def _divisor(self, samples):
            divisors.append((samples, super()._divisor(samples)))
            return divisors[-1][1]

    settings = arguments(tmp_path, accumulate=2)
    settings.per_device_train_batch_size = 2
    callback = Watched(damping=0.1)
    transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=data,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.01), None),
        callbacks=[callback],
    ).train()
    assert divisors == [(4, 2 * 6 + 2 * 4)] * 2
