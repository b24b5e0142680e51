"""What `rollouts show` prints of single rollouts.

Shape suffixes (docs/glossary.md): C, K, L, N, T.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import transformers
from stored import INFO, make_rollout
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron_r3.cli import main
from megatron_r3.data.store import write_shard
from megatron_r3.replay.routes import Routes

ROLLOUTS = [make_rollout(n, seed=n, reward=n / 10, sample=n) for n in (5, 9, 12)]


@pytest.fixture
def store(tmp_path):
    recorded_T = np.ones(11, bool)
    recorded_T[[4, 6]] = False
    one = ROLLOUTS[2]
    routes = Routes.from_array(one.routes.ids_LTK, 16, recorded_T)
    response = np.isin(np.arange(12), [2, 3, 6, 7])
    logprobs = np.where(response, one.logprobs_N, 0)
    turns = replace(one, routes=routes, response_N=response, logprobs_N=logprobs)
    versions_C2 = np.array([[2, 7], [6, 9]])
    write_shard(tmp_path / "s", INFO, ROLLOUTS[:2])
    write_shard(tmp_path / "s", INFO, [replace(turns, versions_C2=versions_C2)])
    return tmp_path / "s"


def shown(capsys, *words) -> str:
    assert main(["rollouts", "show", *map(str, words)]) == 0
    return capsys.readouterr().out


def listed(tokens) -> str:
    return f"{len(tokens)} tokens: {' '.join(map(str, tokens))}"


def test_what_the_store_holds(store, capsys):
    one = ROLLOUTS[0]
    assert shown(capsys, store) == (
        f"{store}/shard-00000.safetensors: rollout 0\n"
        "  policy version: 7\n"
        "  group, sample:  0, 5\n"
        "  reward:         0.5\n"
        f"  prompt:         {listed(one.tokens_N[:2])}\n"
        f"  response:       {listed(one.tokens_N[2:])}\n"
        "  routes:         recorded for 4 of 4 tokens\n"
    )


def test_turns_versions_and_missing_routes(store, capsys):
    tokens = ROLLOUTS[2].tokens_N
    out = shown(capsys, store, 2)
    assert "policy version: 7, then [9]\n" in out
    parts = {"prompt": (0, 2), "between": (4, 6), "after response": (8, 12)}
    for name, (first, end) in parts.items():
        assert f"  {name + ':':16}{listed(tokens[first:end])}\n" in out
    assert out.count("  response: ") == 2
    assert out.endswith("recorded for 9 of 11 tokens; not for tokens 4 6\n")


def test_a_rollout_that_is_not_there(store, capsys):
    assert shown(capsys, store, 2, 1) == shown(capsys, store, 2) + shown(capsys, store, 1)
    assert main(["rollouts", "show", str(store), "0", "3"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {store}: no rollout 3: give a number from 0 to 2\n")


def test_text_where_there_is_a_tokenizer(store, tmp_path, capsys):
    assert main(["rollouts", "show", str(store), "--model", str(tmp_path)]) == 1
    assert f"error: --model {tmp_path}: there is no tokenizer" in capsys.readouterr().err
    words = {f"word{number}\x1b": number for number in range(50)}
    made = Tokenizer(WordLevel(words, unk_token="word0\x1b"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    out = shown(capsys, store, "--model", tmp_path)
    text = " ".join(f"word{number}\x1b" for number in ROLLOUTS[0].tokens_N[:2])
    assert f"  as text:        {text!r}\n" in out
