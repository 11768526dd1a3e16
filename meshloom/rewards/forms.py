"""How a function of the user's is called.

Owns: the forms that functions have, which one a function has, and its arguments. Refuses to know: files, processes, what a
function returns. Always holds: the form follows from the names of the parameters or from the settings, never from a trial call;
a function that has none, or several, is refused before the first sample.

Two forms take one sample: ours, and verl's ``compute_score``. Two take the lists of a group: the function of verl's ``batch``
manager, and TRL's, which is given the columns of the rows besides and may return None for a sample that it does not judge.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshloom.config.errors import UserError
from meshloom.config.names import RewardForm
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.verifiers import Scorer

if TYPE_CHECKING:
    from meshloom.rewards.function import FunctionSpec

Arguments = Mapping[str, Any]

_TOLD = {
    RewardForm.REQUEST: "def score(request, **kwargs)  (a meshloom.rewards.RewardRequest)",
    RewardForm.VERL: "def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
    RewardForm.VERL_BATCH: "def score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)",
    RewardForm.TRL: "def score(prompts, completions, **columns)",
}
_MARKS = {
    RewardForm.REQUEST: "request",
    RewardForm.VERL: "solution_str",
    RewardForm.VERL_BATCH: "solution_strs",
    RewardForm.TRL: "completions",
}
"""Parameter by which a form is told; ``request`` stands first."""
GROUPS = frozenset({RewardForm.VERL_BATCH, RewardForm.TRL})
"""Forms that take the lists of a group."""
_OF_TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments of TRL's that are its trainer's own."""
_NO_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids"})
"""Columns that TRL keeps back, and names that stand for something else."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A function that is ready to be called.

    Args:
        name: of it.
        call: what it returns for samples, which may have to be awaited; of one sample unless ``takes_groups``.
        takes_groups: it is called with all samples of a group, and returns a value for each.
        may_skip: None is no failure, but says that a sample is not its to judge.
        columns: of the rows, that it cannot be called without.
    """

    name: str
    call: Callable[[Sequence[RewardRequest]], Any]
    takes_groups: bool = False
    may_skip: bool = False
    columns: tuple[str, ...] = ()


def of_samples(name: str, scorer: Scorer) -> Loaded:
    """A function of one request."""
    return Loaded(name=name, call=lambda requests: scorer(requests[0]))


def with_form(function: Callable[..., Any], spec: "FunctionSpec") -> Loaded:
    """A user's function, by the form that the settings or its parameters say.

    Raises:
        UserError: if it has none of the forms, several, or cannot be called in the one that is given.
    """
    signature = _signature(function, spec)
    form = spec.form or _recognised(signature, spec)
    if form is RewardForm.REQUEST:
        _check_bound(signature, spec, (None,), ())
        return of_samples(spec.name, lambda request: function(request, **spec.kwargs))
    if not _takes(signature, _MARKS[form]):
        raise _wrong_signature(spec, f"reward.form is {form}, but it is {spec.name}{signature}")
    if form is RewardForm.TRL:
        return _trl(function, signature, spec)
    named = [name for name in _ARGUMENTS[form]([_EXAMPLE]) if _takes(signature, name)]
    _check_bound(signature, spec, (), named)

    def call(requests: Sequence[RewardRequest]) -> Any:
        arguments = _ARGUMENTS[form](requests)
        return function(**{name: arguments[name] for name in named}, **spec.kwargs)

    return Loaded(name=spec.name, call=call, takes_groups=form in GROUPS)


def _signature(function: Callable[..., Any], spec: "FunctionSpec") -> inspect.Signature:
    """What a function takes; of one that wraps another and takes anything, what the other takes.

    Raises:
        UserError: if it does not say.
    """
    try:
        own = inspect.signature(function, follow_wrapped=False)
        return own if set(own.parameters) & set(_MARKS.values()) else inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise _wrong_signature(spec, str(error)) from error


def _recognised(signature: inspect.Signature, spec: "FunctionSpec") -> RewardForm:
    """The form whose mark the parameters have.

    Raises:
        UserError: if it is not one alone.
    """
    names = list(signature.parameters)
    found = [form for form, mark in _MARKS.items() if mark in (names[:1] if form is RewardForm.REQUEST else names)]
    if not found:
        raise _wrong_signature(spec, f"it is {spec.name}{signature}")
    if len(found) > 1:
        marks = ", ".join(f"{_MARKS[form]} is of the form {form}" for form in found)
        raise UserError(
            f"the reward function {spec.name!r} could be called in {len(found)} ways",
            where=f"reward.function: {spec}",
            why=f"it is {spec.name}{signature}: {marks}",
            fix=f"say which it is: {' or '.join(f'reward.form={form}' for form in found)}",
        )
    return found[0]


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a function can be given an argument by name."""
    found = signature.parameters.get(name)
    if found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY:
        return True
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())


def _check_bound(
    signature: inspect.Signature, spec: "FunctionSpec", positional: tuple[Any, ...], named: Sequence[str]
) -> None:
    """Refuse a function that cannot be called so.

    Raises:
        UserError: with what is missing or too much.
    """
    first = [next(iter(signature.parameters), "")] if positional else []
    if repeated := sorted({*first, *named} & set(spec.kwargs)):
        raise UserError(f"reward.kwargs sets {repeated[0]!r}, which comes from the sample", where="reward.kwargs")
    try:
        signature.bind(*positional, **dict.fromkeys(named), **spec.kwargs)
    except TypeError as error:
        raise _wrong_signature(spec, f"it is {spec.name}{signature}: {error}") from error


_EXAMPLE = RewardRequest(response="", answer=None, data_source="", extra={}, prompt="", finish="")


def _of_verl(requests: Sequence[RewardRequest]) -> Arguments:
    (request,) = requests
    return {
        "data_source": request.data_source,
        "solution_str": request.response,
        "ground_truth": request.answer,
        "extra_info": request.extra,
    }


def _of_verls_batch(requests: Sequence[RewardRequest]) -> Arguments:
    return {
        "data_sources": [request.data_source for request in requests],
        "solution_strs": [request.response for request in requests],
        "ground_truths": [request.answer for request in requests],
        "extra_infos": [dict(request.extra) for request in requests],
    }


def _of_trl(requests: Sequence[RewardRequest]) -> Arguments:
    return {
        "prompts": [_prompt(request) for request in requests],
        "completions": [_completion(request) for request in requests],
        "completion_ids": [list(request.response_ids) for request in requests],
    }


_ARGUMENTS: Mapping[RewardForm, Callable[[Sequence[RewardRequest]], Arguments]] = {
    RewardForm.VERL: _of_verl,
    RewardForm.VERL_BATCH: _of_verls_batch,
    RewardForm.TRL: _of_trl,
}


def _prompt(request: RewardRequest) -> Any:
    """The row's prompt as TRL has it: messages, or a text."""
    if request.prompt_messages is None:
        return request.chat[-1]["content"] if request.chat else request.prompt
    return [dict(message) for message in request.chat[: request.prompt_messages]]


def _completion(request: RewardRequest) -> Any:
    """What came after it: messages where the prompt is some, else a text."""
    if request.prompt_messages is None:
        return request.response
    between = [dict(message) for message in request.chat[request.prompt_messages :]]
    return [*between, {"role": "assistant", "content": request.response}]


def _trl(function: Callable[..., Any], signature: inspect.Signature, spec: "FunctionSpec") -> Loaded:
    given = [name for name in _of_trl([_EXAMPLE]) if _takes(signature, name)]
    needed = [
        name
        for name, each in signature.parameters.items()
        if each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and each.default is inspect.Parameter.empty
        and name not in given
        and name not in spec.kwargs
    ]
    if of_trainer := [name for name in needed if name in _OF_TRAINERS]:
        why = f"it cannot do without {of_trainer[0]}, which is of TRL's own trainer; give it a default"
        raise _wrong_signature(spec, f"it is {spec.name}{signature}: {why}")
    _check_bound(signature, spec, (), [*given, *needed])

    def call(requests: Sequence[RewardRequest]) -> Any:
        arguments = _of_trl(requests)
        there = _columns(requests)
        if missing := [name for name in needed if name not in there]:
            raise LookupError(f"the row has no column {missing[0]!r}; it has: {', '.join(there) or 'none'}")
        wanted = {name: values for name, values in there.items() if _takes(signature, name)}
        return function(**{name: arguments[name] for name in given}, **{**wanted, **spec.kwargs})

    return Loaded(name=spec.name, call=call, takes_groups=True, may_skip=True, columns=tuple(needed))


def _columns(requests: Sequence[RewardRequest]) -> dict[str, list[Any]]:
    """Columns of the rows, None where a row has none."""
    names = dict.fromkeys(name for request in requests for name in request.columns if name not in _NO_COLUMNS)
    return {name: [request.columns.get(name) for request in requests] for name in names}


def _wrong_signature(spec: "FunctionSpec", why: str) -> UserError:
    *others, last = _TOLD.values()
    return UserError(
        f"the reward function {spec.name!r} cannot be called",
        where=f"reward.function: {spec}, with reward.kwargs: {sorted(spec.kwargs) or 'none'}",
        why=why,
        fix=f"write it as {', '.join(others)}, or {last}; kwargs are those of reward.kwargs. Where only the name of request is "
        f"another, set reward.form=request; where it takes **kwargs alone, one of {', '.join(RewardForm)}",
    )
