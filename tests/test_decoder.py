"""`rc.StaticDecoder`: the layer's tokens in fixed tensors, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import recollect as rc
from recollect.decoder import static
from recollect.decoder.states import map_state, tensors_of

pytest.importorskip("transformers")


MAC = rc.blocks.MemoryAsContext("gla", "softmax_attention", segment=4, persistent=1)


def recorded(run: Callable[[], Any]) -> static.Recorded:
    """Run a function like a CUDA graph: later runs write into the tensors of the first."""
    y, new_state = run()
    # Expanded tensors share entries and are read-only.
    new_state = map_state(new_state, torch.Tensor.contiguous)
    targets = [y, *tensors_of(new_state)]

    def replay() -> None:
        output, state = run()
        for old, x in zip(targets, [output, *tensors_of(state)], strict=True):
            if x is not old:
                old.copy_(x)

    return (y, new_state), replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record each phase, also on the CPU."""
    monkeypatch.setattr(static, "graph_recorder", lambda _: recorded)


def deep(batch: int = 4) -> rc.Recipe:
    return rc.Recipe(
        memory=rc.memory.MLP(depth=2),
        algorithm=rc.algorithm.GradientDescent(batch_size=batch, normalized_steps=True),
        retention=rc.retention.Decay(),
    )


def decodes_as_the_layer(name: str, tokens: int) -> rc.StaticDecoder:
    """Compare the decoder of a layer with the layer, after tokens of the layer, for two rows."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=8, num_heads=2)
    x = torch.randn(2, tokens, 8)
    with torch.no_grad():
        _, state = layer(x[:, :3])
    decoder = rc.StaticDecoder(layer, state)
    for t in range(3, tokens):
        y, state = layer(x[:, t : t + 1], state)
        torch.testing.assert_close(decoder(x[:, t : t + 1]), y)
    return decoder


@pytest.mark.parametrize("name", ["gated_delta_net", "rls", "mamba2", "log_linear_attention"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.usefixtures("graphs")
def test_tokens_of_the_layer(name: str, mode: type) -> None:
    with mode():
        decoder = decodes_as_the_layer(name, 12)
    assert decoder.num_recorded == decoder.period == 1


def test_without_graphs_the_module_runs() -> None:
    assert decodes_as_the_layer("gated_delta_net", 12).num_recorded == 0


@pytest.mark.parametrize("name", ["ttt_linear", "omega_net"])
@pytest.mark.usefixtures("graphs")
def test_rows_of_a_deep_memory_on_a_cpu(name: str) -> None:
    """Its caches are views that all rows share."""
    with torch.no_grad():
        decoder = decodes_as_the_layer(name, 60)
    assert decoder.num_recorded == decoder.period == 16


@pytest.mark.usefixtures("graphs")
def test_inner_batches_and_continued_calls() -> None:
    """Every position of the inner batch is a separate step; the module continues from the state."""
    torch.manual_seed(0)
    layer = rc.MemoryLayer(8, 2, deep())
    x = torch.randn(2, 40, 8)
    with torch.no_grad():
        full, _ = layer(x)
        _, state = layer(x[:, :5])
        initial = state.memory.weights[0].clone()
        decoder = rc.StaticDecoder(layer, state)
        result = [decoder(x[:, t : t + 1]).clone() for t in range(5, 31)]
        assert decoder.num_recorded == decoder.period == 4
        assert decoder.state.host_position == 31
        more, _ = layer(x[:, 31:], decoder.state)
    torch.testing.assert_close(torch.cat([*result, more], 1), full[:, 5:], rtol=1e-4, atol=1e-5)
    assert torch.equal(state.memory.weights[0], initial), "the given state stays as it is"


@pytest.mark.usefixtures("graphs")
def test_a_language_model() -> None:
    decodes_a_language_model()


def decodes_a_language_model(**options: bool) -> None:
    """Compare tokens of a decoder with these options, and the model's next tokens, with a call."""
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        {"delta": "gated_delta_net", "deep": deep()},
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = rc.lm.RecollectForCausalLM(config).eval()
    ids = torch.randint(16, (2, 30))
    with torch.no_grad():
        expected = model(ids).logits
        cache = rc.lm.cache_of(model(ids[:, :3], use_cache=True))
        decoder = rc.StaticDecoder(model, cache, **options)
        for t in range(3, 29):
            torch.testing.assert_close(
                decoder(ids[:, t : t + 1])[:, 0], expected[:, t], rtol=1e-4, atol=1e-5
            )
        assert decoder.num_recorded == decoder.period == 4
        later = decoder.state
        assert later.get_seq_length() == 29
        last = model(ids[:, 29:], cache=later, use_cache=True).logits
    torch.testing.assert_close(last[:, 0], expected[:, 29], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("graphs")
def test_rows_at_different_positions() -> None:
    """Linear memories do not depend on positions; a deep memory states its reason."""
    torch.manual_seed(0)
    x, mask = torch.randn(2, 9, 8), torch.ones(2, 5)
    mask[0, :2] = 0
    with torch.no_grad():
        for recipe, fits in ((rc.zoo.get("gated_delta_net").recipe, True), (deep(), False)):
            layer = rc.MemoryLayer(8, 2, recipe)
            _, state = layer(x[:, :5], attention_mask=mask)
            if not fits:
                with pytest.raises(ValueError, match="batch elements are at different positions"):
                    rc.StaticDecoder(layer, state)
                continue
            decoder = rc.StaticDecoder(layer, state)
            for t in range(5, 9):
                y, state = layer(x[:, t : t + 1], state)
                torch.testing.assert_close(decoder(x[:, t : t + 1]), y)


@pytest.mark.parametrize("name", ["softmax_attention", "fox", "moba", "delta_former"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.usefixtures("graphs")
def test_a_state_that_grows_in_slots(name: str, mode: type) -> None:
    """Compare with the layer's tokens, also for rows of different lengths, in all slots."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=8, num_heads=2).double()
    x, mask = torch.randn(2, 15, 8, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    mask[1, :2] = False
    with mode():
        _, state = layer(x[:, :5], attention_mask=mask)
        decoder = rc.StaticDecoder(layer, state, max_cache_len=14)
        for t in range(5, 14):
            y, state = layer(x[:, t : t + 1], state)
            torch.testing.assert_close(decoder(x[:, t : t + 1]), y, rtol=1e-10, atol=1e-12)
        with pytest.raises(ValueError, match="all 14 slots are full"):
            decoder(x[:, 14:])
        later = decoder.state  # of another size, from which the layer or another decoder continues
        assert later.position.tolist() == [14, 12]
        y, _ = layer(x[:, 14:], state)
        more = rc.StaticDecoder(layer, later, max_cache_len=20)
        for result in (layer(x[:, 14:], later)[0], more(x[:, 14:])):
            torch.testing.assert_close(result, y, rtol=1e-10, atol=1e-12)


def test_errors() -> None:
    x = torch.randn(1, 3, 8)

    def later(layer: torch.nn.Module) -> object:
        return layer(x)[1]

    attention = rc.zoo.get("softmax_attention").build(d_model=8, num_heads=2)
    with pytest.raises(ValueError, match="this layer grows with the text"):
        rc.StaticDecoder(attention, later(attention))
    chain = rc.blocks.build(rc.blocks.Sequential("gla", "softmax_attention"), 8, 2)
    with pytest.raises(ValueError, match="grows with the text"):
        rc.StaticDecoder(chain, later(chain))
    mac = rc.blocks.build(rc.blocks.Sequential(MAC, "softmax_attention"), 8, 2)
    with pytest.raises(ValueError, match="MemoryAsContext resets its attention"):
        rc.StaticDecoder(mac, later(mac), max_cache_len=9)
    batches = rc.zoo.get("deep_transformer").build(d_model=8, num_heads=2)
    with pytest.raises(ValueError, match="needs the position on the host"):
        rc.StaticDecoder(batches, later(batches), max_cache_len=9)
    long = rc.MemoryLayer(8, 2, deep(batch=512))
    with pytest.raises(ValueError, match="512 tokens"):
        rc.StaticDecoder(long, later(long))
    layer = rc.zoo.get("gla").build(d_model=8, num_heads=2)
    with pytest.raises(ValueError, match="needs the state after the prompt"):
        rc.StaticDecoder(layer, None)
    with pytest.raises(ValueError, match="takes a layer with its state"):
        rc.StaticDecoder(layer, rc.lm.RecollectCache([layer(x)[1]]))
    with pytest.raises(ValueError, match="and this one does not: leave it out"):
        rc.StaticDecoder(layer, later(layer), max_cache_len=9)
    for slots, why in (
        (0, r"StaticDecoder\(max_cache_len=...\)"),
        (3, "too few slots for 4 tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            rc.StaticDecoder(attention, later(attention), max_cache_len=slots)(x[:, :1])
    decoder = rc.StaticDecoder(layer, later(layer))
    with pytest.raises(ValueError, match="one token at a time"):
        decoder(x)
    with pytest.raises(ValueError, match="9"):
        decoder(torch.randn(1, 1, 9))
    decoder(x[:, :1])
    with pytest.raises(ValueError, match="has fixed sizes"):
        decoder(x[:, :1].double())


def test_error_of_an_unrecordable_module(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rc.zoo.get("gla").build(d_model=8, num_heads=2)
    x = torch.randn(1, 3, 8)

    def refuses(run: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(static, "graph_recorder", lambda _: refuses)
    decoder = rc.StaticDecoder(layer, layer(x)[1])
    decoder(x[:, :1])
    with pytest.raises(ValueError, match="MemoryLayer cannot be recorded as a graph"):
        decoder(x[:, :1])


@pytest.mark.usefixtures("graphs")
def test_error_of_the_module_is_unchanged() -> None:
    layer = rc.zoo.get("gla").build(d_model=8, num_heads=2)
    x = torch.randn(1, 3, 8)
    decoder = rc.StaticDecoder(layer, layer(x)[1])
    decoder(x[:, :1])
    layer.register_forward_pre_hook(_raise)
    with pytest.raises(RuntimeError, match=r"^the compiler of the module$"):
        decoder(x[:, :1])


def _raise(*_: object) -> None:
    raise RuntimeError("the compiler of the module")
