"""The page of a model's memories: numbers of `rc.diagnose`, escaped names, and a browser."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.page.browser import Browser, opened

pytest.importorskip("transformers")
pytest.importorskip("typer")

from tests.lm.adoption.models import make_model
from typer.testing import CliRunner

import recollect as rc
from recollect.cli import build
from recollect.lm.data.tokenizers import byte_tokenizer
from recollect.page.look import MAX_BYTES, render_look

TEXT = "the key and the key </script><img src=x onerror=alert(1)>"
IDS = list(TEXT.encode())


def own_model(recipe: str = "gated_delta_net") -> Any:
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        recipe, vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = rc.lm.RecollectForCausalLM(config)
    ids = torch.tensor([IDS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def adopted_model() -> Any:
    torch.manual_seed(0)
    model = make_model("qwen3_5_text", vocab_size=257)
    assert rc.lm.adopt(model).adopted
    return model.eval()


def read(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    values: dict[str, Any] = json.loads(data)
    return values


@pytest.mark.parametrize("make", [own_model, adopted_model])
def test_numbers_equal_a_diagnosis(make: Any) -> None:
    model = make()
    page = render_look(model, IDS, tokens=[*TEXT])
    data, expected = read(page), rc.diagnose(model, IDS).layers
    assert [layer["name"] for layer in data["layers"]] == list(expected)
    assert data["tokens"] == [*TEXT] and len(page.encode()) < MAX_BYTES
    for layer in data["layers"]:
        diagnosis = expected[layer["name"]]
        curves = {"surprise": diagnosis.error, "effective step": diagnosis.step}
        curves["half-life of the decay, tokens"] = diagnosis.half_life
        for name, curve in curves.items():
            assert curve is not None
            shown = torch.tensor(layer["curves"][name])
            torch.testing.assert_close(shown, curve, rtol=1e-4, atol=1e-7)
        for name, norms in diagnosis.memory.items():
            shown = torch.tensor(layer["maps"][f"norm of {name}"]["values"])
            torch.testing.assert_close(shown, norms, rtol=1e-4, atol=1e-7)
        for name, rank in diagnosis.rank.items():
            entry = layer["maps"][f"effective rank of {name}"]
            torch.testing.assert_close(torch.tensor(entry["values"]), rank, rtol=1e-4, atol=1e-7)
            assert entry["capacity"] == diagnosis.max_rank[name]


def test_answers_equal_a_trace() -> None:
    model = own_model()
    layer = read(render_look(model, IDS))["layers"][1]
    T, heads = len(IDS), layer["heads"]
    data = torch.tensor(list(base64.b64decode(layer["answers"]["data"]))).view(T, T, heads)
    expected = rc.trace(model, IDS, layer=1).cosine_similarity
    assert torch.equal(data == 0, expected.isnan())
    shown = (data - 128) / 127
    torch.testing.assert_close(shown[data != 0], expected[data != 0], rtol=0, atol=0.5 / 127 + 1e-6)


def test_a_title_may_contain_a_placeholder() -> None:
    page = render_look(own_model(), IDS, title="/* data */")
    assert "<title>/* data */" in page and page.count('"tokens":') == 1


def test_names_and_tokens_are_escaped() -> None:
    title = "<b>model</b> & </title><script>alert(1)</script>"
    page = render_look(own_model(), IDS, tokens=[*TEXT[:-1], "</script><script>x"], title=title)
    assert "<b>model" not in page and "alert(1)</script>" not in page
    assert page.count("</script>") == 2  # of the data and of the script
    assert read(page)["tokens"][-1] == "</script><script>x"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_memories_that_cannot_be_read_are_refused() -> None:
    model = own_model("gated_slot_attention")
    with pytest.raises(rc.RecipeError, match="no memory of RecollectForCausalLM"):
        render_look(model, IDS)
    with pytest.raises(ValueError, match="at least one token"):
        render_look(own_model(), [])


def test_errors() -> None:
    model = own_model()
    with pytest.raises(ValueError, match="at most 256 token ids"):
        render_look(model, [1] * 257)
    with pytest.raises(ValueError, match="must be 3 words, not 2"):
        render_look(model, [1, 2, 3], tokens=["a", "b"])
    with pytest.raises(rc.RecipeError):
        render_look(torch.nn.Linear(2, 2), [1, 2])


@pytest.mark.parametrize("make", [own_model, adopted_model])
def test_the_command(make: Any, tmp_path: Path) -> None:
    if make is own_model:
        own_model().save_pretrained(tmp_path / "model")
    else:
        make_model("qwen3_5_text", vocab_size=257).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "page.html"
    command = ["look", str(tmp_path / "model"), "the <b> key", "--out", str(out)]
    result = CliRunner().invoke(build(), command)
    assert result.exit_code == 0, result.output
    assert read(out.read_text())["tokens"] == [
        "t",
        "h",
        "e",
        "␣",
        "<",
        "b",
        ">",
        "␣",
        "k",
        "e",
        "y",
    ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened(tmp_path_factory.mktemp("profile"))


def test_browser_shows_the_page(browser: Browser, tmp_path: Path) -> None:
    from recollect.page import look

    model = own_model()
    path = look(model, IDS, tmp_path / "look.html", tokens=[*TEXT], title="<i>a model</i>")
    expected = rc.diagnose(model, IDS).layers["model.blocks.1.layer"]
    for width in (1280, 390):
        for dark in (False, True):
            browser.open(path, width=width, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert all(
                x.startswith(("file:", "data:", "about:")) for x in browser.requested_addresses()
            )
            assert browser.run("document.querySelector('h1').textContent") == "<i>a model</i>"
            assert browser.run("document.querySelectorAll('img, h1 i').length") == 0
    for name in ("layer", "head"):
        browser.run(f"document.getElementById('{name}').value = 1")
        browser.run(f"document.getElementById('{name}').dispatchEvent(new Event('change'))")
    browser.run("document.querySelectorAll('.token')[5].click()")
    names = browser.run("[...document.querySelectorAll('#values dt')].map((x) => x.textContent)")
    values = browser.run("[...document.querySelectorAll('#values dd')].map((x) => x.textContent)")
    shown = dict(zip(names, values, strict=True))
    assert expected.error is not None
    assert float(shown["surprise"]) == pytest.approx(float(expected.error[5, 1]), rel=1e-2)
    rank = float(shown["effective rank of W"].removesuffix(" of 16"))
    assert rank == pytest.approx(float(expected.rank["W"][6, 1]), rel=1e-2)
    assert browser.run("document.querySelectorAll('#charts svg').length") == 6
    paths = "[...document.querySelectorAll('#charts .own')].map((x) => x.getAttribute('d').length)"
    assert min(browser.run(paths)) > 40
