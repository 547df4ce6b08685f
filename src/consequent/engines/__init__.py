"""How consequentialist gradients are computed: one layer after the other, several together, or by a GPU's kernels."""
