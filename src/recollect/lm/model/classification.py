"""A head that sorts texts: one score per label, read at the last token that is no padding."""

from __future__ import annotations

from transformers.modeling_layers import GenericForSequenceClassification

from recollect.lm.model.pretrained import RecollectPreTrainedModel

__all__ = ["RecollectForSequenceClassification"]


class RecollectForSequenceClassification(
    GenericForSequenceClassification, RecollectPreTrainedModel
):
    """`RecollectModel` with a head of ``config.num_labels`` scores per text.

    A batch of several texts needs ``config.pad_token_id``: the scores are read at the last token
    that is another. From the folder of a language model the head begins anew.

    Raises:
        RecipeError: sizes that do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> config.num_labels = 3
        >>> rc.lm.RecollectForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3])
    """

    _unread = ("lm_head.",)
    _optional_weights = ("score.",)
