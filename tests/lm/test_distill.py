"""`distill`: gates from attention, steps that follow a teacher, resuming, and refusals."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from tests.lm.runs import Recorder, weights
from transformers import LlamaConfig, LlamaForCausalLM

import recollect as rc
from recollect.lm.data.rows import PackedRow, collate, pad_documents
from recollect.lm.distillation.calibrate import attention_statistics, calibrate
from recollect.lm.distillation.measure import continuations
from recollect.lm.distillation.trainers import LayerMatchingTrainer, LogitMatchingTrainer
from recollect.lm.training.train import train
from recollect.lm.training.trainer import RecollectTrainer
from recollect.report.lock import folder_lock

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")

STEPS = {"match_layers": 3, "match_logits": 3, "fine_tune": 3}


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distill")
    llama().save_pretrained(path / "teacher")
    lines = [f"key {i} has the value {(7 * i) % 50}" for i in range(60)]
    (path / "text.txt").write_text("\n".join(lines))
    return path


def plan(folder: Path, out: Path, **changes: Any) -> rc.lm.DistillPlan:
    values: dict[str, Any] = {
        "teacher": str(folder / "teacher"),
        "recipe": "gated_delta_net",
        "out": str(out),
        "data": {"train": str(folder / "text.txt"), "separator": "\n", "context": 48},
        "steps": STEPS,
        "optimizer": {"batch": 2},
        "run": {"save_every": 2, "device": "cpu", "log_every": 1},
    }
    return rc.lm.DistillPlan(**{**values, **changes})


def packed(*lengths: int) -> dict[str, Tensor]:
    """A batch of one row, with documents of these lengths."""
    starts = tuple(itertools.accumulate(lengths[:-1], initial=0))
    row = PackedRow(tokens=np.arange(1, 1 + sum(lengths), dtype=np.int32), starts=starts)
    return collate([row], reset_memory=True)


def test_documents_of_similar_lengths_are_padded_together() -> None:
    first, second = pad_documents(packed(4, 1, 2, 3))
    ignored = -100
    assert first["input_ids"].tolist() == [[1, 2, 3, 4], [8, 9, 10, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert first["labels"].tolist() == [[ignored, 2, 3, 4], [ignored, 9, 10, ignored]]
    assert second["input_ids"].tolist() == [[6, 7]]  # token 5 predicts nothing


def test_padding_at_most_doubles_the_tokens() -> None:
    batches = pad_documents(packed(2048, *[2] * 500, *range(2, 40)))
    assert sum(batch["input_ids"].numel() for batch in batches) < 2 * (2048 + 1000 + sum(range(40)))


def test_prompts_are_the_first_documents_of_the_rows() -> None:
    """32 documents of alternating lengths, and a row of one document."""
    prompts = continuations(llama(), [packed(*[5, 9] * 18)])
    assert [prompt.shape for prompt, _ in prompts] == [(16, 3), (16, 5)]
    assert prompts[1][0][:2].tolist() == [[*range(6, 11)], [*range(20, 25)]]
    ((prompt, continuation),) = continuations(llama(), [{"input_ids": torch.arange(13)[None]}])
    assert prompt.tolist() == [[*range(7)]] and continuation.shape == (1, 6)


def attention_loop(
    model: LlamaForCausalLM, ids: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Mean distances ``[layers, H]`` and writes ``[layers, N, H]``, query by query."""
    model.set_attn_implementation("eager")
    attentions = [
        model(ids[row : row + 1, :n], output_attentions=True).attentions
        for row, n in enumerate(lengths)
    ]
    distances, writes = [], []
    for layer in range(model.config.num_hidden_layers):
        sums, count, received = torch.zeros(2), 0, []
        for p in (x[layer][0] for x in attentions):  # [4, T, T]; two queries share a memory
            for t in range(p.shape[1]):
                for head in range(4):
                    sums[head // 2] += sum(p[head, t, s] * (t - s) for s in range(t + 1)) / 2
                count += 1
            pairs = (p[0::2] + p[1::2]) / 2
            received += [
                torch.stack([max(pairs[h, t, s] for t in range(s, p.shape[1])) for h in range(2)])
                for s in range(p.shape[1])
            ]
        distances.append(sums / count)
        writes.append(torch.stack(received))
    return torch.stack(distances), torch.stack(writes)


def test_statistics_equal_a_loop_over_queries() -> None:
    model, lengths = llama(), [9, 5]
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        statistics = attention_statistics(model, {"input_ids": ids, "attention_mask": mask.long()})
        distances, writes = attention_loop(model, ids, lengths)
    assert list(statistics) == [0, 1]
    for layer in (0, 1):
        torch.testing.assert_close(statistics[layer].mean_distance, distances[layer])
        torch.testing.assert_close(statistics[layer].write, writes[layer])
        assert statistics[layer].tokens.shape == (14, 16)
        assert statistics[layer].outputs.shape == (14, 4, 4)


@pytest.mark.parametrize("recipe", ["gated_delta_net", "gla"])
def test_a_decay_reads_tokens_of_the_age_that_attention_reads(recipe: str) -> None:
    """Σ_n n αⁿ / Σ_n αⁿ = d, of the mean over channels if a recipe has a decay for each."""
    model = llama()
    batch = {"input_ids": torch.randint(0, 256, (4, 32))}
    statistics = attention_statistics(model, batch)
    report = rc.lm.replace_attention(model, recipe)
    module: Any = model.get_submodule(report.layers[0].name)
    changed = calibrate(module.layer, statistics[0], copied=True)
    gate = next(g for g in module.layer.gates.values() if getattr(g, "is_log", False))
    log_alpha = gate.activation(gate.bias.detach().double())
    mean = -(-log_alpha).log().reshape(2, -1).mean(1).exp()
    n = torch.arange(20_000, dtype=torch.float64)
    weight = (mean[:, None] * n).exp()  # [H, ages]
    age = (weight * n).sum(1) / weight.sum(1)
    torch.testing.assert_close(age, statistics[0].mean_distance.double(), rtol=1e-4, atol=0)
    assert any("decay" in name for name in changed)


def test_output_gates_have_the_size_of_the_outputs_of_heads() -> None:
    """The fit recovers sizes whose inverse under silu is linear in the token."""
    model = llama()
    statistics = attention_statistics(model, {"input_ids": torch.randint(0, 256, (8, 24))})[0]
    u = 1.5 + 0.05 * torch.randn(192, 4)
    size = torch.nn.functional.silu(u)
    outputs = size[..., None] * torch.tensor([1.0, -1.0, 2.0, 1.0])
    tokens = torch.cat([u, torch.ones(192, 1), torch.randn(192, 11)], 1)
    statistics = replace(statistics, outputs=outputs, tokens=tokens)
    report = rc.lm.replace_attention(model, "gated_delta_net")
    layer = model.get_submodule(report.layers[0].name).layer
    calibrate(layer, statistics, copied=True)
    gate = torch.nn.functional.silu(tokens @ layer.output_gate.weight.T).view(192, 4, 4)
    product = gate * layer.norm.weight
    torch.testing.assert_close(product, outputs.abs(), rtol=0.1, atol=0.05)


def test_a_layer_without_those_gates_is_left_as_it_is() -> None:
    model = llama()
    statistics = attention_statistics(model, {"input_ids": torch.randint(0, 256, (2, 8))})
    recipe = rc.Recipe()
    options = rc.LayerOptions(output_norm="none", output_gate="none", conv_size=0)
    report = rc.lm.replace_attention(model, (recipe, options))
    layer = model.get_submodule(report.layers[0].name).layer
    initial = {name: x.clone() for name, x in layer.named_parameters()}
    changed = calibrate(layer, statistics[0], copied=True)
    assert {name.partition(".")[0] for name in changed} <= {"gates"}
    for name, x in layer.named_parameters():
        assert torch.equal(x, initial[name]) or name.startswith("gates.lr"), name


@pytest.mark.parametrize(
    "options",
    [rc.LayerOptions(output_gate_rank=2), rc.LayerOptions(output_gate="sigmoid")],
    ids=["low rank", "sigmoid"],
)
def test_output_gates_of_another_form_keep_their_initial_values(options: rc.LayerOptions) -> None:
    model = llama()
    statistics = attention_statistics(model, {"input_ids": torch.randint(0, 256, (2, 8))})
    recipe = rc.zoo.get("gated_delta_net").recipe
    report = rc.lm.replace_attention(model, (recipe, options))
    layer = model.get_submodule(report.layers[0].name).layer
    initial = layer.output_gate.weight.clone()
    assert "output_gate" not in calibrate(layer, statistics[0], copied=True)
    assert torch.equal(layer.output_gate.weight, initial)


def test_statistics_of_many_rows_equal_those_of_each_row() -> None:
    model, ids = llama(), torch.randint(0, 256, (6, 8))
    joint = attention_statistics(model, {"input_ids": ids})[1]
    rows = [attention_statistics(model, {"input_ids": ids[i : i + 1]})[1] for i in range(6)]
    torch.testing.assert_close(joint.write, torch.cat([row.write for row in rows]))
    means = torch.stack([row.mean_distance for row in rows])
    torch.testing.assert_close(joint.mean_distance, means.mean(0))


def test_the_head_of_a_tied_decoder_is_counted() -> None:
    from recollect.lm.memory_estimate.flops import decoder_flops

    untied = llama()
    tied = LlamaForCausalLM(LlamaConfig(**{**untied.config.to_dict(), "tie_word_embeddings": True}))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert decoder_flops(tied) == decoder_flops(untied)


def test_the_fraction_of_no_loss_is_nan() -> None:
    stage = rc.lm.DistillStage(name="swap", steps=0, loss=(2.0, 2.0), agreement=(1.0, 1.0))
    result = rc.lm.Distilled(model=None, folder=Path(), layers=(0,), damage={}, stages=(stage,))
    assert math.isnan(result.recovered) and "nan" not in str(result)


def test_without_calibration_no_such_step_is_recorded(folder: Path, tmp_path: Path) -> None:
    steps = dict.fromkeys(STEPS, 0)
    settings = plan(folder, tmp_path / "out", calibrate=False, steps=steps)
    result = rc.lm.distill(settings)
    assert [stage.name for stage in result.stages] == ["swap"]
    assert rc.lm.distill(settings, resume=True).stages == result.stages


def test_a_folder_in_use_is_refused(folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as other, folder_lock(tmp_path):
        future = other.submit(rc.lm.distill, plan(folder, tmp_path))
        with pytest.raises(ValueError, match="belongs to another run"):
            future.result()


def distilled_model(folder: Path, out: Path, **changes: Any) -> rc.lm.Distilled:
    return rc.lm.distill(plan(folder, out, **changes))


@pytest.fixture(scope="module")
def result(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> rc.lm.Distilled:
    return distilled_model(folder, tmp_path_factory.mktemp("whole") / "out")


def test_every_step_is_recorded_with_losses_before_and_after(
    result: rc.lm.Distilled, folder: Path
) -> None:
    assert [stage.name for stage in result.stages] == ["swap", "calibrate", *STEPS]
    for stage, following in itertools.pairwise(result.stages):
        assert stage.loss[1] == following.loss[0]
        assert stage.agreement[1] == following.agreement[0]
    assert result.stages[0].agreement[0] == 1.0
    saved = json.loads((result.folder.parent / "distill.json").read_text())
    assert [stage["loss"] for stage in saved["stages"]] == [list(s.loss) for s in result.stages]
    # The last loss is that of the saved model on the held-out documents, one by one.
    loaded = result.model
    text = (folder / "text.txt").read_text().split("\n")
    tokens = [[*line.encode(), 256] for line in text]
    flat = [token for line in tokens for token in line]
    starts = {sum(map(len, tokens[:i])) for i in range(len(tokens))}
    total, count = 0.0, 0
    for row in range(9, len(flat) // 48, 10):  # every tenth row is held out
        cuts = sorted(
            {48 * row, 48 * row + 48} | {s for s in starts if 48 * row < s < 48 * row + 48}
        )
        for start, stop in itertools.pairwise(cuts):
            ids = torch.tensor(flat[start:stop])[None]
            if stop - start > 1:
                with torch.no_grad():
                    logits = loaded(ids).logits[0, :-1]
                total += float(
                    torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                )
                count += stop - start - 1
    assert result.stages[-1].loss[1] == pytest.approx(total / count, rel=1e-5)
    assert "of the lost loss recovered" in str(result)


@pytest.mark.parametrize(("stage", "step"), [(0, 2), (1, 1), (2, 3)])
def test_resumed_distillation_equals_an_uninterrupted_one(
    folder: Path, tmp_path: Path, result: rc.lm.Distilled, stage: int, step: int
) -> None:
    class Stop(Recorder):
        def on_progress(self, progress: Any) -> None:
            if len(self.summaries) == stage + 1 and progress.step == step:
                raise KeyboardInterrupt

    stopped = plan(folder, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        rc.lm.distill(stopped, observer=Stop())
    resumed = rc.lm.distill(stopped, resume=True)
    expected, actual = weights(result.folder), weights(resumed.folder)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert resumed.stages == result.stages


def test_matched_layers_change_nothing_else(result: rc.lm.Distilled) -> None:
    out = result.folder.parent
    start, trained = weights(out / "swapped"), weights(out / "match_layers" / "model")
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed and all(".self_attn.layer." in name for name in changed)


def losses(folder: Path, cls: Any, tmp_path: Path) -> tuple[Any, dict[str, Tensor], Any]:
    """A trainer with its teacher, a padded batch, and the loss of that batch."""
    student = llama()
    rc.lm.replace_attention(student, "gated_delta_net", layers=[1])
    student.save_pretrained(tmp_path / "start")
    from recollect.lm.data.tokenizers import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / "start")
    trainers: list[Any] = []

    def trainer(*args: Any, **kwargs: Any) -> Any:
        teacher = {} if cls is RecollectTrainer else {"teacher": llama()}
        trainers.append(cls(*args, **teacher, **kwargs))
        return trainers[0]

    tables = plan(folder, tmp_path, steps={"match_layers": 1}).train_tables(
        "match_layers", start=tmp_path / "start"
    )
    train(rc.lm.TrainPlan.from_dict(tables), trainer_class=trainer)
    (batch,) = pad_documents(packed(4, 3))
    model = trainers[0].model.train()
    return trainers[0], batch, trainers[0].compute_loss(model, batch)


def test_logits_are_compared_token_by_token(folder: Path, tmp_path: Path) -> None:
    trainer, batch, loss = losses(folder, LogitMatchingTrainer, tmp_path)
    total, count = 0.0, 0
    for row, length in ((0, 4), (1, 3)):
        ids = batch["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            p, q = (m(ids).logits[0, :-1].softmax(-1) for m in (trainer.teacher, trainer.model))
        total += float((p * (p / q).log()).sum())
        count += length - 1
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


def test_documents_of_other_lengths_are_parts_of_a_step(folder: Path, tmp_path: Path) -> None:
    trainer, _, _ = losses(folder, LogitMatchingTrainer, tmp_path)
    model, batch, ids, sizes = trainer.model, packed(6, 2), torch.arange(1, 9), []
    count = torch.tensor(12)  # two batches of six targets are a step
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model.zero_grad()
    loss = trainer.training_step(model, batch, count)
    hook.remove()
    assert sizes == [(1, 6), (1, 2)]
    grads = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    expected, entropy = torch.zeros(()), torch.zeros(())
    for document in (ids[None, :6], ids[None, 6:]):
        p, q = (m(document).logits[0, :-1].log_softmax(-1) for m in (trainer.teacher, model))
        expected = expected + (p.exp() * (p - q)).sum() / count
        entropy = entropy - q.gather(1, document[0, 1:, None]).sum() / 6
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    others = [weight.grad for weight in model.parameters() if weight.grad is not None]
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-3, atol=1e-6)
    model.eval()
    with torch.no_grad():  # the usual loss, as on held-out rows
        assert float(sum(trainer.batch_losses(batch))) == pytest.approx(entropy.item(), rel=1e-4)


@pytest.mark.parametrize("trainer_class", [RecollectTrainer, LogitMatchingTrainer])
@pytest.mark.parametrize("count", [12, 0, None])
def test_documents_without_a_target_have_no_loss(
    folder: Path, tmp_path: Path, trainer_class: type[RecollectTrainer], count: int | None
) -> None:
    """Documents of one token in a step with other targets, and a step of such documents alone."""
    trainer, _, _ = losses(folder, trainer_class, tmp_path)
    model, batch = trainer.model, packed(1, 1, 1)
    model.zero_grad()
    num_items = None if count is None else torch.tensor(count)
    assert trainer.training_step(model, batch, num_items).item() == 0
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert grads and all((grad == 0).all() for grad in grads)
    model.eval()
    with torch.no_grad():  # as on held-out rows
        assert float(sum(trainer.batch_losses(batch))) == 0


def test_layers_are_compared_from_the_input_of_the_teacher(folder: Path, tmp_path: Path) -> None:
    trainer, batch, loss = losses(folder, LayerMatchingTrainer, tmp_path)
    teacher, error, size = trainer.teacher, 0.0, 0.0
    for row, length in ((0, 4), (1, 3)):
        ids = batch["input_ids"][row : row + 1, :length]
        states = teacher(ids, output_hidden_states=True).hidden_states
        block = teacher.model.layers[1]
        x = block.input_layernorm(states[1])
        angles = teacher.model.rotary_emb(x, torch.arange(length)[None])
        target = block.self_attn(x, position_embeddings=angles, attention_mask=None)[0]
        y = trainer.model.model.layers[1].self_attn(x)[0]
        error += (y - target).square().sum().item()
        size += target.square().sum().item()
    assert loss.item() == pytest.approx(error / size, rel=1e-4)


def test_the_layers_that_cost_most_keep_their_attention(folder: Path, tmp_path: Path) -> None:
    steps = {"match_layers": 1, "match_logits": 0, "fine_tune": 0}
    result = distilled_model(folder, tmp_path / "out", keep_attention=1, steps=steps)
    assert set(result.damage) == {0, 1}
    assert result.layers == (min(result.damage, key=lambda index: result.damage[index]),)
    names = [name for name, _ in result.model.named_modules() if name.endswith("self_attn.layer")]
    assert names == [f"model.layers.{result.layers[0]}.self_attn.layer"]
    assert [stage.name for stage in result.stages] == ["swap", "calibrate", "match_layers"]


def test_a_decoder_with_replaced_layers_can_be_trained(folder: Path, tmp_path: Path) -> None:
    from recollect.lm.data.tokenizers import byte_tokenizer

    student = llama()
    rc.lm.replace_attention(student, "gated_delta_net", layers=[0])
    student.save_pretrained(tmp_path / "start")
    byte_tokenizer().save_pretrained(tmp_path / "start")
    tables: dict[str, Any] = {
        "model": {"start": str(tmp_path / "start")},
        "data": {"train": str(folder / "text.txt"), "separator": "\n", "context": 48},
        "optimizer": {"steps": 4, "batch": 2},
        "run": {"out": str(tmp_path / "run"), "device": "cpu"},
    }
    recorder = Recorder()
    result = rc.lm.train(rc.lm.TrainPlan.from_dict(tables), observer=recorder)
    assert recorder.summaries[0]["model"] == "layers: 1 × memory, 1 × attention; width 16"
    assert result.loss is not None and result.loss < math.log(257) + 0.5
    tables["data"]["segments"] = 2
    tables["run"]["out"] = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"segments = 2 needs a model of recollect"):
        rc.lm.train(rc.lm.TrainPlan.from_dict(tables))


def test_plans_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="distill takes a DistillPlan, not dict"):
        rc.lm.distill({})  # type: ignore[arg-type]


def test_refusals(folder: Path, tmp_path: Path, result: rc.lm.Distilled) -> None:
    out = result.folder.parent
    with pytest.raises(ValueError, match="no step 'tune'"):
        plan(folder, tmp_path, steps={"tune": 3})
    with pytest.raises(ValueError, match="must be an integer of at least 0"):
        plan(folder, tmp_path, steps={"fine_tune": -1})
    with pytest.raises(ValueError, match="has the key 'lr'"):
        plan(folder, tmp_path, optimizer={"lr": 1.0})
    with pytest.raises(ValueError, match="already contains a distillation"):
        rc.lm.distill(plan(folder, out))
    with pytest.raises(ValueError, match="started with another value of steps"):
        rc.lm.distill(plan(folder, out, steps={"fine_tune": 9}), resume=True)
    with pytest.raises(ValueError, match="no distillation to resume"):
        rc.lm.distill(plan(folder, tmp_path / "new"), resume=True)
    for count in (2, 3):
        with pytest.raises(ValueError, match="keeps all of 2 layers"):
            distilled_model(folder, tmp_path / "new" / "kept", keep_attention=count)
    with pytest.raises(ValueError, match="contains the original model: name another folder"):
        distilled_model(folder, folder / "teacher")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="cannot be written to"):
        distilled_model(folder, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # no empty folders


@pytest.mark.slow
def test_matching_recovers_loss_that_fine_tuning_does_not(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "results" / "distill" / "recover.py"
    spec = importlib.util.spec_from_file_location("recover", path)
    assert spec is not None and spec.loader is not None
    recover: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recover)
    plans = recover.recover(tmp_path, 0, ["calibrate, match, fine-tune", "fine-tune"])["plans"]
    matched, fine_tuned = plans["calibrate, match, fine-tune"], plans["fine-tune"]

    def recovered(plan: dict[str, Any]) -> float:
        (teacher, swapped), last = plan["stages"][0]["loss"], plan["stages"][-1]["loss"][1]
        return (swapped - last) / (swapped - teacher)

    assert recovered(matched) >= 0.9 and recovered(fine_tuned) < 0.85
    # Tokens that the text determines, and greedy text: the loss of all tokens hides the difference.
    assert matched["recovered"] >= 0.8 and fine_tuned["recovered"] < 0.7
    assert matched["stages"][-1]["agreement"][1] >= 0.25
    assert fine_tuned["stages"][-1]["agreement"][1] < 0.15
