"""Folders of models with a head of one output: critics, and reward models.

Owns: telling such a folder from one of a language model. Refuses to know: what the head is used for. No torch here.
"""

from meshloom.config.errors import UserError
from meshloom.plan.model_folder import ModelFolder

SCORE = "score"
"""Name of the head in files."""
_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")


def has_scalar_head(folder: ModelFolder) -> bool:
    """Whether a folder has a head of one output; one that has neither it nor an output head is refused.

    Raises:
        UserError: if it has a head of several outputs, or is said to classify and has no head that is known.
    """
    head = folder.tensors.get(f"{SCORE}.weight")
    if head is not None:
        if head.shape[0] == 1:
            return True
        what = f"the head of the model in {folder.path} has {head.shape[0]} outputs, a critic has one"
        raise UserError(what, where="critic.model", fix="a causal language model, or one with a single output")
    names = [str(name) for name in folder.config.get("architectures") or ()]
    if folder.has_weights and any(name.endswith(_CLASSIFIERS) for name in names):
        what = f"{folder.path} is a {names[0]} without {SCORE}.weight"
        raise UserError(what, where="critic.model", fix="a causal language model, or one with a head of that name")
    return False
