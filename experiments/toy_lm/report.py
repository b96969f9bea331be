"""What a run says of itself: the model at its start; figures, half-lives and a text sample at its end."""

import copy
from pathlib import Path

import torch
from language_models.model import ByteLM, generate

from decayattn import DecayFlashAttention
from toy_lm import figures
from toy_lm.config import Config
from toy_lm.training import TrainByteLM

PROMPT_BYTES = 100


def report(module: TrainByteLM, folder: Path, step: int) -> None:
    """Write and print what the trained model has to show: figures, half-lives, a text sample."""
    config = module.config
    figures.draw_loss(folder, f"Byte-level language model, {config.decay} decay, {step} steps")
    if config.decay != "none":
        figures.save_half_lives(folder)
        figures.draw_half_lives(folder, f"Half-lives of the {config.decay} decay after {step} steps")
        figures.draw_half_lives_over_training(folder, f"Half-lives of the {config.decay} decay")
        figures.draw_visited_over_training(folder, f"What the {config.decay} decay leaves to be visited")
    if config.sample_bytes:
        prompt = bytes(module.validation_text[:PROMPT_BYTES].tolist())
        continuation = generate(copy_to_evaluate(module), prompt, config.sample_bytes, seed=config.seed)
        prompt, continuation = (text.decode(errors="replace") for text in (prompt, continuation))
        sample = f"--- prompt (validation text)\n{prompt}\n--- continuation by the model\n{continuation}\n"
        (folder / "sample.txt").write_text(sample, encoding="utf-8")
        print(sample, flush=True)


def describe(module: TrainByteLM) -> str:
    config = module.config
    parameters = sum(p.numel() for p in module.model.parameters())
    text = f"{len(module.training_text):,} bytes to train, {len(module.validation_text):,} to validate"
    return (
        f"{parameters:,} parameters: {config.layers} layers, width {config.width}, {config.heads} heads, "
        f"{config.decay} decay, context {config.context}\n{text}"
    )


def copy_to_evaluate(module: TrainByteLM) -> ByteLM:
    """The model in float32, never compiled, and in no backend's hands: that of the training may have no float32, or no
    kernels for a cache."""
    trained = module.model if module.whole is None else module.whole
    model = copy.deepcopy(trained).to(device_of(module.config)).float()
    for layer in model.modules():
        if isinstance(layer, DecayFlashAttention):
            layer.backend = "auto"
    return model


def device_of(config: Config) -> torch.device:
    """Where to evaluate the model: Lightning leaves it on the CPU before and after the training."""
    return torch.device("cuda" if config.accelerator == "gpu" else "cpu")
