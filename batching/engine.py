"""The engine: continuous batching over a Runner, one thread that owns the loop.

A step is: take what came, admit, plan, compute, commit, publish. Everything that decides lives in
the scheduler and the policy; everything that computes lives in the runner. A failure costs the
request that caused it; only a bug of the loop itself ends the engine, and then loudly.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Condition

from batching.beam_group import Beams
from batching.blocks import BlockPool
from batching.checks import check_request, check_size
from batching.choices import Choices
from batching.grammar import GrammarCompiler, GrammarError
from batching.group import Group, Shown
from batching.meter import EngineMeter
from batching.options import EngineOptions
from batching.orders import Cancel, Order, Pause, Resume
from batching.pace import Pace
from batching.policy import ArrivalRate, idle_due_at
from batching.prefix import PrefixCache
from batching.request import ServedModel
from batching.row import Row
from batching.runner import RowError, RowOutput, Runner
from batching.scheduler import Scheduler
from batching.stepper import FAILED, Stepper, row_error
from batching.tables import Tables
from batching.trial import ROUNDS, trial_steps
from promptmill.core.engine import (
    Capabilities,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    GenRequest,
    Paused,
    PauseMode,
    Resumable,
    Resumed,
    Started,
    Tokens,
)
from promptmill.core.errors import Rejected, Unavailable
from promptmill.core.jobs import FinishReason
from promptmill.core.logs import get_logger

IDLE_TURN_S = 1.0  # an idle engine turns so often, so that its ``stepped_at`` shows that it lives

Sink = Callable[[Sequence[EngineEvent]], None]
log = get_logger(__name__)


class BatchingEngine:
    """``promptmill.core.engine.Engine`` over ``load()``, which is called on the thread of ``run``."""

    def __init__(self, load: Callable[[], Runner], models: Mapping[str, ServedModel], options: EngineOptions):
        self.caps = Capabilities()
        self._load = load
        self._models = models
        self._compilers = {
            name: GrammarCompiler(served.tokenizer, served.card.vocab_size, served.card.eos_token_ids) for name, served in models.items()
        }
        self._options = options
        self._clock = options.clock
        self._meter = EngineMeter(options.metrics)
        self._arrivals = ArrivalRate()
        self._window_opened: float | None = None
        self._events: list[EngineEvent] = []  # of this step
        self._steps = 0
        self._checked_at = 0  # the step behind which the books were checked
        self._snapshot = EngineStats(waiting=0)
        self._given_up: tuple[Resumable, ...] = ()
        # shared with other threads, under _changed
        self._changed = Condition()
        self._inbox: deque[Group | Order] = deque()  # in order of arrival
        self._known: set[str] = set()  # ids that have not ended
        self._alive = False
        self._draining = False
        self._closing = False

    # -- the port, any thread

    def submit(self, request: GenRequest) -> None:
        """See the port."""
        served = self._models.get(request.model)
        if served is None:
            raise Rejected(f"this engine does not serve the model {request.model}", param="model", code="model_not_found")
        if not self._alive:
            raise Unavailable("the engine does not run")
        compiler = self._compilers[request.model]
        check_request(request, served.card, self.caps, compiler)
        check_size(request, self._runner, shares=self._options.prefix_cache)
        beam = request.sampling.beam
        try:
            group = Choices(request, served, compiler) if beam is None else Beams(request, served, compiler, beam)
        except GrammarError as error:
            raise Rejected(f"what was generated breaks the grammar: {error.message}", param="generated") from None
        with self._changed:
            if not self._alive or self._closing or self._draining:
                raise Unavailable("the engine does not run")
            if request.id in self._known:
                raise Rejected(f"the engine already has a request {request.id}")
            self._known.add(request.id)
            self._inbox.append(group)
            self._arrivals.note(self._clock.monotonic())
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        self._tell(request_id, Cancel(request_id))

    def pause(self, request_id: str, mode: PauseMode = "auto") -> None:
        self._tell(request_id, Pause(request_id, mode))

    def resume(self, request_id: str) -> None:
        self._tell(request_id, Resume(request_id))

    def stats(self) -> EngineStats:
        """As of the last step; ``waiting`` also counts what the loop has not seen yet."""
        snapshot = self._snapshot
        unseen = sum(isinstance(item, Group) for item in tuple(self._inbox))
        return replace(snapshot, waiting=snapshot.waiting + unseen)

    @property
    def alive(self) -> bool:
        return self._alive

    def drain(self, seconds: float) -> tuple[Resumable, ...]:
        """See the port."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: not self._known or not self._alive, seconds)
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._alive)
            return self._given_up

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def run(self, sink: Sink, ready: Callable[[], None]) -> None:
        """See the port."""
        self.prepare()
        ready()
        try:
            while not self._closing:
                if events := self.step():
                    sink(events)
                self._wait()
            self._end_all()
        except Exception:
            log.exception("engine_died")
            self._fail_all()
        finally:
            with self._changed:
                self._alive = False
                self._changed.notify_all()
            for compiler in self._compilers.values():
                compiler.close()
        try:
            if events := self._take_events():
                sink(events)
        except Exception:
            log.exception("last_events_lost", events=len(events))

    # -- the loop, the thread of ``run``

    def prepare(self) -> None:
        """Load the runner; from here on ``submit`` and ``step`` work."""
        runner = self._runner = self._load()
        pool = BlockPool(runner.blocks)
        self._tables = Tables(pool, PrefixCache(pool, enabled=self._options.prefix_cache), copy=runner.copy, wipe=runner.wipe)
        self._scheduler = Scheduler(self._tables, rows=runner.rows, reserved=self._options.reserved_rows)
        self._pace = Pace(self._options.target_itl_s, rows=runner.rows + self._options.reserved_rows, prefill=self._options.prefill_tokens)
        self._stepper = Stepper(runner, self._pace, self._meter, self._clock)
        self.caps = runner.caps
        if self._options.target_itl_s:
            for number in range(ROUNDS):
                for works in trial_steps(runner, next(iter(self._models)), self._options.prefill_tokens):
                    self._stepper.rehearse(works, count=number > 0)
        self._note_stats()
        self._alive = True

    def step(self) -> list[EngineEvent]:
        """One step; its events, in order."""
        self._take_inbox()
        self._scheduler.shrink(self._pace.memory_rows)
        self._note_lost()
        self._admit()
        plan = self._scheduler.plan(self._pace.prefill_budget)
        self._note_lost()
        if plan.works:
            self._steps += 1
            self._publish(self._scheduler.commit(plan, self._stepper.run(plan)))
        elif self._scheduler.running:
            self._fail_stuck()
        else:
            self._rest()
        self._note_stats()
        return self._take_events()

    def _rest(self) -> None:
        """Nothing is to be done. The books are checked now and then, not in the way of whoever comes next."""
        self._stepper.idle()
        if self._steps != self._checked_at and not self._scheduler.waiting:
            self._scheduler.check_integrity()
            self._checked_at = self._steps

    def idle_s(self) -> float:
        """How long nothing is to be done, if nothing comes."""
        if self._scheduler.running:
            return 0.0
        if waiting := self._scheduler.waiting:
            return self._window_due(waiting) - self._clock.monotonic()
        return IDLE_TURN_S

    def _wait(self) -> None:
        with self._changed:
            if not self._inbox and not self._closing and (pause := self.idle_s()) > 0:
                self._changed.wait(pause)

    # what came

    def _tell(self, request_id: str, item: Order) -> None:
        with self._changed:
            if request_id in self._known:
                self._inbox.append(item)
                self._changed.notify_all()

    def _take_inbox(self) -> None:
        with self._changed:
            came = list(self._inbox)
            self._inbox.clear()
        for item in came:
            if isinstance(item, Group):
                self._arrive(item)
            elif (group := self._scheduler.find(item.id)) is not None:
                self._obey(group, item)

    def _arrive(self, group: Group) -> None:
        if group.done:  # an earlier run had published its end, but not told of it
            self._finish(group)
        else:
            self._scheduler.submit(group)

    def _obey(self, group: Group, order: Order) -> None:
        if isinstance(order, Cancel):
            self._scheduler.remove(group)
            self._finish(group, cancelled=True)
        elif isinstance(order, Pause) and group not in self._scheduler.paused:
            kept = order.mode != "recompute"
            self._scheduler.pause(group, keep=kept)
            self._meter.pause("keep" if kept else "recompute")
            self._events.append(Paused(group.id, kept, asked=True))
        elif isinstance(order, Resume) and group in self._scheduler.paused:
            self._scheduler.resume(group)

    # admission

    def _admit(self) -> None:
        """Admit at every step while busy; an idle engine first waits for its window."""
        waiting = self._scheduler.waiting
        if not waiting:
            self._window_opened = None
            return
        now = self._clock.monotonic()
        if not self._scheduler.running:
            if self._window_opened is None:
                self._window_opened = now
            if now < self._window_due(waiting):
                return
        opened, self._window_opened = self._window_opened, None
        for group in self._scheduler.admit(now, self._pace.row_limit, self._pace.memory_rows):
            if group.admitted_at is None:
                group.admitted_at = now
                enqueued = group.request.enqueued_at
                self._events.append(Started(group.id, now - enqueued, now - max(enqueued, now if opened is None else opened)))
            else:
                self._events.append(Resumed(group.id))

    def _window_due(self, waiting: Sequence[Group]) -> float:
        arrivals = [(group.priority, group.request.enqueued_at) for group in waiting]
        return idle_due_at(arrivals, self._options.idle_window_s, self._runner.rows, self._arrivals.gap_s)

    def _note_lost(self) -> None:
        for lost in self._scheduler.take_lost():
            self._meter.pause("keep" if lost.kept else "recompute")
            self._events.append(Paused(lost.group.id, lost.kept, asked=False))

    # publishing

    def _publish(self, happened: Sequence[tuple[Group, Row, RowOutput | RowError]]) -> None:
        now = self._clock.monotonic()
        for group, row, result in happened:
            if self._scheduler.find(group.id) is not group:  # it ended earlier in this step
                continue
            if isinstance(result, RowError):
                self._fail(group, result)
                continue
            try:
                self._go_on(group, row, result, now)
            except GrammarError as error:
                self._fail(group, RowError("grammar_error", error.message))
            except Exception as error:  # of a tokenizer: it must not cost the neighbours
                log.warning("request_broke", request=group.id, error=type(error).__name__, exc_info=True)
                self._fail(group, row_error(error))
            else:
                if group.done:
                    self._scheduler.remove(group)
                    self._finish(group)

    def _go_on(self, group: Group, row: Row, output: RowOutput, now: float) -> None:
        group.note_scores(row, output)
        if row.pending:
            return  # more of its tokens are to come
        if group.first_token_at is None:
            group.first_token_at = now
            self._meter.cached(group.cached_tokens)
        gap_s = None if row.token_at is None else now - row.token_at
        row.token_at = now
        for shown in group.take(row, output.drawn, self._tables):
            self._show(group, shown, gap_s)

    def _show(self, group: Group, shown: Shown, gap_s: float | None) -> None:
        if not shown.token_ids:
            return
        self._meter.tokens(len(shown.token_ids), gap_s)
        self._events.append(Tokens(group.id, shown.index, group.published, shown.token_ids, shown.text, shown.reason, shown.logprobs))
        group.published += len(shown.token_ids)

    # -- ends of requests that the scheduler has let go

    def _finish(self, group: Group, *, cancelled: bool = False) -> None:
        now = self._clock.monotonic()
        admitted_at = now if group.admitted_at is None else group.admitted_at
        first_token_at = now if group.first_token_at is None else group.first_token_at
        outcome = group.outcome()
        reason: FinishReason = "cancelled" if cancelled else outcome.choices[0].finish_reason
        self._end(Finished(group.id, outcome, reason, first_token_at - admitted_at, now - first_token_at))

    def _fail(self, group: Group, error: RowError) -> None:
        log.warning("request_failed", request=group.id, code=error.code)
        self._scheduler.remove(group, tainted=error.tainted)
        self._end(Failed(group.id, error.code, error.message))

    def _fail_stuck(self) -> None:
        """What is checked at submit makes this impossible; a hung loop would be worse than a failed request."""
        for group in list(self._scheduler.running):
            self._fail(group, RowError(FAILED, "the engine has no KV cache for this request"))

    def _end(self, event: Finished | Failed) -> None:
        """The last event of a request: its id may come again."""
        self._events.append(event)
        with self._changed:
            self._known.discard(event.id)
            if not self._known:
                self._changed.notify_all()

    def _end_all(self) -> None:
        """The engine closes: cancel what is left, or after ``drain`` give it up without a word."""
        with self._changed:
            self._alive = False
        self._take_inbox()
        left = [*self._scheduler.running, *self._scheduler.paused, *self._scheduler.waiting]
        for group in left:
            self._scheduler.remove(group)
        if self._draining:
            self._given_up = tuple(Resumable(group.id, group.generated) for group in left)
            return
        for group in left:
            self._finish(group, cancelled=True)

    def _fail_all(self) -> None:
        """The loop is broken: trust only the list of ids that have not had their last event."""
        with self._changed:
            self._alive = False
            self._inbox.clear()
            self._events += [
                Failed(request_id, FAILED, "the engine has stopped by an internal error") for request_id in sorted(self._known)
            ]
            self._known.clear()

    def _take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def _note_stats(self) -> None:
        scheduler, runner = self._scheduler, self._runner
        self._snapshot = EngineStats(
            waiting=len(scheduler.waiting),
            running=scheduler.rows_running,
            paused=len(scheduler.paused),
            rows=runner.rows,
            kv_bytes_used=scheduler.blocks_used * runner.block_bytes,
            kv_bytes_total=runner.blocks * runner.block_bytes,
            steps=self._steps,
            stepped_at=self._clock.monotonic(),
        )
        self._meter.occupancy(self._snapshot)
