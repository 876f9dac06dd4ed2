"""The effective plan of a run as text: what runs where, how much of it, how long it may take, what is written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import msgspec

from controller.config.describe import keys
from controller.config.figures import (
    context_tokens,
    generating_groups,
    live_groups,
    min_groups,
    weight_bytes,
    weights_folder,
)
from controller.config.model_dir import ModelFacts
from controller.config.schema import Config, DataPlaneConfig, WeightSyncConfig
from ledger.segments import FOLDER as LEDGER

Row = tuple[str, str]


def plan(config: Config, model: ModelFacts) -> str:
    """The plan of a checked configuration, with every default resolved."""
    sections = {
        "run": _run(config, model),
        "processes": _processes(config),
        "capacities": _capacities(config),
        "upper bounds per step": _bounds(config, model),
        "deadlines": _deadlines(config),
        "files": _files(config, model),
        "values (* not the default)": _values(config),
    }
    lines: list[str] = []
    for title, rows in sections.items():
        listed = list(rows)
        width = max(len(name) for name, _ in listed)
        lines += [title, *(f"  {name:<{width}}  {text}" for name, text in listed), ""]
    return "\n".join(lines)


def _run(config: Config, model: ModelFacts) -> Iterator[Row]:
    loss, rollout = config.training.loss, config.rollout
    yield "model", f"{model.architecture}, {model.parameters:,} parameters, {config.model.dtype}, {config.model.path}"
    arguments = msgspec.json.encode(config.environment.args).decode() if config.environment.args else "no arguments"
    yield "environment", f"{config.environment.name}, {arguments}"
    yield "steps", f"{config.run.steps} of {rollout.groups_per_step} groups x {rollout.group_size} rollouts"
    terms = [config.advantage.estimator, loss.aggregation, f"ratio over {loss.old_logprobs} logprobs"]
    if loss.tis_cap is not None:
        terms.append(f"TIS cap {loss.tis_cap:g}")
    if loss.kl_coef > 0:
        terms.append(f"KL {loss.kl_coef:g} ({loss.kl_estimator}, a reference model is kept)")
    if loss.entropy_coef > 0:
        terms.append(f"entropy {loss.entropy_coef:g}")
    yield "loss", ", ".join(terms)
    yield "custody", _custody(config)
    evaluation = config.evaluation
    if evaluation.questions is not None:
        between = "" if evaluation.every_steps is None else f", every {_count(evaluation.every_steps, 'step')}"
        what = f"{evaluation.questions} held-out questions x {_count(evaluation.samples, 'sample')}"
        yield "evaluation", f"{what} before the first step{between} and after the last, training waits meanwhile"
    sampling = f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k or 'off'}"
    yield "sampling", f"{sampling}, up to {rollout.max_tokens} tokens a call"


def _custody(config: Config) -> str:
    capture = config.token_capture
    if not capture.enabled:
        return "none: the environment returns the tokens, which nothing proves"
    what = {
        "terminal": "the terminal conversation of each rollout",
        "branches": f"every proven conversation of each rollout, credit {capture.credit}",
    }[capture.trajectory]
    return f"{what}; a rollout whose custody fails: {capture.on_failure}"


def _processes(config: Config) -> Iterator[Row]:
    generation, training = config.generation, config.training
    yield "controller", "this process: one event loop, no tokens, no model"
    port = config.gate.port or "a free port"
    yield "gate", f"in it, HTTP for agents on {config.gate.host}, {port}, {config.gate.sampling} sampling"
    yield "data plane", _data_plane(config.dataplane)
    yield (
        f"generation x {generation.workers}",
        f"{generation.engine} engine on {generation.device}, {_count(generation.threads, 'thread')}, "
        f"up to {generation.max_batch} requests decode together, each",
    )
    yield "training x 1", f"on {training.device}, {_count(training.threads, 'thread')}"
    yield "weight sync", _weight_sync(config.weight_sync)


def _weight_sync(config: WeightSyncConfig) -> str:
    calls = {
        "keep": "go on with the new weights",
        "drain": f"end first, within {config.drain_timeout_s:g} s",
        "abort": "are taken out and go on from the tokens that they have",
    }[config.mode]
    return f"{config.transport}, {config.mode}: calls that are running {calls}"


def _data_plane(config: DataPlaneConfig) -> str:
    units = _count(config.storage_units, "storage unit")
    where = "" if config.servers == "local" else f", in the Ray cluster at {config.ray.address}"
    if config.backend == "simple":
        return f"TransferQueue: 1 controller, {units}{where}"
    return (
        f"TransferQueue: 1 controller; rows in MooncakeStore over {config.mooncake.protocol}: 1 master, {units} of "
        f"{config.mooncake.memory_mb:,} MiB{where}"
    )


def _capacities(config: Config) -> Iterator[Row]:
    rollout, generation = config.rollout, config.generation
    live, generating = live_groups(rollout), generating_groups(rollout)
    surplus = f" x {rollout.over_sampling:g} over-sampled" if rollout.over_sampling > 1 else ""
    yield (
        "groups live",
        f"{live} = {rollout.groups_per_step} per step x ({rollout.max_staleness} stale + 1){surplus}, {rollout.sampler}",
    )
    rollouts, decoding = generating * rollout.group_size, generation.workers * generation.max_batch
    queued = f", {rollouts - decoding} of them waiting for a place" if rollouts > decoding else ""
    yield "groups generating", f"{generating}: {rollouts} rollouts, {decoding} decode together{queued}"
    yield "staleness", f"at most {_count(rollout.max_staleness, 'step')} behind the weights being trained"
    if min_groups(rollout) < rollout.groups_per_step:
        yield "groups dropped", f"not replaced while a step has {min_groups(rollout)} of {rollout.groups_per_step}"
    yield "groups being verified", str(config.finalizer.concurrency)


def _bounds(config: Config, model: ModelFacts) -> Iterator[Row]:
    rollout = config.rollout
    rollouts = rollout.groups_per_step * rollout.group_size
    context = context_tokens(config, model) or 0
    calls, tokens = rollout.max_calls, rollout.max_tokens
    yield "conversation", f"{context:,} tokens, prompt and completions"
    yield (
        "generated",
        f"{rollouts * calls * tokens:,} tokens = {rollouts} rollouts x {_count(calls, 'call')} x {tokens}",
    )
    yield "trained", f"{rollouts * context:,} tokens = {rollouts} rows x {context:,}"
    yield "microbatch", f"{max(config.training.max_tokens_per_microbatch, context):,} tokens with padding"


def _deadlines(config: Config) -> Iterator[Row]:
    rollout, stall = config.rollout, config.watchdog
    yield "model call", f"{rollout.call_timeout_s:g} s"
    yield "rollout", f"{rollout.timeout_s:g} s, dispatch to reward"
    yield "turn", f"{min(rollout.turn_timeout_s, rollout.timeout_s):g} s, between two model calls"
    yield "trainer call", f"{config.training.step_timeout_s:g} s"
    yield "data plane", f"{config.dataplane.timeout_s:g} s for each put, get, clear"
    yield "weight sync", f"{config.weight_sync.timeout_s:g} s"
    yield "worker start, stop", f"{config.workers.start_timeout_s:g} s, {config.workers.stop_timeout_s:g} s"
    fleet = config.fleet
    yield (
        "generation worker",
        f"quarantined after {_count(fleet.missed_probes, 'missed probe')} of {fleet.probe_timeout_s:g} s, or "
        f"{fleet.stalled_after_s:g} s without a token; restarted after {fleet.restart_after_s:g} s, "
        f"{_count(fleet.max_restarts, 'time')} at most",
    )
    loop = config.loop
    end = "never ended" if loop.exit_after_s is None else f"ended with exit code 4 after {loop.exit_after_s:g} s"
    yield "event loop", f"blocked for {loop.report_over_ms:g} ms: reported; {end}"
    yield "stall", f"{stall.stall_after_s:g} s without a group committed or a step done: {stall.stall_action}"


def _files(config: Config, model: ModelFacts) -> Iterator[Row]:
    run_dir, keep, every = Path(config.run.dir), config.checkpoint.keep, config.checkpoint.every_steps
    when = "at the end" if every is None else f"every {_count(every, 'step')} and at the end"
    yield f"{run_dir}/", "metrics, trace, report; error.log when the run fails"
    yield f"{run_dir / 'control.json'}", "how to reach the gate's control plane, while the run lasts"
    yield f"{run_dir / 'status.json'}", "where the run says what it is waiting for, while it lasts"
    synced = (
        "on the disk before a call is answered" if config.ledger.durability == "batch" else "written without waiting"
    )
    yield f"{run_dir / LEDGER}/", f"the record of every rollout, {synced}; up to {config.ledger.history_mb:,} MiB"
    yield f"{run_dir / 'checkpoints'}/", f"{when}, on an interrupt too; the last {keep} are kept"
    yield (
        f"{weights_folder(config)}/",
        f"up to two versions of the weights, {weight_bytes(config.model, model) / 1e6:,.1f} MB each",
    )


def _values(config: Config) -> Iterator[Row]:
    for key in keys(Config):
        value = reduce(getattr, key.path.split("."), config)
        mark = " " if not key.required and value == key.default else "*"
        yield f"{mark} {key.path}", msgspec.json.encode(value).decode()


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
