"""How much a request may ask for: the api refuses more with its own words, an engine once again, since it
trusts no queue. docs/api.md tells them to users."""

MAX_WIDTH = 32  # rows of one request: choices, or beams
MAX_TOP_LOGPROBS = 20  # alternatives beside a token
MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100  # of a logit, either way
MAX_PENALTY = 2  # presence and frequency, either way
MAX_LENGTH_PENALTY = 10  # either way; so far tokens ** it stays finite
MAX_GRAMMAR_CHARS = 65_536
