"""Taking verl commands apart: shells, overrides, values, spellings, what wins."""

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.errors import UserError
from meshloom.config.verl import translate
from meshloom.config.verl.command import read_command
from meshloom.config.verl.values import read_value
from tests.test_verl_launches import LAUNCHES, NAMES

GRPO = "algorithm.adv_estimator=grpo"
ACTOR = "actor_rollout_ref.actor"


def value_of(path: str, *overrides: str) -> Any:
    return translate([GRPO, *overrides]).settings[path].value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("True", True),
        ("false", False),
        ("null", None),
        ("None", "None"),
        ("", ""),
        ("a b", "a b"),
        ("'1'", "1"),
        ('"a, b"', "a, b"),
        ("'it\\'s'", "it's"),
        ("[]", []),
        ("[a,'b c',1,[2.5,null]]", ["a", "b c", 1, [2.5, None]]),
        ('["console", "wandb"]', ["console", "wandb"]),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("{a.\\{*\\}:{},b:}", {"a.{*}": {}, "b": ""}),
        ("[model.layers.{*}.mlp]", None),
        ("${a.b}", "${a.b}"),
        ("0.5_4.0", "0.5_4.0"),
        ("int(64.5)", 64),
        ("float('1e-6')", 1e-6),
        ("str(5)", "5"),
        ("bool(0)", False),
        ("/data/x-y_1.parquet", "/data/x-y_1.parquet"),
        ("https://a:8000/v1", "https://a:8000/v1"),
    ],
)
def test_values_are_read_as_hydra_reads_them(text: str, value: Any) -> None:
    if text.startswith("[model"):
        with pytest.raises(ValueError):
            read_value(text)
    else:
        assert read_value(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1,2", "']' is missing"),
        ("'a", "not closed"),
        ("a,b", "sweep"),
        ("choice(a,b)", "sweep"),
        ("range(1,3)", "sweep"),
        ("int(x)", "invalid literal"),
        ("{a}", "no value"),
        ("[1]2", "stands behind"),
    ],
)
def test_values_that_hydra_refuses_are_refused_with_their_key(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_value(text)
    assert said in translate([GRPO, f"trainer.logger={text}"]).refused["trainer.logger"]


FORMS = {
    "words": ["python3", "-m", "verl.trainer.main_ppo", GRPO, "data.train_batch_size=8"],
    "unbuffered": [
        "PYTHONUNBUFFERED=1",
        "python",
        "-u",
        "-m",
        "verl.trainer.main_ppo",
        GRPO,
        "data.train_batch_size=8",
    ],
    "uv": ["uv", "run", "python", "-m", "verl.trainer.main_ppo", GRPO, "data.train_batch_size=8"],
    "ray": ["ray", "job", "submit", "--", "python3", "-m", "verl.trainer.main_ppo", GRPO, "data.train_batch_size=8"],
    "file": ["python3", "verl/trainer/main_ppo.py", GRPO, "data.train_batch_size=8"],
    "file elsewhere": ["python3", "/root/verl/verl/trainer/main_ppo.py", GRPO, "data.train_batch_size=8"],
    "file here": ["python3", "main_ppo.py", GRPO, "data.train_batch_size=8"],
    "fenced": [f"```bash\npython3 -m verl.trainer.main_ppo {GRPO} \\ \n data.train_batch_size=8\n```"],
    "overrides": [GRPO, "data.train_batch_size=8"],
    "text": [f"python3 -m verl.trainer.main_ppo \\\n  {GRPO} \\\n  data.train_batch_size=8 $@ 2>&1 | tee log"],
    "script": [
        "#!/bin/bash\nset -x\n# a comment\nSIZE=8  # of a step\nexport A=${A:-grpo}\n"
        'ARGS=(\n  data.train_batch_size=$SIZE  # "quoted"\n)\n'
        'python3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=$A "${ARGS[@]}"\n'
    ],
    "text of overrides": [f"{GRPO} data.train_batch_size=8"],
}


@pytest.mark.parametrize("words", FORMS.values(), ids=FORMS)
def test_a_command_may_be_given_in_any_form(words: list[str]) -> None:
    translation = translate(words)
    assert (translation.entry, translation.kind) == ("verl.trainer.main_ppo", "train")
    assert not translation.refused
    assert translation.settings["batch.prompts_per_step"].value == 8


def test_nothing_is_no_command() -> None:
    for words in ([], [""], ["# only a comment\n"]):
        with pytest.raises(UserError, match="no verl command"):
            translate(words)
    with pytest.raises(UserError, match="cannot be read"):
        translate(["python3 -m verl.trainer.main_ppo a='b\n"])


def test_a_variable_without_a_value_is_named() -> None:
    translation = translate([GRPO, "actor_rollout_ref.model.path=$MODEL/x", "data.train_files=${DATA[0]}/a.parquet"])
    assert "$MODEL has no value" in translation.refused["actor_rollout_ref.model.path"]
    assert value_of("model.path", "actor_rollout_ref.model.path=$HOME/m") == "~/m"
    assert "sweep" not in translation.refused["actor_rollout_ref.model.path"]


def test_hydras_references_are_resolved() -> None:
    overrides = ["trainer.project_name=p", "trainer.default_local_dir=/c/${trainer.project_name}/x"]
    assert value_of("run_dir", *overrides) == "/c/p/x"
    assert value_of("run_dir", "trainer.experiment_name=e") == "checkpoints/verl_examples/e"
    words = ["N=16", "python3", "-m", "verl.trainer.main_ppo", GRPO, "data.train_batch_size=${oc.env:N}"]
    assert translate(words).settings["batch.prompts_per_step"].value == 16
    refused = translate([GRPO, "data.train_batch_size=${oc.env:N}"]).refused
    assert "${oc.env:N} has no value" in refused["data.train_batch_size"]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_signs_of_hydra_change_nothing(sign: str) -> None:
    assert value_of("batch.samples_per_prompt", f"{sign}actor_rollout_ref.rollout.n=7") == 7


def test_a_removed_key_is_null() -> None:
    assert value_of("data.validation", "~data.val_files") is None


def test_the_later_of_two_values_wins_and_is_named() -> None:
    translation = translate(
        [GRPO, "actor_rollout_ref.rollout.n=4", "data.shuffle=False", "actor_rollout_ref.rollout.n=6"]
    )
    native = translation.settings["batch.samples_per_prompt"]
    assert native.value == 6
    origin = "verl actor_rollout_ref.rollout.n=6, which replaces actor_rollout_ref.rollout.n=4"
    assert native.origin == origin


def test_old_and_new_names_of_a_key_are_one_key() -> None:
    old, new = "custom_reward_function.path", "reward.custom_reward_function.path"
    translation = translate([GRPO, f"{new}=a.py", f"{old}=b.py"])
    assert translation.settings["reward.function"].value == "b.py:compute_score"
    assert translation.translated[old] == "reward.function"
    assert "comes later" in translation.ignored[new]
    assert value_of("optimizer.max_grad_norm", f"{ACTOR}.grad_clip=0.5") == 0.5
    assert value_of("optimizer.schedule", f"{ACTOR}.optim.warmup_style=cosine") == "cosine"
    assert value_of("offload.actor.optimizer", f"{ACTOR}.fsdp.optimizer_offload=True") == "host"


def test_a_mapping_is_the_keys_in_it() -> None:
    group = "actor_rollout_ref.rollout.val_kwargs"
    translation = translate([GRPO, group + "={temperature:0.7,n:4,do_sample:true}"])
    assert translation.settings["validation.sampling.temperature"].value == 0.7
    assert translation.settings["validation.samples_per_prompt"].value == 4
    assert "validation.samples_per_prompt" in translation.translated[group]
    refused = translate([GRPO, group + "={temprature:0.7}"]).refused
    assert "did you mean actor_rollout_ref.rollout.val_kwargs.temperature" in refused[f"{group}.temprature"]
    assert group in refused


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("actor_rollout_ref.actor.optim.learning_rate", ""),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.actor.optim", ""),
    ],
)
def test_a_key_that_verl_does_not_have_is_refused_with_the_nearest(key: str, near: str) -> None:
    reason = translate([GRPO, f"{key}=1"]).refused[key]
    assert near in reason
    assert "verl has no such key" in reason or "group of keys" in reason


def test_files_and_names_of_configurations_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [x]}\nalgorithm: {adv_estimator: rloo}\n"
        "data:\n  train_batch_size: 12\n  train_files: [a.parquet]\n"
    )
    options = [f"--config-path={tmp_path}", "--config-name", "mine"]
    words = ["python3", "-m", "verl.trainer.main_ppo", *options, "actor_rollout_ref.rollout.n=3", "hydra.run.dir=x"]
    translation = translate(words)
    assert not translation.refused
    assert translation.settings["batch.prompts_per_step"].value == 12
    assert translation.settings["batch.prompts_per_step"].origin.endswith("mine.yaml:5")
    assert translation.settings["algorithm.advantage"].value == "rloo"
    assert "hydra.run.dir" in translation.ignored
    assert translate([str(tmp_path / "mine.yaml")]).settings["batch.prompts_per_step"].value == 12
    missing = translate(["-m", "verl.trainer.main_ppo", "--config-name=other"])
    assert "cannot be read" in missing.refused["other.yaml"]
    name = "ppo_megatron_trainer.yaml"
    megatron = translate(
        ["-m", "verl.trainer.main_ppo", f"--config-name={name}", f"{ACTOR}.megatron.tensor_model_parallel_size=4"]
    )
    assert megatron.settings["parallel.actor.tensor"].value == 4


def test_a_file_begins_with_what_its_list_of_defaults_names(tmp_path: Path) -> None:
    """What a file began with was dropped: Megatron's cuts were ignored, as the engine was taken for FSDP."""
    (tmp_path / "own.yaml").write_text(
        "defaults: [ppo_megatron_trainer, _self_]\ndata: {train_batch_size: 12, max_prompt_length: 9}\n"
        "actor_rollout_ref: {actor: {megatron: {tensor_model_parallel_size: 4}}}\n"
    )
    (tmp_path / "more.yaml").write_text("data: {train_batch_size: 6}\ndefaults: [own, {override hydra/launcher: x}]\n")
    (tmp_path / "titan.yaml").write_text(
        "defaults:\n- ppo_trainer\n- actor@actor_rollout_ref.actor: torchtitan_actor\n"
    )
    (tmp_path / "lost.yaml").write_text("defaults: [nowhere, lost]\ndata: {train_batch_size: 3}\n")
    start = ["-m", "verl.trainer.main_ppo", GRPO, f"--config-dir={tmp_path}"]
    settings = translate([*start, "--config-name=more"]).settings
    found = [settings[path].value for path in ("batch.prompts_per_step", "data.max_prompt_tokens")]
    assert (found, settings["parallel.actor.tensor"].value) == ([6, 9], 4)
    titan = translate([*start, "--config-name=titan", f"{ACTOR}.torchtitan.tensor_parallel_size=2"])
    assert titan.settings["parallel.actor.tensor"].value == 2
    said = " ".join(translate([*start, "--config-name=lost"]).refused.values())
    assert "nowhere.yaml" in said and "begins with itself" in said


def test_a_file_of_fine_tuning_alone_is_one(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model: {path: m}\noptim: {lr: 1e-4}\ndata: {train_batch_size: 8}\n")
    assert translate([str(tmp_path / "sft.yaml")]).kind == "sft"


def test_other_programs_are_refused_by_name() -> None:
    for module, said in (("verl.trainer.main_eval", "meshloom eval"), ("recipe.prime.main_prime", "programs that")):
        assert said in translate(["python3", "-m", module, GRPO]).refused[module]
    for script in ("run.sh", "verl.sh", "recipe.dapo.sh"):
        assert f'"$(cat {script})"' in translate(["bash", script]).refused[script]
    assert (
        "model_engine" in translate([GRPO, "actor@actor_rollout_ref.actor=x"]).refused["actor@actor_rollout_ref.actor"]
    )
    assert "neither an override" in translate(["-m", "verl.trainer.main_ppo", GRPO, "stray"]).refused["stray"]


@pytest.mark.parametrize("launch", LAUNCHES, ids=NAMES)
def test_neither_order_nor_quotes_matter(launch: dict[str, Any]) -> None:
    words = [f"{key}={value}" for key, value in launch["overrides"].items()]
    expected = translate(words)
    shuffled = random.Random(launch["script"]).sample(words, len(words))
    signed = [f"{random.Random(word).choice(['', '+', '++'])}{word}" for word in shuffled]
    text = "python3 -m verl.trainer.main_ppo \\\n    " + " \\\n    ".join(map(shlex.quote, signed))
    for found in (translate(shuffled), translate([text])):
        assert {path: one.value for path, one in found.settings.items()} == {
            path: one.value for path, one in expected.settings.items()
        }
        for name in ("translated", "ignored", "refused", "warnings"):
            assert set(getattr(found, name)) == set(getattr(expected, name)), name


def test_earlier_values_never_matter() -> None:
    chance = random.Random(0)
    for launch in LAUNCHES:
        words = [f"{key}={value}" for key, value in launch["overrides"].items()]
        earlier = [f"{key}={json.dumps(chance.choice([1, 'x', None]))}" for key in launch["overrides"]]
        first, second = translate(words), translate([*earlier, *words])
        assert {path: one.value for path, one in first.settings.items()} == {
            path: one.value for path, one in second.settings.items()
        }
        assert first.refused.keys() == second.refused.keys()


def test_every_word_of_a_command_is_in_one_part() -> None:
    launcher = "A=1 CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nnodes=1 --nproc_per_node 8"
    text = f"{launcher} -m verl.trainer.sft_trainer optim.lr=1 a.yaml x"
    command = read_command([text])
    assert command.module == "verl.trainer.sft_trainer"
    assert command.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert command.launcher == {"--nnodes": "1", "--nproc-per-node": "8"}
    assert (command.overrides, command.files, command.other) == (["optim.lr=1"], ["a.yaml"], ["x"])
    assert command.in_front == ["A", "CUDA_VISIBLE_DEVICES"]
    assert "in front of meshloom" in translate([text]).ignored["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("option", ["--nproc_per_node=$1", "--nproc_per_node gpu", "--nnodes=1:4"])
def test_a_number_of_processes_that_is_not_known_is_refused(option: str) -> None:
    """Fine-tuning was then planned for verl's own number of devices."""
    command = f"torchrun {option} -m verl.trainer.sft_trainer data.train_files=a.parquet"
    name = option.replace("_", "-").replace("=", " ").split()[0]
    assert "write the number" in translate([command]).refused[name]
    assert name not in translate([command.replace("sft_trainer", "main_ppo")]).refused
