"""Each mini-batch's own inputs: the layer's product is an autograd function that returns the corrected gradient."""
