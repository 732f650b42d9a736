"""Generation: what the engine says of one request (Output) becomes text, aligned tokens and an OpenAI finish reason.

Text is shown only when nothing can change it: whole characters, and nothing that may yet become a stop string. Tokens
and their log-probabilities come out together with the end of their text; in all, there is one entry per token, the one
that ended the text included (as vLLM counts).
"""

from collections import deque
from typing import NamedTuple

from headstart.core.batch import Ledger, Output, TokenLogprob
from headstart.core.request import FinishReason, Request
from headstart.server.detokenizer import Detokenizer
from headstart.server.params import GenerationParams
from headstart.server.stops import StopMatch, StopStrings
from headstart.server.tokenizer import Tokenizer


class TokenEntry(NamedTuple):
    """Log-probability of one token and its best alternatives, and where its text begins in the whole text."""

    token_id: int
    logprob: float | None  # None: the first token of an echoed prompt, which nothing precedes
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    offset: int  # characters


class Delta(NamedTuple):
    """What is new since the last one."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenEntry, ...] = ()  # if asked for: one per token id, and before them the echoed prompt's
    finish_reason: str | None = None  # "stop", "length"; "abort", "error": never sent as such
    stop_reason: int | str | None = None  # the stop string, or the stop token if it is not the model's own
    must_abort: bool = False  # it ended here but not in the engine: abort the engine's request
    error: str | None = None  # of finish_reason "error"
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of a whole answer only: of every prompt token but the first

    @property
    def has_news(self) -> bool:
        """Whether a client should see it."""
        return bool(self.text or self.token_ids or self.logprobs or self.finish_reason)


_NOTHING = Delta()


class _Waiting(NamedTuple):
    """A token whose text is not shown to its end yet."""

    end: int  # characters of the whole text up to its end
    token_id: int | None  # None: of an echoed prompt
    entry: TokenEntry | None


class Generation:
    """One engine request on its way to a client. Accumulates everything, for answers that are not streamed."""

    def __init__(self, tokenizer: Tokenizer, request: Request, params: GenerationParams) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, request.prompt, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop)
        self._prompt_length = 0  # characters of the echoed prompt
        self._length = 0  # characters known, echoed prompt included
        self._held = ""  # of those, the last ones, not shown yet
        self._waiting: deque[_Waiting] = deque()
        self._echoed = not params.echo
        self._parts: list[str] = []
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenEntry] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.ledger = Ledger()  # of the prompt, once there is a token
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._parts)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were taken over; 0 until the first token."""
        return self.ledger.cached

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether they were asked for by that name; an echo shows them among the others."""
        return self._request.sampling.prompt_logprobs is not None and not self._params.echo

    @property
    def num_tokens(self) -> int:
        """Tokens generated, the one that ended the text included."""
        return len(self.token_ids)

    def update(self, output: Output) -> Delta:
        """Takes the engine's news and returns what is new for the client; nothing once it has finished."""
        if self.finish_reason is not None:
            return _NOTHING
        self.ledger = output.ledger or self.ledger
        self.prompt_logprobs.extend(output.prompt_logprobs)
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return self._fail(output)
        if not output.token_ids and output.finish_reason is None:
            return _NOTHING
        if not self._echoed:
            self._echo_prompt()
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

    def _take(self, output: Output) -> StopMatch | None:
        """Turns the tokens into text, up to the first stop string; what the finished text still owes comes last."""
        for index, token_id in enumerate(output.token_ids):
            is_last = index == len(output.token_ids) - 1
            is_silent = (
                is_last and output.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output
            )
            start = self._length
            self.token_ids.append(token_id)
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
        armed = len(self.token_ids) > self._request.sampling.min_tokens
        return self._stops.feed(piece, armed=armed)

    def _cut(self, match: StopMatch) -> None:
        """Drops the text from the stop string on, or behind it if it is wanted."""
        keep = self._prompt_length + (match.end if self._params.include_stop_str_in_output else match.start)
        cut = self._length - keep
        assert 0 <= cut <= len(self._held), f"{cut} characters to cut and {len(self._held)} held back"
        self._held = self._held[: len(self._held) - cut]
        self._length = keep

    def _show(
        self, finish_reason: str | None, stop_reason: int | str | None = None, *, must_abort: bool = False
    ) -> Delta:
        """Moves what is certain from held to shown: all of it at the end."""
        num_held = 0 if finish_reason else self._stops.num_held
        text, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        shown = self._length - len(self._held)
        token_ids: list[int] = []
        entries: list[TokenEntry] = []
        while self._waiting and (finish_reason or self._waiting[0].end <= shown):
            token = self._waiting.popleft()
            if token.token_id is not None:
                token_ids.append(token.token_id)
            if token.entry is not None:
                entries.append(token.entry)
        if text:
            self._parts.append(text)
        self.logprobs.extend(entries)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return Delta(text, tuple(token_ids), tuple(entries), finish_reason, stop_reason, must_abort)

    def _fail(self, output: Output) -> Delta:
        """It ended for a reason that is no answer; what was held back stays back."""
        self.error = output.error
        self.finish_reason = "abort" if output.finish_reason is FinishReason.ABORT else "error"
        return Delta(finish_reason=self.finish_reason, error=output.error)

    def _echo_prompt(self) -> None:
        """Puts the prompt's text, and its log-probabilities if wanted, before the output; stop strings ignore it."""
        self._echoed = True
        reader = Detokenizer(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens)
        prompt = self._request.prompt
        for index, token_id in enumerate(prompt):
            start = self._length
            piece = reader.push(token_id) + (reader.finish() if index == len(prompt) - 1 else "")
            self._held += piece
            self._length += len(piece)
            if self._params.wants_logprobs:
                known = self.prompt_logprobs[index - 1] if 0 < index <= len(self.prompt_logprobs) else None
                entry = TokenEntry(token_id, known and known.logprob, known.top if known else (), start)
                self._waiting.append(_Waiting(self._length, None, entry))
        self._prompt_length = self._length
