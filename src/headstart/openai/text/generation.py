"""Generation: converts the engine's Outputs of one request to text, aligned tokens and an OpenAI finish reason.

Text is returned only when it is final: whole characters that cannot become part of a stop string. Tokens and their
log-probabilities are returned together with the end of their text. In total there is one entry per token, including
the token that ended the text (as in vLLM).
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from headstart.core.batch import PromptTokenBreakdown, RequestStepOutput
from headstart.core.request import FinishReason, Request
from headstart.openai.chat.chat_delta import ChatDelta, join_deltas
from headstart.openai.generation_params import GenerationParams
from headstart.openai.text.detokenizer import Detokenizer
from headstart.openai.text.logprob_table import LogprobTable, TokenEntry
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.text.stop_strings import StopMatch, StopStringAutomata, StopStringSearch
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.parsers.chat_parser import ChatParser


class OutputDelta(NamedTuple):
    """New output of a choice since the previous Delta."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenEntry] = ()  # if requested: one per token id
    finish_reason: str | None = None  # "stop", "length"; "abort" and "error" are not sent to clients
    stop_reason: int | str | None = None  # the stop string, or the stop token if it is not the model's own
    must_abort: bool = False  # finished by a stop string or max_tokens=0: the engine's request must be aborted
    error: str | None = None  # of finish_reason "error"
    echo: EchoedPrompt | None = None  # the prompt's text and, if requested, its logprobs; before the output
    prompt_logprobs: Sequence[TokenEntry] = ()  # in a whole response only: of every prompt token but the first
    chat: ChatDelta | None = None  # the text of a chat, split into its parts; None: all of it is content

    @property
    def num_logprob_entries(self) -> int:
        """Number of log-probabilities with their alternatives, of the echo too."""
        return len(self.logprobs) + (0 if self.echo is None else len(self.echo))

    @property
    def has_output(self) -> bool:
        """Whether there is anything to send to the client."""
        return bool(self.text or self.token_ids or self.logprobs or self.finish_reason or self.echo is not None)


_NOTHING = OutputDelta()
MAX_CHATS = 64  # deltas that are kept until they are joined


class _Waiting(NamedTuple):
    """A token whose text is not completely returned yet."""

    end: int  # its end in the whole text, in characters
    token_id: int
    entry: TokenEntry | None


class GeneratedOutput:
    """The output of one engine request. Accumulates text and logprobs for responses that are not streamed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        params: GenerationParams,
        *,
        prompt: EchoedPrompt | None = None,
        stops: StopStringAutomata | None = None,
    ) -> None:
        """`prompt` and `stops` are shared with the other choices of the prompt; None: create them."""
        self.prompt = EchoedPrompt(tokenizer, request.prompt, params) if prompt is None else prompt
        self._tokenizer = tokenizer
        self._request = request
        self._params = params
        kept = () if params.chat is None else tuple(params.chat.special or ())
        self._detokenizer = Detokenizer(
            tokenizer, request.prompt, skip_special_tokens=params.skip_special_tokens, kept=kept
        )
        self._stops = StopStringSearch(StopStringAutomata(params.stop) if stops is None else stops)
        self._prompt_length = len(self.prompt.text)  # characters of the echoed prompt
        self._length = self._prompt_length  # characters so far, including the echoed prompt
        self._held = ""  # the last of these characters, not returned yet
        self._waiting: list[_Waiting] = []  # the tokens of the held text; few, and an empty deque takes 700 bytes
        self._echoed = not params.echo
        self._parser = None if params.chat is None else params.chat.make_parser()
        self._chats: list[ChatDelta] = []  # unless streamed
        self._is_named = params.chat is not None and params.chat.is_named
        self._call_markers = params.chat.family.markers if params.chat is not None and params.chat.family else ()
        self._silent = _NOTHING  # tokens of a stream whose text the parser holds back
        self._parts: list[str] = []
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt)
        self._token_ids = array("i")
        self.logprobs = LogprobTable()
        self.breakdown = PromptTokenBreakdown()  # of the prompt, once there is a token
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.chat: ChatDelta | None = None  # at the end and not of a stream: the parts; None: all of it is content

    @property
    def text_with_echo(self) -> str:
        """The text returned so far, including an echoed prompt."""
        return self.output_text if self.echo is None else self.echo.text + self.output_text

    @property
    def output_text(self) -> str:
        """The output text returned so far, without an echoed prompt."""
        return "".join(self._parts)

    @property
    def num_cached_tokens(self) -> int:
        """Number of cached prompt tokens; 0 until the first token."""
        return self.breakdown.num_cached

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether `prompt_logprobs` was requested; with an echo they are part of `logprobs` instead."""
        return self._params.sampling.prompt_logprobs is not None and not self._params.echo

    @property
    def echo(self) -> EchoedPrompt | None:
        """The prompt, if it was returned before the output."""
        return self.prompt if self._params.echo and self._echoed else None

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, including the one that ended the text."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The generated token ids."""
        return self._token_ids.tolist()

    def update(self, output: RequestStepOutput) -> OutputDelta:
        """Process an engine output and return the new output for the client; an empty Delta once finished."""
        if self.finish_reason is not None:
            return _NOTHING
        self.breakdown = output.breakdown or self.breakdown
        self.prompt.append_logprobs(output.prompt_logprobs)
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return self._fail(output)
        if not output.token_ids and output.finish_reason is None:
            return _NOTHING
        if self._request.sampling.prompt_logprobs is not None:
            self.prompt.is_complete = True
        running = output.finish_reason is None
        if self._params.max_tokens == 0:
            return self._show("length", must_abort=running)
        match = self._take(output)
        if match is not None:
            self._cut(match)
            return self._show("stop", match.text, must_abort=running)
        if running:
            return self._show(None)
        if output.finish_reason is FinishReason.LENGTH:
            return self._show("length")
        last = output.token_ids[-1] if output.token_ids else None
        return self._show("stop", None if last in self._tokenizer.eos_token_ids else last)

    def _take(self, output: RequestStepOutput) -> StopMatch | None:
        """Convert the tokens to text up to the first stop string, which is returned; at the end, flush held text."""
        for index, token_id in enumerate(output.token_ids):
            is_last = index == len(output.token_ids) - 1
            is_silent = (
                is_last and output.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output
            )
            start = self._length
            self._token_ids.append(token_id)
            piece = "" if is_silent else self._detokenizer.push(token_id)
            if is_last and output.finish_reason is not None:
                piece += self._detokenizer.finish()
            match = self._grow(piece)
            entry = None
            if self._params.wants_logprobs and index < len(output.logprobs):
                chosen = output.logprobs[index]
                entry = TokenEntry(chosen.token_id, chosen.logprob, chosen.top, start)
            self._waiting.append(_Waiting(self._length, token_id, entry))
            if match is not None:
                return match
        return None

    def _grow(self, piece: str) -> StopMatch | None:
        self._length += len(piece)
        self._held += piece
        armed = self.num_tokens > self._request.sampling.min_tokens
        return self._stops.feed_and_find_match(piece, armed=armed)

    def _cut(self, match: StopMatch) -> None:
        """Drop the text from the stop string on, or after it if it is included in the output."""
        keep = self._prompt_length + (match.end if self._params.include_stop_str_in_output else match.start)
        cut = self._length - keep
        assert 0 <= cut <= len(self._held), f"{cut} characters to cut and {len(self._held)} held back"
        self._held = self._held[: len(self._held) - cut]
        self._length = keep

    def _show(
        self, finish_reason: str | None, stop_reason: int | str | None = None, *, must_abort: bool = False
    ) -> OutputDelta:
        """Return the final part of the held text with its tokens; at the end all of it."""
        num_held = 0 if finish_reason else self._stops.num_held
        text, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        shown = self._length - len(self._held)
        token_ids: list[int] = []
        entries: list[TokenEntry] = []
        for token in self._waiting:
            if not finish_reason and token.end > shown:
                break
            token_ids.append(token.token_id)
            if token.entry is not None:
                entries.append(token.entry)
        del self._waiting[: len(token_ids)]
        if not self._params.stream:
            self._parts.append(text)
            if finish_reason:  # one string takes less memory while the response waits to be sent
                self._parts = [self.output_text]
            self.logprobs.extend(entries)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        echo = None if self._echoed else self.prompt
        self._echoed = True
        delta = OutputDelta(text, tuple(token_ids), tuple(entries), finish_reason, stop_reason, must_abort, echo=echo)
        return delta if self._parser is None else self._with_chat(delta, self._parser)

    def _with_chat(self, delta: OutputDelta, parser: ChatParser) -> OutputDelta:
        """Return the delta with the parts of its text. That of a stream without a new part waits for the next one."""
        is_last = delta.finish_reason is not None
        chat = parser.feed(delta.text)
        if is_last:
            stopped_by = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
            if stopped_by in self._call_markers and not self._params.include_stop_str_in_output:
                end = parser.feed(stopped_by)  # the end of a call, but no content
                chat = join_deltas(chat, end._replace(content=end.content.removesuffix(stopped_by)))
            chat = join_deltas(chat, parser.finish(is_cut=delta.finish_reason == "length" or stopped_by != ""))
            if delta.finish_reason == "stop" and parser.num_calls and not self._is_named:
                self.finish_reason = "tool_calls"
        held, self._silent = self._silent, _NOTHING
        delta = delta._replace(
            text=held.text + delta.text,
            token_ids=(*held.token_ids, *delta.token_ids),
            logprobs=(*held.logprobs, *delta.logprobs),
            finish_reason=self.finish_reason,
            chat=chat,
        )
        if not self._params.stream:
            self._chats.append(chat)
            if is_last or len(self._chats) >= MAX_CHATS:
                self._chats = [join_deltas(*self._chats)]
            self.chat = self._chats[0] if is_last else None
        if is_last or any(chat) or not self._params.stream:
            return delta
        self._silent = delta
        return _NOTHING

    def _fail(self, output: RequestStepOutput) -> OutputDelta:
        """Finish with "abort" or "error"; held text is not returned."""
        self.error = output.error
        self.finish_reason = "abort" if output.finish_reason is FinishReason.ABORT else "error"
        return OutputDelta(finish_reason=self.finish_reason, error=output.error)
