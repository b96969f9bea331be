"""ByteLM as a LightningModule: its losses in bits per byte, its optimiser and its data."""

import contextlib
import math

import lightning
import torch
from language_models.model import DOCUMENT, ByteLM, next_byte_loss
from language_models.optimisation import learning_rate_factor, parameter_groups
from torch import Tensor

from toy_lm.config import SHARDED, Config, context_shares, data_shares
from toy_lm.data import TrainingBatches, ValidationBatches, load_text

BITS_PER_NAT = 1 / math.log(2)


class TrainByteLM(lightning.LightningModule):
    """Trains ByteLM as a resolved Config says. Logs train_bits, val_bits (bits per byte) and the learning rate."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.is_sharded = False
        # a plain copy, on rank 0, of a model that is sharded
        self.whole: ByteLM | None = None
        separator = b"\n" if config.documents == "together" else bytes([DOCUMENT])
        self.training_text, self.validation_text = load_text(config.data, config.context, separator)
        self.model = self.make_model()
        if config.compile:
            self.model.compile()

    def make_model(self) -> ByteLM:
        """Before training, on one device."""
        config = self.config
        return ByteLM(
            layers=config.layers, width=config.width, heads=config.heads, decay=config.decay,
            documents=config.documents, backend=config.backend,
        )

    def configure_model(self) -> None:
        """Lightning's hook, before a validation and before a training."""
        if self.config.strategy not in SHARDED or self.is_sharded:
            return
        from toy_lm import sharded

        self.model.to(self.trainer.strategy.root_device)
        sharded.parallelize(self.model, self.config, self.device_mesh)
        self.is_sharded = True

    def bytes_of_this_device(self, batch: Tensor) -> Tensor:
        """Of sequences (b, T + 1) the T / devices bytes of this device, and the one after them."""
        parts = context_shares(self.config)
        length = (batch.shape[1] - 1) // parts
        first = self.trainer.local_rank * length if parts > 1 else 0
        return batch[:, first : first + length + 1]

    def training_step(self, batch: Tensor) -> Tensor:
        loss = next_byte_loss(self.model, self.bytes_of_this_device(batch))
        self.log("train_bits", loss.detach() * BITS_PER_NAT, prog_bar=True, sync_dist=True)
        self.log("learning_rate", self.lr_schedulers().get_last_lr()[0])
        return loss

    def on_after_backward(self) -> None:
        """Lightning's hook."""
        if self.config.strategy == "tensor":
            from toy_lm import sharded

            sharded.average_copies(self.model, self.device_mesh[sharded.SECOND])

    def validation_step(self, batch: Tensor) -> None:
        bits = next_byte_loss(self.model, self.bytes_of_this_device(batch)) * BITS_PER_NAT
        self.log("val_bits", bits, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=len(batch))

    def train_dataloader(self) -> TrainingBatches:
        rank, shares = self._share_of_the_batch()
        return self.training_batches(first_step=self.trainer.global_step, rank=rank, world=shares)

    def val_dataloader(self) -> ValidationBatches:
        config = self.config
        rank, shares = self._share_of_the_batch()
        return ValidationBatches(
            self.validation_text, config.context, config.validation_crops, config.batch_size // shares,
            rank=rank, world=shares,
        )

    def _share_of_the_batch(self) -> tuple[int, int]:
        """Which of how many parts of a batch this device trains on."""
        shares = data_shares(self.config)
        return self.trainer.global_rank * shares // self.trainer.world_size, shares

    def training_batches(self, **where) -> TrainingBatches:
        config = self.config
        return TrainingBatches(self.training_text, config.context, config.batch_size, config.seed, **where)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        if not self.is_sharded:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            from toy_lm import sharded

            sharded.clip_gradients(self.parameters(), gradient_clip_val)

    def whole_model(self) -> ByteLM | None:
        """On rank 0 a plain copy of a sharded model, on the CPU; None on others. Every rank calls it."""
        from toy_lm import sharded

        state = sharded.whole_state(self.model)
        if not self.trainer.is_global_zero:
            return None
        with torch.random.fork_rng():
            model = self.make_model()
        model.load_state_dict(state, assign=True)
        return model.requires_grad_()

    def sharded_gradients(self, batch: Tensor, autocast: torch.dtype | None) -> dict[str, Tensor]:
        """Every parameter's gradient of next_byte_loss on the batch, each device with its share as in a step, whole and
        under its name on one device. Every rank calls it, with the same batch."""
        rank, shares = self._share_of_the_batch()
        share = len(batch) // shares
        mine = self.bytes_of_this_device(batch[rank * share : (rank + 1) * share].to(self.trainer.strategy.root_device))
        cast = contextlib.nullcontext() if autocast is None else torch.autocast(mine.device.type, autocast)
        self.model.zero_grad()
        with torch.enable_grad(), cast:
            loss = next_byte_loss(self.model, mine)
        loss.backward()
        self.on_after_backward()
        gradients = self.whole_gradients()
        self.model.zero_grad()
        return gradients

    def whole_gradients(self) -> dict[str, Tensor]:
        """Of the last backward of a sharded model. Every rank calls it."""
        from toy_lm import sharded

        return sharded.whole_gradients(self.model)

    def on_train_end(self) -> None:
        if self.is_sharded:
            self.whole = self.whole_model()

    def configure_optimizers(self) -> dict:
        config = self.config
        adam = torch.optim.AdamW
        if self.is_sharded:
            from toy_lm import sharded

            adam = sharded.AdamW
        optimizer = adam(parameter_groups(self.model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.95))
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
