"""One list of what can be wrong with a store, and one oracle: what was written, or one line.

Each entry of WRONGS changes the first shard of a store that `right_store` has written, or the
folder around it. What comes out of such a store, whoever reads it in whatever way, is every rollout
as it was written, or one line that names a file of the store.

Shape suffixes (docs/glossary.md): C, K, L, N, T, U, V.
"""

import os
import pickle
import shutil
from dataclasses import replace

import numpy as np
from safetensors.numpy import load_file
from stored import INFO, header_of, make_rollout, rewrite, rewrite_header, rewrite_layout

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store import RolloutStore, SamplingSettings, write_shard
from megatron_r3.data.store.verify_shard import ReadChecks

FIRST, SECOND = "shard-00000.safetensors", "shard-00001.safetensors"
CUT = replace(INFO, sampling=SamplingSettings(0.7, 0.9, 0, 0.0, 16, "processed"))


def with_extras(rollout, seed):
    """The rollout with kept sets of 1 to 9 ids, two versions, and an advantage."""
    rng = np.random.default_rng(seed)
    logprobs_N, sets = rollout.logprobs_N.copy(), []
    for token, (sampled, own) in enumerate(
        zip(rollout.response_N, rollout.tokens_N.tolist(), strict=True)
    ):
        others = rng.permutation(50)[: rng.integers(0, 9)].tolist()
        sets.append(sorted({own, *others}) if sampled else [])
        if len(sets[-1]) == 1:
            logprobs_N[token] = 0
    sampled = np.flatnonzero(rollout.response_N)
    spans = [(sampled[0], 7), *([(sampled[-1], 9)] if len(sampled) > 1 else [])]
    return replace(
        rollout,
        logprobs_N=logprobs_N,
        kept=KeptSets.from_lists(sets),
        versions_C2=np.array(spans, np.int64),
        advantage=float(np.float32(rng.normal())),
    )


# Rollout 2 has no extras. 65 tokens are 64 rows: the second part has a token, and no row.
LENGTHS = (5, 9, 3, 65, 4)
RIGHT = [
    make_rollout(n, seed=n, group=n % 2, reward=n / 10, sample=i) for i, n in enumerate(LENGTHS)
]
RIGHT = [rollout if i == 2 else with_extras(rollout, i) for i, rollout in enumerate(RIGHT)]


def right_store(folder):
    """The store that is changed: rollouts 0 to 2, of 17 tokens and 14 rows, and then 3 and 4."""
    write_shard(folder, CUT, RIGHT[:3])
    write_shard(folder, CUT, RIGHT[3:])
    return folder


# -- the oracle


def assert_same(got, wanted):
    for name in ("tokens_N", "response_N", "logprobs_N", "spans_U2"):
        assert np.array_equal(getattr(got, name), getattr(wanted, name)), name
    assert np.array_equal(got.routes.ids_LTK, wanted.routes.ids_LTK)
    assert np.array_equal(got.routes.recorded_T, wanted.routes.recorded_T)
    for name in ("group", "sample", "policy_version", "advantage", "prompt_digest"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert np.float32(got.reward) == np.float32(wanted.reward)
    assert (got.kept is None) == (wanted.kept is None)
    if wanted.kept is not None:
        assert np.array_equal(got.kept.sizes_N, wanted.kept.sizes_N)
        assert np.array_equal(got.kept.ids_V, wanted.kept.ids_V)
    assert (got.versions_C2 is None) == (wanted.versions_C2 is None)
    if wanted.versions_C2 is not None:
        assert np.array_equal(got.versions_C2, wanted.versions_C2)


def verified(folder):
    store = RolloutStore([folder])
    store.verify()
    return store


def told(folder, checks=ReadChecks()):  # noqa: B008  # frozen
    """As a rank has it that is told of the store, and checks what it reads as it reads it."""
    store = RolloutStore.told(pickle.loads(pickle.dumps(RolloutStore([folder]).index)))
    store.trained_on(checks)
    return store


WAYS = {way.__name__: way for way in (verified, told)}


def refusals(store, folder, rollouts=RIGHT):
    """Read every rollout of a store, whole and in parts: which are refused, and with which line.

    Raises:
        AssertionError: a rollout is another one than was written, or an error is not one line that
            names a file of the folder.
    """
    lines = {}
    for index, wanted in enumerate(rollouts):
        layers = range(len(store.info.moe_layers))
        reads = [lambda i=index: store.rollout(i)]
        for layer in layers:
            reads.append(lambda i=index, layer=layer: store.routes(store.row_ids(i)[-2:], [layer]))
        for number, read in enumerate(reads):
            try:
                got = read()
            except ValueError as error:
                lines[index] = one_line(error, folder)
                continue
            if number:
                ids_LTK = wanted.routes.ids_LTK[number - 1 : number, -2:]
                assert np.array_equal(got[0], ids_LTK)
            else:
                assert_same(got, wanted)
    return lines


def one_line(error, folder):
    line = str(error)
    assert line.startswith(str(folder)), line
    assert line.isprintable(), line
    return line


def judged(folder, way, rollouts=RIGHT):
    """The first line with which a store is refused; empty if every rollout is what was written."""
    try:
        store = WAYS[way](folder)
        assert len(store) == len(rollouts)
    except ValueError as error:
        return one_line(error, folder)
    return next(iter(refusals(store, folder, rollouts).values()), "")


# -- the list: by name, what changes the store's first shard at `path`, and how the line goes on
# behind that path. A wrong that is found whatever way the store is read is in WRONGS.

WRONGS = {}


def wrong(name, message, change):
    name = name if name not in WRONGS else f"{name} {len(WRONGS)}"
    WRONGS[name] = change, message


def bytes_of(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


for length in (0, 7, 8, 100, 0.5, -1):
    wrong(
        f"cut to {length}",
        "not a whole shard (",
        bytes_of(lambda d, n=length: d[: int(n * len(d)) if isinstance(n, float) else n]),
    )
wrong("a byte more", "not a whole shard (", bytes_of(lambda data: data + b"\0"))
for number, data in enumerate((b"\xff" * 8, b"\0" * 100, (2**62).to_bytes(8, "little") + b"{}")):
    wrong(f"noise {number}", "not a whole shard (", bytes_of(lambda _, data=data: data))


def flipped(name, place):
    """A bit of the first or last byte of a tensor."""

    def change(path):
        data = bytearray(path.read_bytes())
        begin, end = place_of(path, name)
        data[begin if place == "first" else end - 1] ^= 1
        path.write_bytes(data)

    return change


def place_of(path, name):
    """The first byte of a tensor in its file, and its end."""
    places = {}
    rewritten = path.read_bytes()
    try:
        rewrite_layout(path, lambda layout: places.update(layout) or layout)
    finally:
        path.write_bytes(rewritten)
    begin = 8 + int.from_bytes(rewritten[:8], "little")
    first, end = places[name]["data_offsets"]
    return begin + first, begin + end


PER_ROLLOUT = ["group", "num_kept", "num_tokens", "num_turns", "num_versions", "policy_version"]
PER_ROLLOUT += ["prompt_digest", "sample", "advantage", "reward", "turns", "versions"]
IN_FILE = ["tokens", "response", "logprobs", "recorded", "kept_sizes", "kept_ids", "routes"]
TABLES = ["route_crc32", "token_crc32", "kept_crc32"]
for tensor in (*PER_ROLLOUT, *IN_FILE, *TABLES):
    for place in ("first", "last"):
        said = f"checksum of {tensor!r} differs" if tensor in PER_ROLLOUT else ""
        wrong(f"a bit of the {place} byte of {tensor}", said, flipped(tensor, place))
wrong("a bit of the header's length", "", bytes_of(lambda d: bytes([d[0] ^ 1]) + d[1:]))
for byte in (8, 300, 900):
    wrong(
        f"a bit of byte {byte}",
        "",
        bytes_of(lambda d, i=byte: d[:i] + bytes([d[i] ^ 1]) + d[i + 1 :]),
    )


# its own name, and what has it


def exchanged(path):
    path.rename(path.with_name("x"))
    path.with_name(SECOND).rename(path)
    path.with_name("x").rename(path.with_name(SECOND))


def instead(make):
    def change(path):
        path.unlink()
        make(path)

    return change


wrong("exchanged with the second", "says that it is shard 1; was it renamed", exchanged)
wrong("missing", "is missing, though shard-00001.safetensors is there: copy", os.unlink)
wrong("a link that dangles", "cannot be opened (No such file", instead(lambda p: p.symlink_to("x")))
wrong("a link to itself", "cannot be opened (Too many levels", instead(lambda p: p.symlink_to(p)))
wrong("a folder", "not a regular file, as every shard must be", instead(lambda p: p.mkdir()))
wrong("a pipe", "not a regular file, as every shard must be", instead(os.mkfifo))  # nobody waits
# the line names the other file
wrong(
    "a third that is a copy", "", lambda p: shutil.copy(p, p.with_name("shard-00002.safetensors"))
)
wrong("a copy", "", lambda p: shutil.copy(p, p.with_name("shard-00000 (copy).safetensors")))


# the header


def body(change):
    return lambda path: rewrite_header(path, change(header_of(path)))


def info(**fields):
    return body(lambda b: {**b, "info": {**b["info"], **fields}})


def sampling(**fields):
    return body(
        lambda b: {**b, "info": {**b["info"], "sampling": {**b["info"]["sampling"], **fields}}}
    )


def without(key, value):
    return {name: one for name, one in value.items() if name != key}


FORMAT = "'megatron-r3 rollouts'"
for name, message, change in (
    ("no JSON", "the header: not JSON", lambda b: "no JSON"),
    ("brackets", "the header: JSON with more than 64 brackets", lambda b: "[" * 100_000),
    ("digits", "the header: not JSON (Exceeds the", lambda b: '{"x": ' + "9" * 5000 + "}"),
    ("a list", "the header is no JSON object", lambda b: []),
    ("another format", "'other' version 4; this", lambda b: {**b, "format": "other"}),
    *(
        (
            f"version {number}",
            f"{FORMAT} version {number}; this megatron-r3 reads {FORMAT} version 4: sample or "
            "convert the rollouts again",
            lambda b, number=number: {**b, "version": number},
        )
        for number in (0, 2, 3, 5, 4.0, True)
    ),
    *(
        (
            f"number {number}",
            f"number {number} is no whole number from 0 on",
            lambda b, number=number: {**b, "number": number},
        )
        for number in (None, -1, False)
    ),
    *(
        (f"no {key}", "", lambda b, key=key: without(key, b))
        for key in ("format", "version", "number", "recorded_rows", "info", "crc32")
    ),
    ("a key more", "the header must have the keys ['crc32', ", lambda b: {**b, "spans": 1}),
    ("info []", "info must have the keys [", lambda b: {**b, "info": []}),
    ("crc32 of text", "crc32 of 'it': 'x' is no CRC-32", lambda b: {**b, "crc32": "x"}),
    *(
        (
            f"crc32 {value}",
            f"crc32 of 'turns': {value!r} is no CRC-32",
            lambda b, value=value: {**b, "crc32": {**b["crc32"], "turns": value}},
        )
        for value in ("x", 2**32)
    ),
    (
        "crc32 without turns",
        "checksums of ['advantage', ",
        lambda b: {**b, "crc32": without("turns", b["crc32"])},
    ),
    *(
        (
            f"info without {key}",
            "info must have the keys [",
            lambda b, key=key: {**b, "info": without(key, b["info"])},
        )
        for key in ("num_experts", "moe_layers", "engine", "sampling", "vocab_size")
    ),
):
    wrong(f"header: {name}", message, body(change))
LAYERS = "moe_layers must be the numbers of hidden layers, from 0 on, ascending; got"
for message, fields in (
    ("topk must be a whole number from 1 to 16; got 4.0", {"topk": 4.0}),
    ("topk must be a whole number from 1 to 16; got True", {"topk": True}),
    ("num_experts must be a whole number from 1 to 32768; got 'x'", {"num_experts": "x"}),
    ("num_experts must be a whole number from 1 to 32768; got 0", {"num_experts": 0}),
    (f"{LAYERS} 3", {"moe_layers": 3}),
    (f"{LAYERS} [[1], 2, 5]", {"moe_layers": [[1], 2, 5]}),
    (f"{LAYERS} [5, 2, 1]", {"moe_layers": [5, 2, 1]}),
    ("model must be a text; got dict", {"model": {}}),
    ("engine must be a text; got NoneType", {"engine": None}),
    ("engine must be a text without control characters", {"engine": "\x1b[2J"}),
    (
        "engine_version must be a text of at most 200 characters; got 5000",
        {"engine_version": "1" * 5000},
    ),
    (
        "router_fingerprint must be 16 hex digits for each MoE layer, or empty; got [1, 2, 3]",
        {"router_fingerprint": [1, 2, 3]},
    ),
    ("vocab_size must be a whole number from 0 to 2147483648; got 1.5", {"vocab_size": 1.5}),
    ("info must have the keys [", {"kept_set": 1}),
    ("info.sampling must have the keys [", {"sampling": []}),
):
    wrong(f"info: {message[:60]}", message, info(**fields))
for message, fields in (
    ("sampling.temperature must be a number from 0 to 10000; got True", {"temperature": True}),
    ("sampling.top_p must be a number from 0 to 1; got '1'", {"top_p": "1"}),
    ("has kept sets, and sampling.logprobs_of is None", {"logprobs_of": None}),
    ("has kept sets, and sampling.logprobs_of is 'raw'", {"logprobs_of": "raw"}),
    ("info.sampling must have the keys [", {"typical_p": 0.9}),
):
    wrong(f"info: {message[:60]}, {[*fields]}", message, sampling(**fields))


def layout(change):
    return lambda path: rewrite_layout(path, change)


def entry(name, **values):
    return layout(lambda whole: {**whole, name: {**whole[name], **values}})


NOT_WHOLE = "not a whole shard ("
for message, change in (
    (f"{NOT_WHOLE}its header is no JSON object", layout(lambda whole: [])),
    ("a safetensors file, but not", layout(lambda whole: {**whole, "__metadata__": 1})),
    (
        "a safetensors file, but not a rollout shard",
        layout(lambda whole: {**whole, "__metadata__": {"megatron_r3": 1}}),
    ),
    (f"{NOT_WHOLE}tensor 'group': None is", layout(lambda whole: {**whole, "group": None})),
    (f"{NOT_WHOLE}tensor 'reward': {{", entry("reward", shape=[-3])),
    (f"{NOT_WHOLE}tensor 'sample': {{", entry("sample", shape=[True, 3])),
    (f"{NOT_WHOLE}tensor 'turns': {{", entry("turns", shape=[6.0])),
    (f"{NOT_WHOLE}tensor 'tokens': {{", entry("tokens", shape=[2**62, 2**62])),
    (f"{NOT_WHOLE}tensor 'routes': {{", entry("routes", data_offsets=[0])),
    (f"{NOT_WHOLE}tensor 'response': {{", entry("response", data_offsets=[-17, 0])),
    (f"{NOT_WHOLE}tensor 'logprobs': {{", entry("logprobs", dtype=32)),
    (f"{NOT_WHOLE}tensor 'recorded': {{", entry("recorded", dtype="F8_E5M2")),
    (f"{NOT_WHOLE}tensor 'num_tokens' begins at byte", entry("num_tokens", data_offsets=[4, 28])),
    ("logprobs is I32 (17,); 3 rollouts", entry("logprobs", dtype="I32")),
    (
        f"{NOT_WHOLE}tensor '",
        layout(lambda w: {**w, "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
    ),
    ("tensors [", layout(lambda w: {("odd" if k == "turns" else k): v for k, v in w.items()})),
):
    wrong(f"layout: {message}", message, change)


# tensors, with checksums that fit


def tensors(**changes):
    return lambda path: rewrite(path, **changes)


for message, changes in (
    (
        "reward is F32 (1,); 3 rollouts with 17 tokens and 16 experts need F32 (3,)",
        {"reward": np.ones(1, np.float32)},
    ),
    ("num_tokens has 2 dimensions, not 1", {"num_tokens": np.array([[5, 9, 3]])}),
    (
        "routes is I64 (3, 14, 4); 3 rollouts with 17 tokens and 16 experts need U8 (3, 14, 4): "
        "one row for every token of a rollout but its last",
        {"routes": np.zeros((3, 14, 4), np.int64)},
    ),
    ("routes is U8 (3, 13, 4)", {"routes": np.zeros((3, 13, 4), np.uint8)}),
    ("route_crc32 is U32 (3, 2); 3 rollouts", {"routes": np.zeros((2, 14, 4), np.uint8)}),
    ("turns is I32 (5,)", {"turns": np.zeros(5, np.int32)}),
    (
        "has sums of 2 parts; its rollouts have 3",
        {
            "route_crc32": np.zeros((2, 3), np.uint32),
            "token_crc32": np.zeros((2, 4), np.uint32),
            "kept_crc32": np.zeros((2, 2), np.uint32),
        },
    ),
    ("token_crc32 is I32 (3, 4)", {"token_crc32": np.zeros((3, 4), np.int32)}),
    ("route_crc32 is U32 (3, 4)", {"route_crc32": np.zeros((3, 4), np.uint32)}),
    ("expert_load is U16 (3, 3, 15);", {"expert_load": np.zeros((3, 3, 15), np.uint16)}),
    (
        "expert_load is I32 (3, 3, 16); 3 rollouts with 17 tokens and 16 experts need U16 or U32",
        {"expert_load": np.zeros((3, 3, 16), np.int32)},
    ),
    ("kept_sizes is I32 (16,)", {"kept_sizes": np.zeros(16, np.int32)}),
    ("versions is I64 (7,)", {"versions": np.zeros(7, np.int64)}),
    ("advantage is I32 (3,)", {"advantage": np.zeros(3, np.int32)}),
    ("num_tokens: 1 of rollout 0; possible are 2 to 17", {"num_tokens": np.array([1, 13, 3])}),
    ("num_tokens: -5 of rollout 0; possible are 2 to 17", {"num_tokens": np.array([-5, 19, 3])}),
    (
        "num_tokens: the counts of its rollouts add up to 15; there are 17",
        {"num_tokens": np.array([5, 7, 3])},
    ),
    ("num_turns: -1 of rollout 0; possible are 0 to 3", {"num_turns": np.array([-1, 3, 1])}),
    (
        "num_turns: the counts of its rollouts add up to 4; there are 3",
        {"num_turns": np.array([1, 2, 1])},
    ),
    (
        "num_kept: 4611686018427387904 of rollout 0",
        {"num_kept": np.array([2**62, 0, 0])},
    ),
    ("num_versions: the counts of its roll", {"num_versions": np.array([2, 2, 1])}),
    (
        "rollout 1: reward inf: a reward is finite, in float32",
        {"reward": np.array([1, np.inf, 1], np.float32)},
    ),
    (
        "rollout 1: policy_version -3: a whole number from 0 on",
        {"policy_version": np.array([7, -3, 7])},
    ),
    ("rollout 0: sample -1: a whole number from 0 on", {"sample": np.array([-1, 0, 1])}),
    ("rollout 1: prompt_digest must not be negative", {"prompt_digest": np.array([0, -1, 0])}),
    (
        "rollout 0: advantage inf: must be finite",
        {"advantage": np.array([np.inf, 1, np.nan], np.float32)},
    ),
    ("", {"group": np.array([1, 1, 1]), "sample": np.array([0, 0, 2])}),  # two of one name
    *(("tensors [", {name: None}) for name in ("reward", "kept_ids", "expert_load", "route_crc32")),
    ("tensors [", {"spans": np.zeros(3, np.int32)}),
):
    wrong(
        f"tensors {len(WRONGS)}: {next(iter(changes))}: {message[:40]}", message, tensors(**changes)
    )


def value(name, place, to, **more):
    """One value of a tensor, under sums that fit; found by whoever checks what it reads."""

    def change(path):
        changed = load_file(path)[name]
        changed[place] = to
        rewrite(path, **{name: changed}, **more)

    return change


OTHER_TURNS = "its `turns` and its `response` name different tokens"
VALUES = {  # by message: the tensor, the place, and the value; rollout 1 has the tokens 5 to 13
    "rollout 1: token 3: its log-prob is nan, which is not finite": ("logprobs", 8, np.nan),
    "rollout 1: token 3: its log-prob is -9999, which vLLM sends": ("logprobs", 8, -9999),
    "rollout 1: token 3: its log-prob is -95, below -64": ("logprobs", 8, -95),
    "rollout 1: token 8: its log-prob is 5: a probability above 1": ("logprobs", 13, 5),
    "rollout 1: token 1: its log-prob is -1; it was not sampled, so 0": ("logprobs", 6, -1),
    "rollout 1: token 4 is id -7; the vocabulary has ids 0 to 2147483647": ("tokens", 9, -7),
    "rollout 1: its first token cannot be sampled": ("response", 5, 1),
    "rollout 1: response must be 0 or 1": ("response", 8, 2),
    "rollout 1: recorded must be 0 or 1": ("recorded", 7, 2),
    f"rollout 1: {OTHER_TURNS}": ("turns", 2, 3),
    f"rollout 1: {OTHER_TURNS[:-1]}": ("turns", 3, 12),
    "rollout 2: token 2: its log-prob is -0.92108; it was not": ("response", 16, 0),
    "rollout 0: token 2: its kept set has id -1": ("kept_ids", 0, -1),
    "rollout 0: token 2: its kept set must have each id once, asc": ("kept_ids", 0, 49),
    "rollout 0: token 0 was not sampled, and has a kept set": ("kept_sizes", 0, 1),
    "rollout 0: token 2 was sampled, and has no kept set": ("kept_sizes", 2, 0),
    "rollout 2: kept sets without ids": ("kept_sizes", 14, 1),
    "rollout 0: policy_version is 7, and its first version span is of 6": ("versions", 1, 6),
    "rollout 0: a version span begins at token 1, which was not": ("versions", 0, 1),
    "rollout 0: its version spans begin at token 3, not at the": ("versions", 0, 3),
    "rollout 0: the first tokens of its version spans must ascend": ("versions", 2, 2),
    "rollout 0: the versions of its version spans must ascend; got": ("versions", 3, 7),
    "rollout 0: a version span begins at token -1": ("versions", 2, -1),
    "rollout 1: an expert id outside 0..15 at MoE layer 1, token 7: [16, ": (
        "routes",
        (1, 11, 0),
        16,
    ),
}
for message, changed in VALUES.items():
    wrong(f"value: {message}", message, value(*changed))


def twice(path):
    routes = load_file(path)["routes"]
    routes[2, 11, 0] = routes[2, 11, 1]
    rewrite(path, routes=routes)


wrong("an expert twice", "rollout 1: an expert twice in one row at MoE layer 2, token 7", twice)
