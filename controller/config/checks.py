"""What must hold between keys, and between the keys and this machine, checked before anything starts.

Each rule is stated with its numbers filled in. Nothing is imported but light modules, nothing is written, no GPU is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from controller.config.engine import engine
from controller.config.figures import context_tokens, generating_groups
from controller.config.load import check_values
from controller.config.model_dir import ModelFacts, inspect_model
from controller.config.plane import plane
from controller.config.problems import Problem
from controller.config.sampling import sampling
from controller.config.schema import Config
from controller.config.surroundings import environment, folders, kind_of, machine, model_folder
from controller.config.weight_sync import weight_sync
from workers.environments.registry import BUILTIN


class Findings(NamedTuple):
    problems: tuple[Problem, ...]
    """With any of these the run cannot start."""
    warnings: tuple[Problem, ...]
    model: ModelFacts | None
    """None when the model directory cannot be read."""


def check_config(config: Config) -> Findings:
    """All problems and warnings of a configuration. Reads a few files: not for an event loop."""
    problems = tuple(check_values(config))
    if problems:
        return Findings(problems, (), None)
    path = Path(config.model.path)
    model, faults = inspect_model(path) if kind_of(path) == "folder" else (None, [])
    found = [
        *model_folder(path, faults),
        *environment(config.environment),
        *engine(config),
        *sampling(config),
        *_signal(config),
        *_token_capture(config),
        *_context(config, model),
        *_loss(config),
        *_evaluation(config),
        *_deadlines(config),
        *_loop(config),
        *_fleet(config),
        *_gate(config),
        *plane(config, model),
        *weight_sync(config),
        *folders(config, model),
        *machine(config),
    ]
    return Findings(tuple(p for p in found if not p.warning), tuple(p for p in found if p.warning), model)


def _signal(config: Config) -> Iterator[Problem]:
    """What would leave every advantage at 0, or the importance ratio biased."""
    rollout, estimator = config.rollout, config.advantage.estimator
    if rollout.group_size < 2 and estimator != "reinforce++":
        yield Problem(
            path="rollout.group_size",
            what=f"{rollout.group_size} with advantage.estimator {estimator}",
            allowed=f">= 2 with {estimator}: the baseline is the group's other rollouts, so alone the advantage is 0",
            remedy="set rollout.group_size: 8",
        )
    for key, greedy in (("temperature", rollout.temperature == 0), ("top_k", rollout.top_k == 1)):
        if greedy:
            yield Problem(
                path=f"rollout.{key}",
                what=f"{getattr(rollout, key):g} is greedy sampling, with advantage.estimator {estimator}",
                allowed=(
                    f"{'> 0' if key == 'temperature' else '0 (off) or > 1'}: all rollouts of a prompt "
                    "would be equal, so each advantage is 0 and nothing is learned"
                ),
                remedy=f"set rollout.{key}: {1.0 if key == 'temperature' else 0}",
            )
    uses_sampler = config.training.loss.old_logprobs == "rollout" or config.training.loss.tis_cap is not None
    if uses_sampler and (rollout.top_p < 1 or rollout.top_k > 1):
        yield Problem(
            path="rollout.top_p" if rollout.top_p < 1 else "rollout.top_k",
            what=f"top_p {rollout.top_p:g}, top_k {rollout.top_k}: the sampler's logprobs are of the cut distribution",
            allowed="top_p 1 and top_k 0 where the ratio divides by them: the trainer's are of the whole vocabulary",
            remedy="turn both off, or set training.loss.old_logprobs: policy without tis_cap",
            warning=True,
        )


def _token_capture(config: Config) -> Iterator[Problem]:
    capture = config.token_capture
    if not capture.enabled and capture.trajectory != "terminal":
        yield Problem(
            path="token_capture.trajectory",
            what=f"{capture.trajectory} with token_capture.enabled false",
            allowed="terminal without capture: an environment returns the tokens of one row, and no record knows of others",
            remedy="set token_capture.enabled: true, or token_capture.trajectory: terminal",
        )
    elif capture.trajectory == "terminal" and capture.credit != "equal":
        yield Problem(
            path="token_capture.credit",
            what=f"{capture.credit} with token_capture.trajectory terminal",
            allowed="equal with terminal: a rollout has one row, so there is nothing to share out",
            remedy="remove it, or set token_capture.trajectory: branches",
        )
    if not capture.enabled and config.environment.name in BUILTIN:
        yield Problem(
            path="token_capture.enabled",
            what=f"false with environment.name {config.environment.name}",
            allowed="true for the built-in environments: they ask the gate for answers and never see a token",
            remedy="set token_capture.enabled: true, or name an environment of your own that returns RolloutResult.tokens",
        )
    if capture.trajectory == "branches" and config.rollout.max_calls == 1:
        yield Problem(
            path="token_capture.trajectory",
            what="branches with rollout.max_calls 1: a rollout of one call has one conversation",
            allowed="terminal, or rollout.max_calls > 1",
            warning=True,
        )


def _context(config: Config, model: ModelFacts | None) -> Iterator[Problem]:
    limit, wanted = model.context if model else None, config.generation.max_model_len
    if limit is not None and wanted is not None and wanted > limit:
        yield Problem(
            path="generation.max_model_len",
            what=f"{wanted} > {limit}",
            allowed=f"<= {limit}: the positions that {config.model.path} was made for (its config.json)",
            remedy=f"set generation.max_model_len: {limit}",
        )
    context = context_tokens(config, model)
    if context is None:
        if model is not None:
            yield Problem(
                path="generation.max_model_len",
                what=f"is null, and the config.json of {config.model.path} does not say how long a sequence may be",
                allowed="an integer >= 2 for this model",
                remedy="set generation.max_model_len: 2048",
            )
        return
    if config.rollout.max_tokens >= context:
        yield Problem(
            path="rollout.max_tokens",
            what=f"{config.rollout.max_tokens} >= {context}",
            allowed=f"< {context}, the tokens of a whole conversation: the prompt needs room too",
            remedy=f"set rollout.max_tokens: {max(1, context // 2)}",
        )
    budget = config.training.max_tokens_per_microbatch
    if budget < context:
        yield Problem(
            path="training.max_tokens_per_microbatch",
            what=f"{budget} < {context}: a row may be that long, and then gets a pass of its own, over the budget",
            allowed=f">= {context}, the tokens of a whole conversation",
            remedy="raise it if memory allows, or lower generation.max_model_len",
            warning=True,
        )


def _loss(config: Config) -> Iterator[Problem]:
    loss, optimizer = config.training.loss, config.training.optimizer
    if config.advantage.rewards == "random":
        yield Problem(
            path="advantage.rewards",
            what="random: the policy is trained on coin flips, and learns nothing of the task",
            allowed="environment, unless this run is the control of an experiment",
            warning=True,
        )
    if loss.tis_cap is not None and loss.old_logprobs != "policy":
        yield Problem(
            path="training.loss.tis_cap",
            what=f"{loss.tis_cap:g} with training.loss.old_logprobs {loss.old_logprobs}",
            allowed="null with old_logprobs rollout: the weight is policy over rollout logprobs, so it needs the policy's",
            remedy="set training.loss.old_logprobs: policy, or remove tis_cap",
        )
    if optimizer.lr == 0:
        yield Problem(
            path="training.optimizer.lr",
            what="0: the weights will not change",
            allowed="a number > 0, unless this run is the control of an experiment",
            warning=True,
        )
    if optimizer.warmup_steps > config.run.steps:
        yield Problem(
            path="training.optimizer.warmup_steps",
            what=f"{optimizer.warmup_steps} > run.steps {config.run.steps}: the rate never reaches {optimizer.lr:g}",
            allowed=f"<= {config.run.steps}",
            warning=True,
        )


_HELD_OUT = {
    "agent_process": "held_out_prompts",
    "reasoning_gym": "held_out_share",
    "reverse_text": "held_out_share",
}
"""The argument by which a built-in environment sets prompts aside."""


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation, environment = config.evaluation, config.environment
    if evaluation.questions is None:
        if evaluation.every_steps is not None:
            yield Problem(
                path="evaluation.every_steps",
                what=f"{evaluation.every_steps} without evaluation.questions: there is no evaluation",
                allowed="null, unless evaluation.questions says how many held-out prompts to ask",
                warning=True,
            )
        return
    argument = _HELD_OUT.get(environment.name)
    if argument is not None and not environment.args.get(argument):
        yield Problem(
            path="evaluation.questions",
            what=f"{evaluation.questions}, but {environment.name} sets no prompts aside",
            allowed="null, unless the environment has held-out prompts",
            remedy=f"set environment.args.{argument}",
        )
    temperature = config.rollout.temperature if evaluation.temperature is None else evaluation.temperature
    if temperature == 0 and evaluation.samples > 1:
        yield Problem(
            path="evaluation.samples",
            what=f"{evaluation.samples} with temperature 0: greedy samples of a question are all alike",
            allowed="1 at temperature 0",
            warning=True,
        )


def _deadlines(config: Config) -> Iterator[Problem]:
    rollout, stall = config.rollout, config.watchdog.stall_after_s
    if rollout.call_timeout_s > rollout.timeout_s:
        yield Problem(
            path="rollout.call_timeout_s",
            what=f"{rollout.call_timeout_s:g} > {rollout.timeout_s:g}",
            allowed="<= rollout.timeout_s: a call is part of its rollout, so its own deadline would never be reached",
            remedy="lower it, or raise rollout.timeout_s",
        )
    if config.watchdog.stall_action != "abort":
        return
    if stall <= rollout.call_timeout_s:
        yield Problem(
            path="watchdog.stall_after_s",
            what=f"{stall:g} <= {rollout.call_timeout_s:g}",
            allowed="> rollout.call_timeout_s: one healthy model call may take that long, and no group ends meanwhile",
            remedy="raise it, lower rollout.call_timeout_s, or set watchdog.stall_action: warn",
        )
        return
    waits = {
        "rollout.timeout_s": rollout.timeout_s,
        "training.step_timeout_s": config.training.step_timeout_s,
        "weight_sync.timeout_s": config.weight_sync.timeout_s,
    }
    longest = max(waits, key=lambda key: waits[key])
    if stall <= waits[longest]:
        yield Problem(
            path="watchdog.stall_after_s",
            what=f"{stall:g} <= {waits[longest]:g}: a run that is slow, yet within its deadlines, may be ended as stalled",
            allowed=f"> {longest}, so that a deadline passes first and names what it waited for",
            warning=True,
        )


def _fleet(config: Config) -> Iterator[Problem]:
    fleet, workers = config.fleet, config.generation.workers
    if fleet.min_serving > workers:
        yield Problem(
            path="fleet.min_serving",
            what=f"{fleet.min_serving} > generation.workers {workers}: the run would end before it begins",
            allowed=f"<= {workers}",
            remedy=f"set fleet.min_serving: {workers}, or raise generation.workers",
        )
    failures, call = config.failures, config.rollout.call_timeout_s
    pauses = sum(min(failures.backoff_s * 2**i, failures.max_backoff_s) for i in range(failures.call_attempts - 1))
    if pauses >= call:
        yield Problem(
            path="failures.call_attempts",
            what=f"{failures.call_attempts}: the pauses between the attempts take {pauses:g} s >= {call:g}",
            allowed="so many that the pauses fit into rollout.call_timeout_s",
            remedy="lower it, or failures.max_backoff_s",
        )
    restarted = fleet.restart_after_s + config.workers.start_timeout_s
    if call <= fleet.stalled_after_s:
        yield Problem(
            path="fleet.stalled_after_s",
            what=f"{fleet.stalled_after_s:g} >= rollout.call_timeout_s {call:g}: calls end before a wedged engine shows",
            allowed="< rollout.call_timeout_s, so that its calls can be made elsewhere",
            warning=True,
        )
    elif workers == 1 and call <= restarted:
        yield Problem(
            path="rollout.call_timeout_s",
            what=f"{call:g} <= {restarted:g}: the only generation worker may take longer to be restarted",
            allowed="> fleet.restart_after_s + workers.start_timeout_s, so that calls outlast it",
            warning=True,
        )


def _loop(config: Config) -> Iterator[Problem]:
    loop = config.loop
    limits = {
        "loop.report_over_ms": loop.report_over_ms,
        "loop.fail_over_ms": loop.fail_over_ms or loop.report_over_ms,
    }
    if loop.exit_after_s is None:
        return
    longest = max(limits, key=lambda key: limits[key])
    if loop.exit_after_s * 1000 <= limits[longest]:
        yield Problem(
            path="loop.exit_after_s",
            what=f"{loop.exit_after_s:g} s <= {limits[longest]:g} ms of {longest}",
            allowed=f"> {limits[longest] / 1000:g}: what ends the process is reported before",
            remedy="raise it, or set it to null",
        )


def _gate(config: Config) -> Iterator[Problem]:
    gate = config.gate
    if gate.host in ("0.0.0.0", "::") and gate.public_url is None:  # noqa: S104  # refused, not used
        yield Problem(
            path="gate.public_url",
            what=f"is null with gate.host {gate.host}",
            allowed="the URL that agents reach this machine by: they cannot be told to connect to every address",
            remedy="set gate.public_url: http://<this machine>:<gate.port>",
        )
    if gate.public_url is not None and gate.port == 0:
        yield Problem(
            path="gate.port",
            what=f"0 with gate.public_url {gate.public_url}: the port is another one in each run",
            allowed="a fixed port, unless a proxy finds out",
            warning=True,
        )
    if gate.sampling == "request":
        yield Problem(
            path="gate.sampling",
            what="request: what an agent samples at another temperature is trained as if it had been sampled at the run's",
            allowed="fixed, unless the agents ask for what rollout.temperature, top_p and top_k say",
            warning=True,
        )
    rollouts = generating_groups(config.rollout) * config.rollout.group_size
    for key in ("max_open_rollouts", "max_connections"):
        if getattr(gate, key) < rollouts:
            yield Problem(
                path=f"gate.{key}",
                what=f"{getattr(gate, key)} < {rollouts}, the rollouts that are played at the same time",
                allowed=f">= {rollouts} when each is an agent over HTTP",
                warning=True,
            )
