"""Modes and refusals of adopted models that do not differ between classes."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from tests.lm.adoption.models import OTHERS, make_model
from tests.lm.families import enable_checkpointing
from torch import Tensor, nn
from transformers import DynamicCache

import recollect as rc
import recollect.lm
from recollect.lm.model.cache import CACHE_KEY


def adopted(name: str) -> tuple[Any, Any]:
    original = make_model(name)
    model = copy.deepcopy(original)
    rc.lm.adopt(model)
    return original, model


def tokens(rows: int = 2, length: int = 24) -> Tensor:
    return torch.randint(3, 64, (rows, length))


def error(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).abs().max() / expected.abs().max())


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_static_cache(name: str) -> None:
    original, model = adopted(name)
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    expected = original.generate(tokens(), **options)
    torch.manual_seed(0)
    y = model.generate(expected[:, :24], cache_implementation="static", **options)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", ["mamba", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_compiled_model_is_one_graph(name: str) -> None:
    _, model = adopted(name)
    ids = tokens()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        y = torch.compile(model, backend=counter)(ids, use_cache=False).logits
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert error(y, expected) < 1e-5


def test_compiled_model_makes_a_cache() -> None:
    _, model = adopted("mamba2")
    ids = tokens()
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, backend="eager")(ids[:, :20], use_cache=True)
        torch._dynamo.reset()
        y = model(ids[:, 20:], use_cache=True, **{CACHE_KEY: rc.lm.cache_of(out)}).logits
        assert error(y, model(ids, use_cache=False).logits[:, 20:]) < 1e-5


@pytest.mark.parametrize("first", ["hooks", "adoption"])
def test_hooks_of_accelerate(first: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    original = make_model("mamba2")
    model, ids = copy.deepcopy(original), tokens()
    layer = model.backbone.layers[0].mixer
    if first == "hooks":
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
        report = rc.lm.adopt(model)
    else:
        report = rc.lm.adopt(model)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    family = type(layer.adoption.family)
    arguments = mock.patch.object(family, "arguments", autospec=True, side_effect=family.arguments)
    with arguments as calls, torch.no_grad():
        y = model(ids, use_cache=False).logits
    assert calls.call_count == 2
    with torch.no_grad():
        assert error(y, original(ids, use_cache=False).logits) < 1e-5
    report.undo()
    with torch.no_grad():
        assert error(model(ids, use_cache=False).logits, y) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2", "mamba"])
def test_gradient_checkpointing(name: str) -> None:
    gradients = []
    for enabled in (False, True):
        _, model = adopted(name)
        if enabled:
            enable_checkpointing(model)
        ids = tokens()
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        torch.manual_seed(0)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2", "mamba"])
def test_autocast_rounds_as_the_original(name: str) -> None:
    original, model = adopted(name)
    ids = tokens()
    with torch.no_grad():
        expected = original(ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            ours = model(ids, use_cache=False).logits.float()
            theirs = original(ids, use_cache=False).logits.float()
    assert error(ours, expected) < 2 * error(theirs, expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_adapters_get_gradients() -> None:
    peft = pytest.importorskip("peft")
    _, model = adopted("qwen3_5_text")
    config = peft.LoraConfig(target_modules=["in_proj_qkv", "out_proj"], r=2)
    model = peft.get_peft_model(model, config)
    ids = tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(gradients) == 8 and all(g is not None for g in gradients)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("mamba2", ("seq_idx",)),
        ("mamba", ("seq_idx",)),
        ("jamba", ("seq_idx", "position_ids")),
        ("jamba", ("position_ids",)),
        ("qwen3_5_text", ("position_ids",)),
    ],
)
def test_boundaries_are_found(name: str, keys: tuple[str, ...]) -> None:
    _, model = adopted(name)
    ids, lengths = tokens(1, 33), (20, 13)
    parts = {
        "position_ids": [torch.arange(n) for n in lengths],
        "seq_idx": [torch.full((n,), i) for i, n in enumerate(lengths)],
    }
    options = {key: torch.cat(parts[key])[None] for key in keys}
    with torch.no_grad():
        y = model(ids, use_cache=False, **options).logits[0]
        expected = [model(part, use_cache=False).logits[0] for part in ids.split(lengths, 1)]
    assert error(y, torch.cat(expected)) < 1e-5


def test_packed_rows_of_a_batch() -> None:
    """Positions of each row start again at other tokens."""
    _, model = adopted("qwen3_5_text")
    ids = tokens(2, 20)
    positions = [torch.cat([torch.arange(n), torch.arange(20 - n)]) for n in (8, 13)]
    with torch.no_grad():
        y = model(ids, position_ids=torch.stack(positions), use_cache=False).logits
        for row, n in enumerate((8, 13)):
            for part in (slice(0, n), slice(n, 20)):
                expected = model(ids[row : row + 1, part], use_cache=False).logits[0]
                assert error(y[row, part], expected) < 1e-5


def test_a_row_of_one_padded_token_is_unchanged() -> None:
    """A mask of one column: the state of the first row must not move."""
    _, model = adopted("mamba2")
    ids, mask = tokens(2, 10), torch.ones(2, 12, dtype=torch.long)
    mask[0, 10] = 0
    with torch.no_grad():
        cache = rc.lm.cache_of(model(ids, use_cache=True))
        for t in (10, 11):
            out = model(ids[:, :1], cache=cache, use_cache=True, attention_mask=mask[:, : t + 1])
        shorter = model(torch.cat([ids[:1], ids[:1, :1]], 1)).logits[0, -1]
        longer = model(torch.cat([ids[1:], ids[1:, :1], ids[1:, :1]], 1)).logits[0, -1]
    assert error(out.logits[0, -1], shorter) < 1e-5
    assert error(out.logits[1, -1], longer) < 1e-5


def test_inference_mode_then_gradients() -> None:
    _, model = adopted("qwen3_5_text")
    ids = tokens()
    with torch.inference_mode():
        expected = model(ids, use_cache=True).logits
    y = model(ids, use_cache=False).logits
    y.sum().backward()
    assert error(y.detach(), expected) < 1e-6


def test_an_interrupted_call_leaves_no_mask() -> None:
    _, model = adopted("mamba2")
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        hook = model.backbone.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids, attention_mask=mask, use_cache=False)
        hook.remove()
        assert torch.equal(model(ids, use_cache=False).logits, expected)


class Wrapper(nn.Module):
    """A module of a user, whose arguments are not those of its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).logits  # type: ignore[no-any-return]


def test_padding_of_a_model_inside_a_module() -> None:
    model = Wrapper(make_model("mamba2"))
    report = rc.lm.adopt(model)
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        y = model({"input_ids": ids, "attention_mask": mask})
        assert error(y[1, 7:], model({"input_ids": ids[1:, 7:]})[0]) < 1e-5
    prompt = ids[:1, :6].repeat(1, 2)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.model.generate(prompt, **options)
    assert torch.equal(
        model.model.generate(prompt, prompt_lookup_num_tokens=3, **options), expected
    )
    report.undo()
    assert "_is_stateful" not in vars(model.model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- caches ----------------------------------------------------------------------------------------


def test_a_saved_prompt_is_cut_back_to_each_token() -> None:
    _, model = adopted("qwen3_5_text")
    ids = tokens(1, 12)
    with torch.no_grad():
        prompt = DynamicCache(config=model.config)
        prompt.activate_past_recording()
        for piece in ids.split((5, 1, 6), 1):
            model(piece, use_cache=True, **{CACHE_KEY: prompt})
        for n in (11, 6, 5, 3, 1):
            cache = copy.deepcopy(prompt)
            cache.crop(n - 12)
            y = model(ids[:, n:], use_cache=True, **{CACHE_KEY: cache}).logits
            assert error(y, model(ids).logits[:, n:]) < 1e-5


def test_a_padded_cache_is_cropped_by_columns() -> None:
    _, model = adopted("mamba2")
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4], mask[1, 9:] = 0, 0
    with torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        caches[0].activate_past_recording()
        model(ids, attention_mask=mask, cache=caches[0], use_cache=True)
        caches[0].crop(-5)
        model(ids[:, :7], attention_mask=mask[:, :7], cache=caches[1], use_cache=True)
        outputs = [model(ids[:, :3], cache=cache, use_cache=True).logits for cache in caches]
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 10
    assert error(*outputs) < 1e-6


def test_cropping_is_refused() -> None:
    _, model = adopted("mamba2")
    ids = tokens(1, 6)
    with torch.no_grad():
        cache = rc.lm.cache_of(model(ids, use_cache=True))
        with pytest.raises(ValueError, match=r"remove 2 tokens .* of which 0 are recorded: call"):
            cache.crop(-2)
        cache.activate_past_recording()
        model(ids, cache=cache, use_cache=True)
        with pytest.raises(ValueError, match=r"remove 7 tokens from a memory of which 6"):
            cache.crop(-7)
        cache.crop(0)


def test_a_saved_cache_continues(tmp_path: Path) -> None:
    _, model = adopted("mamba2")
    ids, buffer = tokens(1, 12), io.BytesIO()
    with torch.no_grad():
        cache = rc.lm.cache_of(model(ids[:, :8], use_cache=True))
        torch.save(cache, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        y = model(ids[:, 8:], cache=loaded, use_cache=True).logits
        assert error(y, model(ids).logits[:, 8:]) < 1e-5
    assert loaded.get_seq_length() == 12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_before_those_of_the_original_are_not_cropped(mode: Any) -> None:
    original, model = adopted("mamba2")
    ids = tokens(1, 12)
    with mode():
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids[:, :4], use_cache=True, **{CACHE_KEY: cache})
        original(ids[:, 4:6], use_cache=True, **{CACHE_KEY: cache})
        model(ids[:, 6:], use_cache=True, **{CACHE_KEY: cache})
        with pytest.raises(ValueError, match="of which 6 are recorded"):
            cache.crop(-8)


def test_a_short_recorded_cache_of_the_original_is_continued() -> None:
    original, model = adopted("mamba2")
    ids = tokens(1, 12)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        original(ids[:, :2], use_cache=True, **{CACHE_KEY: cache})
        y = model(ids[:, 2:], use_cache=True, **{CACHE_KEY: cache}).logits
        assert error(y, model(ids, use_cache=False).logits[:, 2:]) < 1e-5


def test_the_length_is_unknown_after_the_original_continued() -> None:
    original, model = adopted("mamba2")
    ids = tokens(1, 6)
    with torch.no_grad():
        cache = rc.lm.cache_of(model(ids, use_cache=True))
        assert cache.get_seq_length() == 6
        original(ids[:, :1], cache=cache, use_cache=True)
        model(ids[:, :1], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="get_seq_length"):
        cache.get_seq_length()


def test_sampling_by_prompt_lookup() -> None:
    """It is repeatable, and with the likeliest token alone it is greedy search."""
    _, model = adopted("mamba2")
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        prompt = torch.arange(3, 13).repeat(2)[None]
        options = {"max_new_tokens": 12, "do_sample": True, "prompt_lookup_num_tokens": 3}
        outputs.append(model.generate(prompt, **options))
    assert torch.equal(*outputs)
    greedy = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(prompt, **options, top_k=1), greedy)


# -- refusals --------------------------------------------------------------------------------------


def test_a_cache_without_recurrent_layers_is_refused() -> None:
    _, model = adopted("mamba2")
    with pytest.raises(ValueError, match=r"layer 0 of the cache .* DynamicCache\(config="):
        model(tokens(), cache=DynamicCache(), use_cache=True)


def test_packed_documents_have_no_cache_and_no_padding() -> None:
    _, model = adopted("mamba2")
    ids, index = tokens(1, 8), torch.tensor([[0] * 5 + [1] * 3])
    with torch.no_grad():
        cache = rc.lm.cache_of(model(ids, use_cache=True))
        with pytest.raises(ValueError, match="neither continue nor be continued"):
            model(ids, cache=cache, use_cache=True, seq_idx=index)
        cache = rc.lm.cache_of(model(ids, use_cache=True, seq_idx=index))
        with pytest.raises(ValueError, match="neither continue nor be continued"):
            model(ids, cache=cache, use_cache=True)
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="packed documents cannot have padding"):
            model(ids, use_cache=False, seq_idx=index, attention_mask=mask)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_boundaries_that_checkpointing_would_lose_are_refused(use_reentrant: bool) -> None:
    _, model = adopted("mamba")
    enable_checkpointing(model.train(), use_reentrant=use_reentrant)
    with pytest.raises(ValueError, match="disable gradient checkpointing"):
        model(tokens(1, 8), use_cache=False, seq_idx=torch.tensor([[0] * 5 + [1] * 3]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_padding_that_checkpointing_would_lose_is_refused(use_reentrant: bool) -> None:
    _, model = adopted("recurrent_gemma")
    enable_checkpointing(model.train(), use_reentrant=use_reentrant)
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    model(ids, labels=ids, use_cache=False, attention_mask=mask).loss.backward()
    mask[1, 15:] = 0
    with pytest.raises(ValueError, match="disable gradient checkpointing"):
        model(ids, labels=ids, use_cache=False, attention_mask=mask)


def test_adopting_twice_is_refused() -> None:
    _, model = adopted("mamba2")
    with pytest.raises(ValueError, match=r"adopted already: call undo\(\)"):
        rc.lm.adopt(model)
    with pytest.raises(TypeError, match="expected a model of transformers, not str"):
        rc.lm.adopt("mamba2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs sequences with tokens, not \[2, 0, "):
        model(tokens(length=0))


def test_an_error_changes_no_layer() -> None:
    model = make_model("mamba2")
    with pytest.raises(ValueError, match="engine"):
        rc.lm.adopt(model, engine="unknown")
    assert not rc.lm.adopt(model).unchanged


def test_a_layer_that_does_not_fit_its_family_is_unchanged() -> None:
    model = make_model("mamba2")
    del model.backbone.layers[1].mixer.num_heads
    report = rc.lm.adopt(model)
    assert [layer.name for layer in report.adopted] == ["backbone.layers.0.mixer"]
    assert "family 'mamba2' does not fit it (AttributeError" in report.unchanged[0].reason
    assert model._is_stateful


@pytest.mark.parametrize("name", list(OTHERS))
def test_models_without_a_family_are_unchanged(name: str) -> None:
    model, other = make_model(name), make_model(name)
    report = rc.lm.adopt(model)
    assert not report.adopted
    reasons = {layer.reason for layer in report.unchanged}
    parts = {"rwkv": "RWKV-4", "lfm2": "no memory"}
    assert all(parts[name] in reason for reason in reasons) and bool(reasons) == (name in parts)
    for a, b in zip(model.modules(), other.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys()
        assert not a._forward_pre_hooks and not a._forward_hooks


def test_a_vision_tower_is_unchanged() -> None:
    """A convolution over patches is not a recurrent layer."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv1d(4, 4, 3))
    report = rc.lm.adopt(model)
    assert report.layers == ()
    assert str(report) == "Sequential: 0 recurrent layers adopted"


# -- reports and families --------------------------------------------------------------------------


def test_the_report_names_each_layer() -> None:
    model = make_model("qwen3_5_text")
    report = rc.lm.adopt(model, engine="reference")
    names = [layer.name for layer in report.adopted]
    assert names == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    assert {layer.engine for layer in report.adopted} == {"reference"}
    assert str(report).splitlines() == [
        "Qwen3_5ForCausalLM: 2 recurrent layers adopted",
        "  2 × Qwen3_5GatedDeltaNet: gated delta net, engine reference",
    ]
    report.undo()
    assert type(model.model.layers[0].linear_attn).__name__ == "Qwen3_5GatedDeltaNet"
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks
    assert model._is_stateful and "_is_stateful" not in vars(model)
    rc.lm.adopt(model)


class Average(nn.Module):
    """A recurrent layer of a user: a decaying average of the tokens, per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay_logit, self.out = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        decay, y = self.decay_logit.sigmoid(), torch.zeros_like(hidden_states[:, 0])
        outputs = []
        for x in hidden_states.unbind(1):
            y = decay * y + x
            outputs.append(y)
        return self.out(torch.stack(outputs, 1))  # type: ignore[no-any-return]


class AverageFamily(rc.lm.Family):
    name = "average of a test"
    recipe = rc.Recipe(
        memory=rc.memory.Vector(),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(per="value"),
        algorithm=rc.algorithm.GradientDescent(lr=1.0),
    )

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, Average)

    def width(self, module: Any) -> int:
        return module.out.in_features  # type: ignore[no-any-return]

    def convolution(self, module: Any) -> None:
        return None

    def activate(self, module: Any, u: Tensor) -> Tensor:
        return u

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {}

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> rc.lm.MemoryArguments:
        v = u.unsqueeze(2)
        ones = torch.ones_like(v)
        log_decay = nn.functional.logsigmoid(module.decay_logit).expand_as(v)
        return rc.lm.MemoryArguments(q=ones, k=ones, v=v, gates={"log_decay": log_decay})

    def output(
        self, module: Any, y: Tensor, arguments: Any, projections: dict[str, Tensor]
    ) -> Tensor:
        return module.out(y.flatten(2))  # type: ignore[no-any-return]


def test_a_family_of_a_user() -> None:
    family = rc.lm.register_family(AverageFamily())
    try:
        with pytest.raises(ValueError, match="a family named 'average of a test' exists"):
            rc.lm.register_family(AverageFamily())
        with pytest.raises(TypeError, match=r"a subclass of rc\.lm\.Family"):
            rc.lm.register_family(AverageFamily)  # type: ignore[arg-type]
        model, x = nn.Sequential(Average(8), Average(8)), torch.randn(2, 9, 8)
        expected = model(x)
        report = rc.lm.adopt(model)
        assert [layer.family for layer in report.adopted] == 2 * [family.name]
        torch.testing.assert_close(model(x), expected)
    finally:
        from recollect.lm.adoption import family as module

        module._families.remove(family)


CHILD = """
import sys, torch
import recollect as rc, recollect.lm
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
rc.lm.adopt(model)
ids = torch.arange(3, 27)[None]
with torch.no_grad():
    y = model(ids, use_cache=False).logits
torch.save((y, model.generate(ids, max_new_tokens=4, do_sample=False)), sys.argv[1] + "/y.pt")
"""


@pytest.mark.slow
def test_models_run_with_flash_linear_attention_and_no_gpu(tmp_path: Path) -> None:
    """transformers would choose kernels of Triton, which need a GPU."""
    pytest.importorskip("fla")
    model = make_model("qwen3_5_text")
    model.save_pretrained(tmp_path)
    arguments = [sys.executable, "-c", CHILD, str(tmp_path)]
    subprocess.run(arguments, check=True, capture_output=True, text=True)
    ids = torch.arange(3, 27)[None]
    y, generated = torch.load(tmp_path / "y.pt")
    with torch.no_grad():
        assert error(y, model(ids, use_cache=False).logits) < 1e-5
    assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))
