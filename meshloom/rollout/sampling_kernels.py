"""Triton kernels that draw a token for each row of logits and hand it on: no sort, no host.

Owns: the sampling distribution of ``SamplingParams`` on the device, the end of a sample, its output buffers. Refuses to
know: models, caches. Always holds: the same draw as ``rollout.sampling``: a function of the row's logits, seed and
position; logits are read twice where nothing is filtered.

Legend: N rows, V vocabulary, C chunks of the vocabulary.
"""

import triton
import triton.language as tl

from meshloom.rollout.slot_state import Field, Finish, Number

_TOKEN, _LENGTH, _COUNT = (
    tl.constexpr(int(Field.TOKEN)),
    tl.constexpr(int(Field.LENGTH)),
    tl.constexpr(int(Field.COUNT)),
)
_LIMIT, _FINISH, _ROW = tl.constexpr(int(Field.LIMIT)), tl.constexpr(int(Field.FINISH)), tl.constexpr(int(Field.ROW))
_KEY, _RULE, _TOP_K = tl.constexpr(int(Field.KEY)), tl.constexpr(int(Field.RULE)), tl.constexpr(int(Field.TOP_K))
_TEMPERATURE, _TOP_P = tl.constexpr(int(Number.TEMPERATURE)), tl.constexpr(int(Number.TOP_P))
_MIN_P = tl.constexpr(int(Number.MIN_P))
_RUNNING, _STOP = tl.constexpr(int(Finish.RUNNING)), tl.constexpr(int(Finish.STOP))
_AT_LIMIT = tl.constexpr(int(Finish.LENGTH))


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64 on uint64, as in ``rollout.sampling``."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(key, position):
    """A number in [0, 1) with 53 random bits from an int64 key and a position, float64."""
    key = key.to(tl.uint64, bitcast=True)
    step = (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    bits = _mix(_mix(key + step) ^ key)
    return (bits >> 11).to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _ordered(x):
    """An int32 that orders as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Between two int32, rounded up, without overflow."""
    return (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)


@triton.jit
def _scaled(logits_at, col, V, temperature):
    """Logits of some tokens divided by the temperature, −∞ outside the vocabulary."""
    z = tl.load(logits_at + col, mask=col < V, other=-float("inf")).to(tl.float32)
    return z / temperature


@triton.jit
def threshold_kernel(logits_ptr, state_ptr, number_ptr, out_ptr, V, slots, BLOCK: tl.constexpr):
    """Smallest logit (over temperature) that top-k, then top-p, then min-p keep, for each row; −∞ if they keep all.

    Found by halving the range of float32 bit patterns, at most 32 times for each filter that is asked for.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(number_ptr + _TEMPERATURE * slots + row)
    top_k = tl.load(state_ptr + _TOP_K * slots + row)
    top_p = tl.load(number_ptr + _TOP_P * slots + row).to(tl.float64)
    min_p = tl.load(number_ptr + _MIN_P * slots + row)
    running = tl.load(state_ptr + _FINISH * slots + row) == _RUNNING
    threshold = -float("inf")
    if running & (temperature > 0):
        logits_at = logits_ptr + row * V
        lane = tl.arange(0, BLOCK)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, V, BLOCK):
            top = tl.maximum(top, _scaled(logits_at, start + lane, V, temperature))
        highest = tl.max(top, 0)
        floor = _ordered(tl.full([1], -float("inf"), tl.float32))
        ceiling = _ordered(tl.full([1], 0.0, tl.float32) + highest)
        kept = floor
        if (top_k > 0) & (top_k < V):
            low, high = floor, ceiling
            for _ in range(32):
                middle = _middle(low, high)
                count = tl.zeros([BLOCK], tl.int32)
                for start in range(0, V, BLOCK):
                    count += (_ordered(_scaled(logits_at, start + lane, V, temperature)) >= middle).to(tl.int32)
                enough = tl.sum(count, 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
                high = tl.maximum(high, low)
            kept = low
        if top_p < 1.0:
            low, high = kept, ceiling
            whole = tl.zeros([BLOCK], tl.float64)
            for start in range(0, V, BLOCK):
                z = _scaled(logits_at, start + lane, V, temperature)
                whole += tl.where(_ordered(z) >= kept, tl.exp(z - highest), 0.0).to(tl.float64)
            wanted = tl.sum(whole, 0) * top_p
            for _ in range(32):
                middle = _middle(low, high)
                mass = tl.zeros([BLOCK], tl.float64)
                for start in range(0, V, BLOCK):
                    z = _scaled(logits_at, start + lane, V, temperature)
                    mass += tl.where(_ordered(z) >= middle, tl.exp(z - highest), 0.0).to(tl.float64)
                enough = tl.sum(mass, 0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
                high = tl.maximum(high, low)
            kept = low
        threshold = tl.max(_unordered(kept), 0)
        if min_p > 0:
            threshold = tl.maximum(threshold, highest + tl.log(min_p))
    tl.store(out_ptr + row, threshold)


@triton.jit
def chunk_kernel(
    logits_ptr, state_ptr, number_ptr, threshold_ptr, high_ptr, sum_ptr, V, slots,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row and one chunk of its logits: the highest kept, and the sum of the exponentials below it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if tl.load(state_ptr + _FINISH * slots + row) == _RUNNING:
        temperature = tl.load(number_ptr + _TEMPERATURE * slots + row)
        temperature = tl.where(temperature > 0, temperature, 1.0)
        z = _scaled(logits_ptr + row * V, chunk * CHUNK + tl.arange(0, CHUNK), V, temperature)
        broken = tl.sum((z != z).to(tl.int32), 0) > 0
        if FILTERED:
            z = tl.where(z >= tl.load(threshold_ptr + row), z, -float("inf"))
        highest = tl.max(z, 0)
        total = tl.sum(tl.exp(z - tl.where(highest == -float("inf"), 0.0, highest)), 0)
        at = row * tl.num_programs(1) + chunk
        tl.store(high_ptr + at, highest)
        # Neither the filters nor a maximum let NaN through; the sum does, and the host finds it.
        tl.store(sum_ptr + at, tl.where(broken, float("nan"), total))


@triton.jit
def draw_kernel(
    logits_ptr, state_ptr, number_ptr, threshold_ptr, high_ptr, sum_ptr, stop_ptr, ids_ptr, logprob_ptr,
    V, C, slots, width,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """One row: choose the chunk, then the token in it, by inverting the cumulative distribution; write token and
    log-probability to the output buffers; advance the row's state and see whether the sample ends."""
    row = tl.program_id(0).to(tl.int64)
    state_at = state_ptr + row
    if tl.load(state_at + _FINISH * slots) == _RUNNING:
        count = tl.load(state_at + _COUNT * slots)
        temperature = tl.load(number_ptr + _TEMPERATURE * slots + row)
        c = tl.arange(0, CHUNKS)
        highs = tl.load(high_ptr + row * C + c, mask=c < C, other=-float("inf"))
        sums = tl.load(sum_ptr + row * C + c, mask=c < C, other=0.0)
        highest = tl.max(highs, 0)
        mass = tl.where(highs == -float("inf"), 0.0, sums * tl.exp(highs - highest)).to(tl.float64)
        # A sum of NaN or infinities stays one and is found by the host.
        mass = tl.where(sums == sums, mass, sums.to(tl.float64))
        until = tl.cumsum(mass, 0)
        total = tl.sum(mass, 0)
        target = uniform(tl.load(state_at + _KEY * slots), count) * total
        if temperature > 0:
            chunk = tl.min(tl.where((until > target) & (mass > 0), c, CHUNKS), 0)
            chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0, c, 0), 0))
        else:
            chunk = tl.min(tl.where(highs == highest, c, CHUNKS), 0)
            chunk = tl.minimum(chunk, C - 1)
        before = tl.sum(tl.where(c < chunk, mass, 0.0), 0)
        lane = tl.arange(0, CHUNK)
        z = _scaled(logits_ptr + row * V, chunk * CHUNK + lane, V, tl.where(temperature > 0, temperature, 1.0))
        if FILTERED:
            z = tl.where(z >= tl.load(threshold_ptr + row), z, -float("inf"))
        if temperature > 0:
            weight = tl.exp(z - highest).to(tl.float64)
            inside = tl.cumsum(weight, 0)
            # Rounding may leave the target above all of the chunk: then the last token of it that has any weight.
            place = tl.min(tl.where((inside > target - before) & (weight > 0), lane, CHUNK), 0)
            place = tl.minimum(place, tl.max(tl.where(weight > 0, lane, 0), 0))
            own = tl.sum(tl.where(lane == place, z, 0.0), 0)
            logprob = (own - highest).to(tl.float64) - tl.log(total)
        else:
            place = tl.min(tl.where(z == highest, lane, CHUNK), 0)
            place = tl.minimum(place, CHUNK - 1)
            logprob = (highest.to(tl.float64) + total) * 0.0
        token = (chunk * CHUNK + place).to(tl.int64)
        token = tl.minimum(token, V - 1)
        at = tl.load(state_at + _ROW * slots) * width + count
        tl.store(ids_ptr + at, token.to(tl.int32))
        tl.store(logprob_ptr + at, logprob.to(tl.float32))
        s = tl.arange(0, STOPS)
        stops = tl.load(stop_ptr + tl.load(state_at + _RULE * slots) * STOPS + s)
        stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
        tl.store(state_at + _TOKEN * slots, token)
        tl.store(state_at + _LENGTH * slots, tl.load(state_at + _LENGTH * slots) + 1)
        tl.store(state_at + _COUNT * slots, count + 1)
        at_limit = count + 1 >= tl.load(state_at + _LIMIT * slots)
        finish = tl.where(stopped, _STOP, tl.where(at_limit, _AT_LIMIT, _RUNNING)).to(tl.int64)
        tl.store(state_at + _FINISH * slots, finish)


@triton.jit
def prepare_kernel(state_ptr, table_ptr, seen_ptr, place_ptr, slots, table_stride, P: tl.constexpr):
    """One row: how many tokens attention sees, and where the newest token's keys and values go."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(state_ptr + _LENGTH * slots + row)
    running = tl.load(state_ptr + _FINISH * slots + row) == _RUNNING
    page = tl.load(table_ptr + row * table_stride + length // P, mask=running, other=0).to(tl.int64)
    tl.store(seen_ptr + row, tl.where(running, length + 1, 0))
    tl.store(place_ptr + row, tl.where(running, page * P + length % P, -1))
