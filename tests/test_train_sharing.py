"""A prompt that several samples begin with is computed once, and nothing else changes."""

import copy

import pytest
import torch

from meshloom.samples import Samples, SampleTooLong
from meshloom.train.attention import use_layouts
from meshloom.train.sharing import Computed, pack_samples
from tests.models import FAMILIES, tiny_model
from tests.test_train_model import gradients, reference_gradients, trained, weighted

GROUPS = [0, 0, 1, 0, 1, 2, 2, 2]
RESPONSES = [4, 12, 12, 4, 1, 6, 0, 2]


def make_groups() -> Samples:
    """Eight samples of three prompts; two have nothing to predict, one has tokens of others inside its response."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 97, (length,), generator=generator) for length in (11, 3, 7)]
    ids, mask = [], []
    for group, response in zip(GROUPS, RESPONSES, strict=True):
        ids.append(torch.cat([prompts[group], torch.randint(3, 97, (response,), generator=generator)]))
        mask.append(torch.arange(len(ids[-1])) >= len(prompts[group]))
    mask[1][14:17] = False
    mask[3][:] = False
    samples = Samples(torch.tensor([len(x) for x in ids]), {"ids": torch.cat(ids), "mask": torch.cat(mask)})
    return samples.with_tokens(weight=torch.randn(samples.num_tokens, generator=generator, dtype=torch.float64))


def with_exact_norms(module: torch.nn.Module) -> torch.nn.Module:
    """The model with norms in its own dtype. Transformers' compute in float32, and so does their gradient: that of a
    token that serves several samples is then rounded once instead of once for each, a difference of 1e-7."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm"):
                exact = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                exact.weight = child.weight
                setattr(parent, name, exact)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_shared_prompts_equals_one_by_one(family: str) -> None:
    module = with_exact_norms(tiny_model(family, torch.float64))
    samples = make_groups()
    expected = reference_gradients(copy.deepcopy(module), samples)
    use_layouts(module)
    tolerance = 1e-5 if family == "gemma3" else 1e-10
    for tokens, count in ((samples.num_tokens, None), (50, None), (50, 3)):
        model = trained(copy.deepcopy(module), tokens, count)
        model.forward_backward(samples, weighted, temperature=1.0)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, expected[name], rtol=tolerance, atol=tolerance)


def test_each_prompt_is_computed_once_and_no_token_after_the_last_prediction() -> None:
    module = tiny_model("llama")
    use_layouts(module)
    computed = []
    module.model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    samples = make_groups()
    model = trained(module, samples.num_tokens)
    model.forward_backward(samples, weighted, temperature=1.0)
    # Each prompt once; of each response all but its last token; of a sample without predictions one token.
    responses = sum(max(0, n - 1) for i, n in enumerate(RESPONSES) if i != 3)
    assert computed == [11 + 3 + 7 + responses + 2]


def test_a_sample_without_predictions_is_no_owner_of_a_prompt() -> None:
    """A whole invalid sample can equal another's prompt, and is not computed itself."""
    ids = torch.tensor([5, 6, 7, 5, 6, 7, 8, 9])
    mask = torch.tensor([False] * 6 + [True] * 2)
    samples = Samples(torch.tensor([3, 5]), {"ids": ids, "mask": mask})
    module = tiny_model("qwen3", torch.float64)
    logp = module(input_ids=ids[None, 3:]).logits[0].log_softmax(-1)
    use_layouts(module)
    logprob_T, _ = trained(module, 8).forward(samples, temperature=1.0)
    torch.testing.assert_close(logprob_T[6:], torch.stack([logp[2, 8], logp[3, 9]]))


def test_samples_of_a_prompt_stay_together_under_the_bound() -> None:
    samples = make_groups()
    lengths = samples.lengths.tolist()
    for bound in (23, 40, 60, 1000):
        bins = pack_samples(samples, tokens_per_microbatch=bound, samples_per_microbatch=None)
        assert sorted(i for b in bins for i in b) == list(range(len(samples)))
        assert all(sum(lengths[i] for i in b) <= bound for b in bins)
    together = pack_samples(samples, tokens_per_microbatch=60, samples_per_microbatch=None)
    homes = [{b for b, chosen in enumerate(together) if i in chosen} for i in (0, 1)]
    assert homes[0] == homes[1]
    with pytest.raises(SampleTooLong) as caught:
        pack_samples(samples, tokens_per_microbatch=22, samples_per_microbatch=None)
    assert (caught.value.index, caught.value.tokens) == (1, 23)


def test_samples_with_prompts_of_their_own_need_no_copies() -> None:
    samples = Samples(
        torch.tensor([4, 4]),
        {"ids": torch.tensor([3, 4, 5, 6, 7, 4, 5, 6]), "mask": torch.tensor([False, False, True, True] * 2)},
    )
    computed = Computed.of(samples)
    assert computed.seen is None and computed.lengths == [3, 3]
    assert computed.tokens_C.tolist() == [0, 1, 2, 4, 5, 6]
    assert computed.predictors.source_A.tolist() == [1, 2, 4, 5]


def test_a_microbatch_without_predictions_has_a_zero_gradient() -> None:
    module = tiny_model("llama")
    use_layouts(module)
    samples = make_groups()
    none = samples.with_tokens(mask=torch.zeros(samples.num_tokens, dtype=torch.bool))
    model = trained(module, samples.num_tokens)
    sums = model.forward_backward(none, weighted, temperature=1.0)
    assert sums["loss"] == 0
    assert all(not grad.any() for grad in gradients(model).values())
