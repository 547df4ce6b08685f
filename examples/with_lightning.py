"""Lightning: one line in ``configure_optimizers``."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import consequent


class Classifier(LightningModule):
    """An ordinary module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Mean loss of a mini-batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """C-SGD."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        consequent.attach(optimizer, self.model)  # the one added line
        return optimizer


digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

seed_everything(0)
model = Classifier()
trainer = Trainer(
    max_epochs=3,
    precision="bf16-mixed",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))
with torch.no_grad():
    loss = nn.functional.cross_entropy(model.cpu().model(images), labels)
print(f"{trainer.global_step} steps: training loss {loss:.4f}")
