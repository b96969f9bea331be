"""The optimiser's settings for ByteLM."""

import math

from torch import nn

from decayattn.nn import parameter_groups as groups_of
from language_models.model import ByteLM
from language_models.positions import PerChannelDecay


def parameter_groups(model: ByteLM, weight_decay: float) -> list[dict]:
    """decayattn.nn.parameter_groups, with the embedding and decays per channel spared too."""
    for module in (model.embedding, *decay_modules(model)):
        for parameter in module.parameters():
            parameter._no_weight_decay = True
    return groups_of(model, weight_decay)


def decay_modules(model: ByteLM) -> list[nn.Module]:
    """The decay modules of every layer that has any."""
    layers = [block.attention for block in model.blocks]
    decays = [layer.decay for layer in layers if isinstance(layer.decay, nn.Module)]
    return decays + [layer.position for layer in layers if isinstance(layer.position, PerChannelDecay)]


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine from 1 to 0.1."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
