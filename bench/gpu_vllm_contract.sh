#!/usr/bin/env bash
# The engines' contract, whole runs and the movement of weights with the vLLM that is installed, on a GPU.
#
# Usage: PYTHONPATH=/path/of/vllm/site-packages bash bench/gpu_vllm_contract.sh [further arguments of pytest]
# Needs pytest and hypothesis. Each file is a process of its own, so that one that fails leaves the GPU free for the next.
set -u
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
status=0
for file in tests/test_vllm_weights.py tests/test_engine.py tests/test_vllm_run.py tests/test_vllm_sleep.py tests/test_weights_checksum.py; do
  marks=(-m vllm)
  [ "$file" = tests/test_weights_checksum.py ] && marks=()
  python3 -m pytest "$file" "${marks[@]}" -q -rs --tb=short --durations=5 -p no:cacheprovider "$@" || status=1
done
exit $status
