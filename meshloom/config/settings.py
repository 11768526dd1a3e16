"""The settings of a run: typed, frozen, one default per field.

Owns: every number and switch a user may set, its default, its range and its meaning. Refuses to know: devices, tensors,
files' contents. Always holds: an unknown key is an error, a value never changes after it is read, and a field that no
room reads fails the tests.
"""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from meshloom.config.algorithm_settings import AlgorithmSettings, KlPlace
from meshloom.config.base import Count, CountOrZero, Place, Places, Positive, Seed, Settings, Share
from meshloom.config.cluster_settings import (
    ClusterSettings,
    Fabric,
    OffloadSettings,
    ParallelSettings,
    Placement,
    PlacementSettings,
    SftOffloadSettings,
    SftParallelSettings,
)
from meshloom.config.code_settings import CodeSettings
from meshloom.config.correction_settings import CorrectionSettings
from meshloom.config.critic_settings import CriticSettings
from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.group_settings import FilterGroupsSettings
from meshloom.config.model_settings import LoraSettings, ModelSettings, OptimizerSettings
from meshloom.config.names import RewardForm
from meshloom.config.reference_settings import ReferenceSettings
from meshloom.config.reward_settings import ComponentSettings, JudgeSettings, OverlongSettings, RewardModelSettings
from meshloom.config.rollout_settings import RolloutSettings, SamplingSettings

__all__ = [
    "CodeSettings",
    "AlgorithmSettings",
    "ComponentSettings",
    "CorrectionSettings",
    "FilterGroupsSettings",
    "JudgeSettings",
    "KlPlace",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ReferenceSettings",
    "OverlongSettings",
    "RewardModelSettings",
    "RolloutSettings",
    "SamplingSettings",
    "Settings",
]


SOURCE_KINDS = ("files", "dataset", "reasoning_gym", "episodes")


class SourceSettings(Settings):
    """Where rows come from. Exactly one of ``files``, ``dataset``, ``reasoning_gym`` and ``episodes`` is given."""

    files: Places = ()
    """Parquet (.parquet) or JSON Lines (.jsonl) files, read in this order; one name alone is a list of one."""
    dataset: Place | None = None
    """Name or folder for ``datasets.load_dataset`` (extra: datasets)."""
    subset: str | None = None
    """Subset (configuration) of ``dataset``, such as ``main`` of ``openai/gsm8k``."""
    split: str = "train"
    """Split of ``dataset``."""
    reasoning_gym: str | None = None
    """Task name of reasoning-gym; its own verifier is then the default reward."""
    task: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """The task's own arguments, as reasoning-gym names them (``min_digits``, ``max_terms``, …)."""
    size: Count = 1000
    """Problems to generate from ``reasoning_gym``."""
    episodes: Count | None = None
    """So many rows without a prompt, for an environment that makes its own when it is reset (``environment.gym``, ``custom``);
    ``extra`` has their ``number``, from ``seed`` on."""
    seed: int = 0
    """Seed of the generated problems; the first number of ``episodes``."""
    max_rows: Count | None = None
    """Use at most this many rows, the first ones."""


class Overlong(StrEnum):
    """What to do with a prompt longer than ``max_prompt_tokens``."""

    ERROR = "error"
    DROP = "drop"


class DataSettings(Settings):
    """Prompts: their source, columns, template and length."""

    train: SourceSettings | None = None
    """Rows to train on."""
    validation: SourceSettings | None = None
    """Rows to validate on; none: no validation."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a chat as a list of {role, content}. A dotted name is a column within structs."""
    answer_column: str = "answer"
    """Column of the answer in plain rows; rows with ``reward_model.ground_truth`` (verl's format) need none."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Render prompts with the tokenizer's chat template. ``auto``: chats always, strings if the tokenizer has a template."""
    chat_template_arguments: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Further arguments that the template reads, such as ``enable_thinking``."""
    system_prompt: str | None = None
    """Put before each chat as a system message."""
    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens after the template."""
    overlong_prompts: Overlong = Overlong.ERROR
    """A longer prompt is an error that names its row, or is dropped and counted."""
    shuffle: bool = True
    """A new order of the prompts in each epoch, from the run's seed."""


class TrainDataSettings(DataSettings):
    """Prompts of a run that trains."""

    train: SourceSettings
    """Rows to train on."""


class RewardSettings(Settings):
    """How a response gets its number."""

    function: Place | None = None
    """``file.py:function``, or a named verifier: ``exact_match``, ``regex``, ``math_verify``, ``reasoning_gym``, ``code``; or
    a named shape: ``tag_format``, ``regex_format``, ``length_penalty``, ``repetition_penalty``. Default: the verifier of the
    data source where it has one."""
    form: RewardForm | None = None
    """How a function of a file is called: ``request`` or ``verl`` with one sample, ``verl_batch`` or ``trl`` with the lists of
    a group. Default: told by the names of its parameters."""
    kwargs: dict[str, int | float | bool | str | None] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    workers: Count | None = None
    """Processes that score side by side. Default: the processors this process may use."""
    deadline_s: Positive = 10.0
    """Seconds one call of the function may take, of a sample or of a group; then its process is killed and what it was called
    with is invalid."""
    max_invalid_share: Share = 0.5
    """A step with a larger share of invalid rewards stops the run."""
    components: dict[str, ComponentSettings] = Field(default_factory=dict)
    """Several rewards by name, in place of ``function``: their weighted sum is the reward, and each is logged as
    ``reward/NAME``."""
    overlong: OverlongSettings | None = None
    """Penalty for responses that come near the longest length: a component of the name ``overlong``."""
    code: CodeSettings = CodeSettings()
    """How the verifier ``code`` runs programs, alone or as a component."""


class BatchSettings(Settings):
    """The batch ledger's given numbers; all others follow."""

    prompts_per_step: Count = 64
    """Prompts a step consumes."""
    samples_per_prompt: Count = 8
    """Samples of each prompt: a group."""
    prompts_per_update: Count | None = None
    """Prompts whose samples make one optimizer update. Default: ``prompts_per_step``, one update a step."""
    epochs_per_step: Count = 1
    """Passes over a step's samples."""
    tokens_per_microbatch: Count = 16384
    """Tokens one device holds at once in a forward and backward pass: a hard bound that never changes the result."""
    samples_per_microbatch: Count | None = None
    """Further bound in samples."""
    steps: Count | None = None
    """Steps of the run. Default: from ``epochs``."""
    epochs: Count = 1
    """Passes over the prompts, when ``steps`` is not given."""


class SftValidationSettings(Settings):
    """When a run measures what it learns on held-out rows (``data.validation``)."""

    every_steps: CountOrZero = 10
    """Steps between evaluations; 0: none between the first and the last."""
    before_training: bool = True
    """Evaluate before the first step."""
    after_training: bool = True
    """Evaluate after the last step, whatever ``every_steps`` says."""


class ValidationSettings(SftValidationSettings):
    """Evaluation during a run."""

    samples_per_prompt: Count = 1
    """Samples of each prompt; mean@k and pass@k are reported for more than one."""
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    """Greedy by default."""
    max_response_tokens: Count | None = None
    """Default: as in training."""
    success_threshold: float = 1.0
    """A reward of at least this counts as solved, for accuracy and pass@k."""
    success_component: str | None = None
    """Component of the reward that is compared with ``success_threshold``, in training too. Default: the function where
    ``reward.overlong`` is beside one, else the reward itself."""


class CheckpointSettings(Settings):
    """When a run is saved and what is kept."""

    every_steps: CountOrZero = 50
    """Steps between checkpoints; 0: only at the end."""
    at_end: bool = True
    """Save the last step, whatever ``every_steps`` says. A run that is stopped before saves where it is in any case."""
    keep_last: Count = 2
    """Newest checkpoints that are kept."""
    keep_best: CountOrZero = 1
    """Best checkpoints by validation accuracy, of supervised runs by the loss on held-out rows, that are kept besides."""
    asynchronous: bool = True
    """Write in the background while the next step runs."""


class LoggingSettings(Settings):
    """What is written and shown."""

    loggers: tuple[str, ...] = ("tensorboard",)
    """Besides the run folder's own JSON Lines: tensorboard, wandb, mlflow, swanlab."""
    project: str = "meshloom"
    """Project name for loggers that have projects."""
    samples_per_step: CountOrZero | None = None
    """Samples of each step written to samples.jsonl; none: all."""
    sampler_logprobs: bool = False
    """Write the sampler's log-prob of each token into samples.jsonl too, which ``rollout.from_samples`` needs to repeat a run
    exactly."""
    table: bool | None = None
    """Live table on the terminal. Default: when it is a terminal."""


class RunSettings(Settings):
    """What every run has."""

    run_dir: Place
    """Folder of the run: settings, plan, metrics, samples, checkpoints, report."""
    seed: Seed = 0
    """Seed of everything random: order of rows, sampling, adapters, dropout."""
    device: str = "auto"
    """``auto``: the first GPU, or the processor; or ``cpu``, ``cuda``, ``cuda:1``."""
    device_memory_bytes: Count | None = None
    """Memory of each GPU that the plan counts with; ``--device-memory`` of ``plan`` and ``simulate`` is the same. Default: what
    is free on it when a run begins. ``meshloom plan`` touches no device, so without this it leaves open what depends on it. On
    a processor nothing counts with it."""
    model: ModelSettings


class TrainSettings(RunSettings):
    """Everything that decides an RL run (``meshloom train``)."""

    data: TrainDataSettings
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    environment: EnvironmentSettings | None = None
    """What answers the model's turns, and its tools; none: a prompt is answered in one turn."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reference: ReferenceSettings = ReferenceSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    validation: ValidationSettings = ValidationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    fabric: Fabric = Fabric.AUTO
    """How the processes of a run over several devices are started; ``auto`` follows from how this command was."""
    cluster: ClusterSettings = ClusterSettings()
    placement: Placement = PlacementSettings()
    """Which devices each role is on; or ``auto``."""
    parallel: ParallelSettings = ParallelSettings()
    offload: OffloadSettings = OffloadSettings()


class SftBatchSettings(Settings):
    """Batch numbers of supervised fine-tuning."""

    samples_per_update: Count = 64
    """Samples of one optimizer update."""
    tokens_per_microbatch: Count = 16384
    """Tokens one device holds at once: a hard bound that never changes the result."""
    samples_per_microbatch: Count | None = None
    """Further bound in samples."""
    steps: Count | None = None
    """Updates of the run. Default: from ``epochs``."""
    epochs: Count = 1
    """Passes over the rows, when ``steps`` is not given."""


class SftDataSettings(TrainDataSettings):
    """Rows of supervised fine-tuning: a prompt and a response, or a whole chat."""

    response_column: str = "response"
    """Column of the response that is learned. A chat that ends with an assistant message needs none: that last message is
    learned, earlier ones of the assistant are only read."""
    max_response_tokens: Count = 1024
    """Longest response in tokens, its end token included."""


class SftSettings(RunSettings):
    """Everything that decides a supervised run (``meshloom sft``)."""

    data: SftDataSettings
    batch: SftBatchSettings = SftBatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    validation: SftValidationSettings = SftValidationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    fabric: Fabric = Fabric.AUTO
    """How the processes of a run over several devices are started; ``auto`` follows from how this command was."""
    cluster: ClusterSettings = ClusterSettings()
    """The machines whose devices all train."""
    parallel: SftParallelSettings = SftParallelSettings()
    offload: SftOffloadSettings = SftOffloadSettings()


class EvalSettings(RunSettings):
    """Everything that decides an evaluation (``meshloom eval``)."""

    data: DataSettings
    """Only ``data.validation`` is evaluated, or ``data.train`` where there is none."""
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    environment: EnvironmentSettings | None = None
    """What answers the model's turns, and its tools; none: a prompt is answered in one turn."""
    validation: ValidationSettings = ValidationSettings()

    @property
    def source_path(self) -> str:
        """The setting that names the rows that are evaluated."""
        return "data.train" if self.data.validation is None and self.data.train is not None else "data.validation"

    @property
    def source(self) -> SourceSettings | None:
        """The rows that are evaluated; none if the settings name none."""
        return self.data.validation or self.data.train
