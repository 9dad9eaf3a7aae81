"""One sentence for a diverged run names the step, the rate, the layer and the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")

from tests.lm.runs import make_ill, plan, write_text
from tests.misuse.sentences import digests, is_one_sentence
from typer.testing import CliRunner

from recollect.cli import build
from recollect.lm import Diverged, RecollectConfig, RecollectForCausalLM, TrainPlan
from recollect.lm.training import train
from recollect.lm.training.divergence import find_origin

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")

Harm = Callable[[RecollectForCausalLM], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "mine.jsonl")


@pytest.fixture
def harm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Harm], None]:
    """Apply a function to every model of a run after it is built."""

    def planted(how: Harm) -> None:
        built = RecollectForCausalLM.__init__

        def init(self: RecollectForCausalLM, config: RecollectConfig) -> None:
            built(self, config)
            if self.device.type != "meta":  # a meta model is only counted
                how(self)

        monkeypatch.setattr(RecollectForCausalLM, "__init__", init)

    return planted


def ill_mlp(num_calls: int, *, backward: bool) -> Harm:
    def harmed(model: RecollectForCausalLM) -> None:
        make_ill(model.get_submodule("model.blocks.1.mlp.down"), num_calls, backward=backward)

    return harmed


@pytest.mark.parametrize(
    ("accumulate", "backward"),
    [
        (1, False),
        (2, True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(1, True), (2, False)]),
    ],
)
def test_diverged_run_names_the_layer(
    accumulate: int, backward: bool, text: Path, tmp_path: Path, harm: Callable[[Harm], None]
) -> None:
    """In the second layer at step 4 (the second of accumulated batches), by a finite check."""
    harm(ill_mlp(4 * accumulate - 1, backward=backward))
    run = plan(
        text,
        tmp_path,
        model={"depth": 2},
        optimizer={"accumulate": accumulate, "warmup": 0.5, "lr": 0.01},
    )
    with pytest.raises(Diverged) as caught:
        train(run)
    error = caught.value
    assert error.step == 4
    assert error.lr == pytest.approx(0.01)  # the peak, after a warm-up of three steps
    assert error.checkpoint == tmp_path / "checkpoint-2"
    cause = "the output of layer 1, in model.blocks.1.mlp.down, is not finite"
    if backward:
        cause = "a gradient is not finite"
    message = str(error).replace(str(tmp_path), "runs/mine")
    is_one_sentence(message)
    expected = f"training diverged at step 4 (learning rate 0.01): {cause}; "
    expected += "the last checkpoint is runs/mine/checkpoint-2: lower lr or clip in [optimizer]"
    assert message[: len(expected)] == expected
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("lr", "slip"), [(0.05, False), (50.0, True)])
def test_implausible_learning_rate_is_named(lr: float, slip: bool) -> None:
    message = str(Diverged(step=3, lr=lr, origin=None, advice="lower lr"))
    assert ("0.0001 to 0.01 are usual" in message) == slip and f"learning rate {lr:g}" in message


def test_last_checkpoint_can_start_another_run(
    text: Path, tmp_path: Path, harm: Callable[[Harm], None]
) -> None:
    """The sentence advises to use the checkpoint as [model] start of another run."""
    harm(ill_mlp(3, backward=False))
    with pytest.raises(Diverged) as caught:
        train(plan(text, tmp_path / "one", model={"depth": 2}))
    checkpoint = caught.value.checkpoint
    assert checkpoint is not None and checkpoint == tmp_path / "one" / "checkpoint-2"
    initial = digests(checkpoint)
    tables = plan(text, tmp_path / "two", optimizer={"steps": 1}).to_dict()
    tables["model"] = {"start": str(checkpoint)}
    assert train(TrainPlan.from_dict(tables)).steps == 1
    assert digests(checkpoint) == initial


def test_divergence_before_the_first_checkpoint(
    text: Path, tmp_path: Path, harm: Callable[[Harm], None]
) -> None:
    """In the first step, and before any layer, which would name its argument."""

    def harmed(model: RecollectForCausalLM) -> None:
        make_ill(model.model.embed_tokens, 0, backward=False)

    harm(harmed)
    with pytest.raises(Diverged) as caught:
        train(plan(text, tmp_path))
    message = str(caught.value)
    assert (
        "the output of the embedding (model.embed_tokens) is not finite; no checkpoint" in message
    )
    assert "q has" not in message
    assert caught.value.checkpoint is None


def test_other_errors_are_unchanged(
    text: Path, tmp_path: Path, harm: Callable[[Harm], None]
) -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not on a Sunday")

    def harmed(model: RecollectForCausalLM) -> None:
        model.model.blocks[0].mlp = Refuses()

    harm(harmed)
    with pytest.raises(ValueError, match=r"^not on a Sunday$"):
        train(plan(text, tmp_path))


def test_a_measurement_that_is_not_finite_ends_the_run(
    text: Path, tmp_path: Path, harm: Callable[[Harm], None]
) -> None:
    def harmed(model: RecollectForCausalLM) -> None:
        model.lm_head.register_forward_hook(
            lambda module, inputs, y: y if module.training else y * torch.nan
        )

    harm(harmed)
    run = plan(text, tmp_path, data={"heldout_share": 0.25}, run={"eval_every": 3})
    with pytest.raises(Diverged, match=r"the head \(lm_head\)") as caught:
        train(run)
    assert caught.value.step == 3


def test_exit_code_of_the_command(text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f"[model]\nwidth = 16\ndepth = 1\nheads = 2\n[data]\ntrain = {str(text)!r}\ncontext = 32\n"
        "[optimizer]\nsteps = 30\nbatch = 2\nlr = 100\nclip = 0\nwarmup = 0\n"
        f"[run]\nout = {str(tmp_path / 'run')!r}\nsave_every = 1\n"
    )
    result = CliRunner().invoke(build(), ["train", str(config)])
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("recollect train: training diverged at step ")
    assert "is not finite; the last checkpoint is" in last and "set clip = 1" in last


def test_a_finite_model_has_no_origin() -> None:
    torch.manual_seed(0)
    last = nn.Linear(3, 1)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), last)
    x = torch.randn(4, 3)
    assert find_origin(model, lambda: [model(x).sum()]) is None
    with torch.no_grad():
        last.weight[0, 0] = torch.nan
    result = find_origin(model, lambda: [model(x).sum()])
    assert result == "the output of 2 is not finite"


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ("mlp", "layer 0, in model.blocks.0.mlp."),
        ("layer.out", "layer 0 (gla), in model.blocks.0.layer.out,"),
    ],
)
def test_recipe_is_named_only_for_its_own_overflow(inside: str, says: str) -> None:
    """An overflow of an MLP is not attributed to the recipe of its layer."""
    torch.manual_seed(0)
    config = RecollectConfig.from_recipes(
        "gla", vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    net = RecollectForCausalLM(config)
    module = net.get_submodule(f"model.blocks.0.{inside}")
    with torch.no_grad():
        next(module.parameters()).fill_(torch.inf)
    ids = torch.arange(6)[None] % 8
    result = find_origin(net, lambda: [net(ids, labels=ids).loss])
    assert result is not None and says in result
