"""Runs in the environment of vLLM, driven over pipes: one JSON object per line.

    python vllm_driver.py MODEL_FOLDER DTYPE ROWS

Says {"ready": version}; then for each {"prompts": [[id, ...], ...], "lengths": [...], "together": bool} serves them and
answers {"seconds": s, "tokens": n}.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import vllm
from vllm import LLM, SamplingParams


def main() -> None:
    folder, dtype, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers, sys.stdout = sys.stdout, sys.stderr  # the log of vLLM must not mix with the answers
    engine = LLM(model=folder, dtype=dtype, max_num_seqs=rows, max_model_len=1024, disable_log_stats=True)
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        params = [SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False) for n in order["lengths"]]
        began = time.monotonic()  # noqa: TID251 (it runs without the project)
        if order["together"]:
            made = engine.generate(prompts, params, use_tqdm=False)
        else:
            made = [engine.generate([one], [how], use_tqdm=False)[0] for one, how in zip(prompts, params, strict=True)]
        seconds = time.monotonic() - began  # noqa: TID251
        tokens = sum(len(one.outputs[0].token_ids) for one in made)
        engine.reset_prefix_cache()
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


main()
