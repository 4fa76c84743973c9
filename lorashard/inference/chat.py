"""Chat with an adapter: questions from a person or a program, answers streamed as they are generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList, TextStreamer

from ..config.use_options import ChatOptions, Source
from ..data.formats import Message
from ..data.prompts import PromptWriter
from ..data.sources import BadRow
from ..errors import DataError
from ..runtime import dist
from ..runtime.output import say
from .chat_lines import Answered, Ask, Listener, open_listener
from .generation import Generator, check_length, describe_placement, read_sampling
from .load import load_for_use, load_saved_tokenizer

_CACHED_TOKENS = 8192
# Ranks wait for the next request in a collective, which times out after some minutes: rank 0 sends one before that.
_PATIENCE_S = 60.0


def chat(options: ChatOptions) -> None:
    """Answer requests until there are no more.

    Raises:
        UserError: a mistake in the options or the adapter; all ranks raise alike.

    Ranks: run by every rank. Rank 0 reads and prints. Where base units are gathered, all ranks generate the same
        tokens; elsewhere the other ranks return at once.
    """
    tokenizer = load_saved_tokenizer(options.adapter, options)
    writer = PromptWriter(tokenizer)
    _check_system(options, writer)
    model = load_for_use(options.adapter, options, _CACHED_TOKENS)
    rank = dist.get_rank()
    placement = describe_placement(model)
    say(rank, placement)
    speaker = _Speaker(options, model, tokenizer, writer)
    if not speaker.is_collective and rank != 0:
        return
    if not speaker.is_collective and dist.get_world_size() > 1:
        say(rank, "with this placement rank 0 answers alone, and the other ranks have ended")
    with open_listener(options) if rank == 0 else nullcontext(Listener()) as listener:
        listener.greet(placement, tokenizer.chat_template is not None)
        while True:
            ask = speaker.host_group.broadcast_object(listener.read(_PATIENCE_S))  # rank 0's
            if ask is None:
                return
            if ask.kind == "reset":
                speaker.reset()
                listener.confirm_reset()
            elif ask.kind == "answer":
                speaker.answer(ask, listener)


class _Speaker:
    """The model that answers, and its conversations.

    A person has one conversation, which continues with the last answer; a program has one for each source.
    """

    def __init__(
        self, options: ChatOptions, model: PeftModel, tokenizer: PreTrainedTokenizerBase, writer: PromptWriter
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._writer = writer
        self._stop_ids = writer.find_stop_ids()
        self._is_for_program = options.as_json
        self.is_collective = self._build_generator(options).is_collective
        self.host_group = dist.HostGroup.of_all() if self.is_collective else dist.HostGroup()
        self._num_answers = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversations."""
        self._turns: dict[str, list[Message]] = {}

    def answer(self, ask: Ask, listener: Listener) -> None:
        """Answer a request and store the answer; a request that cannot be answered is refused and not stored.

        Ranks: collective over all ranks where base units are gathered.
        """
        try:
            prompts = {source: self._write(ask, source) for source in ask.sources}
        except (BadRow, DataError) as error:
            listener.refuse(str(error))
            return
        self._num_answers += 1
        is_stored = ask.conversations is None and self._tokenizer.chat_template is not None
        is_canceled = False
        for source, (messages, token_ids) in prompts.items():
            begin_s = time.perf_counter()
            listener.begin(source)
            new: list[int] = []
            if not is_canceled:
                new, is_canceled = self._generate(ask, source, token_ids, listener)
            is_cut = len(new) == ask.options.max_new_tokens
            listener.end(Answered(source, len(new), time.perf_counter() - begin_s, is_cut, is_canceled))
            if is_stored and (new or not is_canceled):
                content = self._tokenizer.decode(new, skip_special_tokens=True)
                self._turns[self._name_turns(source)] = [*messages, {"role": "assistant", "content": content}]

    def _write(self, ask: Ask, source: Source) -> tuple[list[Message], list[int]]:
        """Return the conversation so far without the system message, and all of it as tokens."""
        messages = [*self._turns.get(self._name_turns(source), []), {"role": "user", "content": ask.content}]
        if ask.conversations is not None:
            token_ids = self._writer.write(ask.conversations[source])
        elif self._tokenizer.chat_template is not None:
            token_ids = self._writer.write([*_build_system(ask.options), *messages])
        else:
            token_ids = self._writer.write(ask.content)
        check_length(self._model, len(token_ids), ask.options.max_new_tokens, "the conversation")
        return messages, token_ids

    def _name_turns(self, source: Source) -> str:
        return source if self._is_for_program else ""

    def _generate(self, ask: Ask, source: Source, token_ids: list[int], listener: Listener) -> tuple[list[int], bool]:
        """Return the new tokens, and whether the answer was canceled before its end."""
        generator = self._build_generator(ask.options)
        streamer = _Streamer(self._tokenizer, lambda text: listener.add(source, text), generator.stop_ids)
        cancel = _Cancel(listener.is_canceled, self.host_group)
        torch.manual_seed(ask.options.seed + self._num_answers if ask.seed is None else ask.seed)
        with (
            self._model.disable_adapter() if source == "base" else nullcontext(),
            cancel.watching(self._model) if self._is_for_program else nullcontext(),
        ):
            new = generator.generate([token_ids], streamer, StoppingCriteriaList([cancel]))[0]
        # The conversation continues with rank 0's answer, which was printed.
        return self.host_group.broadcast_object((new, cancel.is_set))

    def _build_generator(self, options: ChatOptions) -> Generator:
        return Generator(self._model, self._tokenizer, options.max_new_tokens, self._stop_ids, read_sampling(options))


class _Cancel(StoppingCriteria):
    """Ends an answer that is no longer wanted, on all ranks.

    Rank 0 learns of it and broadcasts it before each forward. All ranks take part in every forward, also one whose own
    answer has ended, which asks no stopping criterion any more.
    """

    def __init__(self, is_asked: Callable[[], bool], host_group: dist.HostGroup) -> None:
        """Make one.

        Args:
            host_group: of the ranks that answer together. With NCCL each token would wait for the device.
        """
        self._is_asked = is_asked
        self._host_group = host_group
        self.is_set = False

    @contextmanager
    def watching(self, model: PeftModel) -> Iterator[None]:
        """Check before each forward of the model whether the answer is still wanted."""
        hook = model.get_base_model().register_forward_pre_hook(self._look)
        try:
            yield
        finally:
            hook.remove()

    def _look(self, *_: object) -> None:
        self.is_set = self._host_group.broadcast_object(self.is_set or self._is_asked())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.full((len(input_ids),), self.is_set, dtype=torch.bool, device=input_ids.device)


class _Streamer(TextStreamer):
    """Passes text on as tokens are generated, without the prompt and the token that ends the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add: Callable[[str], None], stop_ids: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._add = add
        self._stop_ids = stop_ids

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt or int(value) not in self._stop_ids:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._add(text)


def _build_system(options: ChatOptions) -> list[Message]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _check_system(options: ChatOptions, writer: PromptWriter) -> None:
    """Refuse a system message that the chat template does not accept, before the model is loaded."""
    if not options.system:
        return
    try:
        writer.write([*_build_system(options), {"role": "user", "content": "hello"}])
    except BadRow as error:
        raise DataError(error.detail, option="system") from error
