"""What settings of an environment mean together with others, checked before any work.

Owns: rules about environments, each with a code (I). Refuses to know: what an environment does, what is in its file.
"""

from pathlib import Path

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.settings import EvalSettings, SourceSettings, TrainSettings
from meshloom.config.user_file import Lack, lacking
from meshloom.plan.findings import Findings

KINDS = ("tools", "gym", "custom", "reasoning_gym")
_CODES = {Lack.FORM: "I003", Lack.FILE: "I004", Lack.SYNTAX: "I016", Lack.NAME: "I017"}
_TOOLS_ONLY = ("tool_format", "tool_pattern", "max_tool_calls", "max_answer_characters")


def check_environment(found: Findings, settings: TrainSettings | EvalSettings) -> None:
    """All rules about a run's environment, and about rows that only an environment can use."""
    environment = settings.environment
    kinds = [] if environment is None else [kind for kind in KINDS if vars(environment)[kind]]
    _check_sources(found, settings, kinds)
    if environment is None:
        return
    if len(kinds) != 1:
        have = f"both {' and '.join(kinds)} are given" if kinds else "none is given"
        what = f"environment needs exactly one of {', '.join(KINDS)}; {have}"
        found.refuse(
            "I001", "environment", what, fix="set one of them, such as environment.tools=[tools.py:calculator]"
        )
        return
    check_environment_files(found, environment)
    _check_tools(found, environment)
    _check_bounds(found, settings, environment)
    _check_unused(found, environment, kinds[0])


def _check_sources(found: Findings, settings: TrainSettings | EvalSettings, kinds: list[str]) -> None:
    sources: dict[str, SourceSettings | None] = {
        "data.train": settings.data.train,
        "data.validation": settings.data.validation,
    }
    for path, source in sources.items():
        if source is not None and source.episodes is not None and not {"gym", "custom"} & set(kinds):
            what = f"{path}.episodes are rows without a prompt, and no environment makes one"
            fix = f"set environment.gym or environment.custom, or give {path}.files"
            found.refuse("I002", f"{path}.episodes", what, fix=fix)


def check_environment_files(found: Findings, environment: EnvironmentSettings) -> None:
    """Whether the files that are named have the functions and classes, without running them."""
    places = {"environment.gym": (environment.gym,), "environment.custom": (environment.custom,)}
    for path, names in {"environment.tools": environment.tools, **places}.items():
        for name in names:
            if name is None:
                continue
            file, colon, function = name.rpartition(":")
            if not colon or not file.endswith(".py") or not function:
                found.refuse("I003", path, f"{name!r} names no function of a file", fix="write it as file.py:name")
            elif (fault := lacking(Path(file), function)) is not None:
                found.refuse(_CODES[fault.lack], path, fault.what, why=fault.why, fix=fault.fix)


def _check_tools(found: Findings, environment: EnvironmentSettings) -> None:
    names = [tool.rpartition(":")[2] for tool in environment.tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        what = f"two tools are called {twice[0]}"
        found.refuse("I005", "environment.tools", what, why="the model calls them by name", fix="rename one")
    if environment.tool_format == "regex" and environment.tool_pattern is None:
        what = "environment.tool_format regex needs environment.tool_pattern"
        fix = r"such as environment.tool_pattern='(?P<name>\w+)\((?P<arguments>.*?)\)'"
        found.refuse("I006", "environment.tool_pattern", what, fix=fix)
    if environment.tool_format != "regex" and environment.tool_pattern is not None:
        what = "environment.tool_pattern is used with environment.tool_format=regex only"
        found.warn("I007", "environment.tool_pattern", what)


def _check_bounds(found: Findings, settings: TrainSettings | EvalSettings, environment: EnvironmentSettings) -> None:
    rollout, turns = settings.rollout, environment.max_turns
    if settings.data.chat_template == "never":
        what = "an environment speaks through the chat template, and data.chat_template is never"
        fix = "set data.chat_template=auto"
        found.refuse("I008", "data.chat_template", what, fix=fix, suggestions=(("data.chat_template=auto",),))
    if rollout.ignore_eos:
        what = "with rollout.ignore_eos no turn of the model ever ends, so an environment is never asked again"
        fix = "set rollout.ignore_eos=false"
        found.refuse("I009", "rollout.ignore_eos", what, fix=fix, suggestions=(("rollout.ignore_eos=false",),))
    # A turn has a token at least, and what stands between two turns ends the one and begins the other.
    fewest = 1 if environment.reasoning_gym else 3 * turns - 2
    lengths = {
        "rollout.max_response_tokens": rollout.max_response_tokens,
        "validation.max_response_tokens": settings.validation.max_response_tokens,
    }
    for path, longest in lengths.items():
        if longest is not None and longest < fewest:
            what = f"{turns} turns do not fit {path}={longest}"
            why = f"all turns and what stands between them take {fewest} tokens at least"
            fixes = (f"environment.max_turns={(longest + 2) // 3}", f"{path}={fewest}")
            suggestions = tuple((each,) for each in fixes)
            found.refuse("I010", path, what, why=why, fix=", or ".join(fixes), suggestions=suggestions)
    bound = environment.max_turn_tokens
    if bound is not None and bound > rollout.max_response_tokens:
        what = f"environment.max_turn_tokens={bound} is never reached: all turns together have {rollout.max_response_tokens}"
        found.warn("I011", "environment.max_turn_tokens", what, fix="environment.max_turn_tokens=null")
    reward = settings.reward
    if environment.gives_rewards and reward.overlong is not None and not (reward.function or reward.components):
        what = "reward.overlong has no reward to be added to: the environment's own are given for its turns"
        found.refuse(
            "I014",
            "reward.overlong",
            what,
            fix="set reward.function too, or reward.overlong=null",
            suggestions=(("reward.overlong=null",),),
        )
    for name in ("step_deadline_s", "episode_deadline_s"):
        deadline_s = vars(environment)[name]
        if deadline_s is not None and deadline_s >= rollout.deadline_s:
            what = f"environment.{name}={deadline_s:g} is no bound: the whole rollout has {rollout.deadline_s:g} s"
            fix = f"environment.{name}={rollout.deadline_s / 2:g}, or a longer rollout.deadline_s"
            suggestion = (f"environment.{name}={rollout.deadline_s / 2:g}",)
            found.refuse("I012", f"environment.{name}", what, fix=fix, suggestions=(suggestion,))


def _check_unused(found: Findings, environment: EnvironmentSettings, kind: str) -> None:
    """Values that are set and have no effect."""
    unused = [] if kind == "tools" else [*_TOOLS_ONLY]
    unused += [] if kind in ("gym", "custom") else ["arguments"]
    unused += ["max_turns", "rewritten_history"] if kind == "reasoning_gym" else []
    for name in unused:
        default = EnvironmentSettings.model_fields[name].get_default(call_default_factory=True)
        if vars(environment)[name] != default and name != "tool_pattern":
            found.warn("I013", f"environment.{name}", f"environment.{name} is not used with environment.{kind}")
