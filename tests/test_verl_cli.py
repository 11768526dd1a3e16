"""verl commands through the command line: the plan, its JSON, exit codes, the written file, and whole runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from meshloom.cli import main
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.front import get_trainer_config
from meshloom.observe.records import read_samples
from tests.lesson_runs import write_model
from tests.test_verl_launches import LAUNCHES

REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, share=1.0):
    return {"score": share * sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))}
"""
RL = "python3 -m verl.trainer.main_ppo"
COMMAND = f"""\
N=4
{RL} \\
    algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files=test.parquet \\
    data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=8 \\
    actor_rollout_ref.model.path=model \\
    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    custom_reward_function.path=reward.py reward.num_workers=1 \\
    trainer.critic_warmup=0 trainer.logger='["console"]' trainer.nnodes=1 trainer.n_gpus_per_node=1 \\
    trainer.save_freq=1 trainer.test_freq=1 trainer.total_training_steps=2 trainer.default_local_dir=runs/a $@
"""


def rows(count: int, source: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]


def write_rows(file: Path, count: int, source: str = "my/sums", **columns: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | columns for row in rows(count, source)]), file)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    write_model(folder / "model")
    write_rows(folder / "train.parquet", 8)
    write_rows(folder / "test.parquet", 3)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(autouse=True)
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_OFFLOAD_DIR", "VERL_OFFLOAD_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def plan_json(
    capsys: pytest.CaptureFixture[str], *words: str, native: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--verl", *native, "--json", "--", *words])
    return code, json.loads(capsys.readouterr().out)


def codes(answer: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in answer["problems"]]


def test_a_command_that_can_run_ends_with_0_and_says_what_it_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = plan_json(capsys, COMMAND)
    assert (code, answer["problems"]) == (0, [])
    lines = {line["name"]: line for line in answer["lines"]}
    assert lines["samples per step"]["value"] == 16
    assert lines["prompts per step"]["source"] == "verl data.train_batch_size=4"
    verl = answer["verl"]
    assert {"translated", "ignored", "refused", "warnings", "settings"} <= set(verl)
    assert verl["translated"]["data.train_batch_size"] == "batch.prompts_per_step"
    assert verl["translated"]["custom_reward_function.path"] == "reward.function"
    assert "every step updates" in verl["ignored"]["trainer.critic_warmup"]
    assert verl["refused"] == {}
    assert verl["settings"]["optimizer.lr"] == {"value": 1e-3, "from": "verl actor_rollout_ref.actor.optim.lr=1e-3"}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("algorithm.adv_estimator=gdpo", "algorithm.adv_estimator"),
        ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name"),
        ("actor_rollout_ref.rollout.nn=4", "actor_rollout_ref.rollout.nn"),
        ("trainer.experiment_name=$NAME", "trainer.experiment_name"),
    ],
)
def test_a_command_with_a_refused_key_ends_with_2(more: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = COMMAND.replace("$@", more)
    code, answer = plan_json(capsys, text)
    assert code == 2
    assert key in answer["verl"]["refused"]
    assert "V001" in codes(answer)
    assert main(["train", "--verl", "--", text]) == 2
    said = capsys.readouterr()
    assert key in said.err
    assert "change:" in said.err
    assert not Path("runs").exists()


def test_all_that_is_refused_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    more = "distillation.enabled=True trainer.val_only=True actor_rollout_ref.rollout.multi_turn.enable=True"
    assert main(["train", "--verl", "--", COMMAND.replace("$@", more)]) == 2
    said = capsys.readouterr().err
    assert "3 problems" in said
    for key in ("distillation.enabled", "trainer.val_only", "actor_rollout_ref.rollout.multi_turn.enable"):
        assert key in said


def test_a_value_out_of_range_is_refused_and_the_account_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = COMMAND.replace("$@", "actor_rollout_ref.rollout.top_p=2")
    code, answer = plan_json(capsys, text)
    assert (code, codes(answer)) == (2, ["V003"])
    assert answer["verl"]["translated"]["actor_rollout_ref.rollout.top_p"] == "rollout.sampling.top_p"
    assert main(["plan", "--verl", "--", text]) == 2
    assert "rollout.sampling.top_p cannot be 2" in capsys.readouterr().err


def test_words_of_a_shell_and_overrides_alone_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = COMMAND.replace("$N", "4").replace("\\\n", " ").split("main_ppo")[1].replace("$@", "").split()
    words = [word.replace("'", "") for word in words]
    for command in (words, [*RL.split(), *words]):
        code, answer = plan_json(capsys, *command)
        assert (code, answer["verl"]["entry"]) == (0, "verl.trainer.main_ppo")
    assert main(["plan", "--verl", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["verl"]["refused"] == {}


def test_the_report_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--verl", "-v", "--", COMMAND]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "verl command: verl.trainer.main_ppo" in said
    assert "batch.samples_per_prompt 4 verl actor_rollout_ref.rollout.n=4" in said
    assert "trainer.critic_warmup every step updates the policy" in said
    assert "Plan: train runs/a" in said


def test_the_written_file_is_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--verl", "--write", "run.yaml", "--json", "--", COMMAND]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = Path("run.yaml").read_text()
    assert "prompts_per_step: 4  # verl data.train_batch_size=4\n" in text
    assert yaml.safe_load(text)["batch"]["samples_per_prompt"] == 4
    assert main(["plan", "run.yaml", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    for key in ("name", "value"):
        assert [line[key] for line in own["lines"] if line["section"] == "batch"] == [
            line[key] for line in answer["lines"] if line["section"] == "batch"
        ]
    assert load_settings(TrainSettings, Path("run.yaml")).reward.function == "reward.py:compute_score"
    assert main(["plan", "--verl", "--write", "run.yaml", "--", COMMAND]) == 2
    assert "there is a file run.yaml already" in capsys.readouterr().err
    assert main(["plan", "run.yaml", "--write", "other.yaml"]) == 2


@pytest.mark.parametrize("launch", LAUNCHES[::9], ids=lambda launch: launch["script"])
def test_public_commands_are_planned(launch: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{key}={value}" for key, value in launch["overrides"].items()]
    code, answer = plan_json(capsys, "python3", "-m", *launch["entry"], *words)
    assert code == 2, "their models and rows are not here"
    verl = answer["verl"]
    assert set(launch["overrides"]) <= {*verl["translated"], *verl["ignored"], *verl["refused"]}
    assert {"M001", "S002"} <= set(codes(answer))


def test_overrides_of_ours_win(capsys: pytest.CaptureFixture[str]) -> None:
    native = ("batch.prompts_per_step=2", "--device-memory", "80GiB")
    code, answer = plan_json(capsys, COMMAND, native=native)
    lines = {line["name"]: line for line in answer["lines"]}
    assert code == 0
    assert lines["prompts per step"]["source"] == "override batch.prompts_per_step=2"


def test_the_environment_says_where_offloaded_bytes_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VERL_OFFLOAD_DIR", str(tmp_path))
    monkeypatch.setenv("VERL_OFFLOAD_DEVICE", "disk")
    text = COMMAND.replace("$@", "actor_rollout_ref.actor.fsdp_config.param_offload=True")
    settings = plan_json(capsys, text)[1]["verl"]["settings"]
    assert settings["offload.actor.parameters"]["value"] == "disk"
    assert settings["offload.folder"]["value"] == str(tmp_path)


@pytest.mark.parametrize(
    ("source", "function", "said"),
    [
        ("openai/gsm8k", "regex", "1,000 is not 1000"),
        ("lighteval/MATH", "math_verify", "math_verify judges"),
        ("searchR1_nq", None, "name a function"),
        ("codecontests", None, "set reward.function=code reward.code.enabled=true in front of --"),
    ],
)
def test_without_a_function_the_rows_say_how_verl_would_score(
    source: str, function: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("train.parquet"), 8, source)
    text = COMMAND.replace("custom_reward_function.path=reward.py", "")
    code, answer = plan_json(capsys, text)
    verl, key = answer["verl"], "reward.custom_reward_function.path"
    assert code == (2 if function is None else 0)
    assert said in (verl["refused"] if function is None else verl["warnings"])[key]
    if function is not None:
        assert verl["settings"]["reward.function"]["value"] == function
    else:
        assert plan_json(capsys, text, native=("reward.function=exact_match",))[0] == 0


def test_rows_with_pictures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("train.parquet"), 8, images=["a.png"])
    code, answer = plan_json(capsys, COMMAND)
    assert code == 2
    assert "pictures" in answer["verl"]["refused"]["data.train_files"]
    write_rows(Path("train.parquet"), 8, images=None)
    assert plan_json(capsys, COMMAND)[0] == 0


def test_verls_default_rows_of_validation_are_left_out_where_they_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = plan_json(capsys, COMMAND.replace("data.val_files=test.parquet", ""))
    assert code == 0
    assert "nothing is validated" in answer["verl"]["warnings"]["data.val_files"]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_plain_command_runs_from_end_to_end_and_goes_on(folder: Path) -> None:
    """Two steps in a process of its own, then a third as verl's ``resume_mode=auto`` wants it."""

    def train(text: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshloom", "train", "--verl", "device=cpu", "--", text]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    first = train(COMMAND)
    assert first.returncode == 0, first.stderr
    assert "embedded engine" in first.stdout or "vllm" in sys.modules
    run = folder / "runs" / "a"
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    assert settings["batch"] | {"prompts_per_step": 4, "samples_per_prompt": 4, "steps": 2} == settings["batch"]
    assert settings["optimizer"]["lr"] == 1e-3
    assert max(record.get("step", 0) for record in metrics(run)) == 2
    assert (run / "checkpoints" / "step-000002").is_dir()
    second = train(COMMAND.replace("total_training_steps=2", "total_training_steps=3"))
    assert second.returncode == 0, second.stderr
    assert "2 done" in second.stdout
    assert max(record.get("step", 0) for record in metrics(run)) == 3


BATCH = """\
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, share=1.0):
    assert len(set(ground_truths)) == 1 and len(extra_infos) == len(data_sources)
    digits = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in solution_strs]
    return [{"score": share * each, "above": each > sum(digits) / len(digits), "size": len(digits)} for each in digits]
"""


def test_a_function_of_the_batch_manager_runs_and_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "reward.py").write_text(BATCH)
    more = "reward_model.reward_manager=batch +custom_reward_function.reward_kwargs.share=0.5"
    text = COMMAND.replace("$@", more).replace("save_freq=1", "save_freq=-1")
    code, answer = plan_json(capsys, text)
    assert (code, answer["problems"]) == (0, [])
    assert answer["verl"]["translated"]["reward_model.reward_manager"] == "reward.form"
    assert "one prompt at a time" in answer["verl"]["warnings"]["reward_model.reward_manager"]
    assert main(["train", "--verl", "device=cpu", "--", text]) == 0
    samples = read_samples(folder / "runs" / "a")
    assert {s["parts"]["size"] for s in samples if s["kind"] == "train"} == {4.0}
    assert all(s["reward"] is not None and s["reward"] <= 0.5 for s in samples)


def test_how_the_functions_of_a_command_are_called_says_nothing_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    text = COMMAND.replace("$@", "reward_model.reward_manager=batch")
    code, answer = plan_json(capsys, text, native=("reward.function=exact_match",))
    assert (code, answer["problems"]) == (0, [])
    assert "reward.form" not in answer["verl"]["settings"]


def test_fine_tuning_runs_from_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [{"messages": [*row["prompt"], {"role": "assistant", "content": "12"}]} for row in rows(8, "")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), folder / "chats.parquet")
    text = (
        "torchrun --standalone --nnodes=1 --nproc_per_node=1 -m verl.trainer.sft_trainer data.train_files=chats.parquet "
        "data.train_batch_size=4 data.max_length=64 model.path=model optim.lr=1e-3 trainer.total_epochs=1 "
        "trainer.logger=console trainer.default_local_dir=runs/sft"
    )
    assert main(["train", "--verl", "device=cpu", "--", text]) == 0
    said = capsys.readouterr().out
    assert "the last message of the assistant is learned" in said
    assert max(record.get("step", 0) for record in metrics(folder / "runs" / "sft")) == 2


def test_a_few_sizes_are_settings_too() -> None:
    settings = get_trainer_config(
        dp_size=2, tp_size=2, pp_size=2, hybrid_engine=True, enable_recompute=True, mixed_precision="bf16"
    )
    assert isinstance(settings, TrainSettings)
    assert settings.cluster.devices_per_node == 8
    actor = settings.parallel.actor
    assert (actor.fsdp_size, actor.tensor, actor.pipeline, settings.parallel.rollout.tensor) == (None, 2, 2, 2)
    assert (settings.model.dtype, settings.model.gradient_checkpointing) == ("bfloat16", True)
    apart = get_trainer_config(dp_size=4, hybrid_engine=False, nodes=2, overrides=["optimizer.lr=0.1"])
    assert apart.cluster.devices_per_node == 4
    assert apart.placement.actor == ("node1:0", "node1:1", "node1:2", "node1:3")
    assert apart.placement.rollout == ("node2:0", "node2:1", "node2:2", "node2:3")
    assert apart.optimizer.lr == 0.1
    plain = get_trainer_config()
    assert (plain.model.dtype, plain.model.gradient_checkpointing) == ("auto", "auto")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp_size": 0}, "dp_size is 0"),
        ({"dp_size": "2"}, "dp_size is '2'"),
        ({"dp_size": 3, "nodes": 2}, "2 or 4"),
        ({"mixed_precision": "fp16"}, "use one of bf16"),
        ({"overrides": ["lr=1"]}, "did you mean optimizer.lr"),
    ],
)
def test_sizes_that_do_not_work_are_refused(sizes: dict[str, Any], said: str) -> None:
    from meshloom.config.errors import UserError

    with pytest.raises(UserError, match=said):
        get_trainer_config(**sizes)


def test_a_verl_command_is_planned_without_torch() -> None:
    heavy = "sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    code = f"import sys; from meshloom.cli import main; main(['plan', '--verl', '--json', '--', sys.argv[1]]); print({heavy})"
    text = COMMAND.replace("train.parquet", "rows.jsonl").replace("test.parquet", "rows.jsonl")
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows(8, "my/sums"))))
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
