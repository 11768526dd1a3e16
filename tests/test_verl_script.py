"""Texts of shell scripts: the words that bash would pass on, branches, and what cannot be known without running them."""

import subprocess
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.verl import translate
from meshloom.config.verl.command import read_command

SCRIPTS = {
    "arithmetic and ray": r"""
set -xeuo pipefail
prompt=$((1024 * 2)); response=$((1024 * 8))   # it's in tokens
HOME_DIR=${DATA_HOME:-"${HOME}/verl"}
CKPTS=${CKPTS_DIR:-"${HOME_DIR}/ckpts/${name:-x}"}
FREQ=${TEST_FREQ:--1}
echo "starting verl seed=1"
: "$CKPTS/verl"
ray job submit --no-wait --runtime-env=verl/trainer/runtime_env.yaml --working-dir "$CKPTS" \
    -- python3 -m verl.trainer.main_ppo \
    a.tokens=$(((prompt + response) * 2)) a.half=$((7 / -2)) \
    a.logger='["console","wandb"]' a.list=['x','y'] a.freq="$FREQ" \
    a.dir="${CKPTS}" 2>&1 | cat > /dev/null
echo "done: verl.x=1"
""",
    "branches": r"""
set -e
USE_LORA=${USE_LORA:-1} CP=1 backend=${BACKEND:-fsdp}
lora=()
case "${USE_LORA}" in
    0) LR=1e-5 ;;
    1|2)
        LR=${LR:-1e-4}
        lora+=(
            "a.rank=8"   # it's "quoted"
            a.modules=all-linear
        )
        ;;
    *) echo "got '${USE_LORA}'" >&2; exit 2 ;;
esac
[ "$CP" -gt 1 ] && VPP=2 || VPP=null
[[ "$VPP" == "null" || "$VPP" == 3 ]] && EXTRA=(a.vpp=$VPP)
if [ "$backend" = "fsdp" ]; then CONFIG="a.engine=fsdp a.strategy=$backend"
elif [ "$backend" = "x" ]; then CONFIG="a.engine=x"
else
    CONFIG="a.engine=megatron"
fi
case "$backend" in none | fsdp | cpu) KIND=known ;; esac
[ -z "$KIND" ] && { KIND=empty; }
for v in A B; do unset "$v"; done
cat <<EOF > /dev/null
it's "text
python3 -m verl.trainer.main_ppo a.b=9
EOF
LAUNCH=(python3)
if [ "${UV:-1}" != 0 ] && { [ "${DEVICE:-gpu}" = x ] || { [ "$CP" = 1 ]; }; }; then LAUNCH=(uv run --extra vllm python3); fi
"${LAUNCH[@]}" -m verl.trainer.sft_trainer "${lora[@]}" ${CONFIG} "${EXTRA[@]}" a.lr=$LR a.kind=$KIND "${none[@]}" "$@"
""",
    "quotes": r"""
A=1 B="two words"
export C=$B D="$A$A"
MULTI="
  a.b=1
  a.c='q'
"
train="['$HOME/a.parquet', '$HOME/b.parquet']"
path=/data/gsm8k/train.parquet; name=${path##*/}
COMMAND="python3 -u -m verl.trainer.main_ppo"
CUDA_VISIBLE_DEVICES=0 $COMMAND $MULTI a.train="$train" \
  t.a="$C" t.b='$A' t.c=\'x,y\' t.d="\"q\"" t.e=$D t.g="a\
b" t.h=${UNSET_X:-} t.i=a"b"'c' t.j=${name%.*}-${name^^}${SUFFIX:+-x} "t.l=[1, 2]"
""",
    "subshells, groups and functions": r"""
N=1
( N=2; exit 0 ); { M=3
K=4; } > /dev/null
setup() { export GPUS=${1:-8}; local N=9; }
launch()
{
  local tp=$1; shift
  case "$tp" in (1) EXTRA=(t.tp=one) ;; *) ( echo "never" ) ;; esac
  time ( cd / && {
    python3 -m verl.trainer.main_ppo \
      a.n=$N a.m=$M a.k=$K a.gpus=$GPUS \
      `# a comment` "${EXTRA[@]}" "$@" "${@:2}" a.count=$#
  } ) > >(cat > /dev/null) 2>&1
}
if ! setup 4; then exit 1; fi
for name in only; do
  if [ -d / ]; then NAME=$name; launch 1 t.name=run_$NAME 't.two=x y'; fi
done
wait; exit 0
python3 -m verl.trainer.main_ppo a.n=never
""",
    "other shells": r"""
export N=4
M=5; : ${LR:=1e-6}
cat > /dev/null <<\EOF
it's python3 -m verl.trainer.main_ppo a.n=9
EOF
cd "$(mktemp -d)"
cat <<'END' > run.sh
K=6 bash -c 'python3 -m verl.trainer.main_ppo a.n=$N a.k=$K a.one=$1 t.q="x y"' _ $1
END
cat > env.sh <<END
export LATER=$M
END
source env.sh
bash <<END
set -e
MINE=8
eval "bash ./run.sh one$LR-$LATER-\$MINE"
END
""",
    "pipes, loops that do not begin, and what is printed": r"""
CMD=(python3 -m verl.trainer.main_ppo)
N=1 ARRAY=a.array=1
ARRAY+=(a.more=2)
IFS=,
OWN="${ARRAY[*]}"
unset IFS
set_it() { N=2; } && run() { echo "+ $*"; "$@"; }
echo x | N=3; N=4 & { N=5; exit 0; } | cat; set_it | cat
echo x | while read -r y; do N=6; done
if true; then N=7; fi | cat
while [ $N -gt 5 ]; do N=8; python3 -m verl.trainer.main_ppo a.n=never; done
for x in "${NONE[@]}"; do python3 -m verl.trainer.main_ppo a.n=never; done
NEVER=$(
  # it's a comment (
  echo x
)
EMPTY="" TWO="x y"
[[ $EMPTY == "" && $TWO == "x y" ]] && SAME=yes
N=9 run :
echo "${CMD[@]}" a.n=printed
run "${CMD[@]}" a.n=$N a.own="$OWN" a.same=$SAME 2>&1 | tee /dev/null
""",
}


def passed_on_by_bash(text: str, folder: Path) -> list[str]:
    """The words of the command that bash starts, the program's name first."""
    for program in ("python3", "ray", "uv"):
        stub = folder / program
        stub.write_text(f'#!/bin/bash\nprintf "%s\\0" {program} "$@" >> "{folder}/words"\n')
        stub.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "~"}
    subprocess.run(["bash", "-c", text], env=environment, check=True, capture_output=True, timeout=60)
    return (folder / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_gives_the_words_that_bash_passes_on(text: str, tmp_path: Path) -> None:
    """Sums, branches, texts of several words and of several lines were dropped or read wrongly."""
    words = passed_on_by_bash(text, tmp_path)
    of_bash, of_text = read_command(words), read_command([text])
    assert (of_text.module, of_text.overrides) == (of_bash.module, of_bash.overrides)
    assert of_text.overrides and not of_text.other and not of_text.lost


def test_what_hangs_on_the_machine_has_no_value() -> None:
    text = "N=4\nif nvidia-smi | grep -q H100; then N=8; fi\npython3 -m verl.trainer.main_ppo a.n=$N a.d=$(date +%d)"
    assert read_command([text]).overrides == ["a.n=$N", "a.d=$(date +%d)"]
    same = text.replace("N=8", "N=4")
    assert read_command([same]).overrides[0] == "a.n=4"


@pytest.mark.parametrize(
    "counting",
    ["while [ $N -lt 3 ]; do N=$((N+1)); done", "for f in a b; do N+=1; done", "((N++))", "let N=N+2", "read -r N < f"],
)
def test_what_is_counted_or_read_has_no_value(counting: str) -> None:
    """A loop's body was carried out once, and arithmetic not at all: the launch had another number than bash gives it."""
    command = read_command([f"N=1\n{counting}\npython3 -m verl.trainer.main_ppo a.b=$N c.d=2"])
    assert command.overrides == ["a.b=$N", "c.d=2"]
    compared = "N=1\nfor f in a b; do M=4; done\n(( N > 0 )) || exit 1\nunset Q\npython3 -m verl.trainer.main_ppo a.b=$N c.d=$M"
    assert read_command([compared]).overrides == ["a.b=1", "c.d=4"]


def test_a_command_within_a_command_is_read() -> None:
    inner = "cd /verl && N=2 python3 -m verl.trainer.main_ppo data.train_batch_size=$((4 * 2))"
    for words in (["srun", "--nodes=1", "bash", "-c", inner], [f"docker exec verl bash -lc '{inner}'"]):
        command = read_command(words)
        assert (command.module, command.overrides) == ("verl.trainer.main_ppo", ["data.train_batch_size=8"])
    command = read_command(["env", "A=1", "python3", "-m", "verl.trainer.main_ppo", "a.b=1"])
    assert command.in_front == ["A"]


def test_a_broken_text_is_an_error_in_words() -> None:
    """Each of these once ended with a traceback or a warning of Python's."""
    start = "python3 -m verl.trainer.main_ppo data.seed=1"
    for end in ("\ncat <<EOF\n", "\n{ a; }", " \\", "\nA=$((1x2))"):
        assert read_command([f"{start}{end}"]).overrides[0] == "data.seed=1"
    for end in (' a.b="', " a.b=${", " a.b=$(ls", "\nA=("):
        with pytest.raises(UserError, match="not closed"):
            read_command([f"{start}{end}"])


def test_overrides_that_a_shell_does_not_pass_on_are_refused() -> None:
    """A comment between continued lines ends the command; what follows was taken all the same."""
    text = "python3 -m verl.trainer.main_ppo \\\n algorithm.adv_estimator=grpo \\\n # seed \\\n data.seed=3\n"
    translation = translate([text])
    assert "does not pass it on" in translation.refused["data.seed"]
    assert "seed" not in translation.settings


def test_a_text_with_two_programs_is_refused_by_their_names() -> None:
    text = "python -m verl.trainer.sft_trainer optim.lr=1\npython -m verl.trainer.main_ppo data.seed=1\n"
    with pytest.raises(UserError, match="verl.trainer.sft_trainer, verl.trainer.main_ppo"):
        translate([text])
    exported = f"{text.splitlines()[1]}\npython -m verl.model_merger merge --backend fsdp\n"
    assert translate([exported]).entry == "verl.trainer.main_ppo"


START = "python3 -m verl.trainer.main_ppo data.seed="


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"\nfor s in 1 2; do\n  {START}$s\ndone",
            "line 3 starts verl.trainer.main_ppo several times, for each of s: 1, 2",
        ),
        (f"for s in $(seq 3); do run_$s; {START}$s & done", "for each of s: \\$\\(seq 3\\)"),
        (f"run() {{\n {START}$1\n}}\nrun 1\nrun 2", "lines 4, 5: which of them is meant"),
        (f"if nvidia-smi; then\n {START}1\nelse\n {START}2\nfi", "lines 2, 4: which of them is meant"),
        (
            f"run() {{\n {START}1\n}}",
            "line 2 names verl.trainer.main_ppo.*the function run starts it, and nothing calls run",
        ),
        (f"X=1\nRESULT=$({START}1)", "line 2 names verl.trainer.main_ppo.*give the launch as a command of its own"),
        (f"f() {{ exit 0; }}\nf\n{START}1", "line 3 names .*line 1 ends the text before"),
        (f"A=${{A:-}}\n[ -z $A ] && exit 1\n{START}1", "line 3 names .*line 2 ends the text before.*NAME=…"),
        (f"run() {{\n {START}1\n}}\nexit 0\nrun 1", "line 2 names .*line 4 ends the text before"),
        (f"parallel {START}{{}} ::: 1 2", "for each of inputs of parallel"),
        (f"( cd x && {START}1", "bracket \\( is not closed.*close it"),
    ],
)
def test_a_launch_that_is_not_one_for_certain_is_refused_with_its_line(text: str, said: str) -> None:
    """Arguments of functions were lost, values of loops left as they stood, and the error of a bracket was about a word ')'."""
    with pytest.raises(UserError, match=f"(?s){said}"):
        read_command([text])


@pytest.mark.parametrize(
    "text",
    [
        f"while true; do {START}1 && break; done",
        f"for i in 1 2 3; do {START}1 && break; sleep 5; done",
        f"until {START}1; do sleep 1; done",
        f"srun --nodes=2 bash -c 'cd /verl; {START}1'",
        f"nohup ray job submit --working-dir . -- {START}1 > log 2>&1 &",
        f"ssh host 'bash -s' <<EOF\n{START}1\nEOF",
        f"sbatch <<'EOF'\n#!/bin/bash\n#SBATCH -N 2\n{START}1\nEOF",
        f"sbatch --wrap='{START}1'",
        f"f() {{ f; f; f; }}\nf | cat\nD=a/parallel {START}1",
        f"tmux new-session -d -s run '{START}1 | tee log'",
        f"if nvidia-smi; then S=1; {START}$S; fi",
        f"[ -f /etc/x ] && {{ S=1; {START}$S; }}",
        f'N=3\nwhile [[ $# -gt 0 ]]; do N=$2; shift 2; done\n(( N > 2 )) && {START}1 "$@"',
        f"f() {{ [ 1 = 2 ]; }}\nS=1\nf && S=2\nf || {START}1",
        f'main() {{ if [ $# -lt 1 ]; then exit 1; fi; {START}1 "$@"; }}\nmain "$@"',
        f"if python3 -c 'import ray'; then {START}1; else {START}1; fi",
    ],
)
def test_a_launch_within_others_is_read(text: str) -> None:
    command = read_command([text])
    assert (command.overrides, command.other, command.lost) == (["data.seed=1"], [], [])


def test_another_shell_sees_what_is_exported_alone() -> None:
    """A variable of this shell had its value in the text of another, which finds none there."""
    text = f"A=1\nexport B=2\nbash -c '{START}$A data.n=$B'\nB=3"
    command = read_command([text])
    assert command.overrides == ["data.seed=$A", "data.n=2"]
    assert command.environment["B"] == "2"
