"""The page "Chat": talk to a run's adapter and to its base, side by side."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.runtime.gpus import list_gpus

from ..app_context import AppContext
from ..drawing.markup import Markup, join, link, note, tag
from ..reading.prompts import list_prompts
from ..reading.sanitize import show_safely
from ..running.chatting import Chat, End, Piece, Waiting
from .adapters import find_device_words, make_choice, offer_checkpoints, open_page
from .refreshing import QUIET, Parts, make_html, show_if_any
from .runs import draw_gpus

_REFRESH_S = 1.0
_STREAM_S = 0.1
_EXAMPLE_WIDTH = 100
_SOURCES = {"base": "Base", "adapter": "With adapter"}
_NO_TALK = json.dumps({source: [] for source in _SOURCES})

# Messages by source: `role` and `content` as in a chat template, and a `note` on how an answer ended.
Talk = dict[str, list[dict[str, str]]]


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    timer = gr.Timer(_REFRESH_S)
    # Kept in the browser, so that a conversation survives a restarted server or an unloaded model.
    talks = gr.Textbox(visible=False, value=_NO_TALK)
    make_html(tag("h1", "Chat"))
    empty = make_html(visible=False)
    with gr.Column(visible=False) as body:
        with gr.Row():
            run, checkpoint, gpus, ranks = make_choice()
            load = gr.Button("Load", size="md", elem_classes="at-field", scale=1, min_width=100)
            unload = gr.Button("Unload", size="md", elem_classes="at-field", interactive=False, scale=1, min_width=100)
        free = make_html(visible=False)
        state = make_html()
        with gr.Row():
            panes = {}
            for source in _SOURCES:
                with gr.Column(min_width=300):
                    panes[source] = make_html(draw_talk(source, []))
        told = make_html(visible=False)
        example = gr.Dropdown([], value=None, label="Example prompts of the run and its dataset", visible=False)
        question = gr.Textbox(
            "", label="Message", placeholder="Enter sends, Shift+Enter starts a new line", lines=1, max_lines=8
        )
        with gr.Row():
            send = gr.Button("Send", variant="primary", min_width=90)
            stop = gr.Button("Stop", interactive=False, min_width=90)
            reset = gr.Button("Reset", min_width=90)
        with gr.Accordion("Settings", open=False), gr.Row():
            asks_base = gr.Checkbox(True, label="Also ask the base model", min_width=160)
            system = gr.Textbox("", label="System message", min_width=260)
            temperature = gr.Slider(0, 2, 0.7, step=0.05, label="Temperature", info="0: greedy decoding", min_width=200)
            top_p = gr.Slider(0.05, 1, 0.9, step=0.05, label="Top p", info="1: all tokens", min_width=200)
            max_new_tokens = gr.Number(256, label="Max new tokens", precision=0, min_width=120)
            seed = gr.Number(42, label="Seed", precision=0, min_width=120)
    parts = Parts(free=free, state=state, unload=unload)
    devices = [run, checkpoint, gpus, ranks]

    def arrive(request: gr.Request) -> list[Any]:
        return open_page(context, request, "Train one, then chat with it here.", ("chat", "Choose another run"), True)

    def refresh(seen: str, name: str | None) -> dict[Any, Any]:
        if not name:
            return gr.skip()
        found = list_gpus()
        loaded = context.chats.find(name)
        others = [chat.name for chat in context.chats.list() if chat.name != name]
        shown = {
            "free": show_if_any(draw_gpus(found) if found else ""),
            "state": draw_state(loaded, others),
            "unload": gr.update(interactive=loaded is not None and loaded.is_alive),
        }
        return parts.send(seen, shown)

    def offer(name: str | None) -> list[Any]:
        try:
            prompts = list_prompts(context.runs.get(name or "").options(), context.allowed.check)
        except ConfigError:  # an adapter that no run of lorashard has left
            prompts = []
        choices = [(textwrap.shorten(show_safely(text), _EXAMPLE_WIDTH), text) for text in prompts]
        loaded = context.chats.find(name or "")
        offered = offer_checkpoints(context, name, "" if loaded is None else loaded.checkpoint)
        return [offered, gr.update(choices=choices, value=None, visible=bool(choices))]

    def begin_loading(name: str | None, checkpoint: str, gpus: Sequence[int], ranks: float | None) -> Any:
        try:
            context.chats.load(name or "", find_device_words(gpus, ranks), checkpoint)
            return show_if_any("")
        except ConfigError as error:
            return show_if_any(note(str(error), "error"))

    def end_loading(name: str | None) -> Any:
        if (chat := context.chats.find(name or "")) is not None:
            chat.unload()
        return show_if_any("")

    def answer(
        kept: str,
        text: str,
        name: str | None,
        checkpoint: str,
        gpus: Sequence[int],
        ranks: float | None,
        asks_base: bool,
        system: str,
        temperature: float,
        top_p: float,
        max_new_tokens: float | None,
        seed: float | None,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        if not text.strip():
            yield {told: show_if_any(note("Type a message first.", "error"))}
            return
        sources = list(_SOURCES) if asks_base else ["adapter"]
        before: Talk = json.loads(kept)
        exchange = Exchange(before, text, sources)
        yield {
            question: "",
            send: gr.update(interactive=False),
            stop: gr.update(interactive=True),
            told: show_if_any(""),
            **{panes[source]: draw_talk(source, exchange.talk[source]) for source in sources},
        }
        problem, unsent = "", gr.skip()
        try:
            chat = context.chats.find(name or "")
            if (
                chat is None or not chat.is_alive or chat.checkpoint != checkpoint
            ):  # which is refused while the other is loaded
                chat = context.chats.load(name or "", find_device_words(gpus, ranks), checkpoint)
            settings = collect_settings(temperature, top_p, max_new_tokens, seed)
            for event in chat.answer(str(request.session_hash), exchange.write_prompts(system), settings):
                if isinstance(event, Waiting):
                    yield {told: show_if_any(note(event.sentence))}
                    continue
                exchange.take(event)
                pane = draw_talk(event.source, exchange.talk[event.source])
                yield {told: show_if_any(""), panes[event.source]: pane}
                time.sleep(_STREAM_S)  # later pieces are sent together
        except ConfigError as error:
            problem = note(str(error), "error")
            unsent = gr.skip() if exchange.has_answer else text
        after = exchange.close()
        yield {
            question: unsent,
            told: show_if_any(problem),
            talks: json.dumps(after),
            **{panes[source]: draw_talk(source, after[source]) for source in _SOURCES},
        }

    def cancel(name: str | None, request: gr.Request) -> None:
        if (chat := context.chats.find(name or "")) is not None:
            chat.cancel(str(request.session_hash))

    def forget(name: str | None, request: gr.Request) -> list[Any]:
        cancel(name, request)
        return [_NO_TALK, show_if_any(""), *(draw_talk(source, []) for source in panes)]

    def switch(before: str | None, name: str | None, request: gr.Request) -> list[Any]:
        is_arrival = before is None
        return [name, *([gr.skip()] * len(forgotten) if is_arrival else forget(before, request))]

    offering = {"fn": offer, "inputs": run, "outputs": [checkpoint, example]} | QUIET
    refreshed = parts.refresh_by(timer, refresh, [run])
    gr.on(None, arrive, None, [empty, body, run, gpus], **QUIET)
    example.input(lambda text: [text, None], example, [question, example], **QUIET)
    load.click(begin_loading, devices, told, **QUIET).then(**refreshed)
    unload.click(end_loading, run, told, **QUIET).then(**refreshed)
    asked = [talks, question, *devices, asks_base, system, temperature, top_p, max_new_tokens, seed]
    changed = [question, send, stop, told, talks, *panes.values()]
    answering = gr.on([send.click, question.submit], answer, asked, changed, **QUIET)
    # Not with the answer's last words: a message that is sent before its event has ended is dropped.
    answering.then(lambda: [gr.update(interactive=True), gr.update(interactive=False)], None, [send, stop], **QUIET)
    stop.click(cancel, run, None, **QUIET)
    forgotten, talked_with = [talks, told, *panes.values()], gr.State(None)
    reset.click(forget, run, forgotten, **QUIET)
    # Not `input`: Gradio's lists send it when they are left, whatever was chosen.
    switching = run.change(switch, [talked_with, run], [talked_with, *forgotten], **QUIET)
    switching.then(**refreshed).then(**offering)
    checkpoint.change(forget, run, forgotten, **QUIET)


class Exchange:
    """A question to one or two sources, and their answers so far."""

    def __init__(self, talk: Talk, text: str, sources: Sequence[str]) -> None:
        question = {"role": "user", "content": text}
        self._before = talk
        self._sources = sources
        self._ended: set[str] = set()
        self.talk = talk | {source: [*talk[source], question] for source in sources}

    @property
    def has_answer(self) -> bool:
        """Whether anything has been answered."""
        return any(self.talk[source][-1]["role"] == "assistant" for source in self._sources)

    def write_prompts(self, system: str) -> Talk:
        """Return the messages that each source answers."""
        first = [{"role": "system", "content": system}] if system.strip() else []
        return {
            source: first + [{name: said[name] for name in ("role", "content")} for said in self.talk[source]]
            for source in self._sources
        }

    def take(self, event: Piece | End) -> None:
        """Append to an answer, or end it."""
        talk = self.talk[event.source]
        if talk[-1]["role"] != "assistant":
            talk.append({"role": "assistant", "content": ""})
        if isinstance(event, Piece):
            talk[-1]["content"] += event.text
        else:
            talk[-1]["note"] = describe_end(event)
            self._ended.add(event.source)

    def close(self) -> Talk:
        """Return the conversations to keep, without a question that a source did not answer at all."""
        kept = dict(self.talk)
        for source in self._sources:
            last = kept[source][-1]
            if last["role"] != "assistant" or (not last["content"] and "stopped" in last.get("note", "")):
                kept[source] = self._before[source]
            elif source not in self._ended:
                last["note"] = "cut off"
        return kept


def collect_settings(
    temperature: float, top_p: float, max_new_tokens: float | None, seed: float | None
) -> dict[str, Any]:
    """Return the generation settings for `lorashard chat --json`; an empty field takes the command's default."""
    settings: dict[str, Any] = {"do_sample": temperature > 0}
    settings |= {"temperature": temperature, "top_p": top_p} if temperature else {}
    numbers = {"max_new_tokens": max_new_tokens, "seed": seed}
    return settings | {name: int(value) for name, value in numbers.items() if value is not None}


def describe_end(end: End) -> str:
    """Say how an answer ended."""
    count = f"{end.num_tokens} {'token' if end.num_tokens == 1 else 'tokens'} in {end.seconds:.1f} s"
    if end.is_canceled:
        return f"{count}, stopped"
    return f"{count}, reached the maximum" if end.is_cut else count


def draw_talk(source: str, messages: Sequence[dict[str, str]]) -> Markup:
    """Return a conversation. Model output is shown as plain text, never as markup."""
    turns = []
    for message in messages:
        is_user = message["role"] == "user"
        name = tag("div", "You" if is_user else _SOURCES[source], class_="who")
        content = tag("div", message["content"], class_="said", dir="auto")
        more = tag("div", message["note"], class_="subdued") if message.get("note") else Markup("")
        turns.append(tag("div", name, content, more, class_=f"turn turn-{'user' if is_user else 'model'}"))
    if messages and messages[-1]["role"] == "user":
        turns.append(tag("div", "\u2026", class_="turn turn-model", aria_label="no answer yet"))
    if not turns:
        turns.append(tag("p", "No messages yet.", class_="subdued"))
    title = tag("h2", _SOURCES[source])
    talk = tag("div", tag("div", *turns), class_="talk", role="region", tabindex=0, aria_label=_SOURCES[source])
    return join((title, talk))


def draw_state(chat: Chat | None, others: Sequence[str]) -> Markup:
    """Say whether the model is loaded, and which others are."""
    if chat is None:
        main = note("Not loaded. Press Load, or send a message.")
    elif chat.state == "ended":
        main = note(f"Not loaded: {chat.describe()}", "info" if chat.is_unloaded else "warning")
    else:
        where = ", ".join(filter(None, (chat.checkpoint, " ".join(chat.device_words))))
        main = note(f"{chat.state.capitalize()} ({where}): {chat.describe()}")
    if not others:
        return main
    there = join((link("chat", name, run=name) for name in others), ", ")
    return join((main, tag("p", "Also loaded: ", there, class_="subdued")))
