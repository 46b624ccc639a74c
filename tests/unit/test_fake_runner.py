"""The fake runner of the engine's tests: it must catch a loop that breaks the contract, else those tests show little."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from batching.grammar import GrammarError
from batching.history import History
from batching.runner import Draw, Drawn, OutOfMemory, RowError, RowOutput, RowWork, Score, Words
from promptmill.core.jobs import Beam, SamplingParams
from tests.support.clock import FakeClock
from tests.support.engine import tiny_card
from tests.support.fake_runner import EOS, ROW_FAILS, VOCAB_SIZE, WHOLE_STEP_FAILS, ContractBroken, FakeRunner, StepLaw

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
LONG = tuple(20 + n % 50 for n in range(100))  # one whole block, and a part of another


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


def draw(position: int = 0, choice: int = 0, seed: int = 0, **sampling: object) -> Draw:
    return Draw(replace(GREEDY, **sampling), seed, position, choice)  # type: ignore[arg-type]


def work(table: Sequence[int], past: int, ids: Sequence[int], *draws: Draw, score: Score | None = None) -> RowWork:
    return RowWork(table, past, ids, draws, score)


def run(runner: FakeRunner, *rows: RowWork) -> list[RowOutput]:
    outputs = runner.step(rows)
    assert all(isinstance(output, RowOutput) for output in outputs)
    return outputs  # type: ignore[return-value]


def token(runner: FakeRunner, table: Sequence[int], past: int, ids: Sequence[int], what: Draw | None = None) -> int:
    [output] = run(runner, work(table, past, ids, what or draw()))
    return output.drawn[0].token


def first(runner: FakeRunner, what: Draw, ids: Sequence[int] = LONG) -> Drawn:
    [output] = run(runner, work((0, 1), 0, ids, what))
    return output.drawn[0]


def mask(*ids: int) -> Words:
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


# -- the same text in every way that is allowed


def test_a_row_draws_the_same_in_chunks_in_company_from_other_blocks_and_after_a_restart(runner: FakeRunner) -> None:
    alone = token(runner, (0, 1), 0, LONG)
    run(runner, work((7, 3), 0, LONG[:37]))
    run(runner, work((7, 3), 37, LONG[37:70]), work((9,), 0, (10, 11), draw()))
    assert token(runner, (7, 3), 70, LONG[70:]) == alone
    second = token(runner, (7, 3), 100, (alone,), draw(1))
    assert token(runner, (20, 21), 0, (*LONG, alone), draw(1)) == second
    assert token(runner, (0, 1), 0, (*LONG[:-1], 99)) != alone


def test_shared_blocks_and_copied_ones_are_as_good_as_own_ones(runner: FakeRunner) -> None:
    token(runner, (0, 1), 0, LONG)
    runner.copy(1, 2)
    assert runner.copies == 1
    one, other = run(runner, work((0, 1), 100, (30,), draw(1)), work((0, 2), 100, (31,), draw(1)))
    assert one.drawn[0].token == token(runner, (5, 6), 0, (*LONG, 30), draw(1))
    assert other.drawn[0].token == token(runner, (7, 8), 0, (*LONG, 31), draw(1))


def test_a_failed_step_can_run_again(runner: FakeRunner) -> None:
    bad, good = work((0,), 0, (10, WHOLE_STEP_FAILS), draw()), work((1, 2), 0, LONG, draw())
    with pytest.raises(RuntimeError):
        runner.step([bad, good])
    assert runner.steps == []
    [again] = run(runner, good)
    assert again.drawn[0].token == token(runner, (3, 4), 0, LONG)
    runner.fail_always = True
    with pytest.raises(RuntimeError):
        runner.step([good])


# -- what the contract forbids


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (work((0,), 0, ()), "at least one token"),
        (work((0,), 0, (VOCAB_SIZE,)), "out of range"),
        (work((0, 1, 2), 0, (10,) * 129), "longer than the context"),
        (work((0,), 0, LONG), "no room"),
        (work((64,), 0, (10,)), "a block that there is not"),
        (work((-1,), 0, (10,)), "a block that there is not"),
        (work((3, 3), 0, LONG), "twice in one table"),
        (work((0,), 1, (10,)), "all tokens of the row's past"),
        (work((0,), 0, (10,), draw(1)), "no position"),
        (work((0,), 0, (10,), draw(), draw()), "a choice is drawn twice"),
        (work((0,), 0, (10,), replace(draw(), candidates=4)), "candidates are for beam search"),
        (work((0,), 0, (10,), draw(beam=Beam(2))), "candidates are for beam search"),
        (work((0,), 0, (10,), draw(presence_penalty=1.0)), "penalties need the history"),
        (work((0,), 0, (10,), replace(draw(), history=History((11,)))), "another prompt"),
        (work((0,), 0, (10, 12), replace(draw(1), history=History((10,), (13,)))), "another output"),
        (work((0,), 0, (10, 11), score=Score(1, (12, 13), 0)), "outside the step"),
        (work((0,), 0, (10, 11), score=Score(-1, (10, 11), 0)), "outside the step"),
        (work((0,), 0, (10, 11), score=Score(0, (12,), 0)), "not the token that follows"),
        (work((0,), 0, (10, 11), score=Score(0, (), 0)), "of nothing"),
        (work((0,), 0, (10,), replace(draw(), mask=lambda: mask(5)[:1])), "mask too short"),
    ],
)
def test_work_that_breaks_the_contract_is_caught(runner: FakeRunner, row: RowWork, message: str) -> None:
    with pytest.raises(ContractBroken, match=message):
        runner.step([row])


def test_a_step_has_rows_and_not_too_many(runner: FakeRunner) -> None:
    with pytest.raises(ContractBroken, match="at least one row"):
        runner.step([])
    run(runner, *(work((block,), 0, (10,)) for block in range(6)))
    with pytest.raises(ContractBroken, match="at most as many"):
        runner.step([work((block,), 0, (10,)) for block in range(7)])


def test_two_rows_must_not_write_one_block_nor_one_what_the_other_reads(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, LONG))
    with pytest.raises(ContractBroken, match="another table"):
        runner.step([work((0, 1), 100, (10,), draw(1)), work((0, 1), 100, (10,), draw(1))])
    with pytest.raises(ContractBroken, match="another table"):
        runner.step([work((0, 1), 64, (10,)), work((0, 1), 100, (11,))])
    with pytest.raises(ContractBroken, match="another table"):
        runner.step([work((2,), 0, (10,)), work((3, 2), 0, (11,))])


def test_a_gap_before_the_past_is_caught(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, LONG[:80]))
    with pytest.raises(ContractBroken, match="all tokens of the row's past"):
        runner.step([work((0, 1), 81, LONG[81:])])


def test_a_block_of_another_row_is_caught(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, LONG), work((2, 3), 0, (99, *LONG[1:])))
    with pytest.raises(ContractBroken, match="not of one row"):
        runner.step([work((2, 1), 100, (10,))])
    with pytest.raises(ContractBroken, match="not of one row"):
        runner.step([work((1,), 36, (10,))])


def test_a_shared_block_that_was_written_since_is_caught(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, LONG))
    run(runner, work((0, 2), 64, LONG[64:]))
    run(runner, work((0,), 10, (77,)))
    with pytest.raises(ContractBroken, match="past"):
        runner.step([work((0, 2), 100, (10,))])


def test_a_freed_block_that_another_row_took_is_caught(runner: FakeRunner) -> None:
    run(runner, work((0,), 0, (10, 11, 12)))
    run(runner, work((0,), 0, (20, 21, 22)))
    assert token(runner, (0,), 3, (13,)) == token(runner, (1,), 0, (20, 21, 22, 13))
    run(runner, work((0,), 0, (10,)))
    with pytest.raises(ContractBroken, match="past"):
        runner.step([work((0,), 3, (13,))])


def test_a_fork_that_was_not_copied_or_copied_from_nowhere_is_caught(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, LONG))
    with pytest.raises(ContractBroken, match="past"):
        runner.step([work((0, 2), 100, (10,))])
    with pytest.raises(ContractBroken, match="holds nothing"):
        runner.copy(5, 6)
    with pytest.raises(ContractBroken, match="there is not"):
        runner.copy(0, 64)


def test_a_block_that_was_wiped_under_a_row_is_caught(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, LONG))
    runner.wipe([0])
    with pytest.raises(ContractBroken, match="past"):
        runner.step([work((0, 1), 100, (10,))])


# -- failures on demand


def test_a_row_fails_when_it_draws_and_taints_its_blocks_until_they_are_wiped(runner: FakeRunner) -> None:
    run(runner, work((0, 1), 0, (*LONG[:80], ROW_FAILS, 10)))
    [bad, good] = runner.step([work((0, 1), 82, (10,), draw()), work((2,), 0, (10,), draw())])
    assert isinstance(bad, RowError)
    assert bad.tainted
    assert isinstance(good, RowOutput)
    runner.copy(1, 3)
    for table in ((1,), (3,)):
        assert isinstance(runner.step([work(table, 0, (10,), draw())])[0], RowError)
    assert isinstance(runner.step([work((0,), 0, (10,), draw())])[0], RowOutput)  # it was whole before the bad token
    runner.wipe([1, 3])
    assert token(runner, (1,), 0, (10,)) == token(runner, (3,), 0, (10,)) == good.drawn[0].token


def test_a_step_over_the_limit_is_out_of_memory() -> None:
    runner = FakeRunner(max_step_tokens=64)
    with pytest.raises(OutOfMemory):
        runner.step([work((0, 1), 0, LONG)])
    run(runner, work((0, 1), 0, LONG[:64]))


def test_a_step_takes_the_time_of_its_law() -> None:
    clock = FakeClock()
    runner = FakeRunner(clock=clock, law=StepLaw(1.0, 0.1, 0.01))
    run(runner, work((0, 1), 0, LONG[:60]), work((2,), 0, (10,) * 10))
    assert clock.monotonic() == pytest.approx(1_000 + 1 + 7.0 + 0.7)
    run(runner, work((0, 1), 60, (10,)))
    assert clock.monotonic() == pytest.approx(1_008.7 + 1 + 0.1 + 0.61)


def test_noise_is_bounded_and_the_same_every_time() -> None:
    law, rows = StepLaw(1.0, noise=0.1), [work((0,), 0, (10,))]
    times = [law.seconds(rows, number) for number in range(100)]
    assert times == [law.seconds(rows, number) for number in range(100)]
    assert 0.9 <= min(times) < 0.95 < 1.05 < max(times) <= 1.1


# -- what it draws


def test_greedy_draws_ignore_the_seed_sampled_ones_follow_seed_choice_and_position(runner: FakeRunner) -> None:
    assert len({first(runner, draw(seed=seed, choice=choice)).token for seed in range(3) for choice in range(3)}) == 1
    hot = [draw(seed=seed, choice=choice, position=at, temperature=1.0) for seed in range(4) for choice in range(4) for at in range(4)]
    tokens = [first(runner, what).token for what in hot]
    assert tokens == [first(runner, what).token for what in hot]
    assert len(set(tokens)) > 40


def test_several_choices_of_one_prompt_are_drawn_at_once(runner: FakeRunner) -> None:
    [output] = run(runner, work((0, 1), 0, LONG, *(draw(choice=choice, seed=3, temperature=1.0) for choice in range(3))))
    assert [each.token for each in output.drawn] == [first(runner, draw(choice=c, seed=3, temperature=1.0)).token for c in range(3)]


def test_bans_masks_biases_and_penalties_are_honoured(runner: FakeRunner) -> None:
    best = first(runner, draw()).token
    assert first(runner, replace(draw(), banned=(best,))).token != best
    assert first(runner, draw(logit_bias=((200, 100.0),))).token == 200
    for seed in range(20):
        assert first(runner, replace(draw(seed=seed, temperature=1.0), mask=lambda: mask(33, 44))).token in {33, 44}
    history = History(LONG[:-1], LONG[-1:])
    raised = draw(1, logit_bias=((LONG[-1], 100.0),), presence_penalty=2.0)
    assert first(runner, replace(raised, history=history)).token == LONG[-1]
    harder = draw(1, logit_bias=((LONG[-1], 100.0),), frequency_penalty=200.0)
    assert first(runner, replace(harder, history=history)).token != LONG[-1]


def test_a_mask_that_leaves_nothing_fails_its_row_alone(runner: FakeRunner) -> None:
    def broken() -> Words:
        raise GrammarError("no way on")

    for bad in (replace(draw(), mask=mask), replace(draw(), mask=broken)):
        [failed, good] = runner.step([work((0,), 0, (10,), bad), work((1,), 0, (10,), draw())])
        assert isinstance(failed, RowError)
        assert failed.code == "grammar_error"
        assert isinstance(good, RowOutput)


def test_logprobs_and_scores_are_of_one_distribution_that_sums_to_one(runner: FakeRunner) -> None:
    drawn = first(runner, draw(logprobs=20, logit_bias=((200, 100.0),)))
    assert drawn.token == 200
    assert drawn.logprob is not None
    assert len(drawn.logprob.top) == 20
    assert list(drawn.logprob.top) == sorted(drawn.logprob.top, key=lambda pair: (-pair[1], pair[0]))
    assert drawn.logprob.top[0] == (first(runner, draw()).token, drawn.logprob.top[0][1])  # the bias is not the model's
    assert first(runner, draw()).logprob is None
    scores = [run(runner, work((0, 1), 0, LONG, score=Score(99, (target,), 1)))[0].scores[0] for target in range(VOCAB_SIZE)]
    assert sum(math.exp(score.logprob) for score in scores) == pytest.approx(1)
    assert scores[200].logprob == drawn.logprob.logprob
    assert scores[0].top == drawn.logprob.top[:1]


def test_scores_are_the_same_in_chunks(runner: FakeRunner) -> None:
    [whole] = run(runner, work((0, 1), 0, LONG, score=Score(0, LONG[1:], 2)))
    [a] = run(runner, work((2, 3), 0, LONG[:40], score=Score(0, LONG[1:41], 2)))
    [b] = run(runner, work((2, 3), 40, LONG[40:], score=Score(0, LONG[41:], 2)))
    assert whole.scores == a.scores + b.scores
    assert len(whole.scores) == 99


def test_candidates_are_the_best_of_the_processed_distribution_fewer_if_few_are_possible(runner: FakeRunner) -> None:
    beam = replace(draw(beam=Beam(3)), candidates=6)
    best = first(runner, beam)
    assert len(best.candidates) == 6
    assert best.token == best.candidates[0][0] == first(runner, draw()).token
    every = first(runner, replace(beam, candidates=VOCAB_SIZE)).candidates
    assert every[:6] == best.candidates
    assert sum(math.exp(logprob) for _, logprob in every) == pytest.approx(1)
    few = first(runner, replace(beam, mask=lambda: mask(33, 44))).candidates
    assert {token for token, _ in few} == {33, 44}
    assert sum(math.exp(logprob) for _, logprob in few) == pytest.approx(1)
    assert first(runner, replace(beam, mask=mask)).candidates == ()


def test_end_tokens_come_now_and_then_and_the_failing_ones_never(runner: FakeRunner) -> None:
    tokens = [first(runner, draw(), (10, 20 + number)).token for number in range(300)]
    assert 2 < tokens.count(EOS) < 30
    assert not {WHOLE_STEP_FAILS, ROW_FAILS} & set(tokens)


def test_it_has_the_vocabulary_of_the_tiny_tokenizer() -> None:
    assert tiny_card().vocab_size == VOCAB_SIZE == FakeRunner().vocab_size
