"""The engine for NVIDIA GPUs: streams beside the backward pass, recorded launches, kernels."""
