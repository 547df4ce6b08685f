"""Lightning's Trainer gives the weights of a plain loop."""

import warnings

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import consequent
from integrations import plain

lightning = pytest.importorskip("lightning.pytorch")
from consequent.integrations.lightning import ConsequentialismCallback  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self, ready_made=False):
        super().__init__()
        self.model = plain.make_model()
        self.ready_made = ready_made

    def training_step(self, batch, batch_index):
        images, labels = batch
        return F.cross_entropy(self.model(images).float(), labels)

    def configure_optimizers(self):
        if self.ready_made:
            return consequent.CSGD(self, lr=plain.LR, momentum=0.9, damping=plain.DAMPING)
        return plain.make_optimizer(self)


def loader(batches):
    return DataLoader(TensorDataset(*plain.make_data(batches)), batch_size=plain.BATCH)


def trainer(folder, callbacks=(), *, accumulate=1, clip=None, bfloat16=False, epochs=1, **options):
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        precision="bf16-mixed" if bfloat16 else "32-true",
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*number of training batches.*")
        yield


@pytest.mark.parametrize("how", ["callback", "ready-made"])
@pytest.mark.parametrize("settings", plain.SETTINGS.values(), ids=plain.SETTINGS)
def test_gives_the_weights_of_a_plain_loop(settings, how, tmp_path):
    module, expected = Module(ready_made=how == "ready-made"), plain.make_model()
    callback = ConsequentialismCallback(damping=plain.DAMPING)
    callbacks = [callback] if how == "callback" else []
    trainer(tmp_path, callbacks, enable_checkpointing=False, **settings).fit(module, loader(6))
    by_hand = plain.train(expected, *plain.make_data(6), **settings)
    plain.check_has_learned(module.model)
    plain.check_equal(module.model, expected)
    if how == "callback":
        (correction,) = callback.corrections
        assert correction.samples == by_hand.samples == plain.BATCH * settings.get("accumulate", 1)
        assert list(correction.corrected) == ["model.0", "model.4"]
        assert correction.counters == by_hand.counters


@pytest.mark.parametrize("how", ["callback", "ready-made"])
def test_a_resumed_training_gives_the_same_weights(how, tmp_path):
    def callbacks():
        return [ConsequentialismCallback(damping=plain.DAMPING)] if how == "callback" else []

    whole, halves = callbacks(), callbacks()
    expected = Module(how == "ready-made")
    trainer(tmp_path, whole, epochs=2, accumulate=2).fit(expected, loader(4))
    first = trainer(tmp_path, halves, epochs=1, accumulate=2)
    first.fit(Module(how == "ready-made"), loader(4))
    first.save_checkpoint(tmp_path / "first.ckpt")
    module, again = Module(how == "ready-made"), callbacks()
    trainer(tmp_path, again, epochs=2, accumulate=2).fit(module, loader(4), ckpt_path=tmp_path / "first.ckpt")
    plain.check_equal(module, expected)
    if how == "callback":
        assert again[0].corrections[0].counters == whole[0].corrections[0].counters
        assert whole[0].corrections[0].counters.steps == 4


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    callback = ConsequentialismCallback()
    running = trainer(tmp_path, [callback], enable_checkpointing=False)
    callback.load_state_dict({"corrections": [{}, {}]})
    with pytest.raises(ValueError, match="written with 2 optimisers, and now there are 1"):
        running.fit(Module(), loader(2))


def test_an_incomplete_accumulation_at_the_end_of_an_epoch(tmp_path):
    """Lightning divides by the number of micro-batches that should have been."""
    module, expected = Module(), plain.make_model()
    callback = ConsequentialismCallback(damping=plain.DAMPING)
    trainer(tmp_path, [callback], enable_checkpointing=False, accumulate=4).fit(module, loader(6))
    plain.train(expected, *plain.make_data(6), accumulate=4)
    plain.check_equal(module.model, expected)
    assert callback.corrections[0].samples == 2 * plain.BATCH


@pytest.mark.parametrize("options", [{}, {"damping": 0.3}, {"relative_damping": 0.3}], ids=str)
def test_either_damping(options, tmp_path):
    module, callback = Module(), ConsequentialismCallback(**options)
    trainer(tmp_path, [callback], enable_checkpointing=False).fit(module, loader(2))
    (correction,) = callback.corrections
    given = options or reference.damping_options(reference.DEFAULT_DAMPING)
    assert (correction.damping, correction.relative_damping) == (given.get("damping"), given.get("relative_damping"))


def test_both_dampings_are_refused_at_once():
    with pytest.raises(ValueError, match=r"damping=0\.2 and relative_damping=0\.3: give one"):
        ConsequentialismCallback(damping=0.2, relative_damping=0.3)


def test_nothing_stays_attached(tmp_path):
    module, callback = Module(), ConsequentialismCallback()
    trainer(tmp_path, [callback], enable_checkpointing=False).fit(module, loader(2))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_training_that_raised_can_be_repeated(tmp_path):
    class Raises(Module):
        def training_step(self, batch, batch_index):
            if self.fails and batch_index == 1:
                raise KeyError("no such sample")
            return super().training_step(batch, batch_index)

    module, callback = Raises(), ConsequentialismCallback(damping=plain.DAMPING)
    module.fails = True
    with pytest.raises(KeyError):
        trainer(tmp_path, [callback], enable_checkpointing=False).fit(module, loader(2))
    module.fails = False
    module.model = plain.make_model()
    trainer(tmp_path, [callback], enable_checkpointing=False).fit(module, loader(2))
    expected = plain.make_model()
    plain.train(expected, *plain.make_data(2))
    plain.check_equal(module.model, expected)


def weights_and_biases(model):
    return [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]


@pytest.mark.parametrize("how", ["whole layers", "weights and biases"])
def test_two_optimizers(how, tmp_path):
    """With layers of their own they get a correction each, and one for both where they share layers."""

    class TwoOptimizers(Module):
        def training_step(self, batch, batch_index):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_index))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            if how == "whole layers":
                return [plain.make_optimizer(self.model[:2]), plain.make_optimizer(self.model[2:])]
            return [torch.optim.SGD(part, lr=plain.LR, momentum=0.9) for part in weights_and_biases(self.model)]

        def on_train_end(self):
            self.corrected = [list(correction.corrected) for correction in callback.corrections]

    module, callback, expected = TwoOptimizers(), ConsequentialismCallback(damping=plain.DAMPING), plain.make_model()
    module.automatic_optimization = False
    trainer(tmp_path, [callback], enable_checkpointing=False).fit(module, loader(3))
    plain.train(expected, *plain.make_data(3))
    assert (
        module.corrected
        == {
            "whole layers": [["model.0"], ["model.4"]],
            "weights and biases": [["model.0", "model.4"]],
        }[how]
    )
    for value, theirs in zip(module.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, theirs)
