"""GRPO and its relatives, SPMD: the same program on every process of torchrun, or in one process without it.

A step: sample with the current policy, score, advantages, (old and reference log-probabilities,) one or more optimizer
steps, new weights to the sampler. What a step does follows from the configuration, the weights and its number alone:
questions and sampling noise are functions of (seed, step), so a resumed run goes on exactly as if never stopped.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml
from omegaconf import DictConfig, OmegaConf

from flathead import checkpoint
from flathead.advantages import ADVANTAGES
from flathead.batch import PackedBatch
from flathead.config import KL_TYPES, STRATEGIES, TrainConfig, engine_of, engines_of, task_settings
from flathead.data import Question, TaskData
from flathead.engines import check_available, check_layout, layout_of, make_engine
from flathead.engines.base import Engine
from flathead.losses import LossFn, policy_loss_fn, token_weights
from flathead.metrics import RunLog, plot_report, read_result
from flathead.pretrained import load_model, load_tokenizer, locate
from flathead.process import StopSignals, peak_memory, process_group, reset_peak_memory, say
from flathead.rollout import Request, Sampler
from flathead.settings import to_yaml

# What may differ between a run and its continuation: where and how long it runs, not what it computes.
_FREE = (
    "trainer.steps",
    "trainer.run_dir",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.resume",
    "trainer.live",
    "data.max_prompt_length",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "actor_rollout_ref.ref.entropy_from_logits",
    *(f"actor_rollout_ref.{part}.{strategy.key}" for part in ("actor", "ref") for strategy in STRATEGIES.values()),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.max_num_seqs",
)


@dataclass(frozen=True)
class Samples:
    """All responses of one step, on every process: B = prompts x n, samples of a prompt next to each other."""

    prompts: list[list[int]]
    responses: list[list[int]]
    rewards_B: torch.Tensor
    advantages_B: torch.Tensor


def train(config: TrainConfig) -> int:
    """Runs or goes on with the training that `config` describes; returns the process's exit code.

    Leaves in the run directory: config.yaml, metrics.jsonl, tensorboard/, checkpoints/, report.png, final/ (the model
    in Hugging Face format) and result.json. SIGINT and SIGTERM finish the step, save, and end with 128 + their number.
    Errors: ValueError for a model, task or run directory that cannot be used, before the model is loaded.
    """
    data, run_dir = config.data, run_directory(config)
    locate(config.actor_rollout_ref.model.path)
    check_available(config.actor_rollout_ref.actor.strategy)
    parameters, instruction = task_settings(data)
    task = TaskData(data.task, parameters, instruction=instruction, val_size=data.val_size, seed=data.seed)
    _check_writable(run_dir)
    resumed = _resumable(config, run_dir)
    if (result := _finished(config, run_dir)) is not None:
        say(f"{run_dir} has all its {config.trainer.steps} steps; raise trainer.steps, or set trainer.run_dir")
        say(result)
        return 0
    transformers.logging.disable_progress_bar()  # they would write into the table
    say(f"{config.trainer.steps} steps of {data.task}, into {run_dir}; loading the model")
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    with process_group():
        job = Job(config, task, tokenizer, run_dir)
        with StopSignals() as stop:  # from here on there is something to save
            return job.run(resumed, stop)


def _check_writable(run_dir: Path) -> None:
    """Errors: ValueError unless the run directory is there, or can be made, and takes files."""
    place = run_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.run_dir: expected a directory that can be made and written to, got {str(run_dir)!r} ({error})"
        ) from error


def run_directory(config: TrainConfig) -> Path:
    return Path(config.trainer.run_dir or f"runs/{config.data.task}-seed{config.trainer.seed}")


class Job:
    """The parts of a training run, and its loop."""

    def __init__(self, config: TrainConfig, task: TaskData, tokenizer: Any, run_dir: Path) -> None:
        self.config, self.task, self.tokenizer, self.run_dir = config, task, tokenizer, run_dir
        arr = config.actor_rollout_ref
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        _check_processes(config, dist.get_world_size() if dist.is_initialized() else 1)
        self._check_prompts()
        self.loss_fn = _loss_fn(config)
        model = load_model(arr.model.path)
        self._check_length(model.config)
        reference = deepcopy(model) if arr.actor.use_kl_loss else None
        self.engine: Engine = make_engine(model, engine_of(arr.actor), arr.actor.optim)
        self.reference: Engine | None = None
        if reference is not None:
            self.reference = make_engine(reference.requires_grad_(False), engine_of(arr.ref), arr.actor.optim)
        self.sampler = Sampler(model.config, tokenizer, arr.rollout, self.engine.device)

    def run(self, resumed: Path | None, stop: StopSignals) -> int:
        trainer, first, before = self.config.trainer, 0, None
        if resumed is not None:
            state = checkpoint.load(resumed, self.engine)
            first, before = state["step"], state["before"]
        self.sampler.sync(self.engine.full_weights())
        log: AbstractContextManager[RunLog | None] = nullcontext()
        if self.rank == 0:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            checkpoint.write_text(self.run_dir / "config.yaml", to_yaml(self.config))
            log = RunLog(self.run_dir, trainer.steps, to_yaml(self.config), live=trainer.live, first_step=first)
        with log as lines:
            note = (lambda text: None) if lines is None else lines.note
            if resumed is not None:
                note(f"resumed from {resumed}: {first} of {trainer.steps} steps are done")
            if before is None:
                before = self.held_out_accuracy()
                note(f"held-out accuracy before training: {before:.3f}")
            done = self.loop(first, before, lines, stop)
            if done < trainer.steps:
                note(f"stopped; {done} of {trainer.steps} steps are saved, the same command goes on from there")
                return stop.exit_code
            result = self.finish(before)
        if self.rank == 0:
            plot_report(self.run_dir)
            print(f"trained model: {self.run_dir / 'final'}   curves: {self.run_dir / 'report.png'}")
            print(result, flush=True)
        return 0

    def loop(self, done: int, before: float, lines: RunLog | None, stop: StopSignals) -> int:
        """Steps and checkpoints until all are done or a signal came; returns how many are done (and saved)."""
        trainer, stopping = self.config.trainer, stop.agreed()
        while done < trainer.steps and not stopping:
            values = self.step(done)
            done += 1
            if trainer.test_freq and done % trainer.test_freq == 0:
                values["accuracy"] = self.held_out_accuracy()
            if lines is not None:
                lines.log(done - 1, values)
            stopping = stop.agreed()
            if stopping or done % trainer.save_freq == 0 or done == trainer.steps:
                self.save(done, before)
        return done

    def step(self, step: int) -> dict[str, float]:
        """One batch of prompts: sample, score, learn. Returns what is logged."""
        started = time.perf_counter()
        reset_peak_memory(self.engine.device)
        torch.manual_seed(hash((self.config.trainer.seed, step, self.engine.dp_rank)))  # of dropout, where there is any
        samples = self.sample(step)
        sampled = time.perf_counter()
        arr = self.config.actor_rollout_ref
        size = arr.actor.ppo_mini_batch_size * arr.rollout.n
        minis = [range(start, start + size) for start in range(0, len(samples.prompts), size)]
        batches = [self.batch(samples, mini) for mini in minis]
        if len(batches) * arr.actor.ppo_epochs > 1:  # with a single step the policy still is the one that sampled
            batches = [self.with_log_probs(batch, self.engine, "old_log_prob_N") for batch in batches]
        if self.reference is not None:
            batches = [self.with_log_probs(batch, self.reference, "ref_log_prob_N") for batch in batches]
        sums: dict[str, float] = defaultdict(float)
        updates = batches * arr.actor.ppo_epochs
        for batch in updates:
            learned = self.engine.train_step(batch, self.loss_fn, temperature=arr.rollout.temperature)
            for name, value in learned.items():
                sums[name] += value / len(updates)
        self.sampler.sync(self.engine.full_weights())
        seconds = time.perf_counter() - started
        tokens = sum(map(len, samples.prompts)) + sum(map(len, samples.responses))
        return {
            "reward": float(samples.rewards_B.mean()),
            "reward_std": float(samples.rewards_B.std(correction=0)),
            **sums,
            "response_length": sum(map(len, samples.responses)) / len(samples.responses),
            "tokens_per_second": tokens / seconds,
            "peak_memory_gb": peak_memory(self.engine.device) / 1e9,
            "seconds": seconds,
            "seconds_sampling": sampled - started,
        }

    def sample(self, step: int) -> Samples:
        data, rollout, seed = self.config.data, self.config.actor_rollout_ref.rollout, self.config.trainer.seed
        questions = [self.task.train(step * data.train_batch_size + i) for i in range(data.train_batch_size)]
        asked = [(i, n, question) for i, question in enumerate(questions) for n in range(rollout.n)]
        requests = [Request(self.prompt_ids(question), (seed, step, i, n)) for i, n, question in asked]
        responses = self.sampler.generate(requests, data.max_response_length)
        rewards_B = torch.tensor(
            [self.task.score(q, self.text(ids)) for (_, _, q), ids in zip(asked, responses, strict=True)]
        )
        group_B = torch.tensor([i for i, _, _ in asked])
        advantages_B = ADVANTAGES[self.config.algorithm.adv_estimator](rewards_B, group_B)
        return Samples([r.prompt_ids for r in requests], responses, rewards_B, advantages_B)

    def batch(self, samples: Samples, mini: range) -> PackedBatch:
        """This data-parallel rank's share of a mini-batch; its loss weights count the tokens of all ranks."""
        actor = self.config.actor_rollout_ref.actor
        mine = list(mini)[self.engine.dp_rank :: self.engine.dp_size]
        batch = PackedBatch.from_sequences([samples.prompts[b] for b in mine], [samples.responses[b] for b in mine])
        lengths_B = torch.tensor(batch.lengths)
        weight_N = token_weights(
            batch.response_mask_N,
            batch.cu_seqlens,
            actor.loss_agg_mode,
            total_tokens=sum(len(samples.responses[b]) for b in mini),
            total_sequences=len(mini),
            max_response_length=self.config.data.max_response_length,
        )
        return batch.replace(
            weight_N=weight_N, advantages_N=samples.advantages_B[mine].float().repeat_interleave(lengths_B)
        )

    def with_log_probs(self, batch: PackedBatch, engine: Engine, name: str) -> PackedBatch:
        temperature = self.config.actor_rollout_ref.rollout.temperature
        log_prob_N = engine.token_stats(batch, ("log_prob",), temperature=temperature).log_prob
        assert log_prob_N is not None
        return batch.replace(**{name: log_prob_N})

    def held_out_accuracy(self) -> float:
        """The share of held-out questions that greedy decoding answers rightly: those with the full reward."""
        requests = [Request(self.prompt_ids(question), None) for question in self.task.held_out]
        responses = self.sampler.generate(requests, self.config.data.max_response_length)
        asked = zip(self.task.held_out, responses, strict=True)
        right = [self.task.score(question, self.text(ids)) == 1.0 for question, ids in asked]
        return sum(right) / len(right)

    def text(self, response_ids: list[int]) -> str:
        return self.tokenizer.decode(response_ids, skip_special_tokens=True)

    def prompt_ids(self, question: Question) -> list[int]:
        """Errors: ValueError for a prompt longer than data.max_prompt_length."""
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer(question.text + "\n")["input_ids"]
        else:
            chat = [{"role": "user", "content": question.text}]
            ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) > self.config.data.max_prompt_length:
            raise ValueError(
                f"data.max_prompt_length: expected at least {len(ids)}, the tokens of {question.text[:60]!r}..., got "
                f"{self.config.data.max_prompt_length}; raise it, or make the task smaller by data.task_config"
            )
        return ids

    def _check_prompts(self) -> None:
        """The prompts of the run, or the first thousands of a long one. Errors: ValueError for one that is too long."""
        count = min(self.config.trainer.steps * self.config.data.train_batch_size, 2000)
        for question in (*self.task.held_out, *map(self.task.train, range(count))):
            self.prompt_ids(question)

    def _check_length(self, model_config: Any) -> None:
        data, most = self.config.data, getattr(model_config, "max_position_embeddings", None)
        if most is not None and data.max_prompt_length + data.max_response_length > most:
            raise ValueError(
                f"data.max_prompt_length: expected {data.max_prompt_length} + data.max_response_length "
                f"{data.max_response_length} to be at most the model's {most} positions; lower one of them"
            )

    def save(self, done: int, before: float) -> None:
        checkpoint.save(self.run_dir, done, self.engine, {"before": before}, self.config.trainer.max_ckpt_to_keep)

    def finish(self, before: float) -> str:
        """Evaluates, writes final/ and result.json; returns the closing line."""
        after = self.held_out_accuracy()
        made = self.run_dir / ".final.partial"
        self.engine.save_pretrained(made)
        if self.rank == 0:
            self.tokenizer.save_pretrained(made)
            checkpoint.replace_directory(made, self.run_dir / "final")
            result = {"steps": self.config.trainer.steps, "before": before, "after": after}
            checkpoint.write_text(self.run_dir / "result.json", json.dumps(result))
        return _closing_line(before, after)


def _check_processes(config: TrainConfig, world: int) -> None:
    """Errors: ValueError where models or batches cannot be divided among the processes."""
    actor, engines = config.actor_rollout_ref.actor, engines_of(config)
    for key, engine in engines.items():
        check_layout(engine, world, key)
    (own, layout), *others = [(key, layout_of(engine)) for key, engine in engines.items()]
    for key, other in others:
        for name, size in layout.items():
            if other[name] != size:
                raise ValueError(
                    f"{key}.{name}: expected {size} as in {own}, since both are given the same batches, got "
                    f"{other[name]}"
                )
    dp, n = world // math.prod(layout.values()), config.actor_rollout_ref.rollout.n
    if actor.ppo_mini_batch_size * n < dp:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size: expected a response for each of {dp} data-parallel ranks, "
            f"got {actor.ppo_mini_batch_size} prompts x n {n}"
        )


def _loss_fn(config: TrainConfig) -> LossFn:
    actor = config.actor_rollout_ref.actor
    return policy_loss_fn(
        loss_mode="ppo" if actor.policy_loss.loss_mode == "vanilla" else actor.policy_loss.loss_mode,
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=KL_TYPES.get(actor.kl_loss_type, actor.kl_loss_type),
    )


def _closing_line(before: float, after: float) -> str:
    return f"held-out accuracy: before {before:.3f} after {after:.3f}"


def _finished(config: TrainConfig, run_dir: Path) -> str | None:
    if config.trainer.resume == "never" or (result := read_result(run_dir)) is None:
        return None
    return _closing_line(result["before"], result["after"]) if result["steps"] >= config.trainer.steps else None


def _resumable(config: TrainConfig, run_dir: Path) -> Path | None:
    """The checkpoint to go on from. Errors: ValueError if it is of a run with other settings, or must not be used."""
    found = checkpoint.latest(run_dir)
    if found is None:
        return None
    if config.trainer.resume == "never":
        raise ValueError(f"trainer.resume: never, but {found} exists; choose another trainer.run_dir, or resume=auto")
    was = _saved_settings(run_dir / "config.yaml")
    now = OmegaConf.create(to_yaml(config))
    differ = [key for key in _leaves(now) if OmegaConf.select(was, key) != OmegaConf.select(now, key)]
    differ = [key for key in differ if not key.startswith(_FREE)]
    if differ:
        changes = ", ".join(f"{key} {OmegaConf.select(was, key)} -> {OmegaConf.select(now, key)}" for key in differ)
        raise ValueError(f"{run_dir} holds a run with other settings ({changes}); choose another trainer.run_dir")
    return found


def _saved_settings(path: Path) -> Any:
    try:
        was = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        was, reason = None, str(error).splitlines()[0]
    else:
        reason = f"it holds {OmegaConf.to_object(was)!r}"[:200]
    if not (isinstance(was, DictConfig) and "actor_rollout_ref" in was):
        raise ValueError(
            f"{path}: expected the settings of the run whose checkpoints lie beside it ({reason}); put the file back, "
            "or choose another trainer.run_dir"
        )
    return was


def _leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for key in config:
        value = config[key]
        if OmegaConf.is_dict(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
