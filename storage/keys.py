"""Legend of every Redis key and channel of promptmill. Celery's own keys carry the prefix ``pm:`` too.

========================  =========  ============================================  =====================
key                       type       holds                                         life
========================  =========  ============================================  =====================
pm:tok:{job}              stream     the job's events; entry id = event id         1 h after the last
                                     ``<attempt>-<seq>``, one field ``e`` = JSON   append; log_ttl after
                                                                                   the terminal event
pm:tok:{job}              channel    the same JSON, live; no key. Channels know
                                     no database number, only the prefix guards
pm:cache:{tenant}:{hash}  string     a result as JSON (JobSpec.cache_key)          cache_hot_seconds
pm:worker:{node}          string     a live worker as JSON                         10 s
pm:workers                sorted     node -> UNIX time of the server when it       10 s after the last
                          set        counts as gone                                announcement
========================  =========  ============================================  =====================
"""

TOKENS = "pm:tok:"
TOKEN_PATTERN = f"{TOKENS}*"
EVENT_FIELD = "e"
WORKERS = "pm:workers"


def tokens(job: str) -> str:
    """The job's log, and its channel."""
    return f"{TOKENS}{job}"


def cached(tenant: str, key: str) -> str:
    return f"pm:cache:{tenant}:{key}"


def worker(node: str) -> str:
    return f"pm:worker:{node}"
