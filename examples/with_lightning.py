"""Lightning: one callback, with gradient accumulation, bfloat16, clipping and a checkpoint that training resumes from.

(``return consequent.CSGD(self, lr=0.1)`` from ``configure_optimizers`` does the same without a callback.)
"""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from consequent.integrations.lightning import ConsequentialismCallback


class Classifier(LightningModule):
    """An ordinary module, with a plain torch optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Mean loss of a mini-batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD; the callback makes it C-SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def train(epochs: int, folder: str, checkpoint: str | None = None) -> tuple[Classifier, str]:
    seed_everything(0)
    model, callback = Classifier(), ConsequentialismCallback()  # the one added line
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(images, labels), batch_size=16), ckpt_path=checkpoint)
    with torch.no_grad():
        accuracy = (model.model(images).argmax(1) == labels).float().mean()
    steps = callback.corrections[0].counters.steps
    print(f"{epochs} epochs: {steps} corrected steps, training accuracy {accuracy:.1%}")
    return model, trainer.checkpoint_callback.best_model_path


with tempfile.TemporaryDirectory() as folder:
    whole, _ = train(4, folder)
    _, checkpoint = train(2, folder)
    resumed, _ = train(4, folder, checkpoint)
pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
print("resumed and uninterrupted training agree:", all(torch.equal(a, b) for a, b in pairs))
