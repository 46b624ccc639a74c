"""What `stats` computes from the text of /metrics."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from promptmill.cli.scrape import Sample, summary
from promptmill.cli.stats import lines
from promptmill.core.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def sample(metrics: Metrics) -> Sample:
    return Sample.parse(generate_latest(metrics.registry).decode())


def test_rates_are_of_the_interval_alone(metrics: Metrics):
    metrics.jobs.labels("standard", "succeeded").inc(100)
    metrics.requests.labels("/v1/jobs", "202").inc(50)
    first = sample(metrics)
    metrics.jobs.labels("standard", "succeeded").inc(6)
    metrics.jobs.labels("bulk", "failed").inc(2)
    metrics.generation_tokens.inc(30)
    found = summary(first, sample(metrics), 2.0)
    assert (found["jobs_per_s"], found["requests_per_s"], found["generation_tokens_per_s"]) == (4.0, 0.0, 15.0)
    assert found["jobs_total"] == {"succeeded": 106.0, "failed": 2.0}


def test_latencies_are_of_the_interval_when_it_saw_any(metrics: Metrics):
    for _ in range(50):
        metrics.e2e.labels("standard").observe(100)
    first = sample(metrics)
    metrics.e2e.labels("bulk").observe(0.4)
    found = summary(first, sample(metrics), 1.0)
    assert found["window"] == "interval"
    assert 0.25 < found["e2e_s"]["p99"] <= 0.5


def test_latencies_are_of_all_time_when_the_interval_was_idle(metrics: Metrics):
    metrics.e2e.labels("standard").observe(100)
    found = summary(sample(metrics), sample(metrics), 1.0)
    assert found["window"] == "total"
    assert 60 < found["e2e_s"]["p50"] <= 120


def test_quantiles_are_those_of_all_labels_together(metrics: Metrics):
    for priority, seconds in (("interactive", 0.003), ("standard", 0.003), ("bulk", 0.2), ("bulk", 0.2)):
        metrics.time_to_first_token.labels(priority).observe(seconds)
    found = sample(metrics)
    assert found.quantile("time_to_first_token_seconds", 0.5) == pytest.approx(0.005)
    assert found.quantile("time_to_first_token_seconds", 1.0) == pytest.approx(0.25)


def test_a_value_beyond_the_last_bucket_counts_as_its_bound(metrics: Metrics):
    metrics.step.observe(1e9)
    assert sample(metrics).quantile("engine_step_seconds", 0.5) == 60


def test_an_empty_histogram_has_no_quantile_and_no_mean(metrics: Metrics):
    assert sample(metrics).quantile("engine_step_seconds", 0.5) is None
    assert sample(metrics).mean("engine_step_seconds") is None


def test_occupancy_is_mean_rows_by_the_engines_rows(metrics: Metrics):
    for rows in (8, 24):
        metrics.decode_rows.observe(rows)
    found = summary(sample(metrics), sample(metrics), 0.0, rows=32)
    assert (found["decode_rows_mean"], found["occupancy"]) == (16.0, 0.5)
    assert summary(sample(metrics), sample(metrics), 0.0, rows=0)["occupancy"] is None


def test_a_restarted_counter_gives_no_negative_rate(metrics: Metrics):
    metrics.generation_tokens.inc(1000)
    before = sample(metrics)
    fresh = Metrics(CollectorRegistry())
    fresh.generation_tokens.inc(5)
    assert summary(before, sample(fresh), 1.0)["generation_tokens_per_s"] == 5.0


def test_queues_are_shown_with_their_age():
    found = Sample.parse('promptmill_queue_depth{priority="bulk"} 7\npromptmill_queue_oldest_seconds{priority="bulk"} 90\n')
    rows = dict(lines(summary(found, found, 1.0)))
    assert rows["queue bulk"] == "7 waiting, oldest 90.0 s"


def test_a_system_that_did_nothing_yet_can_be_shown(metrics: Metrics):
    rows = dict(lines(summary(sample(metrics), sample(metrics), 2.0)))
    assert rows["rows decoding per step"] == "-"
