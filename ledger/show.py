"""Stories as text: one block per rollout, or one line of a table, with the totals below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ledger.events import Lineage
from ledger.reasons import CallFailure, Reason
from ledger.records import WeightSpan
from ledger.story import CallStory, Fate, RolloutStory
from ledger.terminal import Selection

_COLUMNS = ("rollout", "calls", "generated", "weights", "verdict", "what became of it")

_WIDEST = 100
"""Characters of a table's last column; a block has it all."""

_ROOTS = {
    Lineage.FORK: "; a new root: its history is no earlier call's",
    Lineage.AMBIGUOUS: "; a new root: its history is that of several earlier calls",
}

_SELECTED: dict[Selection | None, str] = {
    "declared": "declared",
    "witnessed": "known by the scored answer",
    "unique_leaf": "not declared; the calls single it out",
}


def block(story: RolloutStory) -> str:
    """Everything about one rollout."""
    rows = [
        (
            "dispatched",
            f"with group {clean(story.group_id)}, prompt {clean(story.prompt_id)}, weights v{story.dispatch_version}",
        ),
        *(("calls" if i == 0 else "", _call(call)) for i, call in enumerate(story.calls)),
        ("terminal", _terminal(story)),
        *(("branch", " > ".join(map(_seq, chain))) for chain in story.branches),
        ("verdict", _verdict(story)),
        ("became", _became(story)),
        ("record", f"{story.events} events, head {story.head}" if story.events else "no events"),
    ]
    return "\n".join([f"rollout {clean(story.rollout_id)}", *(f"  {name:<10}  {text}" for name, text in rows)])


def table(stories: Iterable[RolloutStory]) -> Iterator[str]:
    """One line per rollout, then the totals."""
    widths = (20, 5, 9, 9, 22)
    yield _line(_COLUMNS, widths)
    total = calls = tokens = 0
    fates: Counter[str] = Counter()
    reasons: Counter[Reason] = Counter()
    for story in stories:
        total += 1
        calls += len(story.calls)
        tokens += story.generated_tokens
        fates[story.fate.end] += 1
        if story.reason is not None:
            reasons[story.reason] += 1
        cells = (
            clean(story.rollout_id),
            str(len(story.calls)),
            str(story.generated_tokens),
            _versions([s for c in story.calls for s in c.weight_spans]),
            str(story.reason or story.state),
            _became(story),
        )
        yield _line(cells, widths)
    yield ""
    ends = ", ".join(f"{n} {end}" for end, n in fates.most_common())
    yield f"{total} rollouts, {calls} calls, {tokens} generated tokens" + (f": {ends}" if ends else "")
    for reason, n in reasons.most_common():
        yield f"  {n:>6} {reason}: {reason.meaning}"


def clean(text: str) -> str:
    """`text` without what a terminal would act on: it may come from a model or an agent."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _call(call: CallStory) -> str:
    place = str(call.lineage) if call.parent_call_id is None else f"continues {_seq(call.parent_call_id)}"
    head = f"{_seq(call.call_id):>3}  {place:<13}"
    if call.state == "committed":
        inherited = f"{call.inherited_tokens} + " if call.inherited_tokens else ""
        generated = f"{call.generated_tokens} generated ({_spans(call.weight_spans)})"
        tokens = f"{inherited}{call.prompt_tokens} prompt, {generated}, {call.finish_reason}"
        return f"{head}  {tokens}{_ROOTS.get(call.lineage, '')}"
    if call.failure is not None:
        return f"{head}  failed: {call.failure} ({CallFailure(call.failure).meaning}): {clean(call.detail)}"
    return f"{head}  " + ("no outcome yet" if call.state == "admitted" else "no outcome when the rollout was closed")


def _seq(call_id: str) -> str:
    return call_id.rpartition("/")[2]


def _terminal(story: RolloutStory) -> str:
    if story.terminal is None:
        known = [f"{clean(story.declared)} was declared"] if story.declared is not None else []
        known += [f"by {by}: {' '.join(calls) or 'no call'}" for by, calls in story.witnessed.items()]
        return "; ".join(["none", *known])
    chain = " > ".join(map(_seq, story.chain))
    return f"{clean(story.terminal)} ({_SELECTED[story.selection]}); calls {chain}, {story.chain_tokens} tokens"


def _verdict(story: RolloutStory) -> str:
    if story.reason is None:
        if story.state != "verified":
            return f"none yet, the rollout is {story.state}"
        if story.trajectory == "echo":
            return "accepted: the environment's own tokens, which nothing proves"
        return "verified: every token is proven"
    if story.state == "aborted":
        return f"aborted: {clean(story.detail)}"
    detail = "" if story.detail in ("", story.meaning) else f": {clean(story.detail)}"
    return f"rejected: {story.reason} ({story.meaning}){detail}"


def _became(story: RolloutStory) -> str:
    again = "" if story.replaced_by is None else f"; played again as {story.replaced_by}"
    return _fate(story.fate) + again


def _fate(fate: Fate) -> str:
    text = str(fate.end)
    if fate.end == "trained":
        text = f"trained in step {fate.step}"
    elif fate.end == "evaluated":
        text = f"held out: evaluated after step {fate.step}"
    elif fate.step is not None:
        text = f"{fate.end}: {clean(fate.detail)}; the rest of its group was trained in step {fate.step}"
    elif fate.detail:
        text = f"{fate.end}: {clean(fate.detail)}"
    if fate.undone_by_resume is not None:
        text += f" (undone: the run was resumed from step {fate.undone_by_resume})"
    return text


def _spans(spans: Iterable[WeightSpan]) -> str:
    listed = list(spans)
    if len(listed) == 1:
        return f"v{listed[0].version}"
    return ", ".join(f"v{s.version}: {s.start}-{s.end - 1}" for s in listed) or "nothing"


def _versions(spans: list[WeightSpan]) -> str:
    versions = sorted({s.version for s in spans})
    if not versions:
        return "-"
    return f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}-v{versions[-1]}"


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    *first, last = cells
    last = last if len(last) <= _WIDEST else last[: _WIDEST - 1] + "…"
    return "  ".join([*(f"{cell:<{width}}" for cell, width in zip(first, widths, strict=True)), last]).rstrip()
