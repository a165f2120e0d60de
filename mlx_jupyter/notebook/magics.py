"""``%llm`` and ``%%llm``: parse, ask, follow, show, keep.

Thin on purpose: the grammar, the look-up, the display, the footer and the turns are rooms of their
own. What is decided here is the order of things around an interrupt: nothing between submitting a
request and keeping its answer can be torn apart, and the prompt is back at once.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from traitlets import observe

from mlx_jupyter import runtime
from mlx_jupyter.engine.private import names as saved_names
from mlx_jupyter.engine.request import Failed, Loaded, Loading
from mlx_jupyter.errors import Cancelled, LLMError
from mlx_jupyter.notebook import commands, config, grammar, memory_reports, options, reports
from mlx_jupyter.notebook.cells import strip_final_newline
from mlx_jupyter.notebook.chat import Chat, Exchange
from mlx_jupyter.notebook.columns import board_for
from mlx_jupyter.notebook.completion import Completer
from mlx_jupyter.notebook.display import screen_for
from mlx_jupyter.notebook.following import follow, run_each
from mlx_jupyter.notebook.footer import footer, plan_line
from mlx_jupyter.notebook.identity import Calls
from mlx_jupyter.notebook.interpolate import InterpolationError, interpolate
from mlx_jupyter.notebook.interrupt import Interrupts
from mlx_jupyter.notebook.keeping import SETTLE, KeepingCommands, Outcome
from mlx_jupyter.notebook.markdown import plain
from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from mlx_jupyter.conversation.answer import Answer
    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.engine.request import Ticket
    from mlx_jupyter.models.info import ModelInfo
    from mlx_jupyter.notebook.display import Screen

SAMPLE = 16  # prefilled tokens that make a reading speed worth remembering
ENOUGH = 256  # prefilled tokens that make a later one as good as any


@magics_class
class LLMMagics(KeepingCommands, config.Settings, Magics):
    """The magics; their traits are the defaults that ``%config LLMMagics`` sets."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell, parent=shell)
        self.project = config.project(Path.cwd())
        self._chat = Chat(Calls(shell))
        self._speeds: dict[str, tuple[int, float]] = {}  # model → (tokens, tokens a second)
        self._known: set[ModelInfo] = set()  # whose templates were spoken of
        runtime.watch(self._chat.attach)
        self.completer = Completer(
            self._chat.names, _model_names, lambda: list(shell.user_ns), saved_names
        )

    @observe(*config.ENGINE)
    def _too_late(self, change: Any) -> None:
        if runtime.current() is not None:
            print(  # noqa: T201 - to the user, in answer to %config
                f"{change.name} holds for the next engine: restart the kernel to use it.",
                file=sys.stderr,
            )

    @observe(*config.STANDING)
    def _lifted(self, change: Any) -> None:
        """Set back to None, a setting of the engine's is the engine's own default again."""
        engine = runtime.current()
        if change.new is None and engine is not None:
            setattr(engine, change.name, config.STANDING[change.name])

    # --- entrances ---------------------------------------------------------------------------

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    def llm(
        self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None
    ) -> Any:
        """Ask the model.

        ``%llm prompt`` on a line, or ``%%llm`` with the prompt on the lines below.
        """
        return self._guarded(line, cell, local_ns).value

    def show_line(self, line: str, local_ns: Mapping[str, Any] | None = None) -> Any:
        """A bare ``%llm`` line: like ``llm``, but gives nothing to display twice."""
        return self._bare(self._guarded(line, None, local_ns))

    def show_cell(self, line: str, body: str) -> Any:
        """A ``%%llm`` cell with its body as written."""
        return self._bare(self._guarded(line, body, None))

    def _bare(self, outcome: Outcome) -> Any:
        """What a bare call evaluates to: None when it is shown already, and then it is ``_``."""
        if not outcome.shown:
            return outcome.value
        if not outcome.kept:
            self._remember(outcome.value)
        return None

    def _remember(self, value: Any) -> None:
        """Make ``value`` the cell's result (``_``, ``Out``) without displaying it."""
        hook: Any = self.shell.displayhook  # it has no types
        hook.update_user_ns(value)
        hook.fill_exec_result(value)

    def _guarded(self, line: str, cell: str | None, local_ns: Mapping[str, Any] | None) -> Outcome:
        """Run it; our own errors become one line."""
        try:
            if cell is None:
                command = grammar.parse_line(line)
            else:
                command = grammar.parse_cell(line, strip_final_newline(cell))
            return self._run(command, local_ns)
        except (commands.CommandError, InterpolationError) as error:
            raise UsageError(plain(str(error))) from None
        except (LLMError, Cancelled) as error:
            raise _one_line(error) from None

    # --- commands ----------------------------------------------------------------------------

    def _run(self, command: commands.Command, local_ns: Mapping[str, Any] | None) -> Outcome:
        match command:
            case commands.Ask():
                return self._ask(self._completed(command, local_ns))
            case commands.Load(names, adapter):
                infos = tuple(self._load(name, adapter) for name in names)
                return Outcome(infos[0] if len(infos) == 1 else infos, shown=True)
            case commands.Unload(name):
                gone = self._engine().unload(name)
                text = f"Unloaded {', '.join(gone)}." if gone else "Nothing was loaded."
                return Outcome(reports.Page(text, gone))
            case commands.Models():
                return Outcome(reports.models(self._engine().models(), _aliases()))
            case commands.Status():
                return Outcome(reports.status(self._engine().status()))
            case commands.Ps():
                return Outcome(memory_reports.ps(self._engine().status()))
            case commands.Tree():
                from mlx_jupyter.widgets.trie import tree_report

                return Outcome(tree_report(self._engine().tree()))
            case commands.Pages():
                from mlx_jupyter.widgets.pages import pages_report

                return Outcome(pages_report(self._engine()))
            case commands.Branches():
                return Outcome(self._chat.branches(self._engine()))
            case commands.Log(branch):
                return Outcome(self._chat.log(branch, self._engine()))
            case commands.Drop(branch):
                return Outcome(self._chat.drop(branch, self._engine()))
            case commands.Save(branch, path):
                return self._save(branch, path)
            case commands.Restore(branch, path):
                return self._restore(branch, path)
            case commands.Forget(branch):
                return self._forget(branch)
            case commands.Store(clear):
                return self._store(clear=clear)
            case commands.Pin(branch, on):
                return Outcome(self._chat.pin(branch, self._engine(), on=on))
            case commands.PinModel(name, on):
                return Outcome(reports.pinned(name, self._engine(), on=on))
            case commands.Verify():
                found = self._engine().verify()
                return Outcome(reports.Page(f"{found}.", found))
            case commands.Help(topic):
                return Outcome(reports.Page(options.help_text(topic)))
            case commands.Overview():
                return Outcome(reports.overview(self._engine().status(), self._chat.names()))

    def _completed(self, ask: commands.Ask, local_ns: Mapping[str, Any] | None) -> commands.Ask:
        """The command with its variables looked up and its open options filled from settings."""
        scopes = [dict(local_ns)] if local_ns else []
        names = ChainMap(*scopes, self.shell.user_ns)
        filled = ask.filled(lambda text: interpolate(text, names))
        return replace(filled, **config.complete(filled, self, self.project))

    def _engine(self) -> Engine:
        runtime.configure(**config.engine_settings(self, self.project))
        engine = runtime.engine()
        config.keep(engine, self, self.project)
        return engine

    def _ask(self, ask: commands.Ask) -> Outcome:
        if not ask.prompt.strip():
            raise commands.CommandError("The prompt is empty once its variables are put in.")
        if ask.raw and (ask.system is not None or ask.branch is not None):
            raise commands.CommandError(
                "--raw continues a text as it is: it goes with no system prompt and no @branch."
            )
        engine = self._engine()
        exchanges = self._chat.exchanges(ask, engine)
        if ask.dry_run:
            return Outcome(_plans(engine, exchanges))
        if len(exchanges) > 1:
            return self._ask_each(ask, engine, exchanges)
        (exchange,) = exchanges
        screen = screen_for(self.shell, ask.view or "md")
        with Interrupts() as interrupts:
            request = engine.request(exchange.prompt, owner=exchange.owner, **exchange.how)
            ticket = engine.submit(request)
            ahead = engine.status().waiting - 1
            if ahead > 0:
                noun = "request" if ahead == 1 else "requests"
                screen.show([Loading(f"Waiting for {ahead} {noun} ahead")])
            follow(ticket, interrupts, screen)
            answer = self._finish(ticket, screen, exchange)
            if ask.output is not None:
                self.shell.user_ns[ask.output] = answer
        if interrupts.count:
            if ask.output is None:
                self._remember(answer)
            error = Cancelled(answer)
            if answer.finish != "cancelled":
                error.args = ("Interrupted; the answer was complete already.",)
            raise error
        return Outcome(answer, shown=True, kept=ask.output is not None)

    def _ask_each(
        self, ask: commands.Ask, engine: Engine, exchanges: tuple[Exchange, ...]
    ) -> Outcome:
        """The same question to several models; their answers as a tuple."""
        board = board_for(self.shell, ask.view or "md", ask.models)
        answers, error = run_each(engine, exchanges, board, self._finish)
        if ask.output is not None:
            self.shell.user_ns[ask.output] = answers
        if error is not None:
            if ask.output is None:
                self._remember(answers)
            raise error
        return Outcome(answers, shown=True, kept=ask.output is not None)

    def _finish(self, ticket: Ticket, screen: Screen, exchange: Exchange) -> Answer:
        """The answer as far as it got, shown and kept.

        Raises:
            LLMError: the request failed.
        """
        if not ticket.ended:
            ticket.cancel()
        outcome = ticket.outcome
        if isinstance(outcome, Failed):
            screen.fail()
            raise outcome.error
        answer = ticket.settle(SETTLE)
        outcome = ticket.outcome
        if isinstance(outcome, Failed) and outcome.answer is None:
            screen.fail()
            raise outcome.error
        exchange.keep(answer)
        told = footer(answer, rate=self._rate(answer), continued=exchange.continued)
        loaded = next((m for m in self._engine().models() if m.name == answer.model), None)
        told = " · ".join([told, *(self._faults(loaded) if loaded is not None else ())])
        screen.finish(answer.text, told)
        return answer

    def _faults(self, info: ModelInfo) -> tuple[str, ...]:
        """What a model's chat template does to reuse; told once, with its load or first answer."""
        if info in self._known:
            return ()
        self._known = {*(m for m in self._known if m.name != info.name), info}
        return info.template_faults

    def _rate(self, answer: Answer) -> float:
        """Prompt tokens a second of the answer's model, from its best long prefill so far."""
        seen, rate = self._speeds.get(answer.model, (SAMPLE, 0.0))
        count = answer.timing.prefilled
        if count >= min(seen, ENOUGH):
            rate = answer.timing.prefill_tps
            self._speeds[answer.model] = count, rate
        return rate

    def _load(self, name: str, adapter: str | None) -> ModelInfo:
        engine = self._engine()
        screen = screen_for(self.shell, "text")
        with Interrupts() as interrupts:
            ticket = engine.submit_load(name, adapter=adapter)
            follow(ticket, interrupts, screen)
            outcome = ticket.outcome
            if isinstance(outcome, Loaded):
                info = outcome.info
                screen.finish(
                    f"{info.name} is loaded: {info.family}, {info.dtype}, "
                    f"{human_bytes(info.weight_bytes)}; context {info.context:,} tokens."
                    + "".join(f"\n{fault}" for fault in self._faults(info)),
                    "",
                )
            else:
                screen.fail()
                ticket.cancel()
        if isinstance(outcome, Failed):
            raise outcome.error
        if interrupts.count or not isinstance(outcome, Loaded):
            error = Cancelled(ticket.settle(SETTLE))
            done = isinstance(outcome, Loaded)
            error.args = (f"Interrupted; {name} is{'' if done else ' not'} loaded.",)
            raise error
        return outcome.info


LLMMagics.llm.__doc__ = "\n\n".join(
    [str(LLMMagics.llm.__doc__), options.help_text(), options.help_text("options")]
)


def _plans(engine: Engine, exchanges: tuple[Exchange, ...]) -> reports.Page:
    """What each model would reuse."""
    plans = tuple(engine.plan(e.prompt, owner=e.owner, **e.how) for e in exchanges)
    if len(plans) == 1:
        return reports.Page(plan_line(plans[0]), plans[0])
    names = (str(exchange.how["model"]) for exchange in exchanges)
    lines = (f"{name}: {plan_line(plan)}" for name, plan in zip(names, plans, strict=True))
    return reports.Page("\n".join(lines), plans)


def _one_line(error: LLMError | Cancelled) -> LLMError | Cancelled:
    """The error with a rendering of one line instead of a traceback."""
    text = plain(" ".join(str(error).split()))
    line = text if isinstance(error, Cancelled) else f"{type(error).__name__}: {text}"
    error.__dict__["_render_traceback_"] = lambda: [line]
    return error


def _aliases() -> list[str]:
    from mlx_jupyter.models.sources import ALIASES

    return list(ALIASES)


def _model_names() -> list[str]:
    engine = runtime.current()
    loaded = [info.name for info in engine.models()] if engine is not None else []
    return list(dict.fromkeys([*loaded, *_aliases()]))
