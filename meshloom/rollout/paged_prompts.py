"""What is done before decode steps: pages copied, prompts computed into pages.

Owns: that pass of the model. Refuses to know: who runs, what is kept. Always holds: only what is not there yet is computed; a
layer stores the keys and values of all prompts before any of them attends, so one may read what another writes in the same
pass.

Legend: C computed tokens, H query heads, K key-value heads, D width of a head, P tokens of a page.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from meshloom.rollout.continued import ContinuedAttention
from meshloom.rollout.paged_ops import Pool
from meshloom.rollout.paged_scheduler import Pass, Prompt
from meshloom.rollout.step_runner import StepRunner
from meshloom.train.attention import PackedAttention


def prepare(runner: StepRunner, todo: Pass) -> None:
    """Copy pages and compute prompts."""
    _copy(runner, todo.before)
    if todo.prompts:
        _compute(runner, todo.prompts)
    _copy(runner, todo.after)


def _copy(runner: StepRunner, pairs: Sequence[tuple[int, int]]) -> None:
    if not pairs:
        return
    source, target = torch.tensor(list(zip(*pairs, strict=True)), device=runner.slots.state.device)
    for layer in runner.pool.layers:
        layer[target] = layer[source]


def _compute(runner: StepRunner, prompts: Sequence[Prompt]) -> None:
    """Compute prompts end to end, of each what is not there yet; its keys and values go to its pages."""
    device, page = runner.slots.state.device, runner.stack.shape.page
    positions = [np.arange(len(prompt.ids)) for prompt in prompts]
    cells = [
        np.array(prompt.pages)[place // page] * page + place % page
        for prompt, place in zip(prompts, positions, strict=True)
    ]
    columns = [[np.array(prompt.ids, dtype=np.int64) for prompt in prompts], positions, cells]
    new = [
        np.concatenate([whole[prompt.start :] for prompt, whole in zip(prompts, column, strict=True)])
        for column in columns
    ]
    together_3C = torch.from_numpy(np.stack(new)).to(device)
    if any(prompt.start for prompt in prompts):
        attend = _continued(runner, prompts, torch.from_numpy(np.concatenate(cells)).to(device))
    else:
        attend = _fresh(runner, prompts)
    runner.stack.hidden(*together_3C, runner.pool, attend, keep_key=True)


def _fresh(runner: StepRunner, prompts: Sequence[Prompt]) -> Callable[[int, Tensor], Tensor]:
    """Attention over what is computed alone."""
    stack, shape = runner.stack, runner.stack.shape
    packed = PackedAttention([len(prompt.ids) for prompt in prompts])

    def attend(layer: int, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
        parts = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads])
        return packed.attend(layer, *parts, scale=stack.scale, window=stack.window_of[layer]).flatten(1)

    return attend


def _continued(runner: StepRunner, prompts: Sequence[Prompt], cells_A: Tensor) -> Callable[[int, Tensor], Tensor]:
    """Attention over pages too. ``cells_A``: page × P + place in the page of each token that attention sees."""
    stack, shape, pool = runner.stack, runner.stack.shape, runner.pool
    continued = ContinuedAttention([len(prompt.ids) for prompt in prompts], [prompt.start for prompt in prompts])
    page_A, place_A = cells_A // shape.page, cells_A % shape.page

    def attend(layer: int, qkv: Tensor) -> Tensor:
        query_CHD = qkv.unflatten(-1, (-1, shape.head_dim))[:, : shape.num_heads]
        key_AKD, value_AKD = (_rows(pool, layer, kind, page_A, place_A) for kind in (0, 1))
        window = stack.window_of[layer]
        return continued.attend(query_CHD, key_AKD, value_AKD, scale=stack.scale, window=window).flatten(1)

    return attend


def _rows(pool: Pool, layer: int, kind: int, page_A: Tensor, place_A: Tensor) -> Tensor:
    """Keys (0) or values (1) of tokens, [A, K, D]."""
    return pool.layers[layer][page_A, kind, :, place_A]
