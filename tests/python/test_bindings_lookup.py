# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/lookup.cc: the builtin that vLLM calls once per key."""

import gc
import sys
import weakref

import pytest
from small_core import attach, key, keys, make_cache, store


class Context:
    """Replaces vLLM's ReqContext."""

    def __init__(self, handle):
        self.handle = handle


class Asked:
    """A handle_of callback that counts its calls."""

    def __init__(self):
        self.contexts = []

    def __call__(self, context):
        self.contexts.append(context)
        return context.handle


RESULTS = (object(), object(), object(), object())
MISS, HIT, PENDING, RETRY = RESULTS


@pytest.fixture
def region(tmp_path):
    return attach(tmp_path)


@pytest.fixture
def cache(region):
    return make_cache(region[0])


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def lookup(cache, asked):
    return cache.make_lookup(RESULTS, asked)


def test_the_four_results_are_the_given_objects(cache, region, lookup):
    context = Context(cache.begin_request("r"))
    (stored,) = store(cache, region[1][0], context.handle, keys(1))
    ((filling,), *_) = cache.prepare_store(context.handle, keys(1, first=2))
    assert lookup(stored, context) is HIT
    assert lookup(filling, context) is PENDING
    assert lookup(key(3), context) is MISS


def test_the_builtin_agrees_with_the_python_version(cache, region, lookup):
    context = Context(cache.begin_request("r"))
    store(cache, region[1][0], context.handle, keys(5))
    for k in keys(10):
        assert lookup(k, context) is RESULTS[cache.lookup(context.handle, k)]


def test_handle_of_is_called_once_per_context(cache, lookup, asked):
    a, b = (Context(cache.begin_request(name)) for name in "ab")
    for context in (a, a, a, b, b, a):
        lookup(key(1), context)
    assert asked.contexts == [a, b, a]


def test_a_forgotten_context_is_released_and_looked_up_again(cache, lookup, asked):
    context = Context(cache.begin_request("r"))
    lookup(key(1), context)
    asked.contexts.clear()
    before = sys.getrefcount(context)
    cache.forget_context()
    assert sys.getrefcount(context) == before - 1
    lookup(key(1), context)
    assert asked.contexts == [context]


def test_the_end_of_a_request_forgets_its_context(cache, lookup, asked):
    context = Context(cache.begin_request("r"))
    lookup(key(1), context)
    cache.end_request(context.handle)
    context.handle = cache.begin_request("s")
    lookup(key(1), context)
    assert len(asked.contexts) == 2


def test_a_context_is_held_so_that_its_address_cannot_be_reused(cache):
    lookup = cache.make_lookup(RESULTS, lambda context: context.handle)
    context = Context(cache.begin_request("r"))
    gone = weakref.ref(context)
    lookup(key(1), context)
    del context
    gc.collect()
    assert gone() is not None
    cache.forget_context()
    assert gone() is None


@pytest.mark.parametrize("bad", [b"", b"abcd", b"x" * 48])
def test_a_key_of_a_bad_length_is_a_value_error(cache, lookup, bad):
    with pytest.raises(ValueError, match=f"{len(bad)} bytes: keys have 5 to 47"):
        lookup(bad, Context(cache.begin_request("r")))


@pytest.mark.parametrize("arguments", [(), (b"x" * 36,), (b"x" * 36, None, None), ("text" * 9, None)])
def test_other_arguments_are_a_type_error(lookup, arguments):
    with pytest.raises(TypeError):
        lookup(*arguments)


def test_an_exception_of_handle_of_propagates_and_leaves_the_function_usable(cache):
    good = Context(cache.begin_request("r"))
    answers = {id(good): good.handle}
    lookup = cache.make_lookup(RESULTS, lambda context: answers[id(context)])
    with pytest.raises(KeyError):
        lookup(key(1), Context(0))
    assert lookup(key(1), good) is MISS


@pytest.mark.parametrize(
    ("answer", "error"), [(-1, OverflowError), (1 << 40, ValueError), (77, ValueError), ("0", TypeError)]
)
def test_a_result_that_is_not_a_handle_is_refused(cache, answer, error):
    cache.begin_request("r")
    with pytest.raises(error):
        cache.make_lookup(RESULTS, lambda context: answer)(key(1), object())


def test_make_lookup_needs_four_results(cache, asked):
    with pytest.raises(TypeError, match="four"):
        cache.make_lookup((1, 2, 3), asked)


def test_the_function_keeps_the_cache_alive(region):
    lookup = make_cache(region[0]).make_lookup(RESULTS, lambda context: 0)
    gc.collect()
    with pytest.raises(ValueError, match="request handle 0"):
        lookup(key(1), object())


def test_functions_of_one_cache_do_not_disturb_each_other(cache, asked):
    context = Context(cache.begin_request("r"))
    first, second = cache.make_lookup(RESULTS, asked), cache.make_lookup((1, 2, 3, 4), asked)
    assert (first(key(1), context), second(key(1), context)) == (MISS, 1)
    del first
    cache.forget_context()
    assert second(key(1), context) == 1


def test_a_cycle_through_the_function_is_collected(cache):
    class Manager:
        def __init__(self):
            self.lookup = cache.make_lookup(RESULTS, self.handle_of)

        def handle_of(self, context):
            return context.handle

    manager = Manager()
    gone = weakref.ref(manager)
    manager.lookup(key(1), Context(cache.begin_request("r")))
    del manager
    gc.collect()
    assert gone() is None


def test_references_stay_balanced_over_many_calls(cache):
    lookup = cache.make_lookup(RESULTS, lambda context: context.handle)
    context, other = (Context(cache.begin_request(name)) for name in "ab")
    lookup(key(1), other)
    counted = [context, MISS, lookup, key(1)]
    before = [sys.getrefcount(o) for o in counted]
    for _ in range(1000):
        lookup(counted[3], context)
        lookup(counted[3], other)
    assert [sys.getrefcount(o) for o in counted] == before


def test_span_of_is_called_once_per_admission(cache, asked):
    spans = []

    def span_of(context, key):
        spans.append((context, key))
        return 16, 64

    lookup = cache.make_lookup(RESULTS, asked, span_of)
    one, other = Context(cache.begin_request("a")), Context(cache.begin_request("b"))
    for _ in range(2):
        for context in (one, other):
            lookup(key(1), context)
        cache.end_step()
    assert spans == [(one, key(1)), (other, key(1))]
    cache.end_request(one.handle)
    assert cache.report(one.handle)["miss_tokens"] == {"not_stored": 64}


def test_errors_and_invalid_results_of_span_of_propagate(cache, asked):
    context = Context(cache.begin_request("a"))
    lookup = cache.make_lookup(RESULTS, asked, lambda context, key: (1,))
    with pytest.raises(TypeError):
        lookup(key(1), context)
    lookup = cache.make_lookup(RESULTS, asked, lambda context, key: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lookup(key(1), context)
    lookup = cache.make_lookup(RESULTS, asked, lambda context, key: None)
    assert lookup(key(1), context) is MISS


def test_a_partial_chunk_counts_only_its_own_tokens(cache, region):
    """vLLM looks up a partial chunk after the whole ones: 40 tokens, chunks of 16, units of 4."""
    ends = {key(1): 16, key(2): 32, key(11): 40, key(12): 36}
    lookup = cache.make_lookup(
        RESULTS,
        lambda context: context.handle,
        lambda context, asked: (16, 32),
        lambda context, asked: ends[asked] % 16,
    )
    cold = Context(cache.begin_request("cold"))
    assert [lookup(asked, cold) for asked in (key(1), key(11), key(12))] == [MISS] * 3
    offered = [key(1), key(2), key(12)]
    accepted, ticket, *_ = cache.prepare_store(cold.handle, offered, [ends[asked] for asked in offered])
    region[1][0].report(0, ticket, 0)
    cache.complete_store(accepted)
    assert sum(cache.report(cold.handle)["miss_tokens"].values()) == 32, "its two chunks"
    warm = Context(cache.begin_request("warm"))
    assert [lookup(asked, warm) for asked in (key(1), key(2), key(11), key(12))] == [HIT, HIT, MISS, HIT]
    cache.prepare_load(warm.handle, [key(1), key(2), key(12)])
    report = cache.report(warm.handle)
    assert sum(report["hit_tokens"].values()) == 36
    assert sum(report["miss_tokens"].values()) == 0
