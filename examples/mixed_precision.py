"""Autocast, a GradScaler, gradient accumulation and norm clipping together: nothing about the loop changes.

(If Python dies of an illegal instruction, the CPU announces bfloat16 units that its virtual machine refuses:
``ONEDNN_MAX_CPU_ISA=AVX512_CORE`` in the environment helps.)
"""

import torch
from torch import nn

import consequent

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = consequent.CAdamW(model, lr=1e-2, damping=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
scaler = torch.amp.GradScaler(device)

inputs = torch.randn(256, 20, device=device)
targets = inputs.square().mean(1, keepdim=True)
micro_batches = 4

for step in range(60):
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
        print(f"step {step:2d}: loss {total:.4f}")
