"""A `transformers.Trainer` whose loss is the two-stream objective."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from mars.checkpoint import Checkpoint
from mars.counter import hash64
from mars.errors import UserError
from mars.streams import Blocks, Streams, build_streams, tile_blocks
from mars.training.arguments import MarsArguments, option_errors
from mars.training.forward import remove_stream_forward

# Both streams are padded to a multiple of this: with ever new shapes the memory of a CPU process
# grows by some 90 MB a step (default model), and compiled kernels would be built again and again.
LENGTH_MULTIPLE = 64


def training_streams(
    batch: dict[str, Tensor], *, block_size: int, mask_token_id: int, seed: int, step: int
) -> Streams:
    """Build both streams of a collated batch, with a random block phase.

    The phase is a hash of (seed, step, example, place), so it depends neither on how examples are
    spread over batches, accumulation steps and processes nor on random state: a resumed or a
    distributed run sees the same blocks. `block_size` 0 builds the clean stream alone.
    """
    numbers = hash64(seed, step, batch["example_ids"], batch["position_ids"])
    phase = numbers.remainder(max(1, block_size))
    return make_streams(batch, phase, block_size=block_size, mask_token_id=mask_token_id)


def make_streams(
    batch: dict[str, Tensor], phase: Tensor, *, block_size: int, mask_token_id: int
) -> Streams:
    """Build both streams of a collated batch with the given phases ([B, L], see `tile_blocks`)."""
    labels, document = batch["labels"], batch["document_ids"]
    if block_size == 0:
        empty = labels.new_zeros(0)
        blocks = Blocks(row=empty, target=empty, start=empty)
    else:
        blocks = tile_blocks(labels, document, phase, block_size)
    return build_streams(
        batch["input_ids"],
        labels,
        document,
        batch["position_ids"],
        blocks,
        mask_token_id,
        multiple=LENGTH_MULTIPLE,
    )


class MarsTrainer(Trainer):
    """Train a checkpoint that `add_stream_forward` was applied to."""

    def __init__(self, *, checkpoint: Checkpoint, args: MarsArguments, **kwargs: Any) -> None:
        with option_errors():
            super().__init__(args=args, processing_class=checkpoint.tokenizer, **kwargs)
        self.stream_objective = args.objective
        self.block_size = args.block_size if self.stream_objective.masked_weight > 0 else 0
        mars = checkpoint.mars
        self.mask_token_id = 0 if mars is None or mars.mask_token_id is None else mars.mask_token_id
        # The loss is divided by the supervised tokens of the whole (accumulated, distributed)
        # batch, so the Trainer must count them and must not divide again.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._sums = torch.zeros(3, 1 + self.block_size, device=args.device)
        self.add_callback(JsonLines(Path(str(args.output_dir)) / "log.jsonl"))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build the optimiser; UserError for options that it refuses."""
        with option_errors():
            return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Build the learning rate schedule; UserError for options that it refuses."""
        with option_errors():
            return super().create_scheduler(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Plan the run; UserError if it would make no optimiser step."""
        values = super().set_initial_training_values(args, dataloader) if len(dataloader) else (0,)
        if values[-1] < 1:  # max_steps
            raise UserError(
                f"Nothing would be trained: {len(dataloader)} batches an epoch, "
                f"per_device_train_batch_size={args.per_device_train_batch_size}, "
                f"num_train_epochs={args.num_train_epochs}, max_steps={args.max_steps} and "
                f"dataloader_drop_last={args.dataloader_drop_last} make no optimiser step."
            )
        return values

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The loop of transformers looks at max_steps only after a step: a run that is resumed when
        # it had finished would make one more.
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the objective of one micro-batch per supervised token of the whole batch."""
        sums = self.run_model(model, inputs)
        self._sums += sums.statistics
        if num_items_in_batch is None:  # evaluation
            num_items_in_batch = (inputs["labels"] != -100).sum()
        loss = sums.loss / num_items_in_batch
        if model.training and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # DDP averages the gradients
        return (loss, sums) if return_outputs else loss

    def run_model(self, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        """Return `loss` and `statistics` of a micro-batch, both as sums."""
        streams = training_streams(
            inputs,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            seed=self.args.seed,
            step=self.state.global_step,
        )
        return model(streams=streams, objective=self.stream_objective, block_size=self.block_size)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the negative log-likelihood and accuracy per offset since the last log."""
        if "loss" in logs:
            sums = self.accelerator.reduce(self._sums, reduction="sum")
            logs |= self.describe_sums(sums)
            self._sums.zero_()
        super().log(logs, start_time)

    def describe_sums(self, sums: Tensor) -> dict[str, float]:
        """Name the statistics of the outputs since the last log."""
        return describe_sums(*sums)

    def save_final(self, folder: Path, base: PreTrainedModel) -> None:
        """Write the finished model, which consists of `base` or wraps it, in `save_dtype`."""
        args: Any = self.args
        remove_stream_forward(base)
        if args.save_dtype == "bfloat16" and not self.is_fsdp_enabled:
            torch.nn.Module.to(base, torch.bfloat16)
        self.save_model(str(folder))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        inner: Any = self.accelerator.unwrap_model(self.model)
        if not isinstance(inner, PreTrainedModel):  # PEFT writes no config.json; decoding needs it
            inner.get_base_model().config.save_pretrained(output_dir or self.args.output_dir)


def describe_sums(nll: Tensor, correct: Tensor, count: Tensor) -> dict[str, float]:
    """Name the mean -log p and the accuracy of each offset that occurred (0: `clean`)."""
    described = {}
    for offset, (n, c, k) in enumerate(
        zip(nll.tolist(), correct.tolist(), count.tolist(), strict=True)
    ):
        if k > 0:
            name = "clean" if offset == 0 else f"mask{offset}"
            described[f"{name}_nll"] = n / k
            described[f"{name}_accuracy"] = c / k
    return described


class JsonLines(TrainerCallback):
    """Append every log entry to a JSON-lines file, with step and time in seconds since 1970."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a resume, forget the lines of steps that will be run again, and half a line."""
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text(errors="replace").splitlines(keepends=True)
            lines = [line for line in lines if line.endswith("\n")]
            kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
            self.path.write_text("".join(kept if state.global_step else []))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write one line (main process only)."""
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                entry = {"step": state.global_step, "time": round(time.time(), 3), **logs}
                file.write(json.dumps(entry) + "\n")
