"""One training run, from options to a saved checkpoint."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mars.checkpoint import Checkpoint, attach, check_supported, load, prepare_for_training
from mars.data import BuildReport, Collator, Example, build_examples, pack, read_records
from mars.errors import UserError
from mars.gated import (
    WEIGHTS_FILE,
    GatedAdapter,
    GatedConfig,
    all_linear,
    fingerprint,
    is_adapter_folder,
    read_config,
)
from mars.mask_token import input_embedding, output_head
from mars.training.arguments import MarsArguments
from mars.training.forward import (
    add_stream_forward,
    check_plain_head,
)
from mars.training.gated import GatedModel
from mars.training.gated_trainer import GatedTrainer
from mars.training.output import PARTIAL, replace_model, resume_point
from mars.training.probe import GatedProbe, Probe, ProbeCallback
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

    def tell(text: str) -> None:
        if args.process_index == 0:
            print(text, file=sys.stderr)

    resume = resume_point(
        folder,
        args.resume_from_checkpoint,
        needs_optimizer=not args.save_only_model,
        tell=tell,
    )
    checkpoint = load_base(args)
    examples, held_out, report = load_examples(args, checkpoint)
    tell(report.describe())
    base = checkpoint.model
    pad = checkpoint.tokenizer.pad_token_id or 0
    collate = Collator(pad_token_id=pad, pad_to_multiple_of=LENGTH_MULTIPLE)
    trainer_class = GatedTrainer if args.method == "gated" else MarsTrainer
    trainer = trainer_class(
        checkpoint=checkpoint,
        args=args,
        model=trained_module(checkpoint, args),
        train_dataset=training_rows(examples, args),
        data_collator=collate,
    )
    if held_out:
        check_probe_runs(trainer)
        settings = (checkpoint, held_out, collate, trainer.block_size, trainer.accelerator.autocast)
        probe = GatedProbe(*settings) if args.method == "gated" else Probe(*settings)
        trainer.add_callback(ProbeCallback(probe, trainer.log, args.probe_steps))
    trainer.train(resume_from_checkpoint=resume)
    save(trainer, base, args)
    return folder


def trained_module(checkpoint: Checkpoint, args: MarsArguments) -> torch.nn.Module:
    """Return the module whose parameters are trained, with the forward that the trainer calls."""
    if args.method == "gated":
        assert checkpoint.adapter is not None
        return GatedModel(checkpoint.adapter, checkpoint.model)
    add_stream_forward(checkpoint.model)
    return wrap_lora(checkpoint, args) if args.method == "lora" else checkpoint.model


def load_base(args: MarsArguments) -> Checkpoint:
    """Load the model to train and, unless training is plain AR, give it a mask token.

    Raises:
        UserError: unsupported model, or an adapter of another method.
    """
    if args.method == "lora" and (Path(args.model or "") / "adapter_config.json").exists():
        raise UserError(
            f"{args.model} is itself a LoRA adapter. Run `mars merge {args.model} MERGED` first, "
            "then train with --model MERGED."
        )
    if args.method == "gated":
        return load_gated_base(args)
    if args.model is not None and is_adapter_folder(args.model):
        raise UserError(
            f"{args.model} is a gated adapter: go on with --method gated, or name its base model."
        )
    checkpoint = load(args.model, adapter=None, dtype=torch.float32, device="cpu")
    check_supported(checkpoint.model.config)
    check_plain_head(checkpoint.model.config)
    if args.masked_weight > 0:
        prepare_for_training(
            checkpoint,
            block_size=args.block_size,
            adapter="lora" if args.method == "lora" else "full",
            mask_token_id=args.mask_token_id,
        )
    if torch.cuda.is_available():
        checkpoint.model.set_attn_implementation("flex_attention")
    return checkpoint


def load_gated_base(args: MarsArguments) -> Checkpoint:
    """Load the frozen base, in the precision of training, with an adapter to train.

    If `args.model` is a gated adapter, training goes on from its weights; its draft head may be
    new. Else the adapter is untrained.
    """
    start = args.model if args.model is not None and is_adapter_folder(args.model) else None
    base = args.model if start is None else read_config(start).base
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    checkpoint = load(base, adapter=None, dtype=dtype, device=args.device)
    if checkpoint.mars is not None:
        raise UserError(
            f"{base} was already trained to predict from masks ({checkpoint.mars.adapter}). "
            "A gated adapter belongs to a plain AR model."
        )
    check_plain_head(checkpoint.model.config)
    model = checkpoint.model.requires_grad_(False)
    config = GatedConfig(
        base=base,
        fingerprint=fingerprint(model),
        block_size=args.block_size,
        rank=args.lora_rank,
        targets=lora_targets(model, args.lora_targets),
        mask_embeddings=args.block_size if args.mask_embeddings == "per-offset" else 1,
        head_width=args.draft_head,
    )
    torch.manual_seed(args.seed)  # the Trainer seeds only after the adapter exists
    adapter = GatedAdapter(model, config)
    if start is not None:
        check_same_shape(config, read_config(start), start)
        adapter.load(Path(start) / WEIGHTS_FILE, torch.float32, new_head=True)
    attach(checkpoint, adapter)
    return checkpoint


def lora_targets(model: PreTrainedModel, option: str) -> tuple[str, ...]:
    """Read the option `lora_targets`."""
    if option == "all-linear":
        return all_linear(model)
    return tuple(name.strip() for name in option.split(","))


def check_same_shape(wanted: GatedConfig, found: GatedConfig, folder: str) -> None:
    """Refuse to go on with an adapter of another shape, or for another base."""
    for field in fields(GatedConfig):
        ours, theirs = getattr(wanted, field.name), getattr(found, field.name)
        is_new_head = field.name == "head_width" and theirs == 0
        if ours != theirs and not is_new_head:
            raise UserError(
                f"The adapter in {folder!r} has {field.name} {theirs!r}; the options ask for "
                f"{ours!r}. Training can only go on with the same."
            )


def check_probe_runs(trainer: MarsTrainer) -> None:
    """Refuse the probe where no process holds the whole model: under FSDP and ZeRO-3."""
    deepspeed = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3):
        raise UserError(
            "The probe runs the whole model in one process, but FSDP or ZeRO-3 spreads it over "
            "all of them. Switch the probe off: --probe_size 0."
        )


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
    """Add LoRA to every linear layer, and make the mask's rows of the vocabulary trainable.

    The adapter then holds the mask's row of the input embedding and, if it is another matrix, of
    the output layer: preparing for training has changed both.
    """
    from peft import LoraConfig, get_peft_model

    model = checkpoint.model
    trainable = None
    if checkpoint.mars is not None:
        embedding, head = input_embedding(model), output_head(model)
        is_tied = embedding.weight is head.weight
        layers = (embedding,) if is_tied else (embedding, head)
        names = [n.rsplit(".", 1)[-1] for n, m in model.named_modules() if m in layers]
        mask_token_id = checkpoint.mars.mask_token_id
        assert mask_token_id is not None, "only gated adapters do without"
        trainable = {name: [mask_token_id] for name in names}
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
    folder = Path(str(args.output_dir))
    partial = folder / PARTIAL  # an interrupted save must not be taken for a finished model
    if trainer.is_world_process_zero():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_final(partial, base)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        options = {k: v for k, v in args.to_dict().items() if v is not None}
        text = json.dumps(options, indent=2, default=str)
        (partial / "training_options.json").write_text(text + "\n")
        replace_model(folder)
