"""A training job of seconds: a model of 100 000 weights that reads characters, and the command line around it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
_CHARACTERS = [*"0123456789", " ", "-", ",", "."]
# gcd: four answers in ten are "2" and a quarter "1", so that even this model has something to learn. Everything that
# has a state takes part: mini-batches and epochs (old log-probabilities), the reference, warm-up, momentum.
SMALL = (
    "data.task=gcd",
    "data.instruction=''",
    "data.max_response_length=2",
    "data.max_prompt_length=256",
    "data.train_batch_size=4",
    "data.val_size=6",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_epochs=2",
    "actor.entropy_coeff=0.01",
    "actor.kl_loss_coef=0.01",
    "actor.optim.lr=5e-3",
    "actor.optim.lr_warmup_steps=4",
    "actor.optim.lr_scheduler_type=constant",
    "rollout.n=4",
    "trainer.save_freq=2",
)
# What does not tell how long it took or how much memory.
EXACT = ("reward", "reward_std", "loss", "entropy", "kl", "ratio", "pg_clipfrac", "grad_norm", "lr", "response_length")


def tiny_chat_model(path: Path) -> Path:
    """Writes a two-layer Llama and a tokenizer of single characters, in Hugging Face format."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "</s>", *_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words) + len(words) % 2,  # divisible by two ranks
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def command(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    return ["train", f"model.path={model}", f"trainer.run_dir={run_dir}", *SMALL, *overrides]


def start(arguments: list[str], launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """The command line in processes of its own, with one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launched = [*launcher, "-m", "flathead.cli"] if launcher else [sys.executable, "-m", "flathead.cli"]
    return subprocess.Popen(
        [*launched, *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def torchrun(processes: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone")


def records(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def curve(run_dir: Path) -> list[dict[str, float]]:
    """What is the same for the same run, whenever and however often interrupted."""
    return [{name: record[name] for name in ("step", *EXACT)} for record in records(run_dir)]
