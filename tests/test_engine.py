"""The engine on a fake model: requests, limits, errors, waiting, interrupts."""

from __future__ import annotations

import gc
import pickle
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_jupyter.errors as err
from fakes import FakeModel, cold, fake_engine, letters
from mlx_jupyter.engine import serve
from mlx_jupyter.engine.options import Options
from mlx_jupyter.engine.request import Done, Failed, Prefill, Request, Tail, Ticket, Token
from mlx_jupyter.engine.sampling import Sampling
from mlx_jupyter.engine.workshop import Workshop
from probes import HANG, PHASES, Gate, Probe


class TestCounts:
    def test_the_same_prompt_twice(self, engine) -> None:
        first = engine.generate("tell me", max_tokens=5)
        again = engine.generate("tell me", max_tokens=5)
        assert again.text == first.text
        assert again.logprobs == first.logprobs
        assert again.usage.prefilled == 1

    def test_a_conversation_hits_whatever_was_stored_last(self, engine, model) -> None:
        messages: list = [{"role": "user", "content": "first"}]
        known = 0
        for turn in range(4):
            answer = engine.generate(messages, max_tokens=6)
            assert list(answer.tokens) == cold(model, answer.prompt_ids, 6)
            assert answer.usage.cached >= known
            known = len(answer.prompt_ids)
            messages = [*answer.messages, {"role": "user", "content": f"and {turn}"}]

    def test_usage_adds_up_in_every_path(self, engine) -> None:
        for answer in (
            engine.generate(tokens=letters(300), max_tokens=7),
            engine.generate(tokens=letters(300), max_tokens=1),
            list(engine.stream(tokens=letters(310), max_tokens=3))[-1].answer,
        ):
            assert answer.usage.prompt == len(answer.prompt_ids)
            assert answer.usage.prompt == answer.usage.cached + answer.usage.prefilled
            assert answer.usage.generated == len(answer.tokens) == len(answer.logprobs)
            assert answer.timing.prefilled == answer.usage.prefilled

    def test_timing_by_an_injected_clock(self, model) -> None:
        now = [0.0]

        def tick(n: int) -> None:
            now[0] += n  # a forward pass of n tokens takes n seconds

        model.before_call = tick
        with fake_engine(model, clock=lambda: now[0]) as engine:
            answer = engine.generate(tokens=letters(101), max_tokens=11)
            timing = answer.timing
            # One decode step is in flight when the first token is read.
            assert timing.prefill == 102
            assert timing.prefill_tps == pytest.approx(101 / 102)
            assert timing.ttft == 102
            assert timing.decode == 9
            assert timing.total == 111
            again = engine.generate(tokens=letters(101), max_tokens=1)
            assert (again.timing.prefill, again.usage.prefilled) == (1, 1)

    def test_what_comes_before_the_restore_is_told_apart(self, model, monkeypatch) -> None:
        now = [0.0]

        def after(seconds: int, function):
            def wrapped(*args):
                now[0] += seconds
                return function(*args)

            return wrapped

        monkeypatch.setattr(serve, "prompt_ids", after(50, serve.prompt_ids))
        monkeypatch.setattr(Workshop, "find", after(7, Workshop.find))
        with fake_engine(model, clock=lambda: now[0]) as engine:
            timing = engine.generate(tokens=letters(20), max_tokens=2).timing
        assert (timing.queued, timing.load, timing.render, timing.restore) == (0, 7, 50, 0)
        assert timing.total == 57

    def test_an_end_tokens_step_is_in_neither_half_of_the_decode_rate(self) -> None:
        now = [0.0]
        every = next(k for k in range(2, 99) if len(cold(FakeModel(eos_every=k), [97], 9)) == 3)
        model = FakeModel(eos_every=every)
        with fake_engine(model, clock=lambda: now[0]) as engine:

            def tick(n: int) -> None:
                now[0] += 1

            model.before_call = tick
            answer = engine.generate(tokens=[97], max_tokens=99)
        assert (len(answer.tokens), answer.finish) == (3, "stop")
        assert (answer.timing.decoded, answer.timing.decode) == (2, 2)
        assert answer.timing.decode_tps == 1

    @pytest.mark.parametrize("how", ["cancelled", "failed"])
    def test_a_request_that_never_ran_reports_too(self, model, how: str) -> None:
        now = [0.0]
        gate = model.before_call = Gate()
        with fake_engine(model, clock=lambda: now[0]) as engine:
            engine.submit(engine.request("first", max_tokens=1))
            assert gate.reached.wait(HANG)
            ticket = engine.submit(engine.request("hi", model="none" if how == "failed" else None))
            if how == "cancelled":
                ticket.cancel()
            now[0] = 9.0
            gate.open.set()
            assert ticket.wait(HANG)
        answer = ticket.outcome.answer
        assert (answer.timing.queued, answer.timing.total) == (9, 9)
        assert (answer.prompt_ids, answer.usage.prompt) == ((), 0)
        assert [(m.role, m.content) for m in answer.messages] == [("user", "hi"), ("assistant", "")]

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_max_tokens_is_exact(self, engine, n: int) -> None:
        answer = engine.generate("go", max_tokens=n)
        assert (len(answer.tokens), answer.finish) == (n, "length")

    def test_the_end_token_ends_and_is_not_counted(self) -> None:
        model = FakeModel(eos_every=3)
        with fake_engine(model) as engine:
            answer = engine.generate(tokens=letters(20), max_tokens=200)
            assert answer.finish == "stop"
            assert list(answer.tokens) == cold(model, letters(20), 200)
            engine.check()

    def test_answers_are_plain_data(self, engine) -> None:
        answer = engine.generate("hi", max_tokens=2)
        assert pickle.loads(pickle.dumps(answer)) == answer
        assert str(answer) == answer.text
        assert answer.messages[-1].ids == answer.tokens


class TestContext:
    def test_a_prompt_one_over_the_limit_fails_before_any_compute(self, model) -> None:
        calls = []
        model.before_call = calls.append
        with fake_engine(model, context=50) as engine:
            with pytest.raises(err.ContextOverflow) as caught:
                engine.generate(tokens=letters(51))
            assert (caught.value.prompt, caught.value.limit) == (51, 50)
            assert "51" in str(caught.value)
            assert "50" in str(caught.value)
            assert not calls
            full = engine.generate(tokens=letters(50), max_tokens=10)
            assert (full.finish, full.usage.generated, full.usage.prompt) == ("length", 0, 50)
            some = engine.generate(tokens=letters(45), max_tokens=10)
            assert (some.finish, some.usage.generated) == ("length", 5)
            engine.check()

    def test_status_shows_the_limit_in_force(self, model) -> None:
        with fake_engine(model, context=50) as engine:
            assert engine.status().context == 50
            assert engine.status().context_origin


class TestText:
    def test_pieces_add_up_to_the_answer(self, engine) -> None:
        events = list(engine.stream("hello", max_tokens=30))
        answer = events[-1].answer
        assert "".join(e.text for e in events if isinstance(e, Token)) == answer.text
        assert [e.id for e in events if isinstance(e, Token)] == list(answer.tokens)

    def test_a_stop_string_leaves_no_part_of_itself(self, engine) -> None:
        whole = engine.generate("story", max_tokens=40).text
        stop = whole[10:14]
        events = list(engine.stream("story", max_tokens=40, stop=stop))
        answer = events[-1].answer
        assert answer.text == whole[: whole.index(stop)]
        assert (answer.finish, answer.stopped_by) == ("stop", stop)
        assert "".join(e.text for e in events if isinstance(e, Token)) == answer.text
        assert answer.messages[-1].ids is None

    def test_a_possible_stop_string_is_released_at_the_end(self, engine) -> None:
        whole = engine.generate("story", max_tokens=12).text
        events = list(engine.stream("story", max_tokens=12, stop=whole[-3:] + "!"))
        assert events[-1].answer.text == whole
        assert "".join(e.text for e in events if isinstance(e, Token)) == whole

    def test_text_held_back_until_the_end_token_is_the_tail(self) -> None:
        model = FakeModel(eos_every=7)
        with fake_engine(model) as engine:
            whole = engine.generate("story", max_tokens=200)
            assert whole.finish == "stop"
            ticket = engine.submit(engine.request("story", stop=[whole.text[-2:] + "!"]))
            *_, tail, done = ticket.events()
            assert (tail, done.answer.text) == (Tail(whole.text[-2:]), whole.text)
            assert ticket.partial().text == whole.text
            assert ticket.partial().messages == done.answer.messages

    def test_a_stop_string_that_only_the_end_completes(self, engine, monkeypatch) -> None:
        class Late:
            """A detokenizer that gives everything at the end."""

            last_segment = ""

            def add_token(self, token: int) -> None: ...

            def finalize(self) -> None:
                self.last_segment = "abc STOP"

        tokenizer = engine._shop.find(None).tokenizer
        monkeypatch.setattr(type(tokenizer), "detokenizer", property(lambda self: Late()))
        *_, done = events = list(engine.stream("x", max_tokens=4, stop="STOP"))
        assert (done.answer.text, done.answer.finish) == ("abc ", "stop")
        assert (done.answer.stopped_by, done.answer.messages[-1].ids) == ("STOP", None)
        assert "".join(e.text for e in events if isinstance(e, Token)) == "abc "


class TestErrors:
    @pytest.mark.parametrize("when", ["prefill", "decode"])
    def test_an_exception_in_the_model(self, engine, model, when: str) -> None:
        before = engine.generate("fine", max_tokens=4)

        def boom(n: int) -> None:
            if (n > 1) == (when == "prefill"):
                raise RuntimeError("the kernel of hell")

        model.before_call = boom
        ticket = engine.submit(engine.request("fine, then not", max_tokens=9))
        assert ticket.wait(HANG)
        model.before_call = None
        events = list(ticket.events())
        assert [type(e) for e in events if isinstance(e, Done | Failed)] == [Failed]
        assert isinstance(ticket.outcome.error, err.ComputeError)
        assert "the kernel of hell" in str(ticket.outcome.error)
        engine.check()
        assert engine.generate("fine", max_tokens=4).text == before.text

    def test_an_exception_in_the_sampler(self, engine, monkeypatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Sampling, "_sample", lambda *_: 1 / 0)
            with pytest.raises(err.ComputeError, match="ZeroDivisionError"):
                engine.generate("x")
        engine.check()
        assert engine.generate("x", max_tokens=2).tokens

    def test_an_exception_in_the_template(self, engine) -> None:
        tokenizer = engine._shop.find(None).tokenizer._tokenizer
        good = tokenizer.chat_template
        tokenizer.chat_template = "{{ messages[0].content | no_such_filter }}"
        with pytest.raises(err.LLMError):
            engine.generate("x")
        tokenizer.chat_template = good
        assert engine.generate("x", max_tokens=2).tokens

    def test_the_failed_request_reports_its_statistics(self, engine, model) -> None:
        calls = []

        def boom(n: int) -> None:
            calls.append(n)
            if len(calls) == 3:
                raise RuntimeError("boom")

        model.before_call = boom
        ticket = engine.submit(engine.request(tokens=letters(600)))
        assert ticket.wait(HANG)
        assert ticket.outcome.answer.usage.prefilled == 256

    def test_errors_hold_no_arrays(self, engine, model) -> None:
        def boom(n: int) -> None:
            raise RuntimeError("boom")

        model.before_call = boom
        ticket = engine.submit(engine.request("x"))
        assert ticket.wait(HANG)
        trace = ticket.outcome.error.__cause__.__traceback__
        while trace is not None:
            assert not trace.tb_frame.f_locals
            trace = trace.tb_next


class TestWaiting:
    def test_the_end_is_seen_by_everyone_every_time(self, engine) -> None:
        ticket = engine.submit(engine.request("x", max_tokens=5))
        seen: list = []
        threads = [
            threading.Thread(
                target=lambda: seen.append((ticket.result(HANG), list(ticket.events())))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert len(seen) == 8
        assert len({a.text for a, _ in seen}) == 1
        assert ticket.result() == ticket.result() == list(ticket.events())[-1].answer
        engine.close()
        assert engine._thread.ended.wait(0)
        assert engine._thread.ended.wait(0)

    def test_a_reader_that_goes_away_holds_up_nothing(self, engine) -> None:
        reader = engine.stream("x", max_tokens=500)
        next(reader)
        del reader
        engine.submit(engine.request("y", max_tokens=50))  # never read
        assert engine.generate("z", max_tokens=3).tokens

    def test_requests_queue_in_order_from_any_thread(self, engine, model) -> None:
        gate = model.before_call = Gate()
        tickets = [engine.submit(engine.request(f"{i}", max_tokens=2)) for i in range(5)]
        assert gate.reached.wait(HANG)
        ended: list[int] = []
        threads = [
            threading.Thread(target=lambda i=i, t=t: (t.wait(HANG), ended.append(i)))
            for i, t in enumerate(tickets)
        ]
        for thread in threads:
            thread.start()
        assert not any(t.ended for t in tickets)
        gate.open.set()
        for thread in threads:
            thread.join(HANG)
        assert sorted(ended) == [0, 1, 2, 3, 4]
        assert all(t.result().tokens for t in tickets)

    def test_status_tree_and_plan_never_wait_for_a_prefill(self, engine, model) -> None:
        engine.generate("known", max_tokens=2)
        gate = model.before_call = Gate()
        ticket = engine.submit(engine.request("long", max_tokens=2))
        assert gate.reached.wait(HANG)
        assert engine.status().waiting == 1
        assert list(engine.tree().nodes())
        assert engine.plan("known").recomputed == 1
        gate.open.set()
        assert ticket.wait(HANG)

    def test_plans_say_what_then_happens(self, engine) -> None:
        for text in ("one", "one", "one more", "two", "one"):
            plan = engine.plan(text)
            answer = engine.generate(text, max_tokens=3)
            assert (plan.cached, plan.recomputed) == (answer.usage.cached, answer.usage.prefilled)
            assert sum(c.tokens for c in answer.why) == answer.usage.prefilled

    def test_five_hundred_requests_stay_within_the_budget(self, model) -> None:
        gc.collect()
        before = mx.get_active_memory()  # of other tests' models in this process
        with fake_engine(model, cache_bytes=200_000) as engine:
            engine.generate("warm up", max_tokens=2)
            for i in range(500):
                engine.generate(f"{i % 7} {'x' * (i % 90)} {i}", max_tokens=2)
            memory = engine.status().memory
            assert memory.live + memory.stored <= 200_000
            assert mx.get_active_memory() - before <= (memory.weights + 200_000) * 1.05
            engine.check()


class TestCancel:
    def test_in_the_third_prefill_chunk(self, engine, model) -> None:
        calls = []
        gate = Gate(lambda n: len(calls) == 3)

        def hook(n: int) -> None:
            calls.append(n)
            gate(n)

        model.before_call = hook
        ticket = engine.submit(engine.request(tokens=letters(1000), max_tokens=3))
        assert gate.reached.wait(HANG)
        ticket.cancel()
        gate.open.set()
        answer = ticket.result(HANG)
        assert (answer.finish, len(calls)) == ("cancelled", 3)
        model.before_call = None
        again = engine.generate(tokens=letters(1000), max_tokens=3)
        assert again.usage.cached == 3 * 128
        assert list(again.tokens) == cold(model, letters(1000), 3)

    def test_in_decode_keeps_the_text(self, engine, model) -> None:
        ticket = engine.submit(engine.request("x", max_tokens=1000))
        for event in ticket.events():
            if isinstance(event, Token):
                ticket.cancel()
        answer = ticket.result()
        assert answer.finish == "cancelled"
        assert answer.text
        assert answer.usage.generated == len(answer.tokens)
        engine.check()

    def test_while_queued_computes_nothing(self, engine, model) -> None:
        gate = model.before_call = Gate()
        first = engine.submit(engine.request("first", max_tokens=2))
        assert gate.reached.wait(HANG)
        second = engine.submit(engine.request("second", max_tokens=2))
        second.cancel()
        gate.open.set()
        assert second.result(HANG).finish == "cancelled"
        assert second.result().usage.prompt == 0
        assert first.result(HANG).finish == "length"

    def test_closing_a_stream_cancels_it(self, engine) -> None:
        reader = engine.stream("x", max_tokens=4000)
        assert isinstance(next(reader), Prefill)
        reader.close()
        assert engine.generate("y", max_tokens=2).tokens

    def test_settle_gives_a_partial_answer_at_once(self, engine, model) -> None:
        gate = Gate(lambda n: n == 1 and calls[0] > 5)
        calls = [0]

        def hook(n: int) -> None:
            calls[0] += 1
            gate(n)

        model.before_call = hook
        ticket = engine.submit(engine.request("x", max_tokens=1000))
        assert gate.reached.wait(HANG)
        ticket.cancel()
        partial = ticket.settle(0.0)
        assert partial.finish == "cancelled"
        assert partial.prompt_ids
        gate.open.set()
        whole = ticket.result(HANG)
        assert whole.text.startswith(partial.text)


def test_interrupts_at_random_times(model) -> None:
    """SIGINT in the caller's thread, 50 times in each phase; the next answer is as if cold."""
    dice = random.Random(5)
    with fake_engine(model) as engine:
        probe = Probe(model)
        for round_ in range(200):
            phase = PHASES[round_ % 4]
            ids = letters(dice.randrange(300, 700), seed=round_)
            count = dice.randrange(12, 30)
            gate = Gate()
            if phase == "queue":
                model.before_call = gate
                engine.submit(Request(tokens=letters(5), options=Options(max_tokens=2)))
                assert gate.reached.wait(HANG)
                sender = threading.Thread(target=probe.step, args=("queue",))
            left = {"prefill": dice.randrange(2), "decode": dice.randrange(10)}.get(phase, 0)
            probe.arm(phase, left)
            with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT012 - it may come late
                if phase == "queue":
                    sender.start()
                engine.generate(tokens=ids, max_tokens=count)
                assert probe.sent.wait(HANG)
                time.sleep(HANG)  # the signal is on its way
            if isinstance(caught.value, err.Cancelled):
                assert caught.value.answer.finish in ("cancelled", "length", "stop")
            model.before_call = None
            gate.open.set()
            engine.check()
            after = engine.generate(tokens=ids, max_tokens=3)
            assert list(after.tokens) == cold(model, ids, 3)
            model.before_call = probe.hook
        probe.restore()
        assert all(hits == 50 for hits in probe.hits.values()), probe.hits


class TestEnd:
    def test_close_is_idempotent_and_final(self, model) -> None:
        engine = fake_engine(model)
        engine.close()
        engine.close()
        with pytest.raises(err.EngineClosed):
            engine.generate("x")
        assert engine.status().closed

    def test_close_ends_what_runs_and_refuses_what_waits(self, model) -> None:
        engine = fake_engine(model)
        gate = model.before_call = Gate()
        running = engine.submit(engine.request("x", max_tokens=50))
        waiting = engine.submit(engine.request("y", max_tokens=50))
        assert gate.reached.wait(HANG)
        closer = threading.Thread(target=engine.close)
        closer.start()
        gate.open.set()
        closer.join(HANG)
        assert running.result().finish == "cancelled"
        with pytest.raises(err.EngineClosed):
            waiting.result()

    def test_a_ticket_takes_no_event_after_its_end(self) -> None:
        ticket = Ticket(Request(text="x"))
        ticket.emit(Failed(err.BadRequest("no")))
        with pytest.raises(AssertionError):
            ticket.emit(Prefill(0, 1, 0))

    @pytest.mark.parametrize("how", ["idle", "busy", "queued", "forgotten", "dropped"])
    def test_the_process_ends_with_status_zero(self, how: str) -> None:
        script = {
            "idle": "e.generate('x', max_tokens=3)",
            "busy": "r = e.stream('x', max_tokens=4000); next(r)",
            "queued": "[e.submit(e.request('x', max_tokens=500)) for _ in range(20)]",
            "dropped": "e = e.submit(e.request('x' * 2000, max_tokens=3)).result()",
            "forgotten": "e.generate('x', max_tokens=3); del e",
        }[how]
        code = f"from fakes import fake_engine\ne = fake_engine()\n{script}\n"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
