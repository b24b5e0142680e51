"""Values that no model can sample, answers of other models, and servers that change."""

import json

import numpy as np
import pytest
from engine_server import PAGES, PROMPTS, answer, command, engine, write_inputs

from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore, SamplingSettings
from tests.unit.collect.test_prompts import generate


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 6)
    return empty_folder


def changed(**fields):
    """The recorded answers with other fields in their choice."""

    def give(body):
        response = json.loads(json.dumps(answer(body)))
        choice = response["choices"][0]
        for name, change in fields.items():
            choice[name] = change(choice[name])
        return response

    return give


def with_logprob(value):
    def change(logprobs):
        return {**logprobs, "token_logprobs": [*logprobs["token_logprobs"][:-1], value]}

    return changed(logprobs=change)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (with_logprob(-9999.0), "is -9999, which vLLM sends in place of -inf"),
        (changed(token_ids=lambda ids: [*ids[:-1], 512]), "is id 512; ids go from"),
        (lambda body: {**answer(body), "model": None}, "names no model; 'served' was asked for"),
        (lambda body: {**answer(body), "model": "\x1b[2J"}, "names the model '\\x1b[2J'"),
    ],
)
def test_impossible_answers_are_refused_and_never_stored(folder, capsys, give, message):
    """Prompt 1 gets such an answer each time, the others good ones."""

    def some(body):
        return give(body) if body["prompt"] == list(PROMPTS[1]) else answer(body)

    write_inputs(folder, 3)
    with engine(answer=some) as server:
        assert main(command(server.url, 2, "--refused-retries", "1")) == 1
        assert server.asked.total() == 2 + 2 + 2 * 2
    error = capsys.readouterr().err
    assert "not stored: prompts.jsonl, line 2, sample 0" in error
    assert error.count("line 2, sample 0") <= 2  # in its own line, and at the end
    assert message in error
    assert "(2 responses refused)" in error
    assert all(line.isprintable() for line in error.splitlines())
    store = RolloutStore([folder / "store"])
    assert {*store.column("group").tolist()} == {100, 102}


@pytest.mark.parametrize("token", [512, 2**31 - 1])
def test_prompts_outside_the_vocabulary_are_refused_before_any_request(folder, capsys, token):
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": [1, 511, token]}) + "\n")
    with engine() as server:
        assert main(command(server.url, 1)) == 1
        assert not server.asked
        assert not server.pages_asked
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"error: prompts.jsonl, line 7: prompt token 2 is id {token}; ids go from 0 to 511"
    )


WHOSE = (
    "the response does not say which distribution its log-probs are of: vLLM's are of temperature "
    "1, or of the processed distribution if the server was started with --logprobs-mode "
    "processed_logprobs; with a top-k, e.g. 1000, the engine returns kept sets and log-probs over "
    "them"
)
GREEDY = (
    "the likeliest token is taken, so every log-prob of the distribution that is sampled is 0, and "
    "training could learn nothing"
)


@pytest.mark.parametrize(
    ("arguments", "what", "reason"),
    [
        (["--temperature", "0"], "temperature 0", GREEDY),
        (["--temperature", "0.7", "--top-p", "0.9"], "temperature 0.7, top_p 0.9", WHOSE),
        (["--temperature", "0.7"], "temperature 0.7", WHOSE),
    ],
)
def test_sampling_without_its_log_probs_is_refused(folder, capsys, arguments, what, reason):
    with engine() as server:
        assert main(command(server.url, 1, *arguments)) == 1
        assert not server.pages_asked
        error = capsys.readouterr().err.splitlines()
        assert error == [f"error: {what}: {reason}"]


def test_what_the_store_says_of_model_and_sampling(folder):
    with engine() as server:
        assert main(command(server.url, 1, "--max-tokens", "64")) == 0
    info = RolloutStore([folder / "store"]).info
    assert info.sampling == SamplingSettings(1.0, 1.0, 0, 0.0, 64)
    assert (info.vocab_size, info.policy_stamp, info.engine_policy) == (512, "", "")


def turned(server, after, pages):
    """A `behave` that changes the server's pages when so many answers were asked for."""

    def behave(body, nth):
        if nth and server().asked.total() == after:
            server().pages = pages
        return "ok"

    return behave


@pytest.mark.parametrize(
    ("path", "page", "message"),
    [
        (
            "/version",
            {"version": "0.31.0"},
            "its version was '0.30.0' at the start and is '0.31.0'",
        ),
        (
            "/v1/models",
            {"data": [{"id": "new"}]},
            "its model was 'served' at the start and is 'new'",
        ),
        ("/weight_info", {"weight_version": "8"}, "its policy was '7' at the start and is '8'"),
    ],
)
def test_a_server_that_changes_ends_the_collection(folder, capsys, path, page, message):
    """It changes while it answers the 13th request: none of the answers after it is stored."""
    pages = {**PAGES, "/weight_info": {"weight_version": "7"}}
    found = []
    behave = turned(lambda: found[0], 13, {**pages, path: page})
    with engine(behave, pages=pages) as server:
        found.append(server)
        assert main(command(server.url, 4, "--concurrency", "1", "--shard-size", "1")) == 1
        assert server.asked.total() == 13
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {server.url}: the server changed: {message}")
    store = RolloutStore([folder / "store"])
    assert store.column("sample").tolist() == [0, 1, 2, 3] * 3
    assert store.info.engine_policy == "7"


def test_every_answer_is_confirmed_and_one_check_serves_many(folder):
    write_inputs(folder, 30)
    with engine(delay=0.02) as server:
        assert main(command(server.url, 8, "--concurrency", "24")) == 0
        checks = server.pages_asked["/version"]
        assert 2 <= checks < 240 / 2
        assert server.pages_asked["/v1/models"] == checks
        assert server.pages_asked["/weight_info"] == 1  # it has none


def test_a_server_that_does_not_confirm_gives_no_rollouts(folder, capsys):
    with engine() as server:

        def behave(body, nth):
            return "404" if "path" in body and server.asked else "ok"

        server.behave = behave
        assert main(command(server.url, 1)) == 1
    error = capsys.readouterr().err
    assert "cannot tell whether the server is the same: http://127.0.0.1:" in error
    assert not (folder / "store").exists()


def sglang(server, *more):
    arguments = "--engine sglang --model config.json --prompts prompts.jsonl --out store --n 4"
    arguments += " --reward rewards:length --concurrency 1 --shard-size 4"
    return main(["rollouts", "collect", *arguments.split(), "--url", server.url, *more])


SERVER_INFO = {"version": "0.5.23", "served_model_name": "m", "model_path": "/m"}
# 0.5.23: on this page the version of the weights stays what it was when the server started
SERVER_INFO["weight_version"] = "default"


def of_weights(versions):
    """SGLang's answers, of these versions of its weights in turn, the last one for ever."""
    left = list(versions)

    def give(body):
        response = generate(body)
        one = left.pop(0) if len(left) > 1 else left[0]
        spans = one if isinstance(one, list) else [one]
        end = len(response["output_ids"])
        bounds = [*range(len(spans)), end]  # new weights after each token
        response["meta_info"] |= {
            "weight_version": spans[-1],
            "weight_versions": [
                {"version": v, "start": bounds[i], "end": bounds[i + 1]}
                for i, v in enumerate(spans)
            ],
        }
        return response

    return give


@pytest.mark.parametrize(
    ("versions", "page", "stored", "message"),
    [
        (["7"], {}, 24, None),
        (["7"], {"weight_version": "7"}, 24, None),
        ([7], {}, 24, None),
        (["7"] * 9 + ["8"], {}, 8, "the engine's weights were '7' and are '8' now"),
        (["7"] * 9 + [["7", "8"]], {}, 8, "the engine's weights were '7' and are '8' now"),
        (["8"], {"weight_version": "7"}, 0, "the engine's weights were '7' and are '8' now"),
    ],
)
def test_the_version_of_sglangs_weights(folder, capsys, versions, page, stored, message):
    pages = {"/server_info": SERVER_INFO, "/model_info": page}
    with engine(answer=of_weights(versions), pages=pages) as server:
        assert sglang(server) == (message is not None)
    error = capsys.readouterr().err.splitlines()
    if message is not None:
        assert error[-1].startswith("error: prompts.jsonl, line ")
        assert message in error[-1]
        assert "give the new weights another --policy-version" in error[-1]
    if stored:
        store = RolloutStore([folder / "store"])
        assert (len(store), store.info.engine_policy) == (stored, "7")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_weights_that_sglang_takes_in_place_end_the_collection(folder, capsys, path):
    """Its answers do not say so here: what the server says of itself counts."""
    pages = {"/server_info": SERVER_INFO, path: {"weight_version": "7"}}
    found = []
    new = {**pages, path: {"weight_version": "8"}}
    with engine(turned(lambda: found[0], 9, new), answer=generate, pages=pages) as server:
        found.append(server)
        assert sglang(server) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "its policy was '7' at the start and is '8'" in error
    store = RolloutStore([folder / "store"])
    assert (len(store), store.info.engine_policy) == (8, "7")


def test_weights_are_compared_on_resume_too(folder, capsys):
    pages = {"/server_info": SERVER_INFO}
    with engine(answer=of_weights(["7"] * 9 + ["8"]), pages=pages) as server:
        assert sglang(server) == 1
        capsys.readouterr()
        assert sglang(server) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert "line 3, sample 0: the engine's weights were '7' and are '8' now" in error
        server.answer = generate  # a server that says nothing of its weights
        assert sglang(server) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert "the engine does not say which weights sampled" in error
        server.answer, asked = of_weights(["8"]), server.asked.total()
        server.pages = {**pages, "/model_info": {"weight_version": "8"}}
        assert sglang(server) == 1
        assert server.asked.total() == asked
        error = capsys.readouterr().err.splitlines()[-1]
        assert "policy version 0 are of another policy: " in error
        assert "engine_policy" in error
        assert "give another --policy-version" in error
        server.answer = of_weights(["8"])
        assert sglang(server, "--policy-version", "1") == 0
        server.answer = of_weights(["7"])
        server.pages = pages
        assert sglang(server) == 0
    store = RolloutStore([folder / "store"], mixed_policies=True)
    versions, first = store.column("policy_version"), store.shards
    assert np.bincount(versions).tolist() == [24, 24]
    assert {shard.info.engine_policy for shard in first} == {"7", "8"}


def test_weights_that_are_first_told_after_a_shard_was_stored(folder, capsys):
    answers = [generate] * 9 + [of_weights(["7"])]
    pages = {"/server_info": SERVER_INFO}
    with engine(answer=lambda body: answers.pop(0)(body), pages=pages) as server:
        assert sglang(server) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the engine's weights were without a version and are '7' now" in error
