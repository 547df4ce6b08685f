"""``at="backward"`` passed through the trainers gives the weights of a plain loop with it."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import consequent
from integrations import plain

BATCHES, ACCUMULATE, CLIP = 6, 2, 0.05


def by_hand(at):
    """(model, its correction) after micro-batches and clipping of the gradients as they are in ``.grad``."""
    model, (images, labels) = plain.make_model(), plain.make_data(BATCHES)
    optimizer = plain.make_optimizer(model)
    correction = consequent.attach(optimizer, model, damping=plain.DAMPING, at=at)
    for index, (x, t) in enumerate(zip(images.split(plain.BATCH), labels.split(plain.BATCH), strict=True)):
        (F.cross_entropy(model(x), t) / ACCUMULATE).backward()
        if (index + 1) % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model, correction


def check(model, correction):
    expected, expected_correction = by_hand("backward")
    plain.check_equal(model, expected)
    assert (correction.at, correction.samples) == ("backward", plain.BATCH)  # those of a micro-batch
    assert correction.counters == expected_correction.counters
    assert correction.counters.steps == BATCHES
    at_step, _ = by_hand("step")
    assert not any(map(torch.equal, model.state_dict().values(), at_step.state_dict().values()))


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from consequent.integrations.lightning import ConsequentialismCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = plain.make_model()

        def training_step(self, batch, batch_index):
            images, labels = batch
            return F.cross_entropy(self.model(images), labels)

        def configure_optimizers(self):
            return plain.make_optimizer(self)

    module, callback = Module(), ConsequentialismCallback(damping=plain.DAMPING, at="backward")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*number of training batches.*")
        lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=CLIP,
            callbacks=[callback],
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        ).fit(module, DataLoader(TensorDataset(*plain.make_data(BATCHES)), batch_size=plain.BATCH))
    (correction,) = callback.corrections
    check(module.model, correction)


class WithLoss(nn.Module):
    """A user's own model: the Trainer divides its mean loss by the number of micro-batches."""

    def __init__(self):
        super().__init__()
        self.model = plain.make_model()

    def forward(self, images, labels):
        return {"loss": F.cross_entropy(self.model(images), labels)}


class ToldTheDivisor(WithLoss):
    """As the package makes them: told what to divide by, for all micro-batches together."""

    def forward(self, images, labels, num_items_in_batch=None, **others):
        loss = F.cross_entropy(self.model(images), labels, reduction="sum")
        return {"loss": loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)}


def trained_by_transformers(model, folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from consequent.integrations.transformers import ConsequentialismCallback

    callback = ConsequentialismCallback(damping=plain.DAMPING, at="backward")
    settings = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=plain.BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=CLIP,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{"images": x, "labels": t} for x, t in zip(*plain.make_data(BATCHES), strict=True)]
    transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=data,
        optimizers=(plain.make_optimizer(model), None),
        callbacks=[callback],
    ).train()
    return callback.correction


def test_transformers(tmp_path):
    model = WithLoss()
    correction = trained_by_transformers(model, tmp_path)
    check(model.model, correction)


def test_transformers_models_that_are_told_their_divisor(tmp_path):
    """The sum is divided, and then the gradients added: the same numbers, rounded in another order.

    A micro-batch's pass is corrected with the samples of that pass, n: its loss is that of its n samples, divided by
    those of all micro-batches.
    """
    model, (expected, _) = ToldTheDivisor(), by_hand("backward")
    trained_by_transformers(model, tmp_path)
    start = plain.make_model()
    for value, wanted, before in zip(model.parameters(), expected.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(value - before, wanted - before, rtol=1e-3, atol=1e-6)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        model = plain.make_model()
        prepared, optimizer = accelerator.prepare(model, plain.make_optimizer(model))
        correction = consequent.attach(optimizer, prepared, damping=plain.DAMPING, at="backward")
        loader = accelerator.prepare(DataLoader(TensorDataset(*plain.make_data(BATCHES)), batch_size=plain.BATCH))
        for x, t in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(x), t))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
    check(model, correction)
