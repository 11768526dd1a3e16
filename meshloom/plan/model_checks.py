"""What of a model's folder does not go with the settings of a run.

Owns: weights that are not there, attention of another kind or that the engine has no cache for, adapters that attach to
nothing, sequences that the model was not made for. Refuses to know: memory, devices.

Codes: L002 adapters of no layer; M003 rotary embeddings that change; M004 sequences too long; M009 no weights; M011 attention
that no kernel computes; M012 latent attention with the embedded engine.
"""

from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.findings import Findings
from meshloom.plan.layer_kinds import latent_refusal, layers_of_other_kinds
from meshloom.plan.ledger import longest_sequence_tokens
from meshloom.plan.model_folder import ModelFolder


def check_model(found: Findings, settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder) -> None:
    """Look at a model's folder.

    Args:
        found: takes what is wrong.
        settings: of the run.
        folder: of the model.
    """
    _note_weights(found, folder)
    _check_attention(found, folder)
    _check_cache(found, settings, folder)
    _check_adapters(found, settings, folder)
    _check_positions(found, settings, folder)


def _note_weights(found: Findings, folder: ModelFolder) -> None:
    """Say that a plan is made from config.json alone; a run refuses such a folder."""
    if not folder.has_weights:
        what = f"{folder.path} has no weights: the plan goes by its config.json alone"
        why = "parameters are counted exactly; training needs model.safetensors"
        found.warn("M009", "model.path", what, why=why, fix="put the weights there before the run")


def _check_attention(found: Findings, folder: ModelFolder) -> None:
    """Layers that are no attention, or whose scores are capped or have a sink, would be computed as plain ones."""
    if others := layers_of_other_kinds(folder.text_config):
        what = f"the model has layers of the kind {', '.join(others)}"
    elif folder.text_config.get("attn_logit_softcapping") is not None:
        what = "the model caps attention scores (attn_logit_softcapping)"
    elif folder.text_config.get("model_type") == "gpt_oss":
        what = "the model's attention has sinks (gpt_oss)"
    else:
        return
    fix = "take a model of another family, such as Llama, Qwen2, Qwen3 or Gemma 3"
    found.refuse("M011", "model.path", what, why="no attention kernel here computes that", fix=fix)


def _check_cache(found: Findings, settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder) -> None:
    """Latent attention, in the words of the engine that refuses it."""
    if isinstance(settings, SftSettings) or settings.rollout.engine != "torch":
        return
    if folder.text_config.get("kv_lora_rank") is not None:
        error, change = latent_refusal(), ("rollout.engine=vllm",)
        found.refuse("M012", error.where, error.what, why=error.why, fix=error.fix, suggestions=(change,))


def _check_adapters(found: Findings, settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder) -> None:
    """Adapters that attach to no layer would train nothing."""
    if settings.model.lora is None:
        return
    layers = folder.linear_layers(("all-linear",))
    for target in settings.model.lora.target_modules:
        if not folder.linear_layers((target,)):
            names = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
            what = f"no layer of the model is called {target!r}"
            fix = f"its layers are {', '.join(names)}, or all-linear" if names else "set model.lora=null"
            found.refuse("L002", "model.lora.target_modules", what, fix=fix)


def _check_positions(
    found: Findings, settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder
) -> None:
    """Sequences longer than the model was made for; and rotary embeddings that change with the longest one of a pass, so
    that a token's log-prob would depend on what else is computed with it."""
    longest = longest_sequence_tokens(settings)
    for kind, limit in folder.changing_rotary().items():
        if longest > limit:
            what = (
                f"the model's {kind} rotary embeddings change for all tokens of a pass once one stands beyond {limit}"
            )
            why = f"a sequence may have {longest} tokens: its log-probs would depend on what is packed with it"
            fix = f"prompts and responses of at most {limit} tokens together, or a model without them"
            found.refuse("M003", "model.path", what, why=why, fix=fix)
    made_for = folder.text_config.get("max_position_embeddings")
    if isinstance(made_for, int) and longest > made_for:
        what = f"a sequence may have {longest} tokens, the model was made for {made_for} (max_position_embeddings)"
        found.warn("M004", "model.path", what, fix="smaller data.max_prompt_tokens or max_response_tokens")
