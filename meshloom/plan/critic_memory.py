"""The critic in the memory ledger of one device.

Owns: its parameters and its lines. Refuses to know: how bytes follow (``plan.sharded_memory``). Always holds: it has no logits
of a vocabulary; of what lives only while a role computes, the larger of actor and critic counts, as they take turns.
"""

from dataclasses import replace

from meshloom.config.settings import TrainSettings
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.ledger import most_computed_tokens, most_microbatch_tokens
from meshloom.plan.memory_lines import MemoryLines, checkpoint_bytes_each
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.parameters import count_parameters
from meshloom.plan.residency import ModelRole, Phase
from meshloom.plan.scalar_head import SCORE
from meshloom.plan.sharded_memory import FLOAT32, model_holdings


def critic_lines(
    ledger: MemoryLines, settings: TrainSettings, actor: ModelRole, folder: ModelFolder, model: DecoderNumbers
) -> None:
    """The critic, whole on the device beside the actor.

    Args:
        ledger: takes what it holds.
        settings: of the run.
        actor: whose arithmetic and recompute it has.
        folder: of its model.
        model: in numbers, as a language model.
    """
    bound = most_microbatch_tokens(settings, settings.critic.tokens_per_microbatch)
    count = scalar_parameters(folder, model.hidden)
    scalar = replace(model.with_scalar_head(), head=0)
    role = replace(
        actor,
        name="critic",
        model=replace(scalar, embedding=scalar.embedding + count - scalar.total),
        computes=(Phase.VALUES, Phase.UPDATE),
        trained=None,
        tokens=most_computed_tokens(settings, bound),
    )
    ledger.take(model_holdings(role))
    path = "model.path" if settings.critic.model is None else "critic.model"
    ledger.count("critic's parameters", count, "those of its folder, with a head of one output", path)
    ledger.held("weights", f"critic's parameters × {role.width}", shown="critic's weights")
    masters = "the weights are float32 themselves" if role.width == FLOAT32 else "critic's parameters × 4"
    ledger.held("float32 masters", masters, shown="critic's float32 masters")
    ledger.held("optimizer moments", "critic's parameters × 2 × 4", shown="critic's optimizer moments")
    ledger.held("gradients", "critic's parameters × 4, float32", shown="critic's gradients")
    ledger.held("activations", f"estimate: as the actor's, of {role.tokens} tokens", shown="critic's activations")
    each = checkpoint_bytes_each(role.width)
    ledger.bytes("critic's checkpoint", count * each, f"critic's parameters × {each}, on the disk")


def scalar_parameters(folder: ModelFolder, hidden: int) -> int:
    """Parameters of a folder's model with a head of one output, its bias among them.

    Args:
        folder: a language model's, or one that has such a head.
        hidden: width of what the head reads.
    """
    if folder.counted is not None:
        return count_parameters(folder.config).with_scalar_head().total
    tied_head = folder.tied and not any(name.startswith(f"{SCORE}.") for name in folder.tensors)
    heads = ("lm_head.", f"{SCORE}.")
    head = 0 if tied_head else sum(t.num_values for name, t in folder.tensors.items() if name.startswith(heads))
    return folder.num_parameters - head + hidden + 1
