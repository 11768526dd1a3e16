"""vLLM's side of ``gpu_engine.py``: the same chats, lengths and log-probs through its own ``LLM``.

Usage: python bench/gpu_vllm.py SPEC   (JSON: model, sequences, tokens, rounds, utilization, result, and kv_cache_bytes if
the size of its cache is not to follow from the utilization)
"""

import json
import sys
import time
from pathlib import Path

from gpu_reward import pass_gate
from vllm import LLM, SamplingParams


def main() -> None:
    spec = json.loads(sys.argv[1])
    longest = spec["tokens"] + 128
    llm = LLM(
        spec["model"],
        dtype="bfloat16",
        gpu_memory_utilization=spec["utilization"],
        max_model_len=longest,
        max_num_seqs=spec["sequences"],
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=spec.get("kv_cache_bytes"),
    )
    params = SamplingParams(temperature=1.0, max_tokens=spec["tokens"], ignore_eos=True, logprobs=0)
    chats = [
        [{"role": "user", "content": f"What is {i}+{i * 7 % 100}? Answer with the number only."}]
        for i in range(spec["sequences"])
    ]
    seconds = []
    for number in range(spec["rounds"]):
        start = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == spec["sequences"] * spec["tokens"]
        pass_gate()
        print(f"round {number + 1}: {tokens / seconds[-1]:,.0f} tokens/s", flush=True)
    aside = Path(spec["result"]).with_suffix(".part")
    aside.write_text(json.dumps({"seconds": seconds}))
    aside.rename(spec["result"])


if __name__ == "__main__":
    main()
