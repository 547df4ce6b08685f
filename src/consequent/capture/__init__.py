"""What is seen of the passes: calls of layers, their output gradients, the samples that entered the model."""
