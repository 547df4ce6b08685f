"""Autocast, a GradScaler, gradient accumulation, norm clipping and a checkpoint: nothing about the loop changes.

(If Python dies of an illegal instruction, the CPU announces bfloat16 units that its virtual machine refuses:
``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` in the environment helps.)
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import consequent

device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.Generator().manual_seed(0)
inputs = torch.randn(256, 20, generator=data).to(device)
targets = inputs.square().mean(1, keepdim=True)
micro_batches = 4


def train(first: int, last: int, checkpoint: Path) -> None:
    """Goes on from the checkpoint, if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = consequent.CAdamW(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    scaler = torch.amp.GradScaler(device)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if checkpoint.exists():
        for name, state in torch.load(checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)
    for step in range(first, last):
        optimizer.zero_grad()
        total = 0.0
        for x, t in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x).float(), t) / micro_batches
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step % 20 == 0 or step == 59:
            print(f"step {step:2d}: loss {total:.6f}")
    torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)


with tempfile.TemporaryDirectory() as folder:
    print("in one go")
    train(0, 60, Path(folder, "whole.pt"))
    print("interrupted and resumed")
    train(0, 30, Path(folder, "parts.pt"))
    train(30, 60, Path(folder, "parts.pt"))
