"""What the attention of a model in training does: half-lives of its heads, and the fraction of tiles that it visits."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from language_models.statistics import attention_statistics, can_tell_visits
from shared.report import write

from toy_lm.report import copy_to_evaluate, device_of
from toy_lm.training import TrainByteLM

FILE = "attention.json"
_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}


class AttentionStatistics(lightning.Callback):
    """Writes attention.json in the folder of the run: before the first step, and at every validation, on rank 0.

    Each row has two values per layer and head, on the first `bytes` bytes of the validation text: half_lives,
    decayattn.nn.record_half_lives in tokens (bytes); and visited, decayattn.visited_fraction of 64 × 128 tiles. visited
    is null where documents are kept apart, and on a machine that has neither a GPU nor Triton. On a CPU it is
    interpreted, in float32, and in the first and last row alone.
    milliseconds_per_step: of the steps since the row before, compiling included; writing a checkpoint is not.
    """

    def __init__(self, folder: Path, first_step: int):
        self.path = Path(folder) / FILE
        self.rows: list[dict[str, Any]] = []
        if first_step and self.path.exists():
            # a resume repeats what came after its checkpoint
            self.rows = [row for row in read(self.path.parent) if row["step"] <= first_step]
        self._begun: tuple[int, float] | None = None
        self._milliseconds: float | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._record_on_rank_zero(trainer, pl_module)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._begun is None:  # not at the validation's end: checkpoints are written after every other callback
            self._begun = trainer.global_step, time.perf_counter()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._begun is not None and trainer.global_step > self._begun[0]:
            # FiniteLoss has waited for the GPU before a validation
            seconds = time.perf_counter() - self._begun[1]
            self._milliseconds = round(1e3 * seconds / (trainer.global_step - self._begun[0]), 3)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._record_on_rank_zero(trainer, pl_module)
        self._begun = None

    def _record_on_rank_zero(self, trainer: lightning.Trainer, module: TrainByteLM) -> None:
        if module.is_sharded:
            module.whole = module.whole_model()  # a collective
        if trainer.is_global_zero and not any(row["step"] == trainer.global_step for row in self.rows):
            self._record(trainer.global_step, module)
        module.whole = None

    def _record(self, step: int, module: TrainByteLM) -> None:
        config = module.config
        device = device_of(config)
        text = module.validation_text[: config.statistics_context][None].to(device)
        often = device.type == "cuda" or step in (0, config.steps)
        visited = config.documents == "together" and often and can_tell_visits(device)
        kind = config.precision.partition("-")[0]
        # the interpreter gets bfloat16 wrong
        cast = kind in _DTYPES and device.type == "cuda"
        how = torch.autocast(device.type, _DTYPES[kind]) if cast else contextlib.nullcontext()
        with how:
            layers = attention_statistics(copy_to_evaluate(module), text, visited=visited)
        self.rows.append({"step": step, "milliseconds_per_step": self._milliseconds, "layers": layers})
        write({"bytes": text.shape[1], "context": config.context, "rows": self.rows}, self.path)


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run."""
    return json.loads((folder / FILE).read_text(encoding="utf-8"))["rows"]
