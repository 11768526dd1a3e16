"""Intervals, pass@k, phase clocks, memory, names and numbers for people."""

import itertools
import subprocess
import sys

import pytest

from meshloom.observe import peaks
from meshloom.observe.format import bytes_text, number_text, seconds_text, short_text
from meshloom.observe.names import METRICS, PHASES, Unit
from meshloom.observe.statistics import pass_at_k, wilson_interval
from meshloom.observe.timing import PhaseClock, peak_device_memory, peak_host_memory, peak_memory


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_equals_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_symmetric_and_holds_at_the_ends():
    low, high = wilson_interval(30, 100)
    assert wilson_interval(70, 100) == pytest.approx((1 - high, 1 - low))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 5) < wilson_interval(0.5, 5) < wilson_interval(1, 5)
    assert wilson_interval(500, 500)[1] == 1.0
    with pytest.raises(ValueError):
        wilson_interval(3, 2)


def test_pass_at_k_is_the_share_of_k_subsets_with_a_solved_sample():
    samples, solved = 7, 2
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(range(samples), k))
        share = sum(any(i < solved for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, solved, k) == pytest.approx(share)
    with pytest.raises(ValueError):
        pass_at_k(4, 1, 5)


def test_a_second_belongs_to_the_innermost_phase_only():
    seconds = iter(range(100))
    heard = []
    clock = PhaseClock(on_phase=heard.append, now=lambda: float(next(seconds)))
    with clock.phase("update"), clock.phase("save"):
        pass
    with pytest.raises(KeyError), clock.phase("score"):
        raise KeyError
    assert clock.take() == {"update": 2.0, "save": 1.0, "score": 1.0}
    assert clock.take() == {}
    assert heard == ["update", "save", "update", None, "score", None]


def test_an_open_phase_goes_on_after_the_count_was_taken():
    seconds = iter([0.0, 1.0, 4.0, 9.0, 9.5])
    clock = PhaseClock(now=lambda: next(seconds))
    with clock.phase("generate"):
        assert clock.take() == {"generate": 3.0}
    assert clock.take() == {"generate": 5.0}


def test_peak_memory_grows_with_what_is_held():
    before = peak_host_memory()
    block = bytearray(before + 64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_host_memory() >= before + 32 * 2**20
    assert peak_device_memory() is None
    assert peak_memory() == peak_host_memory()


def test_the_room_imports_without_torch():
    names = ["run_folder", "display", "loggers", "report", "summary", "timing", "statistics", "names"]
    code = (
        "import sys\n"
        + "\n".join(f"import meshloom.observe.{name}" for name in names)
        + "\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_explained():
    assert all(metric.label and metric.meaning.endswith(".") for metric in METRICS.values())
    judging, learning = ["log_prob", "reference", "values"], ["critic", "update"]
    assert list(PHASES) == ["generate", "score", *judging, *learning, "sync", "validate", "save"]


def test_numbers_are_short():
    assert [short_text(v) for v in (0, 12, 0.12345, 1.2e-6, 9999, 12345, 999_600, 2.5e6, -3.456)] == [
        "0", "12", "0.123", "1.2e-06", "9999", "12.3k", "1M", "2.5M", "-3.46",
    ]  # fmt: skip
    assert [bytes_text(v) for v in (512, 2**30 * 1.84)] == ["512 B", "1.8 GiB"]
    assert [seconds_text(v) for v in (0.0123, 5.26, 59.99, 83, 3725, 200_000)] == [
        "12 ms", "5.3 s", "1 min 00 s", "1 min 23 s", "1 h 02 min", "2 d 07 h",
    ]  # fmt: skip
    assert number_text(0.9312, Unit.SHARE) == "93.1 %"
    assert number_text(None, Unit.SHARE) == "–"


class _Gpu:
    """Stands for torch's counters of a GPU, which this machine may not have."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def hold(self, count: int) -> None:
        self.held = count
        self.most = max(self.most, count)

    def max_memory_allocated(self) -> int:
        return self.most

    def max_memory_reserved(self) -> int:
        return 2 * self.most

    def reset_peak_memory_stats(self) -> None:
        self.most = self.held


def test_each_phase_has_the_peak_of_its_own_time(monkeypatch: pytest.MonkeyPatch):
    """Two watchers, a phase inside of another, and a peak of the whole process that nobody's count begins anew."""
    gpu, other, whole = _Gpu(), peaks.PeakWatch(), peaks.PeakWatch()
    monkeypatch.setattr(peaks, "_cuda", lambda: gpu)
    memory = peaks.PhaseMemory()
    clock = PhaseClock(on_phase=memory.enter)
    gpu.hold(5)
    with clock.phase("generate"):
        gpu.hold(90)
        gpu.hold(20)
        with clock.phase("score"):
            gpu.hold(30)
        gpu.hold(10)
    assert other.take() == peaks.Peak(90, 180)
    with clock.phase("update"):
        gpu.hold(70)
        gpu.hold(10)
    assert memory.take() == {
        "peak_memory_bytes/generate": 90.0,
        "peak_memory_bytes/update": 70.0,
        "reserved_memory_bytes/generate": 180.0,
        "reserved_memory_bytes/update": 140.0,
    }
    assert set(memory.take()) == set()
    assert other.take() == peaks.Peak(70, 140)
    assert whole.look() == peaks.Peak(90, 180)
    for watch in (other, whole, memory):
        watch.close()


def test_without_a_gpu_phases_have_no_peaks():
    memory = peaks.PhaseMemory()
    memory.enter("generate")
    assert memory.take() == {}
    memory.close()
