"""Prepared ahead, in order, once; an error and the end are heard by the step."""

import threading
import time

import pytest

from megatron_r3.train.lookahead import DEPTH, END_S, Lookahead, end_all


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)


def test_in_order_and_in_a_thread():
    threads = set()

    def prepare(batch):
        threads.add(threading.current_thread().name)
        return batch * 2

    assert list(Lookahead(iter(range(20)), prepare)) == list(range(0, 40, 2))
    assert threads == {"megatron_r3 lookahead"}


def test_it_stays_a_little_ahead():
    prepared = []
    ahead = Lookahead(iter(range(100)), lambda batch: prepared.append(batch) or batch)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(prepared) < DEPTH + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(prepared) == DEPTH + 2  # one used, some waiting, one in hand


@pytest.mark.parametrize("end", [ValueError("rollout 2 is wrong"), StopIteration()])
def test_an_error_comes_where_the_batch_would_and_so_does_the_end(end):
    def prepare(batch):
        if batch == 2:
            raise end
        return batch

    ahead = Lookahead(iter(range(5)), prepare)
    assert [next(ahead), next(ahead)] == [0, 1]
    for _ in range(2):
        with pytest.raises(type(end)) as error:
            next(ahead)
        assert error.value is end


@pytest.mark.parametrize("waits_for_room", [True, False])
def test_the_end_of_the_process_ends_the_thread(waits_for_room):
    prepared = []

    def prepare(batch):
        prepared.append(batch)
        time.sleep(0 if waits_for_room else 0.02)
        return batch

    ahead = Lookahead(iter(range(10_000)), prepare)
    if waits_for_room:
        deadline = time.monotonic() + 5
        while len(prepared) < DEPTH + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    end_all()
    assert not ahead._thread.is_alive()
    seen = len(prepared)
    time.sleep(0.1)
    assert len(prepared) == seen  # nothing is prepared for nobody


def test_a_thread_that_does_not_end_is_left():
    block = threading.Event()
    Lookahead(iter(range(3)), lambda batch: block.wait(60))
    begin = time.monotonic()
    end_all()
    assert END_S <= time.monotonic() - begin < END_S + 5
    block.set()
