"""One list of what can be wrong with a store, and one oracle: what was written, or one line.

Each entry of WRONGS changes the first shard of a store that `right_store` has written, or the
folder around it. What comes out of such a store, whoever reads it in whatever way, is every rollout
as it was written, or one line that names a file of the store.

Shape suffixes (docs/glossary.md): C, K, L, N, T, V.
"""

import json
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
# behind that path; an empty text where the line names another file, or one of several faults.

WRONGS = {}


def wrong(message, change, name=""):
    name = name or message[:70]
    WRONGS[name if name not in WRONGS else f"{name} {len(WRONGS)}"] = change, message


def data(change):
    return lambda path: path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(at):
    def change(data):
        data[at] ^= 1
        return data

    return change


def place_of(path, name):
    """The first byte of a tensor in its file, and its end."""
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    first, end = json.loads(path.read_bytes()[8:begin])[name]["data_offsets"]
    return begin + first, begin + end


NOT_WHOLE = "not a whole shard ("
for length in (0, 7, 8, 100, 3000, -1):
    wrong(NOT_WHOLE, data(lambda d, n=length: d[:n]), f"cut to {length}")
wrong(NOT_WHOLE, data(lambda d: d + b"\0"), "a byte more")
for noise in (b"\xff" * 8, b"\0" * 100, (2**62).to_bytes(8, "little") + b"{}"):
    wrong(NOT_WHOLE, data(lambda _, noise=noise: noise), f"noise {noise[:9]}")
PER_ROLLOUT = ["group", "num_kept", "num_tokens", "num_turns", "num_versions", "policy_version"]
PER_ROLLOUT += ["prompt_digest", "sample", "advantage", "reward", "turns", "versions"]
IN_FILE = ["tokens", "response", "logprobs", "recorded", "kept_sizes", "kept_ids", "routes"]
TABLES = ["route_sums", "token_sums", "kept_sums"]
for tensor in (*PER_ROLLOUT, *IN_FILE, *TABLES):
    for last in (0, 1):

        def a_bit(path, name=tensor, last=last):
            data(flipped(place_of(path, name)[last] - last))(path)

        said = f"checksum of {tensor!r} differs" if tensor in PER_ROLLOUT else ""
        wrong(said, a_bit, f"a bit of the {'last' if last else 'first'} byte of {tensor}")
for byte in (0, 8, 300, 900):
    wrong("", data(flipped(byte)), f"a bit of byte {byte}, of the header")


# its name, and what has it


def exchanged(path):
    path.rename(path.with_name("x"))
    path.with_name(SECOND).rename(path)
    path.with_name("x").rename(path.with_name(SECOND))


def instead(make):
    return lambda path: (path.unlink(), make(path))


def copied(name):
    return lambda path: shutil.copy(path, path.with_name(name))


wrong("says that it is shard 1; was it renamed", exchanged, "exchanged with the second")
wrong("is missing, though shard-00001.safetensors is there: copy", os.unlink)
wrong("cannot be opened (No such file", instead(lambda p: p.symlink_to("x")), "a dangling link")
wrong("cannot be opened (Too many levels", instead(lambda p: p.symlink_to(p)))
wrong("not a regular file, as every shard must be", instead(lambda p: p.mkdir()))
wrong("not a regular file, as every shard must be", instead(os.mkfifo))  # and nobody waits for it
wrong("", copied("shard-00002.safetensors"), "copied to the next number")
wrong("", copied("shard-00000 (copy).safetensors"), "copied to another name")


# the header


def body(change):
    return lambda path: rewrite_header(path, change(header_of(path)))


def with_key(key, value):
    return body(lambda b: {**b, key: value})


def in_key(key, change):
    return body(lambda b: {**b, key: change(b[key])})


def info(**fields):
    return in_key("info", lambda i: {**i, **fields})


def sampling(**fields):
    return in_key("info", lambda i: {**i, "sampling": {**i["sampling"], **fields}})


def without(key):
    return lambda values: {name: one for name, one in values.items() if name != key}


wrong("the header: not JSON", body(lambda b: "no JSON"))
wrong("the header: JSON with more than 64 brackets", body(lambda b: "[" * 100_000))
wrong("the header: not JSON (Exceeds the", body(lambda b: '{"x": ' + "9" * 5000 + "}"))
wrong("the header is no JSON object", body(lambda b: []))
wrong("'other' version 6; this", with_key("format", "other"))
FORMAT = "'megatron-r3 rollouts'"
for version in (0, 3, 5, 7, 6.0, True):
    reads = f"this megatron-r3 reads {FORMAT} version 6: sample or convert the rollouts again"
    message = f"{FORMAT} version {version}; {reads}"
    wrong(message, with_key("version", version), f"version {version}")
for number in (None, -1, False):
    wrong(f"number {number} is no whole number from 0 on", with_key("number", number))
for key in ("format", "version", "number", "recorded_rows", "info", "crc32"):
    wrong("", body(without(key)), f"no {key}")
wrong("the header must have the keys ['crc32', ", with_key("spans", 1))
wrong("info must have the keys [", with_key("info", []))
wrong("crc32 of 'the shard': 'x' is no CRC-32", with_key("crc32", "x"))
for crc32 in ("x", 2**32):
    change = in_key("crc32", lambda sums, one=crc32: {**sums, "turns": one})
    wrong(f"crc32 of 'turns': {crc32!r} is no CRC-32", change)
wrong("checksums of ['advantage', ", in_key("crc32", without("turns")))
for key in ("num_experts", "sampling"):
    wrong("info must have the keys [", in_key("info", without(key)))
wrong("info must have the keys [", info(kept_set=1))
wrong("info.sampling must have the keys [", info(sampling=[]))
wrong("info.sampling must have the keys [", sampling(typical_p=0.9))
wrong("topk must be a whole number from 1 to 16; got 4.0", info(topk=4.0))
wrong("topk must be a whole number from 1 to 16; got True", info(topk=True))
wrong("num_experts must be a whole number from 1 to 32768; got 'x'", info(num_experts="x"))
for layers in (3, [[1], 2, 5], [5, 2, 1]):
    said = f"moe_layers must be the numbers of hidden layers, from 0 on, ascending; got {layers}"
    wrong(said, info(moe_layers=layers), f"layers {layers}")
wrong("model must be a text; got dict", info(model={}))
wrong("engine must be a text without control characters", info(engine="\x1b[2J"))
wrong("router_fingerprint must be 16 hex digits for each", info(router_fingerprint=[1, 2, 3]))
wrong("sampling.temperature must be a number from 0 to", sampling(temperature=True))
wrong("has kept sets, and sampling.logprobs_of is None", sampling(logprobs_of=None))
wrong("has kept sets, and sampling.logprobs_of is 'raw'", sampling(logprobs_of="raw"))


# where the tensors lie


def layout(change):
    return lambda path: rewrite_layout(path, change)


def entry(name, **values):
    return layout(lambda whole: {**whole, name: {**whole[name], **values}})


NO_SHARD, EXTRA = "a safetensors file, but not", {"dtype": "U8", "shape": [4]}
wrong(f"{NOT_WHOLE}its header is no JSON object", layout(lambda whole: []))
wrong(NO_SHARD, layout(lambda whole: {**whole, "__metadata__": 1}))
wrong(NO_SHARD, layout(lambda whole: {**whole, "__metadata__": {"megatron_r3": 1}}))
wrong(f"{NOT_WHOLE}tensor 'group': None is", layout(lambda whole: {**whole, "group": None}))
wrong(f"{NOT_WHOLE}tensor 'reward': {{", entry("reward", shape=[-3]))
wrong(f"{NOT_WHOLE}tensor 'sample': {{", entry("sample", shape=[True, 3]))
wrong(f"{NOT_WHOLE}tensor 'turns': {{", entry("turns", shape=[6.0]))
wrong(f"{NOT_WHOLE}tensor 'tokens': {{", entry("tokens", shape=[2**62, 2**62]))
wrong(f"{NOT_WHOLE}tensor 'routes': {{", entry("routes", data_offsets=[0]))
wrong(f"{NOT_WHOLE}tensor 'response': {{", entry("response", data_offsets=[-17, 0]))
wrong(f"{NOT_WHOLE}tensor 'logprobs': {{", entry("logprobs", dtype=32))
wrong(f"{NOT_WHOLE}tensor 'recorded': {{", entry("recorded", dtype="F8_E5M2"))
wrong(f"{NOT_WHOLE}tensor 'num_tokens' begins at", entry("num_tokens", data_offsets=[4, 28]))
wrong("logprobs is I32 (17,); 3 rollouts", entry("logprobs", dtype="I32"))
wrong(f"{NOT_WHOLE}tensor '", layout(lambda w: {**w, "x": {**EXTRA, "data_offsets": [0, 4]}}))
wrong("tensors [", layout(lambda w: {("odd" if k == "turns" else k): v for k, v in w.items()}))


# tensors, under checksums that fit


def tensors(**changes):
    return lambda path: rewrite(path, **changes)


def zeros(dtype, *shape):
    return np.zeros(shape, dtype)


ONE_ROW = ": one row for every token of a rollout but its last"
FIT = "3 rollouts with 17 tokens and 16 experts need"
wrong(f"reward is F32 (1,); {FIT} F32 (3,)", tensors(reward=zeros("f4", 1)))
wrong(
    f"routes is I64 (3, 14, 4); {FIT} U8 (3, 14, 4){ONE_ROW}", tensors(routes=zeros(int, 3, 14, 4))
)
wrong("routes is U8 (3, 13, 4)", tensors(routes=zeros("u1", 3, 13, 4)))
wrong("route_sums is U32 (3, 2); ", tensors(routes=zeros("u1", 2, 14, 4)))
wrong("route_sums is U32 (3, 4)", tensors(route_sums=zeros("u4", 3, 4)))
wrong("token_sums is I32 (3, 4)", tensors(token_sums=zeros("i4", 3, 4)))
PARTS = {name: zeros("u4", 2, n) for name, n in zip(TABLES, (3, 4, 2), strict=True)}
wrong("has sums of 2 parts; its rollouts have 3", tensors(**PARTS))
wrong("turns is I32 (5,)", tensors(turns=zeros("i4", 5)))
wrong("kept_sizes is I32 (16,)", tensors(kept_sizes=zeros("i4", 16)))
wrong("versions is I64 (7,)", tensors(versions=zeros("i8", 7)))
wrong("num_tokens has 2 dimensions, not 1", tensors(num_tokens=np.array([[5, 9, 3]])))
for message, changes in {
    "num_tokens: rollout 0 has 1; possible are 2 to 17": {"num_tokens": [1, 13, 3]},
    "num_tokens: rollout 0 has -5; possible are 2 to 17": {"num_tokens": [-5, 19, 3]},
    "num_tokens: the counts of its rollouts add up to 15; there are 17": {"num_tokens": [5, 7, 3]},
    "num_turns: rollout 0 has -1; possible are 0 to 3": {"num_turns": [-1, 3, 1]},
    "num_turns: the counts of its rollouts add up to 4": {"num_turns": [1, 2, 1]},
    "num_kept: rollout 0 has 4611686018427387904": {"num_kept": [2**62, 0, 0]},
    "num_versions: the counts of its rollouts add up to 5": {"num_versions": [2, 2, 1]},
    "rollout 1: policy_version -3: must be a whole number": {"policy_version": [7, -3, 7]},
    "rollout 0: sample -1: must be a whole number from 0 on": {"sample": [-1, 0, 1]},
    "rollout 1: prompt_digest -1: must be a whole number from 0 on": {"prompt_digest": [0, -1, 0]},
}.items():
    arrays = {name: np.array(values, np.int64) for name, values in changes.items()}
    wrong(message, tensors(**arrays))
wrong("rollout 1: reward inf: a reward is finite", tensors(reward=np.array([1, np.inf, 1], "f4")))
wrong("rollout 0: advantage inf: must be", tensors(advantage=np.array([np.inf, 1, 1], "f4")))
one_name = tensors(group=np.array([1, 1, 1]), sample=np.array([0, 0, 2]))
wrong("rollout 1 is sample 0 of group 1, policy version 7: the same as", one_name)
for name in ("reward", "kept_ids", "route_sums"):
    wrong("tensors [", tensors(**{name: None}), f"no {name}")
wrong("tensors [", tensors(spans=zeros("i4", 3)))

OTHER_TURNS = "rollout 1: its `turns` and its `response` mark different tokens as sampled"
VALUES = [  # tensor, place, value; rollout 1 has the tokens 5 to 13, and the rows 4 to 11
    ("logprobs", 8, np.nan, "rollout 1: token 3: its log-prob is nan, which is not finite"),
    ("logprobs", 8, -9999, "rollout 1: token 3: its log-prob is -9999, which vLLM sends"),
    ("logprobs", 8, -95, "rollout 1: token 3: its log-prob is -95, below -64"),
    ("logprobs", 13, 5, "rollout 1: token 8: its log-prob is 5: a probability above 1"),
    ("logprobs", 6, -1, "rollout 1: token 1: its log-prob is -1; it must be 0, as the token was"),
    ("tokens", 9, -7, "rollout 1: token 4 is id -7; ids go from 0 to 2147483647"),
    ("response", 5, 1, "rollout 1: its first token cannot be sampled"),
    ("response", 8, 2, "rollout 1: response must be 0 or 1"),
    ("recorded", 7, 2, "rollout 1: recorded must be 0 or 1"),
    ("turns", 2, 3, OTHER_TURNS),
    ("turns", 3, 12, OTHER_TURNS),
    ("kept_ids", 0, -1, "rollout 0: token 2: its kept set has id -1"),
    ("kept_ids", 0, 49, "rollout 0: token 2: its kept set must have each id once, ascending"),
    ("kept_sizes", 0, 1, "rollout 0: token 0 was not sampled, and has a kept set"),
    ("kept_sizes", 2, 0, "rollout 0: token 2 was sampled, and has no kept set"),
    ("kept_sizes", 14, 1, "rollout 2: its kept_sizes are not all 0, but it has no kept_ids"),
    ("versions", 1, 6, "rollout 0: policy_version is 7; it must be 6, the version of the"),
    ("versions", 0, 1, "rollout 0: a version span begins at token 1, which was not sampled"),
    ("versions", 0, 3, "rollout 0: its version spans begin at token 3, not at the first"),
    ("versions", 2, 2, "rollout 0: the first tokens of its version spans must ascend"),
    ("versions", 3, 7, "rollout 0: the versions of its version spans must ascend; got [7, 7]"),
    ("versions", 2, -1, "rollout 0: a version span begins at token -1"),
    ("routes", (1, 11, 0), 16, "rollout 1: an expert id outside 0..15 at MoE layer 1, token 7"),
]
for tensor, place, to, message in VALUES:

    def to_value(path, tensor=tensor, place=place, to=to):
        changed = load_file(path)[tensor]
        changed[place] = to
        rewrite(path, **{tensor: changed})

    wrong(message, to_value, f"value: {message[:60]}")


def twice(path):
    routes = load_file(path)["routes"]
    routes[2, 11, 0] = routes[2, 11, 1]
    rewrite(path, routes=routes)


wrong("rollout 1: an expert twice in one row at MoE layer 2, token 7", twice, "an expert twice")
