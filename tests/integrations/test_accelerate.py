"""Accelerate gives the weights of a plain loop; it needs no glue, whenever the correction is attached."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import consequent
from integrations import plain

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _forget_settings():
    """An Accelerator keeps its settings for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """Everything a script has."""

    def __init__(self, *, how="attached before", accumulate=1, clip=None, bfloat16=False):
        self.clip = clip
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision="bf16" if bfloat16 else "no"
        )
        self.model = plain.make_model()
        if how == "ready-made":
            optimizer = consequent.CSGD(self.model, lr=plain.LR, momentum=0.9, damping=plain.DAMPING)
            self.correction = optimizer.correction
        else:
            optimizer = plain.make_optimizer(self.model)
        if how == "attached before":
            self.correction = consequent.attach(optimizer, self.model, damping=plain.DAMPING)
        self.prepared, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        if how == "attached after":
            self.correction = consequent.attach(self.optimizer, self.prepared, damping=plain.DAMPING)
        self.accelerator.register_for_checkpointing(self.correction)

    def train(self, images, labels):
        loader = self.accelerator.prepare(DataLoader(TensorDataset(images, labels), batch_size=plain.BATCH))
        for x, t in loader:
            with self.accelerator.accumulate(self.prepared):
                self.accelerator.backward(F.cross_entropy(self.prepared(x).float(), t))
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.prepared.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("how", ["attached before", "attached after", "ready-made"])
@pytest.mark.parametrize("settings", plain.SETTINGS.values(), ids=plain.SETTINGS)
def test_gives_the_weights_of_a_plain_loop(settings, how):
    run, expected = Run(how=how, **settings), plain.make_model()
    run.train(*plain.make_data(6))
    by_hand = plain.train(expected, *plain.make_data(6), **settings)
    plain.check_has_learned(run.model)
    plain.check_equal(run.model, expected)
    assert run.correction.samples == by_hand.samples == plain.BATCH * settings.get("accumulate", 1)
    assert run.correction.counters == by_hand.counters


@pytest.mark.parametrize("how", ["attached before", "attached after", "ready-made"])
def test_a_resumed_training_gives_the_same_weights(how, tmp_path):
    images, labels = plain.make_data(8)
    half = 4 * plain.BATCH
    whole = Run(how=how, accumulate=2)
    whole.train(images[:half], labels[:half])
    whole.accelerator.save_state(tmp_path)
    whole.train(images[half:], labels[half:])
    resumed = Run(how=how, accumulate=2)
    resumed.accelerator.load_state(tmp_path)
    resumed.train(images[half:], labels[half:])
    plain.check_equal(resumed.model, whole.model)
    assert resumed.correction.counters == whole.correction.counters


def test_an_incomplete_accumulation_at_the_end_of_an_epoch():
    """Accelerate divides by the number of micro-batches that should have been."""
    run, expected = Run(accumulate=4), plain.make_model()
    run.train(*plain.make_data(6))
    plain.train(expected, *plain.make_data(6), accumulate=4)
    plain.check_equal(run.model, expected)
    assert run.correction.samples == 2 * plain.BATCH


def test_detaching_by_the_wrapped_optimizer_leaves_plain_sgd():
    run, expected = Run(how="attached after"), plain.make_model()
    run.correction.detach()
    run.train(*plain.make_data(2))
    optimizer = plain.make_optimizer(expected)
    for x, t in zip(*(data.split(plain.BATCH) for data in plain.make_data(2)), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(expected(x), t).backward()
        optimizer.step()
    plain.check_equal(run.model, expected)


def test_a_wrapped_lbfgs_is_refused_too():
    Run()
    model = plain.make_model()
    wrapped = accelerate.optimizer.AcceleratedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="LBFGS cannot be made consequentialist"):
        consequent.attach(wrapped, model)
