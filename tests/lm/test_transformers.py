"""Arguments of transformers keep their meaning, and Trainer, pipelines and PEFT run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect as rc

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

from recollect.lm import (
    RecollectForCausalLM,
    RecollectForSequenceClassification,
    RecollectModel,
    cache_of,
)
from recollect.lm.data.tokenizers import byte_tokenizer

# transformers and PEFT call each other by names that transformers will change.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

VOCAB = 264


def config(recipe: str = "gated_delta_net", **sizes: Any) -> rc.lm.RecollectConfig:
    defaults = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
    return rc.lm.RecollectConfig.from_recipes(
        recipe, num_attention_heads=2, pad_token_id=0, **{**defaults, **sizes}
    )


def ours(recipe: str = "gated_delta_net") -> RecollectForCausalLM:
    torch.manual_seed(0)
    return RecollectForCausalLM(config(recipe)).eval()


def swapped() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24}
    net = LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0)
    ).eval()
    rc.lm.replace_attention(net, "gated_delta_net")
    return net


def text(*lengths: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (n,), generator=draw) for n in lengths]


# -- arguments ------------------------------------------------------------------------------------

T = 7
SAME: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": torch.arange(T)[None]},
    "positions of each row": {"position_ids": torch.arange(T).expand(2, T)},
    "columns": {"cache_position": torch.arange(T)},
    "no attentions": {"output_attentions": False},
    "no router": {"output_router_logits": False},
    "causal": {"is_causal": True},
    "one kind of token": {"token_type_ids": torch.zeros(2, T, dtype=torch.long)},
    "nothing": {"position_ids": None, "output_attentions": None, "seq_idx": None},
    "each row a document": {"cu_seq_lens_q": torch.tensor([0, T, 2 * T]), "max_length_q": T},
    "the first of several boundaries": {
        "cu_seq_lens_q": torch.tensor([0, T, 2 * T]),
        "cu_seq_lens_k": torch.tensor([0, 3, T, 2 * T]),
    },
    "an output object": {"return_dict": True},
}


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
def test_equivalent_arguments_change_nothing(options: dict[str, Any]) -> None:
    net, ids = ours(), torch.stack(text(T, T))
    with torch.no_grad():
        want = net(ids, labels=ids)
        outputs = net(ids, labels=ids, **options)
        inner = net.model(ids, num_items_in_batch=3, **options)
    torch.testing.assert_close(outputs.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.loss, want.loss)
    assert inner.last_hidden_state.shape == (2, T, 16)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attentions": ({"output_attentions": True}, "no attention weights to return"),
    "router": ({"output_router_logits": True}, "logits of routers are not returned"),
    "both ways": ({"is_causal": False}, "depends on earlier tokens only"),
    "kinds": ({"token_type_ids": torch.ones(2, T)}, "token_type_ids must be zeros"),
    "late positions": ({"position_ids": 4 + torch.arange(T)[None]}, "position_ids must count"),
    "backwards": ({"position_ids": torch.arange(T).flip(0)[None]}, "position_ids must count"),
    "strides": ({"position_ids": 2 * torch.arange(T)[None]}, "position_ids must count"),
    "too few": ({"position_ids": torch.arange(3)[None]}, "position_ids must have shape [1, 7]"),
    "three axes": ({"position_ids": torch.zeros(3, 2, T)}, "position_ids must have shape"),
    "late columns": ({"cache_position": 1 + torch.arange(T)}, "count from 0 to 6"),
    "into the next row": (
        {"cu_seq_lens_q": torch.tensor([0, 9, 14])},
        "boundary at the end of every row",
    ),
    "padding too": (
        {
            "cu_seq_lens_q": torch.tensor([0, T, 2 * T]),
            "attention_mask": torch.tensor([[0] + [1] * 6, [1] * 7]),
        },
        "attention_mask has padding and cu_seqlens has boundaries",
    ),
    "a state of them": (
        {"cu_seq_lens_q": torch.tensor([0, T, 2 * T]), "use_cache": True},
        "pass use_cache=False",
    ),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    net, ids = ours(), torch.stack(text(T, T))
    for module in (net, net.model):
        with pytest.raises(ValueError, match=re.escape(says)) as caught:
            module(ids, **options)
        assert "\n" not in str(caught.value)


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no argument 'position_id'; did you mean 'position_ids'"):
        ours()(text(3)[0][None], position_id=None)
    with pytest.raises(TypeError, match="did you mean 'cache'"):
        ours()(text(3)[0][None], cahce=None)


def test_tuples_hidden_states_and_logits_to_keep() -> None:
    net, ids = ours(), text(T)[0][None]
    with torch.no_grad():
        full = net(ids, output_hidden_states=True)
        logits, *_ = net(ids, return_dict=False)
        last = net(ids, logits_to_keep=2).logits
    assert isinstance(logits, Tensor) and torch.equal(logits, full.logits)
    # A product of fewer rows can round differently.
    torch.testing.assert_close(last, full.logits[:, -2:])
    assert [x.shape for x in full.hidden_states] == [(1, T, 16)] * 3


def test_positions_after_padding_and_after_a_cache() -> None:
    net, (ids,) = ours("softmax_attention"), text(T)
    row, mask = torch.cat([ids.new_zeros(2), ids])[None], torch.tensor([[0] * 2 + [1] * T])
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # as transformers counts them
    with torch.no_grad():
        single = net(ids[None]).logits
        padded = net(row, attention_mask=mask, position_ids=positions).logits[:, 2:]
        first = net(row[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5])
        assert cache_of(first) is not None
        more = {"position_ids": positions[:, 5:], "cache_position": torch.arange(5, 9)}
        rest = net(row[:, 5:], cache=cache_of(first), attention_mask=mask, **more)
    torch.testing.assert_close(padded, single, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest.logits, single[:, 3:], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="count on after a cache"):
        net(
            row[:, 5:],
            cache=cache_of(first),
            position_ids=torch.tensor([[0, 1, 0, 1]]),
        )


# -- packed documents -----------------------------------------------------------------------------

COLLATORS: dict[str, dict[str, bool]] = {
    "positions": {},
    "flash attention's": {"return_flash_attn_kwargs": True},
    "numbers": {"return_position_ids": False, "return_seq_idx": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


@pytest.mark.parametrize("make", [ours, lambda: ours("softmax_attention")], ids=["gdn", "softmax"])
@pytest.mark.parametrize("how", COLLATORS.values(), ids=COLLATORS)
def test_flattened_documents_equal_single_documents(how: dict[str, bool], make: Any) -> None:
    net, documents = make(), text(5, 3, 6)
    batch = DataCollatorWithFlattening(**how)([{"input_ids": x.tolist()} for x in documents])
    with torch.no_grad():
        packed = net(**batch)
        single = [net(x[None], labels=x[None]) for x in documents]
    want = torch.cat([one.logits[0] for one in single])
    torch.testing.assert_close(packed.logits[0], want, atol=1e-5, rtol=1e-5)
    counts = torch.tensor([float(len(x) - 1) for x in documents])
    loss = (torch.stack([one.loss for one in single]) * counts).sum() / counts.sum()
    torch.testing.assert_close(packed.loss, loss, atol=1e-5, rtol=1e-5)


def test_rows_may_be_packed() -> None:
    net, (a, b, c, d) = ours(), text(5, 3, 2, 6)
    ids = torch.stack([torch.cat([a, b]), torch.cat([c, d])])
    positions = torch.stack(
        [torch.cat([torch.arange(len(x)) for x in r]) for r in ((a, b), (c, d))]
    )
    with torch.no_grad():
        packed = net(ids, position_ids=positions, labels=ids, output_hidden_states=True)
        single = [net(x[None], labels=x[None]) for x in (a, b, c, d)]
    want = torch.cat([one.logits[0] for one in single]).view(2, 8, -1)
    torch.testing.assert_close(packed.logits, want, atol=1e-5, rtol=1e-5)
    total = sum(float(one.loss) * (len(x) - 1) for one, x in zip(single, (a, b, c, d), strict=True))
    assert float(packed.loss) == pytest.approx(total / 12, rel=1e-5)
    assert cache_of(packed) is None
    assert {x.shape for x in packed.hidden_states} == {(2, 8, 16)}


@pytest.mark.parametrize("how", ["positions", "flash attention's"])
def test_flattened_documents_of_a_swapped_decoder(how: str) -> None:
    net, documents = swapped(), text(5, 3, 6)
    batch = DataCollatorWithFlattening(**COLLATORS[how])(
        [{"input_ids": x.tolist()} for x in documents]
    )
    with torch.no_grad():
        packed = net(**batch, use_cache=False).logits[0]
        want = torch.cat([net(x[None]).logits[0] for x in documents])
    torch.testing.assert_close(packed, want, atol=1e-5, rtol=1e-5)


# -- Trainer, pipelines, PEFT ---------------------------------------------------------------------


def trained(net: PreTrainedModel, out: Path, rows: Any, **how: Any) -> Trainer:
    collator = how.pop("data_collator", None)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **how,
    )
    trainer = Trainer(model=net, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    return trainer


def packed_rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": x.tolist()} for x in text(5, 3, 6, 4, 7, 5, 8, 3)]


def test_a_flattening_collator_trains_and_checkpointing_changes_nothing(tmp_path: Path) -> None:
    result = []
    for checkpointing in (False, True):
        net = ours()
        how: dict[str, Any] = {"gradient_checkpointing": checkpointing}
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        trained(net, tmp_path, packed_rows(), data_collator=collator, **how)
        assert net.model.gradient_checkpointing == checkpointing
        result.append(net.state_dict())
    plain, repeated = result
    started = ours().state_dict()
    assert any(not torch.equal(plain[name], started[name]) for name in plain)
    for name in plain:
        torch.testing.assert_close(repeated[name], plain[name], atol=1e-5, rtol=1e-5)


def test_a_swapped_decoder_trains_with_gradient_checkpointing(tmp_path: Path) -> None:
    net, started = swapped(), swapped().state_dict()
    rows = [{"input_ids": x, "labels": x} for x in text(6, 6, 6, 6)]
    trained(net, tmp_path, rows, gradient_checkpointing=True)
    gate = "model.layers.0.self_attn.layer.qkv.weight"
    assert not torch.equal(net.state_dict()[gate], started[gate])


def test_text_generation_pipeline_equals_generate() -> None:
    net, tokenizer = ours(), byte_tokenizer()
    write = pipeline("text-generation", model=net, tokenizer=tokenizer, device="cpu")
    how = {"max_new_tokens": 5, "do_sample": False}
    (one, two) = write(["the memory", "a"], **how, return_full_text=False, batch_size=2)
    for generated, prompt in ((one, "the memory"), (two, "a")):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = net.generate(ids, **how)[0, ids.shape[1] :]
        assert generated[0]["generated_text"] == tokenizer.decode(new, skip_special_tokens=True)


def test_sequence_classification_trains_and_is_saved(tmp_path: Path) -> None:
    ours().save_pretrained(tmp_path / "lm")
    net = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    assert type(net) is RecollectForSequenceClassification
    weights = ours().state_dict()
    for name, weight in net.state_dict().items():
        assert name == "score.weight" or torch.equal(weight, weights[name])
    ids = text(4, 6, 6)
    padded = torch.stack([torch.cat([torch.zeros(6 - len(x), dtype=torch.long), x]) for x in ids])
    right = torch.stack([torch.cat([x, torch.zeros(6 - len(x), dtype=torch.long)]) for x in ids])
    with torch.no_grad():
        net.eval()
        single = torch.cat([net(x[None]).logits for x in ids])
        for rows in (padded, right):
            logits = net(rows, attention_mask=(rows != 0).long()).logits
            torch.testing.assert_close(logits, single, atol=1e-5, rtol=1e-5)
    rows = [{"input_ids": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(text(*[6] * 6))]
    initial = net.score.weight.clone()
    trained(net, tmp_path / "run", rows)
    assert not torch.equal(net.score.weight, initial)
    net.eval().save_pretrained(tmp_path / "sorter")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "sorter").eval()
    with torch.no_grad():
        assert torch.equal(back(padded).logits, net(padded).logits)
    inner = RecollectModel.from_pretrained(tmp_path / "sorter")
    assert torch.equal(inner.embed_tokens.weight, net.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("make", "targets"),
    [(ours, ["qkv", "out"]), (swapped, ["qkv", "up_proj"])],
    ids=["ours", "swapped"],
)
@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_lora_trains_and_is_saved(make: Any, targets: list[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    make().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    net = peft.get_peft_model(base, lora)
    frozen = {n: x.clone() for n, x in net.named_parameters() if not x.requires_grad}
    rows = [{"input_ids": x, "labels": x} for x in text(6, 6, 6, 6)]
    trained(net, tmp_path / "run", rows, gradient_checkpointing=True)
    now = dict(net.named_parameters())
    assert all(torch.equal(now[n], x) for n, x in frozen.items())
    assert any(n.endswith("lora_B.default.weight") and bool(x.any()) for n, x in now.items())
    net.eval().save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()  # the adapter alone
    ids = torch.stack(text(T, T))
    repeated = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(repeated, tmp_path / "adapter").eval()
    with torch.no_grad():
        want, plain = net(ids).logits, make()(ids).logits
        torch.testing.assert_close(back(ids).logits, want)
        assert not torch.allclose(plain, want, atol=1e-4)
        merged = back.merge_and_unload()(ids).logits
    torch.testing.assert_close(merged, want, atol=1e-4, rtol=1e-4)
