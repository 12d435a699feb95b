"""The command line: `flathead train | report | bench`. A user's mistake is one line and exit code 2, no traceback."""

import sys

_HELP = """flathead: the flat-memory LM head for RL post-training

  flathead train [--config-name ppo_trainer] [KEY=VALUE ...]    GRPO on a reasoning-gym task; resumes by itself
  flathead train --help                                         every key with its value
  flathead report RUN_DIR                                       make RUN_DIR/report.png again
  flathead bench [--help]                                       memory, time and error beside the naive way
"""

_TRAIN_HELP = """flathead train [--config-name NAME] [KEY=VALUE ...]

Short forms: model. actor. ref. rollout. stand for actor_rollout_ref.model. and so on; verl's
trainer.total_training_steps is trainer.steps. Every key is described in flathead/config.py. Values now:
"""

# verl's or shorter spellings of a key -> where it lives; the only place where a key has two names
ALIASES = {
    "model.": "actor_rollout_ref.model.",
    "actor.": "actor_rollout_ref.actor.",
    "ref.": "actor_rollout_ref.ref.",
    "rollout.": "actor_rollout_ref.rollout.",
    "trainer.total_training_steps": "trainer.steps",
}


def expand_alias(override: str) -> str:
    """`model.path=x` -> `actor_rollout_ref.model.path=x`; a leading + or ~ stays."""
    rest = override.lstrip("+~")
    sign = override[: len(override) - len(rest)]
    for short, long in ALIASES.items():
        if short.endswith(".") and rest.startswith(f"{short[:-1]}="):
            return sign + long[:-1] + rest[len(short) - 1 :]
        if rest.startswith(short) and (short.endswith(".") or rest[len(short) :][:1] in ("=", "")):
            return sign + long + rest[len(short) :]
    return override


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    try:
        if command in ("--help", "-h", "help"):
            print(_HELP, end="")
        elif command == "train":
            return _train(rest)
        elif command == "report":
            return _report(rest)
        elif command == "bench":
            from flathead import bench

            return bench.main(rest) or 0
        else:
            raise ValueError(f"command: expected train, report or bench, got {command!r}; see flathead --help")
    except ValueError as error:
        print(f"flathead: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flathead: interrupted; the last checkpoint is whole, the same command goes on from it", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("flathead"):
            raise
        told = "pip install" in str(error)
        print(
            f"flathead: {error}" if told else f'flathead: {error.name} is not installed; pip install "flathead[train]"',
            file=sys.stderr,
        )
        return 2
    return 0


def _train(arguments: list[str]) -> int:
    from omegaconf import OmegaConf

    from flathead.settings import compose, resolve

    name, overrides, wants_help = "ppo_trainer", [], False
    words = iter(arguments)
    for word in words:
        if word in ("--help", "-h"):
            wants_help = True
        elif word == "--config-name" or word.startswith("--config-name="):
            name = word.partition("=")[2] or next(words, "")
            if not name:
                raise ValueError("--config-name: expected a NAME after it, such as ppo_trainer, got nothing")
        elif word.startswith("-") or "=" not in word:
            raise ValueError(f"argument: expected KEY=VALUE or --config-name NAME, got {word!r}")
        else:
            overrides.append(expand_alias(word))
    composed = compose(name, overrides)
    if wants_help:
        print(_TRAIN_HELP + OmegaConf.to_yaml(composed, resolve=True), end="")
        return 0
    config = resolve(composed, overrides)
    from flathead.trainer import train

    return train(config)


def _report(arguments: list[str]) -> int:
    from pathlib import Path

    if arguments and arguments[0] in ("--help", "-h"):
        print("flathead report RUN_DIR    make RUN_DIR/report.png again from its metrics.jsonl and result.json")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ValueError(f"report: expected one RUN_DIR, got {' '.join(arguments) or 'nothing'}")
    from flathead.metrics import plot_report

    print(plot_report(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
