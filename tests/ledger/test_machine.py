"""Whatever happens, in whatever order, the ledger does what a simple model does.

A rollout verifies exactly when the model says that its conversation is complete and its rows intact, with exactly the tokens
of the model; what the model forbids is refused and leaves no event; every dispatched rollout is accounted for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ledger.errors import LedgerError, RolloutClosed
from ledger.events import head_of
from ledger.lineage import fingerprint
from ledger.reasons import CallFailure
from ledger.receipts import Receipt, rebuild
from ledger.records import CallReply, CallRequest, Message
from ledger.verify import VerifiedRow, verify
from tests.ledger.rig import Rig
from tests.ledger.worker import SAMPLING, Conversation, altered, assistant, user


@dataclass
class ModelCall:
    id: str
    request: Conversation
    reply: CallReply
    tokens: tuple[int, ...]
    parent: ModelCall | None
    state: str = "admitted"
    failure: CallFailure | None = None

    @property
    def conversation(self) -> Conversation:
        return (*self.request, self.reply.message)


@dataclass
class ModelRollout:
    id: str
    group: str
    state: str = "open"
    calls: list[ModelCall] = field(default_factory=list)
    declared: str | None = None
    damaged: set[str] = field(default_factory=set)
    receipt: Receipt | None = None

    def committed(self) -> list[ModelCall]:
        return [c for c in self.calls if c.state == "committed"]

    def parent_of(self, request: Conversation) -> ModelCall | None:
        answers = [i for i, m in enumerate(request) if m.role == "assistant"]
        if not answers or answers[-1] == len(request) - 1:
            return None
        matches = [c for c in self.committed() if c.conversation == request[: answers[-1] + 1]]
        return matches[0] if len({c.tokens for c in matches}) == 1 else None

    def terminal(self) -> ModelCall | None:
        """The call to train up to, if the rollout may be trained."""
        if self.state == "aborted" or any(c.state == "admitted" for c in self.calls):
            return None
        by_id = {c.id: c for c in self.committed()}
        if self.declared is not None:
            return by_id.get(self.declared)
        if not by_id:
            return None
        # A tree of distinct token sequences: each points to the sequence that it continues.
        tree = {c.tokens: c.parent and c.parent.tokens for c in reversed(self.committed())}
        roots = {t for t, parent in tree.items() if parent is None}
        continued = set(tree.values()) - {None}
        if len(roots) > 1:
            roots &= continued
        leaves = {t for t in tree if t not in continued and self.root(t, tree) in roots}
        last = self.committed()[-1]
        if len(roots) != 1 or leaves != {last.tokens}:
            return None
        after = self.calls[self.calls.index(last) :]
        if any(c.state == "failed" and c.failure is not CallFailure.REFUSED for c in after):
            return None
        return next(c for c in self.committed() if c.tokens == last.tokens)

    @staticmethod
    def root(tokens: tuple[int, ...], tree: dict) -> tuple[int, ...]:
        while tree[tokens] is not None:
            tokens = tree[tokens]
        return tokens


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.rig = Rig()
        self.rollouts: dict[str, ModelRollout] = {}
        self.groups: dict[str, list[str]] = {}
        self.ready: set[str] = set()
        self.ends: Counter[str] = Counter()
        self.dispatched = 0

    def teardown(self) -> None:
        self.loop.close()

    def do(self, coroutine):
        return self.loop.run(coroutine)

    def refused(self, coroutine, error: type[Exception] = LedgerError) -> None:
        before = list(self.rig.log.events)
        with pytest.raises(error):
            self.do(coroutine)
        assert list(self.rig.log.events) == before

    def pick(self, data, *states: str) -> ModelRollout | None:
        rollouts = [r for r in self.rollouts.values() if r.state in states]
        return data.draw(st.sampled_from(rollouts)) if rollouts else None

    @initialize()
    def begin(self) -> None:
        self.dispatch()

    @precondition(lambda self: len(self.groups) < 3)
    @rule()
    def dispatch(self) -> None:
        group = f"g{self.dispatched}"
        rollouts = [f"{group}.{i}" for i in range(2)]
        self.do(self.rig.start(*rollouts, group_id=group))
        self.groups[group] = rollouts
        self.rollouts |= {r: ModelRollout(r, group) for r in rollouts}
        self.dispatched += 2

    @rule(data=st.data(), say=st.sampled_from("xy"), n=st.integers(0, 2), kind=st.sampled_from("rcce"))
    def admit(self, data, say: str, n: int, kind: str) -> None:
        """A new root, a continuation or an edited history. The worker stages its row now; the commit is another rule."""
        rollout = self.pick(data, "open")
        if rollout is None or len(rollout.calls) >= 8:
            return
        request: Conversation = (user(data.draw(st.sampled_from("ab"))),)
        committed = rollout.committed()
        if committed and kind != "r":
            request = (*data.draw(st.sampled_from(committed)).conversation, *request)
            if kind == "e":
                edited: Message = data.draw(st.sampled_from([user("b"), assistant("z")]))
                request = (edited, *request[1:])
        parent = rollout.parent_of(request)
        admission = self.do(self.rig.ledger.admit(rollout.id, fingerprint(request)))
        assert (admission.parent and admission.parent.call_id) == (parent and parent.id)
        self.rig.worker.say, self.rig.worker.generated = say, n
        reply = self.do(
            self.rig.worker.generate(
                CallRequest(
                    rollout_id=rollout.id,
                    call_id=admission.call_id,
                    messages=request,
                    sampling=SAMPLING,
                    parent=admission.parent,
                )
            )
        )
        tokens = tuple(self.rig.worker.tokens[admission.call_id])
        rollout.calls.append(ModelCall(admission.call_id, request, reply, tokens, parent))

    @rule(data=st.data(), failure=st.sampled_from([None, None, None, None, *CallFailure]))
    def settle(self, data, failure: CallFailure | None) -> None:
        waiting = [c for r in self.rollouts.values() if r.state == "open" for c in r.calls if c.state == "admitted"]
        if not waiting:
            return
        call = data.draw(st.sampled_from(waiting))
        if failure is None:
            self.do(self.rig.ledger.commit(call.reply))
            call.state = "committed"
        else:
            self.do(self.rig.ledger.fail(call.id, failure, "told to"))
            call.state, call.failure = "failed", failure
        self.refused(self.rig.ledger.commit(call.reply))
        self.refused(self.rig.ledger.fail(call.id, CallFailure.TIMEOUT, ""))

    @rule(data=st.data())
    def declare(self, data) -> None:
        rollout = self.pick(data, "open")
        if rollout is None:
            return
        rollout.declared = data.draw(st.sampled_from([f"{rollout.id}/{i}" for i in range(len(rollout.calls) + 1)]))
        self.do(self.rig.ledger.declare_terminal(rollout.id, rollout.declared))

    @rule(data=st.data())
    def seal(self, data) -> None:
        rollout = self.pick(data, "open")
        if rollout is None:
            return
        self.refused(self.rig.ledger.finalize(rollout.id, None))
        assert not isinstance(verify(self.rig.ledger.receipt(rollout.id), self.rig.worker.rows), VerifiedRow)
        rollout.receipt = self.do(self.rig.ledger.seal(rollout.id))
        rollout.state = "sealed"
        self.check(rollout)

    @rule(data=st.data(), damage=st.sampled_from(["token", "logprob", "lost"]))
    def damage_a_staged_row(self, data, damage: str) -> None:
        rollout = self.pick(data, "sealed")
        keys = [] if rollout is None or rollout.receipt is None else sorted(rollout.receipt.staging_keys)
        keys = [key for key in keys if key in self.rig.worker.rows]
        if rollout is None or not keys:
            return
        key = data.draw(st.sampled_from(keys))
        row = self.rig.worker.rows.pop(key)
        if damage == "token":
            token_ids = row.token_ids.copy()
            token_ids[data.draw(st.integers(0, len(token_ids) - 1))] += 1
            self.rig.worker.rows[key] = altered(row, token_ids=token_ids)
        elif damage == "logprob":
            self.rig.worker.rows[key] = altered(row, logprobs=row.logprobs - np.float32(1))
        rollout.damaged.add(key)
        self.check(rollout)

    def check(self, rollout: ModelRollout) -> None:
        """The receipt says what the model says, the events testify to it, and verification finds the model's tokens."""
        receipt = rollout.receipt
        assert receipt is not None
        events = self.rig.events(rollout.id)
        assert receipt == rebuild(events)
        assert receipt.head == head_of(events)
        assert list(receipt.staging_keys) == [c.reply.coords.staging_key for c in rollout.committed()]
        terminal = rollout.terminal()
        assert (receipt.verdict == "trainable") == (terminal is not None), receipt.rejections
        chain = self.chain(terminal)
        provable = bool(chain) and all(
            c.reply.completion_tokens and c.reply.coords.staging_key not in rollout.damaged for c in chain
        )
        row = verify(receipt, self.rig.worker.rows)
        assert isinstance(row, VerifiedRow) == provable, row
        if isinstance(row, VerifiedRow):
            assert tuple(row.input_ids.tolist()) == chain[-1].tokens
            assert row.loss_tokens == sum(c.reply.completion_tokens for c in chain)

    @staticmethod
    def chain(call: ModelCall | None) -> list[ModelCall]:
        return [] if call is None else [*LedgerMachine.chain(call.parent), call]

    @rule(data=st.data())
    def call_a_closed_rollout(self, data) -> None:
        rollout = self.pick(data, "sealed", "verified", "rejected", "aborted")
        if rollout is None:
            return
        self.refused(self.rig.ledger.admit(rollout.id, fingerprint([user("late")])), RolloutClosed)
        self.refused(self.rig.ledger.declare_terminal(rollout.id, ""), RolloutClosed)
        for call in rollout.calls:
            self.refused(self.rig.ledger.commit(call.reply), RolloutClosed)
            self.refused(self.rig.ledger.fail(call.id, CallFailure.TIMEOUT, ""), RolloutClosed)
        self.refused(self.rig.ledger.seal(rollout.id))

    @rule(data=st.data())
    def finalize(self, data) -> None:
        rollout = self.pick(data, "sealed")
        if rollout is None:
            return
        assert rollout.receipt is not None
        if rollout.receipt.reason is not None:
            self.refused(self.rig.ledger.finalize(rollout.id, None))
        self.do(self.rig.ledger.finalize(rollout.id, rollout.receipt.reason))
        rollout.state = "verified" if rollout.receipt.reason is None else "rejected"

    @rule(data=st.data())
    def abort(self, data) -> None:
        rollout = self.pick(data, "open", "sealed")
        if rollout is None:
            return
        rollout.receipt = self.do(self.rig.ledger.abort(rollout.id, "told to"))
        rollout.state = "aborted"
        assert rollout.receipt.verdict == "rejected"
        self.check(rollout)

    @rule(data=st.data(), end=st.sampled_from(["committed", "trained", "trained", "dropped", "evicted", "aborted"]))
    def end_a_group(self, data, end: str) -> None:
        if not self.groups:
            return
        group = data.draw(st.sampled_from(sorted(self.groups)))
        states = [self.rollouts[r].state for r in self.groups[group]]
        running = any(s in ("open", "sealed") for s in states)
        verbs = {
            "committed": lambda: self.rig.ledger.committed(group),
            "trained": lambda: self.rig.ledger.trained(group, 1),
            "dropped": lambda: self.rig.ledger.dropped(group, "told to"),
            "evicted": lambda: self.rig.ledger.evicted(group),
            "aborted": lambda: self.rig.ledger.aborted(group, "told to"),
        }
        if running or (end == "trained" and group not in self.ready) or (end == "committed" and group in self.ready):
            self.refused(verbs[end]())
            return
        self.do(verbs[end]())
        if end == "committed":
            self.ready.add(group)
            return
        for rollout_id, state in zip(self.groups.pop(group), states, strict=True):
            self.ends[{"rejected": "dropped", "aborted": "aborted"}.get(state, end) if end == "trained" else end] += 1
            del self.rollouts[rollout_id]
        for verb in verbs.values():
            self.refused(verb())

    @invariant()
    def every_dispatched_rollout_is_somewhere(self) -> None:
        account = self.rig.ledger.account
        counted = (account.dispatched, account.live, account.trained, account.dropped, account.evicted, account.aborted)
        ends = [self.ends[end] for end in ("trained", "dropped", "evicted", "aborted")]
        assert counted == (self.dispatched, len(self.rollouts), *ends)
        assert (account.lost, account.duplicated) == (0, 0)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=50)
