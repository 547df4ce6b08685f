"""What an operation computes, for a layer and its inputs as users have them."""

from consequent.layers import kind_of


def called(layer, inputs):
    """The canonical call of the layer with these inputs."""
    return kind_of(layer).of(layer).canonical(inputs)


def second_moment(layer, inputs, *, ones):
    call = called(layer, inputs)
    return call.operation.second_moment(call.inputs, ones=ones)


def second_moments(layer, inputs, *, ones):
    calls = [called(layer, tensor) for tensor in inputs]
    return calls[0].operation.second_moments([call.inputs for call in calls], ones=ones)


def input_rows(layer, inputs):
    call = called(layer, inputs)
    return call.operation.input_rows(call.inputs)
