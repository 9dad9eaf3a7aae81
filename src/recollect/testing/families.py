"""The contract of a family of published layers: adopted models against originals, in each mode.

Errors are the largest difference of logits over the largest logit.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recollect.testing.compare import describe_check, describe_failure, require

if TYPE_CHECKING:
    from recollect.lm import AdoptionReport, Family

__all__ = ["FamilyReport", "check_family"]

MAX_ERROR = 1e-5
MAX_GRADIENT_ERROR = 1e-4
MAX_ROLLBACK_ERROR = 1e-10
"""In float64."""
LENGTH, PROMPT = 40, 24


@dataclass(frozen=True, kw_only=True)
class FamilyReport:
    """Results of `check_family`.

    Attributes:
        adoption: the report of `recollect.lm.adopt`.
        errors: for each check, the error of the adopted model and of the original. The original's
            is ``None`` if the check compares the two, or the text of an exception.

    Examples:
        >>> report = rc.testing.FamilyReport(adoption=None, errors={"a check": (1e-7, None)})
        >>> report.errors["a check"]
        (1e-07, None)
    """

    adoption: AdoptionReport
    errors: Mapping[str, tuple[float, float | str | None]]


@dataclass(frozen=True, kw_only=True)
class _Models:
    original: nn.Module
    adopted: nn.Module
    ids: Tensor  # [2, LENGTH]

    def both(self, error: Callable[[nn.Module], float]) -> tuple[float, float | str]:
        """Return the error of both models; the original may raise."""
        adopted = error(self.adopted)
        try:
            return adopted, error(self.original)
        except Exception as problem:
            return adopted, f"{type(problem).__name__}: {problem}"


def check_family(
    family: Family,
    make_model: Callable[[], nn.Module],
    *,
    knows_documents: bool = True,
    exchanges_caches: bool = True,
) -> FamilyReport:
    """Compare a model of transformers with itself after `recollect.lm.adopt`, in every mode.

    Args:
        family: the family of its recurrent layers, registered.
        make_model: makes the model, a causal language model with more than 32 tokens, in float32,
            on any device.
        knows_documents: whether the rest of the model keeps packed documents apart; its attention
            may ignore their boundaries.
        exchanges_caches: whether the original stores its state in the cache, which either model
            can then continue.

    Raises:
        AssertionError: a check fails; one sentence that names the family.

    Examples:
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
        >>> family = next(f for f in rc.lm.families() if f.name == "mamba")
        >>> report = rc.testing.check_family(family, lambda: MambaForCausalLM(config))
        >>> report.errors["An adopted model computes what the original computes"][0] < 1e-5
        True
    """
    from recollect.lm import adopt

    torch.manual_seed(0)
    original = make_model().eval()
    adopted = copy.deepcopy(original)
    adoption = adopt(adopted)
    names = {layer.family for layer in adoption.adopted}
    require(family.name in names, f"family {family.name}: no layer of the model was adopted")
    config: Any = original.config
    low = config.get_text_config().vocab_size // 8  # above the tokens for padding and ends
    device = next(original.parameters()).device
    ids = torch.randint(low, 8 * low, (2, LENGTH)).to(device)
    models = _Models(original=original, adopted=adopted, ids=ids)
    errors: dict[str, tuple[float, float | str | None]] = {}
    skipped = set() if knows_documents else {packed_documents}
    skipped |= set() if exchanges_caches else {exchanged_caches}
    if "cache_params" in inspect.signature(original.forward).parameters:
        skipped |= {prompt_lookup, assisted_generation}  # transformers < 5.24 has none for Mamba
    for check, bound in _CHECKS.items():
        if check in skipped:
            continue
        name = describe_check(check)
        subject = f"family {family.name}: {name}"
        grad = torch.set_grad_enabled(check is same_gradients)
        with describe_failure(subject), device, grad:
            error = check(models)
        errors[name] = pair = error if isinstance(error, tuple) else (error, None)
        require(pair[0] <= bound, f"{subject}: error {pair[0]:.1e}, at most {bound:.0e}")
    _check_undo(original, adopted, adoption)
    return FamilyReport(adoption=adoption, errors=errors)


def _error(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).abs().max() / expected.abs().max())


def _logits(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    y: Tensor = model(ids, **{"use_cache": False, **options}).logits
    return y


def _positions(model: nn.Module, mask: Tensor, T: int) -> dict[str, Tensor]:
    """Return positions of the last T columns, if the model takes them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, -T:]}


def _continue(
    model: nn.Module, ids: Tensor, cache: Any = None, *, mask: Tensor | None = None, start: int = 0
) -> tuple[Any, Any]:
    """Return logits and the cache after more tokens ``[B, T]``.

    ``mask`` is the attention mask of all columns, if there is padding. Without it, ``start`` is the
    number of columns before.
    """
    from recollect.lm.model.cache import CACHE_KEY, cache_of

    T = ids.shape[1]
    options = {} if mask is None else {"attention_mask": mask}
    options |= _positions(model, ids.new_ones(len(ids), start + T) if mask is None else mask, T)
    out = model(ids, use_cache=True, **{_cache_name(model, CACHE_KEY): cache}, **options)
    return out.logits, cache_of(out)


def _cache_name(model: nn.Module, name: str) -> str:
    parameters = inspect.signature(model.forward).parameters
    return next(x for x in (name, "cache_params", "past_key_values") if x in parameters)


def _decode(models: Sequence[nn.Module], ids: Tensor) -> Tensor:
    """Return logits of a prompt by the first model, then token by token by the second."""
    y, cache = _continue(models[0], ids[:, :PROMPT])
    outputs = [y]
    for t in range(PROMPT, ids.shape[1]):
        y, cache = _continue(models[1], ids[:, t : t + 1], cache, start=t)
        outputs.append(y)
    return torch.cat(outputs, 1)


def _generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    out: Tensor = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
    return out


# -- checks ----------------------------------------------------------------------------------------


def same_outputs(models: _Models) -> float:
    """An adopted model computes what the original computes."""
    return _error(_logits(models.adopted, models.ids), _logits(models.original, models.ids))


def same_training_outputs(models: _Models) -> float:
    """An adopted model computes what the original computes in train mode."""
    pair = (models.adopted, models.original)
    outputs = []
    for model in pair:
        torch.manual_seed(0)
        outputs.append(_logits(model.train(), models.ids))
        model.eval()
    return _error(*outputs)


def same_gradients(models: _Models) -> float:
    """Gradients are those of the original."""
    gradients = []
    for model in (models.adopted, models.original):
        torch.manual_seed(0)
        model.train()(models.ids, labels=models.ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        model.eval()
    ours, theirs = gradients
    if set(ours) != set(theirs):
        return float("inf")
    largest = max(g.norm() for g in theirs.values())
    errors = [
        (ours[n] - g).norm() / torch.maximum(g.norm(), 1e-4 * largest) for n, g in theirs.items()
    ]
    return float(max(errors))


def decoded_tokens(models: _Models) -> tuple[float, float | str]:
    """A prompt and tokens one by one equal the whole sequence."""

    def error(model: nn.Module) -> float:
        return _error(_decode((model, model), models.ids), _logits(model, models.ids))

    return models.both(error)


def exchanged_caches(models: _Models) -> float:
    """The original and the adopted model continue each other's cache."""
    pair = (models.original, models.adopted)
    expected = _logits(models.original, models.ids)
    return max(_error(_decode(order, models.ids), expected) for order in (pair, pair[::-1]))


def left_padding(models: _Models) -> tuple[float, float | str]:
    """A batch padded on the left equals each sequence alone."""
    ids, pad = models.ids[:, :30].clone(), 7
    mask = torch.ones_like(ids)
    mask[1, :pad], ids[1, :pad] = 0, 0

    def error(model: nn.Module) -> float:
        positions = _positions(model, mask, ids.shape[1])
        y = _logits(model, ids, attention_mask=mask, **positions)
        expected = _logits(model, ids[1:, pad:])
        return max(_error(y[1, pad:], expected[0]), _error(y[0], _logits(model, ids[:1])[0]))

    return models.both(error)


def right_padding(models: _Models) -> tuple[float, float | str]:
    """A prompt padded on the right and then continued equals each sequence alone."""
    ids, lengths, more = models.ids, (20, 13), 6
    prompt, mask = ids[:, :20].clone(), torch.ones(2, 20, dtype=torch.long)
    prompt[1, 13:], mask[1, 13:] = 0, 0
    tail = torch.stack([ids[b, n : n + more] for b, n in enumerate(lengths)])

    def error(model: nn.Module) -> float:
        real = mask
        _, cache = _continue(model, prompt, mask=real)
        outputs = []
        for piece in (tail[:, :3], *tail[:, 3:].split(1, 1)):
            real = nn.functional.pad(real, (0, piece.shape[1]), value=1)
            y, cache = _continue(model, piece, cache, mask=real)
            outputs.append(y)
        y = torch.cat(outputs, 1)
        expected = [
            _logits(model, ids[b : b + 1, : n + more])[0, n:] for b, n in enumerate(lengths)
        ]
        return max(_error(y[b], expected[b]) for b in range(2))

    return models.both(error)


def padded_pieces(models: _Models) -> tuple[float, float | str]:
    """Padded pieces through one cache equal each sequence alone."""
    ids, first = models.ids[:, :32], 20
    mask = torch.ones_like(ids)
    mask[1, 14:first], mask[0, 29:] = 0, 0

    def error(model: nn.Module) -> float:
        _, cache = _continue(model, ids[:, :first], mask=mask[:, :first])
        y, _ = _continue(model, ids[:, first:], cache, mask=mask)
        rows = [torch.cat([ids[b, :first][mask[b, :first] > 0], ids[b, first:]]) for b in (0, 1)]
        expected = [_logits(model, row[None])[0, -12:] for row in rows]
        return max(_error(y[0, :9], expected[0][:9]), _error(y[1], expected[1]))

    return models.both(error)


def packed_documents(models: _Models) -> tuple[float, float | str]:
    """Documents packed in one sequence equal each document alone."""
    a, b = models.ids[:1, :20], models.ids[1:, :13]
    boundaries = torch.tensor([0, 20, 33], dtype=torch.int32)
    options = {
        "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries,
        "max_length_q": 20, "max_length_k": 20,
        "position_ids": torch.cat([torch.arange(20), torch.arange(13)])[None],
    }  # fmt: skip

    def error(model: nn.Module) -> float:
        y = _logits(model, torch.cat([a, b], 1), **options)[0]
        return max(
            _error(y[:20], _logits(model, a)[0]),
            _error(y[20:], _logits(model, b)[0]),
        )

    return models.both(error)


def greedy_search(models: _Models) -> float:
    """Greedy search generates the tokens of the original."""
    outputs = [_generate(m, models.ids[:, :PROMPT]) for m in (models.adopted, models.original)]
    return 0.0 if torch.equal(*outputs) else float("inf")


def beam_search(models: _Models) -> tuple[float, float | str]:
    """Beam search with a cache generates the tokens of beam search without one."""

    def error(model: nn.Module) -> float:
        ids = models.ids[:, :12]
        outputs = [_generate(model, ids, num_beams=3, use_cache=x) for x in (True, False)]
        return 0.0 if torch.equal(*outputs) else float("inf")

    return models.both(error)


def prompt_lookup(models: _Models) -> tuple[float, float | str]:
    """Prompt lookup generates the tokens of greedy search."""
    return models.both(lambda model: _assisted(model, models.ids, prompt_lookup_num_tokens=4))


def assisted_generation(models: _Models) -> tuple[float, float | str]:
    """Assisted generation generates the tokens of greedy search."""
    assistant = copy.deepcopy(models.adopted)
    for parameter in assistant.parameters():
        if parameter.dim() > 1:  # another model, which is right now and then
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    return models.both(lambda model: _assisted(model, models.ids, assistant_model=assistant))


def _assisted(model: nn.Module, ids: Tensor, **options: Any) -> float:
    prompt = ids[:1, :10].repeat(1, 2)
    outputs = [_generate(model, prompt, **x) for x in (options, {})]
    return 0.0 if torch.equal(*outputs) else float("inf")


def cropped_cache(models: _Models) -> float:
    """A cropped cache equals one that never contained the removed tokens, in float64."""
    model: Any = copy.deepcopy(models.adopted).double()
    ids = models.ids
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    _, shorter = _continue(model, ids[:, : PROMPT - 5])
    _, longer = _continue(model, ids[:, : PROMPT - 12])
    longer.activate_past_recording()
    _, longer = _continue(model, ids[:, PROMPT - 12 : PROMPT], longer, start=PROMPT - 12)
    longer.crop(-5)
    # Norms of these models are in float32, so that later layers have other digits.
    pairs = zip(shorter.layers, longer.layers, strict=True)
    ours, theirs = next(pair for pair in pairs if hasattr(pair[0], "recurrent_states"))
    states = [getattr(ours, name)[0] for name in ("recurrent_states", "conv_states")]
    others = [getattr(theirs, name)[0] for name in ("recurrent_states", "conv_states")]
    errors = [_error(x, y) for x, y in zip(states, others, strict=True) if x is not None]
    tail = ids[:, PROMPT - 5 : PROMPT - 1]
    logits = [_continue(model, tail, x, start=PROMPT - 5)[0] for x in (longer, shorter)]
    return max(*errors, MAX_ROLLBACK_ERROR / MAX_ERROR * _error(*logits))


def same_copies(models: _Models) -> float:
    """A copy and a pickle of an adopted model compute the same."""
    buffer, expected = io.BytesIO(), _logits(models.adopted, models.ids)
    torch.save(models.adopted, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    copies = (copy.deepcopy(models.adopted), saved)
    return max(_error(_logits(model, models.ids), expected) for model in copies)


def same_state_dict(models: _Models) -> float:
    """The state dict has the names and values of the original."""
    ours, theirs = models.adopted.state_dict(), models.original.state_dict()
    if list(ours) != list(theirs):
        return float("inf")
    return max(float((ours[n] - x).abs().max()) for n, x in theirs.items() if x.numel())


_CHECKS: dict[Callable[[_Models], float | tuple[float, float | str]], float] = {
    same_outputs: MAX_ERROR,
    same_training_outputs: MAX_ERROR,
    same_gradients: MAX_GRADIENT_ERROR,
    decoded_tokens: MAX_ERROR,
    exchanged_caches: MAX_ERROR,
    left_padding: MAX_ERROR,
    right_padding: MAX_ERROR,
    padded_pieces: MAX_ERROR,
    packed_documents: MAX_ERROR,
    greedy_search: 0.0,
    beam_search: 0.0,
    prompt_lookup: 0.0,
    assisted_generation: 0.0,
    cropped_cache: MAX_ROLLBACK_ERROR,
    same_copies: 0.0,
    same_state_dict: 0.0,
}


def _check_undo(original: nn.Module, adopted: nn.Module, adoption: AdoptionReport) -> None:
    adoption.undo()
    pairs = zip(original.modules(), adopted.modules(), strict=True)
    require(
        all(type(a) is type(b) for a, b in pairs),
        "undo() of an adoption leaves a layer of another class",
    )
