"""Post-training quantisation of weights, before export."""

from quarl_tf.networks import Weights
from quarl_tf.networks.layers import Floats
from quarl_tf.quantization.grid import fake_quantize, round_to_half
from quarl_tf.spec import Recipe, require_layers

_FULLY_CONNECTED_RANK = 2


def quantize_weights(weights: Weights, recipe: Recipe) -> Weights:
    """Round every kernel to its grid; biases and the normaliser do not change.

    As in the papers, a fully-connected kernel has one grid, a convolution one per output channel
    (QuaRL, Krishnan et al., arXiv 1910.01055, section 3).
    """
    layers = {name: name.partition("/")[0] for name in weights}
    require_layers(recipe, set(layers.values()))

    def quantize(name: str, kernel: Floats) -> Floats:
        form = recipe.of(layers[name]).weights
        if form is None or not name.partition(":")[0].endswith("/kernel"):
            return kernel
        whole = kernel.ndim == _FULLY_CONNECTED_RANK and not form.per_channel
        return fake_quantize(kernel, form, None if whole else -1)

    return {name: quantize(name, value) for name, value in weights.items()}


def half_weights(weights: Weights) -> Weights:
    """Round every variable to IEEE half, as fp16 flatbuffers store them."""
    return {name: round_to_half(value) for name, value in weights.items()}
