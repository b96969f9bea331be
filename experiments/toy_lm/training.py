"""ByteLM as a LightningModule: its losses in bits per byte, its optimiser and its data."""

import math

import lightning
import torch
from torch import Tensor, nn

from toy_lm.config import Config
from toy_lm.data import TrainingBatches, ValidationBatches, load_text
from toy_lm.model import DOCUMENT, ByteLM, next_byte_loss

BITS_PER_NAT = 1 / math.log(2)


class TrainByteLM(lightning.LightningModule):
    """Trains ByteLM as a resolved Config says. Logs train_bits, val_bits (bits per byte) and the learning rate."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        separator = b"\n" if config.documents == "together" else bytes([DOCUMENT])
        self.training_text, self.validation_text = load_text(config.data, config.context, separator)
        self.model = ByteLM(
            layers=config.layers, width=config.width, heads=config.heads, decay=config.decay,
            documents=config.documents, backend=config.backend,
        )
        if config.compile:
            self.model.compile()

    def training_step(self, batch: Tensor) -> Tensor:
        loss = next_byte_loss(self.model, batch)
        self.log("train_bits", loss.detach() * BITS_PER_NAT, prog_bar=True, sync_dist=True)
        self.log("learning_rate", self.lr_schedulers().get_last_lr()[0])
        return loss

    def validation_step(self, batch: Tensor) -> None:
        bits = next_byte_loss(self.model, batch) * BITS_PER_NAT
        self.log("val_bits", bits, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=len(batch))

    def train_dataloader(self) -> TrainingBatches:
        trainer = self.trainer
        return self.training_batches(
            first_step=trainer.global_step, rank=trainer.global_rank, world=trainer.world_size
        )

    def val_dataloader(self) -> ValidationBatches:
        config, world = self.config, self.trainer.world_size
        return ValidationBatches(
            self.validation_text, config.context, config.validation_crops, config.batch_size // world,
            rank=self.global_rank, world=world,
        )

    def training_batches(self, **where) -> TrainingBatches:
        config = self.config
        return TrainingBatches(self.training_text, config.context, config.batch_size, config.seed, **where)

    def configure_optimizers(self) -> dict:
        config = self.config
        optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.95)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """The options given with --resume go before those that the optimiser and its schedule were saved with."""
        config = self.config
        for state in checkpoint["optimizer_states"]:
            for group, weight_decay in zip(state["param_groups"], (config.weight_decay, 0.0), strict=True):
                group["lr"] *= config.learning_rate / group["initial_lr"]
                group.update(initial_lr=config.learning_rate, weight_decay=weight_decay)
        for state in checkpoint["lr_schedulers"]:
            state["base_lrs"] = [config.learning_rate] * len(state["base_lrs"])


def parameter_groups(model: ByteLM, weight_decay: float) -> list[dict]:
    """Weight decay for the matrices that mix channels; none for embeddings, norms, biases and the attention's decay."""
    spared = {id(p) for module in (model.embedding, *decay_modules(model)) for p in module.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in spared]
    others = [p for p in parameters if p.ndim < 2 or id(p) in spared]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def decay_modules(model: ByteLM) -> list[nn.Module]:
    """The decay module of every layer that has one."""
    return [block.attention.decay for block in model.blocks if isinstance(block.attention.decay, nn.Module)]


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine from 1 to 0.1."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
