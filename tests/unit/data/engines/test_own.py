"""Plain arrays of the engine "own".

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data.engines import EngineError, decode, decode_increments


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: rows,
        lambda rows: rows.tolist(),
        lambda rows: rows[:, list(made.SHAPE.moe_layers)].astype(np.uint16),
        lambda rows: np.asfortranarray(rows).astype(">i8"),
        made.npy_text,
    ],
)
def test_arrays_of_any_form(form):
    rows = made.made_rows()
    sequences, request = made.arrays(form(rows))
    for response in (sequences, sequences[0], [*sequences, *sequences]):
        for sample in decode("own", response, request, made.SHAPE, "request 7"):
            assert sample.tokens_N.tolist() == made.PROMPT + made.RESPONSE
            assert made.logprobs_of(sample).tolist() == made.LOGPROBS
            assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()


def test_array_increments():
    rows = made.made_rows()
    sequences, request = made.arrays(rows[5:])
    (one,) = decode_increments("own", sequences, {**request, "start": 5}, made.SHAPE, "request 7")
    assert (one.routes.ids_LTK == made.moe_ids(rows)[:, 5:]).all()
    with pytest.raises(EngineError, match="start at token 5: stitch"):
        decode("own", sequences, {**request, "start": 5}, made.SHAPE, "request 7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routes": None}, "routes: expected a list or an array; got NoneType"),
        ({"token_ids": None}, "no token_ids; give the ids of the sampled tokens"),
        ({"routes": made.made_rows(8)}, "8 rows of routes for 10 tokens"),
        ({"routes": made.made_rows().transpose(1, 0, 2)}, "5 rows of routes"),
        ({"routes": made.made_rows().astype(object)}, "ids must be integers; got int"),
        ({"routes": 3}, "a list or an array; got int"),
        ({"token_ids": np.array([1.0])}, "ids must be integers"),
        ({"logprobs": ["a"] * 4}, "a flat list of numbers; got str"),
        ({"logprobs": made.LOGPROBS[1:]}, "3 log-probs for 4 response tokens"),
        ({"logprobs": [-1.0, -(10**400), -1.0, -1.0]}, "numbers|even table"),
        ({"logprobs": [-1.0, -1e300, -1.0, -1.0]}, "token 7 is .*not finite"),
        ({"prompt_token_ids": [1]}, "not the prompt of the request"),
    ],
)
def test_wrong_sequences_are_refused(change, message):
    sequences, request = made.arrays(made.made_rows())
    wrong = [sequences[0], {**sequences[0], **change}]
    with pytest.raises(EngineError, match=f"request 7, choice 1.*{message}"):
        decode("own", wrong, request, made.SHAPE, "request 7")


def test_one_long_text_does_not_widen_the_table():
    """Without dtype=object numpy would pad each element to the longest one: to a gigabyte here."""
    sequences, request = made.arrays([[[0] * 4] * 5] * 8 + [[[0] * 4] * 4 + [["a" * 10**6] * 4]])
    with pytest.raises(EngineError, match="ids must be integers; got int, str"):
        decode("own", sequences, request, made.SHAPE, "request 7")
