"""Where the idea comes from: LMS, NLMS and affine projection identify an unknown filter from a coloured signal."""

import torch

from consequent.filters import apa, lms, nlms

torch.manual_seed(0)
taps, length = 8, 400
unknown = torch.randn(taps, dtype=torch.float64)

noise = torch.randn(length + taps, dtype=torch.float64)
signal = torch.zeros_like(noise)
for t in range(1, len(noise)):  # neighbouring samples resemble each other, which is what troubles LMS
    signal[t] = 0.9 * signal[t - 1] + noise[t]
inputs = signal.unfold(0, taps, 1)[:length]
targets = inputs @ unknown

for name, result in {
    "LMS": lms(inputs, targets, step_size=0.01),
    "NLMS": nlms(inputs, targets, step_size=0.5, damping=1e-6),
    "APA, order 4": apa(inputs, targets, step_size=0.5, order=4, damping=1e-6),
}.items():
    distance = (result.weights[-1] - unknown).norm() / unknown.norm()
    print(f"{name:13} distance to the unknown filter after {length} samples: {distance:.1e}")
