"""One training run, from options to a saved checkpoint."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

from mars.checkpoint import Checkpoint, check_supported, load, prepare_for_training
from mars.data import BuildReport, Collator, Example, build_examples, pack, read_records
from mars.errors import UserError
from mars.training.arguments import MarsArguments
from mars.training.forward import (
    add_stream_forward,
    check_plain_head,
    remove_stream_forward,
)
from mars.training.probe import Probe, ProbeCallback
from mars.training.trainer import LENGTH_MULTIPLE, MarsTrainer


def train(args: MarsArguments) -> Path:
    """Train, and return the folder of the finished checkpoint.

    `args.output_dir` receives `checkpoint-*` folders to resume from, `log.jsonl`, and at the end
    the model itself. With `resume_from_checkpoint` ("true", or a folder) training goes on at the
    exact step.

    Raises:
        UserError: unsupported model, unusable data, or an output folder that is in use.
    """
    folder = Path(str(args.output_dir))
    resume = resume_point(folder, args.resume_from_checkpoint)
    checkpoint = load(args.model, dtype=torch.float32, device="cpu")
    check_supported(checkpoint.model.config)
    check_plain_head(checkpoint.model.config)
    use_masks = args.masked_weight > 0
    if use_masks:
        prepare_for_training(
            checkpoint,
            block_size=args.block_size,
            adapter="lora" if args.method == "lora" else "full",
            mask_token_id=args.mask_token_id,
        )
    if torch.cuda.is_available():
        checkpoint.model.set_attn_implementation("flex_attention")
    examples, held_out, report = load_examples(args, checkpoint)
    if args.process_index == 0:
        print(report.describe(), file=sys.stderr)
    base = checkpoint.model
    add_stream_forward(base)
    model = wrap_lora(checkpoint, args) if args.method == "lora" else base
    pad = checkpoint.tokenizer.pad_token_id or 0
    collate = Collator(pad_token_id=pad, pad_to_multiple_of=LENGTH_MULTIPLE)
    trainer = MarsTrainer(
        checkpoint=checkpoint,
        args=args,
        model=model,
        train_dataset=training_rows(examples, args),
        data_collator=collate,
    )
    if held_out:
        block_size = args.block_size if use_masks else 0
        probe = Probe(checkpoint, held_out, collate, block_size, trainer.accelerator.autocast)
        trainer.add_callback(ProbeCallback(probe, trainer.log, args.probe_steps))
    trainer.train(resume_from_checkpoint=resume)
    save(trainer, base, args)
    return folder


def resume_point(folder: Path, wanted: str | None) -> str | None:
    """Find the checkpoint to resume from; refuse to overwrite an earlier run by accident."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if wanted in (None, "", "false", "False"):
        if last is not None:
            raise UserError(
                f"{folder} already holds {Path(last).name} of an earlier run. Continue it with "
                "--resume_from_checkpoint true, or choose another --output_dir."
            )
        return None
    if wanted in ("true", "True"):
        return last  # nothing saved yet: start from the beginning
    if not Path(wanted).is_dir():
        raise UserError(f"There is no checkpoint {wanted!r} to resume from.")
    return wanted


def load_examples(
    args: MarsArguments, checkpoint: Checkpoint
) -> tuple[list[Example], list[Example], BuildReport]:
    """Read and tokenise the data; hold out the last `probe_size` examples for the probe."""
    records = read_records(
        str(args.data), split=args.split, columns=args.column_names, limit=args.limit
    )
    examples, report = build_examples(
        records,
        checkpoint.tokenizer,
        max_length=args.max_length,
        last_turn_only=args.last_turn_only,
        on_long=args.on_long,
        eos_token_ids=checkpoint.eos_token_ids,
    )
    if args.probe_size >= len(examples):
        raise UserError(
            f"{len(examples)} examples are left and probe_size={args.probe_size} of them are held "
            "out: nothing remains to train on. Lower --probe_size."
        )
    split = len(examples) - args.probe_size
    return examples[:split], examples[split:], report


def training_rows(examples: Sequence[Example], args: MarsArguments) -> list[list[Example]]:
    """Return what one dataset index stands for: an example, or several packed into a row."""
    return pack(examples, args.max_length) if args.packing else [[e] for e in examples]


def wrap_lora(checkpoint: Checkpoint, args: MarsArguments) -> torch.nn.Module:
    """Add LoRA to every linear layer, and make the mask's embedding trainable."""
    from peft import LoraConfig, get_peft_model

    model = checkpoint.model
    trainable = None
    if checkpoint.mars is not None:
        embedding = model.get_input_embeddings()
        name = next(n for n, m in model.named_modules() if m is embedding).rsplit(".", 1)[-1]
        trainable = {name: [checkpoint.mars.mask_token_id]}
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear",
        trainable_token_indices=trainable,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def save(trainer: MarsTrainer, base: PreTrainedModel, args: MarsArguments) -> None:
    """Write the final model in `save_dtype`, and the options next to it."""
    remove_stream_forward(base)
    if args.save_dtype == "bfloat16" and not trainer.is_fsdp_enabled:
        torch.nn.Module.to(base, torch.bfloat16)
    trainer.save_model(str(args.output_dir))
    if trainer.is_world_process_zero():
        options = {k: v for k, v in args.to_dict().items() if v is not None}
        text = json.dumps(options, indent=2, default=str)
        (Path(str(args.output_dir)) / "training_options.json").write_text(text + "\n")
