"""The engine: continuous batching over a Runner, one thread that owns the loop.

A turn is: take what came, admit, plan, compute, commit, publish. Everything that decides lives in
the scheduler and the policy; everything that computes lives in the runner. A failure costs the
request that caused it; only a bug of the loop itself ends the engine, and then loudly.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Condition, Event, Thread

from batching.meter import EngineMeter
from batching.options import EngineOptions
from batching.policy import idle_due_at
from batching.request import NO_SLOT, Row, ServedModel, check_request
from batching.runner import RowError, RowResult, Runner
from batching.scheduler import Broke, Drew, Plan, Scheduler
from promptmill.core.errors import Rejected, Unavailable
from promptmill.core.jobs import FinishReason
from promptmill.core.logs import get_logger
from promptmill.core.ports import Capabilities, EngineEvent, EngineStats, Failed, Finished, GenRequest, Started, Tokens

IDLE_TURN_S = 1.0  # an idle engine turns so often, so that its ``stepped_at`` shows that it lives
FAILED = "engine_error"

Sink = Callable[[Sequence[EngineEvent]], None]
log = get_logger(__name__)


class BatchingEngine:
    """``promptmill.core.ports.Engine`` over ``load()``, which is called on the engine thread."""

    def __init__(self, load: Callable[[], Runner], models: Mapping[str, ServedModel], options: EngineOptions):
        self.caps = Capabilities()
        self._load = load
        self._models = models
        self._options = options
        self._clock = options.clock
        self._meter = EngineMeter(options.metrics)
        self._thread: Thread | None = None
        self._ready = Event()
        self._load_error: BaseException | None = None
        self._window_opened: float | None = None
        self._events: list[EngineEvent] = []  # of this turn
        self._steps = 0
        self._snapshot = EngineStats(waiting=0)
        # shared with other threads, under _changed
        self._changed = Condition()
        self._inbox: deque[Row | str] = deque()  # a new row | the id of a request to cancel, in order of arrival
        self._known: set[str] = set()  # ids that have not ended
        self._alive = False
        self._closing = False

    # -- the port, any thread

    def start(self, sink: Sink) -> None:
        """See the port. Raises what loading raised."""
        self._thread = Thread(target=self._run, args=(sink,), name="engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._load_error is not None:
            raise self._load_error

    def submit(self, request: GenRequest) -> None:
        """See the port. Raises Unavailable when the engine does not run."""
        served = self._models.get(request.model)
        if served is None:
            raise Rejected(f"this engine does not serve the model {request.model}", param="model", code="model_not_found")
        check_request(request, served.card)
        row = Row(request, served)
        with self._changed:
            if not self._alive or self._closing:
                raise Unavailable("the engine does not run")
            if self._runner.kv_bytes(row.room) > self._runner.kv_budget_bytes:
                raise Rejected("prompt and max_tokens need more KV cache than this engine has", param="max_tokens")
            if request.id in self._known:
                raise Rejected(f"the engine already has a request {request.id}")
            self._known.add(request.id)
            self._inbox.append(row)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._known:
                self._inbox.append(request_id)
                self._changed.notify()

    def stats(self) -> EngineStats:
        """As of the last turn; ``waiting`` also counts what the loop has not seen yet."""
        snapshot = self._snapshot
        return replace(snapshot, waiting=max(0, len(self._known) - sum(snapshot.running.values())))

    @property
    def alive(self) -> bool:
        return self._alive

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # -- the loop, the engine thread

    def prepare(self) -> None:
        """Load the runner; from here on ``submit`` and ``step_once`` work."""
        self._runner = self._load()
        self._scheduler = Scheduler(
            rows=self._runner.rows,
            reserved=self._options.reserved_rows,
            kv_budget=self._runner.kv_budget_bytes,
            kv_bytes=self._runner.kv_bytes,
            prefill_tokens=self._options.prefill_tokens,
        )
        self.caps = Capabilities(batch_invariant=self._runner.batch_invariant)
        self._note_stats()
        self._alive = True

    def step_once(self) -> list[EngineEvent]:
        """One turn; the events of it, in order."""
        self._take_inbox()
        self._admit()
        plan = self._scheduler.plan()
        if plan.works:
            self._publish(self._scheduler.commit(plan, self._compute(plan)))
        else:
            self._scheduler.check_integrity()
        self._note_stats()
        return self._take_events()

    def idle_s(self) -> float:
        """How long nothing is to be done, if nothing comes."""
        if self._scheduler.running:
            return 0.0
        if waiting := self._scheduler.waiting:
            return self._window_due(waiting) - self._clock.monotonic()
        return IDLE_TURN_S

    def _run(self, sink: Sink) -> None:
        try:
            self.prepare()
        except BaseException as error:
            self._load_error = error
            return
        finally:
            self._ready.set()
        try:
            while not self._closing:
                if events := self.step_once():
                    sink(events)
                self._wait()
            self._cancel_all()
        except Exception:
            log.exception("engine_died")
            self._fail_all()
        try:
            if events := self._take_events():
                sink(events)
        except Exception:
            log.exception("last_events_lost", events=len(events))

    def _wait(self) -> None:
        with self._changed:
            if not self._inbox and not self._closing and (pause := self.idle_s()) > 0:
                self._changed.wait(pause)

    def _take_inbox(self) -> None:
        with self._changed:
            came = list(self._inbox)
            self._inbox.clear()
        for item in came:
            if isinstance(item, Row):
                self._scheduler.submit(item)
            elif row := self._scheduler.remove(item):
                self._finish(row, "cancelled")

    def _admit(self) -> None:
        """Admit at every turn while busy; an idle engine first waits for its window."""
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
        for row in self._scheduler.admit():
            self._open(row, now, now if opened is None else opened)

    def _window_due(self, waiting: Sequence[Row]) -> float:
        arrivals = [(row.request.priority, row.request.enqueued_at) for row in waiting]
        return idle_due_at(arrivals, self._options.idle_window_s, self._runner.rows)

    def _open(self, row: Row, now: float, window_opened: float) -> None:
        row.admitted_at = now
        try:
            self._runner.open(row.slot, row.room)
        except Exception as error:
            self._scheduler.remove(row.request.id)
            row.slot = NO_SLOT  # not open, so not to be closed
            self._fail(row, _row_error(error))
        else:
            enqueued = row.request.enqueued_at
            self._events.append(Started(row.request.id, now - enqueued, now - max(enqueued, window_opened)))

    def _compute(self, plan: Plan) -> Sequence[RowResult]:
        began = self._clock.monotonic()
        try:
            results: Sequence[RowResult] = self._runner.step(plan.works)
        except Exception as error:
            log.warning("step_failed", rows=len(plan.works), error=type(error).__name__, exc_info=True)
            results = self._compute_alone(plan)
        self._steps += 1
        self._meter.step(plan, self._clock.monotonic() - began)
        return results

    def _compute_alone(self, plan: Plan) -> list[RowResult]:
        """A step failed as a whole: run each row alone, once, so that only the culprits fail."""
        results: list[RowResult] = []
        for work in plan.works:
            try:
                results += self._runner.step([work])
            except Exception as error:
                results.append(_row_error(error))
        return results

    def _publish(self, happened: Sequence[Drew | Broke]) -> None:
        now = self._clock.monotonic()
        for item in happened:
            if isinstance(item, Broke):
                self._fail(item.row, item.error)
            else:
                self._publish_token(item.row, item.token, now)

    def _publish_token(self, row: Row, token: int, now: float) -> None:
        self._meter.token(None if row.token_at is None else now - row.token_at)
        row.token_at = now
        if row.first_token_at is None:
            row.first_token_at = now
        try:
            text, reason = row.show(token)
        except Exception as error:  # of a tokenizer: it must not cost the neighbours
            self._scheduler.remove(row.request.id)
            self._fail(row, _row_error(error))
            return
        self._events.append(Tokens(row.request.id, 0, len(row.output) - 1, (token,), text, reason))
        if reason is not None:
            self._scheduler.remove(row.request.id)
            self._finish(row, reason)

    # -- ends of requests that the scheduler has let go

    def _finish(self, row: Row, reason: FinishReason) -> None:
        now = self._clock.monotonic()
        admitted_at = now if row.admitted_at is None else row.admitted_at
        first_token_at = now if row.first_token_at is None else row.first_token_at
        self._end(row, Finished(row.request.id, row.outcome(reason), reason, first_token_at - admitted_at, now - first_token_at))

    def _fail(self, row: Row, error: RowError) -> None:
        log.warning("request_failed", request=row.request.id, code=error.code)
        self._end(row, Failed(row.request.id, error.code, error.message))

    def _end(self, row: Row, event: Finished | Failed) -> None:
        """The last event of a request: its id may come again, its place in the runner is free."""
        self._events.append(event)
        with self._changed:
            self._known.discard(row.request.id)
        if row.slot != NO_SLOT:
            self._runner.close(row.slot)

    def _cancel_all(self) -> None:
        with self._changed:
            self._alive = False
        self._take_inbox()
        for row in [*self._scheduler.running, *self._scheduler.waiting]:
            self._scheduler.remove(row.request.id)
            self._finish(row, "cancelled")

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
        running = self._scheduler.running_by_priority
        self._snapshot = EngineStats(
            waiting=len(self._scheduler.waiting),
            running=running,
            rows=self._runner.rows,
            kv_bytes_used=self._scheduler.kv_bytes_used,
            kv_bytes_total=self._runner.kv_budget_bytes,
            steps=self._steps,
            stepped_at=self._clock.monotonic(),
        )
        self._meter.occupancy(self._snapshot)


def _row_error(error: Exception) -> RowError:
    return RowError(FAILED, f"the model failed on this request ({type(error).__name__})")
