"""Which embedded engine a model gets.

Owns: the choice. Always holds: it follows from the device and the model's family alone, so a run repeats itself.
"""

from collections.abc import Callable, Sequence

from torch import nn

from meshloom.rollout.decode_stack import reason_against
from meshloom.rollout.paged_engine import PagedEngine
from meshloom.rollout.peers import Peers
from meshloom.rollout.protocol import ReplicaEngine
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.head import plain_model


def embedded_engine(
    model: nn.Module,
    *,
    eos_ids: tuple[int, ...],
    max_sequences: int,
    kv_cache_bytes: int | None,
    prefill_tokens: int,
    decode: Callable[[Sequence[int]], str] | None,
    peers: Peers | None = None,
) -> ReplicaEngine:
    """The paged engine on a GPU where the model's family has its form, else the one that calls the module's own layers.

    Args: as ``PagedEngine``.
    """
    is_gpu = plain_model(model).get_input_embeddings().weight.is_cuda
    kind = PagedEngine if is_gpu and reason_against(model) is None else TorchEngine
    return kind(
        model,
        eos_ids=eos_ids,
        max_sequences=max_sequences,
        kv_cache_bytes=kv_cache_bytes,
        prefill_tokens=prefill_tokens,
        decode=decode,
        peers=peers,
    )
