"""The batch ledger: from prompts of a step to optimizer updates of a run, each number with its formula.

Owns: what the batch numbers mean together. Refuses to know: devices, models. Always holds: each number stands once, with the
formula it comes from and where its inputs were given.
"""

from dataclasses import dataclass

from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.placement import has_critic

DERIVED = "derived"
MICROBATCHES = "microbatches per update"
"""Name of the line that, over several devices, is one of each role."""
CRITIC_UPDATES = "critic's updates of the run"
"""Name of the line that only a run with a critic has."""


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """One number of the plan.

    Args:
        section: what the line belongs to: ``data``, ``reward``, ``algorithm``, ``batch``, ``compute``, ``memory``.
        name: what the number is, unique in its section.
        value: the number; none where it cannot be known yet.
        formula: how it follows from others; for a number that is given, the setting.
        source: where it was given: ``default``, ``run.yaml:12``, an override; ``DERIVED`` if it follows from others.
        unit: what it counts.
        phases: in which bytes are held; empty for what is no holding.
    """

    section: str
    name: str
    value: int | float | str | None
    formula: str
    source: str
    unit: str = ""
    phases: tuple[str, ...] = ()


def train_steps(settings: TrainSettings, num_prompts: int | None) -> int | None:
    """Steps of a run: as given, or enough that every prompt comes ``epochs`` times; none if that needs an unknown number, as
    where samples come from a file that is yet to be read.

    The order of prompts is endless, so the last step may reach into the next epoch.
    """
    batch = settings.batch
    if batch.steps is not None or num_prompts is None or settings.rollout.from_samples is not None:
        return batch.steps
    return -(-num_prompts * batch.epochs // batch.prompts_per_step)


def sft_steps(settings: SftSettings, num_rows: int | None) -> int | None:
    """Updates of a supervised run: as given, or enough that every row comes ``epochs`` times."""
    batch = settings.batch
    if batch.steps is not None or num_rows is None:
        return batch.steps
    return -(-num_rows * batch.epochs // batch.samples_per_update)


def longest_sample_tokens(settings: TrainSettings | SftSettings) -> int:
    """Tokens of the longest sample that can come: prompt and response."""
    limits = settings.data if isinstance(settings, SftSettings) else settings.rollout
    return settings.data.max_prompt_tokens + limits.max_response_tokens


def longest_sequence_tokens(settings: TrainSettings | SftSettings | EvalSettings) -> int:
    """Tokens of the longest sequence a model sees: of a training sample or of a validation sample."""
    if isinstance(settings, SftSettings):
        return longest_sample_tokens(settings)
    validated = settings.validation.max_response_tokens or settings.rollout.max_response_tokens
    trained = settings.rollout.max_response_tokens if isinstance(settings, TrainSettings) else 0
    return settings.data.max_prompt_tokens + max(trained, validated)


def samples_per_update(settings: TrainSettings | SftSettings) -> int:
    """Samples of one optimizer update."""
    if isinstance(settings, SftSettings):
        return settings.batch.samples_per_update
    batch = settings.batch
    return (batch.prompts_per_update or batch.prompts_per_step) * batch.samples_per_prompt


def most_microbatch_tokens(settings: TrainSettings | SftSettings, bound: int | None = None) -> int:
    """Bound on the tokens of a microbatch: as settings allow, or fewer if no update has that many.

    Args:
        settings: of the run.
        bound: in tokens, if it is not ``batch.tokens_per_microbatch``.
    """
    batch, samples = settings.batch, samples_per_update(settings)
    samples = min(samples, batch.samples_per_microbatch or samples)
    return min(bound or batch.tokens_per_microbatch, samples * longest_sample_tokens(settings))


def most_computed_tokens(settings: TrainSettings | SftSettings, tokens: int) -> int:
    """Bound on the tokens that a microbatch's pass computes.

    That is the bound of its tokens. Where all responses are as long as the longest (``rollout.ignore_eos``) only whole groups
    of samples are in a microbatch, and the prompt that the samples of a group share is computed once.

    Args:
        settings: of the run.
        tokens: bound of a microbatch's tokens, shared prompts counted in each sample.
    """
    if isinstance(settings, SftSettings) or not settings.rollout.ignore_eos or settings.rollout.stop:
        return tokens
    batch, response, prompt = settings.batch, settings.rollout.max_response_tokens, settings.data.max_prompt_tokens
    group = batch.samples_per_prompt
    groups = tokens // (group * (1 + response))
    if batch.samples_per_microbatch is not None or groups == 0:
        return tokens
    # As many groups as fit if their prompts are short, and the longest prompts with which as many fit.
    return groups * (min(prompt, tokens // (groups * group) - response) + group * response)


def most_microbatches(samples: int, longest: int, tokens: int, samples_bound: int | None, group: int = 1) -> int:
    """Bound on the microbatches of samples of whole groups, none longer than the longest: as if each were the longest.

    Packing adds a microbatch only when none has room, and samples that begin with the same prompt stay together as far as they
    fit: what a microbatch has no room for is the rest of a group, or a whole one. Under a bound on samples each stands alone.

    Args:
        samples: that one replica packs.
        longest: tokens of the longest.
        tokens: that bound a microbatch.
        samples_bound: further bound; none: there is none.
        group: samples of a prompt.
    """
    fitting = max(1, tokens // longest)
    if samples_bound is not None or group == 1:
        return -(-samples // min(fitting, samples_bound or fitting))
    groups, rest = divmod(samples, group)
    count = 0
    for many, size in ((groups, group), (1, rest)):
        count += many * (size // fitting)
        if left := size % fitting:
            count += -(-many // (fitting // left))
    return count


def fewest_in_full(longest: int, tokens: int, samples_bound: int | None, group: int = 1) -> int:
    """Samples that microbatches have at least, but for one of them, whatever lengths and whatever parts of groups are packed.

    A sample that stands alone finds no room where others fill more than the bound less the longest sample. What stands together
    and finds none either fills half of the bound itself, or met microbatches that are more than half full.

    Args:
        longest: tokens of the longest sample.
        tokens: that bound a microbatch.
        samples_bound: further bound; none: there is none.
        group: samples of a prompt.
    """
    fitting = max(1, tokens // longest)
    if samples_bound is not None or group == 1:
        return min(fitting, samples_bound or fitting)
    return fitting // 2 + 1


def packed_groups(settings: TrainSettings | SftSettings) -> int:
    """Samples that begin with the same prompt, which stay together in microbatches."""
    return 1 if isinstance(settings, SftSettings) else settings.batch.samples_per_prompt


def batch_ledger(
    settings: TrainSettings | SftSettings | EvalSettings, num_prompts: int | None
) -> tuple[LedgerLine, ...]:
    """The batch ledger of a run on one device.

    Args:
        settings: of the run; updates are none if ``prompts_per_update`` does not divide ``prompts_per_step``.
        num_prompts: prompts (or rows) of the training data; none if not known.
    """
    if isinstance(settings, TrainSettings):
        return _train_ledger(settings, num_prompts)
    if isinstance(settings, SftSettings):
        return _sft_ledger(settings, num_prompts)
    return _evaluation_ledger(settings, num_prompts)


class _Lines:
    """Collects lines; the source of a given number is its provenance, of a derived one the settings it follows from."""

    def __init__(self, settings: TrainSettings | SftSettings | EvalSettings) -> None:
        self.settings = settings
        self.lines: list[LedgerLine] = []

    def given(self, name: str, path: str, value: int | str | None, unit: str = "") -> None:
        origin = self.settings.provenance.of(path)
        self.add(name, value, path, origin, unit)

    def derived(self, name: str, value: int | float | None, formula: str, unit: str = "") -> None:
        self.add(name, value, formula, DERIVED, unit)

    def add(self, name: str, value: int | float | str | None, formula: str, source: str, unit: str) -> None:
        self.lines.append(
            LedgerLine(section="batch", name=name, value=value, formula=formula, source=source, unit=unit)
        )


def _train_ledger(settings: TrainSettings, num_prompts: int | None) -> tuple[LedgerLine, ...]:
    batch, rollout = settings.batch, settings.rollout
    per_update = batch.prompts_per_update or batch.prompts_per_step
    pieces, rest = divmod(batch.prompts_per_step, per_update)
    updates_per_step = None if rest else pieces * batch.epochs_per_step
    steps = train_steps(settings, num_prompts)
    lines = _Lines(settings)
    lines.add(
        "prompts of the data",
        num_prompts,
        "counted, less overlong ones that are dropped",
        "data.train",
        "prompts",
    )
    lines.given("prompts per step", "batch.prompts_per_step", batch.prompts_per_step, "prompts")
    lines.given("samples per prompt", "batch.samples_per_prompt", batch.samples_per_prompt, "samples")
    samples_per_step = batch.prompts_per_step * batch.samples_per_prompt
    lines.derived("samples per step", samples_per_step, "prompts per step × samples per prompt", "samples")
    lines.derived(
        "most tokens sampled per step",
        samples_per_step * rollout.max_response_tokens,
        f"samples per step × rollout.max_response_tokens ({rollout.max_response_tokens})",
        "tokens",
    )
    if batch.prompts_per_update is None:
        lines.derived(
            "prompts per update", per_update, "prompts per step, as batch.prompts_per_update is null", "prompts"
        )
    else:
        lines.given("prompts per update", "batch.prompts_per_update", per_update, "prompts")
    lines.given("passes over a step's samples", "batch.epochs_per_step", batch.epochs_per_step)
    formula = "prompts per step ÷ prompts per update × passes over a step's samples"
    lines.derived("updates per step", updates_per_step, formula, "updates")
    formula = "prompts per update × samples per prompt"
    lines.derived("samples per update", samples_per_update(settings), formula, "samples")
    _microbatch_lines(lines, settings)
    if batch.steps is None:
        formula = f"⌈prompts of the data × batch.epochs ({batch.epochs}) ÷ prompts per step⌉"
        if settings.rollout.from_samples is not None:
            formula = "those of rollout.from_samples, which is read when the run begins"
        lines.derived("steps", steps, formula, "steps")
    else:
        lines.given("steps", "batch.steps", steps, "steps")
    epochs = None if steps is None or not num_prompts else round(steps * batch.prompts_per_step / num_prompts, 3)
    lines.derived("epochs", epochs, "steps × prompts per step ÷ prompts of the data", "")
    total = None if steps is None or updates_per_step is None else steps * updates_per_step
    if not has_critic(settings):
        _update_lines(lines, settings, total, "steps × updates per step")
        return tuple(lines.lines)
    warmup = settings.critic.warmup_steps
    own = None if steps is None or updates_per_step is None else max(0, steps - warmup) * updates_per_step
    formula = "(steps − critic's warm-up) × updates per step" if warmup else "steps × updates per step"
    _update_lines(lines, settings, own, formula)
    _critic_lines(lines, settings, total)
    return tuple(lines.lines)


def _critic_lines(lines: _Lines, settings: TrainSettings, total: int | None) -> None:
    critic, batch, origin = settings.critic, settings.batch, settings.provenance.of
    lines.given("critic's warm-up", "critic.warmup_steps", critic.warmup_steps, "steps")
    lines.derived(CRITIC_UPDATES, total, "steps × updates per step", "updates")
    path = "critic.tokens_per_microbatch" if critic.tokens_per_microbatch else "batch.tokens_per_microbatch"
    tokens = critic.tokens_per_microbatch or batch.tokens_per_microbatch
    lines.add("critic's tokens per microbatch", tokens, path, origin(path), "tokens")
    schedule = f"{critic.optimizer.schedule}, per update"
    lines.given("critic's learning rate schedule", "critic.optimizer.schedule", schedule)


def _sft_ledger(settings: SftSettings, num_rows: int | None) -> tuple[LedgerLine, ...]:
    batch = settings.batch
    steps = sft_steps(settings, num_rows)
    lines = _Lines(settings)
    lines.add("rows of the data", num_rows, "counted, less overlong ones that are dropped", "data.train", "rows")
    lines.given("samples per update", "batch.samples_per_update", batch.samples_per_update, "samples")
    _microbatch_lines(lines, settings)
    if batch.steps is None:
        formula = f"⌈rows of the data × batch.epochs ({batch.epochs}) ÷ samples per update⌉"
        lines.derived("steps", steps, formula, "steps")
    else:
        lines.given("steps", "batch.steps", steps, "steps")
    epochs = None if steps is None or not num_rows else round(steps * batch.samples_per_update / num_rows, 3)
    lines.derived("epochs", epochs, "steps × samples per update ÷ rows of the data", "")
    _update_lines(lines, settings, steps, "steps: one update each")
    return tuple(lines.lines)


def _microbatch_lines(lines: _Lines, settings: TrainSettings | SftSettings) -> None:
    batch, longest = settings.batch, longest_sample_tokens(settings)
    response = "data" if isinstance(settings, SftSettings) else "rollout"
    lines.given("tokens per microbatch", "batch.tokens_per_microbatch", batch.tokens_per_microbatch, "tokens")
    lines.given("samples per microbatch", "batch.samples_per_microbatch", batch.samples_per_microbatch, "samples")
    formula = f"data.max_prompt_tokens + {response}.max_response_tokens"
    lines.derived("longest sample", longest, formula, "tokens")
    lines.derived(
        MICROBATCHES,
        most_microbatches(
            samples_per_update(settings),
            longest,
            batch.tokens_per_microbatch,
            batch.samples_per_microbatch,
            packed_groups(settings),
        ),
        "at most: ⌈samples per update ÷ longest samples that fit, those of a prompt together⌉; never changes the result",
        "",
    )


def _update_lines(lines: _Lines, settings: TrainSettings | SftSettings, total: int | None, formula: str) -> None:
    optimizer = settings.optimizer
    lines.derived("updates of the run", total, formula, "updates")
    lines.given("warm-up", "optimizer.warmup_updates", optimizer.warmup_updates, "updates")
    lines.given("learning rate schedule", "optimizer.schedule", f"{optimizer.schedule}, per update")


def _evaluation_ledger(settings: EvalSettings, num_prompts: int | None) -> tuple[LedgerLine, ...]:
    validation = settings.validation
    lines = _Lines(settings)
    formula = "counted, less overlong ones that are dropped"
    lines.add("prompts of the data", num_prompts, formula, settings.source_path, "prompts")
    lines.given("samples per prompt", "validation.samples_per_prompt", validation.samples_per_prompt, "samples")
    samples = None if num_prompts is None else num_prompts * validation.samples_per_prompt
    lines.derived("samples", samples, "prompts of the data × samples per prompt", "samples")
    return tuple(lines.lines)
