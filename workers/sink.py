"""Where the engine's events go: tokens to the flusher, ends to the waiting task threads.

Viewers are not told of rows that pause for memory: their tokens come later, that is all. The engine
itself counts them.
"""

from collections.abc import Sequence

from promptmill.core.clock import Clock
from promptmill.core.engine import EngineEvent, Failed, Finished, Started, Tokens
from promptmill.core.events import StreamEvent, tokens
from promptmill.core.logs import get_logger
from promptmill.core.metrics import Metrics
from workers.flusher import Flusher
from workers.registry import End, Registry, Run

log = get_logger(__name__)


class Sink:
    """Called on the engine's thread after each step; blocks on nothing but short locks."""

    def __init__(self, registry: Registry, flusher: Flusher, metrics: Metrics, clock: Clock, worker: str):
        self._registry = registry
        self._flusher = flusher
        self._metrics = metrics
        self._clock = clock
        self._worker = worker

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        published: list[StreamEvent] = []
        ends: list[tuple[Run, End]] = []
        first = False
        for event in events:
            run = self._registry.of_request(event.id)
            if run is None or run.end.done():
                continue
            if isinstance(event, Started):
                run.started = event
                self._tell("started", run)
            elif isinstance(event, Tokens):
                if not run.drawn:
                    first = True
                    self._first_token(run)
                run.drawn.setdefault(event.index, []).append(event)
                published.append(_token_event(run, event))
            elif isinstance(event, Finished | Failed):
                ends.append((run, event))
        if published:
            self._flusher.tokens(published, urgent=first)
        for run, end in ends:  # after their tokens: the terminal event goes behind them
            run.resolve(end)

    def _first_token(self, run: Run) -> None:
        waited = max(0.0, self._clock.time() - run.claim.created_at)
        self._metrics.time_to_first_token.labels(run.claim.queue.priority).observe(waited)
        self._tell("first_token", run)

    def _tell(self, word: str, run: Run) -> None:
        claim = run.claim
        log.info(word, job=claim.id, tenant=claim.tenant, attempt=claim.attempt, worker=self._worker)


def _token_event(run: Run, event: Tokens) -> StreamEvent:
    return tokens(
        run.claim.id,
        run.claim.attempt,
        index=event.index,
        pos=event.pos,
        text=event.text,
        token_ids=event.token_ids,
        finish_reason=event.finish_reason,
        logprobs=event.logprobs,
    )
