"""The optimiser's settings for ByteLM."""

import math

from torch import nn

from language_models.model import ByteLM
from language_models.positions import PerChannelDecay


def parameter_groups(model: ByteLM, weight_decay: float) -> list[dict]:
    """Weight decay for the matrices that mix channels; none for embeddings, norms, biases and the attention's decay."""
    spared = {id(p) for module in (model.embedding, *decay_modules(model)) for p in module.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in spared]
    others = [p for p in parameters if p.ndim < 2 or id(p) in spared]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


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
