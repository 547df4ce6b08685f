"""The mathematics: pure functions on matrices, which know nothing of layers, backward passes or streams."""
