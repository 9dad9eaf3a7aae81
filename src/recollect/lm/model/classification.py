"""A head that classifies texts: one score per label, at the last token that is not padding."""

from __future__ import annotations

from transformers.modeling_layers import GenericForSequenceClassification

from recollect.lm.model.pretrained import RecollectPreTrainedModel

__all__ = ["RecollectForSequenceClassification"]


class RecollectForSequenceClassification(
    GenericForSequenceClassification, RecollectPreTrainedModel
):
    """`RecollectModel` with a head of ``config.num_labels`` scores per text.

    A batch of several texts needs ``config.pad_token_id``: the scores are those of the last other
    token. The head is initialized if a folder of a language model is loaded.

    Raises:
        RecipeError: sizes do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> config.num_labels = 3
        >>> rc.lm.RecollectForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3])
    """

    _ignore_unexpected = ("lm_head.",)
    _ignore_missing = ("score.",)
