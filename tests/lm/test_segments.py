"""Rows in segments: the row's gradient if it is kept, and a written-out loop if it is cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")

from tests.lm.runs import Recorder, assert_same, make_ill, plan, write_text
from transformers import TrainingArguments

import recollect as rc
from recollect.lm import RecollectForCausalLM, cache_of
from recollect.lm.model.loss import IGNORE_INDEX
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.segments import count_targets, split_into_segments
from recollect.lm.training.train import train
from recollect.lm.training.trainer import RecollectTrainer

W, B, T = 13, 2, 11


def model(name: str = "gated_delta_net") -> RecollectForCausalLM:
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        name,
        vocab_size=W,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        loss_chunk_size=4,
    )
    return RecollectForCausalLM(config).double().train()


def batch(starts: tuple[tuple[int, ...], ...] = ()) -> dict[str, Tensor]:
    """Return two rows; documents begin at ``starts`` of each row."""
    ids = torch.randint(W, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    result = {"input_ids": ids, "labels": labels}
    if starts:
        for r, row in enumerate(starts):
            labels[r, list(row)] = IGNORE_INDEX
        flat = [r * T + s for r, row in enumerate(starts) for s in row]
        result["cu_seqlens"] = torch.tensor([*flat, B * T])
    return result


def document_loss(net: RecollectForCausalLM, inputs: dict[str, Tensor]) -> Tensor:
    """Return the loss of the separate documents, from logits."""
    ends = inputs.get("cu_seqlens", torch.arange(0, B * T + 1, T)).tolist()
    flat, losses = inputs["input_ids"].flatten(), []
    for begin, end in itertools.pairwise(ends):
        ids = flat[begin:end][None]
        logits = net(ids, use_cache=False).logits[0, :-1]
        losses.append(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return torch.stack(losses).sum() / int(count_targets(inputs))


def stepped(
    net: RecollectForCausalLM, inputs: dict[str, Tensor], segments: int, out: Path, **how: Any
) -> Tensor:
    """Return the loss of a Trainer's step; its gradients are stored in the model."""
    arguments = TrainingArguments(
        output_dir=str(out), use_cpu=True, report_to=[], disable_tqdm=True, **how
    )
    data = {"segments": segments, "segment_gradient": "kept"}
    trainer = RecollectTrainer(plan(out, out, data=data), net, arguments)
    trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    return trainer.training_step(net, inputs, None)


def gradients(net: RecollectForCausalLM) -> dict[str, Tensor]:
    result = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in net.named_parameters()
    }
    net.zero_grad()
    return result


DOCUMENTS = {
    "one each": (),
    "inside": ((0, 2, 7), (0, 5)),
    "at borders": ((0, 4), (0, 4, 8)),  # first tokens of pieces of 4
    "of one token": ((0, 3, 4, 5), (0, 10)),
}


@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("segments", [2, 3, 11])
def test_kept_gradient_is_that_of_the_row(
    segments: int, starts: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    net, inputs = model(), batch(starts)
    expected = document_loss(net, inputs)
    expected.backward()
    full = gradients(net)
    loss = stepped(net, inputs, segments, tmp_path)
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradients(net), full, atol=1e-10, rtol=1e-8)


# Learned initial memories, momentum and a convolution, a window, exact least squares, a complex
# decay, and a scalar state: all parts continue and restart.
@pytest.mark.parametrize(
    "name", ["titans", "sliding_window_attention", "rls", "mamba2", "rwkv7", "lru", "atlas"]
)
def test_kept_gradient_for_every_state(name: str, tmp_path: Path) -> None:
    net, inputs = model(name), batch(DOCUMENTS["inside"])
    expected = document_loss(net, inputs)
    expected.backward()
    full = gradients(net)
    loss = stepped(net, inputs, 3, tmp_path)
    torch.testing.assert_close(loss, expected.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradients(net), full, atol=1e-6, rtol=1e-6)


def test_cut_gradient_equals_a_loop() -> None:
    net, inputs = model("titans"), batch()
    items, cache = B * (T - 1), None
    ids = inputs["input_ids"]
    for begin, end in ((0, 4), (4, 8), (8, T)):
        out = net(ids[:, begin:end], cache=cache, use_cache=True)
        requested = ids[:, begin + 1 : end + 1]  # also the next piece's first token
        logits = out.logits[:, : requested.shape[1]]
        total = functional.cross_entropy(logits.flatten(0, 1), requested.flatten(), reduction="sum")
        (total / items).backward()
        cache = cache_of(out).detach()
    expected = gradients(net)
    states = None
    for segment in split_into_segments(inputs, 3):
        out = net(**segment.forward_kwargs(net, states), num_items_in_batch=count_targets(inputs))
        out.loss.backward()
        states = cache_of(out).detach()
    result = gradients(net)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-9)
    document_loss(net, inputs).backward()
    full = gradients(net)
    assert any((full[n] - result[n]).abs().max() > 1e-4 for n in full)  # something was cut


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


def test_run_in_segments_equals_the_run(text: Path, tmp_path: Path) -> None:
    share = {"heldout_share": 0.1}
    full = train(plan(text, tmp_path / "whole", data=share))
    segmented = train(
        plan(text, tmp_path / "kept", data={**share, "segments": 3, "segment_gradient": "kept"})
    )
    one, two = tmp_path / "whole" / "model", tmp_path / "kept" / "model"
    assert_same(one, two)
    assert segmented.heldout == pytest.approx(full.heldout, abs=1e-5)
    assert segmented.loss == pytest.approx(cast(float, full.loss), abs=1e-5)


def test_cut_run_has_an_equal_loss_and_another_gradient(text: Path, tmp_path: Path) -> None:
    events = Recorder()
    share, single_step = {"heldout_share": 0.1}, {"steps": 1, "warmup": 0.0}
    cut = train(
        plan(text, tmp_path / "cut", data={**share, "segments": 4}, optimizer=single_step),
        observer=events,
    )
    assert "each row in 4 segments" in events.summaries[0]["step"]
    full = train(plan(text, tmp_path / "whole", data=share, optimizer=single_step))
    assert cut.loss == pytest.approx(cast(float, full.loss), abs=1e-6)
    assert cut.heldout == pytest.approx(full.heldout, abs=0.05)
    assert cut.heldout != full.heldout


class Ill(RecollectTrainer):
    """The output of a module is infinite from the sixth segment on, the second of step 2."""

    def __init__(
        self, plan: TrainPlan, model: RecollectForCausalLM, *args: Any, **more: Any
    ) -> None:
        make_ill(model.get_submodule("model.blocks.0.mlp.down"), 5, backward=False)
        super().__init__(plan, model, *args, **more)


@pytest.mark.slow
def test_divergence_is_detected_in_segments(text: Path, tmp_path: Path) -> None:
    run = plan(text, tmp_path / "run", data={"segments": 4})
    with pytest.raises(rc.lm.Diverged, match=r"step 2 .*layer 0, in model\.blocks\.0\.mlp\.down"):
        train(run, trainer_class=Ill)


def test_unsupported_models_are_refused(text: Path, tmp_path: Path) -> None:
    grows = plan(
        text, tmp_path / "run", model={"recipe": "softmax_attention"}, data={"segments": 2}
    )
    with pytest.raises(ValueError, match="softmax_attention grows with the text"):
        train(grows)
    with pytest.raises(ValueError, match="segments = 64 exceeds the 32 tokens"):
        plan(text, tmp_path / "run", data={"segments": 64})
    with pytest.raises(ValueError, match="needs at least two segments"):
        plan(text, tmp_path / "run", data={"segment_gradient": "kept"})
